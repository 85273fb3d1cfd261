/* SPDX-License-Identifier: Apache-2.0 */

/* Green contexts: parts of a device's multiprocessors, in its primary context. The
 * sentences in quotes are of the "CUDA Driver API 13.4", Green Contexts.
 *
 * "This API will retain the primary context on device dev, which will is released when the
 * green context is destroyed": allocations that are made with a green context current are
 * the primary one's. How much a green context takes by itself no sentence says: a switch,
 * green-mib. */
#include <string.h>

#include "cuda_stream.h"
#include "cuda_switch.h"

CUresult cuDevicePrimaryCtxRetain(CUcontext *out, CUdevice device);
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device);

enum { RESOURCE_SM = 1, DEFAULT_STREAM = 1 };

/* CUdevResource: 144 bytes, and a pointer more since 13.1, which nobody reads here. */
struct resource {
    int type;
    unsigned char padding[92];
    unsigned int multiprocessors;
    unsigned char rest[44];
};
_Static_assert(sizeof(struct resource) == 144 && offsetof(struct resource, multiprocessors) == 96, "CUdevResource");

struct desc { /* what a CUdevResourceDesc stands for */
    unsigned int multiprocessors;
};

static CUresult whole(struct resource *out, int type, unsigned int multiprocessors)
{
    MUST(out && type == RESOURCE_SM);
    *out = (struct resource){.type = type, .multiprocessors = multiprocessors};
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetDevResource(CUdevice device, struct resource *out, int type)
{
    struct device *d;
    TRY(find_device(device, &d));
    return whole(out, type, (unsigned int)d->multiprocessors);
}

/* "On Compute Architecture 7.X / 8.X / 9.X+": the least, and a multiple of what. */
static void grains(const struct device *d, unsigned int *least, unsigned int *multiple)
{
    *least = d->major >= 9 ? 8 : d->major == 8 ? 4 : 2;
    *multiple = d->major >= 9 ? 8 : 2;
}

/* "Splits CU_DEV_RESOURCE_TYPE_SM resources": "If result is NULL, the API will perform a
 * simulated split". */
API CUresult cuDevSmResourceSplitByCount(struct resource *out, unsigned int *groups, const struct resource *input, struct resource *rest, unsigned int flags,
                                         unsigned int least)
{
    unsigned int smallest, multiple;
    TRY(ready());
    MUST(groups && input && input->type == RESOURCE_SM && !flags);
    grains(&devices[0], &smallest, &multiple);
    least = least < smallest ? smallest : (unsigned int)round_up(least, multiple);
    unsigned int most = input->multiprocessors / least, n = out && *groups < most ? *groups : most;
    MUST(n && (!out || *groups));
    *groups = n;
    for (unsigned int i = 0; out && i < n; i++)
        out[i] = (struct resource){.type = RESOURCE_SM, .multiprocessors = least};
    if (rest)
        *rest = (struct resource){.type = n * least < input->multiprocessors ? RESOURCE_SM : 0, .multiprocessors = input->multiprocessors - n * least};
    return CUDA_SUCCESS;
}

API CUresult cuDevResourceGenerateDesc(void **out, const struct resource *list, unsigned int count)
{
    TRY(ready());
    MUST(out && list && count);
    unsigned int sum = 0;
    for (unsigned int i = 0; i < count; i++) {
        MUST(list[i].type == RESOURCE_SM && list[i].multiprocessors);
        sum += list[i].multiprocessors;
    }
    lock();
    struct desc *d = object_new(DESC);
    if (d)
        d->multiprocessors = sum;
    unlock();
    *out = d;
    return d ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static struct context *green_get(void *handle)
{
    struct context *c = object_get(handle, CONTEXT);
    return c && c->green_of && c->alive ? c : NULL;
}

/* "CU_GREEN_CTX_DEFAULT_STREAM is required." */
API CUresult cuGreenCtxCreate(void **out, void *desc, CUdevice device, unsigned int flags)
{
    struct device *d;
    CUcontext primary;
    TRY(find_device(device, &d));
    MUST(out && flags == DEFAULT_STREAM);
    lock();
    const struct desc *is = object_get(desc, DESC);
    unsigned int multiprocessors = is ? is->multiprocessors : 0;
    unlock();
    MUST(multiprocessors && multiprocessors <= (unsigned int)d->multiprocessors);
    TRY(cuDevicePrimaryCtxRetain(&primary, device));
    uint64_t own = (uint64_t)switches.green_mib << 20;
    CUresult r = charge("cuGreenCtxCreate", d, (int64_t)own);
    lock();
    struct context *c = r == CUDA_SUCCESS ? object_new(CONTEXT) : NULL;
    if (c)
        *c = (struct context){.device = device, .alive = true, .serial = next_serial(), .charged = own, .green_of = &d->primary, .multiprocessors = multiprocessors};
    unlock();
    *out = c;
    if (c)
        return CUDA_SUCCESS;
    if (r == CUDA_SUCCESS)
        charge("cuGreenCtxCreate", d, -(int64_t)own);
    cuDevicePrimaryCtxRelease_v2(device);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

/* "Destroys the green context, releasing the primary context of the device that this green
 * context was created for." Its place is never used again: it may be current anywhere. */
API CUresult cuGreenCtxDestroy(void *handle)
{
    TRY(ready());
    lock();
    struct context *c = green_get(handle);
    if (c)
        c->alive = false;
    unlock();
    if (!c)
        return CUDA_ERROR_INVALID_CONTEXT;
    CUresult r = charge("cuGreenCtxDestroy", &devices[c->device], -(int64_t)c->charged);
    CUresult released = cuDevicePrimaryCtxRelease_v2(c->device);
    return r == CUDA_SUCCESS ? released : r;
}

/* "the converted context pContext is a normal primary context but with the resources of the
 * specified green context hCtx"; before, "any CUDA APIs that accept a CUcontext parameter"
 * answer CUDA_ERROR_INVALID_CONTEXT. */
API CUresult cuCtxFromGreenCtx(CUcontext *out, void *handle)
{
    TRY(ready());
    MUST(out);
    lock();
    struct context *c = green_get(handle);
    if (c)
        c->converted = true;
    unlock();
    *out = (CUcontext)c;
    return c ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

API CUresult cuGreenCtxGetId(void *handle, unsigned long long *id)
{
    TRY(ready());
    MUST(id);
    lock();
    struct context *c = green_get(handle);
    if (c)
        *id = c->serial;
    unlock();
    return c ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

static CUresult of_context(struct context *c, struct resource *out, int type)
{
    if (!c)
        return CUDA_ERROR_INVALID_CONTEXT;
    const struct device *d = &devices[c->device];
    return whole(out, type, c->green_of ? c->multiprocessors : (unsigned int)d->multiprocessors);
}

API CUresult cuGreenCtxGetDevResource(void *handle, struct resource *out, int type)
{
    TRY(ready());
    lock();
    struct context *c = green_get(handle);
    unlock();
    return of_context(c, out, type);
}

API CUresult cuCtxGetDevResource(CUcontext handle, struct resource *out, int type)
{
    TRY(ready());
    return of_context(context_get(handle), out, type);
}

/* "The flags must include CU_STREAM_NON_BLOCKING"; the stream stays when the green context
 * is destroyed. */
API CUresult cuGreenCtxStreamCreate(CUstream *out, void *handle, unsigned int flags, int priority)
{
    TRY(ready());
    MUST(out && flags == STREAM_NON_BLOCKING);
    lock();
    struct context *c = green_get(handle);
    struct stream *s = c ? object_new(STREAM) : NULL;
    if (s)
        *s = (struct stream){.ctx = c->green_of, .serial = c->green_of->serial, .id = next_serial() + 2, .flags = flags, .priority = priority, .green = c};
    unlock();
    *out = (CUstream)s;
    return s ? CUDA_SUCCESS : c ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_INVALID_CONTEXT;
}

/* "If the stream is not associated with any green context, phCtx is set to NULL." */
API CUresult cuStreamGetGreenCtx(CUstream handle, void **out)
{
    struct context *ctx;
    struct stream *s;
    TRY(stream_check(handle, &ctx));
    MUST(out);
    lock();
    CUresult r = stream_get(handle, &s);
    *out = r == CUDA_SUCCESS && s ? s->green : NULL;
    unlock();
    return r;
}
