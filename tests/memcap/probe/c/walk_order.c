/* SPDX-License-Identifier: Apache-2.0 */

/* What orders the memory of a walk: contexts and their limits, streams, events,
 * kernels, and pools with their settings. */
#include <stdio.h>

#include "walk.h"

static const unsigned busy_us[KERNELS] = {1, 100, 1500};

CUstream any_stream(struct thread *t)
{
    uint64_t i = dice(&t->seed, STREAMS + 3);
    return i < STREAMS ? w.streams[i].stream : i == STREAMS ? CU_STREAM_PER_THREAD : NULL;
}

int context_of(const struct thread *t, CUstream s)
{
    for (int i = 0; i < STREAMS; i++)
        if (w.streams[i].stream == s)
            return w.streams[i].ctx;
    return t->ctx;
}

void sit_in(struct thread *t, int ctx)
{
    t->ctx = ctx;
    RIGHT(cuCtxSetCurrent(w.contexts[ctx].ctx));
}

void furnish(int ctx)
{
    char image[128];
    CUmodule m;
    snprintf(image, sizeof image, "// gpu-emulator: blocks 0\n.version 6.0\n");
    if (!RIGHT(cuModuleLoadData(&m, image)))
        return;
    for (int k = 0; k < KERNELS; k++) {
        char name[32];
        snprintf(name, sizeof name, "busy_%uus", busy_us[k]);
        RIGHT(cuModuleGetFunction(&w.contexts[ctx].busy[k], m, name));
    }
}

void new_stream(struct thread *t, int i)
{
    w.streams[i].ctx = t->ctx;
    RIGHT(cuStreamCreate(&w.streams[i].stream, (unsigned)dice(&t->seed, 2)));
}

void new_event(struct thread *t, int i)
{
    w.events[i].ctx = t->ctx;
    RIGHT(cuEventCreate(&w.events[i].event, 0));
}

/* A second context comes, if there is room for it, or goes, with all that it has. */
static void change_context(struct thread *t, int n)
{
    static const struct call made = {.name = "cuCtxCreate_v2"};
    struct request q = {.call = &made};
    if (!w.contexts[n].ctx) {
        sit_in(t, 0);
        int fit = fits(&q);
        CUresult r = w.cu->cuCtxCreate_v2(&w.contexts[n].ctx, 0, w.device);
        if (r == CUDA_ERROR_OUT_OF_MEMORY) {
            refused(&q, fit);
            w.contexts[n].ctx = NULL;
        } else if (right("cuCtxCreate_v2", r)) {
            t->ctx = n;
            furnish(n);
        }
        return;
    }
    for (int i = 0; i < THREADS; i++)
        if (w.threads[i].ctx == n && &w.threads[i] != t)
            return; /* somebody sits in it */
    sit_in(t, 0);
    for (int i = 0; i < THINGS; i++) /* what pools gave may go with it or not */
        if (w.things[i].used && w.things[i].ctx == n && !w.things[i].call)
            give(t, &w.things[i]);
    RIGHT(cuCtxDestroy_v2(w.contexts[n].ctx));
    w.contexts[n].ctx = NULL;
    for (int i = 0; i < THINGS; i++)
        if (w.things[i].used && w.things[i].ctx == n && !survives(&w.things[i]))
            forget(&w.things[i]);
    for (int i = 0; i < STREAMS; i++)
        if (w.streams[i].ctx == n)
            new_stream(t, i);
    for (int i = 0; i < EVENTS; i++)
        if (w.events[i].ctx == n)
            new_event(t, i);
}

/* make_pool makes one of the device's memory, of one of its locality domains, for other
 * processes, or of managed memory. */
static void make_pool(struct thread *t, struct pool_of *p)
{
    CUmemPoolProps props = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {CU_MEM_LOCATION_TYPE_DEVICE, w.device}};
    uint64_t i = dice(&t->seed, 8);
    if (i < 2)
        props.handleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    else if (i == 2 && w.domains)
        props.location = (CUmemLocation){CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN, w.device | 1 << 8};
    else if (i == 3)
        props.allocType = CU_MEM_ALLOCATION_TYPE_MANAGED;
    p->managed = props.allocType == CU_MEM_ALLOCATION_TYPE_MANAGED;
    p->shared = props.handleTypes != 0;
    RIGHT(cuMemPoolCreate(&p->pool, &props));
}

static void end_pool(struct thread *t, struct pool_of *p)
{
    if (pool_in_use(p))
        return;
    /* Nobody could tell what a pool has of managed memory when it is destroyed. */
    for (int i = 0; p->managed && i < THINGS; i++)
        if (w.things[i].used && !w.things[i].call && w.things[i].pool == p->pool && RIGHT(cuMemFree_v2(w.things[i].item.a)))
            forget(&w.things[i]);
    for (int i = 0; p->managed && i < CONTEXTS; i++)
        if (w.contexts[i].ctx) {
            sit_in(t, i);
            RIGHT(cuCtxSynchronize());
        }
    RIGHT(cuMemPoolDestroy(p->pool));
    for (int i = 0; i < THINGS; i++) /* the next pool may be at the same address */
        if (w.things[i].pool == p->pool)
            w.things[i].pool = NULL;
    *p = (struct pool_of){0};
}

static void change_pool(struct thread *t)
{
    struct pool_of *p = &w.pools[dice(&t->seed, POOLS)];
    uint64_t keep = dice(&t->seed, 2) ? dice(&t->seed, 256 * MiB) : UINT64_MAX;
    int on = (int)dice(&t->seed, 2);
    if (!p->pool) {
        make_pool(t, p);
        return;
    }
    switch (dice(&t->seed, 6)) {
    case 0: end_pool(t, p); break;
    case 1: RIGHT(cuMemPoolTrimTo(p->pool, keep == UINT64_MAX ? 0 : keep)); break;
    case 2: case 3: RIGHT(cuMemPoolSetAttribute(p->pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &keep)); break;
    default: RIGHT(cuMemPoolSetAttribute(p->pool, 1 + (int)dice(&t->seed, 3), &on)); break;
    }
}

/* --- graphs that stay ------------------------------------------------------- */

/* own_stream is one of the primary context, or NULL. */
static CUstream own_stream(struct thread *t)
{
    uint64_t first = dice(&t->seed, STREAMS);
    for (uint64_t i = 0; i < STREAMS; i++)
        if (!w.streams[(first + i) % STREAMS].ctx)
            return w.streams[(first + i) % STREAMS].stream;
    return NULL;
}

/* make_graph captures what has memory while a kernel runs, and then other memory while
 * another does. */
static void make_graph(struct thread *t, int n)
{
    CUstream s = own_stream(t);
    CUgraph graph;
    uint64_t bytes = 2 * MiB + dice(&t->seed, 60 * MiB);
    if (w.graphs[n].exec) {
        RIGHT(cuGraphExecDestroy(w.graphs[n].exec));
        w.graphs[n].exec = NULL;
        return;
    }
    if (!s || !RIGHT(cuStreamBeginCapture_v2(s, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)))
        return;
    for (int i = 0; i < 2; i++) {
        CUdeviceptr at = 0;
        if (RIGHT(cuMemAllocAsync(&at, bytes / (1 + (uint64_t)i), s))) {
            RIGHT(cuLaunchKernel(kernel_for(t, s), 1, 1, 1, 32, 1, 1, 0, s, NULL, NULL));
            RIGHT(cuMemFreeAsync(at, s));
        }
    }
    if (RIGHT(cuStreamEndCapture(s, &graph)) && RIGHT(cuGraphInstantiateWithFlags(&w.graphs[n].exec, graph, 0))) {
        w.graphs[n].bytes = bytes;
        RIGHT(cuGraphDestroy(graph));
    }
}

static void launch_graph(struct thread *t, int n)
{
    static const struct call launched = {.name = "cuGraphLaunch"};
    struct request q = {.call = &launched, .pool = (CUmemoryPool)w.graphs[n].exec, .stream = own_stream(t), .bytes = w.graphs[n].bytes};
    for (int tries = 0; q.pool && q.stream && tries < 2; tries++) {
        int fit = fits(&q);
        CUresult r = w.cu->cuGraphLaunch(w.graphs[n].exec, q.stream);
        if (r != CUDA_ERROR_OUT_OF_MEMORY) {
            right("cuGraphLaunch", r);
            w.book->granted += r == CUDA_SUCCESS;
            return;
        }
        refused(&q, fit);
        if (!fit)
            return;
        w.book->twice += (uint64_t)tries;
    }
}

CUfunction kernel_for(struct thread *t, CUstream s)
{
    return w.contexts[context_of(t, s)].busy[dice(&t->seed, KERNELS)];
}

static int fine(const char *call, CUresult r) { return r == CUDA_ERROR_NOT_READY || right(call, r); }

void order(struct thread *t)
{
    CUstream s = any_stream(t);
    CUevent e = w.events[dice(&t->seed, EVENTS)].event;
    size_t unused, total;
    switch (dice(&t->seed, 21)) {
    case 0: case 1: case 2: case 3: case 4: RIGHT(cuLaunchKernel(kernel_for(t, s), 1, 1, 1, 32, 1, 1, 0, s, NULL, NULL)); break;
    case 5: case 6: RIGHT(cuEventRecord(e, s)); break;
    case 7: case 8: RIGHT(cuStreamWaitEvent(s, e, 0)); break;
    case 9: RIGHT(cuStreamSynchronize(s)); break;
    case 10: RIGHT(cuEventSynchronize(e)); break;
    case 11: fine("cuStreamQuery", w.cu->cuStreamQuery(s)); break;
    case 12: fine("cuEventQuery", w.cu->cuEventQuery(e)); break;
    case 13:
        if (RIGHT(cuMemGetInfo_v2(&unused, &total)) && unused > w.cap)
            say(w.book->failure, "step %llu: cuMemGetInfo has %zu free of a cap of %llu", (unsigned long long)w.common->steps, unused, (unsigned long long)w.cap);
        break;
    case 14: if (!dice(&t->seed, 4)) RIGHT(cuDeviceGraphMemTrim(w.device)); break;
    case 15: if (!dice(&t->seed, 4)) RIGHT(cuCtxSynchronize()); break;
    case 16: collect(t); break;
    case 17: case 18: launch_graph(t, (int)dice(&t->seed, GRAPHS)); break;
    default: pass_on(t); break;
    }
}

void change(struct thread *t)
{
    int i;
    switch (dice(&t->seed, 10)) {
    case 5: case 6: make_graph(t, (int)dice(&t->seed, GRAPHS)); break;
    case 0: change_context(t, 1 + (int)dice(&t->seed, CONTEXTS - 1)); break;
    case 1:
        i = (int)dice(&t->seed, STREAMS);
        RIGHT(cuStreamDestroy_v2(w.streams[i].stream));
        new_stream(t, i);
        break;
    case 2:
        i = (int)dice(&t->seed, EVENTS);
        RIGHT(cuEventDestroy_v2(w.events[i].event));
        new_event(t, i);
        break;
    case 3:
        i = (int)dice(&t->seed, CONTEXTS);
        if (w.contexts[i].ctx)
            sit_in(t, i);
        break;
    case 4: { /* the heap of a context */
        static const struct call limit = {.name = "cuCtxSetLimit"};
        struct request q = {.call = &limit, .bytes = (1 + dice(&t->seed, 8)) * 8 * MiB};
        int fit = fits(&q);
        CUresult r = w.cu->cuCtxSetLimit(CU_LIMIT_MALLOC_HEAP_SIZE, q.bytes);
        if (r == CUDA_ERROR_OUT_OF_MEMORY) {
            refused(&q, fit);
        } else if (r != CUDA_ERROR_INVALID_VALUE) { /* invalid: a kernel has run there */
            right("cuCtxSetLimit", r);
            /* Some drivers take it when the next kernel comes; the judge knows it then. A
             * kernel for which there is no room has none either when the limit is as it was. */
            r = w.cu->cuLaunchKernel(w.contexts[t->ctx].busy[0], 1, 1, 1, 32, 1, 1, 0, NULL, NULL, NULL);
            if (r == CUDA_ERROR_OUT_OF_MEMORY)
                r = w.cu->cuCtxSetLimit(CU_LIMIT_MALLOC_HEAP_SIZE, 8 * MiB);
            right("a kernel after cuCtxSetLimit", r);
        }
        break;
    }
    default: change_pool(t); break;
    }
}
