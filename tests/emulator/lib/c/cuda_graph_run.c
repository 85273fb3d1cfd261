/* SPDX-License-Identifier: Apache-2.0 */

/* The memory of graphs that run. Each device has some for them, "a different pool from
 * cudaMemPoolTrimTo()", which grows for a launch and stays until it is trimmed: "destroying
 * a graph which contains memory nodes (even if their allocations are free) will not
 * immediately return physical memory to the OS". The sentences in quotes are of the CUDA
 * programming guide, Graph Memory Nodes.
 *
 * A graph's allocation is in use from the launch on until GPU execution reaches what frees
 * it: a node, which holds it until that run is over, or cuMemFreeAsync, until its stream
 * comes there; cuMemFree frees "immediately". What is in use for a time is a claim.
 *
 *   "multiple graphs may use the same physical memory for distinct allocations if they will
 *   not run simultaneously; however, physical pages cannot be reused if they are bound to
 *   more than one executing graph at the same time, or to a graph allocation which remains
 *   unfreed."
 *
 * So a launch shares the memory of claims that are over, or that its stream follows: "Since
 * the graphs in the same stream never run concurrently, CUDA can and should use the same
 * physical memory". Beside others it takes more, and if there is none to be had waits for
 * them: "CUDA may also introduce synchronization between future graph launches in order to
 * prevent live graph allocations from referring to the same physical memory". Which comes
 * first is not said; the switch graphs has both. */
#include <stdlib.h>

#include "cuda_graph.h"
#include "cuda_switch.h"

struct claim {
    struct moment moment; /* when it is over */
    uint64_t exec;        /* of the graph that runs, or 0 */
    uint64_t bytes;
};

static struct use {
    uint64_t live, reserved, used_high, reserved_high;
    struct claim *claims;
    size_t count, room;
} uses[MAX_DEVICES];

static uint64_t max(uint64_t a, uint64_t b) { return a > b ? a : b; }
static uint64_t size_of(const struct graph_memory *m) { return round_up(m->range->size, UNIT); }

void graph_memory_release(struct graph_memory *m)
{
    if (--m->refs > 0)
        return;
    range_give(m->range);
    free(m);
}

/* settle forgets the claims that are over, and returns what the others have. */
static uint64_t settle(struct use *u)
{
    uint64_t sum = 0;
    size_t kept = 0;
    for (size_t i = 0; i < u->count; i++) {
        const struct claim *c = &u->claims[i];
        if (order_passed(c->moment.at) || !lives(c->moment.ctx, c->moment.life))
            continue;
        sum += c->bytes;
        u->claims[kept++] = *c;
    }
    u->count = kept;
    return sum;
}

static void claim(struct use *u, const struct moment *m, uint64_t exec, uint64_t bytes)
{
    if (!bytes || order_passed(m->at))
        return;
    if (u->count == u->room) {
        size_t room = u->room ? u->room * 2 : 16;
        struct claim *more = realloc(u->claims, room * sizeof *more);
        if (!more)
            return; /* it is as if it were over */
        u->claims = more;
        u->room = room;
    }
    u->claims[u->count++] = (struct claim){*m, exec, bytes};
}

uint64_t graphs_oldest_tick(void)
{
    uint64_t oldest = UINT64_MAX;
    for (int d = 0; d < device_count; d++)
        for (size_t i = 0; i < uses[d].count; i++)
            if (uses[d].claims[i].moment.tick < oldest)
                oldest = uses[d].claims[i].moment.tick;
    return oldest;
}

/* memory_dead ends the life of an allocation. */
static void memory_dead(struct graph_memory *m)
{
    m->live = false;
    uses[m->device].live -= size_of(m);
    graph_memory_release(m);
}

/* --- executable graphs ------------------------------------------------------ */

static bool plan(struct exec *e, const struct graph *g)
{
    for (struct node *n = g->first; n; n = n->next) {
        e->us += n->us;
        if (n->child && !plan(e, n->child))
            return false;
        if (!n->memory)
            continue;
        if (e->count == e->room) {
            size_t room = e->room ? e->room * 2 : 8;
            struct step *more = realloc(e->steps, room * sizeof *more);
            if (!more)
                return false;
            e->steps = more;
            e->room = room;
        }
        e->steps[e->count++] = (struct step){n->memory, n->type == CU_GRAPH_NODE_TYPE_MEM_FREE};
        n->memory->refs++;
    }
    return true;
}

static void exec_end(struct exec *e)
{
    for (size_t i = 0; i < e->count; i++)
        graph_memory_release(e->steps[i].memory);
    free(e->steps);
    object_free(e);
}

/* needs is what a run does to a device's graph memory: what is live when it begins, at
 * most, and when it is over. */
struct needs {
    uint64_t before, peak, after;
};

/* needed answers false if an allocation of an earlier run is still there. */
static bool needed(const struct exec *e, struct needs n[MAX_DEVICES])
{
    for (int i = 0; i < device_count; i++)
        n[i] = (struct needs){uses[i].live, uses[i].live, uses[i].live};
    for (size_t i = 0; i < e->count; i++) {
        struct graph_memory *m = e->steps[i].memory;
        if (e->steps[i].frees || !m->live)
            continue;
        if (!(e->flags & CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH))
            return false;
        n[m->device].before = n[m->device].peak = n[m->device].after -= size_of(m);
    }
    for (size_t i = 0; i < e->count; i++) {
        struct graph_memory *m = e->steps[i].memory;
        struct needs *is = &n[m->device];
        is->after += e->steps[i].frees ? -size_of(m) : size_of(m);
        is->peak = max(is->peak, is->after);
    }
    return true;
}

static void run(const struct exec *e)
{
    for (size_t i = 0; i < e->count; i++) {
        struct graph_memory *m = e->steps[i].memory;
        if (!e->steps[i].frees && m->live)
            memory_dead(m); /* freed by the launch */
    }
    for (size_t i = 0; i < e->count; i++) {
        struct graph_memory *m = e->steps[i].memory;
        if (e->steps[i].frees) {
            if (m->live)
                memory_dead(m);
            continue;
        }
        m->live = true;
        m->refs++;
        uses[m->device].live += size_of(m);
    }
}

/* --- launches --------------------------------------------------------------- */

struct launch {
    const char *call;
    CUgraphExec handle;
    CUstream stream;
    struct context *ctx;
    bool runs, waits; /* waits: for all graphs that are at work, so that it can have theirs */
};

/* follows says whether a launch comes after a claim anyway: "Each launch is ordered behind
 * both any previous work in hStream and any previous launches of hGraphExec." */
static bool follows(const struct launch *q, const struct exec *e, const struct lane *l, const struct claim *c)
{
    return q->waits || (c->exec && c->exec == e->id) || lane_follows(l, q->ctx, &c->moment);
}

/* wants is what a device's graph memory has to be for a launch. shared is what of it the
 * launch can have of claims that it follows. */
static uint64_t wants(const struct launch *q, const struct exec *e, const struct lane *l, int device, const struct needs *n, uint64_t *shared)
{
    struct use *u = &uses[device];
    uint64_t others = settle(u), fresh = n->peak - n->before;
    *shared = 0;
    for (size_t i = 0; i < u->count; i++)
        if (follows(q, e, l, &u->claims[i]))
            *shared += u->claims[i].bytes;
    others -= *shared;
    return round_up(n->before + others + max(*shared, fresh), BLOCK);
}

/* start puts a launch on its stream, and claims what it needs until it is over. */
static void start(const struct launch *q, struct exec *e, struct lane *l, const struct needs n[MAX_DEVICES])
{
    uint64_t shared[MAX_DEVICES] = {0}, at = e->done_at;
    for (int d = 0; e->count && d < device_count; d++) {
        struct use *u = &uses[d];
        size_t kept = 0;
        wants(q, e, l, d, &n[d], &shared[d]);
        for (size_t i = 0; i < u->count; i++) {
            if (follows(q, e, l, &u->claims[i]))
                at = max(at, u->claims[i].moment.at);
            else
                u->claims[kept++] = u->claims[i];
        }
        u->count = kept;
    }
    run(e);
    lane_after(l, q->ctx, at);
    lane_work(l, q->ctx, e->us);
    if (!e->count)
        return;
    struct moment m = lane_moment(l, q->ctx);
    e->done_at = m.at;
    for (int d = 0; d < device_count; d++) {
        struct use *u = &uses[d];
        uint64_t has = n[d].before + max(shared[d], n[d].peak - n[d].before);
        claim(u, &m, e->id, has > n[d].after ? has - n[d].after : 0);
        u->used_high = max(u->used_high, u->live + settle(u));
    }
}

/* attempt makes a launch, or returns the device of which it needs more, and how much. */
static CUresult attempt(const struct launch *q, int *device, uint64_t *more)
{
    struct needs n[MAX_DEVICES];
    struct exec *e = object_get(q->handle, EXEC);
    struct lane *l = lane_of(q->stream, q->ctx);
    *more = 0;
    MUST(e && (needed(e, n) || !q->runs));
    if (!l)
        return CUDA_ERROR_INVALID_HANDLE;
    for (*device = 0; e->count && *device < device_count; ++*device) {
        uint64_t shared, want = wants(q, e, l, *device, &n[*device], &shared);
        if (want > uses[*device].reserved) {
            *more = want - uses[*device].reserved;
            return CUDA_SUCCESS;
        }
    }
    if (q->runs)
        start(q, e, l, n);
    return CUDA_SUCCESS;
}

static CUresult grow_and_run(struct launch *q)
{
    for (;;) {
        uint64_t more;
        int device;
        lock();
        CUresult r = attempt(q, &device, &more);
        unlock();
        if (r != CUDA_SUCCESS || !more)
            return r;
        r = charge(q->call, &devices[device], (int64_t)more);
        if (r == CUDA_ERROR_OUT_OF_MEMORY && !q->waits) {
            q->waits = true;
            continue;
        }
        if (r != CUDA_SUCCESS)
            return r;
        lock();
        uses[device].reserved += more;
        uses[device].reserved_high = max(uses[device].reserved_high, uses[device].reserved);
        unlock();
    }
}

/* launch has the memory that a run needs, and runs. */
static CUresult launch(const char *call, CUgraphExec handle, CUstream s, struct context *ctx, bool runs)
{
    struct launch q = {call, handle, s, ctx, runs, switches.graphs == GRAPHS_ORDERED};
    pthread_mutex_lock(&growing);
    CUresult r = grow_and_run(&q);
    pthread_mutex_unlock(&growing);
    return r;
}

static CUresult instantiate(const char *call, CUgraphExec *out, CUgraph graph, uint64_t flags, CUstream s)
{
    struct context *ctx = NULL;
    TRY(ready());
    MUST(out && !(flags & ~(uint64_t)15));
    if (flags & CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD)
        TRY(stream_check(s, &ctx));
    lock();
    struct graph *g = object_get(graph, GRAPH);
    struct exec *e = g ? object_new(EXEC) : NULL;
    if (e && !plan(e, g)) {
        exec_end(e);
        e = NULL;
    }
    if (e) {
        e->flags = flags;
        e->id = next_serial();
    }
    unlock();
    MUST(g);
    *out = (CUgraphExec)e;
    if (!e)
        return CUDA_ERROR_OUT_OF_MEMORY;
    return ctx ? launch(call, *out, s, ctx, false) : CUDA_SUCCESS;
}

API CUresult cuGraphInstantiate(CUgraphExec *out, CUgraph graph, CUgraphNode *bad, char *log, size_t room)
{
    (void)bad, (void)log, (void)room;
    return instantiate("cuGraphInstantiate", out, graph, 0, NULL);
}

API CUresult cuGraphInstantiate_v2(CUgraphExec *out, CUgraph graph, CUgraphNode *bad, char *log, size_t room)
{
    (void)bad, (void)log, (void)room;
    return instantiate("cuGraphInstantiate_v2", out, graph, 0, NULL);
}

API CUresult cuGraphInstantiateWithFlags(CUgraphExec *out, CUgraph graph, unsigned long long flags)
{
    return instantiate("cuGraphInstantiateWithFlags", out, graph, flags, NULL);
}

static CUresult with_params(const char *call, CUgraphExec *out, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *params, CUstream s)
{
    MUST(params);
    CUresult r = instantiate(call, out, graph, params->flags, s);
    params->hErrNode_out = NULL;
    params->result_out = r != CUDA_SUCCESS;
    return r;
}

API CUresult cuGraphInstantiateWithParams(CUgraphExec *out, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *params)
{
    return with_params("cuGraphInstantiateWithParams", out, graph, params, params ? params->hUploadStream : NULL);
}

API CUresult cuGraphInstantiateWithParams_ptsz(CUgraphExec *out, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *params)
{
    return with_params("cuGraphInstantiateWithParams_ptsz", out, graph, params, params ? per_thread(params->hUploadStream) : NULL);
}

/* "Calling cudaGraphUpload can separate out the cost of allocation from the launch by
 * performing all mappings for that graph immediately." */
static CUresult put(const char *call, CUgraphExec e, CUstream s, bool runs)
{
    struct context *ctx;
    CUresult r;
    TRY(stream_check(s, &ctx));
    if (capture_work(s, CU_GRAPH_NODE_TYPE_GRAPH, 0, &r))
        return r == CUDA_SUCCESS ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : r;
    return launch(call, e, s, ctx, runs);
}

API CUresult cuGraphUpload(CUgraphExec e, CUstream s) { return put("cuGraphUpload", e, s, false); }
API CUresult cuGraphUpload_ptsz(CUgraphExec e, CUstream s) { return put("cuGraphUpload_ptsz", e, per_thread(s), false); }
API CUresult cuGraphLaunch(CUgraphExec e, CUstream s) { return put("cuGraphLaunch", e, s, true); }
API CUresult cuGraphLaunch_ptsz(CUgraphExec e, CUstream s) { return put("cuGraphLaunch_ptsz", e, per_thread(s), true); }

API CUresult cuGraphExecDestroy(CUgraphExec handle)
{
    TRY(ready());
    lock();
    struct exec *e = object_get(handle, EXEC);
    if (e)
        exec_end(e);
    unlock();
    return e ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* --- giving back ------------------------------------------------------------ */

CUresult graph_memory_free(struct range *r, const struct moment *m)
{
    struct graph_memory *is = r->owner;
    bool live = is->live;
    if (live && m)
        claim(&uses[is->device], m, 0, size_of(is));
    if (live)
        memory_dead(is);
    unlock();
    return live ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* "Allocations that have not been freed and graphs that are scheduled or running are
 * considered to be actively using the physical memory and will not be impacted." */
uint64_t graph_empty(int device)
{
    struct use *u = &uses[device];
    uint64_t keep = round_up(u->live + settle(u), BLOCK), less = u->reserved > keep ? u->reserved - keep : 0;
    u->reserved -= less;
    return less;
}

API CUresult cuDeviceGraphMemTrim(CUdevice device)
{
    struct device *d;
    TRY(find_device(device, &d));
    lock();
    uint64_t less = graph_empty(device);
    unlock();
    return charge("cuDeviceGraphMemTrim", d, -(int64_t)less);
}

/* RESERVED is "the amount of physical memory reserved by the driver for graph allocations in
 * the current process", USED "the amount of physical memory currently mapped by at least one
 * graph". That mappings "are retained between launches as an optimization" does not say for
 * how long; here only what is in use is mapped. */
API CUresult cuDeviceGetGraphMemAttribute(CUdevice device, int attribute, void *value)
{
    struct device *d;
    TRY(find_device(device, &d));
    MUST(value && attribute >= CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT && attribute <= CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH);
    lock();
    struct use *u = &uses[device];
    const uint64_t all[] = {u->live + settle(u), u->used_high, u->reserved, u->reserved_high};
    *(cuuint64_t *)value = all[attribute];
    unlock();
    return CUDA_SUCCESS;
}

API CUresult cuDeviceSetGraphMemAttribute(CUdevice device, int attribute, void *value)
{
    struct device *d;
    TRY(find_device(device, &d));
    MUST(value && !*(cuuint64_t *)value);
    MUST(attribute == CU_GRAPH_MEM_ATTR_USED_MEM_HIGH || attribute == CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH);
    lock();
    struct use *u = &uses[device];
    if (attribute == CU_GRAPH_MEM_ATTR_USED_MEM_HIGH)
        u->used_high = u->live + settle(u);
    else
        u->reserved_high = u->reserved;
    unlock();
    return CUDA_SUCCESS;
}

CUresult graph_fits(CUgraphExec handle, CUstream s, uint64_t left, bool *fits)
{
    struct launch q = {.handle = handle, .stream = s, .runs = true, .waits = true};
    uint64_t more;
    int device;
    TRY(stream_check(s, &q.ctx));
    lock();
    struct exec *e = object_get(handle, EXEC);
    struct lane *l = lane_of(s, q.ctx);
    struct needs n[MAX_DEVICES];
    CUresult r = e && l && needed(e, n) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    device = q.ctx->device;
    more = 0;
    if (r == CUDA_SUCCESS && e->count) {
        uint64_t shared, want = wants(&q, e, l, device, &n[device], &shared);
        more = want > uses[device].reserved ? want - uses[device].reserved : 0;
    }
    unlock();
    *fits = more <= left;
    return r;
}
