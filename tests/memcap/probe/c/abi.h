/* SPDX-License-Identifier: Apache-2.0 */

/* What the probe needs of CUDA's driver API, written down from its published
 * reference, apart from what the emulated driver and the cap's library have
 * written down: an error of one shows against the others. */
#ifndef MEMCAP_PROBE_ABI_H
#define MEMCAP_PROBE_ABI_H

#include <stddef.h>
#include <stdint.h>

typedef int CUresult;
typedef int CUdevice;
typedef uint64_t CUdeviceptr;
typedef uint32_t CUdeviceptr_v1; /* before CUDA 3.2 addresses had 32 bits */
typedef uint64_t CUmemGenericAllocationHandle;
typedef struct context *CUcontext;
typedef struct stream *CUstream;
typedef struct module *CUmodule;
typedef struct function *CUfunction;
typedef struct event *CUevent;
typedef struct array *CUarray;
typedef struct mipmap *CUmipmappedArray;
typedef struct pool *CUmemoryPool;
typedef struct graph *CUgraph;
typedef struct exec *CUgraphExec;
typedef struct node *CUgraphNode;

typedef struct {
    unsigned char bytes[16];
} CUuuid;

typedef struct { /* as large as of any version */
    int type;
    unsigned char rest[148];
} CUdevResource;

enum {
    CUDA_SUCCESS = 0,
    CUDA_ERROR_INVALID_VALUE = 1,
    CUDA_ERROR_OUT_OF_MEMORY = 2,
    CUDA_ERROR_NOT_FOUND = 500,
    CUDA_ERROR_NOT_READY = 600,
    ABSENT = -1, /* of the probe's own: the door has no such name */
};

enum {
    CU_MEM_ATTACH_GLOBAL = 1,
    CU_AD_FORMAT_UNSIGNED_INT32 = 3,
    CU_MEM_ALLOCATION_TYPE_PINNED = 1,
    CU_MEM_LOCATION_TYPE_DEVICE = 1,
    CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN = 6,
    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1,
    CU_LIMIT_STACK_SIZE = 0,
    CU_MEM_ALLOC_GRANULARITY_MINIMUM = 0,
    CU_MEM_ALLOCATION_TYPE_MANAGED = 2,
    CU_MEM_LOCATION_TYPE_HOST = 2,
    CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES = 1,
    CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC = 2,
    CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES = 3,
    CU_MEMPOOL_ATTR_RELEASE_THRESHOLD = 4,
    CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT = 5,
    CU_STREAM_NON_BLOCKING = 1,
    CU_DEV_RESOURCE_TYPE_SM = 1,
    CU_GREEN_CTX_DEFAULT_STREAM = 1,
    CU_LIMIT_MALLOC_HEAP_SIZE = 2,
    CU_EVENT_DISABLE_TIMING = 2,
    CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3,
    CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS = 1,
    CU_STREAM_CAPTURE_MODE_THREAD_LOCAL = 1,
    CU_GET_PROC_ADDRESS_DEFAULT = 0,
    CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM = 2,
};

#define CU_STREAM_PER_THREAD ((CUstream)2)

typedef struct {
    int type, id;
} CUmemLocation;

typedef struct {
    CUmemLocation location;
    int flags;
} CUmemAccessDesc;

typedef struct {
    char reserved[64];
} CUipcMemHandle, CUmemPoolPtrExportData;

typedef struct {
    int type, requestedHandleTypes;
    CUmemLocation location;
    void *win32HandleMetaData;
    struct {
        unsigned char compressionType, gpuDirectRDMACapable;
        unsigned short usage;
        unsigned char reserved[4];
    } allocFlags;
} CUmemAllocationProp;

typedef struct {
    int allocType, handleTypes;
    CUmemLocation location;
    void *win32SecurityAttributes;
    size_t maxSize;
    unsigned short usage;
    unsigned char reserved[54];
} CUmemPoolProps;

typedef struct {
    CUmemPoolProps poolProps;
    const void *accessDescs;
    size_t accessDescCount;
    size_t bytesize;
    CUdeviceptr dptr;
} CUDA_MEM_ALLOC_NODE_PARAMS;

typedef struct {
    size_t Width, Height;
    int Format;
    unsigned NumChannels;
} CUDA_ARRAY_DESCRIPTOR;

typedef struct {
    unsigned Width, Height;
    int Format;
    unsigned NumChannels;
} CUDA_ARRAY_DESCRIPTOR_v1;

typedef struct {
    size_t Width, Height, Depth;
    int Format;
    unsigned NumChannels, Flags;
} CUDA_ARRAY3D_DESCRIPTOR;

typedef struct {
    unsigned Width, Height, Depth;
    int Format;
    unsigned NumChannels, Flags;
} CUDA_ARRAY3D_DESCRIPTOR_v1;

_Static_assert(sizeof(CUmemAllocationProp) == 32, "CUmemAllocationProp");
_Static_assert(sizeof(CUmemPoolProps) == 88, "CUmemPoolProps");
_Static_assert(sizeof(CUDA_MEM_ALLOC_NODE_PARAMS) == 120, "CUDA_MEM_ALLOC_NODE_PARAMS");
_Static_assert(sizeof(CUDA_ARRAY_DESCRIPTOR) == 24, "CUDA_ARRAY_DESCRIPTOR");
_Static_assert(sizeof(CUDA_ARRAY3D_DESCRIPTOR) == 40, "CUDA_ARRAY3D_DESCRIPTOR");

/* F(exported name, name for cuGetProcAddress, CUDA version at which that name
 * began to mean this function, whether it has a _ptsz twin, parameters) */
#define FUNCTIONS(F) \
    F(cuInit, "cuInit", 2000, 0, (unsigned flags)) \
    F(cuDeviceGet, "cuDeviceGet", 2000, 0, (CUdevice *, int ordinal)) \
    F(cuDeviceGetCount, "cuDeviceGetCount", 2000, 0, (int *)) \
    F(cuDeviceGetUuid_v2, "cuDeviceGetUuid", 11040, 0, (CUuuid *, CUdevice)) \
    F(cuDeviceTotalMem, "cuDeviceTotalMem", 2000, 0, (unsigned *, CUdevice)) \
    F(cuDeviceTotalMem_v2, "cuDeviceTotalMem", 3020, 0, (size_t *, CUdevice)) \
    F(cuMemGetInfo, "cuMemGetInfo", 2000, 0, (unsigned *unused, unsigned *total)) \
    F(cuMemGetInfo_v2, "cuMemGetInfo", 3020, 0, (size_t *unused, size_t *total)) \
    F(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", 7000, 0, (CUcontext *, CUdevice)) \
    F(cuDevicePrimaryCtxRelease_v2, "cuDevicePrimaryCtxRelease", 11000, 0, (CUdevice)) \
    F(cuCtxCreate_v2, "cuCtxCreate", 3020, 0, (CUcontext *, unsigned flags, CUdevice)) \
    F(cuCtxDestroy_v2, "cuCtxDestroy", 4000, 0, (CUcontext)) \
    F(cuCtxSetCurrent, "cuCtxSetCurrent", 4000, 0, (CUcontext)) \
    F(cuCtxPopCurrent_v2, "cuCtxPopCurrent", 4000, 0, (CUcontext *)) \
    F(cuDeviceGetDevResource, "cuDeviceGetDevResource", 12040, 0, (CUdevice, CUdevResource *, int type)) \
    F(cuDevResourceGenerateDesc, "cuDevResourceGenerateDesc", 12040, 0, (void **, CUdevResource *, unsigned count)) \
    F(cuGreenCtxCreate, "cuGreenCtxCreate", 12040, 0, (void **, void *desc, CUdevice, unsigned flags)) \
    F(cuGreenCtxDestroy, "cuGreenCtxDestroy", 12040, 0, (void *)) \
    F(cuModuleLoadData, "cuModuleLoadData", 2000, 0, (CUmodule *, const void *image)) \
    F(cuModuleUnload, "cuModuleUnload", 2000, 0, (CUmodule)) \
    F(cuModuleGetFunction, "cuModuleGetFunction", 2000, 0, (CUfunction *, CUmodule, const char *name)) \
    F(cuLaunchKernel, "cuLaunchKernel", 4000, 1, \
      (CUfunction, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, CUstream, void **parameters, void **extra)) \
    F(cuEventCreate, "cuEventCreate", 2000, 0, (CUevent *, unsigned flags)) \
    F(cuEventDestroy_v2, "cuEventDestroy", 4000, 0, (CUevent)) \
    F(cuEventRecord, "cuEventRecord", 2000, 1, (CUevent, CUstream)) \
    F(cuStreamQuery, "cuStreamQuery", 2000, 1, (CUstream)) \
    F(cuCtxSynchronize, "cuCtxSynchronize", 2000, 0, (void)) \
    F(cuCtxSetLimit, "cuCtxSetLimit", 3010, 0, (int limit, size_t value)) \
    F(cuEventQuery, "cuEventQuery", 2000, 0, (CUevent)) \
    F(cuEventSynchronize, "cuEventSynchronize", 2000, 0, (CUevent)) \
    F(cuStreamWaitEvent, "cuStreamWaitEvent", 3020, 1, (CUstream, CUevent, unsigned flags)) \
    F(cuStreamCreate, "cuStreamCreate", 2000, 0, (CUstream *, unsigned flags)) \
    F(cuStreamDestroy_v2, "cuStreamDestroy", 4000, 0, (CUstream)) \
    F(cuStreamSynchronize, "cuStreamSynchronize", 7000, 1, (CUstream)) \
    F(cuMemAlloc, "cuMemAlloc", 2000, 0, (CUdeviceptr_v1 *, unsigned bytes)) \
    F(cuMemFree, "cuMemFree", 2000, 0, (CUdeviceptr_v1)) \
    F(cuMemAlloc_v2, "cuMemAlloc", 3020, 0, (CUdeviceptr *, size_t bytes)) \
    F(cuMemFree_v2, "cuMemFree", 3020, 0, (CUdeviceptr)) \
    F(cuMemAllocPitch, "cuMemAllocPitch", 2000, 0, (CUdeviceptr_v1 *, unsigned *pitch, unsigned width, unsigned height, unsigned element)) \
    F(cuMemAllocPitch_v2, "cuMemAllocPitch", 3020, 0, (CUdeviceptr *, size_t *pitch, size_t width, size_t height, unsigned element)) \
    F(cuMemAllocManaged, "cuMemAllocManaged", 6000, 0, (CUdeviceptr *, size_t bytes, unsigned flags)) \
    F(cuMemHostAlloc, "cuMemHostAlloc", 2020, 0, (void **, size_t bytes, unsigned flags)) \
    F(cuMemFreeHost, "cuMemFreeHost", 2000, 0, (void *)) \
    F(cuMemAllocAsync, "cuMemAllocAsync", 11020, 1, (CUdeviceptr *, size_t bytes, CUstream)) \
    F(cuMemAllocFromPoolAsync, "cuMemAllocFromPoolAsync", 11020, 1, (CUdeviceptr *, size_t bytes, CUmemoryPool, CUstream)) \
    F(cuMemFreeAsync, "cuMemFreeAsync", 11020, 1, (CUdeviceptr, CUstream)) \
    F(cuDeviceGetDefaultMemPool, "cuDeviceGetDefaultMemPool", 11020, 0, (CUmemoryPool *, CUdevice)) \
    F(cuDeviceGetMemPool, "cuDeviceGetMemPool", 11020, 0, (CUmemoryPool *, CUdevice)) \
    F(cuDeviceSetMemPool, "cuDeviceSetMemPool", 11020, 0, (CUdevice, CUmemoryPool)) \
    F(cuMemPoolCreate, "cuMemPoolCreate", 11020, 0, (CUmemoryPool *, const CUmemPoolProps *)) \
    F(cuMemPoolDestroy, "cuMemPoolDestroy", 11020, 0, (CUmemoryPool)) \
    F(cuMemPoolSetAttribute, "cuMemPoolSetAttribute", 11020, 0, (CUmemoryPool, int attribute, void *value)) \
    F(cuMemPoolGetAttribute, "cuMemPoolGetAttribute", 11020, 0, (CUmemoryPool, int attribute, void *value)) \
    F(cuMemPoolTrimTo, "cuMemPoolTrimTo", 11020, 0, (CUmemoryPool, size_t keep)) \
    F(cuMemPoolExportToShareableHandle, "cuMemPoolExportToShareableHandle", 11020, 0, (void *out, CUmemoryPool, int type, unsigned long long flags)) \
    F(cuMemPoolImportFromShareableHandle, "cuMemPoolImportFromShareableHandle", 11020, 0, (CUmemoryPool *, void *os_handle, int type, unsigned long long flags)) \
    F(cuMemPoolExportPointer, "cuMemPoolExportPointer", 11020, 0, (CUmemPoolPtrExportData *, CUdeviceptr)) \
    F(cuMemPoolImportPointer, "cuMemPoolImportPointer", 11020, 0, (CUdeviceptr *, CUmemoryPool, CUmemPoolPtrExportData *)) \
    F(cuMemGetDefaultMemPool, "cuMemGetDefaultMemPool", 13000, 0, (CUmemoryPool *, CUmemLocation *, int type)) \
    F(cuMemGetAllocationGranularity, "cuMemGetAllocationGranularity", 10020, 0, (size_t *, const CUmemAllocationProp *, int option)) \
    F(cuMemCreate, "cuMemCreate", 10020, 0, (CUmemGenericAllocationHandle *, size_t bytes, const CUmemAllocationProp *, unsigned long long flags)) \
    F(cuMemRelease, "cuMemRelease", 10020, 0, (CUmemGenericAllocationHandle)) \
    F(cuMemAddressReserve, "cuMemAddressReserve", 10020, 0, (CUdeviceptr *, size_t bytes, size_t alignment, CUdeviceptr at, unsigned long long flags)) \
    F(cuMemAddressFree, "cuMemAddressFree", 10020, 0, (CUdeviceptr, size_t bytes)) \
    F(cuMemMap, "cuMemMap", 10020, 0, (CUdeviceptr, size_t bytes, size_t offset, CUmemGenericAllocationHandle, unsigned long long flags)) \
    F(cuMemUnmap, "cuMemUnmap", 10020, 0, (CUdeviceptr, size_t bytes)) \
    F(cuMemSetAccess, "cuMemSetAccess", 10020, 0, (CUdeviceptr, size_t bytes, const CUmemAccessDesc *, size_t count)) \
    F(cuMemExportToShareableHandle, "cuMemExportToShareableHandle", 10020, 0, (void *out, CUmemGenericAllocationHandle, int type, unsigned long long flags)) \
    F(cuMemImportFromShareableHandle, "cuMemImportFromShareableHandle", 10020, 0, (CUmemGenericAllocationHandle *, void *os_handle, int type)) \
    F(cuIpcGetMemHandle, "cuIpcGetMemHandle", 4010, 0, (CUipcMemHandle *, CUdeviceptr)) \
    F(cuIpcOpenMemHandle_v2, "cuIpcOpenMemHandle", 11000, 0, (CUdeviceptr *, CUipcMemHandle, unsigned flags)) \
    F(cuIpcCloseMemHandle, "cuIpcCloseMemHandle", 4010, 0, (CUdeviceptr)) \
    F(cuMemRetainAllocationHandle, "cuMemRetainAllocationHandle", 11000, 0, (CUmemGenericAllocationHandle *, void *at)) \
    F(cuArrayCreate, "cuArrayCreate", 2000, 0, (CUarray *, const CUDA_ARRAY_DESCRIPTOR_v1 *)) \
    F(cuArrayCreate_v2, "cuArrayCreate", 3020, 0, (CUarray *, const CUDA_ARRAY_DESCRIPTOR *)) \
    F(cuArray3DCreate, "cuArray3DCreate", 2000, 0, (CUarray *, const CUDA_ARRAY3D_DESCRIPTOR_v1 *)) \
    F(cuArray3DCreate_v2, "cuArray3DCreate", 3020, 0, (CUarray *, const CUDA_ARRAY3D_DESCRIPTOR *)) \
    F(cuArrayDestroy, "cuArrayDestroy", 2000, 0, (CUarray)) \
    F(cuMipmappedArrayCreate, "cuMipmappedArrayCreate", 5000, 0, (CUmipmappedArray *, const CUDA_ARRAY3D_DESCRIPTOR *, unsigned levels)) \
    F(cuMipmappedArrayDestroy, "cuMipmappedArrayDestroy", 5000, 0, (CUmipmappedArray)) \
    F(cuStreamBeginCapture_v2, "cuStreamBeginCapture", 10010, 1, (CUstream, int mode)) \
    F(cuStreamEndCapture, "cuStreamEndCapture", 10000, 1, (CUstream, CUgraph *)) \
    F(cuGraphCreate, "cuGraphCreate", 10000, 0, (CUgraph *, unsigned flags)) \
    F(cuGraphDestroy, "cuGraphDestroy", 10000, 0, (CUgraph)) \
    F(cuGraphAddMemAllocNode, "cuGraphAddMemAllocNode", 11040, 0, (CUgraphNode *, CUgraph, const CUgraphNode *after, size_t count, CUDA_MEM_ALLOC_NODE_PARAMS *)) \
    F(cuGraphAddChildGraphNode, "cuGraphAddChildGraphNode", 10000, 0, (CUgraphNode *, CUgraph, const CUgraphNode *after, size_t count, CUgraph child)) \
    F(cuGraphInstantiateWithFlags, "cuGraphInstantiateWithFlags", 11040, 0, (CUgraphExec *, CUgraph, unsigned long long flags)) \
    F(cuGraphLaunch, "cuGraphLaunch", 10000, 1, (CUgraphExec, CUstream)) \
    F(cuGraphExecDestroy, "cuGraphExecDestroy", 10000, 0, (CUgraphExec)) \
    F(cuDeviceGraphMemTrim, "cuDeviceGraphMemTrim", 11040, 0, (CUdevice))

#endif
