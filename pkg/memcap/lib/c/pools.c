/* SPDX-License-Identifier: Apache-2.0 */

/* Which pools there are. A pool is recorded when the program makes it or first allocates from it.
 * It is forgotten once it was destroyed and nothing of it is left. This file also does what
 * concerns a pool as a whole: it trims a pool, settles it after something that may have emptied it,
 * and makes it give back what it does not use. */

#include "export.h"
#include "pool.h"
#include "property.h"

/* --- knowing pools -------------------------------------------------------- */

static struct pool *pool_by_handle(struct process *p, CUmempool handle)
{
    struct entry e;
    return table_get(&p->table, (uintptr_t)handle, SPACE_POOL, &e) ? &p->pools[e.owner] : NULL;
}

/* record_pool records a pool, unless it is recorded already. NULL: there is no place for it. */
COLD static struct pool *record_pool(struct process *p, CUmempool handle, enum means means, CUdevice device)
{
    struct entry e = {.key = (uintptr_t)handle, .space = SPACE_POOL, .how = HOW_NOTE};
    spin_lock(&p->lock);
    struct pool *pool = pool_by_handle(p, handle);
    for (uint32_t i = 0; !pool && i < MAX_POOLS; i++) {
        struct pool *at = &p->pools[e.owner = p->next_pool++ % MAX_POOLS];
        if (__atomic_load_n(&at->used, __ATOMIC_ACQUIRE))
            continue;
        *at = (struct pool){.handle = e.key, .used = 1, .device = device, .passed = means == MEANS_NOTHING || means == MEANS_UNKNOWN, .r.managed = means == MEANS_MANAGED};
        if (!table_put(&p->table, &e, NULL)) {
            at->used = 0;
            break;
        }
        pool = at;
    }
    spin_unlock(&p->lock);
    return pool;
}

/* forget notes that a handle no longer names a pool. What lives of the pool keeps its place. */
static void forget(struct process *p, CUmempool handle)
{
    struct entry e;
    if (table_take(&p->table, (uintptr_t)handle, SPACE_POOL, &e))
        __atomic_store_n(&p->pools[e.owner].handle, 0, __ATOMIC_RELEASE);
}

struct pool *pool_new(struct process *p, CUmempool handle, enum means means, CUdevice device, uint64_t most)
{
    forget(p, handle); /* an old pool with that handle; we did not see it end */
    struct pool *pool = record_pool(p, handle, means, device);
    if (pool)
        pool->most = most;
    return pool;
}

/* guess_device returns the device of a pool that we did not see being made. Mostly it is a device's
 * default pool; otherwise the current device is the best guess. */
COLD static int guess_device(CUmempool handle, int current)
{
    int n = 0;
    CUmempool h;
    CALL(cuDeviceGetCount, &n);
    for (int i = 0; i < n && i < MAX_DEVICES; i++)
        if (CALL(cuDeviceGetDefaultMemPool, &h, i) == CUDA_SUCCESS && h == handle)
            return i;
    return current;
}

/* A pool that was destroyed lives on as long as one of its allocations does. What is charged for it
 * ends with the last of them. Not so for a pool that can be exported: another process may have its
 * memory open, and it may live on there. */
void pool_leave(struct process *p, struct pool *pool)
{
    if (pool->handle || !pool->used || pool_flight(pool) || pool->r.freeing)
        return;
    if (pool->r.charge && pool->exportable)
        settle_exported(&p->accounts[pool->device], &pool->r);
    else if (pool->r.charge)
        settle(&p->accounts[pool->device], &pool->r, 0, 0);
    uint64_t i = (uint64_t)(pool - p->pools);
    __atomic_and_fetch(&p->pools_charged[i / 64], ~((uint64_t)1 << i % 64), __ATOMIC_ACQ_REL);
    if (pool->exportable)
        places_end(p, pool);
    __atomic_store_n(&pool->used, 0, __ATOMIC_RELEASE);
}

/* next_charged returns the index of the first pool from i on that has or had a charge, or -1. */
static int next_charged(const struct process *p, int i)
{
    for (int w = i / 64; w < MAX_POOLS / 64; i = ++w * 64) {
        uint64_t bits = __atomic_load_n(&p->pools_charged[w], __ATOMIC_RELAXED) >> i % 64;
        if (bits)
            return i + __builtin_ctzll(bits);
    }
    return -1;
}

/* device_of finds the device of a stream. If there is one device, the driver is not asked. False:
 * the stream's device cannot be counted. */
COLD static bool device_of(struct process *p, CUstream s, CUdevice *device)
{
    struct where at;
    int n = (int)__atomic_load_n(&p->devices, __ATOMIC_RELAXED);
    if (!n && CALL(cuDeviceGetCount, &n) == CUDA_SUCCESS && n > 0)
        __atomic_store_n(&p->devices, (uint32_t)n, __ATOMIC_RELAXED);
    *device = 0;
    if (n == 1)
        return true;
    if (!where_stream(p, &at, s) || at.device < 0 || at.device >= MAX_DEVICES)
        return false;
    *device = at.device;
    return true;
}

bool pool_find(struct process *p, struct request *q, struct pool **pool)
{
    CUdevice device = 0;
    *pool = q->plain ? NULL : pool_by_handle(p, q->pool);
    if (*pool && ((*pool)->device >= 0 || (*pool)->passed))
        return !(*pool)->passed;
    if (__builtin_expect(__atomic_load_n(&p->devices, __ATOMIC_RELAXED) != 1, 0) && !device_of(p, q->stream, &device))
        return false;
    if (*pool) { /* a managed pool without a device counts on the device that uses it first */
        int32_t nowhere = DEVICE_CURRENT;
        __atomic_compare_exchange_n(&(*pool)->device, &nowhere, device, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
        return true;
    }
    if (q->plain) {
        if (__builtin_expect(!__atomic_load_n(&p->stands_in[device], __ATOMIC_ACQUIRE), 0))
            bound_default(p, device);
        if (!q->from || CALL(cuDeviceGetMemPool, &q->pool, device) != CUDA_SUCCESS)
            return false;
        q->plain = NULL; /* the program may make another pool the current one in the meantime */
        *pool = pool_by_handle(p, q->pool);
    }
    if (__builtin_expect(!*pool, 0))
        *pool = record_pool(p, q->pool, MEANS_COUNTED, guess_device(q->pool, device));
    return !*pool || !(*pool)->passed;
}

/* --- giving back ---------------------------------------------------------- */

/* trim makes a pool give back what it does not use, except for keep bytes. It keeps at least what
 * lives now, and uncommits the rest before the call. So the pool gives back only uncommitted
 * memory, even if other threads free something meanwhile. If more is gone than that, the ceiling is
 * lower until the next reading. */
static CUresult trim(struct process *p, struct pool *pool, size_t keep)
{
    struct account *a = &p->accounts[pool->device];
    spin_lock(&pool->lock);
    uint64_t live = pool_live(pool);
    keep = live > keep ? live : keep;
    pool_uncommit_free(p, a, pool, keep);
    spin_unlock(&pool->lock);
    for (struct wait w = {0};;) { /* an attempt needs what is free in the pool: do not trim during one */
        __atomic_add_fetch(&pool->r.trims, 1, __ATOMIC_SEQ_CST);
        if (!__atomic_load_n(&pool->gate.closed, __ATOMIC_SEQ_CST) || w.napped >= PATIENCE_US)
            break; /* the attempt's thread is stuck */
        __atomic_sub_fetch(&pool->r.trims, 1, __ATOMIC_SEQ_CST);
        wait_more(&w);
    }
    CUresult r = CALL(cuMemPoolTrimTo, (CUmempool)(uintptr_t)pool->handle, keep);
    spin_lock(&pool->lock);
    __atomic_sub_fetch(&pool->r.trims, 1, __ATOMIC_SEQ_CST);
    pool_resettle(p, a, pool);
    recommit(a, &pool->r);
    pool_leave(p, pool);
    spin_unlock(&pool->lock);
    return r;
}

/* --- making and destroying pools ---------------------------------------------- */

EXPORT CUresult cuMemPoolCreate(CUmempool *out, const CUpoolprops *props)
{
    struct process *p = ENTER();
    CUdevice device = DEVICE_CURRENT;
    enum means means = p && props ? property_means(props->type, &props->location, &device) : MEANS_NOTHING;
    if (means == MEANS_UNKNOWN && property_unknown(p, device))
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (device >= MAX_DEVICES)
        means = MEANS_NOTHING;
    uint64_t most = 0;
    bool bounds = p && props && out && means == MEANS_COUNTED && device >= 0 && !props->handle_types;
    CUresult r = bounds ? bound_create(p, out, props, device, &most) : CALL(cuMemPoolCreate, out, props);
    if (!p || r != CUDA_SUCCESS || !out || !props)
        return r;
    struct pool *pool = pool_new(p, *out, means, device, most);
    if (pool)
        pool->exportable = props->handle_types;
    if (pool || means == MEANS_NOTHING)
        return r;
    CALL(cuMemPoolDestroy, *out); /* it could not be recorded, so it would not be counted */
    return CUDA_ERROR_OUT_OF_MEMORY;
}

/* The memory of an imported pool is charged to its exporter. */
static void imported(struct process *p, const CUmempool *out)
{
    __atomic_store_n(&p->imported, 1, __ATOMIC_RELAXED);
    if (out)
        pool_new(p, *out, MEANS_NOTHING, DEVICE_CURRENT, 0);
}

EXPORT CUresult cuMemPoolImportFromShareableHandle(CUmempool *out, void *handle, int type, unsigned long long flags)
{
    THEN(cuMemPoolImportFromShareableHandle, imported(p, out), out, handle, type, flags)
}

/* The driver has a default pool for each type of memory at each location. */
static void learn_default(struct process *p, CUmempool handle, const CUlocation *at, int type)
{
    CUdevice device;
    if (!at || pool_by_handle(p, handle))
        return;
    enum means means = property_means(type, at, &device);
    record_pool(p, handle, means, device < MAX_DEVICES ? device : DEVICE_CURRENT);
}

static CUdevice device_at(const CUlocation *at, int type)
{
    return at && type == CU_MEM_ALLOCATION_TYPE_PINNED && at->type == CU_MEM_LOCATION_TYPE_DEVICE ? at->id : DEVICE_CURRENT;
}

/* POOL_OF is the body of an override that answers with a pool. If normal is true, the program asks
 * for a device's default pool, and gets the pool that replaces it if there is one. Otherwise it
 * asks for the current pool. */
#define POOL_OF(name, normal, device, then, ...)                      \
    struct process *p = ENTER();                                      \
    CUmempool in = p && out ? bound_default(p, device) : NULL;        \
    CUresult r = CALL(name, __VA_ARGS__);                             \
    if (r == CUDA_SUCCESS && in && (normal))                          \
        *out = in;                                                    \
    if (p && r == CUDA_SUCCESS && out) {                              \
        then;                                                         \
    }                                                                 \
    return r;

EXPORT CUresult cuDeviceGetDefaultMemPool(CUmempool *out, CUdevice device) { POOL_OF(cuDeviceGetDefaultMemPool, true, device, , out, device) }
EXPORT CUresult cuDeviceGetMemPool(CUmempool *out, CUdevice device) { POOL_OF(cuDeviceGetMemPool, false, device, , out, device) }
EXPORT CUresult cuMemGetDefaultMemPool(CUmempool *out, CUlocation *at, int type)
{
    POOL_OF(cuMemGetDefaultMemPool, true, device_at(at, type), learn_default(p, *out, at, type), out, at, type)
}
EXPORT CUresult cuMemGetMemPool(CUmempool *out, CUlocation *at, int type)
{
    POOL_OF(cuMemGetMemPool, false, device_at(at, type), learn_default(p, *out, at, type), out, at, type)
}

EXPORT CUresult cuMemPoolDestroy(CUmempool handle)
{
    struct process *p = ENTER();
    struct pool *pool = p ? pool_by_handle(p, handle) : NULL;
    if (pool && pool->device >= 0 && p->stands_in[pool->device] == (uintptr_t)handle)
        return CUDA_ERROR_INVALID_VALUE; /* the driver answers so for a default pool */
    if (pool && pool->r.charge)
        trim(p, pool, 0); /* give back what is free now, so that we see how much stays */
    CUresult r = CALL(cuMemPoolDestroy, handle);
    if (!pool || r != CUDA_SUCCESS)
        return r;
    bound_again(p, pool->device); /* if it was the current pool, the default one is current now */
    spin_lock(&pool->lock);
    forget(p, handle);
    pool_leave(p, pool);
    spin_unlock(&pool->lock);
    return r;
}

EXPORT CUresult cuMemPoolTrimTo(CUmempool handle, size_t keep)
{
    struct process *p = ENTER();
    struct pool *pool = p ? pool_by_handle(p, handle) : NULL;
    return pool && pool->r.charge ? trim(p, pool, keep) : CALL(cuMemPoolTrimTo, handle, keep);
}

/* The release threshold is how much a pool keeps at a synchronisation. If it was set without our
 * knowledge, we notice its effect when we next settle the pool. */
EXPORT CUresult cuMemPoolSetAttribute(CUmempool handle, int attribute, void *value)
{
    struct process *p = ENTER();
    struct pool *pool = p && value && attribute == CU_MEMPOOL_ATTR_RELEASE_THRESHOLD ? pool_by_handle(p, handle) : NULL;
    if (!pool)
        return CALL(cuMemPoolSetAttribute, handle, attribute, value);
    uint64_t before = pool->keeps, after = *(const uint64_t *)value;
    __atomic_store_n(&pool->keeps, before < after ? before : after, __ATOMIC_SEQ_CST);
    CUresult r = CALL(cuMemPoolSetAttribute, handle, attribute, value);
    __atomic_store_n(&pool->keeps, r == CUDA_SUCCESS ? after : before, __ATOMIC_SEQ_CST);
    return r;
}

/* --- settling all pools ------------------------------------------------------- */

void pools_settle(struct process *p, CUdevice device)
{
    if (device < 0 || device >= MAX_DEVICES)
        return;
    for (int i = next_charged(p, 0); i >= 0; i = next_charged(p, i + 1)) {
        struct pool *pool = &p->pools[i];
        if (pool->device != device || (pool->handle && !pool->r.charge))
            continue;
        spin_lock(&pool->lock);
        if (pool->handle)
            pool_resettle(p, &p->accounts[device], pool);
        else
            pool_leave(p, pool); /* the thread that freed its last part may not have seen that it was destroyed */
        spin_unlock(&pool->lock);
    }
    graphs_settle(p, device);
}

/* At a synchronisation a pool gives back what exceeds its release threshold. So what the pool has
 * free is uncommitted during the call, and after the call the driver is asked once. That is left
 * out for a pool that has nothing free or does not exceed its threshold. A process without pools
 * pays a few loads for all this. */
enum { SYNCED = 32 }; /* further pools are settled at the next call that concerns them */
struct sync {
    struct process *p;
    int n;
    uint16_t at[SYNCED]; /* indices of the pools whose free memory is uncommitted */
};

static void sync_begin(struct sync *s, struct process *p)
{
    s->p = p;
    s->n = 0;
    for (int i = next_charged(p, 0); i >= 0 && s->n < SYNCED; i = next_charged(p, i + 1)) {
        struct pool *pool = &p->pools[i];
        uint64_t charge = __atomic_load_n(&pool->r.charge, __ATOMIC_RELAXED);
        if (charge <= __atomic_load_n(&pool->keeps, __ATOMIC_RELAXED) || charge <= pool_live(pool))
            continue;
        spin_lock(&pool->lock);
        if (pool->handle && pool->r.charge > pool_live(pool)) {
            pool_uncommit_free(p, &p->accounts[pool->device], pool, pool_live(pool));
            s->at[s->n++] = (uint16_t)i;
        }
        spin_unlock(&pool->lock);
    }
}

static void sync_end(struct sync *s)
{
    for (int i = 0; i < s->n; i++) {
        struct pool *pool = &s->p->pools[s->at[i]];
        struct account *a = &s->p->accounts[pool->device];
        spin_lock(&pool->lock);
        if (pool->handle)
            pool_resettle(s->p, a, pool);
        recommit(a, &pool->r);
        pool_leave(s->p, pool);
        spin_unlock(&pool->lock);
    }
}

#define SYNCHRONIZE(name, ...)              \
    struct process *p = ENTER();            \
    struct sync s;                          \
    if (!p)                                 \
        return CALL(name, __VA_ARGS__);     \
    sync_begin(&s, p);                      \
    CUresult r = CALL(name, __VA_ARGS__);   \
    sync_end(&s);                           \
    return r;

EXPORT CUresult cuStreamSynchronize(CUstream stream) { SYNCHRONIZE(cuStreamSynchronize, stream) }
EXPORT CUresult cuStreamSynchronize_ptsz(CUstream stream) { SYNCHRONIZE(cuStreamSynchronize_ptsz, stream) }
EXPORT CUresult cuEventSynchronize(CUevent event) { SYNCHRONIZE(cuEventSynchronize, event) }
EXPORT CUresult cuCtxSynchronize_v2(CUcontext context) { SYNCHRONIZE(cuCtxSynchronize_v2, context) }
EXPORT CUresult cuCtxSynchronize(void) { SYNCHRONIZE(cuCtxSynchronize) }

/* --- making room ---------------------------------------------------------- */

/* lacks returns by how many bytes n exceeds the room that is left. */
static uint64_t lacks(const struct account *a, uint64_t n)
{
    uint64_t amount = AMOUNT(count_read(&a->usage->bound)) + n, ceiling = account_ceiling(a);
    return amount > ceiling ? amount - ceiling : 0;
}

/* relieve_pools trims pools until there is room for n. If all is false, a pool gives back whole
 * pieces, for what n still lacks. If all is true, it gives back everything that it does not use.
 * relieve_pools returns whether the pools may have more to give. A pool that gave less than it was
 * asked for has nothing left. */
static bool relieve_pools(struct process *p, struct account *a, uint64_t n, bool all)
{
    CUdevice device = (CUdevice)(a - p->accounts);
    bool more = false;
    for (int i = next_charged(p, 0); i >= 0; i = next_charged(p, i + 1)) {
        struct pool *pool = &p->pools[i];
        uint64_t lack = lacks(a, n), charge = __atomic_load_n(&pool->r.charge, __ATOMIC_ACQUIRE), live = pool_live(pool);
        if (!lack)
            return true;
        if (pool->device != device || !pool->handle || charge <= live)
            continue;
        lack = round_up(lack, PIECE);
        uint64_t keep = !all && lack < charge - live ? charge - lack : 0;
        trim(p, pool, keep);
        more = more || __atomic_load_n(&pool->r.charge, __ATOMIC_ACQUIRE) <= keep;
    }
    return more;
}

CUresult relax(int *mode)
{
    *mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    return CALL(cuThreadExchangeStreamCaptureMode, mode);
}

void unrelax(CUresult r, int *mode)
{
    if (r == CUDA_SUCCESS)
        CALL(cuThreadExchangeStreamCaptureMode, mode);
}

/* A pool that could not make room is not asked for the next requests: twice as many each time.
 * Before a refusal it is asked in any case (relieve). */
enum { LONGEST_PAUSE = 16 };

bool pool_makes_room(struct process *p, struct pool *pool, struct account *a, uint64_t n)
{
    uint64_t charge = __atomic_load_n(&pool->r.charge, __ATOMIC_ACQUIRE), live = pool_live(pool), lack = lacks(a, n), want = round_up(lack, PIECE);
    if (!lack || charge < live || charge - live < want)
        return false;
    uint32_t pause = __atomic_load_n(&pool->pause, __ATOMIC_RELAXED), wait = __atomic_load_n(&pool->wait, __ATOMIC_RELAXED);
    if (pause) {
        __atomic_store_n(&pool->pause, pause - 1, __ATOMIC_RELAXED);
        return false;
    }
    int mode;
    CUresult r = relax(&mode);
    trim(p, pool, charge - want);
    unrelax(r, &mode);
    bool made = account_reserve_quickly(a, n);
    wait = made ? wait / 2 : 2 * wait + 1 < LONGEST_PAUSE ? 2 * wait + 1 : wait;
    __atomic_store_n(&pool->wait, wait, __ATOMIC_RELAXED);
    __atomic_store_n(&pool->pause, wait, __ATOMIC_RELAXED);
    return made;
}

void relieve(struct account *a, uint64_t n)
{
    struct process *p = the_process;
    int mode;
    CUresult r = relax(&mode);
    pools_settle(p, (CUdevice)(a - p->accounts)); /* they may have shrunk by themselves */
    bool more = relieve_pools(p, a, n, false);
    if (lacks(a, n))
        relieve_graphs(p, (CUdevice)(a - p->accounts));
    if (more)
        relieve_pools(p, a, n, true);
    unrelax(r, &mode);
}
