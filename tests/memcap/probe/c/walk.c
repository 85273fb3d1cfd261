/* SPDX-License-Identifier: Apache-2.0 */

/* A walk makes calls at random, of all that take and give memory and of all that
 * order them, near the edge of what there is. Some threads take turns at it, each
 * with a context and a default stream of its own, and now and then all of them go
 * at once.
 *
 * The judge is the emulated driver, which says before each request whether a card
 * of the cap's size would grant it (cuEmulatorFits): one that is refused all the
 * same was refused early, and if the next try of the same is too, it was refused
 * twice. What is refused while others are at work is tried again when they rest,
 * and judged then. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "scenario.h"

enum { THREADS = 4, CONTEXTS = 3, STREAMS = 8, EVENTS = 6, POOLS = 4, THINGS = 400, KERNELS = 3, SHIFT = 48, ERRAND = 24 };
enum kind { LINEAR, POOLED, BLOCKS }; /* as the judge knows them */
static const unsigned busy_us[KERNELS] = {1, 100, 1500};

/* A thing is memory that is held: by a call of calls.c, or of a pool. */
struct thing {
    const struct call *call; /* NULL: of a pool */
    struct item item;
    uint64_t bytes;
    int ctx;
    int used, managed;
};

struct request {
    const struct call *call; /* NULL: of a pool */
    CUmemoryPool pool;       /* NULL: the current one */
    CUstream stream;
    uint64_t bytes;
};

struct thread {
    pthread_t id;
    int number, ctx;
    uint64_t seed;
    struct request refused[ERRAND]; /* while all were at it */
    int refusals;
};

static struct walk {
    struct cuda *cu;
    CUdevice device;
    CUresult (*fits)(int kind, CUmemoryPool pool, size_t bytes, CUstream s, size_t card, int *fits);
    CUresult (*info)(size_t *, size_t *); /* the driver's own */
    uint64_t cap, room, seed, live, managed, target;
    struct {
        CUcontext ctx;
        CUfunction busy[KERNELS];
    } contexts[CONTEXTS]; /* the first is the primary one */
    struct {
        CUstream stream;
        int ctx;
    } streams[STREAMS];
    struct {
        CUevent event;
        int ctx;
    } events[EVENTS];
    CUmemoryPool pools[POOLS];
    struct thing things[THINGS];
    struct thread threads[THREADS];

    uint64_t steps, granted, refused, early, twice, errands;
    char first[256], failure[256];

    /* Whose turn it is, THREADS is everybody's, and the how manieth. */
    pthread_mutex_t lock;
    pthread_cond_t turned;
    int turn, at_work, over;
    uint64_t turns;
    uint64_t share; /* steps of this turn */
} w;

static uint64_t dice(uint64_t *state, uint64_t n)
{
    *state += 0x9e3779b97f4a7c15;
    uint64_t z = *state;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return (z ^ (z >> 31)) % n;
}

static void say(char to[256], const char *format, ...)
{
    va_list args;
    if (to[0])
        return;
    va_start(args, format);
    vsnprintf(to, 256, format, args);
    va_end(args);
    for (char *p = to; *p; p++)
        if (*p == ' ' || *p == '\n')
            *p = '_';
}

/* right says whether a call did what it had to. */
static int right(const char *call, CUresult r)
{
    if (r != CUDA_SUCCESS)
        say(w.failure, "step %llu: %s: %d", (unsigned long long)w.steps, call, r);
    return r == CUDA_SUCCESS;
}
#define RIGHT(call) right(#call, w.cu->call)

/* --- asking for memory ------------------------------------------------------ */

static uint64_t size_of(uint64_t *seed)
{
    switch (dice(seed, 10)) {
    case 0: case 1: case 2: return 1 + dice(seed, 64 << 10);
    case 3: case 4: return (64 << 10) + dice(seed, 2 * MiB);
    case 5: return 2 * MiB * (8 + dice(seed, 40));
    default: return 2 * MiB + dice(seed, 14 * MiB);
    }
}

static CUresult ask(const struct request *q, struct thread *t, struct item *i)
{
    struct seat seat = {.cu = w.cu, .device = w.device, .context = w.contexts[t->ctx].ctx, .stream = q->stream};
    if (q->call)
        return q->call->take(&seat, i, q->bytes);
    return q->pool ? w.cu->cuMemAllocFromPoolAsync(&i->a, q->bytes, q->pool, q->stream) : w.cu->cuMemAllocAsync(&i->a, q->bytes, q->stream);
}

static const char *name_of(const struct request *q) { return q->call ? q->call->name : q->pool ? "cuMemAllocFromPoolAsync" : "cuMemAllocAsync"; }

static uint64_t round_up(uint64_t n, uint64_t to) { return (n + to - 1) / to * to; }

static int is(const struct request *q, const char *name) { return q->call && !strcmp(q->call->name, name); }

/* fits asks the judge. What is managed is the cap's, but not on the card. */
static int fits(const struct request *q)
{
    int kind = !q->call ? POOLED : is(q, "cuMemAlloc_v2") ? LINEAR : BLOCKS, yes = 0;
    uint64_t bytes = q->call ? unit_of(q->call, q->bytes) : q->bytes;
    if (is(q, "cuCtxCreate_v2"))
        bytes = 308 * MiB; /* and more than any context takes */
    if (is(q, "cuMemHostAlloc"))
        return 1;
    CUresult r = w.fits(kind, q->pool, bytes, q->stream, w.cap > w.managed ? w.cap - w.managed : 0, &yes);
    if (r != CUDA_SUCCESS)
        say(w.failure, "step %llu: cuEmulatorFits of %s: %d", (unsigned long long)w.steps, name_of(q), r);
    return yes;
}

static struct thing *room_for_one(void)
{
    for (int i = 0; i < THINGS; i++)
        if (!w.things[i].used)
            return &w.things[i];
    return NULL;
}

/* context_of is whose a stream is. */
static int context_of(const struct thread *t, CUstream s)
{
    for (int i = 0; i < STREAMS; i++)
        if (w.streams[i].stream == s)
            return w.streams[i].ctx;
    return t->ctx;
}

static void keep(struct thing *to, const struct request *q, struct item i, int ctx)
{
    *to = (struct thing){.call = q->call, .item = i, .bytes = q->bytes, .ctx = ctx, .used = 1, .managed = is(q, "cuMemAllocManaged")};
    w.live += to->bytes;
    w.managed += to->managed ? to->bytes : 0;
}

/* judged makes a request alone, and again if it was refused early. */
static int judged(struct thread *t, const struct request *q)
{
    struct thing *to = room_for_one();
    for (int tries = 0; to && !w.failure[0]; tries++) {
        struct item i = {0};
        int fit = fits(q);
        CUresult r = ask(q, t, &i);
        if (r == CUDA_SUCCESS) {
            keep(to, q, i, q->call ? t->ctx : context_of(t, q->stream));
            w.granted++;
            return 1;
        }
        if (r != CUDA_ERROR_OUT_OF_MEMORY) {
            right(name_of(q), r);
            return 0;
        }
        w.refused++;
        if (!fit)
            return 0;
        size_t unused = 0, total = 0, beneath = 0, card = 0;
        w.cu->cuMemGetInfo_v2(&unused, &total);
        w.info(&beneath, &card);
        say(w.first, "step %llu: %s of %llu KiB refused, with %zu KiB left by its word; the driver has given %zu KiB of %zu, managed are %llu",
            (unsigned long long)w.steps, name_of(q), (unsigned long long)q->bytes >> 10, unused >> 10, (card - beneath) >> 10,
            (size_t)w.cap >> 10, (unsigned long long)w.managed >> 10);
        if (tries) {
            w.twice++;
            return 0;
        }
        w.early++;
    }
    return 0;
}

/* --- giving back ------------------------------------------------------------ */

static CUstream any_stream(struct thread *t)
{
    uint64_t i = dice(&t->seed, STREAMS + 3);
    return i < STREAMS ? w.streams[i].stream : i == STREAMS ? CU_STREAM_PER_THREAD : NULL;
}

static void forget(struct thing *o)
{
    w.live -= o->bytes;
    w.managed -= o->managed ? o->bytes : 0;
    o->used = 0;
}

static void give(struct thread *t, struct thing *o)
{
    struct seat seat = {.cu = w.cu, .device = w.device, .context = w.contexts[t->ctx].ctx, .stream = any_stream(t)};
    if (o->call)
        right(o->call->name, o->call->give(&seat, &o->item));
    else if (dice(&t->seed, 8))
        RIGHT(cuMemFreeAsync(o->item.a, seat.stream));
    else
        RIGHT(cuMemFree_v2(o->item.a));
    forget(o);
}

static void give_any(struct thread *t, int count)
{
    for (int tries = 0; count && tries < 4 * THINGS; tries++) {
        struct thing *o = &w.things[dice(&t->seed, THINGS)];
        if (o->used) {
            give(t, o);
            count--;
        }
    }
}

/* --- what orders it --------------------------------------------------------- */

static void sit_in(struct thread *t, int ctx)
{
    t->ctx = ctx;
    RIGHT(cuCtxSetCurrent(w.contexts[ctx].ctx));
}

static void furnish(int ctx)
{
    char image[128];
    CUmodule m;
    snprintf(image, sizeof image, "// gpu-emulator: blocks 0\n.version 6.0\n");
    if (!RIGHT(cuModuleLoadData(&m, image)))
        return;
    for (int k = 0; k < KERNELS; k++) {
        char name[32];
        snprintf(name, sizeof name, "busy_%uus", busy_us[k]);
        RIGHT(cuModuleGetFunction(&w.contexts[ctx].busy[k], m, name));
    }
}

static void new_stream(struct thread *t, int i)
{
    w.streams[i].ctx = t->ctx;
    RIGHT(cuStreamCreate(&w.streams[i].stream, (unsigned)dice(&t->seed, 2)));
}

static void new_event(struct thread *t, int i)
{
    w.events[i].ctx = t->ctx;
    RIGHT(cuEventCreate(&w.events[i].event, 0));
}

/* A second context comes, if there is room for it, or goes, with all that it has. */
static void change_context(struct thread *t, int n)
{
    static const struct call made = {.name = "cuCtxCreate_v2"};
    struct request q = {.call = &made};
    if (!w.contexts[n].ctx) {
        sit_in(t, 0);
        int fit = fits(&q);
        CUresult r = w.cu->cuCtxCreate_v2(&w.contexts[n].ctx, 0, w.device);
        if (r == CUDA_ERROR_OUT_OF_MEMORY) {
            w.refused++;
            w.early += (uint64_t)fit;
            if (fit)
                say(w.first, "step %llu: a context was refused", (unsigned long long)w.steps);
            w.contexts[n].ctx = NULL;
        } else if (right("cuCtxCreate_v2", r)) {
            t->ctx = n;
            furnish(n);
        }
        return;
    }
    for (int i = 0; i < THREADS; i++)
        if (w.threads[i].ctx == n && &w.threads[i] != t)
            return; /* somebody sits in it */
    sit_in(t, 0);
    for (int i = 0; i < THINGS; i++) /* what pools gave may go with it or not */
        if (w.things[i].used && w.things[i].ctx == n && !w.things[i].call)
            give(t, &w.things[i]);
    RIGHT(cuCtxDestroy_v2(w.contexts[n].ctx));
    w.contexts[n].ctx = NULL;
    for (int i = 0; i < THINGS; i++) {
        struct thing *o = &w.things[i];
        /* Physical memory and that of graphs is no context's. */
        if (o->used && o->ctx == n && !strstr("cuMemCreate cuMemCreate/mapped cuMemCreate/retained cuGraphAddMemAllocNode cuMemAllocAsync/captured", o->call->name))
            forget(o);
    }
    for (int i = 0; i < STREAMS; i++)
        if (w.streams[i].ctx == n)
            new_stream(t, i);
    for (int i = 0; i < EVENTS; i++)
        if (w.events[i].ctx == n)
            new_event(t, i);
}

static void change_pool(struct thread *t)
{
    CUmemoryPool *p = &w.pools[dice(&t->seed, POOLS)];
    uint64_t keep = dice(&t->seed, 2) ? dice(&t->seed, 256 * MiB) : UINT64_MAX;
    int on = (int)dice(&t->seed, 2);
    if (!*p) {
        CUmemPoolProps props = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {CU_MEM_LOCATION_TYPE_DEVICE, w.device}};
        if (dice(&t->seed, 4) == 0)
            props.handleTypes = 1;
        RIGHT(cuMemPoolCreate(p, &props));
        return;
    }
    switch (dice(&t->seed, 6)) {
    case 0: RIGHT(cuMemPoolDestroy(*p)); *p = NULL; break;
    case 1: RIGHT(cuMemPoolTrimTo(*p, keep == UINT64_MAX ? 0 : keep)); break;
    case 2: case 3: RIGHT(cuMemPoolSetAttribute(*p, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &keep)); break;
    default: RIGHT(cuMemPoolSetAttribute(*p, 1 + (int)dice(&t->seed, 3), &on)); break;
    }
}

static CUfunction kernel_for(struct thread *t, CUstream s)
{
    return w.contexts[context_of(t, s)].busy[dice(&t->seed, KERNELS)];
}

static int fine(const char *call, CUresult r) { return r == CUDA_ERROR_NOT_READY || right(call, r); }

/* order does one thing that takes no memory. */
static void order(struct thread *t)
{
    CUstream s = any_stream(t);
    CUevent e = w.events[dice(&t->seed, EVENTS)].event;
    size_t unused, total;
    switch (dice(&t->seed, 16)) {
    case 0: case 1: case 2: case 3: case 4: RIGHT(cuLaunchKernel(kernel_for(t, s), 1, 1, 1, 32, 1, 1, 0, s, NULL, NULL)); break;
    case 5: case 6: RIGHT(cuEventRecord(e, s)); break;
    case 7: case 8: RIGHT(cuStreamWaitEvent(s, e, 0)); break;
    case 9: RIGHT(cuStreamSynchronize(s)); break;
    case 10: RIGHT(cuEventSynchronize(e)); break;
    case 11: fine("cuStreamQuery", w.cu->cuStreamQuery(s)); break;
    case 12: fine("cuEventQuery", w.cu->cuEventQuery(e)); break;
    case 13:
        if (RIGHT(cuMemGetInfo_v2(&unused, &total)) && unused > w.cap)
            say(w.failure, "step %llu: cuMemGetInfo has %zu free of a cap of %llu", (unsigned long long)w.steps, unused, (unsigned long long)w.cap);
        break;
    case 14: if (!dice(&t->seed, 4)) RIGHT(cuDeviceGraphMemTrim(w.device)); break;
    default: if (!dice(&t->seed, 4)) RIGHT(cuCtxSynchronize()); break;
    }
}

/* change does one thing that is rare. */
static void change(struct thread *t)
{
    int i;
    switch (dice(&t->seed, 8)) {
    case 0: change_context(t, 1 + (int)dice(&t->seed, CONTEXTS - 1)); break;
    case 1:
        i = (int)dice(&t->seed, STREAMS);
        RIGHT(cuStreamDestroy_v2(w.streams[i].stream));
        new_stream(t, i);
        break;
    case 2:
        i = (int)dice(&t->seed, EVENTS);
        RIGHT(cuEventDestroy_v2(w.events[i].event));
        new_event(t, i);
        break;
    case 3:
        i = (int)dice(&t->seed, CONTEXTS);
        if (w.contexts[i].ctx)
            sit_in(t, i);
        break;
    case 4: { /* the heap of a context */
        static const struct call limit = {.name = "cuCtxSetLimit"};
        struct request q = {.call = &limit, .bytes = (1 + dice(&t->seed, 8)) * 8 * MiB};
        int fit = fits(&q);
        CUresult r = w.cu->cuCtxSetLimit(CU_LIMIT_MALLOC_HEAP_SIZE, q.bytes);
        if (r == CUDA_ERROR_OUT_OF_MEMORY && fit) {
            w.early++;
            say(w.first, "step %llu: a heap of %llu refused", (unsigned long long)w.steps, (unsigned long long)q.bytes);
        } else if (r != CUDA_ERROR_OUT_OF_MEMORY && r != CUDA_ERROR_INVALID_VALUE) { /* invalid: a kernel has run there */
            right("cuCtxSetLimit", r);
            /* Some drivers take it when the next kernel comes; the judge knows it then. */
            RIGHT(cuLaunchKernel(w.contexts[t->ctx].busy[0], 1, 1, 1, 32, 1, 1, 0, NULL, NULL, NULL));
        }
        break;
    }
    default: change_pool(t); break;
    }
}

/* --- steps ------------------------------------------------------------------ */

static struct request wish(struct thread *t)
{
    static const char *const others[] = {
        "cuMemAllocPitch_v2", "cuMemAllocManaged", "cuMemCreate", "cuMemCreate/mapped", "cuMemCreate/retained", "cuArrayCreate_v2",
        "cuArray3DCreate_v2", "cuMipmappedArrayCreate", "cuGraphAddMemAllocNode", "cuMemAllocAsync/captured", "cuModuleLoadData", "cuMemHostAlloc",
    };
    struct request q = {.stream = any_stream(t), .bytes = size_of(&t->seed)};
    uint64_t i = dice(&t->seed, 10);
    if (i < 3) {
        q.call = find_call("cuMemAlloc_v2");
    } else if (i < 7) {
        q.pool = dice(&t->seed, 3) ? NULL : w.pools[dice(&t->seed, POOLS)];
    } else {
        q.call = find_call(others[dice(&t->seed, sizeof others / sizeof *others)]);
        q.bytes = round_up(q.bytes, 2 * MiB); /* of arrays and the like, whole rows and planes */
        if (!q.stream || q.stream == CU_STREAM_PER_THREAD)
            q.stream = w.streams[0].stream; /* the default stream cannot be captured */
    }
    return q;
}

static void step(struct thread *t)
{
    uint64_t i = dice(&t->seed, 100);
    w.steps++;
    if (w.steps % 200 == 0)
        w.target = w.room * (50 + dice(&w.seed, 70)) / 100;
    if (i < 30) {
        order(t);
    } else if (i < 32) {
        change(t);
    } else if (w.live < w.target ? i < 84 : i < 45) {
        struct request q = wish(t);
        if (judged(t, &q) || w.failure[0])
            return;
        /* What programs do that were refused. */
        if (dice(&t->seed, 2))
            RIGHT(cuCtxSynchronize());
        give_any(t, (int)dice(&t->seed, 8));
    } else {
        give_any(t, 1);
    }
}

/* rush is what all threads do at once: each by itself, nothing is judged. */
static void rush(struct thread *t)
{
    struct {
        struct request q;
        struct item i;
    } mine[12] = {0};
    struct item none = {0};
    for (uint64_t n = 0; n < w.share; n++) {
        uint64_t at = dice(&t->seed, sizeof mine / sizeof *mine);
        struct request q = {.stream = w.streams[dice(&t->seed, STREAMS)].stream, .bytes = size_of(&t->seed)};
        if (mine[at].q.bytes) {
            CUresult r = mine[at].q.call ? w.cu->cuMemFree_v2(mine[at].i.a) : w.cu->cuMemFreeAsync(mine[at].i.a, q.stream);
            if (r != CUDA_SUCCESS)
                right("to free in a rush", r);
            mine[at].q.bytes = 0;
            continue;
        }
        q.call = dice(&t->seed, 3) ? NULL : find_call("cuMemAlloc_v2");
        mine[at].i = none;
        CUresult r = ask(&q, t, &mine[at].i);
        if (r == CUDA_SUCCESS)
            mine[at].q = q;
        else if (r != CUDA_ERROR_OUT_OF_MEMORY)
            right(name_of(&q), r);
        else if (t->refusals < ERRAND)
            t->refused[t->refusals++] = q;
        if (dice(&t->seed, 3) == 0)
            w.cu->cuLaunchKernel(kernel_for(t, q.stream), 1, 1, 1, 32, 1, 1, 0, q.stream, NULL, NULL);
    }
    for (size_t at = 0; at < sizeof mine / sizeof *mine; at++)
        if (mine[at].q.bytes && (mine[at].q.call ? w.cu->cuMemFree_v2(mine[at].i.a) : w.cu->cuMemFreeAsync(mine[at].i.a, NULL)) != CUDA_SUCCESS)
            right("to free after a rush", CUDA_ERROR_INVALID_VALUE);
}

/* errands tries again what was refused in the rush, whoever asked for it. */
static void errands(struct thread *t)
{
    for (struct thread *who = w.threads; who < w.threads + THREADS; who++) {
        for (int i = 0; i < who->refusals && !w.failure[0]; i++) {
            w.errands++;
            judged(t, &who->refused[i]);
        }
        who->refusals = 0;
    }
}

static void turn_to(int whom, uint64_t share)
{
    pthread_mutex_lock(&w.lock);
    w.turn = whom;
    w.turns++;
    w.share = share;
    w.at_work = whom == THREADS ? THREADS : 1;
    pthread_cond_broadcast(&w.turned);
    while (w.at_work)
        pthread_cond_wait(&w.turned, &w.lock);
    pthread_mutex_unlock(&w.lock);
}

static void *walk_thread(void *arg)
{
    struct thread *t = arg;
    uint64_t had = 0; /* turns */
    sit_in(t, 0);
    pthread_mutex_lock(&w.lock);
    for (;;) {
        while (!w.over && (had == w.turns || (w.turn != t->number && w.turn != THREADS)))
            pthread_cond_wait(&w.turned, &w.lock);
        if (w.over)
            break;
        int all = w.turn == THREADS;
        had = w.turns;
        pthread_mutex_unlock(&w.lock);
        if (all)
            rush(t);
        else
            errands(t);
        for (uint64_t n = 0; !all && n < w.share && !w.failure[0]; n++)
            step(t);
        pthread_mutex_lock(&w.lock);
        w.at_work--;
        pthread_cond_broadcast(&w.turned);
    }
    pthread_mutex_unlock(&w.lock);
    return NULL;
}

static const char *begin_walk(const char *door, int device, uint64_t seed, uint64_t cap, const char *judge)
{
    static struct cuda cu;
    static struct seat seat;
    CUresult r;
    const char *problem = open_door(door, &cu);
    w = (struct walk){.cu = &cu, .cap = cap, .seed = seed};
    if (problem || (problem = sit(&seat, &cu, device, &r)))
        return problem;
    void *library = dlopen(judge, RTLD_NOW | RTLD_NOLOAD);
    w.fits = library ? (CUresult(*)(int, CUmemoryPool, size_t, CUstream, size_t, int *))dlsym(library, "cuEmulatorFits") : NULL;
    w.info = library ? (CUresult(*)(size_t *, size_t *))dlsym(library, "cuMemGetInfo_v2") : NULL;
    if (!w.fits || !w.info)
        return "cuEmulatorFits";
    w.device = seat.device;
    w.contexts[0].ctx = seat.context;
    w.room = cap > 300 * MiB ? cap - 300 * MiB : cap;
    w.target = w.room;
    furnish(0);
    struct thread *first = &w.threads[0];
    first->seed = seed;
    for (int i = 0; i < STREAMS; i++)
        new_stream(first, i);
    for (int i = 0; i < EVENTS; i++)
        new_event(first, i);
    pthread_mutex_init(&w.lock, NULL);
    pthread_cond_init(&w.turned, NULL);
    return w.failure[0] ? w.failure : NULL;
}

void walk(const char *door, int device, uint64_t seed, uint64_t steps, uint64_t cap, const char *judge)
{
    const char *problem = begin_walk(door, device, seed, cap, judge);
    if (problem) {
        printf("walked steps=0 failure=%s\n", problem);
        return;
    }
    for (int i = 0; i < THREADS; i++) {
        w.threads[i].number = i;
        w.threads[i].seed = seed * 31 + (uint64_t)i;
        pthread_create(&w.threads[i].id, NULL, walk_thread, &w.threads[i]);
    }
    for (uint64_t turns = 0; w.steps < steps && !w.failure[0]; turns++) {
        if (turns % 8 == 7) {
            turn_to(THREADS, SHIFT);
            w.steps += THREADS * SHIFT;
        } else {
            turn_to((int)dice(&w.seed, THREADS), SHIFT);
        }
        if (turns % 8 == 0)
            printf("walking steps=%llu\n", (unsigned long long)w.steps); /* a sign of life */
    }
    pthread_mutex_lock(&w.lock);
    w.over = 1;
    pthread_cond_broadcast(&w.turned);
    pthread_mutex_unlock(&w.lock);
    for (int i = 0; i < THREADS; i++)
        pthread_join(w.threads[i].id, NULL);
    printf("walked steps=%llu granted=%llu refused=%llu early=%llu twice=%llu errands=%llu first=%s failure=%s\n", (unsigned long long)w.steps,
           (unsigned long long)w.granted, (unsigned long long)w.refused, (unsigned long long)w.early, (unsigned long long)w.twice,
           (unsigned long long)w.errands, w.first, w.failure);
}
