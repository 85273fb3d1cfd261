/* SPDX-License-Identifier: Apache-2.0 */

/* PyTorch's three ways to take GPU memory.
 *
 * The caching allocator and expandable segments are c10/cuda/CUDACachingAllocator.cpp
 * (read at 001074d25084): sizes are rounded to 512 bytes; what is at most 1 MiB
 * comes from segments of 2 MiB, what is below 10 MiB from segments of 20 MiB, the
 * rest from one of its own, rounded to 2 MiB; the rest of a block is split off if
 * it is 512 bytes at least (small) or more than 1 MiB (large). A block is free to
 * its stream alone; one that another stream has used waits for an event of that.
 * Out of memory, all segments that are wholly free go back to the driver, and the
 * request is made once more. The asynchronous backend is CUDAMallocAsyncAllocator.cpp:
 * the device's default pool, which keeps everything (release threshold UINT64_MAX). */
#include <stdlib.h>
#include <string.h>

#include "programs.h"

enum { LANES = 2 };
enum { SMALLEST = 512 };

struct waiting {
    struct block *block;
    CUevent event;
    struct waiting *next;
};

struct caching {
    struct run *r;
    struct allocator *a;
    struct heap small, large;
    struct waiting *waiting;
    /* Expandable segments: one for each pool and lane. */
    int expandable;
    struct growing {
        struct segment *segment;
        struct heap *heap;
        uint64_t granule;
        CUmemGenericAllocationHandle *handles; /* by granule */
    } growing[2][LANES];
};

static void make_lanes(struct run *r, struct allocator *a)
{
    a->r = r;
    a->lanes[0] = r->seat.stream;
    for (int i = 1; i < LANES; i++)
        if (!a->lanes[i])
            MUST(r, r->cu->cuStreamCreate(&a->lanes[i], CU_STREAM_NON_BLOCKING));
}

static int is_small(uint64_t size) { return size <= MiB; }

static void free_now(struct block *b)
{
    b->tag = NULL;
    heap_give(b->segment->heap, b);
}

/* settle_events frees the blocks whose other streams are done; or waits for all
 * of them. */
static void settle_events(struct caching *c, int wait)
{
    struct cuda *cu = c->r->cu;
    for (struct waiting **at = &c->waiting; *at;) {
        struct waiting *w = *at;
        CUresult done = wait ? cu->cuEventSynchronize(w->event) : cu->cuEventQuery(w->event);
        if (done == CUDA_ERROR_NOT_READY) {
            at = &w->next;
            continue;
        }
        must_be(c->r, "cuEventQuery", done);
        MUST(c->r, cu->cuEventDestroy_v2(w->event));
        free_now(w->block);
        *at = w->next;
        free(w);
    }
}

static void wait_for_lanes(struct caching *c)
{
    for (int i = 0; i < LANES; i++)
        MUST(c->r, c->r->cu->cuStreamSynchronize(c->a->lanes[i]));
}

static void empty_heap(struct caching *c, struct heap *h)
{
    for (struct segment *s = h->segments, *next; s; s = next) {
        next = s->next;
        if (!wholly_free(s))
            continue;
        MUST(c->r, c->r->cu->cuMemFree_v2(s->at));
        heap_drop(h, s);
    }
}

static void empty_caching(void *self)
{
    struct caching *c = self;
    settle_events(c, 1);
    empty_heap(c, &c->small);
    empty_heap(c, &c->large);
}

/* expand maps as much more as a size needs, where it is nearest to the beginning.
 * Whether the driver gave it. */
static int expand(struct caching *c, struct growing *g, uint64_t size)
{
    struct run *r = c->r;
    struct cuda *cu = r->cu;
    CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {CU_MEM_LOCATION_TYPE_DEVICE, r->seat.device}};
    CUmemAccessDesc access = {.location = prop.location, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    struct block *b = g->segment->first;
    uint64_t have = 0, need = 0;
    for (; b; b = b->after) {
        if (b->used || b->mapped)
            continue;
        have = b->before && !b->before->used ? b->before->size : 0;
        need = round_up(size - have, g->granule);
        if (size > have && need <= b->size)
            break;
    }
    if (!b) {
        fail(r, "no addresses left in an expandable segment");
        return 0;
    }
    size_t first = (b->at - g->segment->at) / g->granule, count = need / g->granule, got = 0;
    while (got < count && ASK(r, cu->cuMemCreate(&g->handles[first + got], g->granule, &prop, 0)))
        got++;
    if (got < count) {
        while (got)
            MUST(r, cu->cuMemRelease(g->handles[first + --got]));
        return 0;
    }
    for (size_t i = 0; i < count; i++)
        if (!MUST(r, cu->cuMemMap(b->at + i * g->granule, g->granule, 0, g->handles[first + i], 0)))
            return 0;
    if (!MUST(r, cu->cuMemSetAccess(b->at, need, &access, 1)))
        return 0;
    if (b->size > need)
        split_at(g->heap, b, need);
    heap_cut(g->heap, b, b->size, UINT64_MAX);
    b->mapped = 1;
    heap_give(g->heap, b);
    return 1;
}

/* shrink unmaps the granules of an expandable segment that are wholly free. */
static void shrink(struct caching *c, struct growing *g)
{
    struct cuda *cu = c->r->cu;
    for (struct block *b = g->segment->first; b; b = b->after) {
        uint64_t base = g->segment->at;
        uint64_t from = base + round_up(b->at - base, g->granule), to = base + (b->at - base + b->size) / g->granule * g->granule;
        if (b->used || !b->mapped || from >= to)
            continue;
        if (from > b->at)
            b = split_at(g->heap, b, from - b->at);
        if (to < b->at + b->size)
            split_at(g->heap, b, to - b->at);
        for (uint64_t at = from; at < to; at += g->granule) {
            MUST(c->r, cu->cuMemUnmap(at, g->granule));
            MUST(c->r, cu->cuMemRelease(g->handles[(at - base) / g->granule]));
        }
        heap_cut(g->heap, b, b->size, UINT64_MAX);
        b->mapped = 0;
        b = heap_give(g->heap, b);
    }
}

static void empty_expandable(void *self)
{
    struct caching *c = self;
    settle_events(c, 1);
    wait_for_lanes(c); /* nothing may be in flight to what is unmapped */
    for (int pool = 0; pool < 2; pool++)
        for (int lane = 0; lane < LANES; lane++)
            shrink(c, &c->growing[pool][lane]);
}

static uint64_t segment_size(uint64_t size) { return size <= MiB ? 2 * MiB : size < 10 * MiB ? 20 * MiB : round_up(size, 2 * MiB); }

/* grow has a size from the driver. */
static int grow(struct caching *c, uint64_t size, int lane)
{
    CUdeviceptr p;
    if (c->expandable)
        return expand(c, &c->growing[!is_small(size)][lane], size);
    uint64_t bytes = segment_size(size);
    if (!ASK(c->r, c->r->cu->cuMemAlloc_v2(&p, bytes)))
        return 0;
    heap_add(is_small(size) ? &c->small : &c->large, p, bytes, lane, 1);
    return 1;
}

static void *take_cached(void *self, uint64_t bytes, int lane)
{
    struct caching *c = self;
    uint64_t size = round_up(bytes, SMALLEST);
    struct heap *h = is_small(size) ? &c->small : &c->large;
    settle_events(c, 0);
    struct block *b = heap_find(h, size, lane);
    if (!b) {
        if (!grow(c, size, lane)) {
            c->a->empty(c);
            if (!grow(c, size, lane))
                return NULL;
        }
        if (!(b = heap_find(h, size, lane))) {
            fail(c->r, "what was had from the driver is not there");
            return NULL;
        }
    }
    return heap_cut(h, b, size, is_small(size) ? SMALLEST : MiB + 1);
}

static void give_cached(void *self, void *block)
{
    struct caching *c = self;
    struct block *b = block;
    for (int i = 0; i < LANES; i++) {
        if (!((uintptr_t)b->tag >> i & 1))
            continue;
        struct waiting *w = calloc(1, sizeof *w);
        if (!w)
            abort();
        *w = (struct waiting){.block = b, .next = c->waiting};
        if (MUST(c->r, c->r->cu->cuEventCreate(&w->event, CU_EVENT_DISABLE_TIMING)))
            MUST(c->r, c->r->cu->cuEventRecord(w->event, c->a->lanes[i]));
        c->waiting = w;
        return; /* with two lanes there is one other */
    }
    free_now(b);
}

static void used_on(void *self, void *block, int lane)
{
    (void)self;
    struct block *b = block;
    if (b->lane != lane)
        b->tag = (void *)((uintptr_t)b->tag | (uintptr_t)1 << lane);
}

struct caching *make_caching(struct run *r, struct allocator *a)
{
    struct caching *c = calloc(1, sizeof *c);
    if (!c)
        abort();
    make_lanes(r, a);
    *c = (struct caching){.r = r, .a = a};
    a->self = c;
    a->take = take_cached;
    a->give = give_cached;
    a->used_on = used_on;
    a->empty = empty_caching;
    return c;
}

void end_caching(struct caching *c)
{
    c->a->empty(c);
    if (c->small.held || c->large.held)
        fail(c->r, "the caching allocator cannot give back what it has");
    free(c);
}

/* load is what a training loop is given of the memory that is free. About three
 * quarters of that are live at a time; a cache fills the rest. */
static uint64_t load(struct run *r, unsigned percent)
{
    size_t unused = 0, total = 0;
    MUST(r, r->cu->cuMemGetInfo_v2(&unused, &total));
    return unused / 100 * percent;
}

static void caching(struct run *r)
{
    struct allocator a = {0};
    struct caching *c = make_caching(r, &a);
    train(&a, load(r, 70));
    end_caching(c);
}

static void expandable(struct run *r)
{
    struct allocator a = {0};
    struct caching *c = make_caching(r, &a);
    size_t unused = 0, total = 0;
    MUST(r, r->cu->cuMemGetInfo_v2(&unused, &total));
    c->expandable = 1;
    a.empty = empty_expandable;
    for (int pool = 0; pool < 2; pool++)
        for (int lane = 0; lane < LANES; lane++) {
            struct growing *g = &c->growing[pool][lane];
            CUdeviceptr at = 0;
            g->granule = pool ? 20 * MiB : 2 * MiB;
            /* As many addresses as there is memory, and an eighth. */
            uint64_t bytes = round_up(total + total / 8, 20 * MiB);
            if (!MUST(r, r->cu->cuMemAddressReserve(&at, bytes, 0, 0, 0)))
                return;
            g->heap = pool ? &c->large : &c->small;
            g->segment = heap_add(g->heap, at, bytes, lane, 0)->segment;
            g->handles = calloc(bytes / g->granule, sizeof *g->handles);
            if (!g->handles)
                abort();
        }
    train(&a, load(r, 132));
    empty_expandable(c);
    for (int pool = 0; pool < 2; pool++)
        for (int lane = 0; lane < LANES; lane++) {
            struct growing *g = &c->growing[pool][lane];
            if (!wholly_free(g->segment))
                fail(r, "an expandable segment is not free at the end");
            MUST(r, r->cu->cuMemAddressFree(g->segment->at, g->segment->size));
            heap_drop(g->heap, g->segment);
            free(g->handles);
        }
    free(c);
}

/* The asynchronous backend. A tensor is freed on its own stream, which waits for
 * the others that have used it. */

struct tensor {
    CUdeviceptr at;
    int lane;
    unsigned used_on;
};

static void *take_async(void *self, uint64_t bytes, int lane)
{
    struct allocator *a = self;
    struct run *r = a->r;
    struct tensor *t = calloc(1, sizeof *t);
    if (!t)
        abort();
    t->lane = lane;
    for (int again = 0; again < 2; again++) {
        if (ASK(r, r->cu->cuMemAllocAsync(&t->at, bytes, a->lanes[lane])))
            return t;
        if (!again)
            a->empty(a); /* as programs do that catch the error */
    }
    free(t);
    return NULL;
}

static void give_async(void *self, void *block)
{
    struct allocator *a = self;
    struct run *r = a->r;
    struct tensor *t = block;
    for (int i = 0; i < LANES; i++) {
        CUevent e;
        if (!(t->used_on >> i & 1) || !MUST(r, r->cu->cuEventCreate(&e, CU_EVENT_DISABLE_TIMING)))
            continue;
        MUST(r, r->cu->cuEventRecord(e, a->lanes[i]));
        MUST(r, r->cu->cuStreamWaitEvent(a->lanes[t->lane], e, 0));
        MUST(r, r->cu->cuEventDestroy_v2(e));
    }
    MUST(r, r->cu->cuMemFreeAsync(t->at, a->lanes[t->lane]));
    free(t);
}

static void used_on_async(void *self, void *block, int lane)
{
    (void)self;
    struct tensor *t = block;
    if (t->lane != lane)
        t->used_on |= 1u << lane;
}

static void empty_async(void *self)
{
    struct allocator *a = self;
    struct run *r = a->r;
    CUmemoryPool pool;
    for (int i = 0; i < LANES; i++)
        MUST(r, r->cu->cuStreamSynchronize(a->lanes[i]));
    if (MUST(r, r->cu->cuDeviceGetDefaultMemPool(&pool, r->seat.device)))
        MUST(r, r->cu->cuMemPoolTrimTo(pool, 0));
}

static void async(struct run *r)
{
    struct allocator a = {.self = &a, .take = take_async, .give = give_async, .used_on = used_on_async, .empty = empty_async};
    CUmemoryPool pool;
    uint64_t keep = UINT64_MAX;
    make_lanes(r, &a);
    if (MUST(r, r->cu->cuDeviceGetDefaultMemPool(&pool, r->seat.device)) &&
        MUST(r, r->cu->cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &keep)))
        train(&a, load(r, 110));
}

const struct program torch_programs[] = {
    {"pytorch-caching", caching, 0},
    {"pytorch-expandable", expandable, 0},
    {"pytorch-async", async, 0},
    {0},
};
