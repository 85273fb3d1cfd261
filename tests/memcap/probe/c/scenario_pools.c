/* SPDX-License-Identifier: Apache-2.0 */

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>
#include <unistd.h>

#include "scenario.h"

/* Eight streams, one after the other: each takes a quarter of the room, runs a
 * kernel and gives it back. No more than that is ever in use by the program, but a
 * driver whose pool grows before it reuses what another stream has freed ends up
 * with eight times as much. */
static void eight_streams(struct scene *s)
{
    CUstream streams[8];
    CUfunction busy = kernel(s, 2000);
    uint64_t bytes = s->room / 4;
    for (int i = 0; i < 8; i++)
        if (!MUST(s, s->cu->cuStreamCreate(&streams[i], CU_STREAM_NON_BLOCKING)))
            return;
    for (int round = 0; round < 4; round++)
        for (int i = 0; i < 8; i++) {
            CUdeviceptr p;
            if (!ASK(s, bytes, s->cu->cuMemAllocAsync(&p, bytes, streams[i])))
                continue;
            if (!launch(s, busy, streams[i]) || !MUST(s, s->cu->cuMemFreeAsync(p, streams[i])))
                return;
            given_back(s, bytes);
        }
    for (int i = 0; i < 8; i++)
        MUST(s, s->cu->cuStreamSynchronize(streams[i]));
}

/* A pool that keeps everything: what one stream has freed behind a kernel, another
 * wants, again and again. */
static void freed_on_one_wanted_on_another(struct scene *s)
{
    CUstream streams[2];
    CUfunction busy = kernel(s, 2000);
    CUmemoryPool pool;
    uint64_t keep = UINT64_MAX, bytes = s->room / 8;
    CUdeviceptr p[8];
    for (int i = 0; i < 2; i++)
        if (!MUST(s, s->cu->cuStreamCreate(&streams[i], CU_STREAM_NON_BLOCKING)))
            return;
    if (!MUST(s, s->cu->cuDeviceGetDefaultMemPool(&pool, s->seat.device)) ||
        !MUST(s, s->cu->cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &keep)))
        return;
    for (int round = 0; round < 8; round++) {
        CUstream stream = streams[round % 2];
        int got = 0;
        while (got < 7 && ASK(s, bytes, s->cu->cuMemAllocAsync(&p[got], bytes, stream)))
            got++;
        if (!launch(s, busy, stream))
            return;
        while (got) {
            if (!MUST(s, s->cu->cuMemFreeAsync(p[--got], stream)))
                return;
            given_back(s, bytes);
        }
    }
    for (int i = 0; i < 2; i++)
        MUST(s, s->cu->cuStreamSynchronize(streams[i]));
}

static int streams_of(struct scene *s, CUstream *streams, int n)
{
    for (int i = 0; i < n; i++)
        if (!MUST(s, s->cu->cuStreamCreate(&streams[i], CU_STREAM_NON_BLOCKING)))
            return 0;
    return 1;
}

/* keeping is the device's pool, which from now on keeps all that it has. */
static CUmemoryPool keeping(struct scene *s)
{
    CUmemoryPool pool = NULL;
    uint64_t keep = UINT64_MAX;
    if (MUST(s, s->cu->cuDeviceGetDefaultMemPool(&pool, s->seat.device)))
        MUST(s, s->cu->cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &keep));
    return pool;
}

/* All but every second piece of 8 MiB is given back, and then 16 are wanted: there is
 * room, but no hole that is large enough. */
static void holes_that_are_too_small(struct scene *s)
{
    CUstream stream;
    CUdeviceptr p[512];
    int got = 0, wide = 0;
    if (!streams_of(s, &stream, 1) || !keeping(s))
        return;
    while (got < 512 && ASK(s, 8 * MiB, s->cu->cuMemAllocAsync(&p[got], 8 * MiB, stream)))
        got++;
    for (int i = 0; i < got; i += 2) {
        MUST(s, s->cu->cuMemFreeAsync(p[i], stream));
        given_back(s, 8 * MiB);
    }
    for (CUdeviceptr q; wide < 8 && ASK(s, 16 * MiB, s->cu->cuMemAllocAsync(&q, 16 * MiB, stream));)
        wide++;
    note(s, "narrow", (uint64_t)got);
    note(s, "wide", (uint64_t)wide);
    MUST(s, s->cu->cuStreamSynchronize(stream));
}

/* As freed-on-one-stream, of a pool that may reuse nothing of its own accord. */
static void reuse_switched_off(struct scene *s)
{
    CUstream streams[4];
    CUfunction busy = kernel(s, 1000);
    CUmemoryPool pool = keeping(s);
    int off = 0;
    uint64_t bytes = s->room / 4;
    if (!pool || !streams_of(s, streams, 4))
        return;
    for (int flag = CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES; flag <= CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES; flag++)
        if (!MUST(s, s->cu->cuMemPoolSetAttribute(pool, flag, &off)))
            return;
    for (int round = 0; round < 16; round++) {
        CUdeviceptr p;
        CUstream stream = streams[round % 4];
        if (!ASK(s, bytes, s->cu->cuMemAllocAsync(&p, bytes, stream)))
            continue;
        if (!launch(s, busy, stream) || !MUST(s, s->cu->cuMemFreeAsync(p, stream)))
            return;
        given_back(s, bytes);
    }
    for (int i = 0; i < 4; i++)
        MUST(s, s->cu->cuStreamSynchronize(streams[i]));
}

/* Streams are gone, and what they have freed is still under way. */
static void streams_destroyed_with_frees(struct scene *s)
{
    CUfunction busy = kernel(s, 2000);
    uint64_t bytes = s->room / 4;
    if (!keeping(s))
        return;
    for (int round = 0; round < 16; round++) {
        CUdeviceptr p;
        CUstream stream;
        if (!streams_of(s, &stream, 1))
            return;
        if (ASK(s, bytes, s->cu->cuMemAllocAsync(&p, bytes, stream))) {
            if (!launch(s, busy, stream) || !MUST(s, s->cu->cuMemFreeAsync(p, stream)))
                return;
            given_back(s, bytes);
        }
        if (!MUST(s, s->cu->cuStreamDestroy_v2(stream)))
            return;
    }
}

/* --- beside a refusal ------------------------------------------------------- */

/* One thread asks for more than there is, over and over, while the other goes about what
 * fits. Each time it has had an array, of whose size nobody but the driver knows: so
 * a refusal waits for a reading. It goes on until the other one has been seen at work
 * during ENOUGH refusals of the same IN_TURN: on a busy machine that one does not have its
 * turn in each. */
enum { REFUSALS = 200, IN_TURN = 8, ENOUGH = 3, WORKS = 3 };

struct beside {
    struct scene *s;
    uint64_t bytes;
    atomic_int phase; /* odd: it is being refused */
    atomic_int stop, ended;
    CUresult result;
};

static CUresult have_an_array(struct scene *s)
{
    CUDA_ARRAY_DESCRIPTOR d = {256, 4, CU_AD_FORMAT_UNSIGNED_INT32, 1};
    CUarray array;
    CUresult r = s->cu->cuArrayCreate_v2(&array, &d);
    return r != CUDA_SUCCESS ? r : s->cu->cuArrayDestroy(array);
}

static void *refused(void *arg)
{
    struct beside *b = arg;
    CUstream stream;
    CUdeviceptr p;
    b->result = b->s->cu->cuCtxSetCurrent(b->s->seat.context);
    if (b->result == CUDA_SUCCESS)
        b->result = b->s->cu->cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING);
    for (int i = 0; i < REFUSALS && !atomic_load(&b->stop); i++) {
        if (b->result == CUDA_SUCCESS)
            b->result = have_an_array(b->s);
        atomic_fetch_add(&b->phase, 1);
        if (b->result == CUDA_SUCCESS && b->s->cu->cuMemAllocAsync(&p, b->bytes, stream) != CUDA_ERROR_OUT_OF_MEMORY)
            b->result = -1;
        atomic_fetch_add(&b->phase, 1);
    }
    atomic_store(&b->ended, 1);
    return NULL;
}

/* beside_refused notes during how many refusals of another thread work was done from
 * beginning to end WORKS times, at most of all IN_TURN of them. */
static void beside_refused(struct scene *s, int (*work)(struct scene *, CUstream))
{
    CUstream stream;
    CUdeviceptr p;
    pthread_t thread;
    struct beside b = {.s = s, .bytes = s->room / 2};
    uint64_t most = 0;
    if (!streams_of(s, &stream, 1) || !keeping(s) || !ASK(s, s->room * 5 / 8, s->cu->cuMemAllocAsync(&p, s->room * 5 / 8, stream)))
        return;
    if (!work(s, stream))
        return;
    pthread_create(&thread, NULL, refused, &b);
    for (int before = 0, now, times = 0, beside = 0; most < ENOUGH && !atomic_load(&b.ended) && work(s, stream); before = now) {
        now = atomic_load(&b.phase);
        if (now / (2 * IN_TURN) != before / (2 * IN_TURN))
            beside = 0;
        times = now == before ? times + (before % 2) : 0;
        beside += times == WORKS;
        most = (uint64_t)beside > most ? (uint64_t)beside : most;
    }
    atomic_store(&b.stop, 1);
    pthread_join(thread, NULL);
    note(s, "beside", most);
    note(s, "refusals", (uint64_t)b.phase / 2);
    if (b.result != CUDA_SUCCESS)
        fail_scene(s, "what does not fit: %d", b.result);
}

static int take_and_give(struct scene *s, CUstream stream)
{
    CUdeviceptr p;
    if (!ASK(s, MiB, s->cu->cuMemAllocAsync(&p, MiB, stream)) || !MUST(s, s->cu->cuMemFreeAsync(p, stream)))
        return 0;
    given_back(s, MiB);
    return 1;
}

static int synchronize(struct scene *s, CUstream stream) { return MUST(s, s->cu->cuStreamSynchronize(stream)); }

static void allocation_beside_a_refused_one(struct scene *s) { beside_refused(s, take_and_give); }
static void synchronize_beside_a_refused_one(struct scene *s) { beside_refused(s, synchronize); }

/* --- many threads ------------------------------------------------------------ */

struct worker {
    struct scene *s;
    int index;
    uint64_t granted;
    CUresult failed;
};

/* Each keeps up to a fifth of the room, in pieces of two sizes. */
static void *at_the_edge(void *arg)
{
    enum { KEPT = 16 };
    struct worker *w = arg;
    struct cuda *cu = w->s->cu;
    CUstream stream;
    CUdeviceptr p[KEPT] = {0};
    uint64_t dice = (uint64_t)w->index * 77 + 1;
    if ((w->failed = cu->cuCtxSetCurrent(w->s->seat.context)) || (w->failed = cu->cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING)))
        return NULL;
    for (int step = 0; step < 1000 && !w->failed; step++) {
        dice = dice * 6364136223846793005u + 1442695040888963407u;
        CUdeviceptr *at = &p[dice >> 60];
        if (*at) {
            w->failed = cu->cuMemFreeAsync(*at, stream);
            *at = 0;
        } else {
            CUresult r = cu->cuMemAllocAsync(at, (dice >> 59 & 1 ? 4 : 24) * MiB, stream);
            w->granted += r == CUDA_SUCCESS;
            w->failed = r == CUDA_ERROR_OUT_OF_MEMORY ? CUDA_SUCCESS : r;
            if (r != CUDA_SUCCESS)
                *at = 0;
        }
        if (step % 64 == 0 && !w->failed)
            w->failed = cu->cuStreamSynchronize(stream);
    }
    for (int i = 0; i < KEPT && !w->failed; i++)
        if (p[i])
            w->failed = cu->cuMemFreeAsync(p[i], stream);
    if (!w->failed)
        w->failed = cu->cuStreamSynchronize(stream);
    return NULL;
}

static void threads_at_the_edge(struct scene *s)
{
    enum { THREADS = 8 };
    struct worker w[THREADS] = {0};
    pthread_t t[THREADS];
    uint64_t granted = 0;
    if (!keeping(s))
        return;
    for (int i = 0; i < THREADS; i++) {
        w[i] = (struct worker){.s = s, .index = i};
        pthread_create(&t[i], NULL, at_the_edge, &w[i]);
    }
    for (int i = 0; i < THREADS; i++) {
        pthread_join(t[i], NULL);
        granted += w[i].granted;
        if (w[i].failed)
            fail_scene(s, "a thread: %d", w[i].failed);
    }
    note(s, "taken", granted);
}

/* What is left is less than the piece by which a driver's pool grows, and more than the
 * request. Of the piece that it tries all the same nothing may stay. */
static void less_than_a_piece_is_left(struct scene *s)
{
    CUstream stream;
    CUdeviceptr p;
    if (!streams_of(s, &stream, 1) || !keeping(s) || !ASK(s, s->room - 20 * MiB, s->cu->cuMemAlloc_v2(&p, s->room - 20 * MiB)))
        return;
    for (int i = 0; i < 4; i++)
        ASK(s, 8 * MiB, s->cu->cuMemAllocAsync(&p, 8 * MiB, stream));
}

/* --- pools --------------------------------------------------------------------- */

static CUmemoryPool pool_of(struct scene *s, int type, int place, int id)
{
    CUmemPoolProps props = {.allocType = type, .location = {place, id}};
    CUmemoryPool pool = NULL;
    return ASK(s, 0, s->cu->cuMemPoolCreate(&pool, &props)) ? pool : NULL;
}

/* A program with 300 pools on the GPU, and as many on the host. */
static void three_hundred_pools(struct scene *s)
{
    enum { POOLS = 300 };
    static CUmemoryPool pools[2 * POOLS];
    CUstream stream;
    CUdeviceptr p;
    if (!streams_of(s, &stream, 1))
        return;
    for (int i = 0; i < 2 * POOLS; i++)
        pools[i] = pool_of(s, CU_MEM_ALLOCATION_TYPE_PINNED, i % 2 ? CU_MEM_LOCATION_TYPE_HOST : CU_MEM_LOCATION_TYPE_DEVICE, i % 2 ? 0 : s->seat.device);
    for (int i = 0; i < 2 * POOLS; i++) {
        if (!pools[i] || !ASK(s, 32 * MiB, s->cu->cuMemAllocFromPoolAsync(&p, 32 * MiB, pools[i], stream)))
            continue;
        if (!MUST(s, s->cu->cuMemFreeAsync(p, stream)) || !MUST(s, s->cu->cuStreamSynchronize(stream)) || !MUST(s, s->cu->cuMemPoolDestroy(pools[i])))
            return;
        given_back(s, 32 * MiB);
    }
}

/* A pool that has all the room serves one stream after the other from what it has: a pool
 * that gives memory back and maps it anew is a thousand times as slow. */
static void maps_anew(struct scene *s)
{
    enum { MOST = 128, ROUNDS = 8 };
    CUstream streams[2];
    CUfunction busy = kernel(s, 500);
    CUmemoryPool pool = keeping(s);
    CUdeviceptr p[MOST];
    uint64_t high = 0, now = 0, fell = 0;
    int had = MOST;
    if (!pool || !streams_of(s, streams, 2))
        return;
    for (int round = 0; round < ROUNDS; round++) {
        int got = 0;
        while (got < had && ASK(s, 8 * MiB, s->cu->cuMemAllocAsync(&p[got], 8 * MiB, streams[round % 2]))) {
            got++;
            if (!MUST(s, s->cu->cuMemPoolGetAttribute(pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &now)))
                return;
            fell += now < high;
            high = now > high ? now : high;
        }
        had = got;
        if (!launch(s, busy, streams[round % 2]))
            return;
        while (got) {
            if (!MUST(s, s->cu->cuMemFreeAsync(p[--got], streams[round % 2])))
                return;
            given_back(s, 8 * MiB);
        }
    }
    note(s, "fell", fell);
    note(s, "had", (uint64_t)had * 8 * MiB);
    for (int i = 0; i < 2; i++)
        MUST(s, s->cu->cuStreamSynchronize(streams[i]));
}

/* The default pool is one and the same however it is asked for, is there again when a
 * program has destroyed the one that it had in its place, and cannot be destroyed. */
static void default_pool_by_every_name(struct scene *s)
{
    struct cuda *cu = s->cu;
    CUmemLocation at = {CU_MEM_LOCATION_TYPE_DEVICE, s->seat.device};
    CUmemoryPool normal = keeping(s), now = NULL, by_place = NULL, own;
    CUstream stream;
    CUdeviceptr p;
    uint64_t there = 0, other = 0;
    if (!normal || !streams_of(s, &stream, 1) || !MUST(s, cu->cuDeviceGetMemPool(&now, s->seat.device)))
        return;
    bool by_places = cu->cuMemGetDefaultMemPool && cu->cuMemGetDefaultMemPool(&by_place, &at, CU_MEM_ALLOCATION_TYPE_PINNED) != CUDA_ERROR_NOT_FOUND;
    other += now != normal;
    other += by_places && by_place != normal;
    other += cu->cuMemPoolDestroy(normal) != CUDA_ERROR_INVALID_VALUE;
    own = pool_of(s, CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_DEVICE, s->seat.device);
    if (!own || !MUST(s, cu->cuDeviceSetMemPool(s->seat.device, own)) || !ASK(s, 8 * MiB, cu->cuMemAllocAsync(&p, 8 * MiB, stream)))
        return;
    MUST(s, cu->cuMemPoolGetAttribute(normal, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &there));
    other += there != 0;
    MUST(s, cu->cuMemFreeAsync(p, stream));
    MUST(s, cu->cuStreamSynchronize(stream));
    given_back(s, 8 * MiB);
    if (!MUST(s, cu->cuMemPoolDestroy(own)) || !MUST(s, cu->cuDeviceGetMemPool(&now, s->seat.device)))
        return;
    other += now != normal;
    if (!ASK(s, 8 * MiB, cu->cuMemAllocAsync(&p, 8 * MiB, stream)) || !MUST(s, cu->cuMemPoolGetAttribute(normal, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &there)))
        return;
    other += there == 0;
    note(s, "other", other);
}

static void fill_pool(struct scene *s, CUmemoryPool pool)
{
    CUstream stream;
    CUdeviceptr p;
    if (!streams_of(s, &stream, 1) || !pool)
        return;
    for (int i = 0; i < 100 && ASK(s, 64 * MiB, s->cu->cuMemAllocFromPoolAsync(&p, 64 * MiB, pool, stream)); i++)
        ;
}

static void managed_pool_of_the_device(struct scene *s) { fill_pool(s, pool_of(s, CU_MEM_ALLOCATION_TYPE_MANAGED, CU_MEM_LOCATION_TYPE_DEVICE, s->seat.device)); }
static void managed_pool_of_nowhere(struct scene *s) { fill_pool(s, pool_of(s, CU_MEM_ALLOCATION_TYPE_MANAGED, 0, 0)); }
static void managed_pool_of_the_host(struct scene *s) { fill_pool(s, pool_of(s, CU_MEM_ALLOCATION_TYPE_MANAGED, CU_MEM_LOCATION_TYPE_HOST, 0)); }
static void pool_of_a_locality_domain(struct scene *s)
{
    fill_pool(s, pool_of(s, CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN, s->seat.device));
}

static void default_managed_pool(struct scene *s)
{
    CUmemLocation nowhere = {0, 0};
    CUmemoryPool pool;
    if (MUST(s, s->cu->cuMemGetDefaultMemPool(&pool, &nowhere, CU_MEM_ALLOCATION_TYPE_MANAGED)))
        fill_pool(s, pool);
}

/* A pool that other processes can open keeps what it has. It has room enough in holes, none
 * of which is large enough, and the cap has none: it may not grow for the request, for that
 * cannot be undone. What fits into a hole is had, on whatever stream. */
static void pool_that_keeps_what_it_has(struct scene *s)
{
    enum { N = 16 };
    CUmemPoolProps props = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .handleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                            .location = {CU_MEM_LOCATION_TYPE_DEVICE, s->seat.device}};
    uint64_t bytes = s->room / 2 / N;
    CUmemoryPool pool;
    CUstream streams[2];
    CUdeviceptr p[N], rest, more;
    int n = 0;
    if (!streams_of(s, streams, 2) || !MUST(s, s->cu->cuMemPoolCreate(&pool, &props)))
        return;
    while (n < N && ASK(s, bytes, s->cu->cuMemAllocFromPoolAsync(&p[n], bytes, pool, streams[0])))
        n++;
    while (ASK(s, 2 * MiB, s->cu->cuMemAlloc_v2(&rest, 2 * MiB)))
        ;
    for (int i = 0; i < n; i += 2)
        if (MUST(s, s->cu->cuMemFreeAsync(p[i], streams[0])))
            given_back(s, bytes);
    for (int i = 0; i < 4; i++)
        if (ASK(s, 2 * bytes, s->cu->cuMemAllocFromPoolAsync(&more, 2 * bytes, pool, streams[i % 2])))
            MUST(s, s->cu->cuMemFreeAsync(more, streams[i % 2]));
    for (int i = 0; i < 8; i++)
        if (ASK(s, bytes, s->cu->cuMemAllocFromPoolAsync(&more, bytes, pool, streams[i % 2])) && MUST(s, s->cu->cuMemFreeAsync(more, streams[i % 2])))
            given_back(s, bytes);
}

/* told_free waits until the program is told that so much is free. */
static uint64_t told_free(struct scene *s, uint64_t bytes)
{
    size_t left = 0, total;
    for (int i = 0; i < 200 && left < bytes; i++)
        if (!MUST(s, s->cu->cuMemGetInfo_v2(&left, &total)) || (left < bytes && usleep(1000)))
            return 0;
    return left;
}

/* Some drivers make a pool smaller when a stream is asked whether it is done. All that is
 * free then is taken by other means. When the program next waits for the stream, what the
 * pool has lost is not to be had a second time. */
static void pool_that_shrinks_by_itself(struct scene *s)
{
    CUstream stream;
    CUdeviceptr p[8], rest, more;
    uint64_t bytes = s->room / 8;
    if (!streams_of(s, &stream, 1))
        return;
    for (int round = 0; round < 8 && !s->failure[0]; round++) {
        for (int i = 0; i < 8; i++)
            if (!ASK(s, bytes, s->cu->cuMemAllocAsync(&p[i], bytes, stream)))
                return;
        for (int i = 0; i < 8; i++)
            if (MUST(s, s->cu->cuMemFreeAsync(p[i], stream)))
                given_back(s, bytes);
        MUST(s, s->cu->cuStreamQuery(stream));
        uint64_t left = told_free(s, s->room);
        bool took = left >= s->room && ASK(s, left, s->cu->cuMemAlloc_v2(&rest, left));
        MUST(s, s->cu->cuStreamSynchronize(stream));
        if (took && ASK(s, s->room / 4, s->cu->cuMemAlloc_v2(&more, s->room / 4)) && MUST(s, s->cu->cuMemFree_v2(more)))
            given_back(s, s->room / 4);
        if (took && MUST(s, s->cu->cuMemFree_v2(rest)))
            given_back(s, left);
    }
}

const struct scenario pool_scenarios[] = {
    {"eight-streams-take-run-and-give-back", eight_streams, 0},
    {"freed-on-one-stream-wanted-on-another", freed_on_one_wanted_on_another, 0},
    {"holes-that-are-too-small", holes_that_are_too_small, 0},
    {"reuse-switched-off", reuse_switched_off, 0},
    {"streams-destroyed-with-frees-under-way", streams_destroyed_with_frees, 0},
    {"allocation-beside-a-refused-one", allocation_beside_a_refused_one, 0},
    {"synchronize-beside-a-refused-one", synchronize_beside_a_refused_one, 0},
    {"threads-at-the-edge", threads_at_the_edge, 0},
    {"less-than-a-piece-is-left", less_than_a_piece_is_left, 0},
    {"pool-that-keeps-what-it-has", pool_that_keeps_what_it_has, 0},
    {"pool-that-shrinks-by-itself", pool_that_shrinks_by_itself, 0},
    {"pool-that-maps-anew-at-the-edge", maps_anew, 0},
    {"default-pool-by-every-name", default_pool_by_every_name, 0},
    {"three-hundred-pools", three_hundred_pools, 0},
    {"managed-pool-of-the-device", managed_pool_of_the_device, 0},
    {"managed-pool-of-nowhere", managed_pool_of_nowhere, 0},
    {"managed-pool-of-the-host", managed_pool_of_the_host, 0},
    {"default-managed-pool", default_managed_pool, 0},
    {"pool-of-a-locality-domain", pool_of_a_locality_domain, 0},
    {0},
};
