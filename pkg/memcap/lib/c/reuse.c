/* SPDX-License-Identifier: Apache-2.0 */

/* Serving a request from what streams have freed in a pool, when the pool must not grow.
 * The driver takes memory that another stream has freed, without growing the pool, only
 * if it knows an order between the two streams: if the allocating stream waits for an
 * event that was recorded after the free. On a full card the driver would make that order
 * itself ("the driver may effectively perform a cudaStreamWaitEvent in the allocating
 * stream"). Here the card has room, and only the cap is reached. So we do it: we record
 * an event on each stream that has freed something, have the allocating stream wait for
 * it, and then call the driver. If the pool is not allowed to reuse memory by events
 * (CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES), we wait for the streams ourselves,
 * because all streams may take what was complete at a synchronisation.
 *
 * A stream waits for all streams that have freed something since it last waited for them.
 * Nothing tells of which of them the driver will take memory, and if we waited for the
 * wrong ones the pool would grow. If even that does not help, requests of that size are
 * not tried again until something is freed (hopeless). */

#include "pool.h"

/* A freer is a stream that has freed something of the pool, or, after that stream was
 * destroyed, the last event on it. */
struct freer {
    uint64_t key; /* the stream; see key_of. 0: it was destroyed, and only the event is left */
    uint64_t number; /* of its context; 0: this place is free */
    CUcontext context;
    CUevent event;  /* for recording on it; NULL: none yet */
    uint32_t turn;  /* of its last free; 0: it has freed nothing */
    uint32_t busy;  /* threads that use the stream in a call of the driver */
};

enum { FREERS = 64 };
struct freers {
    uint32_t lock; /* for moments */
    uint32_t turn;
    int high; /* places from here on were never used */
    struct freer list[FREERS];
    uint32_t followed[FREERS][FREERS]; /* [waiter][other]: the other's turn when the waiter last waited for it */
};

/* key_of names a stream. The per-thread default streams of all threads have the same
 * handle, so the thread's address takes its place. */
static uint64_t key_of(CUstream s, bool per_thread)
{
    if (s == CU_STREAM_PER_THREAD || (per_thread && !s))
        return (uintptr_t)__builtin_thread_pointer() | 2;
    return s ? (uintptr_t)s : (uintptr_t)CU_STREAM_LEGACY;
}

static bool of_thread(uint64_t key) { return key & 2; }

/* stream_of returns a handle by which this thread can wait for a freer. It has none for
 * another thread's default stream, but the legacy default stream waits for that. */
static CUstream stream_of(uint64_t key)
{
    if (!of_thread(key))
        return (CUstream)(uintptr_t)key;
    return key == key_of(NULL, true) ? CU_STREAM_PER_THREAD : CU_STREAM_LEGACY;
}

void freers_end(struct pool *pool)
{
    struct freers *f = pool->freers;
    pool->freers = NULL;
    for (int i = 0; f && i < FREERS; i++)
        if (f->list[i].number && f->list[i].event && context_lives(the_process, f->list[i].context, f->list[i].number))
            CALL(cuEventDestroy_v2, f->list[i].event);
    sys_unmap(f, sizeof *f);
}

/* --- recording ------------------------------------------------------------ */

static struct freers *freers_of(struct pool *pool)
{
    struct freers *f = __atomic_load_n(&pool->freers, __ATOMIC_ACQUIRE), *none = NULL;
    if (f)
        return f;
    f = sys_map(sizeof *f, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
    if (!f)
        return NULL;
    SYS3(SYS_madvise, f, sizeof *f, MADV_DONTFORK);
    if (__atomic_compare_exchange_n(&pool->freers, &none, f, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
        return f;
    sys_unmap(f, sizeof *f);
    return none;
}

/* A default stream's handle names one stream in each context. */
static bool of_context(uint64_t key) { return of_thread(key) || key == (uintptr_t)CU_STREAM_LEGACY; }

/* place_of returns a freer's index, or -1. It needs the lock. number is its context's
 * number, or 0 if the key alone tells which stream it is. */
static int place_of(const struct process *p, const struct freers *f, uint64_t key, uint64_t number)
{
    for (int i = 0; i < f->high; i++) {
        const struct freer *is = &f->list[i];
        if (is->number && is->key == key && (!number || is->number == number) && context_lives(p, is->context, is->number))
            return i;
    }
    return -1;
}

/* free_place finds a place for one more freer. If none is free, it takes that of a
 * destroyed stream whose event is complete. */
static int free_place(const struct process *p, struct freers *f)
{
    for (int i = 0; i < FREERS; i++) {
        struct freer *is = &f->list[i];
        if (is->busy)
            continue;
        if (is->number && !context_lives(p, is->context, is->number))
            is->number = 0; /* its event has ended with the context */
        if (!is->number)
            return i;
    }
    for (int i = 0; i < FREERS; i++) {
        struct freer *is = &f->list[i];
        if (is->busy || is->key || CALL(cuEventQuery, is->event) != CUDA_SUCCESS)
            continue;
        CALL(cuEventDestroy_v2, is->event);
        is->number = 0;
        return i;
    }
    return -1;
}

/* enlist returns the place of a stream among the freers, and finds one for it if need be.
 * With frees it notes that the stream has freed something now. -1: no place is left; then
 * only the stream itself can use again what it has freed. */
static int enlist(struct process *p, struct freers *f, CUstream s, uint64_t key, bool frees)
{
    struct where w = {.context = 0};
    CUcontext context = NULL;
    if (of_context(key) && !where(p, &w))
        return -1;
    spin_lock(&f->lock);
    int i = place_of(p, f, key, w.context);
    if (i >= 0 && frees)
        f->list[i].turn = ++f->turn;
    spin_unlock(&f->lock);
    if (i >= 0 || !where_stream(p, &w, s) || CALL(cuStreamGetCtx, stream_of(key), &context) != CUDA_SUCCESS)
        return i;
    int mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    CUresult r = CALL(cuThreadExchangeStreamCaptureMode, &mode);
    spin_lock(&f->lock);
    i = place_of(p, f, key, of_context(key) ? w.context : 0);
    if (i < 0 && (i = free_place(p, f)) >= 0) {
        f->list[i] = (struct freer){.key = key, .number = w.context, .context = context};
        for (int k = 0; k < FREERS; k++)
            f->followed[k][i] = f->followed[i][k] = 0;
        if (i >= f->high)
            f->high = i + 1;
    }
    if (i >= 0 && frees)
        f->list[i].turn = ++f->turn;
    spin_unlock(&f->lock);
    if (r == CUDA_SUCCESS)
        CALL(cuThreadExchangeStreamCaptureMode, &mode);
    return i;
}

/* record_freer records that a stream has freed something. It returns whether its key is
 * enough to know it again. */
COLD static bool record_freer(struct process *p, struct pool *pool, CUstream s, uint64_t key)
{
    struct freers *f = freers_of(pool);
    return f && enlist(p, f, s, key, true) >= 0 && !(of_context(key) && __atomic_load_n(&p->contexts_made, __ATOMIC_RELAXED) > 1);
}

void freed_on(struct process *p, struct pool *pool, CUstream s, bool per_thread)
{
    uint64_t key = key_of(s, per_thread), word = key ^ (uint64_t)__atomic_load_n(&p->contexts_ended, __ATOMIC_RELAXED) << 56;
    uint64_t *last = &pool->freer[(key >> 4 ^ key >> 8 ^ key >> 12) % LAST_FREERS];
    /* As long as no stream has had to wait, it is enough to know that it is one of the freers. */
    if (__builtin_expect(word != __atomic_load_n(last, __ATOMIC_RELAXED) || __atomic_load_n(&pool->near, __ATOMIC_RELAXED), 0) && record_freer(p, pool, s, key))
        __atomic_store_n(last, word, __ATOMIC_RELAXED);
    pool_hope(pool); /* last, when other streams can wait for this one */
}

void pool_is_near(struct pool *pool)
{
    struct freers *f = __atomic_load_n(&pool->freers, __ATOMIC_ACQUIRE);
    if (__atomic_exchange_n(&pool->near, true, __ATOMIC_SEQ_CST) || !f)
        return;
    spin_lock(&f->lock);
    f->turn++;
    for (int i = 0; i < f->high; i++) /* each may have freed something that was not recorded */
        if (f->list[i].turn)
            f->list[i].turn = f->turn;
    spin_unlock(&f->lock);
}

/* --- following ------------------------------------------------------------- */

/* record_on records a freer's event on its stream, and makes the event if there is none.
 * False: that was not possible. */
static bool record_on(const struct process *p, struct freer *is)
{
    CUcontext popped;
    CUstream s = stream_of(is->key);
    bool named = s != CU_STREAM_LEGACY && s != CU_STREAM_PER_THREAD; /* otherwise the handle means the current context's stream */
    if (!context_lives(p, is->context, is->number) || capturing(p, s, false))
        return false;
    if (is->event && named)
        return CALL(cuEventRecord, is->event, s) == CUDA_SUCCESS;
    if (CALL(cuCtxPushCurrent_v2, is->context) != CUDA_SUCCESS)
        return false;
    bool made = is->event || CALL(cuEventCreate, &is->event, CU_EVENT_DISABLE_TIMING) == CUDA_SUCCESS;
    bool recorded = made && CALL(cuEventRecord, is->event, s) == CUDA_SUCCESS;
    CALL(cuCtxPopCurrent_v2, &popped);
    return recorded;
}

/* hold_freer copies a freer to *is, and has cuStreamDestroy wait until let_freer. False:
 * there is none any more. */
static bool hold_freer(struct process *p, struct freers *f, int i, struct freer *is)
{
    spin_lock(&f->lock);
    *is = f->list[i];
    bool there = is->number && context_lives(p, is->context, is->number);
    f->list[i].busy += there;
    spin_unlock(&f->lock);
    return there;
}

static void let_freer(struct freers *f, int i, const struct freer *is)
{
    CUevent spare = NULL;
    spin_lock(&f->lock);
    f->list[i].busy--;
    if (!f->list[i].event)
        f->list[i].event = is->event;
    else if (f->list[i].event != is->event)
        spare = is->event; /* another thread has made an event at the same time */
    spin_unlock(&f->lock);
    if (spare)
        CALL(cuEventDestroy_v2, spare);
}

static CUstream explicitly(const struct request *q)
{
    return q->stream ? q->stream : q->per_thread ? CU_STREAM_PER_THREAD : CU_STREAM_LEGACY;
}

/* follow has the allocating stream, which is freer own, wait for freer i. */
static void follow(struct process *p, struct freers *f, int i, int own, const struct request *q)
{
    struct freer is;
    if (!hold_freer(p, f, i, &is))
        return;
    if (!is.key || record_on(p, &is))
        CALL(cuStreamWaitEvent, explicitly(q), is.event, 0);
    if (own >= 0)
        f->followed[own][i] = is.turn;
    let_freer(f, i, &is);
}

/* complete waits until all that is on a freer's stream now has run, but for a bounded
 * time, since it may depend on what this thread does next. Then it synchronises, which
 * does not wait any more, so that the driver takes note of it. */
enum { COMPLETE_US = 10 * 1000 * 1000 };

static void complete(struct process *p, struct freers *f, int i)
{
    struct freer is;
    if (!hold_freer(p, f, i, &is))
        return;
    bool recorded = !is.key || record_on(p, &is);
    uint64_t until = now_us() + COMPLETE_US;
    CUresult r = recorded ? CALL(cuEventQuery, is.event) : CUDA_ERROR_NOT_FOUND;
    for (; r == CUDA_ERROR_NOT_READY && now_us() < until; r = CALL(cuEventQuery, is.event))
        nap_us(50);
    if (r == CUDA_SUCCESS)
        CALL(cuEventSynchronize, is.event);
    let_freer(f, i, &is);
}

/* --- serving ---------------------------------------------------------------- */

/* to_follow returns a bit for each freer that the allocating stream, which is freer own,
 * has yet to wait for. */
static uint64_t to_follow(struct freers *f, int own)
{
    uint64_t bits = 0;
    spin_lock(&f->lock);
    for (int i = 0; i < f->high; i++) {
        const struct freer *is = &f->list[i];
        if (i != own && is->number && is->turn && (own < 0 || is->turn != f->followed[own][i]))
            bits |= (uint64_t)1 << i;
    }
    spin_unlock(&f->lock);
    return bits;
}
_Static_assert(FREERS <= 64, "a bit for each");

static bool goes_by_events(const struct pool *pool)
{
    int flag = 1;
    CUresult r = CALL(cuMemPoolGetAttribute, (CUmempool)(uintptr_t)pool->handle, CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES, &flag);
    return r != CUDA_SUCCESS || flag;
}

/* In hopeless, TRYING means that a thread is finding out. */
#define TRYING (~(uint64_t)0)

static enum attempted serve(struct process *p, const struct request *q, struct pool *pool, struct account *a, uint64_t n, CUresult *r)
{
    struct freers *f = freers_of(pool);
    int own = f ? enlist(p, f, q->stream, key_of(q->stream, q->per_thread), false) : -1;
    uint64_t others = f ? to_follow(f, own) : 0;
    bool events = goes_by_events(pool);
    for (; !events && others; others &= others - 1)
        complete(p, f, __builtin_ctzll(others));
    if (!attempt_begin(a))
        return NOT_ATTEMPTED;
    /* After attempt_begin, so that it includes what was freed while this thread waited. */
    for (others = events ? to_follow(f, own) : 0; others; others &= others - 1)
        follow(p, f, __builtin_ctzll(others), own, q);
    enum attempted how = pool_attempt(p, q, pool, a, n, 0, r);
    attempt_end(a);
    return how;
}

CUresult reuse(struct process *p, const struct request *q, struct pool *pool, struct account *a, uint64_t n)
{
    uint64_t live = pool_live(pool), charge = __atomic_load_n(&pool->r.charge, __ATOMIC_ACQUIRE), hopeless = __atomic_load_n(&pool->hopeless, __ATOMIC_SEQ_CST);
    if (live + n > charge || (hopeless && n >= hopeless) || capturing(p, q->stream, q->per_thread))
        return CUDA_ERROR_OUT_OF_MEMORY;
    uint32_t hopes = __atomic_load_n(&pool->hopes, __ATOMIC_SEQ_CST);
    __atomic_store_n(&pool->hopeless, TRYING, __ATOMIC_SEQ_CST);
    int mode = CU_STREAM_CAPTURE_MODE_RELAXED; /* so that another stream's capture does not fail */
    CUresult exchanged = __atomic_load_n(&p->captures, __ATOMIC_RELAXED) ? CALL(cuThreadExchangeStreamCaptureMode, &mode) : CUDA_ERROR_NOT_FOUND;
    CUresult r = CUDA_ERROR_OUT_OF_MEMORY;
    enum attempted how = serve(p, q, pool, a, n, &r);
    if (exchanged == CUDA_SUCCESS)
        CALL(cuThreadExchangeStreamCaptureMode, &mode);
    uint64_t trying = TRYING;
    bool sure = how == WOULD_GROW && hopes == __atomic_load_n(&pool->hopes, __ATOMIC_SEQ_CST);
    __atomic_compare_exchange_n(&pool->hopeless, &trying, sure ? n : 0, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    return r;
}

/* --- streams that end -------------------------------------------------------- */

/* part records an event on a stream that is about to be destroyed, which stands for what
 * the stream has freed. */
static void part(struct process *p, struct pool *pool, uint64_t key)
{
    struct freers *f = __atomic_load_n(&pool->freers, __ATOMIC_ACQUIRE);
    struct freer is;
    if (!f)
        return;
    spin_lock(&f->lock);
    int i = place_of(p, f, key, 0);
    spin_unlock(&f->lock);
    for (int k = 0; k < LAST_FREERS; k++)
        __atomic_store_n(&pool->freer[k], 0, __ATOMIC_RELAXED);
    if (i < 0 || !hold_freer(p, f, i, &is))
        return;
    bool recorded = record_on(p, &is);
    for (bool others = true; others;) { /* wait for threads that record an event on it */
        spin_lock(&f->lock);
        others = f->list[i].busy > 1;
        if (!others) {
            struct freer *at = &f->list[i];
            at->busy = 0;
            at->key = 0;
            at->event = is.event;
            at->number = recorded ? is.number : 0;
        }
        spin_unlock(&f->lock);
        if (others)
            nap_us(20);
    }
}

static CUresult destroy(struct process *p, CUstream s, CUresult (*call)(CUstream))
{
    for (uint64_t w = 0; p && w < MAX_POOLS / 64; w++)
        for (uint64_t bits = __atomic_load_n(&p->pools_charged[w], __ATOMIC_ACQUIRE); bits; bits &= bits - 1) {
            struct pool *pool = &p->pools[w * 64 + (uint64_t)__builtin_ctzll(bits)];
            if (pool->handle && !of_thread((uintptr_t)s))
                part(p, pool, (uintptr_t)s);
        }
    return call(s);
}

EXPORT CUresult cuStreamDestroy(CUstream s)
{
    struct process *p = ENTER();
    return real.cuStreamDestroy ? destroy(p, s, real.cuStreamDestroy) : CUDA_ERROR_NOT_FOUND;
}

EXPORT CUresult cuStreamDestroy_v2(CUstream s)
{
    struct process *p = ENTER();
    return real.cuStreamDestroy_v2 ? destroy(p, s, real.cuStreamDestroy_v2) : CUDA_ERROR_NOT_FOUND;
}
