/* SPDX-License-Identifier: Apache-2.0 */

/* Memory pools. A request is served, in this order,
 *
 *   - by memory that the stream may have at once: "memory freed in a stream can be
 *     reused immediately in a subsequent allocation request on the same stream"
 *     (Memory Reuse Policies); what is known to be over (cudaMemPoolReuseAllowOpportunistic:
 *     "the stream has passed the point of execution indicated by the free"); what the
 *     stream waits for (cudaMemPoolReuseFollowEventDependencies: "Before allocating more
 *     physical GPU memory, the allocator examines dependency information established by
 *     CUDA events and tries to allocate from memory freed in another stream");
 *   - by a new piece;
 *   - if there is none to be had, by what another stream will be done with
 *     (cudaMemPoolReuseAllowInternalDependencies: "Failing to allocate and map more
 *     physical memory from the OS, the driver will look for memory whose availability
 *     depends on another stream's pending progress").
 *
 * "Upgrading to a newer CUDA driver may change, enhance, augment and/or reorder the
 * enumeration of the reuse policies": the switches (cuda_switch.h) do so. */
#include <string.h>

#include "cuda_pool.h"
#include "cuda_switch.h"

enum { FOLLOW_EVENTS, OPPORTUNISTIC, INTERNAL }; /* of reuse */

static struct pool *pools; /* guarded by the lock */

struct pool *pool_new(const CUmemPoolProps *props, const struct property *of, bool is_default)
{
    struct heap *h = heap_new();
    struct pool *p = h ? object_new(POOL) : NULL;
    if (!p) {
        if (h)
            heap_end(h);
        return NULL;
    }
    *p = (struct pool){
        .device = of->device, .is_default = is_default, .on_host = of->backing != BACKED_BY_CARD,
        .reuse = {1, 1, 1}, /* "default enabled" */
        .heap = h, .next = pools, .props = *props,
    };
    p->props.location = of->location;
    pools = p;
    return p;
}

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

struct pool *pool_find(CUmemoryPool handle)
{
    struct pool *p = object_get(handle, POOL);
    return p && !p->doomed ? p : NULL;
}

const CUmemPoolProps *pool_props(const struct pool *p) { return &p->props; }

static uint64_t max(uint64_t a, uint64_t b) { return a > b ? a : b; }

/* --- what of a pool is free ------------------------------------------------ */

static bool over(const struct moment *m, void *arg)
{
    (void)arg;
    return order_passed(m->at) || !lives(m->ctx, m->life);
}

static bool any(const struct moment *m, void *arg)
{
    (void)m, (void)arg;
    return true;
}

/* notice makes free what is over, where the driver looks for it. */
static void notice(struct pool *p)
{
    if (p->reuse[OPPORTUNISTIC] && switches.opportunistic == OPPORTUNISTIC_DOCUMENTED)
        heap_settle(p->heap, over, NULL);
}

/* keeps says that a pool gives nothing back: "IPC pools currently do not support
 * releasing physical blocks back to the OS" (IPC Export Pool Limitations). */
static bool keeps(const struct pool *p) { return p->props.handleTypes && switches.ipc_pools == IPC_POOLS_KEPT && !p->doomed; }

/* The world is told, outside the lock, of the bytes that these return (pool_settle). Until
 * it has been, nobody may hear that they are reserved no more, nor have them, and who asks
 * sleeps: a driver that gives memory back holds its lock meanwhile. Guarded by the lock. */
static uint64_t leaving[MAX_DEVICES];
static pthread_cond_t left = PTHREAD_COND_INITIALIZER;

/* await_left lets the lock go while it sleeps. */
static void await_left(int device)
{
    while (leaving[device])
        pthread_cond_wait(&left, &cuda_lock);
}

static uint64_t shrink(struct pool *p, uint64_t keep)
{
    uint64_t bytes = keeps(p) ? 0 : heap_shrink(p->heap, keep);
    if (p->on_host)
        return 0;
    leaving[p->device] += bytes;
    return bytes;
}

/* pool_leave ends a pool that was destroyed when nothing is outstanding: "the resources
 * associated with the pool will be released automatically once there are no more
 * outstanding allocations" (cuMemPoolDestroy). */
uint64_t pool_leave(struct pool *p)
{
    if (!p->doomed)
        return 0;
    heap_settle(p->heap, over, NULL);
    struct amounts is = heap_amounts(p->heap);
    if (is.live || is.freed || p->imports)
        return 0;
    struct pool **at = &pools;
    while (*at != p)
        at = &(*at)->next;
    *at = p->next;
    uint64_t bytes = p->on_host ? 0 : is.reserved - is.shared;
    leaving[p->device] += bytes;
    heap_end(p->heap);
    let_go_later(p->shared);
    object_free(p);
    return bytes;
}

CUresult pool_settle(const char *call, int device, uint64_t bytes)
{
    pools_let_go();
    CUresult r = charge(call, &devices[device], -(int64_t)bytes);
    if (bytes) {
        lock();
        leaving[device] -= bytes;
        pthread_cond_broadcast(&left);
        unlock();
    }
    return r;
}

uint64_t pools_empty(int device)
{
    uint64_t bytes = 0;
    for (struct pool *p = pools, *next; p; p = next) {
        next = p->next;
        if (p->device != device)
            continue;
        heap_settle(p->heap, over, NULL);
        bytes += p->doomed ? pool_leave(p) : shrink(p, 0);
    }
    leaving[device] -= bytes; /* the caller tells the world with other things */
    return bytes;
}

uint64_t pools_oldest_tick(void)
{
    uint64_t oldest = UINT64_MAX;
    for (struct pool *p = pools; p; p = p->next) {
        uint64_t its = heap_amounts(p->heap).oldest;
        oldest = its < oldest ? its : oldest;
    }
    return oldest;
}

/* "Before returning, the driver will determine what frees the synchronization
 * guaranteed to be completed. These allocations are made available for allocation
 * regardless of specified stream or disabled allocation policies. The driver also
 * checks cudaMemPoolAttrReleaseThreshold here and releases any excess physical
 * memory that it can." (Synchronization API Actions) */
CUresult pools_observe(const char *call, int device, usable *covered, void *arg)
{
    uint64_t bytes[MAX_DEVICES] = {0};
    lock();
    for (struct pool *p = pools, *next; p; p = next) {
        int at = p->device;
        next = p->next;
        heap_settle(p->heap, covered, arg);
        notice(p);
        if (p->doomed)
            bytes[at] += pool_leave(p);
        else if (at == device && switches.shrink == SHRINK_SYNCHRONIZE)
            bytes[at] += shrink(p, p->threshold);
    }
    unlock();
    CUresult result = CUDA_SUCCESS;
    for (int i = 0; i < device_count; i++) {
        CUresult r = pool_settle(call, i, bytes[i]);
        result = r == CUDA_SUCCESS ? result : r;
    }
    return result;
}

/* --- allocating ------------------------------------------------------------ */

struct request {
    const char *call;
    CUdeviceptr *out;
    uint64_t size;
    struct pool *pool;
    struct context *ctx;
    CUstream stream;
    struct lane *lane; /* while the lock is held */
};

static bool open_to(const struct moment *m, void *arg)
{
    struct request *q = arg;
    return m->lane == q->lane->id || (q->pool->reuse[FOLLOW_EVENTS] && lane_follows(q->lane, q->ctx, m)) || !lives(m->ctx, m->life);
}

/* take serves a request from what the pool has. CUDA_ERROR_NOT_READY is that it
 * has no such hole. */
static CUresult take(struct request *q, usable *may)
{
    struct pool *p = q->pool;
    uint64_t size = round_up(q->size, UNIT);
    lock();
    CUresult r = CUDA_ERROR_NOT_READY;
    struct segment *s = NULL;
    if (!(q->lane = lane_of(q->stream, q->ctx))) {
        r = CUDA_ERROR_INVALID_HANDLE; /* destroyed meanwhile */
    } else {
        notice(p);
        s = heap_take(p->heap, size, may, q);
        if (!s && switches.holes == HOLES_REMAP)
            s = heap_remap(p->heap, size, may, q);
    }
    /* "stream-ordered allocations are not context associated" (Pointer Attributes): of a
     * context's end that is not the device's nothing is said. */
    struct context *its = switches.pool_memory == POOL_MEMORY_CONTEXT ? q->ctx : &devices[p->device].primary;
    struct range *range = s ? range_take(RANGE_POOL, p->device, its, q->size) : NULL;
    if (range) {
        r = CUDA_SUCCESS;
        range->owner = p;
        range->segment = s;
        *q->out = range->at;
        lane_after(q->lane, q->ctx, may == any ? segment_over(s) : 0);
        p->used_high = max(p->used_high, heap_amounts(p->heap).live);
    } else if (s) {
        r = CUDA_ERROR_OUT_OF_MEMORY;
        heap_free(p->heap, s, NULL);
    }
    unlock();
    return r;
}

/* pool_max_size is what a pool can have; "this value may be higher than what was initially
 * passed to cuMemPoolCreate due to alignment requirements" (cudaMemPoolAttrMaxPoolSize). */
uint64_t pool_max_size(const CUmemPoolProps *props)
{
    return round_up(props->maxSize, switches.pool_max == POOL_MAX_PIECE ? (uint64_t)switches.piece_mib << 20 : BLOCK);
}

static bool at_its_max(const struct pool *p, uint64_t more)
{
    return p->props.maxSize && switches.pool_max != POOL_MAX_IGNORED && heap_amounts(p->heap).reserved + more > pool_max_size(&p->props);
}

/* add gets a pool a piece of so many bytes that goes back in grains. */
static CUresult add(struct request *q, uint64_t size, uint64_t grain)
{
    struct pool *p = q->pool;
    lock();
    await_left(p->device);
    bool full = at_its_max(p, size);
    unlock();
    if (full)
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (!p->on_host)
        TRY(charge(q->call, &devices[p->device], (int64_t)size));
    lock();
    bool added = heap_add(p->heap, size, switches.holes == HOLES_REMAP ? BLOCK : grain);
    p->reserved_high = max(p->reserved_high, heap_amounts(p->heap).reserved);
    unlock();
    if (!added && !p->on_host)
        charge(q->call, &devices[p->device], -(int64_t)size);
    return added ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

/* growth is by how much a pool grows for a request. */
static uint64_t growth(uint64_t size)
{
    uint64_t piece = (uint64_t)switches.piece_mib << 20, least = round_up(size, BLOCK);
    return switches.large == LARGE_BLOCKS && least > piece ? least : round_up(size, piece);
}

/* grow adds a piece for a request; a card that is nearly full has none that is
 * larger than the request. */
static CUresult grow(struct request *q)
{
    uint64_t piece = (uint64_t)switches.piece_mib << 20, least = round_up(q->size, BLOCK), want = growth(q->size);
    CUresult r = add(q, want, want % piece ? want : piece);
    return r == CUDA_ERROR_OUT_OF_MEMORY && least < want ? add(q, least, least) : r;
}

static CUresult serve(struct request *q)
{
    bool internal = q->pool->reuse[INTERNAL];
    CUresult r = take(q, open_to); /* another thread may have grown the pool */
    if (r == CUDA_ERROR_NOT_READY && internal && switches.reuse == REUSE_EAGER)
        r = take(q, any);
    if (r != CUDA_ERROR_NOT_READY)
        return r;
    CUresult grown;
    do /* a thread that finds the new piece free may take it, or have the pool give it back */
        if ((grown = grow(q)) == CUDA_SUCCESS)
            r = take(q, open_to);
    while (grown == CUDA_SUCCESS && r == CUDA_ERROR_NOT_READY);
    if (grown == CUDA_ERROR_OUT_OF_MEMORY && internal && !(switches.pool_max == POOL_MAX_REFUSES && at_its_max(q->pool, round_up(q->size, BLOCK))))
        r = take(q, any);
    return r == CUDA_ERROR_NOT_READY ? grown : r;
}

static CUresult pool_alloc(const char *call, CUdeviceptr *out, uint64_t size, struct pool *p, CUstream s)
{
    struct request q = {.call = call, .out = out, .size = size, .pool = p, .stream = s};
    struct graph *g;
    TRY(stream_check(s, &q.ctx));
    MUST(out && size && size <= INT64_MAX);
    TRY(capture_of(s, &g));
    if (!q.pool)
        q.pool = devices[q.ctx->device].pool;
    if (g)
        return graph_capture_alloc(g, s, q.pool->device, size, out);
    CUresult r = take(&q, open_to);
    if (r != CUDA_ERROR_NOT_READY)
        return r;
    pthread_mutex_lock(&growing);
    r = serve(&q);
    pthread_mutex_unlock(&growing);
    return r;
}

static struct pool *pool_get(CUmemoryPool handle)
{
    lock();
    struct pool *p = pool_find(handle);
    unlock();
    return p;
}

CUresult pool_fits(CUmemoryPool handle, uint64_t size, CUstream s, uint64_t left, bool *fits)
{
    struct request q = {.stream = s};
    TRY(stream_check(s, &q.ctx));
    q.pool = handle ? pool_get(handle) : devices[q.ctx->device].pool;
    MUST(q.pool);
    bool remap = switches.holes == HOLES_REMAP, internal = q.pool->reuse[INTERNAL];
    size = round_up(size, UNIT);
    lock();
    if ((q.lane = lane_of(s, q.ctx))) {
        notice(q.pool);
        bool of_host = q.pool->on_host && q.pool->props.allocType != CU_MEM_ALLOCATION_TYPE_MANAGED;
        *fits = of_host || left >= growth(size) || heap_fits(q.pool->heap, size, open_to, &q, remap) ||
                (internal && heap_fits(q.pool->heap, size, any, &q, remap));
    }
    unlock();
    return q.lane ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

API CUresult cuMemAllocAsync(CUdeviceptr *out, size_t size, CUstream s) { return pool_alloc("cuMemAllocAsync", out, size, NULL, s); }
API CUresult cuMemAllocAsync_ptsz(CUdeviceptr *out, size_t size, CUstream s) { return pool_alloc("cuMemAllocAsync_ptsz", out, size, NULL, per_thread(s)); }

static CUresult from_pool(const char *call, CUdeviceptr *out, size_t size, CUmemoryPool handle, CUstream s)
{
    TRY(ready());
    struct pool *p = pool_get(handle);
    MUST(p && !p->imported); /* "Allocating from an import pool is not allowed" */
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

CUresult pool_free(const char *call, struct range *r, const struct moment *m)
{
    struct pool *p = r->owner;
    int device = p->device;
    heap_free(p->heap, r->segment, m);
    range_give(r);
    uint64_t bytes = pool_leave(p);
    unlock();
    pools_let_go();
    return bytes ? pool_settle(call, device, bytes) : CUDA_SUCCESS;
}

static CUresult free_async(const char *call, CUdeviceptr at, CUstream s)
{
    struct context *c;
    struct graph *g;
    struct lane *l;
    TRY(stream_check(s, &c));
    TRY(capture_of(s, &g));
    if (!at)
        return CUDA_SUCCESS;
    if (g)
        return graph_capture_free(g, s, at);
    lock();
    struct range *r = range_at(at);
    if (r && r->kind == RANGE_POOL && (l = lane_of(s, c))) {
        struct moment m = lane_moment(l, c);
        return pool_free(call, r, &m);
    }
    if (r && r->kind == RANGE_GRAPH && (l = lane_of(s, c))) {
        struct moment m = lane_moment(l, c);
        return graph_memory_free(r, &m);
    }
    if (r && r->kind == RANGE_IMPORTED && r->owner)
        return pool_close(call, r);
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
    property_forget(p);
    p->doomed = true;
    uint64_t bytes = shrink(p, 0);
    bytes += pool_leave(p);
    unlock();
    return pool_settle("cuMemPoolDestroy", device, bytes);
}

/* "Allocations that have been asynchronously freed but whose completion has not been
 * observed on the host (eg. by a synchronize) can count as outstanding." */
API CUresult cuMemPoolTrimTo(CUmemoryPool handle, size_t keep)
{
    TRY(ready());
    struct pool *p = pool_get(handle);
    MUST(p);
    lock();
    int device = p->device;
    if (switches.trim == TRIM_PASSED)
        heap_settle(p->heap, over, NULL);
    uint64_t bytes = shrink(p, keep);
    unlock();
    return pool_settle("cuMemPoolTrimTo", device, bytes);
}

/* "Querying the cudaMemPoolAttrUsedMemCurrent of a pool returns the total size of all
 * of the memory allocated from the pool and not available for reuse" (Resource Usage
 * Statistics): whether memory is, that only one stream can reuse, is not said. */
static uint64_t used(const struct pool *p)
{
    struct amounts is = heap_amounts(p->heap);
    return p->opened + is.live + (switches.used == USED_PENDING ? is.freed : 0);
}

API CUresult cuMemPoolGetAttribute(CUmemoryPool handle, int attribute, void *value)
{
    TRY(ready());
    MUST(value);
    cuuint64_t *wide = value;
    lock();
    struct pool *p = object_get(handle, POOL);
    if (p && !p->doomed && attribute == CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT) {
        await_left(p->device);
        p = object_get(handle, POOL);
    }
    if (!p || p->doomed) {
        unlock();
        return CUDA_ERROR_INVALID_VALUE;
    }
    switch (attribute) {
    case CU_MEMPOOL_ATTR_RELEASE_THRESHOLD: *wide = p->threshold; break;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT: *wide = p->imported ? p->opened : heap_amounts(p->heap).reserved; break;
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH: *wide = p->reserved_high; break;
    case CU_MEMPOOL_ATTR_USED_MEM_CURRENT: *wide = used(p); break;
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH: *wide = max(p->used_high, used(p)); break;
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
    /* "resetting the watermarks will make them take on the current value" */
    case CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH: if (wide) r = CUDA_ERROR_INVALID_VALUE; else p->reserved_high = heap_amounts(p->heap).reserved; break;
    case CU_MEMPOOL_ATTR_USED_MEM_HIGH: if (wide) r = CUDA_ERROR_INVALID_VALUE; else p->used_high = used(p); break;
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
