/* SPDX-License-Identifier: Apache-2.0 */

/* Graphs that allocate. A graph has allocation nodes, from the program or from a stream capture.
 * They take memory when the graph is launched or uploaded, from memory that the driver keeps for
 * all graphs of a device. When a graph is instantiated, we sum up what its nodes ask for. Before a
 * launch we reserve that sum or, near the cap, what the device's graph memory lacks of it. After
 * the launch we settle.
 *
 * The sum is the most that a launch can take. It takes less if a node reuses what another has
 * freed, and the driver does not tell that amount. So if there is no room for the sum, we reserve
 * the least that the launch can take, and upload the graph first. An upload takes the memory and
 * runs nothing. If that is too much, it is given back and the launch is refused (try_upload).
 *
 * A driver that has no room for two graphs at the same time runs one after the other. Here the card
 * has that room, and only the cap is reached. So the launch waits for the graphs that run
 * (await_runs).
 *
 * In a process without graphs that allocate, a launch costs one load. */

#include "pool.h"
#include "property.h"

/* An executable graph has an entry in the table for each device on which it allocates. Its bytes
 * are the sum of what its nodes ask for. Its owner is the least that the graph takes, in bytes. */
static uint64_t exec_key(CUexec e, CUdevice device) { return (uintptr_t)e * MAX_DEVICES + (uint64_t)device; }

struct needs {
    uint64_t bytes[MAX_DEVICES], largest[MAX_DEVICES]; /* of all nodes, and of the largest one */
    bool any, frees;
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
        n->frees |= type == CU_GRAPH_NODE_TYPE_MEM_FREE;
        if (type != CU_GRAPH_NODE_TYPE_MEM_ALLOC || CALL(cuGraphMemAllocNodeGetParams, nodes[i], &a) != CUDA_SUCCESS)
            continue;
        CUdevice device;
        enum means means = property_means(a.pool.type, &a.pool.location, &device);
        if ((means == MEANS_COUNTED || means == MEANS_MANAGED) && device >= 0 && device < MAX_DEVICES && a.bytes < MOST) {
            uint64_t bytes = round_up(a.bytes, UNIT);
            n->bytes[device] += bytes;
            if (bytes > n->largest[device])
                n->largest[device] = bytes;
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

/* settle_graphs settles a device's graph memory and returns how many bytes of it are used. It
 * charges growth by force if no launch under way will pay for it. me is true if the caller is one
 * of the launches under way. */
static uint64_t settle_graphs(struct account *a, struct graph_pool *g, CUdevice d, uint64_t held, bool me)
{
    uint64_t reserved, used;
    if (!figures(d, &reserved, &used)) {
        reserved = g->r.charge + held;
        used = reserved;
    }
    uint64_t rest = settle(a, &g->r, reserved, held);
    if (rest && count_read(&g->gate.flight) <= me * FLIGHT)
        settle_force(a, &g->r, rest);
    return used;
}

/* A run is a launch or an upload, on the devices on which its graph allocates. Mostly it has
 * reserved all that its nodes ask for. A tight run has reserved less, and the device's graph memory
 * has room for the rest. Another run might take that room. So a tight run is the device's only one,
 * and its graph memory is not trimmed meanwhile (the gate). */
struct run {
    CUexec exec;
    CUstream stream;
    CUresult (*upload)(CUexec, CUstream);
    uint64_t devices, tight; /* a bit for each device: of the run, and where it is tight */
    uint64_t held[MAX_DEVICES];
};

/* A launch waits at most this long for another one. After that, the other is taken to be stuck. */
enum { TIGHT_US = 10 * 1000 * 1000 };

/* empty makes the driver give back the graph memory that is not used. No tight run may be under way
 * but the caller's. */
static CUresult empty(struct account *a, struct graph_pool *g, CUdevice device)
{
    spin_lock(&g->lock);
    uncommit_free(a, &g->r, settle_graphs(a, g, device, 0, false)); /* this first takes off what is gone already */
    g->r.trims++;
    spin_unlock(&g->lock);
    CUresult r = CALL(cuDeviceGraphMemTrim, device);
    spin_lock(&g->lock);
    g->r.trims--;
    settle_graphs(a, g, device, 0, false);
    recommit(a, &g->r);
    spin_unlock(&g->lock);
    return r;
}

/* try_upload makes the driver take the memory for a graph, with only the least reserved. False:
 * there is no room for it, and it was given back. *least is then raised to what the graph takes at
 * least. That does not include what other graphs use now, since this graph may share it. try_upload
 * ignores an error of the upload; the launch gets the same error. */
static bool try_upload(struct account *a, struct graph_pool *g, CUdevice d, struct run *r, uint64_t want, uint64_t used, uint64_t *least)
{
    uint64_t reserved, now;
    if (!r->upload || !attempt_begin(a))
        return false;
    reserved_add(a, want); /* reserved exceeds our part of bound, so a reading sees that something is under way */
    r->upload(r->exec, r->stream);
    spin_lock(&g->lock);
    uint64_t had = g->r.charge, rest = figures(d, &reserved, &now) ? settle(a, &g->r, reserved, r->held[d]) : 0;
    r->held[d] = 0;
    bool fits = !rest || account_reserve_quickly(a, rest);
    if (rest && fits)
        settle(a, &g->r, reserved, rest);
    if (rest + g->r.charge > had && reserved > used && reserved - used > *least)
        *least = reserved - used;
    spin_unlock(&g->lock);
    if (!fits) {
        account_undone(a, rest);
        empty(a, g, d);
    }
    reserved_sub(a, want);
    attempt_end(a);
    return fits;
}

/* await_runs waits, for a bounded time, until graphs use less than used bytes of a device's memory.
 * It does not wait if it waited in vain before and no graph was launched since. False: they do not
 * use less. */
enum { RUNS_US = 200 * 1000, LONGEST_NAP_US = 5000 };

static bool await_runs(struct graph_pool *g, CUdevice d, uint64_t used, uint64_t *until)
{
    uint64_t reserved, now, stands = count_read(&g->launched) + 1;
    if (!used || (__atomic_load_n(&g->in_vain, __ATOMIC_RELAXED) == stands && __atomic_load_n(&g->in_vain_used, __ATOMIC_RELAXED) == used))
        return false;
    if (!*until)
        *until = now_us() + RUNS_US;
    for (uint64_t nap = 50; figures(d, &reserved, &now); nap = nap < LONGEST_NAP_US ? 2 * nap : nap) {
        if (now < used)
            return true;
        if (now_us() > *until)
            break;
        nap_us(nap);
    }
    __atomic_store_n(&g->in_vain_used, used, __ATOMIC_RELAXED);
    __atomic_store_n(&g->in_vain, stands, __ATOMIC_RELAXED);
    return false;
}

/* begin_tight begins a tight run. False: there is no room for it now. least is the least that the
 * run takes, in bytes. *used becomes what graphs use now, and *lacks what the run lacked to
 * begin. */
static bool begin_tight(struct process *p, struct account *a, CUdevice d, struct run *r, uint64_t want, uint64_t *least, uint64_t *used, uint64_t *lacks)
{
    struct graph_pool *g = &p->graphs[d];
    if (!gate_close(&g->gate, 0, TIGHT_US))
        return false;
    spin_lock(&g->lock);
    *used = settle_graphs(a, g, d, 0, false);
    uint64_t has = g->r.charge + r->held[d], needs = *used + *least;
    *lacks = needs > has ? round_up(needs - has, BLOCK) : 0;
    bool fits = !*lacks || account_reserve_quickly(a, *lacks);
    r->held[d] += fits ? *lacks : 0;
    count_add(&g->gate.flight, FLIGHT);
    spin_unlock(&g->lock);
    if (fits && try_upload(a, g, d, r, want, *used, least)) {
        r->devices |= (uint64_t)1 << d;
        r->tight |= (uint64_t)1 << d;
        return true;
    }
    gate_leave(&g->gate, 0);
    gate_open(&g->gate);
    return false;
}

/* run_tight begins a tight run. If need be, it waits for room or for other runs. While it waits,
 * another run can be the tight one. False: there is no room for the run. */
static bool run_tight(struct process *p, struct account *a, CUdevice d, struct run *r, uint64_t want, uint64_t least)
{
    uint64_t until = 0, used = 0, lacks = 0;
    bool relieved = false;
    for (int tries = 0; tries < 100; tries++) {
        if (begin_tight(p, a, d, r, want, &least, &used, &lacks))
            return true;
        if (!relieved) {
            relieved = true;
            relieve(a, lacks);
        } else if (await_runs(&p->graphs[d], d, used, &until)) {
            continue;
        } else if (lacks && account_reserve_slowly(a, lacks)) {
            r->held[d] += lacks;
        } else {
            break;
        }
    }
    if (r->held[d])
        account_cancel(a, r->held[d]);
    r->held[d] = 0;
    return false;
}

static void run_end(struct process *p, struct run *r, bool ran)
{
    for (CUdevice d = 0; d < MAX_DEVICES; d++) {
        if (!(r->devices >> d & 1))
            continue;
        struct graph_pool *g = &p->graphs[d];
        spin_lock(&g->lock);
        settle_graphs(&p->accounts[d], g, d, r->held[d], true);
        gate_leave(&g->gate, 0);
        spin_unlock(&g->lock);
        if (r->tight >> d & 1)
            gate_open(&g->gate);
        if (ran)
            count_add(&g->launched, 1);
    }
}

static bool run_begin(struct process *p, struct run *r, const struct needs *n, const uint64_t *least)
{
    for (CUdevice d = 0; d < MAX_DEVICES; d++) {
        bool refuse;
        uint64_t want = n->bytes[d], all = round_up(want, BLOCK);
        if (!want)
            continue;
        struct account *a = account_of(p, d, &refuse);
        if (!a && !refuse)
            continue;
        struct graph_pool *g = &p->graphs[d];
        if (a) {
            account_measure(a, all);
            gate_enter(&g->gate, 0);
            if (account_reserve_quickly(a, all)) {
                r->held[d] = all;
                r->devices |= (uint64_t)1 << d;
                continue;
            }
            gate_leave(&g->gate, 0);
        }
        if (!a || !run_tight(p, a, d, r, want, least[d])) {
            run_end(p, r, false);
            return false;
        }
    }
    return true;
}

/* run makes a launch or an upload. */
static CUresult run(struct process *p, CUexec e, CUstream s, CUresult (*call)(CUexec, CUstream), CUresult (*upload)(CUexec, CUstream))
{
    struct needs n = {.any = false};
    uint64_t least[MAX_DEVICES] = {0};
    uint64_t devices = __atomic_load_n(&p->graph_devices, __ATOMIC_ACQUIRE);
    for (; devices; devices &= devices - 1) {
        CUdevice d = __builtin_ctzll(devices);
        struct entry entry;
        if (table_get(&p->table, exec_key(e, d), SPACE_EXEC, &entry)) {
            n.bytes[d] = entry.bytes;
            n.any = true;
            least[d] = entry.owner;
        }
    }
    if (!n.any || capturing(s, upload == real.cuGraphUpload_ptsz))
        return call(e, s);
    struct run r = {.exec = e, .stream = s, .upload = upload};
    if (!run_begin(p, &r, &n, least))
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = call(e, s);
    run_end(p, &r, result == CUDA_SUCCESS);
    return result;
}

static void write_down(struct process *p, CUexec e, const struct needs *n)
{
    for (CUdevice d = 0; n->any && d < MAX_DEVICES; d++) {
        uint64_t least = n->frees ? n->largest[d] : n->bytes[d];
        struct entry entry = {.key = exec_key(e, d), .bytes = n->bytes[d], .owner = least, .space = SPACE_EXEC, .how = HOW_NOTE, .device = d};
        if (n->bytes[d] && table_put(&p->table, &entry, NULL))
            __atomic_or_fetch(&p->graph_devices, (uint64_t)1 << d, __ATOMIC_ACQ_REL);
    }
}

static CUresult destroy(struct process *p, CUexec e)
{
    struct entry out;
    CUresult r = CALL(cuGraphExecDestroy, e);
    uint64_t devices = p && r == CUDA_SUCCESS ? __atomic_load_n(&p->graph_devices, __ATOMIC_ACQUIRE) : 0;
    for (; devices; devices &= devices - 1)
        table_take(&p->table, exec_key(e, __builtin_ctzll(devices)), SPACE_EXEC, &out);
    return r;
}

EXPORT CUresult cuGraphExecDestroy(CUexec e) { return destroy(ENTER(), e); }

/* instantiated records what a graph may take. It also uploads the graph if the program has asked
 * for that. The request was not passed on to the driver: only after it has instantiated a graph do
 * we know what to reserve for the upload. */
static CUresult instantiated(struct process *p, CUexec *out, CUgraph graph, bool upload, CUstream s, CUresult (*uploader)(CUexec, CUstream))
{
    struct needs n = {.any = false};
    sum_nodes(&n, graph, 0);
    write_down(p, *out, &n);
    CUresult r = !upload ? CUDA_SUCCESS : uploader ? run(p, *out, s, uploader, uploader) : CUDA_ERROR_NOT_FOUND;
    if (r != CUDA_SUCCESS)
        destroy(p, *out);
    return r;
}

#define INSTANTIATE(name, upload, ...)          \
    struct process *p = ENTER();                \
    CUresult r = CALL(name, __VA_ARGS__);       \
    return p && out && r == CUDA_SUCCESS ? instantiated(p, out, graph, upload, NULL, real.cuGraphUpload) : r;

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
    unsigned long long upload = flags & CU_GRAPH_INSTANTIATE_FLAG_UPLOAD;
    INSTANTIATE(cuGraphInstantiateWithFlags, upload, out, graph, p && out ? flags & ~upload : flags)
}

enum { CU_GRAPH_INSTANTIATE_ERROR = 1 };

static CUresult with_params(struct process *p, CUexec *out, CUgraph graph, CUinstantiate *params, CUresult (*call)(CUexec *, CUgraph, CUinstantiate *), CUresult (*uploader)(CUexec, CUstream))
{
    if (!call || !p || !out || !params)
        return call ? call(out, graph, params) : CUDA_ERROR_NOT_FOUND;
    uint64_t upload = params->flags & CU_GRAPH_INSTANTIATE_FLAG_UPLOAD;
    params->flags &= ~upload;
    CUresult r = call(out, graph, params);
    params->flags |= upload;
    if (r != CUDA_SUCCESS)
        return r;
    r = instantiated(p, out, graph, upload, params->upload, uploader);
    if (r != CUDA_SUCCESS)
        params->result = CU_GRAPH_INSTANTIATE_ERROR;
    return r;
}

EXPORT CUresult cuGraphInstantiateWithParams(CUexec *out, CUgraph graph, CUinstantiate *params)
{
    return with_params(ENTER(), out, graph, params, real.cuGraphInstantiateWithParams, real.cuGraphUpload);
}
EXPORT CUresult cuGraphInstantiateWithParams_ptsz(CUexec *out, CUgraph graph, CUinstantiate *params)
{
    return with_params(ENTER(), out, graph, params, real.cuGraphInstantiateWithParams_ptsz, real.cuGraphUpload_ptsz);
}

#define RUN(name, upload, e, s)                                         \
    struct process *p = ENTER();                                        \
    if (!p || !__atomic_load_n(&p->graph_devices, __ATOMIC_RELAXED) || !real.name) \
        return CALL(name, e, s);                                        \
    return run(p, e, s, real.name, real.upload);

EXPORT CUresult cuGraphLaunch(CUexec e, CUstream s) { RUN(cuGraphLaunch, cuGraphUpload, e, s) }
EXPORT CUresult cuGraphLaunch_ptsz(CUexec e, CUstream s) { RUN(cuGraphLaunch_ptsz, cuGraphUpload_ptsz, e, s) }
EXPORT CUresult cuGraphUpload(CUexec e, CUstream s) { RUN(cuGraphUpload, cuGraphUpload, e, s) }
EXPORT CUresult cuGraphUpload_ptsz(CUexec e, CUstream s) { RUN(cuGraphUpload_ptsz, cuGraphUpload_ptsz, e, s) }

/* trim empties a device's graph memory. It waits until any tight run has ended, since such a run
 * needs what is free there. */
static CUresult trim(struct process *p, CUdevice device)
{
    struct account *a = &p->accounts[device];
    struct graph_pool *g = &p->graphs[device];
    if (!g->r.charge)
        return CALL(cuDeviceGraphMemTrim, device);
    bool mine = gate_close(&g->gate, 0, TIGHT_US);
    CUresult r = empty(a, g, device);
    if (mine)
        gate_open(&g->gate);
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
