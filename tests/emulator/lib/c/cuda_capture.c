/* SPDX-License-Identifier: Apache-2.0 */

/* Captures: a stream that is being captured does nothing and writes down nodes of a
 * graph. */
#include <stdlib.h>

#include "cuda_stream.h"

static struct capture *captures; /* guarded by the lock */
static atomic_int capturing;
static _Thread_local int mode; /* how the thread meets captures */

struct capture *capture_by(uint64_t id)
{
    struct capture *c = captures;
    while (c && c->id != id)
        c = c->next;
    return id ? c : NULL;
}

CUresult capture_locked(CUstream handle, struct stream **s, struct capture **c)
{
    *c = NULL;
    TRY(stream_get(handle, s));
    if (*s) {
        *c = capture_by((*s)->captured);
        return *c && (*c)->invalid ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS;
    }
    /* The legacy stream waits for all others: none of them may be in a capture. */
    for (struct capture *any = captures; any; any = any->next)
        if (any->thread == &own_stream) {
            any->invalid = true;
            return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
        }
    return CUDA_SUCCESS;
}

CUresult capture_of(CUstream handle, struct graph **into)
{
    struct stream *s;
    struct capture *c;
    *into = NULL;
    if (!atomic_load_explicit(&capturing, memory_order_relaxed))
        return CUDA_SUCCESS;
    lock();
    CUresult r = capture_locked(handle, &s, &c);
    if (r == CUDA_SUCCESS && c)
        *into = c->graph;
    unlock();
    return r;
}

void capture_step(CUstream handle, struct node *n)
{
    struct stream *s;
    if (stream_get(handle, &s) == CUDA_SUCCESS && s)
        s->last = n;
}

bool capture_work(CUstream handle, int node_type, uint64_t us, CUresult *r)
{
    struct graph *g;
    *r = capture_of(handle, &g);
    if (*r != CUDA_SUCCESS)
        return true;
    if (!g)
        return false;
    lock();
    struct node *n = graph_add_work(g, node_type, us);
    if (n)
        capture_step(handle, n);
    else
        *r = CUDA_ERROR_OUT_OF_MEMORY;
    unlock();
    return true;
}

CUresult unsafe_in_capture(void)
{
    if (!atomic_load_explicit(&capturing, memory_order_relaxed) || mode == CU_STREAM_CAPTURE_MODE_RELAXED)
        return CUDA_SUCCESS;
    CUresult r = CUDA_SUCCESS;
    lock();
    for (struct capture *c = captures; c; c = c->next) {
        bool mine = c->thread == &own_stream && c->mode != CU_STREAM_CAPTURE_MODE_RELAXED;
        if (mine || (mode == CU_STREAM_CAPTURE_MODE_GLOBAL && c->mode == CU_STREAM_CAPTURE_MODE_GLOBAL)) {
            c->invalid = true;
            r = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        }
    }
    unlock();
    return r;
}

API CUresult cuThreadExchangeStreamCaptureMode(int *new)
{
    TRY(ready());
    MUST(new && *new >= CU_STREAM_CAPTURE_MODE_GLOBAL && *new <= CU_STREAM_CAPTURE_MODE_RELAXED);
    int old = mode;
    mode = *new;
    *new = old;
    return CUDA_SUCCESS;
}

static CUresult begin_capture(CUstream handle, int how, struct graph *into)
{
    static uint64_t last_id;
    struct context *ctx;
    struct stream *s;
    TRY(stream_check(handle, &ctx));
    MUST(how >= CU_STREAM_CAPTURE_MODE_GLOBAL && how <= CU_STREAM_CAPTURE_MODE_RELAXED);
    struct capture *c = calloc(1, sizeof *c);
    if (!c)
        return CUDA_ERROR_OUT_OF_MEMORY;
    lock();
    CUresult r = stream_get(handle, &s);
    if (r == CUDA_SUCCESS && !s)
        r = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED; /* the legacy stream cannot be */
    else if (r == CUDA_SUCCESS && capture_by(s->captured))
        r = CUDA_ERROR_ILLEGAL_STATE;
    else if (r == CUDA_SUCCESS && !(c->graph = into ? into : graph_new()))
        r = CUDA_ERROR_OUT_OF_MEMORY;
    if (r == CUDA_SUCCESS) {
        c->adopted = into;
        c->id = ++last_id;
        c->thread = &own_stream;
        c->origin = s;
        c->mode = how;
        c->next = captures;
        captures = c;
        s->captured = c->id;
        s->last = NULL;
        atomic_fetch_add(&capturing, 1);
    } else {
        free(c);
    }
    unlock();
    return r;
}

API CUresult cuStreamBeginCapture(CUstream s) { return begin_capture(s, CU_STREAM_CAPTURE_MODE_GLOBAL, NULL); }
API CUresult cuStreamBeginCapture_ptsz(CUstream s) { return begin_capture(per_thread(s), CU_STREAM_CAPTURE_MODE_GLOBAL, NULL); }
API CUresult cuStreamBeginCapture_v2(CUstream s, int how) { return begin_capture(s, how, NULL); }
API CUresult cuStreamBeginCapture_v2_ptsz(CUstream s, int how) { return begin_capture(per_thread(s), how, NULL); }

static CUresult begin_into(CUstream s, CUgraph graph, int how)
{
    TRY(ready());
    lock();
    struct graph *g = object_get(graph, GRAPH);
    unlock();
    MUST(g);
    return begin_capture(s, how, g);
}

API CUresult cuStreamBeginCaptureToGraph(CUstream s, CUgraph g, const CUgraphNode *dependencies, const CUgraphEdgeData *data, size_t n, int how)
{
    MUST(!n || dependencies);
    (void)data;
    return begin_into(s, g, how);
}

API CUresult cuStreamBeginCaptureToGraph_ptsz(CUstream s, CUgraph g, const CUgraphNode *dependencies, const CUgraphEdgeData *data, size_t n, int how)
{
    MUST(!n || dependencies);
    (void)data;
    return begin_into(per_thread(s), g, how);
}

struct leaving {
    uint64_t id;
    struct stream *origin;
};

static bool leave(void *object, void *arg)
{
    struct stream *s = object;
    struct leaving *l = arg;
    if (s->captured == l->id)
        s->captured = 0;
    return true;
}

static CUresult end_capture(CUstream handle, CUgraph *out)
{
    struct context *ctx;
    struct stream *s;
    TRY(stream_check(handle, &ctx));
    MUST(out);
    *out = NULL;
    lock();
    CUresult r = stream_get(handle, &s);
    struct capture *c = r == CUDA_SUCCESS && s ? capture_by(s->captured) : NULL;
    if (!c || c->origin != s) {
        r = r != CUDA_SUCCESS ? r : c ? CUDA_ERROR_STREAM_CAPTURE_UNMATCHED : CUDA_ERROR_ILLEGAL_STATE;
    } else if (c->mode != CU_STREAM_CAPTURE_MODE_RELAXED && c->thread != &own_stream) {
        r = CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
    } else {
        struct leaving l = {c->id, s};
        object_each(STREAM, leave, &l);
        own_stream.captured = own_stream.captured == c->id ? 0 : own_stream.captured;
        struct capture **at = &captures;
        while (*at != c)
            at = &(*at)->next;
        *at = c->next;
        atomic_fetch_sub(&capturing, 1);
        if (c->invalid) {
            r = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
            if (!c->adopted)
                graph_end(c->graph);
        } else {
            *out = (CUgraph)c->graph;
        }
        free(c);
    }
    unlock();
    return r;
}

API CUresult cuStreamEndCapture(CUstream s, CUgraph *out) { return end_capture(s, out); }
API CUresult cuStreamEndCapture_ptsz(CUstream s, CUgraph *out) { return end_capture(per_thread(s), out); }

static CUresult capture_info(CUstream handle, int *status, cuuint64_t *id, CUgraph *graph, const CUgraphNode **dependencies, size_t *count)
{
    static _Thread_local CUgraphNode dependency;
    struct context *ctx;
    struct stream *s;
    TRY(stream_check(handle, &ctx));
    MUST(status);
    lock();
    CUresult r = stream_get(handle, &s);
    struct capture *c = r == CUDA_SUCCESS && s ? capture_by(s->captured) : NULL;
    *status = !c ? CU_STREAM_CAPTURE_STATUS_NONE : c->invalid ? CU_STREAM_CAPTURE_STATUS_INVALIDATED : CU_STREAM_CAPTURE_STATUS_ACTIVE;
    if (*status == CU_STREAM_CAPTURE_STATUS_ACTIVE) {
        if (id)
            *id = c->id;
        if (graph)
            *graph = (CUgraph)c->graph;
        dependency = (CUgraphNode)s->last;
        if (dependencies)
            *dependencies = &dependency;
        if (count)
            *count = s->last != NULL;
    }
    unlock();
    return r;
}

API CUresult cuStreamIsCapturing(CUstream s, int *status) { return capture_info(s, status, NULL, NULL, NULL, NULL); }
API CUresult cuStreamIsCapturing_ptsz(CUstream s, int *status) { return capture_info(per_thread(s), status, NULL, NULL, NULL, NULL); }
API CUresult cuStreamGetCaptureInfo(CUstream s, int *status, cuuint64_t *id) { return capture_info(s, status, id, NULL, NULL, NULL); }
API CUresult cuStreamGetCaptureInfo_ptsz(CUstream s, int *status, cuuint64_t *id) { return capture_info(per_thread(s), status, id, NULL, NULL, NULL); }

API CUresult cuStreamGetCaptureInfo_v2(CUstream s, int *status, cuuint64_t *id, CUgraph *g, const CUgraphNode **deps, size_t *n)
{
    return capture_info(s, status, id, g, deps, n);
}

API CUresult cuStreamGetCaptureInfo_v2_ptsz(CUstream s, int *status, cuuint64_t *id, CUgraph *g, const CUgraphNode **deps, size_t *n)
{
    return capture_info(per_thread(s), status, id, g, deps, n);
}

API CUresult cuStreamGetCaptureInfo_v3(CUstream s, int *status, cuuint64_t *id, CUgraph *g, const CUgraphNode **deps, const CUgraphEdgeData **edges, size_t *n)
{
    if (edges)
        *edges = NULL;
    return capture_info(s, status, id, g, deps, n);
}

API CUresult cuStreamGetCaptureInfo_v3_ptsz(CUstream s, int *status, cuuint64_t *id, CUgraph *g, const CUgraphNode **deps, const CUgraphEdgeData **edges, size_t *n)
{
    if (edges)
        *edges = NULL;
    return capture_info(per_thread(s), status, id, g, deps, n);
}
