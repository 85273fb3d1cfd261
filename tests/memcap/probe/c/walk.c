/* SPDX-License-Identifier: Apache-2.0 */

/* A walk's turns and steps, and the judge. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "walk.h"

struct walk w;

uint64_t dice(uint64_t *state, uint64_t n)
{
    *state += 0x9e3779b97f4a7c15;
    uint64_t z = *state;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return (z ^ (z >> 31)) % n;
}

void say(char to[256], const char *format, ...)
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

int right(const char *call, CUresult r)
{
    if (r != CUDA_SUCCESS)
        say(w.book->failure, "step %llu: %s: %d", (unsigned long long)w.common->steps, call, r);
    return r == CUDA_SUCCESS;
}

static int failed(void)
{
    for (int i = 0; i < PROCESSES; i++)
        if (w.common->books[i].failure[0])
            return 1;
    return 0;
}

/* --- the judge -------------------------------------------------------------- */

static uint64_t live(void)
{
    uint64_t sum = 0;
    for (int i = 0; i < PROCESSES; i++)
        sum += w.common->books[i].live;
    return sum;
}

/* managed is what both processes have of managed memory: pools what they keep. */
static uint64_t managed(void)
{
    uint64_t sum = 0;
    w.book->pooled = 0;
    for (int i = 0; i < POOLS; i++) {
        uint64_t has = 0;
        if (w.pools[i].managed && RIGHT(cuMemPoolGetAttribute(w.pools[i].pool, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &has)))
            w.book->pooled += has;
    }
    for (int i = 0; i < PROCESSES; i++)
        sum += w.common->books[i].managed + w.common->books[i].pooled;
    return sum;
}

int fits(const struct request *q)
{
    int kind = !q->call ? POOLED : is(q, "cuMemAlloc_v2") ? LINEAR : BLOCKS, yes = 0;
    uint64_t bytes = q->call ? unit_of(q->call, q->bytes) : q->bytes, more = managed();
    if (is(q, "cuCtxCreate_v2"))
        bytes = 308 * MiB; /* and more than any context takes */
    if (is(q, "cuMemHostAlloc"))
        return 1;
    if (is(q, "cuGraphLaunch"))
        kind = GRAPH;
    CUresult r = w.fits(kind, q->pool, bytes, q->stream, w.cap > more ? w.cap - more : 0, &yes);
    if (r != CUDA_SUCCESS)
        say(w.book->failure, "step %llu: cuEmulatorFits of %s: %d", (unsigned long long)w.common->steps, name_of(q), r);
    return yes;
}

void refused(const struct request *q, int fit)
{
    size_t unused = 0, total = 0, beneath = 0, card = 0;
    w.book->refused++;
    if (!fit)
        return;
    w.cu->cuMemGetInfo_v2(&unused, &total);
    w.info(&beneath, &card);
    char what[256] = "";
    say(what, "step %llu: %s of %llu KiB refused, with %zu KiB left by its word; the driver has given %zu KiB of %zu, managed are %llu",
        (unsigned long long)w.common->steps, name_of(q), (unsigned long long)q->bytes >> 10, unused >> 10, (card - beneath) >> 10,
        (size_t)w.cap >> 10, (unsigned long long)managed() >> 10);
    if (w.book->early++ < TOLD)
        dprintf(STDOUT_FILENO, "walking early=%s\n", what);
    say(w.book->first, "%s", what);
}

/* judged makes a request alone, and again if it was refused early. */
static int judged(struct thread *t, const struct request *q)
{
    struct thing *to = room_for_one();
    for (int tries = 0; to && !failed(); tries++) {
        struct item i = {0};
        int fit = fits(q);
        CUresult r = ask(q, t, &i);
        if (r == CUDA_SUCCESS) {
            keep(to, t, q, i);
            w.book->granted++;
            return 1;
        }
        if (r != CUDA_ERROR_OUT_OF_MEMORY) {
            right(name_of(q), r);
            return 0;
        }
        if (tries && fit) {
            w.book->refused++;
            w.book->twice++;
            return 0;
        }
        refused(q, fit);
        if (!fit)
            return 0;
    }
    return 0;
}

/* --- steps ------------------------------------------------------------------ */

static void step(struct thread *t)
{
    uint64_t i = dice(&t->seed, 100);
    w.common->steps++;
    if (w.common->steps % 200 == 0)
        w.common->target = w.room * (50 + dice(&w.seed, 70)) / 100;
    if (i < 30) {
        order(t);
    } else if (i < 32) {
        change(t);
    } else if (live() < w.common->target ? i < 84 : i < 45) {
        struct request q = wish(t);
        if (judged(t, &q) || failed())
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
    for (uint64_t n = 0; n < w.common->share; n++) {
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

/* errands tries again what was refused in the rush, whichever thread asked for it. */
static void errands(struct thread *t)
{
    for (struct thread *who = w.threads; who < w.threads + THREADS; who++) {
        for (int i = 0; i < who->refusals && !failed(); i++) {
            w.book->errands++;
            judged(t, &who->refused[i]);
        }
        who->refusals = 0;
    }
}

/* --- turns ------------------------------------------------------------------ */

/* turned waits for news of the turns; it answers 0 if the other process is dead. */
static int turned(void)
{
    struct timespec until;
    int status;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec++;
    pthread_cond_timedwait(&w.common->turned, &w.common->lock, &until);
    if (w.child <= 0 || waitpid(w.child, &status, WNOHANG) != w.child)
        return 1;
    say(w.book->failure, "the other process has ended with %#x", status);
    w.child = 0;
    return 0;
}

/* turn_to answers 0 if the turn will never end. */
static int turn_to(int whom, uint64_t share)
{
    struct common *c = w.common;
    int alive = 1;
    pthread_mutex_lock(&c->lock);
    c->turn = whom;
    c->turns++;
    c->share = share;
    c->at_work = whom == EVERYBODY ? EVERYBODY : 1;
    pthread_cond_broadcast(&c->turned);
    while (c->at_work && alive)
        alive = turned();
    pthread_mutex_unlock(&c->lock);
    return alive;
}

static void *walk_thread(void *arg)
{
    struct common *c = w.common;
    struct thread *t = arg;
    uint64_t had = 0; /* turns */
    sit_in(t, 0);
    pthread_mutex_lock(&c->lock);
    for (;;) {
        while (!c->over && (had == c->turns || (c->turn != t->number && c->turn != EVERYBODY)))
            pthread_cond_wait(&c->turned, &c->lock);
        if (c->over)
            break;
        int all = c->turn == EVERYBODY;
        had = c->turns;
        pthread_mutex_unlock(&c->lock);
        if (all)
            rush(t);
        else
            errands(t);
        for (uint64_t n = 0; !all && n < c->share && !failed(); n++)
            step(t);
        if (!all)
            managed(); /* for the other process's judge */
        pthread_mutex_lock(&c->lock);
        c->at_work--;
        pthread_cond_broadcast(&c->turned);
    }
    pthread_mutex_unlock(&c->lock);
    return NULL;
}

/* --- processes -------------------------------------------------------------- */

/* two makes the other process, before anything of CUDA is called. */
static const char *two(void)
{
    int ends[2];
    pthread_mutexattr_t m;
    pthread_condattr_t c;
    w.common = mmap(NULL, sizeof *w.common, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (w.common == MAP_FAILED)
        return "mmap";
    w.book = &w.common->books[0];
    pthread_mutexattr_init(&m);
    pthread_mutexattr_setpshared(&m, PTHREAD_PROCESS_SHARED);
    pthread_condattr_init(&c);
    pthread_condattr_setpshared(&c, PTHREAD_PROCESS_SHARED);
    pthread_mutex_init(&w.common->lock, &m);
    pthread_cond_init(&w.common->turned, &c);
    if (socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends))
        return "socketpair";
    w.child = fork();
    if (w.child < 0)
        return "fork";
    w.process = w.child ? 0 : 1;
    w.post = ends[w.process];
    close(ends[1 - w.process]);
    w.book = &w.common->books[w.process];
    if (w.process)
        prctl(PR_SET_PDEATHSIG, SIGKILL);
    return NULL;
}

static int has_property(int type, CUmemLocation location)
{
    CUmemAllocationProp prop = {.type = type, .location = location};
    size_t grain;
    return w.cu->cuMemGetAllocationGranularity(&grain, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM) == CUDA_SUCCESS;
}

static const char *sit_down(const char *door, int device, const char *judge)
{
    static struct cuda cu;
    static struct seat seat;
    CUresult r;
    const char *problem = open_door(door, &cu);
    w.cu = &cu;
    if (problem || (problem = sit(&seat, &cu, device, &r)))
        return problem;
    void *library = dlopen(judge, RTLD_NOW | RTLD_NOLOAD);
    w.fits = library ? (CUresult(*)(int, CUmemoryPool, size_t, CUstream, size_t, int *))dlsym(library, "cuEmulatorFits") : NULL;
    w.info = library ? (CUresult(*)(size_t *, size_t *))dlsym(library, "cuMemGetInfo_v2") : NULL;
    if (!w.fits || !w.info)
        return "cuEmulatorFits";
    w.device = seat.device;
    w.contexts[0].ctx = seat.context;
    w.domains = has_property(CU_MEM_ALLOCATION_TYPE_PINNED, (CUmemLocation){CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN, w.device | 1 << 8});
    w.managed = has_property(CU_MEM_ALLOCATION_TYPE_MANAGED, (CUmemLocation){CU_MEM_LOCATION_TYPE_DEVICE, w.device});
    furnish(0);
    for (int i = 0; i < THREADS; i++) {
        w.threads[i].number = w.process * THREADS + i;
        w.threads[i].seed = w.seed * 31 + (uint64_t)w.threads[i].number;
    }
    for (int i = 0; i < STREAMS; i++)
        new_stream(&w.threads[0], i);
    for (int i = 0; i < EVENTS; i++)
        new_event(&w.threads[0], i);
    return w.book->failure[0] ? w.book->failure : NULL;
}

/* begun starts this process's threads, and waits for those of the other. */
static int begun(const char *door, int device, const char *judge)
{
    struct common *c = w.common;
    const char *problem = sit_down(door, device, judge);
    if (problem)
        say(w.book->failure, "%s", problem);
    for (int i = 0; !problem && i < THREADS; i++)
        if (pthread_create(&w.threads[i].id, NULL, walk_thread, &w.threads[i]))
            abort();
    pthread_mutex_lock(&c->lock);
    w.book->ready = 1;
    pthread_cond_broadcast(&c->turned);
    while (!w.process && !c->books[1].ready && turned())
        ;
    pthread_mutex_unlock(&c->lock);
    return !problem;
}

static void join(int started)
{
    for (int i = 0; started && i < THREADS; i++)
        pthread_join(w.threads[i].id, NULL);
}

static void lead(uint64_t steps)
{
    struct common *c = w.common;
    int alive = 1;
    for (uint64_t turns = 0; c->steps < steps && !failed() && alive; turns++) {
        if (turns % 8 == 7) {
            alive = turn_to(EVERYBODY, SHIFT);
            c->steps += EVERYBODY * SHIFT;
        } else {
            alive = turn_to((int)dice(&w.seed, EVERYBODY), SHIFT);
        }
        if (turns % 8 == 0)
            printf("walking steps=%llu\n", (unsigned long long)c->steps); /* a sign of life */
    }
    pthread_mutex_lock(&c->lock);
    c->over = 1;
    pthread_cond_broadcast(&c->turned);
    pthread_mutex_unlock(&c->lock);
}

static void report(void)
{
    struct book sum = {0};
    for (int i = 0; i < PROCESSES; i++) {
        const struct book *b = &w.common->books[i];
        sum.granted += b->granted;
        sum.refused += b->refused;
        sum.early += b->early;
        sum.twice += b->twice;
        sum.errands += b->errands;
        sum.passed += b->passed;
        say(sum.first, "%s", b->first);
        say(sum.failure, "%s", b->failure);
    }
    printf("walked steps=%llu granted=%llu refused=%llu early=%llu twice=%llu errands=%llu passed=%llu first=%s failure=%s\n",
           (unsigned long long)w.common->steps, (unsigned long long)sum.granted, (unsigned long long)sum.refused, (unsigned long long)sum.early,
           (unsigned long long)sum.twice, (unsigned long long)sum.errands, (unsigned long long)sum.passed, sum.first, sum.failure);
}

void walk(const char *door, int device, uint64_t seed, uint64_t steps, uint64_t cap, const char *judge)
{
    uint64_t contexts = PROCESSES * 300 * MiB;
    w = (struct walk){.cap = cap, .seed = seed, .room = cap > contexts ? cap - contexts : cap};
    const char *problem = two();
    if (problem) {
        printf("walked steps=0 failure=%s\n", problem);
        return;
    }
    w.common->target = w.room;
    int started = begun(door, device, judge), status;
    if (!w.process)
        lead(steps);
    join(started);
    if (w.process)
        _exit(0); /* what it has goes with it */
    if (w.child > 0 && waitpid(w.child, &status, 0) == w.child && status)
        say(w.book->failure, "the other process has ended with %#x", status);
    report();
}
