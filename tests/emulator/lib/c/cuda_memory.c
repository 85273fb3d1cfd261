/* SPDX-License-Identifier: Apache-2.0 */

/* Memory of the current context, host memory, and what moves data: nothing
 * moves, but pointers are checked. */
#define _GNU_SOURCE
#include <string.h>
#include <sys/mman.h>

#include "cuda_internal.h"

enum { PITCH = 512 };

static CUresult allocate_large(const char *call, CUdeviceptr *out, struct context *c, uint64_t size, bool below)
{
    struct device *d = &devices[c->device];
    uint64_t bytes = round_up(size, BLOCK);
    if (bytes < size || bytes > INT64_MAX)
        return CUDA_ERROR_OUT_OF_MEMORY;
    TRY(charge(call, d, (int64_t)bytes));
    lock();
    struct range *r = below ? range_low(RANGE_DEVICE, c->device, c, size) : range_take(RANGE_DEVICE, c->device, c, size);
    if (r) {
        r->charged = bytes;
        *out = r->at;
    }
    unlock();
    if (r)
        return CUDA_SUCCESS;
    charge(call, d, -(int64_t)bytes);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

static bool take_small(CUdeviceptr *out, struct context *c, uint64_t size)
{
    lock();
    struct range *r = range_small(c->device, c, size);
    if (r)
        *out = r->at;
    unlock();
    return r;
}

/* A block is added only where nothing else serves at that moment, so that none
 * stays that nobody has a part of. */
static CUresult grow_small(const char *call, CUdeviceptr *out, struct context *c, uint64_t size)
{
    struct device *d = &devices[c->device];
    if (take_small(out, c, size)) /* another thread was quicker to add one */
        return CUDA_SUCCESS;
    TRY(charge(call, d, (int64_t)BLOCK));
    lock();
    struct range *r = range_small(c->device, c, size);
    bool added = !r && range_add_block(c->device);
    if (added)
        r = range_small(c->device, c, size);
    if (r)
        *out = r->at;
    unlock();
    if (!added)
        charge(call, d, -(int64_t)BLOCK);
    return r ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult allocate_small(const char *call, CUdeviceptr *out, struct context *c, uint64_t size)
{
    if (take_small(out, c, size))
        return CUDA_SUCCESS;
    pthread_mutex_lock(&growing);
    CUresult r = grow_small(call, out, c, size);
    pthread_mutex_unlock(&growing);
    return r;
}

CUresult allocate_in(const char *call, CUdeviceptr *out, struct context *c, uint64_t size)
{
    return size < BLOCK ? allocate_small(call, out, c, size) : allocate_large(call, out, c, size, false);
}

CUresult allocate(const char *call, CUdeviceptr *out, uint64_t size)
{
    struct context *c;
    TRY(current(&c));
    MUST(out && size);
    TRY(unsafe_in_capture());
    return allocate_in(call, out, c, size);
}

API CUresult cuMemAlloc_v2(CUdeviceptr *out, size_t size) { return allocate("cuMemAlloc_v2", out, size); }

API CUresult cuMemAlloc(CUdeviceptr_v1 *out, unsigned int size)
{
    struct context *c;
    CUdeviceptr at;
    TRY(current(&c));
    MUST(out && size);
    TRY(unsafe_in_capture());
    TRY(allocate_large("cuMemAlloc", &at, c, size, true));
    *out = (CUdeviceptr_v1)at;
    return CUDA_SUCCESS;
}

static CUresult pitched(size_t *pitch, size_t width, size_t height, unsigned int element)
{
    MUST(pitch && width && height && (element == 4 || element == 8 || element == 16));
    *pitch = round_up(width, PITCH);
    MUST(*pitch >= width && height <= SIZE_MAX / *pitch);
    return CUDA_SUCCESS;
}

API CUresult cuMemAllocPitch_v2(CUdeviceptr *out, size_t *pitch, size_t width, size_t height, unsigned int element)
{
    TRY(ready());
    TRY(pitched(pitch, width, height, element));
    return allocate("cuMemAllocPitch_v2", out, *pitch * height);
}

API CUresult cuMemAllocPitch(CUdeviceptr_v1 *out, unsigned int *pitch, unsigned int width, unsigned int height, unsigned int element)
{
    struct context *c;
    CUdeviceptr at;
    size_t wide = 0;
    TRY(current(&c));
    MUST(out && pitch);
    TRY(pitched(&wide, width, height, element));
    TRY(unsafe_in_capture());
    TRY(allocate_large("cuMemAllocPitch", &at, c, wide * height, true));
    *pitch = (unsigned int)wide;
    *out = (CUdeviceptr_v1)at;
    return CUDA_SUCCESS;
}

static CUresult release(const char *call, CUdeviceptr at)
{
    struct context *c;
    TRY(current(&c));
    if (!at)
        return CUDA_SUCCESS;
    TRY(unsafe_in_capture());
    lock();
    struct range *r = range_at(at);
    if (r && (r->kind == RANGE_DEVICE || r->kind == RANGE_MANAGED))
        return drop_unlock(call, r);
    if (r && r->kind == RANGE_POOL)
        return pool_free(call, r, NULL); /* "the driver assumes that all accesses to the allocation are complete" */
    if (r && r->kind == RANGE_IMPORTED && r->owner)
        return pool_close(call, r);
    if (r && r->kind == RANGE_GRAPH)
        return graph_memory_free(r, NULL); /* "immediately upon the freeing call to cudaFree()" */
    unlock();
    return CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuMemFree_v2(CUdeviceptr at) { return release("cuMemFree_v2", at); }
API CUresult cuMemFree(CUdeviceptr_v1 at) { return release("cuMemFree", at); }

static CUresult info(const char *call, uint64_t *unused, uint64_t *total)
{
    struct context *c;
    TRY(current(&c));
    *total = devices[c->device].total;
    return free_memory(call, &devices[c->device], unused);
}

API CUresult cuMemGetInfo_v2(size_t *unused, size_t *total)
{
    uint64_t f, t;
    TRY(info("cuMemGetInfo_v2", &f, &t));
    if (unused) /* a real driver takes NULL for what is not asked for; nothing says so */
        *unused = f;
    if (total)
        *total = t;
    return CUDA_SUCCESS;
}

API CUresult cuMemGetInfo(unsigned int *unused, unsigned int *total)
{
    uint64_t f, t;
    TRY(info("cuMemGetInfo", &f, &t));
    if (unused)
        *unused = f < UINT32_MAX ? (unsigned int)f : UINT32_MAX;
    if (total)
        *total = t < UINT32_MAX ? (unsigned int)t : UINT32_MAX;
    return CUDA_SUCCESS;
}

static CUresult address_range(uint64_t *base, uint64_t *size, CUdeviceptr at)
{
    struct context *c;
    TRY(current(&c));
    lock();
    struct range *r = range_around(at);
    if (r) {
        *base = r->at;
        *size = r->size;
    }
    unlock();
    return r ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

API CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr at)
{
    uint64_t b, s;
    TRY(address_range(&b, &s, at));
    if (base)
        *base = b;
    if (size)
        *size = s;
    return CUDA_SUCCESS;
}

API CUresult cuMemGetAddressRange(CUdeviceptr_v1 *base, unsigned int *size, CUdeviceptr_v1 at)
{
    uint64_t b, s;
    TRY(address_range(&b, &s, at));
    if (base)
        *base = (CUdeviceptr_v1)b;
    if (size)
        *size = (unsigned int)s;
    return CUDA_SUCCESS;
}

/* --- memory of the host ---------------------------------------------------- */

static CUresult host(enum kind kind, struct context *c, uint64_t *out, size_t size)
{
    void *p = mmap(NULL, round_up(size, 4096), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    lock();
    struct range *r = range_adopt(kind, c->device, c, (uintptr_t)p, size);
    unlock();
    if (!r) {
        munmap(p, size);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *out = (uintptr_t)p;
    return CUDA_SUCCESS;
}

API CUresult cuMemAllocManaged(CUdeviceptr *out, size_t size, unsigned int flags)
{
    struct context *c;
    uint64_t at;
    TRY(current(&c));
    MUST(out && size && (flags == CU_MEM_ATTACH_GLOBAL || flags == CU_MEM_ATTACH_HOST));
    TRY(unsafe_in_capture());
    TRY(host(RANGE_MANAGED, c, &at, size));
    *out = at;
    return CUDA_SUCCESS;
}

static CUresult host_alloc(void **out, size_t size)
{
    struct context *c;
    uint64_t at;
    TRY(current(&c));
    MUST(out && size);
    TRY(host(RANGE_HOST, c, &at, size));
    *out = (void *)(uintptr_t)at;
    return CUDA_SUCCESS;
}

API CUresult cuMemAllocHost_v2(void **out, size_t size) { return host_alloc(out, size); }
API CUresult cuMemAllocHost(void **out, unsigned int size) { return host_alloc(out, size); }

API CUresult cuMemHostAlloc(void **out, size_t size, unsigned int flags)
{
    MUST(flags <= 7);
    return host_alloc(out, size);
}

static CUresult host_end(void *at, bool registered, CUresult none)
{
    TRY(ready());
    lock();
    struct range *r = range_at((uintptr_t)at);
    bool is = r && r->kind == RANGE_HOST && !r->owner != registered;
    if (is)
        range_give(r);
    unlock();
    return is ? CUDA_SUCCESS : none;
}

API CUresult cuMemFreeHost(void *at) { return host_end(at, false, CUDA_ERROR_INVALID_VALUE); }

static CUresult host_register(void *at, size_t size)
{
    struct context *c;
    TRY(current(&c));
    MUST(at && size);
    lock();
    struct range *r = range_around((uintptr_t)at) ? NULL : range_adopt(RANGE_HOST, c->device, c, (uintptr_t)at, size);
    if (r)
        r->owner = r;
    unlock();
    return r ? CUDA_SUCCESS : CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
}

API CUresult cuMemHostRegister(void *at, size_t size, unsigned int flags) { (void)flags; return host_register(at, size); }
API CUresult cuMemHostRegister_v2(void *at, size_t size, unsigned int flags) { (void)flags; return host_register(at, size); }
API CUresult cuMemHostUnregister(void *at) { return host_end(at, true, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED); }

API CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *out, void *at, unsigned int flags)
{
    struct context *c;
    TRY(current(&c));
    MUST(out && !flags);
    lock();
    struct range *r = range_around((uintptr_t)at);
    bool is = r && (r->kind == RANGE_HOST || r->kind == RANGE_MANAGED);
    unlock();
    MUST(is);
    *out = (uintptr_t)at;
    return CUDA_SUCCESS;
}

/* --- what a pointer is ----------------------------------------------------- */

static CUresult pointer_attribute(void *out, int attribute, CUdeviceptr at)
{
    struct context *c;
    TRY(current(&c));
    MUST(out);
    CUresult result = CUDA_SUCCESS;
    lock();
    struct range *r = range_around(at);
    const CUmemPoolProps *pool = r && r->kind == RANGE_POOL ? pool_props(r->owner) : NULL;
    bool managed = r && (r->kind == RANGE_MANAGED || (pool && pool->allocType == CU_MEM_ALLOCATION_TYPE_MANAGED));
    bool on_host = r && (r->kind == RANGE_HOST || (pool && !managed && pool->location.type >= CU_MEM_LOCATION_TYPE_HOST &&
                                                   pool->location.type <= CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT));
    if (!r) {
        result = CUDA_ERROR_INVALID_VALUE;
    } else {
        switch (attribute) {
        case 1: *(CUcontext *)out = r->kind == RANGE_POOL ? NULL : (CUcontext)r->ctx; break; /* CONTEXT */
        case 2: *(unsigned int *)out = on_host ? 1 : 2; break;              /* MEMORY_TYPE */
        case 3: case 11: *(CUdeviceptr *)out = attribute == 3 ? at : r->at; break; /* DEVICE_POINTER, RANGE_START_ADDR */
        case 4: *(void **)out = (void *)(uintptr_t)at; if (!on_host && !managed) result = CUDA_ERROR_INVALID_VALUE; break;
        case 8: *(unsigned int *)out = managed; break;                      /* IS_MANAGED */
        case 9: *(int *)out = r->device; break;                             /* DEVICE_ORDINAL */
        case 10: *(unsigned int *)out = r->kind == RANGE_DEVICE; break;     /* IS_LEGACY_CUDA_IPC_CAPABLE */
        case 12: *(size_t *)out = r->size; break;                           /* RANGE_SIZE */
        case 13: *(unsigned int *)out = 1; break;                           /* MAPPED */
        case 17: *(CUmemoryPool *)out = r->kind == RANGE_POOL ? r->owner : NULL; break; /* MEMPOOL_HANDLE */
        default: result = CUDA_ERROR_NOT_SUPPORTED;
        }
    }
    unlock();
    return result;
}

API CUresult cuPointerGetAttribute(void *out, int attribute, CUdeviceptr at) { return pointer_attribute(out, attribute, at); }

API CUresult cuPointerGetAttributes(unsigned int count, int *attributes, void **out, CUdeviceptr at)
{
    struct context *c;
    TRY(current(&c));
    MUST(count && attributes && out);
    for (unsigned int i = 0; i < count; i++)
        pointer_attribute(out[i], attributes[i], at); /* what does not apply stays as it is */
    return CUDA_SUCCESS;
}

/* --- copies and sets ------------------------------------------------------- */

/* on_card says that so many bytes from an address are memory that kernels may
 * use; for reservations what is mapped is not looked at. */
static CUresult on_card(CUdeviceptr at, uint64_t n)
{
    struct context *c;
    TRY(current(&c));
    if (!n)
        return CUDA_SUCCESS;
    lock();
    struct range *r = range_around(at);
    bool is = r && n <= r->size - (at - r->at);
    unlock();
    return is ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult copy(CUdeviceptr a, CUdeviceptr b, const void *memory, uint64_t n)
{
    if (a)
        TRY(on_card(a, n));
    if (b)
        TRY(on_card(b, n));
    MUST((a && b) || ((a || b) && memory) || !n);
    return CUDA_SUCCESS;
}

/* Work on a stream: a capture takes it down. */
static CUresult on_stream(CUstream s, int node, CUresult checked)
{
    struct context *c;
    CUresult r;
    TRY(checked);
    TRY(stream_check(s, &c));
    if (capture_work(s, node, 0, &r))
        return r;
    stream_work(s, c, 0);
    return CUDA_SUCCESS;
}

/* A copy that is on no stream is done when the call returns, after what is on the
 * default one. */
static CUresult at_once(CUstream s, CUresult checked)
{
    struct context *c;
    TRY(checked);
    TRY(current(&c));
    legacy_wait(s, c);
    return CUDA_SUCCESS;
}

#define COPY(name, parameters, ...)                                                                                            \
    API CUresult name parameters { return at_once(NULL, copy(__VA_ARGS__)); }
#define COPY_PTDS(name, parameters, ...)                                                                                       \
    API CUresult name parameters { return at_once(CU_STREAM_PER_THREAD, copy(__VA_ARGS__)); }
#define COPY_ASYNC(name, parameters, ...)                                                                                      \
    API CUresult name parameters { return on_stream(s, CU_GRAPH_NODE_TYPE_MEMCPY, copy(__VA_ARGS__)); }
#define COPY_PTSZ(name, parameters, ...)                                                                                       \
    API CUresult name parameters { return on_stream(per_thread(s), CU_GRAPH_NODE_TYPE_MEMCPY, copy(__VA_ARGS__)); }

COPY(cuMemcpyHtoD, (CUdeviceptr_v1 to, const void *from, unsigned int n), to, 0, from, n)

/* Words that are copied one at a time have contents. */
API CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t n)
{
    uint64_t word;
    TRY(at_once(NULL, copy(to, 0, from, n)));
    if (n != sizeof word)
        return CUDA_SUCCESS;
    memcpy(&word, from, sizeof word);
    return store(to, word);
}
API CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t n)
{
    uint64_t word;
    TRY(at_once(NULL, copy(0, from, to, n)));
    if (n != sizeof word)
        return CUDA_SUCCESS;
    TRY(load_word(from, &word));
    memcpy(to, &word, sizeof word);
    return CUDA_SUCCESS;
}

COPY_PTDS(cuMemcpyHtoD_v2_ptds, (CUdeviceptr to, const void *from, size_t n), to, 0, from, n)
COPY(cuMemcpyDtoH, (void *to, CUdeviceptr_v1 from, unsigned int n), 0, from, to, n)
COPY_PTDS(cuMemcpyDtoH_v2_ptds, (void *to, CUdeviceptr from, size_t n), 0, from, to, n)
COPY(cuMemcpyDtoD, (CUdeviceptr_v1 to, CUdeviceptr_v1 from, unsigned int n), to, from, NULL, n)
COPY(cuMemcpyDtoD_v2, (CUdeviceptr to, CUdeviceptr from, size_t n), to, from, NULL, n)
COPY_PTDS(cuMemcpyDtoD_v2_ptds, (CUdeviceptr to, CUdeviceptr from, size_t n), to, from, NULL, n)
COPY_ASYNC(cuMemcpyHtoDAsync_v2, (CUdeviceptr to, const void *from, size_t n, CUstream s), to, 0, from, n)
COPY_PTSZ(cuMemcpyHtoDAsync_v2_ptsz, (CUdeviceptr to, const void *from, size_t n, CUstream s), to, 0, from, n)
COPY_ASYNC(cuMemcpyDtoHAsync_v2, (void *to, CUdeviceptr from, size_t n, CUstream s), 0, from, to, n)
COPY_PTSZ(cuMemcpyDtoHAsync_v2_ptsz, (void *to, CUdeviceptr from, size_t n, CUstream s), 0, from, to, n)
COPY_ASYNC(cuMemcpyDtoDAsync_v2, (CUdeviceptr to, CUdeviceptr from, size_t n, CUstream s), to, from, NULL, n)
COPY_PTSZ(cuMemcpyDtoDAsync_v2_ptsz, (CUdeviceptr to, CUdeviceptr from, size_t n, CUstream s), to, from, NULL, n)

#define SET(bits, type, width)                                                                                                 \
    API CUresult cuMemsetD##bits(CUdeviceptr_v1 at, type v, unsigned int n) { (void)v; return on_card(at, (uint64_t)n * width); } \
    API CUresult cuMemsetD##bits##_v2(CUdeviceptr at, type v, size_t n) { (void)v; return on_card(at, (uint64_t)n * width); }   \
    API CUresult cuMemsetD##bits##_v2_ptds(CUdeviceptr at, type v, size_t n) { (void)v; return on_card(at, (uint64_t)n * width); } \
    API CUresult cuMemsetD##bits##Async(CUdeviceptr at, type v, size_t n, CUstream s)                                           \
    {                                                                                                                          \
        (void)v;                                                                                                               \
        return on_stream(s, CU_GRAPH_NODE_TYPE_MEMSET, on_card(at, (uint64_t)n * width));                                       \
    }                                                                                                                          \
    API CUresult cuMemsetD##bits##Async_ptsz(CUdeviceptr at, type v, size_t n, CUstream s)                                      \
    {                                                                                                                          \
        (void)v;                                                                                                               \
        return on_stream(per_thread(s), CU_GRAPH_NODE_TYPE_MEMSET, on_card(at, (uint64_t)n * width));                           \
    }

SET(8, unsigned char, 1)
SET(16, unsigned short, 2)
SET(32, unsigned int, 4)
