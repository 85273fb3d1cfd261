/* SPDX-License-Identifier: Apache-2.0 */

/* Graphs and their nodes. Allocation nodes have addresses from the start; the memory
 * comes when they run (cuda_graph_run.c). */
#include <stdlib.h>
#include <string.h>

#include "cuda_graph.h"

struct graph *graph_new(void) { return object_new(GRAPH); }

struct node *graph_add(struct graph *g, int type)
{
    struct node *n = object_new(NODE);
    if (!n)
        return NULL;
    n->type = type;
    n->graph = g;
    if (g->last)
        g->last->next = n;
    else
        g->first = n;
    g->last = n;
    g->count++;
    return n;
}

struct node *graph_add_work(struct graph *g, int type, uint64_t us)
{
    struct node *n = graph_add(g, type);
    if (n)
        n->us = us;
    return n;
}

void graph_end(struct graph *g)
{
    for (struct node *n = g->first, *next; n; n = next) {
        next = n->next;
        if (n->child)
            graph_end(n->child);
        if (n->memory)
            graph_memory_release(n->memory);
        object_free(n);
    }
    object_free(g);
}

/* find takes the lock if it answers CUDA_SUCCESS. */
static CUresult find(CUgraph handle, const CUgraphNode *dependencies, size_t count, struct graph **g)
{
    TRY(ready());
    MUST(!count || dependencies);
    lock();
    *g = object_get(handle, GRAPH);
    bool sound = *g;
    for (size_t i = 0; sound && i < count; i++) {
        struct node *n = object_get(dependencies[i], NODE);
        sound = n && n->graph == *g;
    }
    if (sound)
        return CUDA_SUCCESS;
    unlock();
    return CUDA_ERROR_INVALID_VALUE;
}

static CUresult done(struct node *n, CUgraphNode *out)
{
    unlock();
    if (!n)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *out = (CUgraphNode)n;
    return CUDA_SUCCESS;
}

API CUresult cuGraphCreate(CUgraph *out, unsigned int flags)
{
    TRY(ready());
    MUST(out && !flags);
    lock();
    struct graph *g = graph_new();
    unlock();
    *out = (CUgraph)g;
    return g ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

API CUresult cuGraphDestroy(CUgraph handle)
{
    struct graph *g;
    TRY(find(handle, NULL, 0, &g));
    bool own = !g->is_child;
    if (own)
        graph_end(g);
    unlock();
    return own ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* --- nodes ----------------------------------------------------------------- */

static struct node *add_alloc(struct graph *g, const CUDA_MEM_ALLOC_NODE_PARAMS *params, int device, uint64_t size)
{
    struct graph_memory *m = calloc(1, sizeof *m);
    struct range *r = m ? range_take(RANGE_GRAPH, device, NULL, size) : NULL;
    struct node *n = r ? graph_add(g, CU_GRAPH_NODE_TYPE_MEM_ALLOC) : NULL;
    if (!n) {
        if (r)
            range_give(r);
        free(m);
        return NULL;
    }
    if (params)
        m->params = *params;
    else
        m->params.poolProps = (CUmemPoolProps){.allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device}};
    m->params.bytesize = size;
    m->params.dptr = r->at;
    m->range = r;
    m->device = device;
    m->refs = 1;
    r->owner = m;
    n->memory = m;
    n->at = r->at;
    return n;
}

static struct node *add_free(struct graph *g, CUdeviceptr at)
{
    struct range *r = range_at(at);
    if (!r || r->kind != RANGE_GRAPH)
        return NULL;
    struct node *n = graph_add(g, CU_GRAPH_NODE_TYPE_MEM_FREE);
    if (n) {
        n->memory = r->owner;
        n->memory->refs++;
        n->at = at;
    }
    return n;
}

/* alloc_params finds the device that a node's memory is to be of. Whether a node can
 * have memory that is no device's the documentation does not say; here it cannot. */
static CUresult alloc_params(const CUDA_MEM_ALLOC_NODE_PARAMS *p, int *device)
{
    struct property of;
    MUST(p && p->bytesize && p->bytesize <= INT64_MAX);
    TRY(property_of(p->poolProps.allocType, &p->poolProps.location, FOR_POOL, &of));
    MUST(of.backing == BACKED_BY_CARD);
    *device = of.device;
    return CUDA_SUCCESS;
}

API CUresult cuGraphAddMemAllocNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *deps, size_t count, CUDA_MEM_ALLOC_NODE_PARAMS *params)
{
    struct graph *g;
    int device;
    TRY(ready());
    MUST(out);
    TRY(alloc_params(params, &device));
    TRY(find(graph, deps, count, &g));
    struct node *n = add_alloc(g, params, device, params->bytesize);
    if (n)
        params->dptr = n->at;
    return done(n, out);
}

API CUresult cuGraphAddMemFreeNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *deps, size_t count, CUdeviceptr at)
{
    struct graph *g;
    MUST(out);
    TRY(find(graph, deps, count, &g));
    struct node *n = add_free(g, at);
    if (!n) {
        unlock();
        return CUDA_ERROR_INVALID_VALUE;
    }
    return done(n, out);
}

static CUresult add_work(CUgraphNode *out, CUgraph graph, const CUgraphNode *deps, size_t count, int type, uint64_t us)
{
    struct graph *g;
    MUST(out);
    TRY(find(graph, deps, count, &g));
    return done(graph_add_work(g, type, us), out);
}

static CUresult add_plain(CUgraphNode *out, CUgraph graph, const CUgraphNode *deps, size_t count, int type) { return add_work(out, graph, deps, count, type, 0); }

API CUresult cuGraphAddEmptyNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *deps, size_t count)
{
    return add_plain(out, graph, deps, count, CU_GRAPH_NODE_TYPE_EMPTY);
}

API CUresult cuGraphAddKernelNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *deps, size_t count, const CUDA_KERNEL_NODE_PARAMS *params)
{
    MUST(params);
    return add_work(out, graph, deps, count, CU_GRAPH_NODE_TYPE_KERNEL, kernel_us(params->func));
}

API CUresult cuGraphAddKernelNode_v2(CUgraphNode *out, CUgraph graph, const CUgraphNode *deps, size_t count, const CUDA_KERNEL_NODE_PARAMS *params)
{
    MUST(params);
    return add_work(out, graph, deps, count, CU_GRAPH_NODE_TYPE_KERNEL, kernel_us(params->func));
}

API CUresult cuGraphAddMemsetNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *deps, size_t count, const CUDA_MEMSET_NODE_PARAMS *params, CUcontext ctx)
{
    MUST(params && ctx);
    return add_plain(out, graph, deps, count, CU_GRAPH_NODE_TYPE_MEMSET);
}

static bool allocates(const struct graph *g)
{
    for (struct node *n = g->first; n; n = n->next)
        if (n->memory || (n->child && allocates(n->child)))
            return true;
    return false;
}

static struct graph *clone(const struct graph *g)
{
    struct graph *c = graph_new();
    for (struct node *n = g->first; c && n; n = n->next) {
        struct node *m = graph_add_work(c, n->type, n->us);
        bool whole = m && (!n->child || (m->child = clone(n->child)));
        if (whole && m->child)
            m->child->is_child = true;
        if (!whole) {
            graph_end(c);
            return NULL;
        }
    }
    return c;
}

/* A graph that allocates cannot be copied; it can be moved, by cuGraphAddNode. */
static CUresult add_child(CUgraphNode *out, CUgraph graph, const CUgraphNode *deps, size_t count, CUgraph child, bool move)
{
    struct graph *g;
    MUST(out);
    TRY(find(graph, deps, count, &g));
    struct graph *c = object_get(child, GRAPH);
    CUresult r = CUDA_SUCCESS;
    if (!c || c == g || c->is_child)
        r = CUDA_ERROR_INVALID_VALUE;
    else if (!move && allocates(c))
        r = CUDA_ERROR_NOT_SUPPORTED;
    if (r == CUDA_SUCCESS && !move && !(c = clone(c)))
        r = CUDA_ERROR_OUT_OF_MEMORY;
    if (r != CUDA_SUCCESS) {
        unlock();
        return r;
    }
    struct node *n = graph_add(g, CU_GRAPH_NODE_TYPE_GRAPH);
    if (n) {
        n->child = c;
        c->is_child = true;
    }
    return done(n, out);
}

API CUresult cuGraphAddChildGraphNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *deps, size_t count, CUgraph child)
{
    return add_child(out, graph, deps, count, child, false);
}

static CUresult add_node(CUgraphNode *out, CUgraph graph, const CUgraphNode *deps, size_t count, CUgraphNodeParams *params)
{
    MUST(params);
    switch (params->type) {
    case CU_GRAPH_NODE_TYPE_MEM_ALLOC: return cuGraphAddMemAllocNode(out, graph, deps, count, &params->alloc);
    case CU_GRAPH_NODE_TYPE_MEM_FREE: return cuGraphAddMemFreeNode(out, graph, deps, count, params->free.dptr);
    case CU_GRAPH_NODE_TYPE_GRAPH: return add_child(out, graph, deps, count, params->graph.graph, params->graph.ownership == 1);
    case CU_GRAPH_NODE_TYPE_KERNEL: return cuGraphAddKernelNode_v2(out, graph, deps, count, &params->kernel);
    case CU_GRAPH_NODE_TYPE_MEMCPY:
    case CU_GRAPH_NODE_TYPE_MEMSET:
    case CU_GRAPH_NODE_TYPE_HOST:
    case CU_GRAPH_NODE_TYPE_EMPTY: return add_plain(out, graph, deps, count, params->type);
    default: return CUDA_ERROR_NOT_SUPPORTED;
    }
}

API CUresult cuGraphAddNode(CUgraphNode *out, CUgraph graph, const CUgraphNode *deps, size_t count, CUgraphNodeParams *params)
{
    return add_node(out, graph, deps, count, params);
}

API CUresult cuGraphAddNode_v2(CUgraphNode *out, CUgraph graph, const CUgraphNode *deps, const CUgraphEdgeData *data, size_t count, CUgraphNodeParams *params)
{
    (void)data;
    return add_node(out, graph, deps, count, params);
}

API CUresult cuGraphGetNodes(CUgraph graph, CUgraphNode *nodes, size_t *count)
{
    struct graph *g;
    MUST(count);
    TRY(find(graph, NULL, 0, &g));
    if (nodes) {
        size_t room = *count, i = 0;
        for (struct node *n = g->first; n && i < room; n = n->next)
            nodes[i++] = (CUgraphNode)n;
        *count = i;
        while (i < room)
            nodes[i++] = NULL;
    } else {
        *count = g->count;
    }
    unlock();
    return CUDA_SUCCESS;
}

static struct node *node_of(CUgraphNode handle, int type)
{
    struct node *n = object_get(handle, NODE);
    return n && (type < 0 || n->type == type) ? n : NULL;
}

API CUresult cuGraphNodeGetType(CUgraphNode handle, int *type)
{
    TRY(ready());
    MUST(type);
    lock();
    struct node *n = node_of(handle, -1);
    if (n)
        *type = n->type;
    unlock();
    return n ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuGraphMemAllocNodeGetParams(CUgraphNode handle, CUDA_MEM_ALLOC_NODE_PARAMS *params)
{
    TRY(ready());
    MUST(params);
    lock();
    struct node *n = node_of(handle, CU_GRAPH_NODE_TYPE_MEM_ALLOC);
    if (n)
        *params = n->memory->params;
    unlock();
    return n ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuGraphMemFreeNodeGetParams(CUgraphNode handle, CUdeviceptr *at)
{
    TRY(ready());
    MUST(at);
    lock();
    struct node *n = node_of(handle, CU_GRAPH_NODE_TYPE_MEM_FREE);
    if (n)
        *at = n->at;
    unlock();
    return n ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuGraphChildGraphNodeGetGraph(CUgraphNode handle, CUgraph *out)
{
    TRY(ready());
    MUST(out);
    lock();
    struct node *n = node_of(handle, CU_GRAPH_NODE_TYPE_GRAPH);
    if (n)
        *out = (CUgraph)n->child;
    unlock();
    return n ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult graph_capture_alloc(struct graph *g, CUstream s, int device, uint64_t size, CUdeviceptr *out)
{
    lock();
    struct node *n = add_alloc(g, NULL, device, size);
    if (n) {
        *out = n->at;
        capture_step(s, n);
    }
    unlock();
    return n ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult graph_capture_free(struct graph *g, CUstream s, CUdeviceptr at)
{
    lock();
    struct node *n = add_free(g, at);
    if (n)
        capture_step(s, n);
    unlock();
    return n ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
