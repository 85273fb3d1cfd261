/* SPDX-License-Identifier: Apache-2.0 */

/* Contexts, which the thread's stack makes current. */
#include <stdlib.h>

#include "cuda_internal.h"

_Static_assert(sizeof(struct context) <= OBJECT_ROOM, "a context is an object");

enum { DEPTH = 64, API_VERSION = 3020, FLAGS = 0xFF };

static _Thread_local struct {
    struct context *at[DEPTH];
    int depth;
} stack;

/* One first use of a primary context at a time. */
static pthread_mutex_t primary_lock = PTHREAD_MUTEX_INITIALIZER;

struct context *peek(void) { return stack.depth ? stack.at[stack.depth - 1] : NULL; }

CUresult current(struct context **ctx)
{
    TRY(ready());
    *ctx = peek();
    if (!*ctx)
        return CUDA_ERROR_INVALID_CONTEXT;
    if ((*ctx)->green_of && (*ctx)->alive)
        *ctx = (*ctx)->green_of;
    return (*ctx)->alive ? CUDA_SUCCESS : CUDA_ERROR_CONTEXT_IS_DESTROYED;
}

struct context *context_get(CUcontext handle)
{
    for (int i = 0; i < device_count; i++)
        if ((struct context *)handle == &devices[i].primary)
            return &devices[i].primary;
    lock();
    struct context *c = object_get(handle, CONTEXT);
    unlock();
    return c && (!c->green_of || c->converted) ? c : NULL;
}

static CUresult push(struct context *c)
{
    if (stack.depth == DEPTH)
        return CUDA_ERROR_INVALID_VALUE;
    stack.at[stack.depth++] = c;
    return CUDA_SUCCESS;
}

static CUresult end_life(const char *call, struct context *c);

/* begin charges for a context and brings it to life. */
static CUresult begin_life(const char *call, struct context *c)
{
    struct device *d = &devices[c->device];
    if (!limits_begin(c))
        return CUDA_ERROR_OUT_OF_MEMORY;
    TRY(charge(call, d, (int64_t)d->context));
    unsigned int sms = mps_client() ? (unsigned int)mps_multiprocessors(d) : 0;
    lock();
    c->charged = d->context;
    c->multiprocessors = sms;
    c->serial = next_serial();
    c->alive = true;
    unlock();
    CUresult r = modules_begin(call, c);
    if (r != CUDA_SUCCESS)
        end_life(call, c);
    return r;
}

/* end_life frees all that a context has, in one piece but for what is shared. */
static CUresult end_life(const char *call, struct context *c)
{
    struct device *d = &devices[c->device];
    uint64_t bytes;
    lock();
    c->alive = false;
    bytes = c->charged;
    c->charged = 0;
    arrays_end(call, c);
    for (struct range *r; (r = c->ranges);) {
        if (r->kind == RANGE_POOL) {
            pool_free(call, r, NULL);
            lock();
        } else if (r->shared) {
            drop_unlock(call, r);
            lock();
        } else {
            bytes += range_give(r);
        }
    }
    if (c->primary) /* what pools keep goes with it */
        bytes += pools_empty(c->device) + graph_empty(c->device);
    unlock();
    pools_let_go();
    return charge(call, d, -(int64_t)bytes);
}

static CUresult create(const char *call, CUcontext *out, unsigned int flags, CUdevice device)
{
    struct device *d;
    TRY(find_device(device, &d));
    MUST(out && !(flags & ~(unsigned int)FLAGS));
    lock();
    struct context *c = object_new(CONTEXT);
    unlock();
    if (!c)
        return CUDA_ERROR_OUT_OF_MEMORY;
    c->device = device;
    c->flags = flags;
    c->version = API_VERSION;
    CUresult r = begin_life(call, c);
    if (r == CUDA_SUCCESS && (r = push(c)) != CUDA_SUCCESS)
        end_life(call, c);
    if (r == CUDA_SUCCESS)
        *out = (CUcontext)c;
    return r;
}

API CUresult cuCtxCreate(CUcontext *out, unsigned int flags, CUdevice device) { return create("cuCtxCreate", out, flags, device); }
API CUresult cuCtxCreate_v2(CUcontext *out, unsigned int flags, CUdevice device) { return create("cuCtxCreate_v2", out, flags, device); }

API CUresult cuCtxCreate_v3(CUcontext *out, void *affinity, int count, unsigned int flags, CUdevice device)
{
    MUST(count == 0 || affinity);
    return create("cuCtxCreate_v3", out, flags, device);
}

API CUresult cuCtxCreate_v4(CUcontext *out, void *params, unsigned int flags, CUdevice device)
{
    (void)params;
    return create("cuCtxCreate_v4", out, flags, device);
}

/* Its place is never used again: it may be current anywhere. */
static CUresult destroy(const char *call, CUcontext handle)
{
    TRY(ready());
    struct context *c = context_get(handle);
    if (!c || c->primary || c->green_of)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (!c->alive)
        return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    if (peek() == c)
        stack.depth--;
    return end_life(call, c);
}

API CUresult cuCtxDestroy(CUcontext ctx) { return destroy("cuCtxDestroy", ctx); }
API CUresult cuCtxDestroy_v2(CUcontext ctx) { return destroy("cuCtxDestroy_v2", ctx); }

API CUresult cuCtxDetach(CUcontext ctx) { return destroy("cuCtxDetach", ctx); }

static CUresult push_current(CUcontext handle)
{
    TRY(ready());
    struct context *c = context_get(handle);
    if (!c)
        return CUDA_ERROR_INVALID_CONTEXT;
    return c->alive ? push(c) : CUDA_ERROR_CONTEXT_IS_DESTROYED;
}

API CUresult cuCtxPushCurrent(CUcontext ctx) { return push_current(ctx); }
API CUresult cuCtxPushCurrent_v2(CUcontext ctx) { return push_current(ctx); }

static CUresult pop_current(CUcontext *out)
{
    TRY(ready());
    if (!stack.depth)
        return CUDA_ERROR_INVALID_CONTEXT;
    struct context *c = stack.at[--stack.depth];
    if (out)
        *out = (CUcontext)c;
    return CUDA_SUCCESS;
}

API CUresult cuCtxPopCurrent(CUcontext *out) { return pop_current(out); }
API CUresult cuCtxPopCurrent_v2(CUcontext *out) { return pop_current(out); }

API CUresult cuCtxSetCurrent(CUcontext handle)
{
    TRY(ready());
    if (!handle) {
        if (stack.depth)
            stack.depth--;
        return CUDA_SUCCESS;
    }
    struct context *c = context_get(handle);
    if (!c)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (!c->alive)
        return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    if (!stack.depth)
        stack.depth = 1;
    stack.at[stack.depth - 1] = c;
    return CUDA_SUCCESS;
}

API CUresult cuCtxGetCurrent(CUcontext *out)
{
    TRY(ready());
    MUST(out);
    *out = (CUcontext)peek();
    return CUDA_SUCCESS;
}

API CUresult cuCtxGetDevice(CUdevice *out)
{
    struct context *c;
    TRY(current(&c));
    MUST(out);
    *out = c->device;
    return CUDA_SUCCESS;
}

API CUresult cuCtxGetDevice_v2(CUdevice *out, CUcontext handle)
{
    struct context *c;
    TRY(ready());
    MUST(out);
    if (!handle)
        TRY(current(&c));
    else if (!(c = context_get(handle)))
        return CUDA_ERROR_INVALID_CONTEXT;
    *out = c->device;
    return CUDA_SUCCESS;
}

API CUresult cuCtxGetFlags(unsigned int *flags)
{
    struct context *c;
    TRY(current(&c));
    MUST(flags);
    *flags = c->flags;
    return CUDA_SUCCESS;
}

API CUresult cuCtxGetApiVersion(CUcontext handle, unsigned int *version)
{
    struct context *c = (struct context *)handle;
    TRY(ready());
    MUST(version);
    if (!handle)
        TRY(current(&c));
    else if (!context_get(handle))
        return CUDA_ERROR_INVALID_CONTEXT;
    *version = API_VERSION;
    return CUDA_SUCCESS;
}

API CUresult cuCtxGetId(CUcontext handle, unsigned long long *id)
{
    struct context *c = (struct context *)handle;
    TRY(ready());
    MUST(id);
    if (!handle) {
        TRY(current(&c));
        c = peek();
    } else if (!context_get(handle)) {
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    *id = c->serial;
    return CUDA_SUCCESS;
}

API CUresult cuCtxSynchronize(void)
{
    struct context *c;
    TRY(current(&c));
    TRY(unsafe_in_capture());
    return context_wait("cuCtxSynchronize", c);
}

/* "Block for the specified context's tasks to complete": of 13.0, whose unsuffixed
 * form goes on without a parameter. */
API CUresult cuCtxSynchronize_v2(CUcontext handle)
{
    struct context *c;
    TRY(ready());
    if (!handle)
        TRY(current(&c));
    else if (!(c = context_get(handle)))
        return CUDA_ERROR_INVALID_CONTEXT;
    if (!c->alive)
        return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    TRY(unsafe_in_capture());
    return context_wait("cuCtxSynchronize_v2", c->green_of ? c->green_of : c);
}

API CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
    struct context *c;
    TRY(current(&c));
    if (least)
        *least = 0;
    if (greatest)
        *greatest = -5;
    return CUDA_SUCCESS;
}

/* --- the primary context of a device --------------------------------------- */

API CUresult cuDevicePrimaryCtxRetain(CUcontext *out, CUdevice device)
{
    struct device *d;
    TRY(find_device(device, &d));
    MUST(out);
    pthread_mutex_lock(&primary_lock);
    CUresult r = d->primary.alive ? CUDA_SUCCESS : begin_life("cuDevicePrimaryCtxRetain", &d->primary);
    if (r == CUDA_SUCCESS) {
        d->primary.refs++;
        *out = (CUcontext)&d->primary;
    }
    pthread_mutex_unlock(&primary_lock);
    return r;
}

static CUresult release(const char *call, CUdevice device)
{
    struct device *d;
    TRY(find_device(device, &d));
    pthread_mutex_lock(&primary_lock);
    CUresult r = CUDA_ERROR_INVALID_CONTEXT;
    if (d->primary.refs)
        r = --d->primary.refs ? CUDA_SUCCESS : end_life(call, &d->primary);
    pthread_mutex_unlock(&primary_lock);
    return r;
}

API CUresult cuDevicePrimaryCtxRelease(CUdevice device) { return release("cuDevicePrimaryCtxRelease", device); }
API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) { return release("cuDevicePrimaryCtxRelease_v2", device); }

static CUresult reset(const char *call, CUdevice device)
{
    struct device *d;
    TRY(find_device(device, &d));
    pthread_mutex_lock(&primary_lock);
    CUresult r = d->primary.alive ? end_life(call, &d->primary) : CUDA_SUCCESS;
    d->primary.refs = 0;
    pthread_mutex_unlock(&primary_lock);
    return r;
}

API CUresult cuDevicePrimaryCtxReset(CUdevice device) { return reset("cuDevicePrimaryCtxReset", device); }
API CUresult cuDevicePrimaryCtxReset_v2(CUdevice device) { return reset("cuDevicePrimaryCtxReset_v2", device); }

API CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned int *flags, int *active)
{
    struct device *d;
    TRY(find_device(device, &d));
    MUST(flags && active);
    *flags = d->primary.flags;
    *active = d->primary.alive;
    return CUDA_SUCCESS;
}

static CUresult set_flags(CUdevice device, unsigned int flags)
{
    struct device *d;
    TRY(find_device(device, &d));
    MUST(!(flags & ~(unsigned int)FLAGS));
    d->primary.flags = flags;
    return CUDA_SUCCESS;
}

API CUresult cuDevicePrimaryCtxSetFlags(CUdevice device, unsigned int flags) { return set_flags(device, flags); }
API CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice device, unsigned int flags) { return set_flags(device, flags); }
