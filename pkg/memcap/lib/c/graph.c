/* SPDX-License-Identifier: Apache-2.0 */

/* Graphs that allocate. A graph's allocation nodes, by hand or by a stream's
 * capture, take memory when it is launched or uploaded, out of a reservation
 * that the driver keeps for the graphs of a device. What the nodes ask for is
 * summed when a graph is instantiated; before a launch we reserve what the
 * device's graph memory lacks for that, and settle afterwards.
 *
 * A launch of a process in which no graph allocates costs one load. */

#include "pool.h"

/* An executable graph that allocates has an entry for each device it does so
 * on: bytes is what its nodes ask for together, owner is 1 plus what a launch
 * was seen to take, which is less where one node uses what another has freed. */
static uint64_t exec_key(CUexec e, CUdevice device) { return (uintptr_t)e * MAX_DEVICES + (uint64_t)device; }

struct needs {
    uint64_t bytes[MAX_DEVICES];
    bool any;
};

static void sum_nodes(struct needs *n, CUgraph graph, int depth)
{
    size_t count = 0;
    if (depth > 32 || CALL(cuGraphGetNodes, graph, NULL, &count) != CUDA_SUCCESS || !count)
        return;
    size_t size = count * sizeof(CUnode);
    CUnode *nodes = sys_map(size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
    if (!nodes)
        return;
    if (CALL(cuGraphGetNodes, graph, nodes, &count) != CUDA_SUCCESS || count * sizeof(CUnode) > size)
        count = 0;
    for (size_t i = 0; i < count; i++) {
        int type;
        CUgraph child;
        CUallocnode a;
        if (CALL(cuGraphNodeGetType, nodes[i], &type) != CUDA_SUCCESS)
            continue;
        if (type == CU_GRAPH_NODE_TYPE_GRAPH && CALL(cuGraphChildGraphNodeGetGraph, nodes[i], &child) == CUDA_SUCCESS)
            sum_nodes(n, child, depth + 1);
        if (type != CU_GRAPH_NODE_TYPE_MEM_ALLOC || CALL(cuGraphMemAllocNodeGetParams, nodes[i], &a) != CUDA_SUCCESS)
            continue;
        if (a.pool.location.type == CU_MEM_LOCATION_TYPE_DEVICE && a.pool.location.id >= 0 && a.pool.location.id < MAX_DEVICES && a.bytes < MOST) {
            n->bytes[a.pool.location.id] += round_up(a.bytes, UNIT);
            n->any = true;
        }
    }
    sys_unmap(nodes, size);
}

static bool figures(CUdevice device, uint64_t *reserved, uint64_t *used)
{
    return CALL(cuDeviceGetGraphMemAttribute, device, CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT, reserved) == CUDA_SUCCESS &&
           CALL(cuDeviceGetGraphMemAttribute, device, CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT, used) == CUDA_SUCCESS;
}

/* settle_graphs returns what of it is used. */
static uint64_t settle_graphs(struct account *a, struct graph_pool *g, CUdevice d, uint64_t held)
{
    uint64_t reserved, used;
    if (!figures(d, &reserved, &used)) {
        reserved = g->r.charge + held;
        used = reserved;
    }
    settle(a, &g->r, reserved, held);
    return used;
}

/* A run holds the devices that it has reserved on, in order, until the end. */
struct run {
    uint64_t devices, counted; /* bits */
    uint64_t held[MAX_DEVICES], used[MAX_DEVICES];
};

static void run_end(struct process *p, struct run *r, CUexec e, bool ran);

static bool run_begin(struct process *p, struct run *r, const struct needs *n, const uint64_t *seen)
{
    *r = (struct run){0};
    for (CUdevice d = 0; d < MAX_DEVICES; d++) {
        bool refuse;
        uint64_t reserved, want = n->bytes[d];
        if (!want)
            continue;
        struct account *a = account_of(p, d, &refuse);
        if (!a && !refuse)
            continue;
        struct graph_pool *g = &p->graphs[d];
        if (a) {
            spin_lock(&g->lock);
            r->devices |= (uint64_t)1 << d;
            if (figures(d, &reserved, &r->used[d])) {
                settle(a, &g->r, reserved, 0);
                uint64_t lacks = r->used[d] + want > reserved ? round_up(r->used[d] + want - reserved, BLOCK) : 0;
                bool enough = seen && seen[d] && r->used[d] + seen[d] - 1 <= reserved;
                if (!lacks || account_reserve_quickly(a, lacks))
                    r->held[d] = lacks;
                else if (!enough && account_reserve_slowly(a, lacks))
                    r->held[d] = lacks;
                else if (!enough)
                    refuse = true;
            }
        }
        if (refuse) {
            run_end(p, r, NULL, false);
            return false;
        }
    }
    return true;
}

static void learn(struct entry *e, void *arg)
{
    if (e->how)
        e->owner = *(const uint64_t *)arg;
}

static void run_end(struct process *p, struct run *r, CUexec e, bool ran)
{
    for (CUdevice d = 0; d < MAX_DEVICES; d++) {
        if (!(r->devices >> d & 1))
            continue;
        struct graph_pool *g = &p->graphs[d];
        settle_graphs(&p->accounts[d], g, d, r->held[d]);
        if (ran) {
            uint64_t took = 1 + (g->r.charge > r->used[d] ? g->r.charge - r->used[d] : 0);
            table_edit(&p->table, exec_key(e, d), SPACE_EXEC, learn, &took);
        }
        spin_unlock(&g->lock);
    }
}

static void write_down(struct process *p, CUexec e, const struct needs *n)
{
    for (CUdevice d = 0; n->any && d < MAX_DEVICES; d++) {
        struct entry entry = {.key = exec_key(e, d), .bytes = n->bytes[d], .space = SPACE_EXEC, .how = HOW_NOTE, .device = d}, old;
        if (n->bytes[d] && table_put(&p->table, &entry, &old))
            __atomic_or_fetch(&p->graph_devices, (uint64_t)1 << d, __ATOMIC_ACQ_REL);
    }
}

#define INSTANTIATE(name, uploads, ...)                  \
    struct process *p = ENTER();                         \
    struct needs n = {.any = false};                     \
    struct run run;                                      \
    if (!p || !out)                                      \
        return CALL(name, __VA_ARGS__);                  \
    sum_nodes(&n, graph, 0);                             \
    bool up = n.any && (uploads);                        \
    if (up && !run_begin(p, &run, &n, NULL))             \
        return CUDA_ERROR_OUT_OF_MEMORY;                 \
    CUresult r = CALL(name, __VA_ARGS__);                \
    if (r == CUDA_SUCCESS)                               \
        write_down(p, *out, &n);                         \
    if (up)                                              \
        run_end(p, &run, *out, false);                   \
    return r;

EXPORT CUresult cuGraphInstantiate(CUexec *out, CUgraph graph, CUnode *bad, char *log, size_t room)
{
    INSTANTIATE(cuGraphInstantiate, false, out, graph, bad, log, room)
}
EXPORT CUresult cuGraphInstantiate_v2(CUexec *out, CUgraph graph, CUnode *bad, char *log, size_t room)
{
    INSTANTIATE(cuGraphInstantiate_v2, false, out, graph, bad, log, room)
}
EXPORT CUresult cuGraphInstantiateWithFlags(CUexec *out, CUgraph graph, unsigned long long flags)
{
    INSTANTIATE(cuGraphInstantiateWithFlags, flags & CU_GRAPH_INSTANTIATE_FLAG_UPLOAD, out, graph, flags)
}
EXPORT CUresult cuGraphInstantiateWithParams(CUexec *out, CUgraph graph, CUinstantiate *params)
{
    INSTANTIATE(cuGraphInstantiateWithParams, params && (params->flags & CU_GRAPH_INSTANTIATE_FLAG_UPLOAD), out, graph, params)
}
EXPORT CUresult cuGraphInstantiateWithParams_ptsz(CUexec *out, CUgraph graph, CUinstantiate *params)
{
    INSTANTIATE(cuGraphInstantiateWithParams_ptsz, params && (params->flags & CU_GRAPH_INSTANTIATE_FLAG_UPLOAD), out, graph, params)
}

static void copy(struct entry *e, void *arg) { *(struct entry *)arg = *e; }

static CUresult run(struct process *p, CUexec e, CUstream s, CUresult (*call)(CUexec, CUstream))
{
    struct needs n = {.any = false};
    uint64_t seen[MAX_DEVICES] = {0};
    uint64_t devices = __atomic_load_n(&p->graph_devices, __ATOMIC_ACQUIRE);
    for (; devices; devices &= devices - 1) {
        CUdevice d = __builtin_ctzll(devices);
        struct entry entry = {.how = 0};
        if (table_edit(&p->table, exec_key(e, d), SPACE_EXEC, copy, &entry) && entry.how) {
            n.bytes[d] = entry.bytes;
            n.any = true;
            seen[d] = entry.owner;
        }
    }
    if (!n.any)
        return call(e, s);
    struct run r;
    if (!run_begin(p, &r, &n, seen))
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = call(e, s);
    run_end(p, &r, e, result == CUDA_SUCCESS);
    return result;
}

#define RUN(name, e, s)                                                 \
    struct process *p = ENTER();                                        \
    if (!p || !__atomic_load_n(&p->graph_devices, __ATOMIC_RELAXED) || !real.name) \
        return CALL(name, e, s);                                        \
    return run(p, e, s, real.name);

EXPORT CUresult cuGraphLaunch(CUexec e, CUstream s) { RUN(cuGraphLaunch, e, s) }
EXPORT CUresult cuGraphLaunch_ptsz(CUexec e, CUstream s) { RUN(cuGraphLaunch_ptsz, e, s) }
EXPORT CUresult cuGraphUpload(CUexec e, CUstream s) { RUN(cuGraphUpload, e, s) }
EXPORT CUresult cuGraphUpload_ptsz(CUexec e, CUstream s) { RUN(cuGraphUpload_ptsz, e, s) }

EXPORT CUresult cuGraphExecDestroy(CUexec e)
{
    struct process *p = ENTER();
    struct entry out;
    CUresult r = CALL(cuGraphExecDestroy, e);
    uint64_t devices = p && r == CUDA_SUCCESS ? __atomic_load_n(&p->graph_devices, __ATOMIC_ACQUIRE) : 0;
    for (; devices; devices &= devices - 1)
        table_take(&p->table, exec_key(e, __builtin_ctzll(devices)), SPACE_EXEC, &out);
    return r;
}

static CUresult trim_locked(struct process *p, CUdevice device)
{
    struct account *a = &p->accounts[device];
    struct graph_pool *g = &p->graphs[device];
    if (!g->r.charge)
        return CALL(cuDeviceGraphMemTrim, device);
    loosen(a, &g->r, settle_graphs(a, g, device, 0));
    CUresult r = CALL(cuDeviceGraphMemTrim, device);
    settle_graphs(a, g, device, 0);
    tighten(a, &g->r);
    return r;
}

EXPORT CUresult cuDeviceGraphMemTrim(CUdevice device)
{
    struct process *p = ENTER();
    if (!p || device < 0 || device >= MAX_DEVICES)
        return CALL(cuDeviceGraphMemTrim, device);
    spin_lock(&p->graphs[device].lock);
    CUresult r = trim_locked(p, device);
    spin_unlock(&p->graphs[device].lock);
    return r;
}

static bool try_lock(uint32_t *lock) { return !__atomic_exchange_n(lock, 1, __ATOMIC_ACQUIRE); }

void graphs_settle(struct process *p, CUdevice device)
{
    if (!p->graphs[device].r.charge || !try_lock(&p->graphs[device].lock))
        return;
    settle_graphs(&p->accounts[device], &p->graphs[device], device, 0);
    spin_unlock(&p->graphs[device].lock);
}

void relieve_graphs(struct process *p, CUdevice device)
{
    if (!p->graphs[device].r.charge || !try_lock(&p->graphs[device].lock))
        return;
    trim_locked(p, device);
    spin_unlock(&p->graphs[device].lock);
}
