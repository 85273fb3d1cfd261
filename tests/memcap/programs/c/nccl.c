/* SPDX-License-Identifier: Apache-2.0 */

/* NCCL between two processes on one GPU: ncclMemAlloc and buffer registration as
 * src/allocator.cc, src/include/alloc.h and src/transport/p2p.cc of NVIDIA/nccl do
 * them. A buffer is physical memory (cuMemCreate, exportable as a descriptor) of a
 * whole number of grains, mapped into a reservation of its own, with access set;
 * the descriptor goes to the peer over a socket, which imports it, closes it, maps
 * it, and unmaps and releases it in the end. NCCL's own buffers are of 4 MiB
 * (NCCL_BUFFSIZE) and there are several; users' are of any size.
 *
 * An operation is a collective, and a buffer made or given back: buffers are
 * registered to be used, here for some 20 ms.
 *
 * The rest of the memory is taken by what the job computes with, so that a buffer
 * that stays counted when it is gone is soon one too many. */
#include <string.h>
#include <unistd.h>

#include "programs.h"

enum { BUFFERS = 8, GRAIN = 2 << 20, COLLECTIVES = 1000 };

struct buffer {
    CUdeviceptr at;
    uint64_t size;
    CUmemGenericAllocationHandle handle; /* 0: released */
};

struct order {
    int count; /* of buffers that follow; 0: the end */
    int kept;  /* the owner gives its side back only after the peer has */
    uint64_t size[BUFFERS];
};

static int map(struct run *r, struct buffer *b)
{
    struct cuda *cu = r->cu;
    CUmemAccessDesc access = {.location = {CU_MEM_LOCATION_TYPE_DEVICE, r->seat.device}, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    return MUST(r, cu->cuMemAddressReserve(&b->at, b->size, GRAIN, 0, 0)) && MUST(r, cu->cuMemMap(b->at, b->size, 0, b->handle, 0)) &&
           MUST(r, cu->cuMemSetAccess(b->at, b->size, &access, 1));
}

static void unmap(struct run *r, struct buffer *b)
{
    struct cuda *cu = r->cu;
    MUST(r, cu->cuMemUnmap(b->at, b->size));
    if (b->handle)
        MUST(r, cu->cuMemRelease(b->handle));
    MUST(r, cu->cuMemAddressFree(b->at, b->size));
    r->tally->operations++;
}

/* use is what buffers are registered for. */
static void use(struct run *r)
{
    for (int i = 0; i < COLLECTIVES; i++)
        compute(r, r->seat.stream);
    MUST(r, r->cu->cuStreamSynchronize(r->seat.stream));
    r->tally->operations += COLLECTIVES;
}

/* offer makes some buffers, lets the peer use them, and gives them back. */
static void offer(struct run *r, int peer, int last)
{
    struct cuda *cu = r->cu;
    CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED, .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                .location = {CU_MEM_LOCATION_TYPE_DEVICE, r->seat.device}};
    struct buffer buffers[BUFFERS] = {0};
    struct order o = {.count = last ? 0 : (int)between(r, 1, BUFFERS), .kept = (int)roll(r, 2)};
    int fds[BUFFERS], made = 0;
    while (made < o.count) {
        struct buffer *b = &buffers[made];
        o.size[made] = b->size = GRAIN * between(r, 1, 8);
        r->tally->operations++;
        if (!ASK(r, cu->cuMemCreate(&b->handle, b->size, &prop, 0))) {
            r->tally->failed++;
            break;
        }
        if (!map(r, b) || !MUST(r, cu->cuMemExportToShareableHandle(&fds[made], b->handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0)))
            return;
        if (roll(r, 2)) { /* it lives by its mapping, and by the descriptor */
            MUST(r, cu->cuMemRelease(b->handle));
            b->handle = 0;
        }
        made++;
    }
    if (!last && !made)
        o.count = -1; /* nothing this time */
    else
        o.count = made;
    if (!tell(r, peer, &o, sizeof o, -1))
        return;
    for (int i = 0; i < made; i++) {
        if (!tell(r, peer, &i, sizeof i, fds[i]))
            return;
        close(fds[i]);
    }
    use(r);
    int word = 0;
    if (o.kept && made && !hear(r, peer, &word, sizeof word, NULL)) /* the peer is through */
        return;
    for (int i = 0; i < made; i++)
        unmap(r, &buffers[i]);
    if (!o.kept && made)
        hear(r, peer, &word, sizeof word, NULL);
}

/* accept_offer is the peer's side; whether there is another one to come. */
static int accept_offer(struct run *r, int peer)
{
    struct cuda *cu = r->cu;
    struct buffer buffers[BUFFERS] = {0};
    struct order o;
    if (!hear(r, peer, &o, sizeof o, NULL) || !o.count)
        return 0;
    for (int i = 0; i < o.count; i++) {
        struct buffer *b = &buffers[i];
        int which, fd = -1;
        if (!hear(r, peer, &which, sizeof which, &fd) || fd < 0)
            return 0;
        b->size = o.size[i];
        if (!MUST(r, cu->cuMemImportFromShareableHandle(&b->handle, (void *)(intptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)) || !map(r, b))
            return 0;
        close(fd);
        r->tally->operations++;
    }
    use(r);
    for (int i = 0; i < o.count; i++)
        unmap(r, &buffers[i]);
    return o.count < 0 || tell(r, peer, &o.count, sizeof o.count, -1);
}

static void nccl(struct run *r)
{
    int peer;
    int child = started(r, &peer);
    if (child < 0 || !sit_down(r, 0))
        return;
    int word = 0, first = child > 0;
    CUdeviceptr model = 0;
    size_t unused = 0, total = 0;
    /* Both have a context, then each has its half of the model. Room is left for
     * twice as much as one offer takes. */
    if (!tell(r, peer, &word, sizeof word, -1) || !hear(r, peer, &word, sizeof word, NULL))
        return;
    MUST(r, r->cu->cuMemGetInfo_v2(&unused, &total));
    if (!tell(r, peer, &word, sizeof word, -1) || !hear(r, peer, &word, sizeof word, NULL))
        return;
    uint64_t bytes = (unused - 2 * BUFFERS * 8 * GRAIN) / 2 / GRAIN * GRAIN;
    if (!ASK(r, r->cu->cuMemAlloc_v2(&model, bytes)))
        fail(r, "the model does not fit");
    for (int more = 1; more;) {
        if (first) {
            int last = !going(r);
            offer(r, peer, last);
            more = !last && !r->tally->claimed && accept_offer(r, peer);
        } else if ((more = accept_offer(r, peer) && !r->tally->claimed)) {
            offer(r, peer, 0);
        }
    }
    MUST(r, r->cu->cuMemFree_v2(model));
    leave(&r->seat);
    joined(r, child);
}

const struct program nccl_programs[] = {{"nccl", nccl, 1}, {0}};
