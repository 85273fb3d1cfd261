/* SPDX-License-Identifier: Apache-2.0 */

/* A driver of the most awkward kind: it answers cuGetProcAddress with functions
 * that it does not export, and reaches its own by their exported names. It has
 * one context on one GPU. What it has beside that is in stubs.c. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "driver.h"

static CUdeviceptr next = (CUdeviceptr)1 << 40;

EXPORT CUresult cuDriverGetVersion(int *version)
{
    *version = 12080;
    return CUDA_SUCCESS;
}

/* Whether it says that the process is a client of MPS, and what it was begun with. A program may
 * look at the moment of its beginning. */
EXPORT int client, sms = 34, begins;
EXPORT char pipe_was[256], percent_was[16];
EXPORT void (*beginning)(void);
EXPORT CUresult cuInit(unsigned int flags)
{
    const char *pipe = getenv("CUDA_MPS_PIPE_DIRECTORY"), *percent = getenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE");
    begins++;
    snprintf(pipe_was, sizeof pipe_was, "%s", pipe ? pipe : "");
    snprintf(percent_was, sizeof percent_was, "%s", percent ? percent : "");
    if (beginning)
        beginning();
    return flags ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceGetCount(int *count)
{
    *count = 1;
    return CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device)
{
    *value = attribute == CU_DEVICE_ATTRIBUTE_MPS_ENABLED ? client : sms;
    return !device && (attribute == CU_DEVICE_ATTRIBUTE_MPS_ENABLED || attribute == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
               ? CUDA_SUCCESS
               : CUDA_ERROR_INVALID_VALUE;
}

static CUcontext current = (CUcontext)0x1000;
EXPORT CUresult cuCtxGetCurrent(CUcontext *context)
{
    *context = current;
    return CUDA_SUCCESS;
}
EXPORT CUresult cuCtxSetCurrent(CUcontext context)
{
    current = context;
    return CUDA_SUCCESS;
}
EXPORT CUresult cuCtxGetDevice(CUdevice *device)
{
    *device = 0;
    return CUDA_SUCCESS;
}
EXPORT CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device)
{
    (void)device;
    memset(uuid, 0x5a, sizeof *uuid);
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxCreate_v2(CUcontext *context, unsigned int flags, CUdevice device)
{
    return flags || device ? CUDA_ERROR_INVALID_VALUE : cuCtxGetCurrent(context);
}
EXPORT CUresult cuGLCtxCreate_v2(CUcontext *context, unsigned int flags, CUdevice device) { return cuCtxCreate_v2(context, flags, device); }
EXPORT CUresult cuVDPAUCtxCreate_v2(CUcontext *context, unsigned int flags, CUdevice device, uint32_t vdpau, void *find)
{
    return vdpau == 7 && find ? cuCtxCreate_v2(context, flags, device) : CUDA_ERROR_INVALID_VALUE;
}
/* It is not destroyed at the first attempt. */
EXPORT CUresult cuCtxDestroy_v2(CUcontext context)
{
    static int attempts;
    return context != (CUcontext)0x1000 || attempts++ == 0 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

/* Limits can be set and not be read. */
EXPORT CUresult cuCtxSetLimit(int limit, size_t value)
{
    (void)limit, (void)value;
    return CUDA_SUCCESS;
}
EXPORT CUresult cuCtxGetLimit(size_t *value, int limit)
{
    (void)value, (void)limit;
    return 215; /* CUDA_ERROR_UNSUPPORTED_LIMIT */
}

static int retained;
EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
    (void)device;
    *context = (CUcontext)0x2000;
    retained++;
    return CUDA_SUCCESS;
}
EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
    (void)device;
    if (!retained)
        return CUDA_ERROR_INVALID_VALUE;
    retained--;
    return CUDA_SUCCESS;
}
EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned int *flags, int *active)
{
    (void)device;
    *flags = 0;
    *active = retained > 0;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *at, size_t bytes)
{
    *at = next;
    next += (bytes + ((size_t)2 << 20) - 1) >> 21 << 21;
    return CUDA_SUCCESS;
}
EXPORT CUresult cuMemFree_v2(CUdeviceptr at) { return at ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE; }

EXPORT CUresult cuMemAlloc(CUdeviceptr_v1 *at, size_v1 bytes)
{
    CUdeviceptr wide;
    CUresult r = cuMemAlloc_v2(&wide, bytes); /* by name: whoever stands in front is called */
    *at = (CUdeviceptr_v1)(wide >> 12);
    return r;
}
/* The same, so that the compiler makes a jump of it. */
EXPORT CUresult cuMemFree(CUdeviceptr_v1 at) { return cuMemFree_v2((CUdeviceptr)at << 12); }

/* A card of 8 GiB. What a module takes stands at the beginning of its image, and after it what
 * another container takes while it is loaded for the first time. looks is how often anybody asked
 * for what the card has free. */
static size_t taken;
EXPORT int looks;
EXPORT CUresult cuMemGetInfo_v2(size_t *left, size_t *total)
{
    __atomic_add_fetch(&looks, 1, __ATOMIC_SEQ_CST);
    *total = (size_t)8 << 30;
    *left = *total - taken;
    return CUDA_SUCCESS;
}
EXPORT CUresult cuModuleLoadData(CUmodule *module, const void *image)
{
    size_t *takes = (size_t *)(uintptr_t)image;
    taken += takes[0] + takes[1];
    takes[1] = 0;
    *module = (CUmodule)takes;
    return CUDA_SUCCESS;
}
EXPORT CUresult cuModuleUnload(CUmodule module)
{
    taken -= ((size_t *)module)[0];
    return CUDA_SUCCESS;
}

/* Memory by hand, of which there is one handle only. */
EXPORT CUresult cuMemCreate(CUhandle *out, size_t size, const CUmemprop *prop, unsigned long long flags)
{
    *out = 0x3000;
    return size && prop->type && !flags ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
EXPORT CUresult cuMemRelease(CUhandle handle) { return handle == 0x3000 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE; }
EXPORT CUresult cuMemMap(CUdeviceptr at, size_t size, size_t offset, CUhandle handle, unsigned long long flags)
{
    return at && size && !offset && handle == 0x3000 && !flags ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
EXPORT CUresult cuMemUnmap(CUdeviceptr at, size_t size) { return at && size ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE; }

/* It may exist as long as it is bound. */
EXPORT CUresult cuMulticastBindMem(CUhandle to, size_t at, CUhandle handle, size_t offset, size_t size, unsigned long long flags)
{
    return to == 7 && !at && handle == 0x3000 && !offset && size && !flags ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
EXPORT CUresult cuMulticastBindAddr_v2(CUhandle to, CUdevice device, size_t at, CUdeviceptr memory, size_t size, unsigned long long flags)
{
    return to == 7 && !device && !at && memory && size && !flags ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult anything(void) { return 801; }

EXPORT CUresult cuGetProcAddress_v2(const char *symbol, void **out, int version, uint64_t flags, int *status)
{
    (void)version, (void)flags, (void)status;
    *out = strncmp(symbol, "cu", 2) == 0 ? (void *)anything : NULL;
    return *out ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
EXPORT CUresult cuGetProcAddress(const char *symbol, void **out, int version, uint64_t flags)
{
    return cuGetProcAddress_v2(symbol, out, version, flags, NULL);
}
