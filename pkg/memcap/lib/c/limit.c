/* SPDX-License-Identifier: Apache-2.0 */

/* The limits of a context: the size of each thread's stack, of the device's heap, and so on. The
 * driver takes memory for them. So an increase is reserved before the call, and given back when the
 * limit falls or the context ends. The memory for a limit's first value is part of what the context
 * takes.
 *
 * A driver may take a heap's memory only with the first kernel that needs it, and no call shows
 * when. Until then the driver's figures lack that memory, but it must stay reserved. Afterwards
 * they include it, and it must not be counted twice. So it is a promise, in a word of its own. The
 * agent finds out when the driver takes it: the driver's figure then rises by just that amount. The
 * agent has to know the figure before that. So a new promise waits for a reading. */

#include "charge.h"

/* each returns how many bytes one unit of a limit takes, as documented for cuCtxSetLimit. The heap
 * and the FIFO are in bytes. The stack is for each thread that can be resident. A level of
 * synchronisation takes up to 150 MiB by the programming guide. The figure for a pending launch is
 * an estimate, since no guide has one. Other limits concern caches and memory on the
 * multiprocessors, and take nothing: 0. */
static uint64_t each(int limit, CUdevice device)
{
    int multiprocessors, threads;
    switch (limit) {
    case CU_LIMIT_STACK_SIZE:
        if (CALL(cuDeviceGetAttribute, &multiprocessors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device) != CUDA_SUCCESS ||
            CALL(cuDeviceGetAttribute, &threads, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, device) != CUDA_SUCCESS ||
            multiprocessors <= 0 || threads <= 0)
            return 256 * 2048; /* more than any GPU has */
        return (uint64_t)multiprocessors * (uint64_t)threads;
    case CU_LIMIT_PRINTF_FIFO_SIZE:
    case CU_LIMIT_MALLOC_HEAP_SIZE: return 1;
    case CU_LIMIT_DEV_RUNTIME_SYNC_DEPTH: return (uint64_t)150 << 20;
    case CU_LIMIT_DEV_RUNTIME_PENDING_LAUNCH_COUNT: return 1024;
    default: return 0;
    }
}

static uint64_t takes(uint64_t base, uint64_t value, uint64_t each)
{
    uint64_t bytes;
    if (value <= base)
        return 0;
    return __builtin_mul_overflow(value - base, each, &bytes) || bytes >= MOST ? MOST : round_up(bytes, BLOCK);
}

static size_t unused(void)
{
    size_t free, total;
    return CALL(cuMemGetInfo_v2, &free, &total) == CUDA_SUCCESS ? free : 0;
}

/* at_once reports whether the driver took the memory as soon as a limit was raised. It compares
 * what the card had free before and after. Memory that others freed at that moment may hide it. It
 * could not be found later, since the agent sees both changes in one reading. So if it does not
 * show, the limit is lowered and raised again, and the memory has to show both times. *r is the
 * driver's answer to the last raise. */
static bool at_once(int limit, size_t was, size_t value, uint64_t more, size_t before, size_t after, CUresult *r)
{
    bool shows = after < before && before - after >= more / 2;
    for (int tries = 0; !shows && tries < 2 && CALL(cuCtxSetLimit, limit, was) == CUDA_SUCCESS; tries++) {
        size_t low = unused(), high = after;
        *r = CALL(cuCtxSetLimit, limit, value);
        if (*r != CUDA_SUCCESS)
            return false;
        after = unused();
        shows = low > high && low - high >= more / 2 && low > after && low - after >= more / 2;
    }
    return shows;
}

/* change sets a limit. The caller holds p->limiting. *promised becomes true if the driver will take
 * memory later. */
static CUresult change(struct process *p, struct account *a, const struct where *at, int limit, size_t value, uint64_t one, bool *promised)
{
    struct entry e;
    size_t was, now = value;
    uint64_t key = at->context * LIMITS + (uint64_t)limit;
    CUresult r = CALL(cuCtxGetLimit, &was, limit);
    if (r != CUDA_SUCCESS)
        return r; /* without the old value it is unknown what the new one takes */
    if (!table_take(&p->table, key, SPACE_LIMIT, &e))
        e = (struct entry){.key = key, .owner = was, .space = SPACE_LIMIT, .how = HOW_GUESS, .device = at->device};
    size_t before = unused(), after = before;
    uint64_t wants = takes(e.owner, value, one), held = wants > e.bytes ? wants - e.bytes : 0;
    if (held && !account_reserve(a, held)) {
        held = 0;
        r = CUDA_ERROR_OUT_OF_MEMORY;
    } else {
        r = CALL(cuCtxSetLimit, limit, value);
    }
    uint64_t has = e.bytes;
    if (r == CUDA_SUCCESS) {
        /* The driver may have set another value. */
        after = unused();
        CALL(cuCtxGetLimit, &now, limit);
        has = takes(e.owner, now, one);
        if (has > e.bytes + held && !account_reserve(a, has - e.bytes - held)) {
            CALL(cuCtxSetLimit, limit, was);
            has = e.bytes;
            r = CUDA_ERROR_OUT_OF_MEMORY;
        } else if (has > e.bytes + held) {
            held = has - e.bytes;
        }
    }
    bool taken = has > e.bytes && at_once(limit, was, value, has - e.bytes, before, after, &r);
    if (r != CUDA_SUCCESS)
        has = e.bytes;
    uint64_t more = has > e.bytes ? has - e.bytes : 0, had = e.how == HOW_PROMISED ? e.bytes : 0;
    if (more)
        e.how = taken ? HOW_GUESS : HOW_PROMISED;
    *promised = more && e.how == HOW_PROMISED;
    count_add(&a->slot->promised, (e.how == HOW_PROMISED ? has : 0) - had);
    if (more)
        account_commit(a, more);
    if (held > more)
        account_cancel(a, held - more);
    if (has < e.bytes)
        account_lost(a, e.bytes - has); /* it gives room only after a reading shows that it is gone */
    if (has != e.bytes)
        account_guessed(a);
    e.bytes = has;
    if (has)
        table_put(&p->table, &e, NULL); /* without memory for the entry, it stays charged until the process ends */
    return r;
}

EXPORT CUresult cuCtxSetLimit(int limit, size_t value)
{
    struct process *p = ENTER();
    struct where at;
    bool refuse, promised = false;
    uint64_t one;
    if (!p || !where(p, &at) || !(one = each(limit, at.device)))
        return CALL(cuCtxSetLimit, limit, value);
    struct account *a = account_of(p, at.device, &refuse);
    if (!a)
        return refuse ? CUDA_ERROR_OUT_OF_MEMORY : CALL(cuCtxSetLimit, limit, value);
    spin_lock(&p->limiting);
    CUresult r = change(p, a, &at, limit, value, one, &promised);
    spin_unlock(&p->limiting);
    if (promised)
        account_within(a, 0);
    return r;
}
