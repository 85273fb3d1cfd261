/* SPDX-License-Identifier: Apache-2.0 */

/* Memory by hand: what its properties mean, and what becomes of it when it was
 * exported. */

#include <unistd.h>

#include "scenario.h"

static CUmemAllocationProp property(struct scene *s, int exports)
{
    return (CUmemAllocationProp){.type = CU_MEM_ALLOCATION_TYPE_PINNED, .requestedHandleTypes = exports, .location = {CU_MEM_LOCATION_TYPE_DEVICE, s->seat.device}};
}

/* Each handle is exported and let go of, and its descriptor stays open: the memory is
 * there, though the program has no handle of it. */
static void created_exported_and_released(struct scene *s)
{
    CUmemAllocationProp prop = property(s, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    uint64_t bytes = s->room / 16;
    for (int i = 0; i < 64; i++) {
        CUmemGenericAllocationHandle handle;
        int fd;
        if (!ASK(s, bytes, s->cu->cuMemCreate(&handle, bytes, &prop, 0)))
            break;
        if (!MUST(s, s->cu->cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0)) || !MUST(s, s->cu->cuMemRelease(handle)))
            return;
    }
}

/* What a library does for each buffer that it registers: export it, open it, let go of
 * all. Nothing of it stays, whatever is charged meanwhile. */
static void registered_and_released(struct scene *s)
{
    CUmemAllocationProp prop = property(s, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    uint64_t bytes = s->room / 16;
    for (int i = 0; i < 400 && !s->failure[0]; i++) {
        CUmemGenericAllocationHandle handle, peer;
        int fd;
        if (!ASK(s, bytes, s->cu->cuMemCreate(&handle, bytes, &prop, 0)))
            continue;
        if (!MUST(s, s->cu->cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0)))
            return;
        MUST(s, s->cu->cuMemImportFromShareableHandle(&peer, (void *)(intptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
        close(fd);
        MUST(s, s->cu->cuMemRelease(handle));
        MUST(s, s->cu->cuMemRelease(peer));
        given_back(s, bytes);
    }
}

/* A way to have memory open that its owner lets go of. */
struct way {
    CUmemGenericAllocationHandle handle;
    CUmemoryPool pool;
    CUdeviceptr at;
};

static int open_handle(struct scene *s, uint64_t bytes, struct way *w)
{
    CUmemAllocationProp prop = property(s, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    CUmemGenericAllocationHandle handle;
    int fd;
    if (!ASK(s, bytes, s->cu->cuMemCreate(&handle, bytes, &prop, 0)) || !MUST(s, s->cu->cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0)) ||
        !MUST(s, s->cu->cuMemImportFromShareableHandle(&w->handle, (void *)(intptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)))
        return 0;
    close(fd);
    return MUST(s, s->cu->cuMemRelease(handle));
}

static int close_handle(struct scene *s, struct way *w) { return MUST(s, s->cu->cuMemRelease(w->handle)); }

static int open_name(struct scene *s, uint64_t bytes, struct way *w)
{
    CUipcMemHandle name;
    CUdeviceptr at;
    return ASK(s, bytes, s->cu->cuMemAlloc_v2(&at, bytes)) && MUST(s, s->cu->cuIpcGetMemHandle(&name, at)) &&
           MUST(s, s->cu->cuIpcOpenMemHandle_v2(&w->at, name, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)) && MUST(s, s->cu->cuMemFree_v2(at));
}

static int close_name(struct scene *s, struct way *w) { return MUST(s, s->cu->cuIpcCloseMemHandle(w->at)); }

/* open_pooled opens an allocation of a pool; its owner frees it and destroys the pool. */
static int open_pooled(struct scene *s, uint64_t bytes, struct way *w)
{
    CUmemPoolProps props = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .handleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                            .location = {CU_MEM_LOCATION_TYPE_DEVICE, s->seat.device}};
    CUmemoryPool pool;
    CUmemPoolPtrExportData data;
    CUdeviceptr at;
    int fd;
    if (!MUST(s, s->cu->cuMemPoolCreate(&pool, &props)))
        return 0;
    if (!ASK(s, bytes, s->cu->cuMemAllocFromPoolAsync(&at, bytes, pool, s->seat.stream))) {
        MUST(s, s->cu->cuMemPoolDestroy(pool));
        return 0;
    }
    if (!MUST(s, s->cu->cuMemPoolExportToShareableHandle(&fd, pool, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0)))
        return 0;
    MUST(s, s->cu->cuMemPoolImportFromShareableHandle(&w->pool, (void *)(intptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
    close(fd);
    return MUST(s, s->cu->cuMemPoolExportPointer(&data, at)) && MUST(s, s->cu->cuMemPoolImportPointer(&w->at, w->pool, &data)) &&
           MUST(s, s->cu->cuMemFreeAsync(at, s->seat.stream)) && MUST(s, s->cu->cuStreamSynchronize(s->seat.stream)) && MUST(s, s->cu->cuMemPoolDestroy(pool));
}

static int close_pooled(struct scene *s, struct way *w)
{
    return MUST(s, s->cu->cuMemFreeAsync(w->at, s->seat.stream)) && MUST(s, s->cu->cuStreamSynchronize(s->seat.stream)) && MUST(s, s->cu->cuMemPoolDestroy(w->pool));
}

/* What was exported and let go of is there as long as it is open. The moment that it is
 * not, it is room again, also for what was refused just before. */
static void room_when_it_ends(struct scene *s, int (*open)(struct scene *, uint64_t, struct way *), int (*end)(struct scene *, struct way *))
{
    uint64_t bytes = s->room / 4;
    for (int i = 0; i < 16 && !s->failure[0]; i++) {
        struct way w;
        CUdeviceptr rest, more;
        if (!open(s, bytes, &w) || !ASK(s, s->room - bytes, s->cu->cuMemAlloc_v2(&rest, s->room - bytes)))
            return;
        if (ASK(s, bytes, s->cu->cuMemAlloc_v2(&more, bytes)))
            fail_scene(s, "room beside what is open yet");
        end(s, &w);
        given_back(s, bytes);
        if (ASK(s, bytes, s->cu->cuMemAlloc_v2(&more, bytes)) && MUST(s, s->cu->cuMemFree_v2(more)))
            given_back(s, bytes);
        if (MUST(s, s->cu->cuMemFree_v2(rest)))
            given_back(s, s->room - bytes);
    }
}

static void room_when_the_importer_lets_go(struct scene *s) { room_when_it_ends(s, open_handle, close_handle); }
static void room_when_the_importer_closes(struct scene *s) { room_when_it_ends(s, open_name, close_name); }
static void room_when_the_importer_frees(struct scene *s) { room_when_it_ends(s, open_pooled, close_pooled); }

/* An allocation of a pool is opened by others, and freed and its pool destroyed all the
 * same: the memory is there as long as it is open. */
static void pool_exported_and_destroyed(struct scene *s)
{
    struct way w;
    for (int i = 0; i < 32 && !s->failure[0]; i++)
        open_pooled(s, s->room / 8, &w);
}

/* The locality domains of a GPU (CUDA 13.4) are parts of its memory. */
static void made_in_a_locality_domain(struct scene *s)
{
    CUmemAllocationProp prop = property(s, 0);
    uint64_t bytes = s->room / 8;
    prop.location = (CUmemLocation){CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN, s->seat.device};
    for (int i = 0; i < 32; i++) {
        CUmemGenericAllocationHandle handle;
        if (!ASK(s, bytes, s->cu->cuMemCreate(&handle, bytes, &prop, 0)))
            break;
    }
}

/* A type that no header has as yet. */
static void made_of_an_unknown_type(struct scene *s)
{
    CUmemAllocationProp prop = property(s, 0);
    CUmemGenericAllocationHandle handle;
    prop.type = 77;
    note(s, "type", (uint64_t)s->cu->cuMemCreate(&handle, s->room / 8, &prop, 0));
    prop = property(s, 0);
    prop.location.type = 77;
    note(s, "location", (uint64_t)s->cu->cuMemCreate(&handle, s->room / 8, &prop, 0));
}

const struct scenario export_scenarios[] = {
    {"created-exported-and-released", created_exported_and_released, 0},
    {"registered-and-released", registered_and_released, 0},
    {"room-when-the-importer-lets-go", room_when_the_importer_lets_go, 0},
    {"room-when-the-importer-closes", room_when_the_importer_closes, 0},
    {"room-when-the-importer-frees", room_when_the_importer_frees, 0},
    {"pool-exported-and-destroyed", pool_exported_and_destroyed, 0},
    {"made-in-a-locality-domain", made_in_a_locality_domain, 0},
    {"made-of-an-unknown-type", made_of_an_unknown_type, 0},
    {0},
};
