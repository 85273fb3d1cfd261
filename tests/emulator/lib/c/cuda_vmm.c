/* SPDX-License-Identifier: Apache-2.0 */

/* Memory by hand: made, mapped into addresses that were reserved, and passed to
 * other processes. It lives while anything holds it: handles, mappings,
 * descriptors, and the processes that opened it. */
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "cuda_internal.h"

/* One thing at a time gets its number from the world. */
static pthread_mutex_t sharing = PTHREAD_MUTEX_INITIALIZER;

struct memory {
    int device;
    bool on_host, imported;
    uint32_t refs, maps;
    uint64_t size, shared; /* shared: the world's number for it, once exported or imported */
    CUmemAllocationProp prop;
};

/* mapping is a part of a reservation that has memory. */
struct mapping {
    uint64_t at, size;
    struct memory *memory;
    int access; /* of the device, a bit mask of CUmemAccess_flags */
    struct mapping *next;
};

/* reaches_ok says whether access can be given to a location. */
static bool reaches_ok(const CUmemLocation *l)
{
    bool on_host = l->type >= CU_MEM_LOCATION_TYPE_HOST && l->type <= CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT;
    return on_host || (l->type == CU_MEM_LOCATION_TYPE_DEVICE && l->id >= 0 && l->id < device_count);
}

static struct memory *memory_get(CUmemGenericAllocationHandle handle)
{
    struct memory *m = object_get((void *)(uintptr_t)handle, MEMORY);
    return m && m->refs ? m : NULL;
}

/* settle_unlock ends memory that nothing in this process holds any more. */
static CUresult settle_unlock(const char *call, struct memory *m)
{
    if (m->refs || m->maps) {
        unlock();
        return CUDA_SUCCESS;
    }
    struct memory was = *m;
    object_free(m);
    unlock();
    if (was.shared) {
        close_shared(was.shared);
        return CUDA_SUCCESS;
    }
    return was.on_host ? CUDA_SUCCESS : charge(call, &devices[was.device], -(int64_t)was.size);
}

struct memory *memory_map(CUmemGenericAllocationHandle handle, uint64_t offset)
{
    struct memory *m = memory_get(handle);
    if (!m || m->prop.allocFlags.usage != CU_MEM_CREATE_USAGE_TILE_POOL || offset >= m->size)
        return NULL;
    m->maps++;
    return m;
}

CUresult memory_unmap_unlock(const char *call, struct memory *m)
{
    m->maps--;
    return settle_unlock(call, m);
}

API CUresult cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *prop, int option)
{
    struct property p;
    TRY(ready());
    MUST(granularity && prop && option >= 0 && option <= 1);
    TRY(property_of(prop->type, &prop->location, FOR_CREATE, &p));
    *granularity = BLOCK;
    return CUDA_SUCCESS;
}

API CUresult cuMemCreate(CUmemGenericAllocationHandle *out, size_t size, const CUmemAllocationProp *prop, unsigned long long flags)
{
    struct property p;
    TRY(ready());
    MUST(out && prop && !flags && size && size % BLOCK == 0 && size <= INT64_MAX);
    TRY(property_of(prop->type, &prop->location, FOR_CREATE, &p));
    /* "HOST allocations are not IPC capable and requestedHandleTypes must be 0, any
     * other value will result in CUDA_ERROR_INVALID_VALUE." */
    MUST(p.location.type != CU_MEM_LOCATION_TYPE_HOST || !prop->requestedHandleTypes);
    if (prop->requestedHandleTypes & ~CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        return CUDA_ERROR_NOT_SUPPORTED;
    bool on_host = p.backing != BACKED_BY_CARD;
    struct device *d = &devices[p.device];
    if (!on_host)
        TRY(charge("cuMemCreate", d, (int64_t)size));
    lock();
    struct memory *m = object_new(MEMORY);
    if (m)
        *m = (struct memory){.device = (int)(d - devices), .on_host = on_host, .refs = 1, .size = size, .prop = *prop};
    unlock();
    if (!m) {
        if (!on_host)
            charge("cuMemCreate", d, -(int64_t)size);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *out = (uintptr_t)m;
    return CUDA_SUCCESS;
}

API CUresult cuMemRelease(CUmemGenericAllocationHandle handle)
{
    TRY(ready());
    lock();
    struct memory *m = memory_get(handle);
    if (!m) {
        unlock();
        return CUDA_ERROR_INVALID_VALUE;
    }
    m->refs--;
    return settle_unlock("cuMemRelease", m);
}

API CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *prop, CUmemGenericAllocationHandle handle)
{
    TRY(ready());
    MUST(prop);
    lock();
    struct memory *m = memory_get(handle);
    if (m)
        *prop = m->prop;
    unlock();
    return m ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* --- addresses ------------------------------------------------------------- */

API CUresult cuMemAddressReserve(CUdeviceptr *out, size_t size, size_t alignment, CUdeviceptr wish, unsigned long long flags)
{
    (void)wish; /* a wish, which the driver need not follow */
    TRY(ready());
    MUST(out && size && size % BLOCK == 0 && !flags && !(alignment & (alignment - 1)));
    lock();
    /* A range is as aligned as its size, and more. */
    struct range *r = range_take(RANGE_RESERVED, 0, NULL, size > alignment ? size : alignment);
    if (r) {
        r->size = size;
        *out = r->at;
    }
    unlock();
    return r ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

API CUresult cuMemAddressFree(CUdeviceptr at, size_t size)
{
    TRY(ready());
    lock();
    struct range *r = range_at(at);
    bool ok = r && r->kind == RANGE_RESERVED && r->size == size && !r->owner;
    if (ok)
        range_give(r);
    unlock();
    return ok ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* reservation is the one that a part of the address space lies in. */
static struct range *reservation(uint64_t at, uint64_t size)
{
    struct range *r = range_around(at);
    return r && r->kind == RANGE_RESERVED && size && size <= r->size - (at - r->at) ? r : NULL;
}

API CUresult cuMemMap(CUdeviceptr at, size_t size, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags)
{
    TRY(ready());
    MUST(!flags && at % BLOCK == 0 && size % BLOCK == 0 && !offset); /* offset has to be 0, says the header */
    struct mapping *new = calloc(1, sizeof *new);
    if (!new)
        return CUDA_ERROR_OUT_OF_MEMORY;
    lock();
    struct range *r = reservation(at, size);
    struct memory *m = memory_get(handle);
    bool ok = r && m && size <= m->size;
    for (struct mapping *o = ok ? r->owner : NULL; o; o = o->next)
        ok = ok && (at + size <= o->at || o->at + o->size <= at);
    if (ok) {
        *new = (struct mapping){.at = at, .size = size, .memory = m, .next = r->owner};
        r->owner = new;
        m->maps++;
    }
    unlock();
    if (!ok)
        free(new);
    return ok ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* covered says that mappings, and whole ones only if they are to go, fill a part
 * of a reservation. */
static bool covered(struct range *r, uint64_t at, uint64_t size, bool whole)
{
    uint64_t sum = 0;
    for (struct mapping *o = r->owner; o; o = o->next) {
        uint64_t from = o->at > at ? o->at : at, to = o->at + o->size < at + size ? o->at + o->size : at + size;
        if (from >= to)
            continue;
        if (whole && to - from != o->size)
            return false;
        sum += to - from;
    }
    return sum == size;
}

API CUresult cuMemUnmap(CUdeviceptr at, size_t size)
{
    TRY(ready());
    lock();
    struct range *r = reservation(at, size);
    if (!r || !covered(r, at, size, true)) {
        unlock();
        return CUDA_ERROR_INVALID_VALUE;
    }
    for (;;) {
        struct mapping **p = (struct mapping **)&r->owner;
        while (*p && ((*p)->at < at || (*p)->at >= at + size))
            p = &(*p)->next;
        struct mapping *o = *p;
        if (!o)
            break;
        *p = o->next;
        o->memory->maps--;
        settle_unlock("cuMemUnmap", o->memory);
        free(o);
        lock();
        r = reservation(at, size);
        if (!r)
            break; /* another thread has freed the addresses meanwhile */
    }
    unlock();
    return CUDA_SUCCESS;
}

API CUresult cuMemSetAccess(CUdeviceptr at, size_t size, const CUmemAccessDesc *list, size_t count)
{
    TRY(ready());
    MUST(list && count);
    for (size_t i = 0; i < count; i++)
        MUST(reaches_ok(&list[i].location) && (list[i].flags == 0 || list[i].flags == 1 || list[i].flags == 3));
    lock();
    struct range *r = reservation(at, size);
    bool ok = r && covered(r, at, size, false);
    for (struct mapping *o = ok ? r->owner : NULL; o; o = o->next)
        if (o->at < at + size && at < o->at + o->size)
            o->access = list[0].flags;
    unlock();
    return ok ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static struct mapping *mapping_at(uint64_t at)
{
    struct range *r = reservation(at, 1);
    struct mapping *o = r ? r->owner : NULL;
    while (o && (at < o->at || at >= o->at + o->size))
        o = o->next;
    return o;
}

API CUresult cuMemGetAccess(unsigned long long *flags, const CUmemLocation *location, CUdeviceptr at)
{
    TRY(ready());
    MUST(flags && location);
    lock();
    struct mapping *o = mapping_at(at);
    if (o)
        *flags = (unsigned long long)o->access;
    unlock();
    return o ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *out, void *at)
{
    TRY(ready());
    MUST(out);
    lock();
    struct mapping *o = mapping_at((uintptr_t)at);
    if (o) {
        o->memory->refs++;
        *out = (uintptr_t)o->memory;
    }
    unlock();
    return o ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* --- to other processes ---------------------------------------------------- */

/* export_unlock makes a descriptor that holds memory. It takes the lock held. */
static CUresult export_unlock(const char *call, struct memory *m, int *out)
{
    m->refs++; /* it stays while the world is asked */
    unlock();
    pthread_mutex_lock(&sharing);
    CUresult r = m->shared ? CUDA_SUCCESS : share(&devices[m->device], m->size, &m->shared);
    pthread_mutex_unlock(&sharing);
    if (r == CUDA_SUCCESS)
        r = export_shared(m->shared, out);
    lock();
    m->refs--;
    settle_unlock(call, m);
    return r;
}

API CUresult cuMemExportToShareableHandle(void *out, CUmemGenericAllocationHandle handle, int type, unsigned long long flags)
{
    TRY(ready());
    MUST(out && !flags && type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    lock();
    struct memory *m = memory_get(handle);
    if (m && !m->on_host && (m->prop.requestedHandleTypes & type))
        return export_unlock("cuMemExportToShareableHandle", m, out);
    unlock();
    return CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *out, void *os_handle, int type)
{
    struct {
        char mark[8];
        uint64_t id;
    } said;
    TRY(ready());
    MUST(out && type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    int fd = (int)(intptr_t)os_handle, device;
    uint64_t size;
    if (recv(fd, &said, sizeof said, MSG_PEEK | MSG_DONTWAIT) != sizeof said || memcmp(said.mark, "cuShared", 8) != 0)
        return CUDA_ERROR_INVALID_VALUE;
    TRY(open_shared("cuMemImportFromShareableHandle", said.id, &device, &size));
    if (!size) { /* a pool's */
        close_shared(said.id);
        return CUDA_ERROR_INVALID_VALUE;
    }
    lock();
    struct memory *m = object_new(MEMORY);
    if (m)
        *m = (struct memory){
            .device = device, .imported = true, .refs = 1, .size = size, .shared = said.id,
            .prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED, .requestedHandleTypes = type, .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device}},
        };
    unlock();
    if (!m) {
        close_shared(said.id);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *out = (uintptr_t)m;
    return CUDA_SUCCESS;
}

/* --- CUDA IPC -------------------------------------------------------------- */

struct ipc {
    char mark[8];
    uint64_t id, size;
};
_Static_assert(sizeof(struct ipc) <= sizeof(CUipcMemHandle), "it fits");
static const char ipc_mark[8] = "cuIpcMem";

/* identify has the world know an ordinary allocation, and copies its range. */
static CUresult identify(CUdeviceptr at, struct range *was)
{
    pthread_mutex_lock(&sharing);
    lock();
    struct range *r = range_around(at);
    bool is = r && r->kind == RANGE_DEVICE;
    *was = is ? *r : (struct range){0};
    unlock();
    /* What is part of a block goes with the block, which stays the program's. */
    CUresult result = is ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    if (is && !was->shared) {
        result = share(&devices[was->device], was->charged, &was->shared);
        lock();
        r = range_at(was->at);
        if (result == CUDA_SUCCESS && r && r->kind == RANGE_DEVICE)
            r->shared = was->shared;
        else if (result == CUDA_SUCCESS)
            result = CUDA_ERROR_INVALID_VALUE; /* freed at this moment */
        unlock();
    }
    pthread_mutex_unlock(&sharing);
    return result;
}

API CUresult cuIpcGetMemHandle(CUipcMemHandle *out, CUdeviceptr at)
{
    struct context *c;
    struct range was;
    TRY(current(&c));
    MUST(out);
    CUresult result = identify(at, &was);
    if (result == CUDA_SUCCESS) {
        struct ipc i = {.id = was.shared, .size = was.size};
        memcpy(i.mark, ipc_mark, sizeof i.mark);
        memset(out, 0, sizeof *out);
        memcpy(out, &i, sizeof i);
    }
    return result;
}

static CUresult ipc_open(const char *call, CUdeviceptr *out, CUipcMemHandle handle, unsigned int flags)
{
    struct context *c;
    struct ipc i;
    int device;
    uint64_t bytes;
    TRY(current(&c));
    MUST(out && flags == 1); /* LAZY_ENABLE_PEER_ACCESS is the only way */
    memcpy(&i, &handle, sizeof i);
    if (memcmp(i.mark, ipc_mark, sizeof i.mark) != 0)
        return CUDA_ERROR_INVALID_VALUE;
    TRY(open_shared(call, i.id, &device, &bytes));
    lock();
    struct range *r = range_take(RANGE_IMPORTED, device, c, i.size);
    if (r) {
        r->shared = i.id;
        *out = r->at;
    }
    unlock();
    if (!r)
        close_shared(i.id);
    return r ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

API CUresult cuIpcOpenMemHandle(CUdeviceptr *out, CUipcMemHandle handle, unsigned int flags) { return ipc_open("cuIpcOpenMemHandle", out, handle, flags); }
API CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *out, CUipcMemHandle handle, unsigned int flags) { return ipc_open("cuIpcOpenMemHandle_v2", out, handle, flags); }

API CUresult cuIpcCloseMemHandle(CUdeviceptr at)
{
    struct context *c;
    TRY(current(&c));
    lock();
    struct range *r = range_at(at);
    if (r && r->kind == RANGE_IMPORTED)
        return drop_unlock("cuIpcCloseMemHandle", r);
    unlock();
    return CUDA_ERROR_INVALID_VALUE;
}

/* --- descriptors of addresses ---------------------------------------------- */

/* "Get a handle of the specified type to an address range […] The address range must
 * have been obtained by a prior call to either cuMemAlloc or cuMemAddressReserve. If
 * the address range was obtained via cuMemAddressReserve, it must also be fully mapped
 * via cuMemMap." The only type is a DMA_BUF descriptor, which keeps the memory as any
 * other descriptor does: the kernel's module holds it until the buffer is closed. */
API CUresult cuMemGetHandleForAddressRange(void *out, CUdeviceptr at, size_t size, int type, unsigned long long flags)
{
    struct context *c;
    struct range was;
    TRY(current(&c));
    MUST(out && size && type == 1 && flags <= 1 && at % 4096 == 0 && size % 4096 == 0);
    lock();
    struct mapping *o = mapping_at(at);
    bool fits = o && size <= o->at + o->size - at;
    if (o && fits && !o->memory->on_host)
        return export_unlock("cuMemGetHandleForAddressRange", o->memory, out);
    unlock();
    MUST(!o);
    TRY(identify(at, &was));
    MUST(size <= was.at + was.size - at);
    return export_shared(was.shared, out);
}
