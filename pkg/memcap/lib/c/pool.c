/* SPDX-License-Identifier: Apache-2.0 */

/* Memory pools: cuMemAllocAsync and its kin. What counts is what a pool has
 * reserved of the GPU, in pieces that the driver chooses, not what is allocated
 * from it. Where that is enough for a request the driver may let the pool grow all
 * the same: it does so before it takes what another stream has freed. So before
 * every allocation we reserve all that the pool may grow by, whatever it has free;
 * afterwards the driver is asked what the pool has, and what was not needed is
 * cancelled.
 *
 * Several allocations may be under way. Each pays for what the pool has grown by,
 * whoever of them made it grow, up to what it has reserved itself, and leaves the
 * rest to the others: together they have reserved it all. So none waits for
 * another, and nothing is locked while one waits for room.
 *
 * Where the limit has no room for the pool to grow, but the pool has room, see
 * reuse.c: what streams have freed there is made such that the driver can take it
 * without growing, and then one allocation is made without a reservation, at a time
 * when no other is under way (pool_alone), and none without a reservation in any other
 * process that shares the page (attempt.h). Should the pool grow all the same that is
 * undone, and written to the usage page (undone).
 *
 * A pool shrinks by itself when a stream is synchronised; that is found at the
 * next call that has to do with it, and before a refusal. */

#include "pool.h"
#include "property.h"

/* PIECE is in what pools grow, unless one was seen to grow by more. */
#define PIECE ((uint64_t)32 << 20)

static void gain(struct account *a, struct reserve *r, uint64_t n)
{
    if (r->managed)
        count_add(&a->slot->managed, n);
    if (r->loosers)
        r->loose += n; /* it may go at once */
    else
        account_commit(a, n);
    __atomic_store_n(&r->charge, r->charge + n, __ATOMIC_RELEASE);
}

static void lose(struct account *a, struct reserve *r, uint64_t n)
{
    uint64_t freed = n < r->loose ? n : r->loose;
    if (r->managed)
        count_sub(&a->slot->managed, n);
    if (freed)
        account_cancel(a, freed);
    r->loose -= freed;
    if (n > freed)
        account_lost(a, n - freed);
    __atomic_store_n(&r->charge, r->charge - n, __ATOMIC_RELEASE);
}

uint64_t settle(struct account *a, struct reserve *r, uint64_t there, uint64_t held)
{
    there = there < MOST ? round_up(there, UNIT) : r->charge;
    uint64_t more = there > r->charge ? there - r->charge : 0, paid = more < held ? more : held;
    if (there < r->charge && !r->trims) /* what is being given back may not be gone yet */
        lose(a, r, r->charge - there);
    if (paid)
        gain(a, r, paid);
    if (held > paid)
        account_cancel(a, held - paid);
    return more - paid;
}

void settle_force(struct account *a, struct reserve *r, uint64_t rest)
{
    if (r->managed)
        count_add(&a->slot->managed, rest);
    account_force(a, rest);
    if (r->loosers) {
        account_uncommit(a, rest);
        r->loose += rest;
    }
    __atomic_store_n(&r->charge, r->charge + rest, __ATOMIC_RELEASE);
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

/* --- knowing pools -------------------------------------------------------- */

static uint64_t home_of(CUmempool handle) { return ((uintptr_t)handle * 0x9E3779B97F4A7C15u) >> 50; }
_Static_assert(MAX_POOLS == 1 << 14, "a home is one of them");

static struct pool *known(struct process *p, CUmempool handle)
{
    uint64_t home = home_of(handle), probe = __atomic_load_n(&p->pools_probe, __ATOMIC_ACQUIRE);
    for (uint64_t i = 0; i <= probe; i++) {
        struct pool *pool = &p->pools[(home + i) % MAX_POOLS];
        if (__atomic_load_n(&pool->handle, __ATOMIC_ACQUIRE) == (uintptr_t)handle && __atomic_load_n(&pool->used, __ATOMIC_ACQUIRE))
            return pool;
    }
    return NULL;
}

/* learn writes down a pool; NULL: there are more than anybody has. */
static struct pool *learn(struct process *p, CUmempool handle, enum means means, CUdevice device)
{
    struct pool *pool;
    uint64_t home = home_of(handle);
    spin_lock(&p->lock);
    pool = known(p, handle);
    for (uint32_t i = 0; !pool && i < MAX_POOLS / 4; i++) {
        struct pool *at = &p->pools[(home + i) % MAX_POOLS];
        if (__atomic_load_n(&at->used, __ATOMIC_ACQUIRE))
            continue;
        pool = at;
        *pool = (struct pool){.device = device, .passed = means == MEANS_NOTHING || means == MEANS_UNKNOWN, .r.managed = means == MEANS_MANAGED};
        if (i > p->pools_probe)
            __atomic_store_n(&p->pools_probe, i, __ATOMIC_RELEASE);
        __atomic_store_n(&pool->used, 1, __ATOMIC_RELEASE);
        __atomic_store_n(&pool->handle, (uintptr_t)handle, __ATOMIC_RELEASE);
    }
    spin_unlock(&p->lock);
    return pool;
}

/* learn_anew is for a handle that the driver has just made. */
static struct pool *learn_anew(struct process *p, CUmempool handle, enum means means, CUdevice device)
{
    struct pool *old = known(p, handle);
    if (old)
        __atomic_store_n(&old->handle, 0, __ATOMIC_RELEASE); /* it ended where we did not see it */
    return learn(p, handle, means, device);
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

/* leave gives up the place of a pool that was destroyed, when nobody is at it. It
 * lives on in its allocations; the last of them takes what is left of its charge
 * along. */
static void leave(struct process *p, struct pool *pool)
{
    if (pool->handle || !pool->used || __atomic_load_n(&pool->flight, __ATOMIC_SEQ_CST) || pool->r.loosers)
        return;
    if (pool->r.charge)
        settle(&p->accounts[pool->device], &pool->r, 0, 0);
    uint64_t i = (uint64_t)(pool - p->pools);
    __atomic_and_fetch(&p->pools_charged[i / 64], ~((uint64_t)1 << i % 64), __ATOMIC_ACQ_REL);
    freers_end(pool);
    __atomic_store_n(&pool->used, 0, __ATOMIC_RELEASE);
}

/* next_charged is the first pool from an index on that has, or had, a charge. */
static int next_charged(const struct process *p, int i)
{
    for (int w = i / 64; w < MAX_POOLS / 64; i = ++w * 64) {
        uint64_t words = __atomic_load_n(&p->pools_words[w / 64], __ATOMIC_RELAXED) >> w % 64;
        if (!words) {
            w |= 63;
            continue;
        }
        if (!(words & 1)) {
            w += __builtin_ctzll(words) - 1;
            continue;
        }
        uint64_t bits = __atomic_load_n(&p->pools_charged[w], __ATOMIC_RELAXED) >> i % 64;
        if (bits)
            return i + __builtin_ctzll(bits);
    }
    return -1;
}

/* --- what a pool has ------------------------------------------------------- */

static bool reserved_now(const struct pool *pool, uint64_t *there)
{
    return CALL(cuMemPoolGetAttribute, (CUmempool)(uintptr_t)pool->handle, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, there) == CUDA_SUCCESS;
}

/* settle_pool asks the driver, under the lock: an attribute is had in no time, and
 * an answer that another thread has overtaken would be wrong. */
static uint64_t settle_pool(struct process *p, struct account *a, struct pool *pool, uint64_t held)
{
    uint64_t there, had = pool->r.charge;
    if (!pool->handle || !reserved_now(pool, &there))
        there = had + held;
    uint64_t rest = settle(a, &pool->r, there, held);
    if (!had && (pool->r.charge || rest)) {
        uint64_t i = (uint64_t)(pool - p->pools);
        __atomic_or_fetch(&p->pools_charged[i / 64], (uint64_t)1 << i % 64, __ATOMIC_ACQ_REL);
        __atomic_or_fetch(&p->pools_words[i / 4096], (uint64_t)1 << i / 64 % 64, __ATOMIC_ACQ_REL);
    }
    return rest;
}

/* looked settles where nothing was reserved: what nobody who is under way will pay
 * for is there all the same. */
static void looked(struct process *p, struct account *a, struct pool *pool)
{
    uint64_t rest = settle_pool(p, a, pool, 0);
    if (rest && __atomic_load_n(&pool->flight, __ATOMIC_SEQ_CST) < FLIGHT)
        settle_force(a, &pool->r, rest);
}

/* Nobody is kept waiting for long by one that is made alone: it has no more than a
 * few calls of the driver to make, none of which waits for the GPU. Should such a
 * thread have been ended in the middle, the others go on. */
enum { ALONE_US = 5 * 1000 * 1000 };

static bool wait_while(const uint32_t *word)
{
    for (uint64_t i = 0, until = 0; __atomic_load_n(word, __ATOMIC_SEQ_CST); i++)
        if (i < 200)
            cpu_relax();
        else if (!until)
            until = now_us() + ALONE_US;
        else if (now_us() > until)
            return false;
        else
            nap_us(20);
    return true;
}

/* let_others ends an allocation that was made alone, for those who have waited for it
 * in vain. */
static void let_others(struct pool *pool)
{
    if (!wait_while(&pool->alone))
        __atomic_store_n(&pool->alone, 0, __ATOMIC_SEQ_CST);
}

/* trim has a pool give back what it does not use, beyond keep. */
static CUresult trim(struct process *p, struct pool *pool, size_t keep)
{
    struct account *a = &p->accounts[pool->device];
    spin_lock(&pool->lock);
    loosen(a, &pool->r, pool_live(pool));
    spin_unlock(&pool->lock);
    for (;; let_others(pool)) {
        __atomic_add_fetch(&pool->r.trims, 1, __ATOMIC_SEQ_CST);
        if (!__atomic_load_n(&pool->alone, __ATOMIC_SEQ_CST))
            break;
        __atomic_sub_fetch(&pool->r.trims, 1, __ATOMIC_SEQ_CST);
    }
    CUresult r = CALL(cuMemPoolTrimTo, (CUmempool)(uintptr_t)pool->handle, keep);
    spin_lock(&pool->lock);
    __atomic_sub_fetch(&pool->r.trims, 1, __ATOMIC_SEQ_CST);
    looked(p, a, pool);
    tighten(a, &pool->r);
    leave(p, pool);
    spin_unlock(&pool->lock);
    return r;
}

/* --- allocating ----------------------------------------------------------- */

bool capturing(const struct process *p, CUstream s, bool per_thread)
{
    int status = 0;
    if (!__atomic_load_n(&p->captures, __ATOMIC_RELAXED))
        return false;
    CUresult r = per_thread && !s ? CALL(cuStreamIsCapturing_ptsz, s, &status) : CALL(cuStreamIsCapturing, s, &status);
    return r == CUDA_SUCCESS && status != 0;
}

static CUresult pass(const struct request *q)
{
    return q->plain ? q->plain(q->out, q->bytes, q->stream)
           : q->from ? q->from(q->out, q->bytes, q->pool, q->stream)
                     : CUDA_ERROR_NOT_FOUND;
}

static void enter_pool(struct pool *pool, uint64_t n)
{
    for (;;) {
        count_add(&pool->flight, FLIGHT + n / UNIT);
        if (!__atomic_load_n(&pool->alone, __ATOMIC_SEQ_CST))
            return;
        count_sub(&pool->flight, FLIGHT + n / UNIT);
        let_others(pool);
    }
}

static void leave_pool(struct process *p, struct pool *pool, uint64_t n)
{
    count_sub(&pool->flight, n / UNIT + FLIGHT);
    if (__atomic_load_n(&pool->handle, __ATOMIC_RELAXED))
        return;
    spin_lock(&pool->lock);
    leave(p, pool);
    spin_unlock(&pool->lock);
}

/* remember writes down what an allocation has, and returns what it adds to what
 * lives: a place that we did not see freed is no more. */
static bool remember(struct process *p, struct pool *pool, CUdeviceptr at, uint64_t n)
{
    struct entry e = {.key = at, .bytes = n, .owner = (uint64_t)(pool - p->pools), .space = SPACE_POOLED, .how = HOW_NOTE, .device = pool->device}, old;
    if (!table_put(&p->table, &e, &old))
        return false;
    if (old.how)
        count_sub(&p->pools[old.owner].flight, old.bytes / UNIT);
    return true;
}

/* Of how pools grow we see whether a request makes a pool grow by whole pieces
 * (coarse) or by just its own size (fine): a bit for requests of up to a piece,
 * and one for larger ones. */
static void watch_growth(struct process *p, uint64_t n, uint64_t grown)
{
    uint64_t exact = round_up(n, BLOCK);
    uint32_t bit = n > PIECE ? 2 : 1;
    if (!grown)
        return;
    if (grown > exact)
        __atomic_or_fetch(&p->coarse, bit, __ATOMIC_RELAXED);
    else if (exact % PIECE)
        __atomic_or_fetch(&p->fine, bit, __ATOMIC_RELAXED);
    if (n <= PIECE && grown > PIECE && grown <= 32 * PIECE && grown > __atomic_load_n(&p->piece, __ATOMIC_RELAXED))
        __atomic_store_n(&p->piece, round_up(grown, PIECE), __ATOMIC_RELAXED);
}

static uint64_t growth_of(const struct process *p, uint64_t n)
{
    uint64_t piece = __atomic_load_n(&p->piece, __ATOMIC_RELAXED);
    if (piece < PIECE)
        piece = PIECE;
    return (n + piece - 1) / piece * piece;
}

/* undo ends an allocation for which a pool has grown by what there is no room
 * for. Nobody has used it, so it need not be freed on its stream. */
static void undo(const struct request *q, struct pool *pool, struct account *a, uint64_t over)
{
    uint64_t most = __atomic_load_n(&a->usage->undone, __ATOMIC_RELAXED);
    while (over > most && !__atomic_compare_exchange_n(&a->usage->undone, &most, over, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        ;
    if (q->out && CALL(cuMemFree_v2, *q->out) != CUDA_SUCCESS)
        CALL(cuMemFreeAsync, *q->out, q->stream);
    CALL(cuMemPoolTrimTo, (CUmempool)(uintptr_t)pool->handle, __atomic_load_n(&pool->r.charge, __ATOMIC_ACQUIRE));
}

/* grown settles a pool after an allocation for which held was reserved. False:
 * there is more than that, which was for nobody else, and no room for it: *over. */
static bool grown(struct process *p, struct pool *pool, struct account *a, uint64_t n, uint64_t held, uint64_t *over)
{
    spin_lock(&pool->lock);
    uint64_t had = pool->r.charge, rest = settle_pool(p, a, pool, held);
    bool only = __atomic_load_n(&pool->flight, __ATOMIC_SEQ_CST) < 2 * FLIGHT, fits = true;
    if (only)
        watch_growth(p, n, pool->r.charge + rest > had ? pool->r.charge + rest - had : 0);
    if (rest && only) {
        fits = account_reserve_quickly(a, rest);
        if (fits)
            gain(a, &pool->r, rest);
    }
    spin_unlock(&pool->lock);
    *over = rest;
    return fits;
}

/* undone is undo, and charges what the driver has kept. */
static CUresult undone(struct process *p, const struct request *q, struct pool *pool, struct account *a, uint64_t over, CUresult r)
{
    struct request none = {.out = NULL};
    undo(r == CUDA_SUCCESS ? q : &none, pool, a, over);
    spin_lock(&pool->lock);
    uint64_t rest = settle_pool(p, a, pool, 0);
    if (rest && __atomic_load_n(&pool->flight, __ATOMIC_SEQ_CST) < 2 * FLIGHT)
        settle_force(a, &pool->r, rest);
    spin_unlock(&pool->lock);
    return r == CUDA_SUCCESS ? CUDA_ERROR_OUT_OF_MEMORY : r;
}

/* ordinary allocates n bytes, for which held was reserved. */
static CUresult ordinary(struct process *p, const struct request *q, struct pool *pool, struct account *a, uint64_t n, uint64_t held)
{
    uint64_t there, over;
    enter_pool(pool, n);
    CUresult r = pass(q);
    /* First the charge: what it has, and we with it, is in the driver's figure. */
    uint64_t charge = __atomic_load_n(&pool->r.charge, __ATOMIC_ACQUIRE);
    if (reserved_now(pool, &there) && there == charge)
        account_cancel(a, held);
    else if (!grown(p, pool, a, n, held, &over))
        r = undone(p, q, pool, a, over, r);
    leave_pool(p, pool, r == CUDA_SUCCESS && remember(p, pool, *q->out, n) ? 0 : n);
    return r;
}

/* only_one waits for those who are at a pool. False: they do not come back, or the
 * pool has lost its room meanwhile. */
static bool only_one(struct pool *pool)
{
    uint64_t there, until = now_us() + ALONE_US;
    while (__atomic_load_n(&pool->flight, __ATOMIC_SEQ_CST) >= 2 * FLIGHT || __atomic_load_n(&pool->r.trims, __ATOMIC_SEQ_CST))
        if (now_us() > until)
            return false;
        else
            cpu_relax();
    return reserved_now(pool, &there) && pool_live(pool) <= there;
}

CUresult pool_alone(struct process *p, const struct request *q, struct pool *pool, struct account *a, uint64_t n)
{
    uint64_t over, most = growth_of(p, n);
    CUresult r = CUDA_ERROR_OUT_OF_MEMORY;
    if (!attempt_begin(a))
        return r;
    for (uint32_t none = 0; !__atomic_compare_exchange_n(&pool->alone, &none, 1, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); none = 0)
        if (!wait_while(&pool->alone)) {
            attempt_end(a);
            return r;
        }
    count_add(&pool->flight, FLIGHT + n / UNIT);
    if (only_one(pool)) {
        reserved_add(a, most); /* more than we have of bound: something is under way */
        r = pass(q);
        if (!grown(p, pool, a, n, 0, &over))
            r = undone(p, q, pool, a, over, r);
        reserved_sub(a, most);
    }
    leave_pool(p, pool, r == CUDA_SUCCESS && remember(p, pool, *q->out, n) ? 0 : n);
    __atomic_store_n(&pool->alone, 0, __ATOMIC_SEQ_CST);
    attempt_end(a);
    return r;
}

/* near allocates where there is no room for all that the pool may grow by. */
COLD static CUresult near(struct process *p, const struct request *q, struct pool *pool, struct account *a, uint64_t n, uint64_t held)
{
    uint64_t exact = round_up(n, BLOCK);
    uint32_t bit = n > PIECE ? 2 : 1, seen = __atomic_load_n(&p->coarse, __ATOMIC_RELAXED), fine = __atomic_load_n(&p->fine, __ATOMIC_RELAXED);
    bool less = exact < held && !(seen & bit);
    CUresult r = CUDA_ERROR_OUT_OF_MEMORY;
    __atomic_store_n(&pool->near, true, __ATOMIC_RELAXED);
    if (less && (fine & bit) && account_reserve_quickly(a, exact))
        r = ordinary(p, q, pool, a, n, exact);
    if (r == CUDA_ERROR_OUT_OF_MEMORY)
        r = reuse(p, q, pool, a, n);
    if (r == CUDA_ERROR_OUT_OF_MEMORY && account_reserve_slowly(a, less && (fine & bit) ? exact : held))
        r = ordinary(p, q, pool, a, n, less && (fine & bit) ? exact : held);
    else if (r == CUDA_ERROR_OUT_OF_MEMORY)
        r = reuse(p, q, pool, a, n); /* others may have freed something meanwhile */
    if (r == CUDA_ERROR_OUT_OF_MEMORY && less && !(fine & bit) && account_reserve_quickly(a, exact))
        r = ordinary(p, q, pool, a, n, exact);
    return r;
}

/* device_of is the device that a stream is of. */
static bool device_of(struct process *p, CUstream s, CUdevice *device)
{
    struct where at;
    int n = (int)__atomic_load_n(&p->devices, __ATOMIC_RELAXED);
    if (!n && CALL(cuDeviceGetCount, &n) == CUDA_SUCCESS && n > 0)
        __atomic_store_n(&p->devices, (uint32_t)n, __ATOMIC_RELAXED);
    *device = 0;
    if (n == 1)
        return true;
    if (!where_stream(p, &at, s))
        return false;
    *device = at.device;
    return true;
}

/* find says which pool a request is of; false: pass it on. */
static bool find(struct process *p, struct request *q, uint32_t changes, struct pool **pool)
{
    CUdevice device = 0;
    *pool = q->plain ? NULL : known(p, q->pool);
    if (*pool && (*pool)->device >= 0)
        return true;
    if (*pool && (*pool)->passed)
        return false;
    if (!device_of(p, q->stream, &device) || device < 0 || device >= MAX_DEVICES)
        return false;
    if (*pool) { /* it counts on the first device that has used it */
        int32_t nowhere = DEVICE_CURRENT;
        __atomic_compare_exchange_n(&(*pool)->device, &nowhere, device, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
        return true;
    }
    if (q->plain) {
        uint64_t now = __atomic_load_n(&p->current[device], __ATOMIC_ACQUIRE);
        if ((uint32_t)now && now >> 32 == changes) {
            *pool = &p->pools[(uint32_t)now - 1];
            return true;
        }
        if (CALL(cuDeviceGetMemPool, &q->pool, device) != CUDA_SUCCESS)
            return false;
        *pool = known(p, q->pool);
    }
    if (!*pool)
        *pool = learn(p, q->pool, MEANS_COUNTED, home(q->pool, device));
    if (*pool && q->plain)
        __atomic_store_n(&p->current[device], (uint64_t)changes << 32 | (uint64_t)(*pool - p->pools + 1), __ATOMIC_RELEASE);
    return true;
}

static CUresult allocate(struct process *p, struct request *q)
{
    bool refuse;
    struct pool *pool;
    if (!p || !q->out || !q->bytes || (!q->plain && !q->from) || capturing(p, q->stream, q->per_thread))
        return pass(q); /* a captured one becomes a node of a graph: see graph.c */
    uint32_t changes = __atomic_load_n(&p->pool_changes, __ATOMIC_ACQUIRE);
    if (!find(p, q, changes, &pool))
        return pass(q);
    if (pool && pool->passed)
        return pass(q);
    struct account *a = account_of(p, pool ? pool->device : 0, &refuse);
    if (!a && !refuse)
        return pass(q);
    if (!a || !pool || q->bytes >= MOST)
        return CUDA_ERROR_OUT_OF_MEMORY;
    uint64_t n = round_up(q->bytes, UNIT), held = growth_of(p, n);
    CUresult r = account_reserve_quickly(a, held) ? ordinary(p, q, pool, a, n, held) : near(p, q, pool, a, n, held);
    if (__builtin_expect(changes != __atomic_load_n(&p->pool_changes, __ATOMIC_ACQUIRE), 0))
        pools_settle(p, pool->device); /* it may have been another pool's */
    return r;
}

HOT EXPORT CUresult cuMemAllocAsync(CUdeviceptr *out, size_t bytes, CUstream s)
{
    struct process *p = ENTER();
    struct request q = {.out = out, .bytes = bytes, .stream = s, .plain = real.cuMemAllocAsync};
    return allocate(p, &q);
}

HOT EXPORT CUresult cuMemAllocAsync_ptsz(CUdeviceptr *out, size_t bytes, CUstream s)
{
    struct process *p = ENTER();
    struct request q = {.out = out, .bytes = bytes, .stream = s, .per_thread = true, .plain = real.cuMemAllocAsync_ptsz};
    return allocate(p, &q);
}

HOT EXPORT CUresult cuMemAllocFromPoolAsync(CUdeviceptr *out, size_t bytes, CUmempool pool, CUstream s)
{
    struct process *p = ENTER();
    struct request q = {.out = out, .bytes = bytes, .pool = pool, .stream = s, .from = real.cuMemAllocFromPoolAsync};
    return allocate(p, &q);
}

HOT EXPORT CUresult cuMemAllocFromPoolAsync_ptsz(CUdeviceptr *out, size_t bytes, CUmempool pool, CUstream s)
{
    struct process *p = ENTER();
    struct request q = {.out = out, .bytes = bytes, .pool = pool, .stream = s, .per_thread = true, .from = real.cuMemAllocFromPoolAsync_ptsz};
    return allocate(p, &q);
}

#define BEGIN_CAPTURE(name, ...)                               \
    struct process *p = ENTER();                               \
    if (p)                                                     \
        __atomic_store_n(&p->captures, 1, __ATOMIC_RELAXED);   \
    return CALL(name, __VA_ARGS__);

EXPORT CUresult cuStreamBeginCapture(CUstream s) { BEGIN_CAPTURE(cuStreamBeginCapture, s) }
EXPORT CUresult cuStreamBeginCapture_ptsz(CUstream s) { BEGIN_CAPTURE(cuStreamBeginCapture_ptsz, s) }
EXPORT CUresult cuStreamBeginCapture_v2(CUstream s, int mode) { BEGIN_CAPTURE(cuStreamBeginCapture_v2, s, mode) }
EXPORT CUresult cuStreamBeginCapture_v2_ptsz(CUstream s, int mode) { BEGIN_CAPTURE(cuStreamBeginCapture_v2_ptsz, s, mode) }
EXPORT CUresult cuStreamBeginCaptureToGraph(CUstream s, CUgraph g, const CUnode *after, const void *data, size_t n, int mode)
{
    BEGIN_CAPTURE(cuStreamBeginCaptureToGraph, s, g, after, data, n, mode)
}
EXPORT CUresult cuStreamBeginCaptureToGraph_ptsz(CUstream s, CUgraph g, const CUnode *after, const void *data, size_t n, int mode)
{
    BEGIN_CAPTURE(cuStreamBeginCaptureToGraph_ptsz, s, g, after, data, n, mode)
}

/* --- freeing -------------------------------------------------------------- */

static bool give_back(struct process *p, CUdeviceptr at, struct entry *e, CUresult *r, CUresult (*call)(CUdeviceptr), CUresult (*async)(CUdeviceptr, CUstream), CUstream s)
{
    struct entry old;
    if (!table_take(&p->table, at, SPACE_POOLED, e))
        return false;
    struct pool *pool = &p->pools[e->owner];
    *r = call ? call(at) : async(at, s);
    if (*r != CUDA_SUCCESS) {
        table_put(&p->table, e, &old);
        return true;
    }
    count_sub(&pool->flight, e->bytes / UNIT);
    if (__builtin_expect(!__atomic_load_n(&pool->handle, __ATOMIC_RELAXED), 0)) {
        spin_lock(&pool->lock);
        leave(p, pool);
        spin_unlock(&pool->lock);
    }
    return true;
}

bool pool_free(struct process *p, CUdeviceptr at, CUresult *r, CUresult (*call)(CUdeviceptr), CUresult (*async)(CUdeviceptr, CUstream), CUstream s)
{
    struct entry e;
    if (!give_back(p, at, &e, r, call, async, s))
        return false;
    if (*r == CUDA_SUCCESS && __atomic_load_n(&p->pools[e.owner].hopeless, __ATOMIC_RELAXED))
        __atomic_store_n(&p->pools[e.owner].hopeless, 0, __ATOMIC_SEQ_CST);
    return true;
}

static CUresult free_async(struct process *p, CUdeviceptr at, CUstream s, bool per_thread, CUresult (*call)(CUdeviceptr, CUstream))
{
    struct entry e;
    struct taken t;
    CUresult r;
    if (give_back(p, at, &e, &r, NULL, call, s)) {
        if (r == CUDA_SUCCESS)
            freed_on(p, &p->pools[e.owner], s, per_thread);
        return r;
    }
    if (!charge_take(p, &t, at, SPACE_ADDRESS))
        return call(at, s);
    return charge_end(p, &t, call(at, s));
}

HOT EXPORT CUresult cuMemFreeAsync(CUdeviceptr at, CUstream s)
{
    struct process *p = ENTER();
    return p && real.cuMemFreeAsync ? free_async(p, at, s, false, real.cuMemFreeAsync) : CALL(cuMemFreeAsync, at, s);
}

HOT EXPORT CUresult cuMemFreeAsync_ptsz(CUdeviceptr at, CUstream s)
{
    struct process *p = ENTER();
    return p && real.cuMemFreeAsync_ptsz ? free_async(p, at, s, true, real.cuMemFreeAsync_ptsz) : CALL(cuMemFreeAsync_ptsz, at, s);
}

/* --- pools by hand -------------------------------------------------------- */

EXPORT CUresult cuMemPoolCreate(CUmempool *out, const CUpoolprops *props)
{
    struct process *p = ENTER();
    CUdevice device = DEVICE_CURRENT;
    enum means means = p && props ? property_means(props->type, &props->location, &device) : MEANS_NOTHING;
    if (means == MEANS_UNKNOWN && property_unknown(p, device))
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult r = CALL(cuMemPoolCreate, out, props);
    if (!p || r != CUDA_SUCCESS || !out || !props)
        return r;
    if (device >= MAX_DEVICES)
        means = MEANS_NOTHING;
    if (learn_anew(p, *out, means, device) || means == MEANS_NOTHING)
        return r;
    CALL(cuMemPoolDestroy, *out); /* more pools than anybody has */
    return CUDA_ERROR_OUT_OF_MEMORY;
}

/* What is in an imported pool is its exporter's. */
EXPORT CUresult cuMemPoolImportFromShareableHandle(CUmempool *out, void *handle, int type, unsigned long long flags)
{
    struct process *p = ENTER();
    CUresult r = CALL(cuMemPoolImportFromShareableHandle, out, handle, type, flags);
    if (p && r == CUDA_SUCCESS && out)
        learn_anew(p, *out, MEANS_NOTHING, DEVICE_CURRENT);
    return r;
}

/* The driver has a pool of its own for each type of memory at each place. */
static void learn_default(struct process *p, CUmempool handle, const CUlocation *at, int type)
{
    CUdevice device;
    enum means means = property_means(type, at, &device);
    if (!known(p, handle))
        learn(p, handle, means, device < MAX_DEVICES ? device : DEVICE_CURRENT);
}

EXPORT CUresult cuMemGetDefaultMemPool(CUmempool *out, CUlocation *at, int type)
{
    struct process *p = ENTER();
    CUresult r = CALL(cuMemGetDefaultMemPool, out, at, type);
    if (p && r == CUDA_SUCCESS && out && at)
        learn_default(p, *out, at, type);
    return r;
}

EXPORT CUresult cuMemGetMemPool(CUmempool *out, CUlocation *at, int type)
{
    struct process *p = ENTER();
    CUresult r = CALL(cuMemGetMemPool, out, at, type);
    if (p && r == CUDA_SUCCESS && out && at)
        learn_default(p, *out, at, type);
    return r;
}

/* changed says that a device may have another current pool, before and after the
 * call by which it has. */
static void changed(struct process *p)
{
    if (p)
        __atomic_add_fetch(&p->pool_changes, 1, __ATOMIC_SEQ_CST);
}

EXPORT CUresult cuDeviceSetMemPool(CUdevice device, CUmempool handle)
{
    struct process *p = ENTER();
    changed(p);
    CUresult r = CALL(cuDeviceSetMemPool, device, handle);
    changed(p);
    return r;
}

EXPORT CUresult cuMemSetMemPool(CUlocation *at, int type, CUmempool handle)
{
    struct process *p = ENTER();
    changed(p);
    CUresult r = CALL(cuMemSetMemPool, at, type, handle);
    changed(p);
    return r;
}

EXPORT CUresult cuMemPoolDestroy(CUmempool handle)
{
    struct process *p = ENTER();
    struct pool *pool = p ? known(p, handle) : NULL;
    changed(p); /* the device whose current one it was has its default one again */
    if (pool && pool->r.charge)
        trim(p, pool, 0); /* it goes now, and we see how much stays */
    CUresult r = CALL(cuMemPoolDestroy, handle);
    changed(p);
    if (!pool || r != CUDA_SUCCESS)
        return r;
    spin_lock(&pool->lock);
    __atomic_store_n(&pool->handle, 0, __ATOMIC_RELEASE);
    leave(p, pool);
    spin_unlock(&pool->lock);
    return r;
}

EXPORT CUresult cuMemPoolTrimTo(CUmempool handle, size_t keep)
{
    struct process *p = ENTER();
    struct pool *pool = p ? known(p, handle) : NULL;
    return pool && pool->r.charge ? trim(p, pool, keep) : CALL(cuMemPoolTrimTo, handle, keep);
}

/* --- looking at all ------------------------------------------------------- */

/* each_pool settles the charged pools of a device, or trims them all. */
static void each_pool(struct process *p, CUdevice device, bool all)
{
    for (int i = next_charged(p, 0); i >= 0; i = next_charged(p, i + 1)) {
        struct pool *pool = &p->pools[i];
        if (pool->device != device || !pool->handle || !pool->r.charge)
            continue;
        if (all) {
            trim(p, pool, 0);
            continue;
        }
        spin_lock(&pool->lock);
        if (pool->handle)
            looked(p, &p->accounts[device], pool);
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
 * That is uncommitted for as long as it takes, and afterwards the driver is asked
 * once. A pool without anything free has nothing to give back, and a process
 * without pools pays a few loads for all this. */
enum { SYNCED = 32 }; /* pools beyond these are found at the next call to do with them */
struct sync {
    struct process *p;
    int n;
    uint16_t at[SYNCED]; /* these are loosened */
};

static void sync_begin(struct sync *s, struct process *p)
{
    s->p = p;
    s->n = 0;
    for (int i = next_charged(p, 0); i >= 0 && s->n < SYNCED; i = next_charged(p, i + 1)) {
        struct pool *pool = &p->pools[i];
        if (__atomic_load_n(&pool->r.charge, __ATOMIC_RELAXED) <= pool_live(pool))
            continue;
        spin_lock(&pool->lock);
        if (pool->handle && pool->r.charge > pool_live(pool)) {
            loosen(&p->accounts[pool->device], &pool->r, pool_live(pool));
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
            looked(s->p, a, pool);
        tighten(a, &pool->r);
        leave(s->p, pool);
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
EXPORT CUresult cuCtxSynchronize(void)
{
    struct process *p = ENTER();
    struct sync s;
    if (!p || !real.cuCtxSynchronize)
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
