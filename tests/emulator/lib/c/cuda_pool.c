/* SPDX-License-Identifier: Apache-2.0 */

/* Memory pools, which reserve in pieces of 32 MiB and keep what they have until
 * they are trimmed, or a synchronisation finds more than their threshold. */
#include <string.h>

#include "cuda_internal.h"

#define PIECE ((uint64_t)32 << 20)

struct pool {
    int device;
    bool is_default, doomed, on_host; /* doomed: destroyed, but for allocations that live; on_host: nothing is charged */
    int reuse[3];
    uint64_t threshold, reserved, reserved_high, used, used_high;
    CUmemPoolProps props;
};
_Static_assert(sizeof(struct pool) <= OBJECT_ROOM, "a pool is an object");

bool pools_begin(void)
{
    for (int i = 0; i < device_count; i++) {
        CUmemPoolProps props = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = i}};
        struct property of = {.backing = BACKED_BY_CARD, .device = i, .location = props.location};
        if (!(devices[i].default_pool = devices[i].pool = pool_new(&props, &of, true)))
            return false;
    }
    return true;
}

struct pool *pool_new(const CUmemPoolProps *props, const struct property *of, bool is_default)
{
    struct pool *p = object_new(POOL);
    if (p)
        *p = (struct pool){.device = of->device, .is_default = is_default, .on_host = of->backing != BACKED_BY_CARD, .reuse = {1, 1, 1}, .props = *props};
    if (p)
        p->props.location = of->location;
    return p;
}

struct pool *pool_find(CUmemoryPool handle)
{
    struct pool *p = object_get(handle, POOL);
    return p && !p->doomed ? p : NULL;
}

const CUmemPoolProps *pool_props(const struct pool *p) { return &p->props; }

static uint64_t max(uint64_t a, uint64_t b) { return a > b ? a : b; }

/* shrink gives back what a pool has beyond what is used and what it is to keep;
 * it returns the bytes, which the world is told outside the lock. */
static uint64_t shrink(struct pool *p, uint64_t keep)
{
    uint64_t want = round_up(max(p->used, keep), PIECE), less = p->reserved > want ? p->reserved - want : 0;
    p->reserved -= less;
    return p->on_host ? 0 : less;
}

static CUresult settle(const char *call, int device, uint64_t bytes) { return charge(call, &devices[device], -(int64_t)bytes); }

struct visit {
    int device;
    uint64_t bytes;
};

static bool above_threshold(void *object, void *arg)
{
    struct pool *p = object;
    struct visit *v = arg;
    if (p->device == v->device && p->reserved > p->threshold)
        v->bytes += shrink(p, p->threshold);
    return true;
}

static bool beyond_use(void *object, void *arg)
{
    struct pool *p = object;
    struct visit *v = arg;
    if (p->device == v->device)
        v->bytes += shrink(p, 0);
    return true;
}

uint64_t pools_empty(int device)
{
    struct visit v = {.device = device};
    object_each(POOL, beyond_use, &v);
    return v.bytes;
}

CUresult pool_synchronize(const char *call, int device)
{
    struct visit v = {.device = device};
    lock();
    object_each(POOL, above_threshold, &v);
    unlock();
    return settle(call, device, v.bytes);
}

/* grow makes room for so many bytes in a pool, which then are used. */
static CUresult grow(const char *call, struct pool *p, uint64_t size)
{
    for (uint64_t piece = PIECE;;) {
        lock();
        uint64_t need = p->used + size > p->reserved ? p->used + size - p->reserved : 0;
        if (!need) {
            p->used += size;
            p->used_high = max(p->used_high, p->used);
            unlock();
            return CUDA_SUCCESS;
        }
        unlock();
        need = round_up(need, piece);
        CUresult r = p->on_host ? CUDA_SUCCESS : charge(call, &devices[p->device], (int64_t)need);
        if (r == CUDA_ERROR_OUT_OF_MEMORY && piece > BLOCK) {
            piece = BLOCK; /* a card that is nearly full has no whole piece left */
            continue;
        }
        if (r != CUDA_SUCCESS)
            return r;
        lock();
        p->reserved += need;
        p->reserved_high = max(p->reserved_high, p->reserved);
        unlock();
    }
}

static CUresult pool_alloc(const char *call, CUdeviceptr *out, uint64_t size, struct pool *p, CUstream s)
{
    struct context *c;
    struct graph *g;
    TRY(stream_check(s, &c));
    MUST(out && size && size <= INT64_MAX);
    TRY(capture_of(s, &g));
    if (!p)
        p = devices[c->device].pool;
    if (g)
        return graph_capture_alloc(g, s, p->device, size, out);
    uint64_t used = round_up(size, UNIT);
    pthread_mutex_lock(&growing);
    CUresult grown = grow(call, p, used);
    pthread_mutex_unlock(&growing);
    TRY(grown);
    lock();
    struct range *r = range_take(RANGE_POOL, p->device, c, size);
    if (r) {
        r->owner = p;
        *out = r->at;
    } else {
        p->used -= used;
    }
    unlock();
    return r ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static struct pool *pool_get(CUmemoryPool handle)
{
    lock();
    struct pool *p = pool_find(handle);
    unlock();
    return p;
}

API CUresult cuMemAllocAsync(CUdeviceptr *out, size_t size, CUstream s) { return pool_alloc("cuMemAllocAsync", out, size, NULL, s); }
API CUresult cuMemAllocAsync_ptsz(CUdeviceptr *out, size_t size, CUstream s) { return pool_alloc("cuMemAllocAsync_ptsz", out, size, NULL, per_thread(s)); }

static CUresult from_pool(const char *call, CUdeviceptr *out, size_t size, CUmemoryPool handle, CUstream s)
{
    TRY(ready());
    struct pool *p = pool_get(handle);
    MUST(p);
    return pool_alloc(call, out, size, p, s);
}

API CUresult cuMemAllocFromPoolAsync(CUdeviceptr *out, size_t size, CUmemoryPool pool, CUstream s)
{
    return from_pool("cuMemAllocFromPoolAsync", out, size, pool, s);
}

API CUresult cuMemAllocFromPoolAsync_ptsz(CUdeviceptr *out, size_t size, CUmemoryPool pool, CUstream s)
{
    return from_pool("cuMemAllocFromPoolAsync_ptsz", out, size, pool, per_thread(s));
}

CUresult pool_free(const char *call, struct range *r)
{
    struct pool *p = r->owner;
    int device = p->device;
    uint64_t bytes = 0;
    p->used -= round_up(r->size, UNIT);
    range_give(r);
    if (p->doomed && !p->used) {
        bytes = shrink(p, 0);
        object_free(p);
    }
    unlock();
    return bytes ? settle(call, device, bytes) : CUDA_SUCCESS;
}

static CUresult free_async(const char *call, CUdeviceptr at, CUstream s)
{
    struct context *c;
    struct graph *g;
    TRY(stream_check(s, &c));
    TRY(capture_of(s, &g));
    if (!at)
        return CUDA_SUCCESS;
    if (g)
        return graph_capture_free(g, s, at);
    lock();
    struct range *r = range_at(at);
    if (r && r->kind == RANGE_POOL)
        return pool_free(call, r);
    if (r && r->kind == RANGE_GRAPH)
        return graph_memory_free(r);
    if (r && r->kind == RANGE_DEVICE)
        return drop_unlock(call, r);
    unlock();
    return CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuMemFreeAsync(CUdeviceptr at, CUstream s) { return free_async("cuMemFreeAsync", at, s); }
API CUresult cuMemFreeAsync_ptsz(CUdeviceptr at, CUstream s) { return free_async("cuMemFreeAsync_ptsz", at, per_thread(s)); }

/* --- pools by hand --------------------------------------------------------- */

API CUresult cuMemPoolDestroy(CUmemoryPool handle)
{
    TRY(ready());
    struct pool *p = pool_get(handle);
    MUST(p && !p->is_default);
    lock();
    int device = p->device;
    uint64_t bytes = shrink(p, 0);
    property_forget(p);
    if (p->used)
        p->doomed = true; /* lives as long as its allocations */
    else
        object_free(p);
    unlock();
    return settle("cuMemPoolDestroy", device, bytes);
}

API CUresult cuMemPoolTrimTo(CUmemoryPool handle, size_t keep)
{
    TRY(ready());
    struct pool *p = pool_get(handle);
    MUST(p);
    lock();
    int device = p->device;
    uint64_t bytes = shrink(p, keep);
    unlock();
    return settle("cuMemPoolTrimTo", device, bytes);
}

API CUresult cuMemPoolGetAttribute(CUmemoryPool handle, int attribute, void *value)
{
    TRY(ready());
    struct pool *p = pool_get(handle);
    MUST(p && value);
    cuuint64_t *wide = value;
    lock();
    switch (attribute) {
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD: *wide = p->threshold; break;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT: *wide = p->reserved; break;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH: *wide = p->reserved_high; break;
    case CU_MEMPOOL_ATTR_USED_MEM_CURRENT: *wide = p->used; break;
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH: *wide = p->used_high; break;
    case 1: case 2: case 3: *(int *)value = p->reuse[attribute - 1]; break;
    default: unlock(); return property_attribute(&p->props, attribute, value);
    }
    unlock();
    return CUDA_SUCCESS;
}

API CUresult cuMemPoolSetAttribute(CUmemoryPool handle, int attribute, void *value)
{
    TRY(ready());
    struct pool *p = pool_get(handle);
    MUST(p && value);
    cuuint64_t wide = attribute >= CU_MEMPOOL_ATTR_RELEASE_THRESHOLD ? *(cuuint64_t *)value : 0;
    CUresult r = CUDA_SUCCESS;
    lock();
    switch (attribute) {
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD: p->threshold = wide; break;
    /* The marks can only be put down, to what is so now. */
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH: if (wide) r = CUDA_ERROR_INVALID_VALUE; else p->reserved_high = p->reserved; break;
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH: if (wide) r = CUDA_ERROR_INVALID_VALUE; else p->used_high = p->used; break;
    case 1: case 2: case 3: p->reuse[attribute - 1] = *(int *)value; break;
    default: r = CUDA_ERROR_INVALID_VALUE;
    }
    unlock();
    return r;
}

API CUresult cuMemPoolSetAccess(CUmemoryPool handle, const CUmemAccessDesc *list, size_t count)
{
    TRY(ready());
    MUST(pool_get(handle) && list && count);
    for (size_t i = 0; i < count; i++)
        MUST(list[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE || (list[i].location.id >= 0 && list[i].location.id < device_count));
    return CUDA_SUCCESS;
}

API CUresult cuMemPoolGetAccess(int *flags, CUmemoryPool handle, CUmemLocation *location)
{
    TRY(ready());
    struct pool *p = pool_get(handle);
    MUST(p && flags && location);
    *flags = location->id == p->device ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_NONE;
    return CUDA_SUCCESS;
}
