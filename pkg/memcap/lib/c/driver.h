/* SPDX-License-Identifier: Apache-2.0 */

/* The CUDA driver's ABI on 64-bit Linux, as far as the cap uses it. The names, numbers and layouts
 * are the published ones. They are declared here so that no CUDA toolkit is needed. */
#ifndef CAP_DRIVER_H
#define CAP_DRIVER_H

#include <stddef.h>
#include <stdint.h>

typedef int CUresult;
enum {
    CUDA_SUCCESS = 0,
    CUDA_ERROR_INVALID_VALUE = 1,
    CUDA_ERROR_OUT_OF_MEMORY = 2,
    CUDA_ERROR_NOT_INITIALIZED = 3,
    CUDA_ERROR_DEINITIALIZED = 4,
    CUDA_ERROR_NO_DEVICE = 100,
    CUDA_ERROR_INVALID_DEVICE = 101,
    CUDA_ERROR_OPERATING_SYSTEM = 304,
    CUDA_ERROR_NOT_FOUND = 500,
    CUDA_ERROR_MPS_CONNECTION_FAILED = 805,
};

typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef unsigned int CUdeviceptr_v1, size_v1; /* of CUDA before 3.2 */
typedef unsigned long long CUhandle;          /* CUmemGenericAllocationHandle */
typedef void *CUcontext, *CUstream, *CUarray, *CUmipmap, *CUmempool, *CUgraph, *CUnode, *CUexec, *CUmodule, *CUlibrary, *CUevent;

/* The streams that every context has. */
#define CU_STREAM_LEGACY ((CUstream)1)
#define CU_STREAM_PER_THREAD ((CUstream)2)

typedef struct {
    unsigned char bytes[16];
} CUuuid;

enum {
    CU_MEM_LOCATION_TYPE_NONE = 0, /* or INVALID */
    CU_MEM_LOCATION_TYPE_DEVICE = 1,
    CU_MEM_LOCATION_TYPE_HOST = 2,
    CU_MEM_LOCATION_TYPE_HOST_NUMA = 3,
    CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT = 4,
    CU_MEM_LOCATION_TYPE_INVISIBLE = 5,              /* CUDA 13.2 */
    CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN = 6, /* CUDA 13.4 */
};
enum { CU_MEM_ALLOCATION_TYPE_INVALID = 0, CU_MEM_ALLOCATION_TYPE_PINNED = 1, CU_MEM_ALLOCATION_TYPE_MANAGED = 2 };
typedef struct {
    int type, id;
} CUlocation;

typedef struct {
    int type, handle_types;
    CUlocation location;
    void *security;
    unsigned char flags[8];
} CUmemprop;

typedef struct {
    int type, handle_types;
    CUlocation location;
    void *security;
    size_t most;
    unsigned short usage;
    unsigned char reserved[54];
} CUpoolprops;

enum { CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES = 1, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD = 4, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT = 5 };
enum { CU_EVENT_DISABLE_TIMING = 2 };
enum { CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT = 0, CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT = 2 };

typedef struct {
    size_t width, height;
    int format;
    unsigned int channels;
} CUarray2;
typedef struct {
    unsigned int width, height;
    int format;
    unsigned int channels;
} CUarray2_v1;
typedef struct {
    size_t width, height, depth;
    int format;
    unsigned int channels, flags;
} CUarray3;
typedef struct {
    unsigned int width, height, depth;
    int format;
    unsigned int channels, flags;
} CUarray3_v1;
enum { CUDA_ARRAY3D_LAYERED = 0x01, CUDA_ARRAY3D_CUBEMAP = 0x04, CUDA_ARRAY3D_SPARSE = 0x40, CUDA_ARRAY3D_DEFERRED = 0x80 };

enum { CU_GRAPH_NODE_TYPE_GRAPH = 4, CU_GRAPH_NODE_TYPE_MEM_ALLOC = 10, CU_GRAPH_NODE_TYPE_MEM_FREE = 11 };
typedef struct {
    CUpoolprops pool;
    const void *access;
    size_t accesses, bytes;
    CUdeviceptr at;
} CUallocnode;

enum { CU_GRAPH_INSTANTIATE_FLAG_UPLOAD = 2 };
typedef struct {
    uint64_t flags;
    CUstream upload;
    CUnode bad;
    int result;
} CUinstantiate;

enum { CU_MEM_OPERATION_TYPE_MAP = 1 };
typedef struct {
    int resource_type;
    void *resource;
    int part_type;
    uint64_t part[4];
    int operation, handle_type;
    CUhandle handle;
    uint64_t offset;
    unsigned int devices, flags, reserved[2];
} CUmapinfo;

enum {
    CU_LIMIT_STACK_SIZE = 0,
    CU_LIMIT_PRINTF_FIFO_SIZE = 1,
    CU_LIMIT_MALLOC_HEAP_SIZE = 2,
    CU_LIMIT_DEV_RUNTIME_SYNC_DEPTH = 3,
    CU_LIMIT_DEV_RUNTIME_PENDING_LAUNCH_COUNT = 4,
};
enum {
    CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16,
    CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR = 39,
    CU_DEVICE_ATTRIBUTE_MPS_ENABLED = 133, /* CUDA 12.2 */
};

enum { CU_STREAM_CAPTURE_MODE_RELAXED = 2 };

enum { CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM = 2 };

#define LAYOUT(type, size) _Static_assert(sizeof(type) == (size), #type)
LAYOUT(CUmemprop, 32);
LAYOUT(CUpoolprops, 88);
LAYOUT(CUarray2, 24);
LAYOUT(CUarray2_v1, 16);
LAYOUT(CUarray3, 40);
LAYOUT(CUarray3_v1, 24);
LAYOUT(CUallocnode, 120);
LAYOUT(CUinstantiate, 32);
LAYOUT(CUmapinfo, 96);
#undef LAYOUT

/* OVERRIDES lists the driver's functions that this library overrides and exports. A row has the
 * name that cuGetProcAddress knows, the first CUDA version with this form, the function's name, and
 * the types of its arguments. The functions are defined in memory.c and the files beside it. A test
 * checks that none is missing on either side. tests/drivers compares the list with what real
 * drivers answer. */
#define OVERRIDES(X)                                                                                            \
    X(cuInit, 2000, cuInit, (unsigned int))                                                                     \
    X(cuMemAlloc, 2000, cuMemAlloc, (CUdeviceptr_v1 *, size_v1))                                                \
    X(cuMemAlloc, 3020, cuMemAlloc_v2, (CUdeviceptr *, size_t))                                                 \
    X(cuMemAllocPitch, 2000, cuMemAllocPitch, (CUdeviceptr_v1 *, size_v1 *, size_v1, size_v1, unsigned int))    \
    X(cuMemAllocPitch, 3020, cuMemAllocPitch_v2, (CUdeviceptr *, size_t *, size_t, size_t, unsigned int))       \
    X(cuMemAllocManaged, 6000, cuMemAllocManaged, (CUdeviceptr *, size_t, unsigned int))                        \
    X(cuMemFree, 2000, cuMemFree, (CUdeviceptr_v1))                                                             \
    X(cuMemFree, 3020, cuMemFree_v2, (CUdeviceptr))                                                             \
    X(cuMemGetInfo, 2000, cuMemGetInfo, (size_v1 *, size_v1 *))                                                 \
    X(cuMemGetInfo, 3020, cuMemGetInfo_v2, (size_t *, size_t *))                                                \
    X(cuDeviceTotalMem, 2000, cuDeviceTotalMem, (size_v1 *, CUdevice))                                          \
    X(cuDeviceTotalMem, 3020, cuDeviceTotalMem_v2, (size_t *, CUdevice))                                        \
    X(cuCtxCreate, 2000, cuCtxCreate, (CUcontext *, unsigned int, CUdevice))                                    \
    X(cuCtxCreate, 3020, cuCtxCreate_v2, (CUcontext *, unsigned int, CUdevice))                                 \
    X(cuCtxCreate, 11040, cuCtxCreate_v3, (CUcontext *, void *, int, unsigned int, CUdevice))                   \
    X(cuCtxCreate, 12050, cuCtxCreate_v4, (CUcontext *, void *, unsigned int, CUdevice))                        \
    X(cuGLCtxCreate, 2000, cuGLCtxCreate, (CUcontext *, unsigned int, CUdevice))                                \
    X(cuGLCtxCreate, 3020, cuGLCtxCreate_v2, (CUcontext *, unsigned int, CUdevice))                             \
    X(cuVDPAUCtxCreate, 3010, cuVDPAUCtxCreate, (CUcontext *, unsigned int, CUdevice, uint32_t, void *))        \
    X(cuVDPAUCtxCreate, 3020, cuVDPAUCtxCreate_v2, (CUcontext *, unsigned int, CUdevice, uint32_t, void *))     \
    X(cuCtxDestroy, 2000, cuCtxDestroy, (CUcontext))                                                            \
    X(cuCtxDestroy, 4000, cuCtxDestroy_v2, (CUcontext))                                                         \
    X(cuDevicePrimaryCtxRetain, 7000, cuDevicePrimaryCtxRetain, (CUcontext *, CUdevice))                        \
    X(cuDevicePrimaryCtxRelease, 7000, cuDevicePrimaryCtxRelease, (CUdevice))                                   \
    X(cuDevicePrimaryCtxRelease, 11000, cuDevicePrimaryCtxRelease_v2, (CUdevice))                               \
    X(cuDevicePrimaryCtxReset, 7000, cuDevicePrimaryCtxReset, (CUdevice))                                       \
    X(cuDevicePrimaryCtxReset, 11000, cuDevicePrimaryCtxReset_v2, (CUdevice))                                   \
    X(cuGreenCtxCreate, 12040, cuGreenCtxCreate, (void **, void *, CUdevice, unsigned int))                     \
    X(cuGreenCtxDestroy, 12040, cuGreenCtxDestroy, (void *))                                                    \
    X(cuMemAllocAsync, 11020, cuMemAllocAsync, (CUdeviceptr *, size_t, CUstream))                               \
    X(cuMemAllocAsync, 11020, cuMemAllocAsync_ptsz, (CUdeviceptr *, size_t, CUstream))                          \
    X(cuMemAllocFromPoolAsync, 11020, cuMemAllocFromPoolAsync, (CUdeviceptr *, size_t, CUmempool, CUstream))    \
    X(cuMemAllocFromPoolAsync, 11020, cuMemAllocFromPoolAsync_ptsz,                                             \
      (CUdeviceptr *, size_t, CUmempool, CUstream))                                                             \
    X(cuMemFreeAsync, 11020, cuMemFreeAsync, (CUdeviceptr, CUstream))                                           \
    X(cuMemFreeAsync, 11020, cuMemFreeAsync_ptsz, (CUdeviceptr, CUstream))                                      \
    X(cuMemPoolCreate, 11020, cuMemPoolCreate, (CUmempool *, const CUpoolprops *))                              \
    X(cuMemPoolDestroy, 11020, cuMemPoolDestroy, (CUmempool))                                                   \
    X(cuMemPoolTrimTo, 11020, cuMemPoolTrimTo, (CUmempool, size_t))                                             \
    X(cuMemPoolSetAttribute, 11020, cuMemPoolSetAttribute, (CUmempool, int, void *))                            \
    X(cuMemPoolImportFromShareableHandle, 11020, cuMemPoolImportFromShareableHandle,                            \
      (CUmempool *, void *, int, unsigned long long))                                                           \
    X(cuDeviceGetMemPool, 11020, cuDeviceGetMemPool, (CUmempool *, CUdevice))                                   \
    X(cuDeviceGetDefaultMemPool, 11020, cuDeviceGetDefaultMemPool, (CUmempool *, CUdevice))                     \
    X(cuMemGetDefaultMemPool, 13000, cuMemGetDefaultMemPool, (CUmempool *, CUlocation *, int))                  \
    X(cuMemGetMemPool, 13000, cuMemGetMemPool, (CUmempool *, CUlocation *, int))                                \
    X(cuMemCreate, 10020, cuMemCreate, (CUhandle *, size_t, const CUmemprop *, unsigned long long))             \
    X(cuMemRelease, 10020, cuMemRelease, (CUhandle))                                                            \
    X(cuMemRetainAllocationHandle, 11000, cuMemRetainAllocationHandle, (CUhandle *, void *))                    \
    X(cuMemMap, 10020, cuMemMap, (CUdeviceptr, size_t, size_t, CUhandle, unsigned long long))                   \
    X(cuMemUnmap, 10020, cuMemUnmap, (CUdeviceptr, size_t))                                                     \
    X(cuMemExportToShareableHandle, 10020, cuMemExportToShareableHandle,                                        \
      (void *, CUhandle, int, unsigned long long))                                                              \
    X(cuMemGetHandleForAddressRange, 11070, cuMemGetHandleForAddressRange,                                      \
      (void *, CUdeviceptr, size_t, int, unsigned long long))                                                   \
    X(cuIpcGetMemHandle, 4010, cuIpcGetMemHandle, (void *, CUdeviceptr))                                        \
    X(cuIpcCloseMemHandle, 4010, cuIpcCloseMemHandle, (CUdeviceptr))                                            \
    X(cuMemMapArrayAsync, 11010, cuMemMapArrayAsync, (CUmapinfo *, unsigned int, CUstream))                     \
    X(cuMemMapArrayAsync, 11010, cuMemMapArrayAsync_ptsz, (CUmapinfo *, unsigned int, CUstream))                \
    X(cuArrayCreate, 2000, cuArrayCreate, (CUarray *, const CUarray2_v1 *))                                     \
    X(cuArrayCreate, 3020, cuArrayCreate_v2, (CUarray *, const CUarray2 *))                                     \
    X(cuArray3DCreate, 2000, cuArray3DCreate, (CUarray *, const CUarray3_v1 *))                                 \
    X(cuArray3DCreate, 3020, cuArray3DCreate_v2, (CUarray *, const CUarray3 *))                                 \
    X(cuArrayDestroy, 2000, cuArrayDestroy, (CUarray))                                                          \
    X(cuMipmappedArrayCreate, 5000, cuMipmappedArrayCreate, (CUmipmap *, const CUarray3 *, unsigned int))       \
    X(cuMipmappedArrayDestroy, 5000, cuMipmappedArrayDestroy, (CUmipmap))                                       \
    X(cuGraphInstantiate, 10000, cuGraphInstantiate, (CUexec *, CUgraph, CUnode *, char *, size_t))             \
    X(cuGraphInstantiate, 11000, cuGraphInstantiate_v2, (CUexec *, CUgraph, CUnode *, char *, size_t))          \
    X(cuGraphInstantiateWithFlags, 11040, cuGraphInstantiateWithFlags, (CUexec *, CUgraph, unsigned long long)) \
    X(cuGraphInstantiateWithParams, 12000, cuGraphInstantiateWithParams, (CUexec *, CUgraph, CUinstantiate *))  \
    X(cuGraphInstantiateWithParams, 12000, cuGraphInstantiateWithParams_ptsz,                                   \
      (CUexec *, CUgraph, CUinstantiate *))                                                                     \
    X(cuGraphUpload, 11010, cuGraphUpload, (CUexec, CUstream))                                                  \
    X(cuGraphUpload, 11010, cuGraphUpload_ptsz, (CUexec, CUstream))                                             \
    X(cuGraphLaunch, 10000, cuGraphLaunch, (CUexec, CUstream))                                                  \
    X(cuGraphLaunch, 10000, cuGraphLaunch_ptsz, (CUexec, CUstream))                                             \
    X(cuGraphExecDestroy, 10000, cuGraphExecDestroy, (CUexec))                                                  \
    X(cuDeviceGraphMemTrim, 11040, cuDeviceGraphMemTrim, (CUdevice))                                            \
    X(cuCtxSetLimit, 3010, cuCtxSetLimit, (int, size_t))                                                        \
    X(cuModuleLoad, 2000, cuModuleLoad, (CUmodule *, const char *))                                             \
    X(cuModuleLoadData, 2000, cuModuleLoadData, (CUmodule *, const void *))                                     \
    X(cuModuleLoadDataEx, 2010, cuModuleLoadDataEx, (CUmodule *, const void *, unsigned int, int *, void **))   \
    X(cuModuleLoadFatBinary, 2000, cuModuleLoadFatBinary, (CUmodule *, const void *))                           \
    X(cuModuleUnload, 2000, cuModuleUnload, (CUmodule))                                                         \
    X(cuLibraryLoadData, 12000, cuLibraryLoadData,                                                              \
      (CUlibrary *, const void *, int *, void **, unsigned int, int *, void **, unsigned int))                  \
    X(cuLibraryLoadFromFile, 12000, cuLibraryLoadFromFile,                                                      \
      (CUlibrary *, const char *, int *, void **, unsigned int, int *, void **, unsigned int))                  \
    X(cuLibraryUnload, 12000, cuLibraryUnload, (CUlibrary))                                                     \
    X(cuMulticastBindMem, 12010, cuMulticastBindMem,                                                            \
      (CUhandle, size_t, CUhandle, size_t, size_t, unsigned long long))                                         \
    X(cuMulticastBindMem, 13010, cuMulticastBindMem_v2,                                                         \
      (CUhandle, CUdevice, size_t, CUhandle, size_t, size_t, unsigned long long))                               \
    X(cuMulticastBindAddr, 12010, cuMulticastBindAddr,                                                          \
      (CUhandle, size_t, CUdeviceptr, size_t, unsigned long long))                                              \
    X(cuMulticastBindAddr, 13010, cuMulticastBindAddr_v2,                                                       \
      (CUhandle, CUdevice, size_t, CUdeviceptr, size_t, unsigned long long))                                    \
    X(cuStreamDestroy, 2000, cuStreamDestroy, (CUstream))                                                       \
    X(cuStreamDestroy, 4000, cuStreamDestroy_v2, (CUstream))                                                    \
    X(cuStreamSynchronize, 2000, cuStreamSynchronize, (CUstream))                                               \
    X(cuStreamSynchronize, 7000, cuStreamSynchronize_ptsz, (CUstream))                                          \
    X(cuEventSynchronize, 2000, cuEventSynchronize, (CUevent))                                                  \
    X(cuCtxSynchronize, 2000, cuCtxSynchronize, (void))                                                         \
    X(cuCtxSynchronize, 13000, cuCtxSynchronize_v2, (CUcontext))                                                \
    X(cuGetProcAddress, 11030, cuGetProcAddress, (const char *, void **, int, uint64_t))                        \
    X(cuGetProcAddress, 12000, cuGetProcAddress_v2, (const char *, void **, int, uint64_t, int *))

/* HELPERS lists the driver's functions that this library only calls. */
#define HELPERS(X)                                                \
    X(cuCtxPushCurrent_v2, (CUcontext))                           \
    X(cuCtxPopCurrent_v2, (CUcontext *))                          \
    X(cuDeviceGetCount, (int *))                                  \
    X(cuDeviceSetMemPool, (CUdevice, CUmempool))                  \
    X(cuMemPoolGetAttribute, (CUmempool, int, void *))            \
    X(cuStreamGetCtx, (CUstream, CUcontext *))                    \
    X(cuStreamIsCapturing, (CUstream, int *))                     \
    X(cuStreamIsCapturing_ptsz, (CUstream, int *))                \
    X(cuStreamWaitEvent, (CUstream, CUevent, unsigned int))       \
    X(cuEventCreate, (CUevent *, unsigned int))                   \
    X(cuEventRecord, (CUevent, CUstream))                         \
    X(cuEventQuery, (CUevent))                                    \
    X(cuEventDestroy_v2, (CUevent))                               \
    X(cuThreadExchangeStreamCaptureMode, (int *))                 \
    X(cuGraphGetNodes, (CUgraph, CUnode *, size_t *))             \
    X(cuGraphNodeGetType, (CUnode, int *))                        \
    X(cuGraphMemAllocNodeGetParams, (CUnode, CUallocnode *))      \
    X(cuGraphChildGraphNodeGetGraph, (CUnode, CUgraph *))         \
    X(cuDeviceGetGraphMemAttribute, (CUdevice, int, void *))      \
    X(cuCtxGetCurrent, (CUcontext *))                             \
    X(cuCtxGetDevice, (CUdevice *))                               \
    X(cuCtxGetLimit, (size_t *, int))                             \
    X(cuDeviceGetAttribute, (int *, int, CUdevice))               \
    X(cuDeviceGetUuid, (CUuuid *, CUdevice))                      \
    X(cuDeviceGetUuid_v2, (CUuuid *, CUdevice))                   \
    X(cuDevicePrimaryCtxGetState, (CUdevice, unsigned int *, int *))

#define OVERRIDDEN(base, since, name, arguments) CUresult(*name) arguments;
#define MEMBER(name, arguments) CUresult(*name) arguments;
struct driver {
    OVERRIDES(OVERRIDDEN)
    HELPERS(MEMBER)
};
#undef OVERRIDDEN
#undef MEMBER

#define EXPORT __attribute__((visibility("default")))
#define DECLARE(base, since, name, arguments) EXPORT CUresult name arguments;
OVERRIDES(DECLARE)
#undef DECLARE

#endif
