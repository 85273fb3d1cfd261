/* SPDX-License-Identifier: Apache-2.0 */

/* Streams. What is on them is done at a moment (cuda_order.c), and until then what
 * synchronises sleeps. */
#include <stdlib.h>

#include "cuda_stream.h"
#include "cuda_switch.h"

_Thread_local struct stream own_stream;

CUresult stream_get(CUstream handle, struct stream **s)
{
    *s = NULL;
    if (!handle || handle == CU_STREAM_LEGACY)
        return CUDA_SUCCESS;
    if (handle == CU_STREAM_PER_THREAD) {
        *s = &own_stream;
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

static CUresult stream_create(CUstream *out, unsigned int flags, int priority)
{
    struct context *c;
    TRY(current(&c));
    MUST(out && flags <= 1);
    lock();
    struct stream *s = object_new(STREAM);
    if (s)
        *s = (struct stream){.ctx = c, .serial = c->serial, .id = next_serial() + 2, .flags = flags, .priority = priority, .green = peek()->green_of ? peek() : NULL};
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
    if (r == CUDA_SUCCESS && (!s || s == &own_stream))
        r = CUDA_ERROR_INVALID_HANDLE;
    if (r == CUDA_SUCCESS) {
        struct capture *c = capture_by(s->captured);
        if (c)
            c->invalid = true;
        order_forget(&s->lane.seen); /* what is on it still is done when it is done */
        object_free(s);
    }
    unlock();
    return r;
}

API CUresult cuStreamDestroy(CUstream s) { return stream_destroy(s); }
API CUresult cuStreamDestroy_v2(CUstream s) { return stream_destroy(s); }

void stream_work(CUstream s, struct context *c, uint64_t us)
{
    if (!us && s && s != CU_STREAM_LEGACY)
        return;
    lock();
    struct lane *l = lane_of(s, c);
    if (l)
        lane_work(l, c, us);
    unlock();
}

/* --- waiting --------------------------------------------------------------- */

static bool in_clock(const struct moment *m, void *seen) { return order_covers(seen, m); }

CUresult events_wait(const char *call, int device, struct clock *seen, uint64_t at)
{
    order_sleep(at);
    return pools_observe(call, device, in_clock, seen);
}

/* What waits for a stream, or asks whether it is done, is not for a captured one. */
static CUresult stream_wait(const char *call, CUstream handle, bool sleeps)
{
    struct context *c;
    struct graph *g;
    struct clock seen = {0};
    TRY(stream_check(handle, &c));
    TRY(capture_of(handle, &g));
    if (g)
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    bool observes = sleeps || switches.query == QUERY_OBSERVES;
    lock();
    struct lane *l = lane_of(handle, c);
    uint64_t at = l ? lane_done(l, c) : 0;
    if (l && observes && pools_oldest_tick() != UINT64_MAX)
        lane_snapshot(l, c, &seen);
    unlock();
    CUresult r = l ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
    if (r == CUDA_SUCCESS && !sleeps && !order_passed(at))
        r = CUDA_ERROR_NOT_READY;
    if (r == CUDA_SUCCESS && observes)
        r = events_wait(call, c->device, &seen, at);
    order_forget(&seen);
    return r;
}

API CUresult cuStreamSynchronize(CUstream s) { return stream_wait("cuStreamSynchronize", s, true); }
API CUresult cuStreamSynchronize_ptsz(CUstream s) { return stream_wait("cuStreamSynchronize_ptsz", per_thread(s), true); }
API CUresult cuStreamQuery(CUstream s) { return stream_wait("cuStreamQuery", s, false); }
API CUresult cuStreamQuery_ptsz(CUstream s) { return stream_wait("cuStreamQuery_ptsz", per_thread(s), false); }

struct whole {
    struct context *c;
    uint64_t life, tick;
};

static bool in_context(const struct moment *m, void *arg)
{
    struct whole *w = arg;
    return m->ctx == w->c && m->life == w->life && m->tick <= w->tick;
}

CUresult context_wait(const char *call, struct context *c)
{
    TRY(mps_alive());
    lock();
    struct whole w = {c, c->serial, order_tick()};
    uint64_t at = c->order.life == c->serial ? c->order.done_at : 0;
    unlock();
    order_sleep(at);
    return pools_observe(call, c->device, in_context, &w);
}

void legacy_wait(CUstream s, struct context *c)
{
    lock();
    struct lane *l = lane_of(s, c);
    if (l)
        lane_work(l, c, 0);
    uint64_t at = l ? lane_done(l, c) : 0;
    unlock();
    order_sleep(at);
}

static CUresult stream_ctx(CUstream handle, CUcontext *out)
{
    struct context *ctx;
    TRY(stream_check(handle, &ctx));
    MUST(out);
    lock();
    struct stream *s;
    CUresult r = stream_get(handle, &s);
    if (r == CUDA_SUCCESS)
        *out = (CUcontext)(s && s->green && s->green->converted ? s->green : ctx);
    unlock();
    return r;
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
            *(unsigned long long *)out = !s ? 1 : s == &own_stream ? 2 : s->id;
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
