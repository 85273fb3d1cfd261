/* SPDX-License-Identifier: Apache-2.0 */

/* Memory pools: cuMemAllocAsync and the like. What counts is the GPU memory that the driver has
 * reserved for a pool, in pieces that the driver chooses. What is allocated from the pool does not
 * count. A pool may grow even if it has enough free memory for a request, because the driver lets
 * it grow before it takes what another stream has freed. So before every allocation we reserve all
 * that the pool may grow by. After it we ask the driver how large the pool is, and cancel what was
 * not needed.
 *
 * Several allocations may be under way. Each pays for the pool's growth up to its own reservation,
 * no matter which of them made the pool grow. Their reservations together are enough for all of
 * them. So none waits for another, and no lock is held while one waits for room.
 *
 * If the limit has no room for the pool to grow, but the pool has free memory, reuse.c makes sure
 * that the driver can take what streams have freed without growing. Then one allocation is made
 * without a reservation, an attempt (attempt.c). If the pool grows all the same, we undo that and
 * note it in the usage page (undone). Other threads at that pool wait only during these few calls
 * (its gate).
 *
 * Attempts are made one after the other. To undo one takes several calls, which make the driver map
 * and unmap memory. Most pools do not need attempts, because the driver itself keeps the pool
 * within the cap (bound.c).
 *
 * A pool shrinks by itself when a stream is synchronised. We notice that at the next call that
 * concerns the pool, and before a refusal. By then a reading may have noticed it too, and have
 * raised the ceiling. So if the ceiling has changed since we last asked the driver about a pool, we
 * ask again first, and take off with account_lost what is gone. Otherwise the same memory would
 * give room twice. */

#include "export.h"
#include "pool.h"
#include "property.h"

static void gain(struct account *a, struct reserve *r, uint64_t n)
{
    if (r->managed)
        count_add(&a->slot->managed, n);
    if (r->freeing)
        r->uncommitted += n; /* a call under way may free it */
    else
        account_commit(a, n);
    __atomic_store_n(&r->charge, r->charge + n, __ATOMIC_RELEASE);
}

static void lose(struct account *a, struct reserve *r, uint64_t n)
{
    uint64_t freed = n < r->uncommitted ? n : r->uncommitted;
    if (r->managed)
        count_sub(&a->slot->managed, n);
    if (freed)
        account_cancel(a, freed);
    r->uncommitted -= freed;
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
    if (r->freeing) {
        account_uncommit(a, rest);
        r->uncommitted += rest;
    }
    __atomic_store_n(&r->charge, r->charge + rest, __ATOMIC_RELEASE);
}

void settle_exported(struct account *a, struct reserve *r)
{
    uint64_t n = r->charge;
    if (r->managed)
        count_sub(&a->slot->managed, n);
    __atomic_store_n(&r->charge, 0, __ATOMIC_RELEASE);
    account_exported(a, n);
}

void uncommit_free(struct account *a, struct reserve *r, uint64_t used)
{
    uint64_t may_go = r->charge > used ? (r->charge - used) / UNIT * UNIT : 0;
    r->freeing++;
    if (may_go > r->uncommitted) {
        account_uncommit(a, may_go - r->uncommitted);
        r->uncommitted = may_go;
    }
}

void recommit(struct account *a, struct reserve *r)
{
    if (--r->freeing || !r->uncommitted)
        return;
    account_commit(a, r->uncommitted);
    r->uncommitted = 0;
}

/* --- what a pool has ------------------------------------------------------- */

static bool reserved_now(const struct pool *pool, uint64_t *there)
{
    return CALL(cuMemPoolGetAttribute, (CUmempool)(uintptr_t)pool->handle, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, there) == CUDA_SUCCESS;
}

/* settle_pool settles a pool, and returns what held does not pay for. It asks the driver while it
 * holds the lock, because another thread could make an earlier answer wrong. Reading an attribute
 * is quick. */
static uint64_t settle_pool(struct process *p, struct account *a, struct pool *pool, uint64_t held)
{
    uint64_t there, had = pool->r.charge, ceiling = account_last_ceiling(a);
    if (!pool->handle || !reserved_now(pool, &there))
        there = had + held;
    /* The pool may have shrunk before a reading and grown again after it. So what is cancelled here
     * gives no room before the next reading. */
    uint64_t pays = there > had ? there - had : 0;
    if (had && held > pays && ceiling != pool->r.ceiling)
        count_add(&a->usage->settled, held - pays / UNIT * UNIT);
    if (!pool->r.trims)
        pool->r.ceiling = ceiling;
    if (pool->most && there > pool->most) /* the driver rounds the size up, or does not keep to it */
        __atomic_store_n(&pool->most, there <= pool->most + PIECE ? there : 0, __ATOMIC_RELAXED);
    uint64_t rest = settle(a, &pool->r, there, held);
    if (!had && (pool->r.charge || rest)) {
        uint64_t i = (uint64_t)(pool - p->pools);
        __atomic_or_fetch(&p->pools_charged[i / 64], (uint64_t)1 << i % 64, __ATOMIC_ACQ_REL);
    }
    return rest;
}

void pool_resettle(struct process *p, struct account *a, struct pool *pool)
{
    uint64_t rest = settle_pool(p, a, pool, 0);
    if (rest && pool_flight(pool) < FLIGHT)
        settle_force(a, &pool->r, rest);
}

static bool ceiling_changed(const struct account *a, const struct pool *pool)
{
    return account_last_ceiling(a) != __atomic_load_n(&pool->r.ceiling, __ATOMIC_RELAXED);
}

void pool_uncommit_free(struct process *p, struct account *a, struct pool *pool, uint64_t used)
{
    if (ceiling_changed(a, pool))
        pool_resettle(p, a, pool);
    uncommit_free(a, &pool->r, used);
}

/* --- allocating ----------------------------------------------------------- */

bool capturing(CUstream s, bool per_thread)
{
    int status = 0;
    CUresult r = per_thread && !s ? CALL(cuStreamIsCapturing_ptsz, s, &status) : CALL(cuStreamIsCapturing, s, &status);
    return r == CUDA_SUCCESS && status != 0;
}

static CUresult pass(const struct request *q)
{
    return q->plain ? q->plain(q->out, q->bytes, q->stream)
           : q->from ? q->from(q->out, q->bytes, q->pool, q->stream)
                     : CUDA_ERROR_NOT_FOUND;
}

/* gate_enter enters, and then looks whether the gate is closed. gate_close closes the gate, and
 * then looks whether a call is inside. So at least one of the two sees the other. */
COLD static bool await_open(const struct gate *g)
{
    struct wait w = {0};
    while (__atomic_load_n(&g->closed, __ATOMIC_SEQ_CST))
        if (wait_more(&w) >= PATIENCE_US)
            return false;
    return true;
}

void gate_enter(struct gate *g, uint64_t units)
{
    for (bool opens = true; opens; opens = await_open(g)) {
        count_add(&g->flight, FLIGHT + units);
        if (__builtin_expect(!__atomic_load_n(&g->closed, __ATOMIC_SEQ_CST), 1))
            return;
        gate_leave(g, units);
    }
    count_add(&g->flight, FLIGHT + units);
}

bool gate_close(struct gate *g, unsigned own, uint64_t us)
{
    struct wait w = {0};
    while (__atomic_exchange_n(&g->closed, 1, __ATOMIC_SEQ_CST))
        if (wait_more(&w) >= us)
            return false;
    while (count_read(&g->flight) >= (own + 1) * FLIGHT)
        if (wait_more(&w) >= us) {
            gate_open(g);
            return false;
        }
    return true;
}

/* leave_destroyed is leave_pool's part for a pool that was destroyed meanwhile. */
COLD static void leave_destroyed(struct process *p, struct pool *pool)
{
    spin_lock(&pool->lock);
    pool_leave(p, pool);
    spin_unlock(&pool->lock);
}

static void leave_pool(struct process *p, struct pool *pool, uint64_t n)
{
    gate_leave(&pool->gate, n / UNIT);
    if (__builtin_expect(!__atomic_load_n(&pool->handle, __ATOMIC_RELAXED), 0))
        leave_destroyed(p, pool);
}

/* remember records an allocation. False: there is no memory for that. If there is an older record
 * of the same address, that allocation was freed without our knowledge and no longer lives. */
static bool remember(struct process *p, struct pool *pool, CUdeviceptr at, uint64_t n)
{
    struct entry e = {.key = at, .bytes = n, .owner = (uint64_t)(pool - p->pools), .space = SPACE_POOLED, .how = HOW_NOTE, .device = pool->device}, old;
    if (!table_put(&p->table, &e, &old))
        return false;
    if (__builtin_expect(old.how, 0))
        count_sub(&p->pools[old.owner].gate.flight, old.bytes / UNIT);
    return true;
}

static uint64_t piece_of(const struct process *p)
{
    uint64_t piece = __atomic_load_n(&p->piece, __ATOMIC_RELAXED);
    return piece > PIECE ? piece : PIECE;
}

/* We watch how pools grow: the size of a piece, and whether a request makes a pool grow by whole
 * pieces (coarse) or by just the request's size (fine). Both words have one bit for requests of up
 * to a piece and one for larger ones. As long as we do not know the size of a piece, growth by more
 * than a larger request proves nothing. What an attempt shows is certain. */
static uint32_t growth_bit(const struct process *p, uint64_t n) { return n > piece_of(p) ? 2 : 1; }

static void watch_growth(struct process *p, uint64_t n, uint64_t grown, bool sure)
{
    uint64_t exact = round_up(n, BLOCK), piece = __atomic_load_n(&p->piece, __ATOMIC_RELAXED);
    uint32_t bit = growth_bit(p, n);
    bool coarse = grown > exact && (bit == 1 || piece), fine = grown == exact && exact % piece_of(p);
    if (grown > exact && n <= PIECE && grown > piece && grown <= 32 * PIECE)
        __atomic_store_n(&p->piece, grown, __ATOMIC_RELAXED);
    if (coarse || fine)
        __atomic_or_fetch(coarse ? &p->coarse : &p->fine, bit, __ATOMIC_RELAXED);
    if (sure && (coarse || fine))
        __atomic_and_fetch(coarse ? &p->fine : &p->coarse, ~bit, __ATOMIC_RELAXED);
}

static uint64_t growth_of(const struct process *p, const struct pool *pool, uint64_t n)
{
    uint64_t piece = piece_of(p), grows = n <= piece ? piece : (n + piece - 1) / piece * piece; /* a division is slow */
    uint64_t most = __atomic_load_n(&pool->most, __ATOMIC_RELAXED), charge = __atomic_load_n(&pool->r.charge, __ATOMIC_ACQUIRE);
    if (!most || charge + grows <= most)
        return grows;
    return charge + round_up(n, BLOCK) <= most ? most - charge : 0;
}

/* undo ends an allocation that made a pool grow by over bytes more than held. There is no room for
 * over; held is a part of the same piece and goes with it. undo charges what the driver keeps
 * nevertheless. The program does not have the allocation yet, so undo need not free it in the order
 * of its stream. */
COLD static CUresult undo(struct process *p, const struct request *q, struct pool *pool, struct account *a, CUresult r, uint64_t held, uint64_t over)
{
    account_undone(a, count_add(&a->undoing, over)); /* together with those of other threads */
    if (r == CUDA_SUCCESS && CALL(cuMemFree_v2, *q->out) != CUDA_SUCCESS)
        CALL(cuMemFreeAsync, *q->out, q->stream);
    spin_lock(&pool->lock); /* other allocations may have paid for some of it */
    uint64_t charge = pool->r.charge;
    pool_uncommit_free(p, a, pool, pool_live(pool));
    spin_unlock(&pool->lock);
    CALL(cuMemPoolTrimTo, (CUmempool)(uintptr_t)pool->handle, charge > held ? charge - held : 0);
    spin_lock(&pool->lock);
    uint64_t rest = settle_pool(p, a, pool, 0);
    if (rest && pool_flight(pool) < 2 * FLIGHT)
        settle_force(a, &pool->r, rest);
    recommit(a, &pool->r);
    spin_unlock(&pool->lock);
    count_sub(&a->undoing, over);
    return r == CUDA_SUCCESS ? CUDA_ERROR_OUT_OF_MEMORY : r;
}

/* settle_alone settles a pool after an allocation. If no other thread is at the pool, it also pays
 * for growth that was not reserved, and learns how the pool grows. False: there is no room for that
 * growth. *rest is the growth that is not paid. It is this allocation's if settle_alone returns
 * false, and that of other threads' allocations if it returns true. */
static bool settle_alone(struct process *p, struct pool *pool, struct account *a, uint64_t n, uint64_t held, bool attempt, uint64_t *rest)
{
    uint64_t had = pool->r.charge;
    bool fits = true;
    *rest = settle_pool(p, a, pool, held);
    if (pool_flight(pool) >= 2 * FLIGHT)
        return true;
    if (!pool->r.trims && pool->r.charge + *rest > had)
        watch_growth(p, n, pool->r.charge + *rest - had, attempt);
    if (*rest && (fits = account_reserve_quickly(a, *rest)))
        gain(a, &pool->r, *rest);
    if (fits)
        *rest = 0;
    return fits;
}

COLD static void look(struct process *p, struct account *a, struct pool *pool)
{
    spin_lock(&pool->lock);
    pool_resettle(p, a, pool);
    spin_unlock(&pool->lock);
}

/* settle_ordinary ends an allocation if the pool's size has changed. */
COLD static CUresult settle_ordinary(struct process *p, const struct request *q, struct pool *pool, struct account *a, CUresult r, uint64_t n, uint64_t held)
{
    uint64_t over;
    spin_lock(&pool->lock);
    bool fits = settle_alone(p, pool, a, n, held, false, &over);
    spin_unlock(&pool->lock);
    return fits ? r : undo(p, q, pool, a, r, held, over);
}

/* ordinary allocates n bytes. held bytes are reserved for the pool's growth. */
static CUresult ordinary(struct process *p, const struct request *q, struct pool *pool, struct account *a, uint64_t n, uint64_t held)
{
    uint64_t there;
    gate_enter(&pool->gate, n / UNIT);
    if (__builtin_expect(ceiling_changed(a, pool), 0))
        look(p, a, pool);
    CUresult r = pass(q);
    /* Read the charge first, so that the driver's figure includes all that is charged. */
    uint64_t charge = __atomic_load_n(&pool->r.charge, __ATOMIC_ACQUIRE);
    if (__builtin_expect(reserved_now(pool, &there) && there == charge && !ceiling_changed(a, pool), 1))
        account_cancel(a, held);
    else
        r = settle_ordinary(p, q, pool, a, r, n, held);
    leave_pool(p, pool, r == CUDA_SUCCESS && remember(p, pool, *q->out, n) ? 0 : n);
    return r;
}

void pool_attempt(struct process *p, const struct request *q, struct pool *pool, struct account *a, uint64_t n, uint64_t held, CUresult *r)
{
    uint64_t over, most = growth_of(p, pool, n);
    *r = CUDA_ERROR_OUT_OF_MEMORY;
    gate_enter(&pool->gate, n / UNIT);
    bool closed = gate_close(&pool->gate, 1, PATIENCE_US), alone = closed;
    for (struct wait w = {0}; alone && __atomic_load_n(&pool->r.trims, __ATOMIC_SEQ_CST);)
        alone = wait_more(&w) < PATIENCE_US;
    spin_lock(&pool->lock);
    pool_resettle(p, a, pool);
    bool has = alone && pool_live(pool) <= pool->r.charge + held; /* room for all that is allocated from it */
    spin_unlock(&pool->lock);
    if (!has || (pool->exportable && !place_for(p, pool, n))) {
        if (closed)
            gate_open(&pool->gate);
        leave_pool(p, pool, n);
        if (held)
            account_cancel(a, held);
        return;
    }
    reserved_add(a, most); /* reserved exceeds our part of bound, so a reading sees that something is under way */
    *r = pass(q);
    spin_lock(&pool->lock);
    bool fits = settle_alone(p, pool, a, n, held, true, &over);
    spin_unlock(&pool->lock);
    if (!fits)
        *r = undo(p, q, pool, a, *r, held, over);
    gate_open(&pool->gate);
    reserved_sub(a, most);
    leave_pool(p, pool, *r == CUDA_SUCCESS && remember(p, pool, *q->out, n) ? 0 : n);
}

/* An attempt of more than LARGE comes last, because it may exceed the cap by that much.
 * Before it the pool gives back what it can, and grows again by what is reserved. */
#define LARGE ((uint64_t)128 << 20)

/* near allocates if there is no room for all that the pool may grow by. An attempt shows whether
 * the driver needs less. */
COLD static CUresult near(struct process *p, const struct request *q, struct pool *pool, struct account *a, uint64_t n, uint64_t held)
{
    uint64_t exact = round_up(n, BLOCK);
    uint32_t bit = growth_bit(p, n), coarse = __atomic_load_n(&p->coarse, __ATOMIC_RELAXED) & bit;
    uint64_t wants = __atomic_load_n(&p->fine, __ATOMIC_RELAXED) & bit && !coarse ? exact : held;
    CUresult r = CUDA_ERROR_OUT_OF_MEMORY;
    if (wants < held && account_reserve_quickly(a, wants))
        r = ordinary(p, q, pool, a, n, wants);
    if (r == CUDA_ERROR_OUT_OF_MEMORY && n <= LARGE)
        r = reuse(p, q, pool, a, n);
    if (r == CUDA_ERROR_OUT_OF_MEMORY && pool_makes_room(p, pool, a, wants))
        r = ordinary(p, q, pool, a, n, wants);
    if (r != CUDA_ERROR_OUT_OF_MEMORY)
        return r;
    r = account_reserve_slowly(a, wants) ? ordinary(p, q, pool, a, n, wants) : reuse(p, q, pool, a, n); /* others may have freed something meanwhile */
    if (r != CUDA_ERROR_OUT_OF_MEMORY || exact >= wants || coarse || !attempt_begin(a))
        return r;
    if (account_reserve_quickly(a, exact))
        pool_attempt(p, q, pool, a, n, exact, &r);
    attempt_end(a);
    return r;
}

static CUresult allocate(struct process *p, struct request *q)
{
    bool refuse;
    struct pool *pool;
    if (!p || !q->out || !q->bytes || (!q->plain && !q->from) || capturing(q->stream, q->per_thread))
        return pass(q); /* a captured allocation becomes a node of a graph; see graph.c */
    if (!pool_find(p, q, &pool))
        return pass(q);
    struct account *a = account_of(p, pool ? pool->device : 0, &refuse);
    if (!a && !refuse)
        return pass(q);
    if (!a || !pool || q->bytes >= MOST)
        return CUDA_ERROR_OUT_OF_MEMORY;
    uint64_t n = round_up(q->bytes, UNIT), held = growth_of(p, pool, n);
    if (held)
        account_measure(a, held);
    CUresult r = !held || account_reserve_quickly(a, held) ? ordinary(p, q, pool, a, n, held) : near(p, q, pool, a, n, held);
    if (r == CUDA_ERROR_OUT_OF_MEMORY && !held)
        r = reuse(p, q, pool, a, n); /* the driver may not have made the stream wait for others */
    return r;
}

#define ALLOCATE(...)                                                                        \
    struct process *p = ENTER();                                                             \
    struct request q = {.out = out, .bytes = bytes, .stream = s, __VA_ARGS__};               \
    return allocate(p, &q);

HOT EXPORT CUresult cuMemAllocAsync(CUdeviceptr *out, size_t bytes, CUstream s)
{
    ALLOCATE(.plain = real.cuMemAllocAsync, .from = real.cuMemAllocFromPoolAsync)
}
HOT EXPORT CUresult cuMemAllocAsync_ptsz(CUdeviceptr *out, size_t bytes, CUstream s)
{
    ALLOCATE(.plain = real.cuMemAllocAsync_ptsz, .from = real.cuMemAllocFromPoolAsync_ptsz, .per_thread = true)
}
HOT EXPORT CUresult cuMemAllocFromPoolAsync(CUdeviceptr *out, size_t bytes, CUmempool pool, CUstream s)
{
    ALLOCATE(.pool = pool, .from = real.cuMemAllocFromPoolAsync)
}
HOT EXPORT CUresult cuMemAllocFromPoolAsync_ptsz(CUdeviceptr *out, size_t bytes, CUmempool pool, CUstream s)
{
    ALLOCATE(.pool = pool, .from = real.cuMemAllocFromPoolAsync_ptsz, .per_thread = true)
}

/* --- freeing -------------------------------------------------------------- */

bool pool_free(struct process *p, CUdeviceptr at, CUresult *r, CUresult (*call)(CUdeviceptr), CUresult (*async)(CUdeviceptr, CUstream), CUstream s)
{
    struct entry e;
    if (!table_take(&p->table, at, SPACE_POOLED, &e))
        return false;
    struct pool *pool = &p->pools[e.owner];
    *r = call ? call(at) : async(at, s);
    if (__builtin_expect(*r != CUDA_SUCCESS, 0)) {
        table_put(&p->table, &e, NULL);
        return true;
    }
    count_sub(&pool->gate.flight, e.bytes / UNIT);
    if (__builtin_expect(pool->exportable, 0))
        place_freed(p, pool, &e);
    if (__builtin_expect(!__atomic_load_n(&pool->handle, __ATOMIC_RELAXED), 0))
        leave_destroyed(p, pool);
    return true;
}

/* free_other frees memory that belongs to no pool that we count. */
COLD static CUresult free_other(struct process *p, CUdeviceptr at, CUstream s, CUresult (*call)(CUdeviceptr, CUstream))
{
    struct taken t;
    if (!charge_take(p, &t, at, SPACE_ADDRESS))
        return uncounted_freed(p, call(at, s));
    return charge_end(p, &t, call(at, s));
}

static CUresult free_async(struct process *p, CUdeviceptr at, CUstream s, CUresult (*call)(CUdeviceptr, CUstream))
{
    CUresult r;
    if (__builtin_expect(!pool_free(p, at, &r, NULL, call, s), 0))
        return free_other(p, at, s, call);
    if (__builtin_expect(r == CUDA_SUCCESS, 1))
        freed_on(p, s, call == real.cuMemFreeAsync_ptsz);
    return r;
}

HOT EXPORT CUresult cuMemFreeAsync(CUdeviceptr at, CUstream s) { OVER(cuMemFreeAsync, free_async, at, s) }
HOT EXPORT CUresult cuMemFreeAsync_ptsz(CUdeviceptr at, CUstream s) { OVER(cuMemFreeAsync_ptsz, free_async, at, s) }
