/* SPDX-License-Identifier: Apache-2.0 */

/* Graphs that allocate. A graph's allocation nodes, by hand or by a stream's
 * capture, take memory when it is launched or uploaded, out of a reservation
 * that the driver keeps for the graphs of a device. What the nodes ask for is
 * summed when a graph is instantiated; before a launch we reserve that, or near
 * the cap what the device's graph memory lacks for it, and settle afterwards.
 *
 * A launch of a process in which no graph allocates costs one load. */

#include "pool.h"
#include "property.h"

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
        CUdevice device;
        enum means means = property_means(a.pool.type, &a.pool.location, &device);
        if ((means == MEANS_COUNTED || means == MEANS_MANAGED) && device >= 0 && device < MAX_DEVICES && a.bytes < MOST) {
            n->bytes[device] += round_up(a.bytes, UNIT);
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

/* settle_graphs returns what of it is used. What nobody who is under way will pay for
 * is there all the same; me is whether the caller is one of those. */
static uint64_t settle_graphs(struct account *a, struct graph_pool *g, CUdevice d, uint64_t held, bool me)
{
    uint64_t reserved, used;
    if (!figures(d, &reserved, &used)) {
        reserved = g->r.charge + held;
        used = reserved;
    }
    uint64_t rest = settle(a, &g->r, reserved, held);
    if (rest && g->flying <= me)
        settle_force(a, &g->r, rest);
    return used;
}

/* A run is a launch, on the devices where its graph allocates. Mostly it has reserved
 * all that its nodes ask for. A tight one has reserved less, since the graphs' memory
 * has room for the rest; then whoever ends beside it may have taken that room, and
 * leaves it what it had reserved itself. There is one tight run for a device at a
 * time. */
struct run {
    uint64_t devices, tight, looked; /* bits; looked: used is what was used before */
    uint64_t held[MAX_DEVICES], used[MAX_DEVICES];
};

static void run_end(struct process *p, struct run *r, CUexec e, bool ran);

/* No launch waits that long for another; if one does, that has not come back. */
enum { TIGHT_US = 10 * 1000 * 1000 };

static bool take_tight(struct graph_pool *g)
{
    uint64_t until = now_us() + TIGHT_US;
    while (__atomic_exchange_n(&g->tight, 1, __ATOMIC_SEQ_CST)) {
        if (now_us() > until)
            return false;
        nap_us(20);
    }
    return true;
}

static void leave_tight(struct account *a, struct graph_pool *g)
{
    spin_lock(&g->lock);
    if (g->credit)
        account_cancel(a, g->credit);
    g->credit = 0;
    __atomic_store_n(&g->tight, 0, __ATOMIC_SEQ_CST);
    spin_unlock(&g->lock);
}

/* run_tight begins a tight run. It reserves what the graphs' memory lacks, without the
 * right of being the one tight run where that may take time. seen is 1 plus what a
 * launch of it was seen to take, or 0. */
static bool run_tight(struct account *a, struct graph_pool *g, CUdevice d, struct run *r, uint64_t want, uint64_t seen)
{
    for (int tries = 0; tries < 4; tries++) {
        uint64_t reserved = 0;
        if (!take_tight(g))
            break;
        spin_lock(&g->lock);
        r->used[d] = settle_graphs(a, g, d, 0, false);
        reserved = g->r.charge;
        uint64_t needs = r->used[d] + want > reserved ? round_up(r->used[d] + want - reserved, BLOCK) : 0;
        uint64_t lacks = needs > r->held[d] ? needs - r->held[d] : 0;
        bool fits = !lacks || account_reserve_quickly(a, lacks);
        if (fits)
            r->held[d] += lacks;
        else
            fits = seen && r->used[d] + seen - 1 <= reserved + r->held[d];
        if (fits)
            g->flying++;
        spin_unlock(&g->lock);
        if (fits) {
            r->devices |= (uint64_t)1 << d;
            r->tight |= (uint64_t)1 << d;
            r->looked |= (uint64_t)1 << d;
            return true;
        }
        leave_tight(a, g);
        if (!account_reserve_slowly(a, lacks))
            break;
        r->held[d] += lacks;
    }
    if (r->held[d])
        account_cancel(a, r->held[d]);
    r->held[d] = 0;
    return false;
}

static bool run_begin(struct process *p, struct run *r, const struct needs *n, const uint64_t *seen)
{
    *r = (struct run){0};
    for (CUdevice d = 0; d < MAX_DEVICES; d++) {
        bool refuse;
        uint64_t want = n->bytes[d], all = round_up(want, BLOCK);
        if (!want)
            continue;
        struct account *a = account_of(p, d, &refuse);
        if (!a && !refuse)
            continue;
        struct graph_pool *g = &p->graphs[d];
        if (a && account_reserve_quickly(a, all)) {
            spin_lock(&g->lock);
            g->flying++;
            r->held[d] = all;
            r->devices |= (uint64_t)1 << d;
            if (seen && !seen[d]) {
                r->used[d] = settle_graphs(a, g, d, 0, true);
                r->looked |= (uint64_t)1 << d;
            }
            spin_unlock(&g->lock);
        } else if (!a || !run_tight(a, g, d, r, want, seen ? seen[d] : 0)) {
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
        struct account *a = &p->accounts[d];
        bool tight = r->tight >> d & 1;
        uint64_t held = r->held[d];
        spin_lock(&g->lock);
        if (tight) {
            held += g->credit;
            g->credit = 0;
        } else if (__atomic_load_n(&g->tight, __ATOMIC_SEQ_CST)) {
            uint64_t had = g->r.charge, reserved, used;
            if (figures(d, &reserved, &used) && reserved <= had + held) {
                uint64_t pays = reserved > had ? round_up(reserved - had, UNIT) : 0;
                g->credit += held - pays;
                held = pays;
            }
        }
        settle_graphs(a, g, d, held, true);
        if (ran && r->looked >> d & 1) {
            uint64_t took = 1 + (g->r.charge > r->used[d] ? g->r.charge - r->used[d] : 0);
            table_edit(&p->table, exec_key(e, d), SPACE_EXEC, learn, &took);
        }
        g->flying--;
        if (tight)
            __atomic_store_n(&g->tight, 0, __ATOMIC_SEQ_CST);
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

static CUresult trim(struct process *p, CUdevice device)
{
    struct account *a = &p->accounts[device];
    struct graph_pool *g = &p->graphs[device];
    uint64_t reserved, used;
    if (!g->r.charge)
        return CALL(cuDeviceGraphMemTrim, device);
    spin_lock(&g->lock);
    loosen(a, &g->r, figures(device, &reserved, &used) ? used : 0);
    g->r.trims++;
    spin_unlock(&g->lock);
    CUresult r = CALL(cuDeviceGraphMemTrim, device);
    spin_lock(&g->lock);
    g->r.trims--;
    settle_graphs(a, g, device, 0, false);
    tighten(a, &g->r);
    spin_unlock(&g->lock);
    return r;
}

EXPORT CUresult cuDeviceGraphMemTrim(CUdevice device)
{
    struct process *p = ENTER();
    return p && device >= 0 && device < MAX_DEVICES ? trim(p, device) : CALL(cuDeviceGraphMemTrim, device);
}

void graphs_settle(struct process *p, CUdevice device)
{
    struct graph_pool *g = &p->graphs[device];
    if (!g->r.charge)
        return;
    spin_lock(&g->lock);
    settle_graphs(&p->accounts[device], g, device, 0, false);
    spin_unlock(&g->lock);
}

void relieve_graphs(struct process *p, CUdevice device)
{
    if (p->graphs[device].r.charge)
        trim(p, device);
}
