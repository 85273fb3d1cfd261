/* SPDX-License-Identifier: Apache-2.0 */

/* Memory pools: cuMemAllocAsync and its kin. What counts is what a pool has
 * reserved of the GPU, in pieces that the driver chooses, not what is allocated
 * from it. So before an allocation for which the pool has no room we reserve
 * the piece that it will take, and afterwards the charge is settled to what the
 * driver says. A pool shrinks by itself when a stream is synchronised; that is
 * found at the next call that has to do with it, and before a refusal. */

#include "pool.h"

/* PIECE is in what pools grow. */
#define PIECE ((uint64_t)32 << 20)

void settle(struct account *a, struct reserve *r, uint64_t there, uint64_t held)
{
    there = there < MOST ? round_up(there, UNIT) : r->charge;
    uint64_t more = there > r->charge ? there - r->charge : 0, less = there < r->charge ? r->charge - there : 0;
    uint64_t paid = more < held ? more : held, freed = less < r->loose ? less : r->loose;
    if (paid)
        account_commit(a, paid);
    if (more > paid)
        account_force(a, more - paid);
    if (held > paid)
        account_cancel(a, held - paid);
    if (freed)
        account_cancel(a, freed);
    r->loose -= freed;
    if (less > freed)
        account_lost(a, less - freed);
    r->charge = there;
}

void loosen(struct account *a, struct reserve *r, uint64_t used)
{
    uint64_t may_go = r->charge > used ? (r->charge - used) / UNIT * UNIT : 0;
    r->loosers++;
    if (may_go > r->loose) {
        account_uncommit(a, may_go - r->loose);
        r->loose = may_go;
    }
}

void tighten(struct account *a, struct reserve *r)
{
    if (--r->loosers || !r->loose)
        return;
    account_commit(a, r->loose);
    r->loose = 0;
}

static bool figures(const struct pool *pool, uint64_t *reserved, uint64_t *used)
{
    CUmempool h = (CUmempool)(uintptr_t)pool->handle;
    return CALL(cuMemPoolGetAttribute, h, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, reserved) == CUDA_SUCCESS &&
           CALL(cuMemPoolGetAttribute, h, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, used) == CUDA_SUCCESS;
}

/* settle_pool returns what of the pool is used. */
static uint64_t settle_pool(struct account *a, struct pool *pool, uint64_t held)
{
    uint64_t reserved, used;
    if (!figures(pool, &reserved, &used)) {
        reserved = pool->r.charge + held;
        used = reserved;
    }
    settle(a, &pool->r, reserved, held);
    return used;
}

/* trim has a pool give back what it does not use, beyond keep. */
static CUresult trim(struct account *a, struct pool *pool, size_t keep)
{
    loosen(a, &pool->r, settle_pool(a, pool, 0));
    CUresult r = CALL(cuMemPoolTrimTo, (CUmempool)(uintptr_t)pool->handle, keep);
    settle_pool(a, pool, 0);
    tighten(a, &pool->r);
    return r;
}

/* --- knowing pools -------------------------------------------------------- */

static struct pool *known(struct process *p, CUmempool handle)
{
    for (int i = 0; i < MAX_POOLS; i++) {
        if (!__atomic_load_n(&p->pools[i].used, __ATOMIC_ACQUIRE))
            continue;
        if (__atomic_load_n(&p->pools[i].handle, __ATOMIC_ACQUIRE) == (uintptr_t)handle)
            return &p->pools[i];
    }
    return NULL;
}

static struct pool *learn(struct process *p, CUmempool handle, int device)
{
    struct pool *pool;
    spin_lock(&p->lock);
    pool = known(p, handle);
    for (int i = 0; !pool && i < MAX_POOLS; i++)
        if (!p->pools[i].used) {
            pool = &p->pools[i];
            pool->r = (struct reserve){0};
            pool->live = 0;
            pool->device = device;
            __atomic_store_n(&pool->handle, (uintptr_t)handle, __ATOMIC_RELEASE);
            __atomic_store_n(&pool->used, 1, __ATOMIC_RELEASE);
        }
    spin_unlock(&p->lock);
    return pool;
}

/* home says of which device a pool is that we have not seen made: a default one
 * mostly. */
static int home(CUmempool handle, int current)
{
    int n = 0;
    CUmempool h;
    CALL(cuDeviceGetCount, &n);
    for (int i = 0; i < n && i < MAX_DEVICES; i++)
        if (CALL(cuDeviceGetDefaultMemPool, &h, i) == CUDA_SUCCESS && h == handle)
            return i;
    return current;
}

/* --- allocating ----------------------------------------------------------- */

static bool capturing(CUstream s, bool per_thread)
{
    int status = 0;
    CUresult r = per_thread && !s ? CALL(cuStreamIsCapturing_ptsz, s, &status) : CALL(cuStreamIsCapturing, s, &status);
    return r == CUDA_SUCCESS && status != 0;
}

struct request {
    CUdeviceptr *out;
    size_t bytes;
    CUmempool pool;
    CUstream stream;
    bool per_thread;
    CUresult (*plain)(CUdeviceptr *, size_t, CUstream);
    CUresult (*from)(CUdeviceptr *, size_t, CUmempool, CUstream);
};

static CUresult pass(const struct request *q)
{
    return q->plain ? q->plain(q->out, q->bytes, q->stream)
           : q->from ? q->from(q->out, q->bytes, q->pool, q->stream)
                     : CUDA_ERROR_NOT_FOUND;
}

static CUresult allocate(struct process *p, struct request *q)
{
    struct where at;
    bool refuse;
    if (!p || !q->out || !q->bytes || !where_stream(p, &at, q->stream) || (!q->plain && !q->from))
        return pass(q);
    if (q->plain && CALL(cuDeviceGetMemPool, &q->pool, at.device) != CUDA_SUCCESS)
        return pass(q);
    struct pool *pool = known(p, q->pool);
    if (!pool)
        pool = learn(p, q->pool, home(q->pool, at.device));
    if (pool && pool->device < 0)
        return pass(q);
    struct account *a = account_of(p, pool ? pool->device : at.device, &refuse);
    if (!a && !refuse)
        return pass(q);
    if (capturing(q->stream, q->per_thread))
        return pass(q); /* becomes a node of a graph: see graph.c */
    if (!a || !pool || q->bytes >= MOST)
        return CUDA_ERROR_OUT_OF_MEMORY;

    spin_lock(&pool->lock);
    uint64_t reserved = 0, used = 0, n = round_up(q->bytes, UNIT), held = 0;
    if (figures(pool, &reserved, &used))
        settle(a, &pool->r, reserved, 0);
    uint64_t room = reserved > used ? reserved - used : 0;
    if (n > room) {
        held = round_up(n - room, PIECE);
        if (!account_reserve(a, held)) {
            spin_unlock(&pool->lock);
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
    }
    CUresult r = pass(q);
    settle_pool(a, pool, held);
    __atomic_store_n(&p->pools_charged, 1, __ATOMIC_RELEASE);
    if (r == CUDA_SUCCESS) {
        struct entry e = {.key = *q->out, .bytes = n, .owner = (uint64_t)(pool - p->pools), .space = SPACE_POOLED, .how = HOW_NOTE, .device = pool->device}, old;
        if (table_put(&p->table, &e, &old) && !old.how)
            pool->live++;
    }
    spin_unlock(&pool->lock);
    return r;
}

EXPORT CUresult cuMemAllocAsync(CUdeviceptr *out, size_t bytes, CUstream s)
{
    struct process *p = ENTER();
    struct request q = {.out = out, .bytes = bytes, .stream = s, .plain = real.cuMemAllocAsync};
    return allocate(p, &q);
}

EXPORT CUresult cuMemAllocAsync_ptsz(CUdeviceptr *out, size_t bytes, CUstream s)
{
    struct process *p = ENTER();
    struct request q = {.out = out, .bytes = bytes, .stream = s, .per_thread = true, .plain = real.cuMemAllocAsync_ptsz};
    return allocate(p, &q);
}

EXPORT CUresult cuMemAllocFromPoolAsync(CUdeviceptr *out, size_t bytes, CUmempool pool, CUstream s)
{
    struct process *p = ENTER();
    struct request q = {.out = out, .bytes = bytes, .pool = pool, .stream = s, .from = real.cuMemAllocFromPoolAsync};
    return allocate(p, &q);
}

EXPORT CUresult cuMemAllocFromPoolAsync_ptsz(CUdeviceptr *out, size_t bytes, CUmempool pool, CUstream s)
{
    struct process *p = ENTER();
    struct request q = {.out = out, .bytes = bytes, .pool = pool, .stream = s, .per_thread = true, .from = real.cuMemAllocFromPoolAsync_ptsz};
    return allocate(p, &q);
}

/* --- freeing -------------------------------------------------------------- */

/* A pool that was destroyed lives on in its allocations; the last of them takes
 * what is left of its charge along, and the place goes when nobody is at it. */
static void leave(struct process *p, struct pool *pool)
{
    if (pool->handle || pool->live)
        return;
    if (pool->r.charge)
        settle(&p->accounts[pool->device], &pool->r, 0, 0);
    if (!pool->r.loosers)
        __atomic_store_n(&pool->used, 0, __ATOMIC_RELEASE);
}

bool pool_free(struct process *p, CUdeviceptr at, CUresult *r, CUresult (*call)(CUdeviceptr), CUresult (*async)(CUdeviceptr, CUstream), CUstream s)
{
    struct entry e, old;
    if (!table_take(&p->table, at, SPACE_POOLED, &e))
        return false;
    struct pool *pool = &p->pools[e.owner];
    *r = call ? call(at) : async(at, s);
    if (*r != CUDA_SUCCESS) {
        table_put(&p->table, &e, &old);
        return true;
    }
    spin_lock(&pool->lock);
    pool->live--;
    leave(p, pool);
    spin_unlock(&pool->lock);
    return true;
}

static CUresult free_async(struct process *p, CUdeviceptr at, CUstream s, CUresult (*call)(CUdeviceptr, CUstream))
{
    struct taken t;
    CUresult r;
    if (pool_free(p, at, &r, NULL, call, s))
        return r;
    if (!charge_take(p, &t, at, SPACE_ADDRESS))
        return call(at, s);
    return charge_end(p, &t, call(at, s));
}

EXPORT CUresult cuMemFreeAsync(CUdeviceptr at, CUstream s)
{
    struct process *p = ENTER();
    return p && real.cuMemFreeAsync ? free_async(p, at, s, real.cuMemFreeAsync) : CALL(cuMemFreeAsync, at, s);
}

EXPORT CUresult cuMemFreeAsync_ptsz(CUdeviceptr at, CUstream s)
{
    struct process *p = ENTER();
    return p && real.cuMemFreeAsync_ptsz ? free_async(p, at, s, real.cuMemFreeAsync_ptsz) : CALL(cuMemFreeAsync_ptsz, at, s);
}

/* --- pools by hand -------------------------------------------------------- */

EXPORT CUresult cuMemPoolCreate(CUmempool *out, const CUpoolprops *props)
{
    struct process *p = ENTER();
    CUresult r = CALL(cuMemPoolCreate, out, props);
    if (!p || r != CUDA_SUCCESS || !out || !props)
        return r;
    bool here = props->location.type == CU_MEM_LOCATION_TYPE_DEVICE && props->location.id >= 0 && props->location.id < MAX_DEVICES;
    struct pool *old = known(p, *out);
    if (old)
        __atomic_store_n(&old->handle, 0, __ATOMIC_RELEASE); /* it ended where we did not see it */
    if (learn(p, *out, here ? props->location.id : -1))
        return r;
    CALL(cuMemPoolDestroy, *out); /* more pools than anybody has */
    return CUDA_ERROR_OUT_OF_MEMORY;
}

EXPORT CUresult cuMemPoolDestroy(CUmempool handle)
{
    struct process *p = ENTER();
    struct pool *pool = p ? known(p, handle) : NULL;
    if (!pool)
        return CALL(cuMemPoolDestroy, handle);
    spin_lock(&pool->lock);
    if (pool->device >= 0 && pool->r.charge)
        trim(&p->accounts[pool->device], pool, 0); /* it goes now, and we see how much stays */
    CUresult r = CALL(cuMemPoolDestroy, handle);
    if (r == CUDA_SUCCESS) {
        __atomic_store_n(&pool->handle, 0, __ATOMIC_RELEASE);
        leave(p, pool);
    }
    spin_unlock(&pool->lock);
    return r;
}

EXPORT CUresult cuMemPoolTrimTo(CUmempool handle, size_t keep)
{
    struct process *p = ENTER();
    struct pool *pool = p ? known(p, handle) : NULL;
    if (!pool || pool->device < 0)
        return CALL(cuMemPoolTrimTo, handle, keep);
    spin_lock(&pool->lock);
    CUresult r = pool->r.charge ? trim(&p->accounts[pool->device], pool, keep) : CALL(cuMemPoolTrimTo, handle, keep);
    spin_unlock(&pool->lock);
    return r;
}

/* --- looking at all ------------------------------------------------------- */

static bool try_lock(uint32_t *lock) { return !__atomic_exchange_n(lock, 1, __ATOMIC_ACQUIRE); }

/* each_pool settles the charged pools of a device, or trims them all.
 * One that is locked is being settled by whoever has it, maybe ourselves. */
static void each_pool(struct process *p, CUdevice device, bool all)
{
    for (int i = 0; i < MAX_POOLS; i++) {
        struct pool *pool = &p->pools[i];
        if (!__atomic_load_n(&pool->used, __ATOMIC_ACQUIRE) || pool->device != device || !pool->r.charge || !try_lock(&pool->lock))
            continue;
        if (pool->handle && pool->r.charge) {
            if (all)
                trim(&p->accounts[device], pool, 0);
            else
                settle_pool(&p->accounts[device], pool, 0);
        }
        spin_unlock(&pool->lock);
    }
}

void pools_settle(struct process *p, CUdevice device)
{
    if (device < 0 || device >= MAX_DEVICES)
        return;
    each_pool(p, device, false);
    graphs_settle(p, device);
}

/* Synchronising is where a pool gives back what its threshold does not keep.
 * That is uncommitted for as long as it takes; a process without pools pays one
 * load for it. */
struct sync {
    struct process *p;
    uint64_t at[MAX_POOLS / 64]; /* bits: these are loosened */
};

static void sync_begin(struct sync *s, struct process *p)
{
    *s = (struct sync){.p = p};
    for (int i = 0; i < MAX_POOLS; i++) {
        struct pool *pool = &p->pools[i];
        if (!__atomic_load_n(&pool->used, __ATOMIC_ACQUIRE) || pool->device < 0)
            continue;
        spin_lock(&pool->lock);
        if (pool->used && pool->handle && pool->r.charge) {
            struct account *a = &p->accounts[pool->device];
            loosen(a, &pool->r, settle_pool(a, pool, 0));
            s->at[i / 64] |= (uint64_t)1 << i % 64;
        }
        spin_unlock(&pool->lock);
    }
}

static void sync_end(struct sync *s)
{
    for (int i = 0; i < MAX_POOLS; i++) {
        if (!(s->at[i / 64] >> i % 64 & 1))
            continue;
        struct pool *pool = &s->p->pools[i];
        struct account *a = &s->p->accounts[pool->device];
        spin_lock(&pool->lock);
        if (pool->handle)
            settle_pool(a, pool, 0);
        tighten(a, &pool->r);
        leave(s->p, pool);
        spin_unlock(&pool->lock);
    }
}

#define SYNCHRONIZE(name, ...)                                              \
    struct process *p = ENTER();                                            \
    struct sync s;                                                          \
    if (!p || !__atomic_load_n(&p->pools_charged, __ATOMIC_RELAXED))        \
        return CALL(name, __VA_ARGS__);                                     \
    sync_begin(&s, p);                                                      \
    CUresult r = CALL(name, __VA_ARGS__);                                   \
    sync_end(&s);                                                           \
    return r;

EXPORT CUresult cuStreamSynchronize(CUstream stream) { SYNCHRONIZE(cuStreamSynchronize, stream) }
EXPORT CUresult cuStreamSynchronize_ptsz(CUstream stream) { SYNCHRONIZE(cuStreamSynchronize_ptsz, stream) }
EXPORT CUresult cuEventSynchronize(void *event) { SYNCHRONIZE(cuEventSynchronize, event) }
EXPORT CUresult cuCtxSynchronize_v2(CUcontext context) { SYNCHRONIZE(cuCtxSynchronize_v2, context) }
EXPORT CUresult cuCtxSynchronize(void)
{
    struct process *p = ENTER();
    struct sync s;
    if (!p || !__atomic_load_n(&p->pools_charged, __ATOMIC_RELAXED) || !real.cuCtxSynchronize)
        return real.cuCtxSynchronize ? real.cuCtxSynchronize() : CUDA_ERROR_NOT_FOUND;
    sync_begin(&s, p);
    CUresult r = real.cuCtxSynchronize();
    sync_end(&s);
    return r;
}

/* Before a refusal a process gives back what its pools and graphs have cached,
 * which the driver would do likewise where the card is full. */
void relieve(struct account *a)
{
    struct process *p = the_process;
    CUdevice device = (CUdevice)(a - p->accounts);
    int mode = CU_STREAM_CAPTURE_MODE_RELAXED; /* a capture is not to fail for it */
    CUresult r = CALL(cuThreadExchangeStreamCaptureMode, &mode);
    each_pool(p, device, true);
    relieve_graphs(p, device);
    if (r == CUDA_SUCCESS)
        CALL(cuThreadExchangeStreamCaptureMode, &mode);
}
