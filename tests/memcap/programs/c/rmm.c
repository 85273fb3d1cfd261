/* SPDX-License-Identifier: Apache-2.0 */

/* RMM, as cuDF and RAPIDS use it: include/rmm/mr/pool_memory_resource.hpp and
 * cuda_async_memory_resource.hpp of rapidsai/rmm.
 *
 * The pool begins with half of the memory that is free, or a little more. When nothing fits it grows
 * by half of what is left to its maximum, or doubles where it has none, and where
 * the driver refuses that, by half of it and so on down to the request. It never gives anything
 * back. Sizes are rounded to 256 bytes. Freed blocks are kept by stream, with an
 * event; another stream may take one after it has waited for the event.
 *
 * The asynchronous resource has a pool of its own that keeps everything; half of
 * the free memory is taken and given back at the start, so that the pool has it. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "programs.h"

enum { STREAMS = 4, COLUMNS = 384 };

struct pool {
    struct run *r;
    struct heap heap;
    CUstream streams[STREAMS];
    CUevent events[STREAMS];
    uint64_t most; /* what the load goes by; the pool's maximum, if it is bounded */
    int bounded;
};

static int grow_pool(struct pool *p, uint64_t least, uint64_t bytes)
{
    while (bytes >= least && bytes) {
        CUdeviceptr at;
        if (ASK(p->r, p->r->cu->cuMemAlloc_v2(&at, bytes))) {
            heap_add(&p->heap, at, bytes, 0, 1);
            return 1;
        }
        if (bytes == least)
            return 0;
        bytes = bytes / 2 > least ? bytes / 2 : least;
    }
    return 0;
}

static struct block *take(struct pool *p, uint64_t bytes, int stream)
{
    struct run *r = p->r;
    uint64_t size = round_up(bytes, 256);
    struct block *b = heap_find(&p->heap, size, stream);
    if (!b && (b = heap_find(&p->heap, size, -1)))
        MUST(r, r->cu->cuStreamWaitEvent(p->streams[stream], p->events[b->lane], 0));
    if (!b) {
        uint64_t left = p->most - p->heap.held, wish = p->bounded ? left / 2 : p->heap.held;
        if ((p->bounded && size > left) || !grow_pool(p, size, size > wish ? size : round_up(wish, 256)))
            return NULL;
        b = heap_find(&p->heap, size, -1);
    }
    b = heap_cut(&p->heap, b, size, 256);
    b->lane = stream;
    return b;
}

static void give(struct pool *p, struct block *b)
{
    MUST(p->r, p->r->cu->cuEventRecord(p->events[b->lane], p->streams[b->lane]));
    heap_give(&p->heap, b);
}

/* merge_lanes is what other streams' lists are merged by when nothing else helps:
 * one stream waits for all of them, and all that is free is its own. */
static void merge_lanes(struct pool *p, int stream)
{
    struct run *r = p->r;
    for (int i = 0; i < STREAMS; i++)
        MUST(r, r->cu->cuStreamWaitEvent(p->streams[stream], p->events[i], 0));
    for (struct segment *s = p->heap.segments; s; s = s->next)
        for (struct block *b = s->first; b; b = b->after) {
            if (b->used)
                continue;
            b->lane = stream;
            while (b->after && !b->after->used)
                join(&p->heap, b);
        }
}

/* column is a size out of a share of memory: as many of each power of two, so that
 * most are small and most memory is in the large. */
static uint64_t column(struct run *r, uint64_t share)
{
    uint64_t n = share / 2048 << roll(r, 8);
    return n + roll(r, n);
}

static void pool(struct run *r)
{
    struct pool p = {.r = r};
    struct block *columns[COLUMNS] = {0};
    size_t unused = 0, total = 0;
    uint64_t live = 0;
    for (int i = 0; i < STREAMS; i++)
        if (!MUST(r, r->cu->cuStreamCreate(&p.streams[i], CU_STREAM_NON_BLOCKING)) || !MUST(r, r->cu->cuEventCreate(&p.events[i], CU_EVENT_DISABLE_TIMING)))
            return;
    for (int session = 0; going(r); session++) {
        MUST(r, r->cu->cuMemGetInfo_v2(&unused, &total));
        p.bounded = session % 2;
        p.most = unused / 100 * 98 / 256 * 256;
        uint64_t initial = unused / 100 * between(r, 50, 70) / 256 * 256;
        if (!grow_pool(&p, initial, initial)) {
            r->tally->failed++;
            continue;
        }
        for (int n = 0; n < 20000 && going(r); n++) {
            int i = (int)roll(r, COLUMNS), stream = (int)roll(r, STREAMS);
            r->tally->operations++;
            if (columns[i]) {
                live -= columns[i]->size;
                give(&p, columns[i]);
                columns[i] = NULL;
            } else {
                uint64_t bytes = column(r, p.most / 4);
                if (live + bytes > p.most / 100 * 50)
                    continue; /* cuDF spills before */
                if (!(columns[i] = take(&p, bytes, stream))) {
                    merge_lanes(&p, stream);
                    if (!(columns[i] = take(&p, bytes, stream))) {
                        r->tally->failed++;
                        continue;
                    }
                }
                live += columns[i]->size;
                compute(r, p.streams[stream]);
            }
            if (n % 64 == 63)
                MUST(r, r->cu->cuStreamSynchronize(p.streams[stream]));
        }
        for (int i = 0; i < COLUMNS; i++)
            if (columns[i]) {
                give(&p, columns[i]);
                columns[i] = NULL;
            }
        live = 0;
        for (int i = 0; i < STREAMS; i++)
            MUST(r, r->cu->cuStreamSynchronize(p.streams[i]));
        merge_lanes(&p, 0);
        while (p.heap.segments) {
            MUST(r, r->cu->cuMemFree_v2(p.heap.segments->at));
            heap_drop(&p.heap, p.heap.segments);
        }
    }
}

/* The asynchronous resource, with a thread for each stream. */

struct worker {
    struct run r;
    CUmemoryPool pool;
    uint64_t most; /* of this worker's columns together */
};

static void *work_async(void *arg)
{
    struct worker *w = arg;
    struct run *r = &w->r;
    struct cuda *cu = r->cu;
    struct {
        CUdeviceptr at;
        uint64_t size;
    } columns[COLUMNS / STREAMS] = {0};
    enum { MINE = COLUMNS / STREAMS };
    uint64_t live = 0;
    if (!MUST(r, cu->cuCtxSetCurrent(r->seat.context)) || !MUST(r, cu->cuStreamCreate(&r->seat.stream, CU_STREAM_NON_BLOCKING)))
        return NULL;
    for (int n = 0; going(r); n++) {
        int i = (int)roll(r, MINE);
        r->tally->operations++;
        if (columns[i].at) {
            MUST(r, cu->cuMemFreeAsync(columns[i].at, r->seat.stream));
            live -= columns[i].size;
            columns[i].at = 0;
        } else {
            uint64_t bytes = column(r, w->most);
            if (live + bytes > w->most)
                continue;
            if (!ASK(r, cu->cuMemAllocFromPoolAsync(&columns[i].at, bytes, w->pool, r->seat.stream))) {
                columns[i].at = 0;
                r->tally->failed++;
                MUST(r, cu->cuStreamSynchronize(r->seat.stream));
                /* Until others have given something back. Else it asks again as fast as it is
                 * refused, hundreds of times while a busy machine runs something else, and a
                 * full card, which takes longer to refuse, seems to have refused less. */
                usleep(1000);
                continue;
            }
            columns[i].size = bytes;
            live += bytes;
            compute(r, r->seat.stream);
        }
        if (n % 64 == 63)
            MUST(r, cu->cuStreamSynchronize(r->seat.stream));
    }
    for (int i = 0; i < MINE; i++)
        if (columns[i].at)
            MUST(r, cu->cuMemFreeAsync(columns[i].at, r->seat.stream));
    MUST(r, cu->cuStreamSynchronize(r->seat.stream));
    return NULL;
}

static void async(struct run *r)
{
    struct worker workers[STREAMS];
    pthread_t threads[STREAMS];
    CUmemPoolProps props = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {CU_MEM_LOCATION_TYPE_DEVICE, r->seat.device}};
    CUmemoryPool pool;
    size_t unused = 0, total = 0;
    uint64_t keep = UINT64_MAX;
    CUdeviceptr initial;
    if (!MUST(r, r->cu->cuMemGetInfo_v2(&unused, &total)) || !MUST(r, r->cu->cuMemPoolCreate(&pool, &props)) ||
        !MUST(r, r->cu->cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &keep)))
        return;
    if (!ASK(r, r->cu->cuMemAllocFromPoolAsync(&initial, unused / 2, pool, r->seat.stream)))
        fail(r, "half of the free memory is refused");
    else
        MUST(r, r->cu->cuMemFreeAsync(initial, r->seat.stream));
    MUST(r, r->cu->cuStreamSynchronize(r->seat.stream));
    for (int i = 0; i < STREAMS; i++) {
        workers[i] = (struct worker){.r = *r, .pool = pool, .most = unused / 100 * 75 / STREAMS};
        workers[i].r.dice += (uint64_t)i << 32;
        if (pthread_create(&threads[i], NULL, work_async, &workers[i]))
            abort();
    }
    for (int i = 0; i < STREAMS; i++)
        pthread_join(threads[i], NULL);
    MUST(r, r->cu->cuMemPoolDestroy(pool));
}

const struct program rmm_programs[] = {
    {"rmm-pool", pool, 0},
    {"rmm-async", async, 0},
    {0},
};
