/* SPDX-License-Identifier: Apache-2.0 */

/* JAX: xla/pjrt/gpu/gpu_helpers.cc takes 0.75 of the total that the driver tells
 * (XLA_PYTHON_CLIENT_MEM_FRACTION) at the first computation, and cuts it by tsl's
 * BFCAllocator: sizes are rounded to 256 bytes, best fit, neighbours put together;
 * a refused region is tried again with 0.9 of its size, down to what is needed.
 * Without preallocation the regions begin at 2 MiB and double. What libraries
 * beneath need (cuBLAS, cuDNN's autotuning) comes from the driver beside it, and
 * autotuning tries how much scratch memory there is until it is refused. */
#include <string.h>

#include "programs.h"

enum { ARRAYS = 96 };

struct arena {
    struct run *r;
    struct heap heap;
    uint64_t most;   /* the limit of the whole */
    uint64_t region; /* the next region's size, where it grows */
};

static int extend(struct arena *a, uint64_t need)
{
    uint64_t left = a->most - a->heap.held;
    int grew = 0;
    if (need > left)
        return 0;
    while (a->region < need) {
        a->region *= 2;
        grew = 1;
    }
    uint64_t bytes = a->region < left ? a->region : left / 256 * 256;
    while (bytes >= need) {
        CUdeviceptr at;
        if (ASK(a->r, a->r->cu->cuMemAlloc_v2(&at, bytes))) {
            heap_add(&a->heap, at, bytes, 0, 1);
            if (!grew)
                a->region *= 2;
            return 1;
        }
        bytes = bytes / 10 * 9 / 256 * 256;
    }
    return 0;
}

static struct block *take(struct arena *a, uint64_t bytes)
{
    uint64_t size = round_up(bytes, 256);
    a->r->tally->operations++;
    struct block *b = heap_find(&a->heap, size, 0);
    if (!b && extend(a, size))
        b = heap_find(&a->heap, size, 0);
    if (!b)
        return NULL;
    /* BFCAllocator splits if at least half would be left over, or 128 MiB. */
    uint64_t rest = b->size >= 2 * size || b->size - size >= 128 * MiB ? 256 : UINT64_MAX;
    return heap_cut(&a->heap, b, size, rest);
}

static void give(struct arena *a, struct block **b)
{
    if (!*b)
        return;
    a->r->tally->operations++;
    heap_give(&a->heap, *b);
    *b = NULL;
}

/* autotune takes scratch memory beside the arena until it is refused. */
static void autotune(struct run *r)
{
    CUdeviceptr scratch[256];
    int n = 0;
    while (n < 256 && ASK(r, r->cu->cuMemAlloc_v2(&scratch[n], 32 * MiB)))
        n++;
    r->tally->operations += (uint64_t)n * 2;
    compute(r, r->seat.stream);
    MUST(r, r->cu->cuStreamSynchronize(r->seat.stream));
    while (n)
        MUST(r, r->cu->cuMemFree_v2(scratch[--n]));
}

static void session(struct run *r, int preallocate)
{
    struct arena a = {.r = r, .region = 2 * MiB};
    struct block *arrays[ARRAYS] = {0};
    size_t unused = 0, total = 0;
    uint64_t live = 0;
    MUST(r, r->cu->cuMemGetInfo_v2(&unused, &total));
    a.most = total / 4 * 3 / 256 * 256;
    if (preallocate) {
        a.region = a.most;
        if (!extend(&a, a.most / 2)) {
            r->tally->failed++;
            return;
        }
    }
    for (int n = 0; n < 4000 && going(r); n++) {
        /* One executable: what it reads is there, what it makes is new, what it
         * needs in between is one block, as buffer assignment has it. */
        int i = (int)roll(r, ARRAYS);
        uint64_t made = 4 * KiB << roll(r, 13);
        made += roll(r, made);
        if (arrays[i])
            live -= arrays[i]->size;
        give(&a, &arrays[i]);
        uint64_t temporary = made * between(r, 1, 3);
        if (live + made + temporary > a.most / 100 * (preallocate ? 80 : 55))
            continue;
        struct block *t = take(&a, temporary);
        if (t)
            arrays[i] = take(&a, made);
        if (!t || !arrays[i])
            r->tally->failed++;
        if (arrays[i])
            live += arrays[i]->size;
        compute(r, r->seat.stream);
        give(&a, &t);
        if (n % 200 == 0)
            autotune(r);
    }
    for (int i = 0; i < ARRAYS; i++)
        give(&a, &arrays[i]);
    MUST(r, r->cu->cuStreamSynchronize(r->seat.stream));
    while (a.heap.segments) {
        if (!wholly_free(a.heap.segments))
            fail(r, "an arena is not free at the end");
        MUST(r, r->cu->cuMemFree_v2(a.heap.segments->at));
        heap_drop(&a.heap, a.heap.segments);
    }
}

static void jax(struct run *r)
{
    for (int n = 0; going(r); n++)
        session(r, n % 4 != 3);
}

const struct program jax_programs[] = {{"jax", jax, 0}, {0}};
