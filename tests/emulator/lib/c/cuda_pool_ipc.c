/* SPDX-License-Identifier: Apache-2.0 */

/* Memory pools of other processes. A pool that was made for it can be opened by others,
 * and then its allocations, one by one. The sentences in quotes are of the "CUDA Driver
 * API 13.4", Stream Ordered Memory Allocator, and of the programming guide's IPC Memory
 * Pools.
 *
 * What has an imported allocation open holds the physical memory that it is part of, here
 * the pool's whole piece, whatever becomes of the pool: "The imported memory must be freed
 * from all importing processes before being freed in the exporting process", and what
 * happens to who does not, no sentence says. A descriptor of a pool holds nothing. */
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "cuda_pool.h"

/* One thing at a time gets its number from the world. */
static pthread_mutex_t sharing = PTHREAD_MUTEX_INITIALIZER;

static struct gone {
    uint64_t id;
    struct gone *next;
} *gone; /* changed under the lock */

void let_go_later(uint64_t shared)
{
    struct gone *g = shared ? malloc(sizeof *g) : NULL;
    if (!g)
        return;
    *g = (struct gone){shared, gone};
    __atomic_store_n(&gone, g, __ATOMIC_RELEASE);
}

void pools_let_go(void)
{
    if (!__atomic_load_n(&gone, __ATOMIC_ACQUIRE))
        return;
    lock();
    struct gone *list = gone;
    __atomic_store_n(&gone, NULL, __ATOMIC_RELEASE);
    unlock();
    while (list) {
        struct gone *g = list;
        list = g->next;
        close_shared(g->id);
        free(g);
    }
}

bool pool_imported(const struct pool *p) { return p->imported; }

/* --- pools ------------------------------------------------------------------ */

static bool exports(const struct pool *p) { return p && !p->imported && p->props.handleTypes; }

/* number has the world know a pool. */
static CUresult number(CUmemoryPool handle, uint64_t *id)
{
    lock();
    struct pool *p = pool_find(handle);
    bool ok = exports(p);
    int device = ok ? p->device : 0;
    *id = ok ? p->shared : 0;
    unlock();
    MUST(ok);
    if (*id)
        return CUDA_SUCCESS;
    TRY(share(&devices[device], 0, id));
    lock();
    p = pool_find(handle);
    if ((ok = exports(p)))
        p->shared = *id;
    unlock();
    if (ok)
        return CUDA_SUCCESS;
    close_shared(*id); /* it was destroyed at this moment */
    return CUDA_ERROR_INVALID_VALUE;
}

/* "To create an IPC capable mempool, create a mempool with a CUmemAllocationHandleType
 * other than CU_MEM_HANDLE_TYPE_NONE." */
API CUresult cuMemPoolExportToShareableHandle(void *out, CUmemoryPool pool, int type, unsigned long long flags)
{
    uint64_t id;
    TRY(ready());
    MUST(out && !flags && type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    pthread_mutex_lock(&sharing);
    CUresult r = number(pool, &id);
    pthread_mutex_unlock(&sharing);
    return r == CUDA_SUCCESS ? export_shared(id, out) : r;
}

API CUresult cuMemPoolImportFromShareableHandle(CUmemoryPool *out, void *handle, int type, unsigned long long flags)
{
    struct {
        char mark[8];
        uint64_t id;
    } said;
    uint64_t bytes;
    int device;
    TRY(ready());
    MUST(out && !flags && type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    MUST(recv((int)(intptr_t)handle, &said, sizeof said, MSG_PEEK | MSG_DONTWAIT) == sizeof said && memcmp(said.mark, "cuShared", 8) == 0);
    TRY(open_shared("cuMemPoolImportFromShareableHandle", said.id, &device, &bytes));
    struct property of = {.backing = BACKED_BY_CARD, .device = device, .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device}};
    CUmemPoolProps props = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .handleTypes = type, .location = of.location};
    lock();
    struct pool *p = bytes ? NULL : pool_new(&props, &of, false);
    if (p) {
        p->imported = p->on_host = true;
        p->shared = said.id;
    }
    unlock();
    *out = (CUmemoryPool)p;
    if (!p)
        close_shared(said.id);
    MUST(!bytes); /* that is the descriptor of memory */
    return p ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

/* --- allocations ------------------------------------------------------------ */

struct offer { /* CUmemPoolPtrExportData: 64 bytes */
    char mark[8];
    uint64_t pool, piece, size;
    char reserved[32];
};
_Static_assert(sizeof(struct offer) == 64, "CUmemPoolPtrExportData");
static const char offer_mark[8] = "cuPoolPt";

static struct range *exported(CUdeviceptr at)
{
    struct range *r = range_at(at);
    return r && r->kind == RANGE_POOL && exports(r->owner) ? r : NULL;
}

/* number_of has the world know the memory of which an allocation is part. */
static CUresult number_of(CUdeviceptr at, struct offer *o)
{
    uint64_t bytes = 0;
    lock();
    struct range *r = exported(at);
    struct pool *p = r ? r->owner : NULL;
    if (r) {
        *o = (struct offer){.pool = p->shared, .piece = segment_shared(r->segment, &bytes), .size = r->size};
        memcpy(o->mark, offer_mark, sizeof o->mark);
    }
    int device = p ? p->device : 0;
    unlock();
    MUST(p && o->pool); /* nobody could open it before the pool */
    if (o->piece)
        return CUDA_SUCCESS;
    TRY(share(&devices[device], bytes, &o->piece));
    lock();
    uint64_t now;
    bool ok = (r = exported(at)) && r->owner == p && !segment_shared(r->segment, &now) && now == bytes;
    if (ok)
        segment_share(p->heap, r->segment, o->piece);
    unlock();
    if (ok)
        return CUDA_SUCCESS;
    close_shared(o->piece); /* freed at this moment: the program's error */
    charge("cuMemPoolExportPointer", &devices[device], (int64_t)bytes);
    return CUDA_ERROR_INVALID_VALUE;
}

/* "Constructs shareData_out for sharing a specific allocation from an already shared memory
 * pool." */
API CUresult cuMemPoolExportPointer(struct offer *out, CUdeviceptr at)
{
    struct offer o;
    TRY(ready());
    MUST(out);
    pthread_mutex_lock(&sharing);
    CUresult r = number_of(at, &o);
    pthread_mutex_unlock(&sharing);
    if (r == CUDA_SUCCESS)
        *out = o;
    return r;
}

API CUresult cuMemPoolImportPointer(CUdeviceptr *out, CUmemoryPool handle, const struct offer *o)
{
    uint64_t bytes;
    int device;
    TRY(ready());
    MUST(out && o && memcmp(o->mark, offer_mark, sizeof o->mark) == 0);
    lock();
    struct pool *p = pool_find(handle);
    bool ok = p && p->imported && p->shared == o->pool;
    unlock();
    MUST(ok);
    TRY(open_shared("cuMemPoolImportPointer", o->piece, &device, &bytes));
    lock();
    p = pool_find(handle);
    struct range *r = p ? range_take(RANGE_IMPORTED, device, NULL, o->size) : NULL;
    if (r) {
        r->shared = o->piece;
        r->owner = p;
        p->imports++;
        p->opened += r->size;
        *out = r->at;
    }
    unlock();
    if (!r)
        close_shared(o->piece);
    return r ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

/* "The pointer may be freed with cuMemFree or cuMemFreeAsync." */
CUresult pool_close(const char *call, struct range *r)
{
    struct pool *p = r->owner;
    int device = p->device;
    let_go_later(r->shared);
    p->imports--;
    p->opened -= r->size;
    range_give(r);
    uint64_t bytes = pool_leave(p);
    unlock();
    return pool_settle(call, device, bytes);
}
