/* SPDX-License-Identifier: Apache-2.0 */

/* Streams and events. Everything on them is done at once; a stream that is being
 * captured does nothing and writes down nodes of a graph. */
#include <stdlib.h>

#include "cuda_internal.h"

struct capture {
    uint64_t id;
    struct graph *graph;
    void *thread;
    struct stream *origin;
    int mode;
    bool invalid, adopted; /* adopted: into a graph of the program's own */
    struct capture *next;
};

struct stream {
    struct context *ctx;
    uint64_t serial, id, captured; /* captured: the capture's number */
    unsigned int flags;
    int priority;
    struct node *last;
};

struct event {
    struct context *ctx;
    uint64_t serial, captured;
    struct node *last;
};

static struct capture *captures; /* guarded by the lock */
static atomic_int capturing;
static _Thread_local struct stream own; /* the thread's default stream */
static _Thread_local int mode;          /* how the thread meets captures */

static struct capture *capture_by(uint64_t id)
{
    struct capture *c = captures;
    while (c && c->id != id)
        c = c->next;
    return id ? c : NULL;
}

/* stream_get is a stream by its handle; the legacy default stream is NULL. */
static CUresult stream_get(CUstream handle, struct stream **s)
{
    *s = NULL;
    if (!handle || handle == CU_STREAM_LEGACY)
        return CUDA_SUCCESS;
    if (handle == CU_STREAM_PER_THREAD) {
        *s = &own;
        return CUDA_SUCCESS;
    }
    struct stream *found = object_get(handle, STREAM);
    if (!found)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!lives(found->ctx, found->serial))
        return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    *s = found;
    return CUDA_SUCCESS;
}

CUresult stream_check(CUstream handle, struct context **ctx)
{
    struct stream *s;
    TRY(ready());
    if (!handle || handle == CU_STREAM_LEGACY || handle == CU_STREAM_PER_THREAD)
        return current(ctx);
    lock();
    CUresult r = stream_get(handle, &s);
    if (r == CUDA_SUCCESS)
        *ctx = s->ctx;
    unlock();
    return r;
}

/* --- captures -------------------------------------------------------------- */

static CUresult capture_locked(CUstream handle, struct stream **s, struct capture **c)
{
    *c = NULL;
    TRY(stream_get(handle, s));
    if (*s) {
        *c = capture_by((*s)->captured);
        return *c && (*c)->invalid ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS;
    }
    /* The legacy stream waits for all others: none of them may be in a capture. */
    for (struct capture *any = captures; any; any = any->next)
        if (any->thread == &own) {
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

bool capture_work(CUstream handle, int node_type, CUresult *r)
{
    struct graph *g;
    *r = capture_of(handle, &g);
    if (*r != CUDA_SUCCESS)
        return true;
    if (!g)
        return false;
    lock();
    struct node *n = graph_add(g, node_type);
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
        bool mine = c->thread == &own && c->mode != CU_STREAM_CAPTURE_MODE_RELAXED;
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
        c->thread = &own;
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
    } else if (c->mode != CU_STREAM_CAPTURE_MODE_RELAXED && c->thread != &own) {
        r = CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
    } else {
        struct leaving l = {c->id, s};
        object_each(STREAM, leave, &l);
        own.captured = own.captured == c->id ? 0 : own.captured;
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

/* --- streams --------------------------------------------------------------- */

static CUresult stream_create(CUstream *out, unsigned int flags, int priority)
{
    struct context *c;
    TRY(current(&c));
    MUST(out && flags <= 1);
    lock();
    struct stream *s = object_new(STREAM);
    if (s)
        *s = (struct stream){.ctx = c, .serial = c->serial, .id = next_serial() + 2, .flags = flags, .priority = priority};
    unlock();
    *out = (CUstream)s;
    return s ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

API CUresult cuStreamCreate(CUstream *out, unsigned int flags) { return stream_create(out, flags, 0); }
API CUresult cuStreamCreateWithPriority(CUstream *out, unsigned int flags, int priority) { return stream_create(out, flags, priority); }

static CUresult stream_destroy(CUstream handle)
{
    struct stream *s;
    TRY(ready());
    lock();
    CUresult r = stream_get(handle, &s);
    if (r == CUDA_SUCCESS && (!s || s == &own))
        r = CUDA_ERROR_INVALID_HANDLE;
    if (r == CUDA_SUCCESS) {
        struct capture *c = capture_by(s->captured);
        if (c)
            c->invalid = true;
        object_free(s);
    }
    unlock();
    return r;
}

API CUresult cuStreamDestroy(CUstream s) { return stream_destroy(s); }
API CUresult cuStreamDestroy_v2(CUstream s) { return stream_destroy(s); }

/* What waits for a stream, or asks whether it is done, is not for a captured one. */
static CUresult stream_wait(const char *call, CUstream handle)
{
    struct context *ctx;
    struct graph *g;
    TRY(stream_check(handle, &ctx));
    TRY(capture_of(handle, &g));
    if (g)
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    return call ? pool_synchronize(call, ctx->device) : CUDA_SUCCESS;
}

API CUresult cuStreamSynchronize(CUstream s) { return stream_wait("cuStreamSynchronize", s); }
API CUresult cuStreamSynchronize_ptsz(CUstream s) { return stream_wait("cuStreamSynchronize_ptsz", per_thread(s)); }
API CUresult cuStreamQuery(CUstream s) { return stream_wait(NULL, s); }
API CUresult cuStreamQuery_ptsz(CUstream s) { return stream_wait(NULL, per_thread(s)); }

static CUresult stream_ctx(CUstream handle, CUcontext *out)
{
    struct context *ctx;
    TRY(stream_check(handle, &ctx));
    MUST(out);
    *out = (CUcontext)ctx;
    return CUDA_SUCCESS;
}

API CUresult cuStreamGetCtx(CUstream s, CUcontext *out) { return stream_ctx(s, out); }
API CUresult cuStreamGetCtx_ptsz(CUstream s, CUcontext *out) { return stream_ctx(per_thread(s), out); }

static CUresult stream_value(CUstream handle, void *out, int what)
{
    struct context *ctx;
    struct stream *s;
    TRY(stream_check(handle, &ctx));
    MUST(out);
    lock();
    CUresult r = stream_get(handle, &s);
    if (r == CUDA_SUCCESS) {
        if (what == 0)
            *(unsigned int *)out = s ? s->flags : 0;
        else if (what == 1)
            *(int *)out = s ? s->priority : 0;
        else
            *(unsigned long long *)out = !s ? 1 : s == &own ? 2 : s->id;
    }
    unlock();
    return r;
}

API CUresult cuStreamGetFlags(CUstream s, unsigned int *flags) { return stream_value(s, flags, 0); }
API CUresult cuStreamGetFlags_ptsz(CUstream s, unsigned int *flags) { return stream_value(per_thread(s), flags, 0); }
API CUresult cuStreamGetPriority(CUstream s, int *priority) { return stream_value(s, priority, 1); }
API CUresult cuStreamGetPriority_ptsz(CUstream s, int *priority) { return stream_value(per_thread(s), priority, 1); }
API CUresult cuStreamGetId(CUstream s, unsigned long long *id) { return stream_value(s, id, 2); }
API CUresult cuStreamGetId_ptsz(CUstream s, unsigned long long *id) { return stream_value(per_thread(s), id, 2); }

/* --- events ---------------------------------------------------------------- */

API CUresult cuEventCreate(CUevent *out, unsigned int flags)
{
    struct context *c;
    TRY(current(&c));
    MUST(out && flags <= 7);
    lock();
    struct event *e = object_new(EVENT);
    if (e)
        *e = (struct event){.ctx = c, .serial = c->serial};
    unlock();
    *out = (CUevent)e;
    return e ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult event_get(CUevent handle, struct event **e)
{
    *e = object_get(handle, EVENT);
    if (!*e)
        return CUDA_ERROR_INVALID_HANDLE;
    return lives((*e)->ctx, (*e)->serial) ? CUDA_SUCCESS : CUDA_ERROR_CONTEXT_IS_DESTROYED;
}

static CUresult event_destroy(CUevent handle)
{
    struct event *e;
    TRY(ready());
    lock();
    CUresult r = event_get(handle, &e);
    if (r == CUDA_SUCCESS)
        object_free(e);
    unlock();
    return r;
}

API CUresult cuEventDestroy(CUevent e) { return event_destroy(e); }
API CUresult cuEventDestroy_v2(CUevent e) { return event_destroy(e); }

static CUresult event_record(CUevent handle, CUstream on)
{
    struct context *ctx;
    struct event *e;
    struct stream *s;
    struct capture *c = NULL;
    TRY(stream_check(on, &ctx));
    lock();
    CUresult r = event_get(handle, &e);
    if (r == CUDA_SUCCESS)
        r = capture_locked(on, &s, &c);
    if (r == CUDA_SUCCESS) {
        e->captured = c ? c->id : 0;
        e->last = c ? s->last : NULL;
    }
    unlock();
    return r;
}

API CUresult cuEventRecord(CUevent e, CUstream s) { return event_record(e, s); }
API CUresult cuEventRecord_ptsz(CUevent e, CUstream s) { return event_record(e, per_thread(s)); }
API CUresult cuEventRecordWithFlags(CUevent e, CUstream s, unsigned int flags) { MUST(flags <= 1); return event_record(e, s); }
API CUresult cuEventRecordWithFlags_ptsz(CUevent e, CUstream s, unsigned int flags) { MUST(flags <= 1); return event_record(e, per_thread(s)); }

/* A stream that waits for an event of a capture joins the capture. */
static CUresult wait_event(CUstream on, CUevent handle)
{
    struct context *ctx;
    struct event *e;
    struct stream *s;
    struct capture *c, *from;
    TRY(stream_check(on, &ctx));
    lock();
    CUresult r = event_get(handle, &e);
    if (r == CUDA_SUCCESS)
        r = capture_locked(on, &s, &c);
    from = r == CUDA_SUCCESS ? capture_by(e->captured) : NULL;
    if (from && !s)
        r = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    else if (from && !c) {
        s->captured = from->id;
        s->last = e->last;
    } else if (from && c != from)
        r = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    unlock();
    return r;
}

API CUresult cuStreamWaitEvent(CUstream s, CUevent e, unsigned int flags) { MUST(flags <= 1); return wait_event(s, e); }
API CUresult cuStreamWaitEvent_ptsz(CUstream s, CUevent e, unsigned int flags) { MUST(flags <= 1); return wait_event(per_thread(s), e); }

static CUresult event_done(const char *call, CUevent handle)
{
    struct event *e;
    int device = 0;
    TRY(ready());
    lock();
    CUresult r = event_get(handle, &e);
    if (r == CUDA_SUCCESS) {
        device = e->ctx->device;
        if (capture_by(e->captured))
            r = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    unlock();
    return r == CUDA_SUCCESS && call ? pool_synchronize(call, device) : r;
}

API CUresult cuEventSynchronize(CUevent e) { return event_done("cuEventSynchronize", e); }
API CUresult cuEventQuery(CUevent e) { return event_done(NULL, e); }

API CUresult cuEventElapsedTime(float *ms, CUevent a, CUevent b)
{
    MUST(ms);
    TRY(event_done(NULL, a));
    TRY(event_done(NULL, b));
    *ms = 0;
    return CUDA_SUCCESS;
}
