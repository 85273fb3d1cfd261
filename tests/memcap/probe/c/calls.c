/* SPDX-License-Identifier: Apache-2.0 */

#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "probe.h"

/* Rows of arrays are 4 KiB: 1,024 elements of 4 bytes. */
enum { ROW = 4096, COLUMNS = 1024 };

static CUmemAllocationProp on_device(struct seat *s)
{
    return (CUmemAllocationProp){.type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {CU_MEM_LOCATION_TYPE_DEVICE, s->device}};
}

/* Linear memory. */

static CUresult take_v1(struct seat *s, struct item *i, uint64_t n)
{
    CUdeviceptr_v1 p = 0;
    CUresult r = s->cu->cuMemAlloc(&p, (unsigned)n);
    i->a = p;
    return r;
}
static CUresult give_v1(struct seat *s, struct item *i) { return s->cu->cuMemFree((CUdeviceptr_v1)i->a); }

static CUresult take_v2(struct seat *s, struct item *i, uint64_t n) { return s->cu->cuMemAlloc_v2(&i->a, n); }
static CUresult give_v2(struct seat *s, struct item *i) { return s->cu->cuMemFree_v2(i->a); }

static uint64_t small(uint64_t n) { return n / 64; }
static CUresult take_small(struct seat *s, struct item *i, uint64_t n) { return s->cu->cuMemAlloc_v2(&i->a, small(n)); }

static CUresult take_pitch_v1(struct seat *s, struct item *i, uint64_t n)
{
    CUdeviceptr_v1 p = 0;
    unsigned pitch = 0;
    CUresult r = s->cu->cuMemAllocPitch(&p, &pitch, ROW, (unsigned)(n / ROW), 4);
    i->a = p;
    return r;
}
static CUresult take_pitch(struct seat *s, struct item *i, uint64_t n)
{
    size_t pitch = 0;
    return s->cu->cuMemAllocPitch_v2(&i->a, &pitch, ROW, n / ROW, 4);
}
static CUresult take_managed(struct seat *s, struct item *i, uint64_t n) { return s->cu->cuMemAllocManaged(&i->a, n, CU_MEM_ATTACH_GLOBAL); }

/* Pools. What is freed goes back at once, so that each request is one of the
 * driver. */

static CUresult take_async(struct seat *s, struct item *i, uint64_t n)
{
    CUresult r = s->cu->cuMemAllocAsync(&i->a, n, s->stream);
    return r != CUDA_SUCCESS ? r : s->cu->cuStreamSynchronize(s->stream);
}
static CUresult from_pool(struct seat *s, struct item *i, uint64_t n, CUmemoryPool *pool, uint64_t keep)
{
    if (!*pool) {
        CUmemPoolProps props = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {CU_MEM_LOCATION_TYPE_DEVICE, s->device}};
        CUresult r = s->cu->cuMemPoolCreate(pool, &props);
        if (r == CUDA_SUCCESS)
            r = s->cu->cuMemPoolSetAttribute(*pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &keep);
        if (r != CUDA_SUCCESS)
            return r;
    }
    CUresult r = s->cu->cuMemAllocFromPoolAsync(&i->a, n, *pool, s->stream);
    return r != CUDA_SUCCESS ? r : s->cu->cuStreamSynchronize(s->stream);
}
static CUresult take_pool(struct seat *s, struct item *i, uint64_t n) { return from_pool(s, i, n, &s->pool, 0); }
static CUresult take_kept(struct seat *s, struct item *i, uint64_t n) { return from_pool(s, i, n, &s->kept, UINT64_MAX); }
static CUresult give_async(struct seat *s, struct item *i)
{
    CUresult r = s->cu->cuMemFreeAsync(i->a, s->stream);
    return r != CUDA_SUCCESS ? r : s->cu->cuStreamSynchronize(s->stream);
}

/* Physical memory, and addresses that it is mapped at. */

/* Physical memory comes in whole grains. */
enum { GRAIN = 2 << 20 };
static uint64_t grains(uint64_t n) { return (n + GRAIN - 1) / GRAIN * GRAIN; }

static CUresult take_vmm(struct seat *s, struct item *i, uint64_t n)
{
    CUmemAllocationProp prop = on_device(s);
    return s->cu->cuMemCreate(&i->a, grains(n), &prop, 0);
}
static CUresult give_vmm(struct seat *s, struct item *i) { return s->cu->cuMemRelease(i->a); }

/* take_mapped leaves memory that lives by its mapping alone: the handle is
 * released. */
static CUresult take_mapped(struct seat *s, struct item *i, uint64_t n)
{
    CUmemGenericAllocationHandle h;
    CUmemAllocationProp prop = on_device(s);
    n = grains(n);
    CUresult r = s->cu->cuMemCreate(&h, n, &prop, 0);
    if (r != CUDA_SUCCESS)
        return r;
    r = s->cu->cuMemAddressReserve(&i->a, n, 0, 0, 0);
    if (r == CUDA_SUCCESS) {
        i->b = n;
        r = s->cu->cuMemMap(i->a, n, 0, h, 0);
        if (r != CUDA_SUCCESS)
            s->cu->cuMemAddressFree(i->a, n);
    }
    CUresult freed = s->cu->cuMemRelease(h);
    return r != CUDA_SUCCESS ? r : freed;
}
static CUresult give_mapped(struct seat *s, struct item *i)
{
    CUresult r = s->cu->cuMemUnmap(i->a, i->b);
    return r != CUDA_SUCCESS ? r : s->cu->cuMemAddressFree(i->a, i->b);
}

/* take_retained leaves memory that lives by a second reference, got from where
 * it was mapped. */
static CUresult take_retained(struct seat *s, struct item *i, uint64_t n)
{
    CUresult r = take_mapped(s, i, n);
    if (r != CUDA_SUCCESS)
        return r;
    r = s->cu->cuMemRetainAllocationHandle(&i->c, (void *)(uintptr_t)i->a);
    CUresult freed = give_mapped(s, i);
    return r != CUDA_SUCCESS ? r : freed;
}
static CUresult give_retained(struct seat *s, struct item *i) { return s->cu->cuMemRelease(i->c); }

/* Arrays. */

static CUresult take_array_v1(struct seat *s, struct item *i, uint64_t n)
{
    CUDA_ARRAY_DESCRIPTOR_v1 d = {COLUMNS, (unsigned)(n / ROW), CU_AD_FORMAT_UNSIGNED_INT32, 1};
    return s->cu->cuArrayCreate((CUarray *)&i->a, &d);
}
static CUresult take_array(struct seat *s, struct item *i, uint64_t n)
{
    CUDA_ARRAY_DESCRIPTOR d = {COLUMNS, n / ROW, CU_AD_FORMAT_UNSIGNED_INT32, 1};
    return s->cu->cuArrayCreate_v2((CUarray *)&i->a, &d);
}
static CUresult take_3d_v1(struct seat *s, struct item *i, uint64_t n)
{
    CUDA_ARRAY3D_DESCRIPTOR_v1 d = {256, 256, (unsigned)(n >> 18), CU_AD_FORMAT_UNSIGNED_INT32, 1, 0};
    return s->cu->cuArray3DCreate((CUarray *)&i->a, &d);
}
static CUresult take_3d(struct seat *s, struct item *i, uint64_t n)
{
    CUDA_ARRAY3D_DESCRIPTOR d = {256, 256, n >> 18, CU_AD_FORMAT_UNSIGNED_INT32, 1, 0};
    return s->cu->cuArray3DCreate_v2((CUarray *)&i->a, &d);
}
static CUresult give_array(struct seat *s, struct item *i) { return s->cu->cuArrayDestroy((CUarray)i->a); }

/* Each level has a quarter of the elements of the one before. */
static uint64_t mipmap(uint64_t n) { return grains(n + n / 4 + n / 16); }
static CUresult take_mipmap(struct seat *s, struct item *i, uint64_t n)
{
    CUDA_ARRAY3D_DESCRIPTOR d = {COLUMNS, n / ROW, 0, CU_AD_FORMAT_UNSIGNED_INT32, 1, 0};
    return s->cu->cuMipmappedArrayCreate((CUmipmappedArray *)&i->a, &d, 3);
}
static CUresult give_mipmap(struct seat *s, struct item *i) { return s->cu->cuMipmappedArrayDestroy((CUmipmappedArray)i->a); }

/* Graphs whose nodes allocate. The memory comes at the launch, and stays when
 * the graph has gone. */

static CUresult launch(struct seat *s, CUgraph graph)
{
    CUgraphExec exec;
    CUresult r = s->cu->cuGraphInstantiateWithFlags(&exec, graph, 0);
    if (r != CUDA_SUCCESS)
        return r;
    r = s->cu->cuGraphLaunch(exec, s->stream);
    if (r == CUDA_SUCCESS)
        r = s->cu->cuStreamSynchronize(s->stream);
    CUresult gone = s->cu->cuGraphExecDestroy(exec);
    return r != CUDA_SUCCESS ? r : gone;
}
static CUresult alloc_node(struct seat *s, CUgraph graph, struct item *i, uint64_t n)
{
    CUgraphNode node;
    CUDA_MEM_ALLOC_NODE_PARAMS p = {
        .poolProps = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {CU_MEM_LOCATION_TYPE_DEVICE, s->device}},
        .bytesize = n,
    };
    CUresult r = s->cu->cuGraphAddMemAllocNode(&node, graph, NULL, 0, &p);
    i->a = p.dptr;
    return r;
}
static CUresult take_graph(struct seat *s, struct item *i, uint64_t n)
{
    CUgraph graph;
    CUresult r = s->cu->cuGraphCreate(&graph, 0);
    if (r != CUDA_SUCCESS)
        return r;
    r = alloc_node(s, graph, i, n);
    if (r == CUDA_SUCCESS)
        r = launch(s, graph);
    s->cu->cuGraphDestroy(graph);
    return r;
}
static CUresult take_captured(struct seat *s, struct item *i, uint64_t n)
{
    CUgraph graph = NULL;
    CUresult r = s->cu->cuStreamBeginCapture_v2(s->stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
    if (r != CUDA_SUCCESS)
        return r;
    r = s->cu->cuMemAllocAsync(&i->a, n, s->stream);
    CUresult ended = s->cu->cuStreamEndCapture(s->stream, &graph);
    if (r == CUDA_SUCCESS)
        r = ended;
    if (r == CUDA_SUCCESS)
        r = launch(s, graph);
    if (graph)
        s->cu->cuGraphDestroy(graph);
    return r;
}
static CUresult give_graph(struct seat *s, struct item *i)
{
    CUresult r = give_async(s, i);
    return r != CUDA_SUCCESS ? r : s->cu->cuDeviceGraphMemTrim(s->device);
}

/* Contexts, and what modules bring along. */

static CUresult take_context(struct seat *s, struct item *i, uint64_t n)
{
    (void)n; /* the driver decides */
    CUcontext made;
    CUresult r = s->cu->cuCtxCreate_v2((CUcontext *)&i->a, 0, s->device);
    /* What was current is so again. To set it instead would leave a place of the stack taken
     * each time, and the stack has an end. */
    return r != CUDA_SUCCESS ? r : s->cu->cuCtxPopCurrent_v2(&made);
}
static CUresult give_context(struct seat *s, struct item *i) { return s->cu->cuCtxDestroy_v2((CUcontext)i->a); }

static CUresult take_module(struct seat *s, struct item *i, uint64_t n)
{
    /* The first line is for an emulated driver, which compiles nothing. */
    char *ptx;
    if (asprintf(&ptx,
                 "// gpu-emulator: blocks %llu\n"
                 ".version 6.0\n.target sm_50\n.address_size 64\n"
                 ".visible .global .align 16 .b8 data[%llu];\n"
                 ".visible .entry nothing()\n{\n\tret;\n}\n",
                 (unsigned long long)(n >> 21), (unsigned long long)n) < 0)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult r = s->cu->cuModuleLoadData((CUmodule *)&i->a, ptx);
    free(ptx);
    return r;
}
static CUresult give_module(struct seat *s, struct item *i) { return s->cu->cuModuleUnload((CUmodule)i->a); }

/* Memory of the host, which is none of the GPU's. */

static CUresult take_host(struct seat *s, struct item *i, uint64_t n) { return s->cu->cuMemHostAlloc((void **)&i->a, n, 0); }
static CUresult give_host(struct seat *s, struct item *i) { return s->cu->cuMemFreeHost((void *)(uintptr_t)i->a); }

#define AT(name) (int)offsetof(struct cuda, name)
#define ASYNC AT(cuMemFreeAsync), AT(cuStreamSynchronize)
#define POOL AT(cuMemAllocFromPoolAsync), AT(cuMemPoolCreate), AT(cuMemPoolSetAttribute), AT(cuMemPoolDestroy), ASYNC
#define MAPPED AT(cuMemCreate), AT(cuMemRelease), AT(cuMemAddressReserve), AT(cuMemAddressFree), AT(cuMemMap), AT(cuMemUnmap)
#define LAUNCH AT(cuGraphDestroy), AT(cuGraphInstantiateWithFlags), AT(cuGraphLaunch), AT(cuGraphExecDestroy), AT(cuDeviceGraphMemTrim), ASYNC

const struct call calls[] = {
    {"cuMemAlloc_v2", take_v2, give_v2, NULL, {AT(cuMemAlloc_v2), AT(cuMemFree_v2), -1}},
    {"cuMemAlloc_v2/small", take_small, give_v2, small, {AT(cuMemAlloc_v2), AT(cuMemFree_v2), -1}},
    {"cuMemAlloc", take_v1, give_v1, NULL, {AT(cuMemAlloc), AT(cuMemFree), -1}},
    {"cuMemAllocPitch_v2", take_pitch, give_v2, NULL, {AT(cuMemAllocPitch_v2), AT(cuMemFree_v2), -1}},
    {"cuMemAllocPitch", take_pitch_v1, give_v1, NULL, {AT(cuMemAllocPitch), AT(cuMemFree), -1}},
    {"cuMemAllocManaged", take_managed, give_v2, NULL, {AT(cuMemAllocManaged), AT(cuMemFree_v2), -1}},
    {"cuMemAllocAsync", take_async, give_async, NULL, {AT(cuMemAllocAsync), ASYNC, -1}},
    {"cuMemAllocFromPoolAsync", take_pool, give_async, NULL, {POOL, -1}},
    {"cuMemAllocFromPoolAsync/kept", take_kept, give_async, NULL, {POOL, -1}},
    {"cuMemCreate", take_vmm, give_vmm, grains, {AT(cuMemCreate), AT(cuMemRelease), -1}},
    {"cuMemCreate/mapped", take_mapped, give_mapped, grains, {MAPPED, -1}},
    {"cuMemCreate/retained", take_retained, give_retained, grains, {MAPPED, AT(cuMemRetainAllocationHandle), -1}},
    {"cuArrayCreate_v2", take_array, give_array, NULL, {AT(cuArrayCreate_v2), AT(cuArrayDestroy), -1}},
    {"cuArrayCreate", take_array_v1, give_array, NULL, {AT(cuArrayCreate), AT(cuArrayDestroy), -1}},
    {"cuArray3DCreate_v2", take_3d, give_array, NULL, {AT(cuArray3DCreate_v2), AT(cuArrayDestroy), -1}},
    {"cuArray3DCreate", take_3d_v1, give_array, NULL, {AT(cuArray3DCreate), AT(cuArrayDestroy), -1}},
    {"cuMipmappedArrayCreate", take_mipmap, give_mipmap, mipmap, {AT(cuMipmappedArrayCreate), AT(cuMipmappedArrayDestroy), -1}},
    {"cuGraphAddMemAllocNode", take_graph, give_graph, NULL, {AT(cuGraphCreate), AT(cuGraphAddMemAllocNode), LAUNCH, -1}},
    {"cuMemAllocAsync/captured", take_captured, give_graph, NULL,
     {AT(cuStreamBeginCapture_v2), AT(cuStreamEndCapture), AT(cuMemAllocAsync), LAUNCH, -1}},
    {"cuCtxCreate_v2", take_context, give_context, NULL, {AT(cuCtxCreate_v2), AT(cuCtxDestroy_v2), AT(cuCtxPopCurrent_v2), -1}},
    {"cuModuleLoadData", take_module, give_module, NULL, {AT(cuModuleLoadData), AT(cuModuleUnload), -1}},
    {"cuMemHostAlloc", take_host, give_host, NULL, {AT(cuMemHostAlloc), AT(cuMemFreeHost), -1}},
    {0},
};

const struct call *find_call(const char *name)
{
    for (const struct call *c = calls; c->name; c++)
        if (!strcmp(c->name, name))
            return c;
    return NULL;
}

static void *at(const struct cuda *cu, int offset)
{
    void *f;
    memcpy(&f, (const char *)cu + offset, sizeof f);
    return f;
}

const char *missing(const struct cuda *cu, const struct call *c)
{
    for (const int *n = c->needs; *n >= 0; n++) {
        if (at(cu, *n))
            continue;
#define F(name, base, since, twin, parameters) \
    if (*n == AT(name)) \
        return #name;
        FUNCTIONS(F)
#undef F
    }
    return NULL;
}

uint64_t unit_of(const struct call *c, uint64_t bytes) { return c->unit ? c->unit(bytes) : bytes; }

const char *sit(struct seat *s, struct cuda *cu, int device, CUresult *r)
{
    *s = (struct seat){.cu = cu};
    if (!cu->cuInit || !cu->cuDeviceGet || !cu->cuDevicePrimaryCtxRetain || !cu->cuCtxSetCurrent || !cu->cuStreamCreate) {
        *r = ABSENT;
        return "the library's basic names";
    }
    if ((*r = cu->cuInit(0)) != CUDA_SUCCESS)
        return "cuInit";
    if ((*r = cu->cuDeviceGet(&s->device, device)) != CUDA_SUCCESS)
        return "cuDeviceGet";
    if ((*r = cu->cuDevicePrimaryCtxRetain(&s->context, s->device)) != CUDA_SUCCESS)
        return "cuDevicePrimaryCtxRetain";
    if ((*r = cu->cuCtxSetCurrent(s->context)) != CUDA_SUCCESS)
        return "cuCtxSetCurrent";
    if ((*r = cu->cuStreamCreate(&s->stream, CU_STREAM_NON_BLOCKING)) != CUDA_SUCCESS)
        return "cuStreamCreate";
    return NULL;
}

CUresult settle(struct seat *s)
{
    CUresult r = s->cu->cuStreamSynchronize ? s->cu->cuStreamSynchronize(s->stream) : CUDA_SUCCESS;
    for (int i = 0; i < 2; i++) {
        CUmemoryPool *pool = i ? &s->kept : &s->pool;
        if (*pool && r == CUDA_SUCCESS)
            r = s->cu->cuMemPoolDestroy(*pool);
        *pool = NULL;
    }
    return r;
}

void leave(struct seat *s)
{
    settle(s);
    s->cu->cuStreamDestroy_v2(s->stream);
    s->cu->cuDevicePrimaryCtxRelease_v2(s->device);
}
