/* SPDX-License-Identifier: Apache-2.0 */

/* vLLM with tensor parallelism of two: a process for each GPU (both on one, if
 * there is one). As vllm/v1/worker/gpu_worker.py has it, each loads its weights
 * through PyTorch's caching allocator, runs the largest batch once to see what that
 * takes, empties the cache, and gives the KV cache what is left of
 * gpu_memory_utilization (0.9) of the total that the driver tells. What it has
 * planned by cuMemGetInfo it has to get.
 *
 * The custom all-reduce (vllm/distributed/device_communicators/custom_all_reduce.py)
 * has a buffer of 8 MiB in each process, made by cudaMalloc apart from the cache,
 * which the other opens through CUDA IPC. */
#include <string.h>

#include "programs.h"

enum { LAYERS = 16, COMPUTE = 0, REDUCE_BUFFER = 8 << 20 };

struct worker {
    struct run *r;
    struct allocator a;
    void *weights[LAYERS], *cache[LAYERS];
    CUdeviceptr mine, theirs; /* the all-reduce's buffers */
    int peer;
    uint64_t activations; /* of the largest batch */
};

static void *take(struct worker *w, uint64_t bytes)
{
    w->r->tally->operations++;
    void *p = w->a.take(w->a.self, bytes, COMPUTE);
    if (!p)
        w->r->tally->failed++;
    return p;
}

static void give(struct worker *w, void **p)
{
    if (!*p)
        return;
    w->r->tally->operations++;
    w->a.give(w->a.self, *p);
    *p = NULL;
}

/* forward runs a batch of so many parts in 256 of the largest. */
static void forward(struct worker *w, uint64_t batch)
{
    void *hidden = take(w, w->activations / 4 * batch / 256 + 512), *logits;
    for (int i = 0; i < LAYERS; i++) {
        void *qkv = take(w, w->activations / 4 * batch / 256 + 512);
        void *mlp = take(w, w->activations / 4 * batch / 256 + 512);
        compute(w->r, w->a.lanes[COMPUTE]);
        give(w, &qkv);
        give(w, &mlp);
    }
    logits = take(w, w->activations / 4 * batch / 256 + 512);
    MUST(w->r, w->r->cu->cuStreamSynchronize(w->a.lanes[COMPUTE]));
    give(w, &logits);
    give(w, &hidden);
}

/* share has a buffer for the all-reduce and opens the other's. */
static int share(struct worker *w)
{
    struct run *r = w->r;
    CUipcMemHandle ours, theirs;
    if (!ASK(r, r->cu->cuMemAlloc_v2(&w->mine, REDUCE_BUFFER))) {
        r->tally->failed++;
        fail(r, "no room for the all-reduce's buffer");
        return 0;
    }
    return MUST(r, r->cu->cuIpcGetMemHandle(&ours, w->mine)) && tell(r, w->peer, &ours, sizeof ours, -1) &&
           hear(r, w->peer, &theirs, sizeof theirs, NULL) && MUST(r, r->cu->cuIpcOpenMemHandle_v2(&w->theirs, theirs, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
}

static int unshare(struct worker *w)
{
    struct run *r = w->r;
    int word = 0;
    /* Nobody frees what the other has open. */
    return MUST(r, r->cu->cuIpcCloseMemHandle(w->theirs)) && tell(r, w->peer, &word, sizeof word, -1) &&
           hear(r, w->peer, &word, sizeof word, NULL) && MUST(r, r->cu->cuMemFree_v2(w->mine));
}

/* serve is an engine's life. */
static void serve(struct worker *w, int requests, int tenants)
{
    struct run *r = w->r;
    size_t unused = 0, total = 0;
    int word = 0;
    if (!MUST(r, r->cu->cuMemGetInfo_v2(&unused, &total)))
        return;
    for (int i = 0; i < LAYERS; i++)
        w->weights[i] = take(w, total * 35 / 100 / tenants / LAYERS);
    w->activations = total * 8 / 100 / tenants;
    if (!share(w))
        return;
    forward(w, 256);
    w->a.empty(w->a.self);
    /* Both have profiled before either plans. */
    if (!tell(r, w->peer, &word, sizeof word, -1) || !hear(r, w->peer, &word, sizeof word, NULL) ||
        !MUST(r, r->cu->cuMemGetInfo_v2(&unused, &total)))
        return;
    if (!tell(r, w->peer, &word, sizeof word, -1) || !hear(r, w->peer, &word, sizeof word, NULL))
        return;
    uint64_t used = total - unused + w->activations * (uint64_t)tenants;
    uint64_t budget = total / 10 * 9;
    if (used >= budget) {
        fail(r, "no room for a KV cache");
        return;
    }
    uint64_t each = (budget - used) / (uint64_t)tenants / LAYERS / (64 * KiB) * (64 * KiB);
    for (int i = 0; i < LAYERS; i++)
        if (!(w->cache[i] = take(w, each)))
            fail(r, "the KV cache is refused what cuMemGetInfo has told");
    for (int n = 0; n < requests && going(r); n++)
        forward(w, roll(r, 8) ? between(r, 1, 16) : between(r, 16, 256));
    for (int i = 0; i < LAYERS; i++) {
        give(w, &w->cache[i]);
        give(w, &w->weights[i]);
    }
    w->a.empty(w->a.self);
    unshare(w);
}

static void vllm(struct run *r)
{
    struct worker w = {.r = r};
    int devices = 1, rank, child = started(r, &w.peer);
    if (child < 0)
        return;
    rank = child == 0;
    if (!MUST(r, r->cu->cuInit(0)) || !MUST(r, r->cu->cuDeviceGetCount(&devices)) || !sit_down(r, rank % devices))
        return;
    struct caching *c = make_caching(r, &w.a);
    /* The first says how long it goes on. */
    for (int more = 1; more;) {
        if (rank == 0) {
            more = going(r);
            if (!tell(r, w.peer, &more, sizeof more, -1))
                break;
        } else if (!hear(r, w.peer, &more, sizeof more, NULL)) {
            break;
        }
        if (more)
            serve(&w, 5000, devices > 1 ? 1 : 2);
        more = more && !r->tally->claimed;
    }
    end_caching(c);
    leave(&r->seat);
    joined(r, child);
}

const struct program vllm_programs[] = {{"vllm", vllm, 1}, {0}};
