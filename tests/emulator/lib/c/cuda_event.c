/* SPDX-License-Identifier: Apache-2.0 */

/* Events. */
#include "cuda_stream.h"
#include "cuda_switch.h"

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
    if (r == CUDA_SUCCESS) {
        order_forget(&e->seen);
        object_free(e);
    }
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
    struct lane *l = r == CUDA_SUCCESS && !c ? lane_of(on, ctx) : NULL;
    if (r == CUDA_SUCCESS) {
        e->captured = c ? c->id : 0;
        e->last = c ? s->last : NULL;
    }
    if (l) {
        lane_snapshot(l, ctx, &e->seen);
        uint64_t now = order_now();
        e->at = lane_done(l, ctx);
        e->stamp = e->at > now ? e->at : now;
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
    struct lane *l;
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
    else if (r == CUDA_SUCCESS && !from && !c && (l = lane_of(on, ctx)))
        lane_wait(l, ctx, &e->seen, e->at);
    unlock();
    return r;
}

API CUresult cuStreamWaitEvent(CUstream s, CUevent e, unsigned int flags) { MUST(flags <= 1); return wait_event(s, e); }
API CUresult cuStreamWaitEvent_ptsz(CUstream s, CUevent e, unsigned int flags) { MUST(flags <= 1); return wait_event(per_thread(s), e); }

static CUresult event_done(const char *call, CUevent handle, bool sleeps)
{
    struct event *e;
    struct clock seen = {0};
    bool observes = sleeps || switches.query == QUERY_OBSERVES;
    int device = 0;
    uint64_t at = 0;
    TRY(ready());
    lock();
    CUresult r = event_get(handle, &e);
    if (r == CUDA_SUCCESS) {
        device = e->ctx->device;
        at = e->at;
        if (observes)
            order_merge(&seen, &e->seen);
        if (capture_by(e->captured))
            r = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    unlock();
    if (r == CUDA_SUCCESS && !sleeps && !order_passed(at))
        r = CUDA_ERROR_NOT_READY;
    if (r == CUDA_SUCCESS && observes)
        r = events_wait(call, device, &seen, at);
    order_forget(&seen);
    return r;
}

API CUresult cuEventSynchronize(CUevent e) { return event_done("cuEventSynchronize", e, true); }
API CUresult cuEventQuery(CUevent e) { return event_done("cuEventQuery", e, false); }

API CUresult cuEventElapsedTime(float *ms, CUevent a, CUevent b)
{
    struct event *from, *to;
    MUST(ms);
    TRY(cuEventQuery(a));
    TRY(cuEventQuery(b));
    lock();
    CUresult r = event_get(a, &from);
    if (r == CUDA_SUCCESS)
        r = event_get(b, &to);
    if (r == CUDA_SUCCESS)
        *ms = (float)((double)(int64_t)(to->stamp - from->stamp) / 1e6);
    unlock();
    return r;
}
