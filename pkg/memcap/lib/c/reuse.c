/* SPDX-License-Identifier: Apache-2.0 */

/* Serving a request from what streams have freed in a pool, when the pool must not grow. The driver
 * takes memory that another stream has freed, without growing the pool, only if it knows an order
 * between the two streams: the allocating stream must wait for an event that was recorded after the
 * free. On a full card the driver would make that order itself ("the driver may effectively perform
 * a cudaStreamWaitEvent in the allocating stream"). Here the card has room, and only the cap is
 * reached. So we make the order. We record an event on each stream that has freed something, make
 * the allocating stream wait for these events, and then call the driver. If the pool is not allowed
 * to reuse memory by events (CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES), we allow it for that
 * call.
 *
 * We cannot know from which stream's memory the driver will take. If the allocating stream waited
 * for the wrong streams, the pool would grow. So it waits for all. */

#include "pool.h"

/* key_of returns the key of a stream. The per-thread default streams of all threads have the same
 * handle, so the key of such a stream is the thread's address. */
static uint64_t key_of(CUstream s, bool per_thread)
{
    if (s == CU_STREAM_PER_THREAD || (per_thread && !s))
        return (uintptr_t)__builtin_thread_pointer() | 2;
    return s ? (uintptr_t)s : (uintptr_t)CU_STREAM_LEGACY;
}

static bool of_thread(uint64_t key) { return key & 2; }

/* stream_of returns a handle by which this thread can wait for the stream with that key. There is
 * none for another thread's default stream, but the legacy default stream waits for that one. */
static CUstream stream_of(uint64_t key)
{
    if (!of_thread(key))
        return (CUstream)(uintptr_t)key;
    return key == key_of(NULL, true) ? CU_STREAM_PER_THREAD : CU_STREAM_LEGACY;
}

/* enlist records that a stream frees in pools. A default stream's handle names one stream in each
 * context. If there is no place, only the stream itself can use again what it has freed. False: it
 * was not recorded, or its key alone is not enough to recognise it. */
COLD static bool enlist(struct process *p, CUstream s, uint64_t key)
{
    struct where w;
    CUcontext context;
    bool all = of_thread(key) || key == (uintptr_t)CU_STREAM_LEGACY, done = false;
    if (!where_stream(p, &w, s) || CALL(cuStreamGetCtx, stream_of(key), &context) != CUDA_SUCCESS)
        return false;
    struct freer *free = NULL;
    int mode;
    CUresult relaxed = relax(&mode);
    spin_lock(&p->freeing);
    for (int i = 0; i < FREERS && !done; i++) {
        struct freer *is = &p->freers[i];
        bool lives = is->number && context_lives(p, is->context, is->number);
        done = lives && is->key == key && is->number == w.context;
        if (!lives && !free)
            free = is;
    }
    /* Take the place of a destroyed stream that has finished everything. */
    for (int i = 0; i < FREERS && !done && !free; i++)
        if (p->freers[i].event && CALL(cuEventQuery, p->freers[i].event) == CUDA_SUCCESS) {
            free = &p->freers[i];
            CALL(cuEventDestroy_v2, free->event);
        }
    if (!done && free)
        *free = (struct freer){.key = key, .number = w.context, .context = context};
    spin_unlock(&p->freeing);
    unrelax(relaxed, &mode);
    return (done || free) && !(all && __atomic_load_n(&p->contexts_made, __ATOMIC_RELAXED) > 1);
}

void freed_on(struct process *p, CUstream s, bool per_thread)
{
    uint64_t key = key_of(s, per_thread), word = key ^ (uint64_t)__atomic_load_n(&p->contexts_ended, __ATOMIC_RELAXED) << 56;
    uint64_t *last = &p->last_freers[(key >> 4 ^ key >> 8 ^ key >> 12) % LAST_FREERS];
    if (__builtin_expect(word != __atomic_load_n(last, __ATOMIC_RELAXED), 0) && enlist(p, s, key))
        __atomic_store_n(last, word, __ATOMIC_RELAXED);
}

/* record records an event on a freer's stream and returns it. NULL: that was not possible. */
static CUevent record(struct process *p, const struct freer *is)
{
    CUevent e = NULL;
    CUcontext popped;
    if (!context_lives(p, is->context, is->number) || capturing(stream_of(is->key), false) || CALL(cuCtxPushCurrent_v2, is->context) != CUDA_SUCCESS)
        return NULL;
    if (CALL(cuEventCreate, &e, CU_EVENT_DISABLE_TIMING) == CUDA_SUCCESS && CALL(cuEventRecord, e, stream_of(is->key)) != CUDA_SUCCESS) {
        CALL(cuEventDestroy_v2, e);
        e = NULL;
    }
    CALL(cuCtxPopCurrent_v2, &popped);
    return e;
}

/* follow makes the allocating stream wait for all other streams that have freed something. */
static void follow(struct process *p, const struct request *q)
{
    CUstream own = q->stream ? q->stream : q->per_thread ? CU_STREAM_PER_THREAD : CU_STREAM_LEGACY;
    uint64_t key = key_of(q->stream, q->per_thread);
    spin_lock(&p->freeing); /* so that no stream is destroyed meanwhile */
    for (int i = 0; i < FREERS; i++) {
        struct freer *is = &p->freers[i];
        if (!is->number || is->key == key || !context_lives(p, is->context, is->number))
            continue;
        CUevent e = is->event ? is->event : record(p, is);
        if (e)
            CALL(cuStreamWaitEvent, own, e, 0);
        if (e && !is->event) /* other streams may have to wait for a destroyed stream's event too */
            CALL(cuEventDestroy_v2, e);
    }
    spin_unlock(&p->freeing);
}

/* allow sets whether a pool may reuse memory by events, and returns the old setting. */
static int allow(const struct pool *pool, int may)
{
    const CUmempool handle = (CUmempool)(uintptr_t)pool->handle;
    int might = 1;
    CALL(cuMemPoolGetAttribute, handle, CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES, &might);
    if (might != may)
        CALL(cuMemPoolSetAttribute, handle, CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES, &may);
    return might;
}

CUresult reuse(struct process *p, const struct request *q, struct pool *pool, struct account *a, uint64_t n)
{
    uint64_t live = pool_live(pool), charge = __atomic_load_n(&pool->r.charge, __ATOMIC_ACQUIRE);
    if (live + n > charge || capturing(q->stream, q->per_thread))
        return CUDA_ERROR_OUT_OF_MEMORY;
    int mode;
    CUresult relaxed = relax(&mode), r = CUDA_ERROR_OUT_OF_MEMORY;
    if (attempt_begin(a)) {
        int might = allow(pool, 1);
        follow(p, q); /* now, so that it includes what was freed while this thread waited */
        pool_attempt(p, q, pool, a, n, 0, &r);
        if (!might)
            allow(pool, might);
        attempt_end(a);
    }
    unrelax(relaxed, &mode);
    return r;
}

/* Before a stream is destroyed, we record an event on it. The event then replaces the stream. */
static CUresult destroy(struct process *p, CUstream s, CUresult (*call)(CUstream))
{
    bool freed = false;
    for (int i = 0; s && !of_thread((uintptr_t)s) && i < FREERS; i++)
        freed |= __atomic_load_n(&p->freers[i].key, __ATOMIC_RELAXED) == (uintptr_t)s;
    if (!freed)
        return call(s);
    spin_lock(&p->freeing);
    for (int i = 0; i < FREERS; i++) {
        struct freer *is = &p->freers[i];
        if (is->key != (uintptr_t)s)
            continue;
        is->event = record(p, is);
        is->key = 0;
        if (!is->event)
            is->number = 0;
    }
    for (int k = 0; k < LAST_FREERS; k++)
        __atomic_store_n(&p->last_freers[k], 0, __ATOMIC_RELAXED);
    CUresult r = call(s);
    spin_unlock(&p->freeing);
    return r;
}

EXPORT CUresult cuStreamDestroy(CUstream s) { OVER(cuStreamDestroy, destroy, s) }
EXPORT CUresult cuStreamDestroy_v2(CUstream s) { OVER(cuStreamDestroy_v2, destroy, s) }
