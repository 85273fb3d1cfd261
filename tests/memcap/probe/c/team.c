/* SPDX-License-Identifier: Apache-2.0 */

#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "probe.h"

/* What the workers of a team share, whatever process they are in. All of them
 * and the first process's main thread meet at the gate before and after each
 * step. */
static struct shared {
    pthread_barrier_t gate;
    enum { LEAVE, TAKE, GIVE_HALF, GIVE_ALL } step;
    char call[64];
    uint64_t request, room, slack;
    /* What the workers have, and what they are asking for right now. */
    _Atomic uint64_t live, pending;
    _Atomic uint64_t highest;  /* of live */
    _Atomic uint64_t refused;  /* requests */
    _Atomic uint64_t early;    /* of these, the ones with room left for them */
    _Atomic uint64_t spare;    /* the most room that was left then */
    _Atomic int claimed;       /* somebody writes, or has written, failure */
    char failure[256];         /* what went wrong that should not have */
} *shared;

static struct cuda cu; /* of this process */
static int workers;
static volatile sig_atomic_t dismissing;

static void fail(const char *what, CUresult r)
{
    if (!atomic_exchange(&shared->claimed, 1))
        snprintf(shared->failure, sizeof shared->failure, "%s(%d)", what, r);
}

static void raise_to(_Atomic uint64_t *to, uint64_t v)
{
    uint64_t old = *to;
    while (old < v && !atomic_compare_exchange_weak(to, &old, v))
        ;
}

struct worker {
    struct seat seat;
    struct item *items;
    size_t count, room;
    int failed;
};

static void take(struct worker *w, const struct call *c, uint64_t unit)
{
    for (;;) {
        if (w->count == w->room) {
            w->room = w->room * 2 + 64;
            w->items = realloc(w->items, w->room * sizeof *w->items);
            if (!w->items)
                abort();
        }
        struct item *i = &w->items[w->count];
        *i = (struct item){0};
        shared->pending += unit;
        CUresult r = c->take(&w->seat, i, shared->request);
        if (r == CUDA_SUCCESS) {
            uint64_t live = shared->live += unit;
            shared->pending -= unit;
            w->count++;
            raise_to(&shared->highest, live);
            /* There is no cap; go no further than it takes to know that. */
            if (live > shared->room + shared->slack + 2 * unit * workers)
                return;
            continue;
        }
        /* In this order, a request that is granted meanwhile counts twice
         * rather than not at all. */
        uint64_t others = shared->pending - unit;
        uint64_t seen = others + shared->live;
        shared->pending -= unit;
        if (r != CUDA_ERROR_OUT_OF_MEMORY) {
            fail(c->name, r);
            return;
        }
        shared->refused++;
        if (seen + unit + shared->slack <= shared->room) {
            shared->early++;
            raise_to(&shared->spare, shared->room - seen);
        }
        return;
    }
}

static void give(struct worker *w, const struct call *c, uint64_t unit, size_t down_to)
{
    /* Not the last ones, so that holes come about. */
    for (size_t at = 0; w->count > down_to; at = (at + 1) % w->count) {
        CUresult r = c->give(&w->seat, &w->items[at]);
        if (r != CUDA_SUCCESS)
            fail("giving back", r);
        w->items[at] = w->items[--w->count];
        shared->live -= unit;
        if (!w->count)
            break;
    }
}

/* meet waits for all, and says what is next. */
static int meet(void)
{
    pthread_barrier_wait(&shared->gate);
    return shared->step;
}

static void *labour(void *opening)
{
    struct team *t = opening;
    struct worker w = {0};
    CUresult r;
    const char *what = sit(&w.seat, &cu, t->device, &r);
    if (what) {
        fail(what, r);
        w.failed = 1;
    }
    meet(); /* all are seated, or say so */
    for (int step; (step = meet()) != LEAVE; meet()) {
        const struct call *c = find_call(shared->call);
        uint64_t unit = unit_of(c, shared->request);
        if (w.failed)
            continue;
        switch (step) {
        case TAKE:
            take(&w, c, unit);
            break;
        case GIVE_HALF:
            give(&w, c, unit, w.count / 2);
            break;
        case GIVE_ALL:
            give(&w, c, unit, 0);
            r = settle(&w.seat);
            if (r != CUDA_SUCCESS)
                fail("settling", r);
            break;
        }
    }
    if (!w.failed)
        leave(&w.seat);
    free(w.items);
    return NULL;
}

/* man starts the workers of this process but the one that the caller may be. */
static int man(struct team *t, pthread_t *threads, int from)
{
    for (int i = from; i < t->threads; i++)
        if (pthread_create(&threads[i], NULL, labour, t)) {
            fprintf(stderr, "probe: cannot start thread %d\n", i);
            return 1;
        }
    return 0;
}

static void on_child(int sig)
{
    (void)sig;
    int status;
    pid_t pid;
    while ((pid = waitpid(-1, &status, WNOHANG)) > 0) {
        if (dismissing || (WIFEXITED(status) && !WEXITSTATUS(status)))
            continue;
        /* The others would wait for it for ever. */
        static const char say[] = "failed a worker process has died\n";
        if (write(STDOUT_FILENO, say, sizeof say - 1) > 0)
            _exit(70);
        _exit(71);
    }
}

static int map_shared(int fd)
{
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    return shared == MAP_FAILED;
}

static int open_library(struct team *t)
{
    const char *problem = open_door(t->door, &cu);
    if (problem)
        fail(problem, 0);
    return problem != NULL;
}

/* A process that is started: its main thread is a worker. */
static int serve(struct team *t)
{
    pthread_t threads[t->threads];
    if (man(t, threads, 1))
        return 1;
    labour(t);
    for (int i = 1; i < t->threads; i++)
        pthread_join(threads[i], NULL);
    return 0;
}

int work(struct team *t)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (map_shared(t->shared))
        return 1;
    workers = t->processes * t->threads;
    open_library(t);
    return serve(t);
}

static int start_other(struct team *t, int i)
{
    int by_exec = t->start == BY_EXEC || (t->start == BY_BOTH && i % 2);
    pid_t parent = getpid(), pid = fork();
    if (pid)
        return pid < 0;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent)
        _exit(1);
    signal(SIGCHLD, SIG_DFL);
    if (!by_exec)
        _exit(serve(t));
    char fd[16];
    snprintf(fd, sizeof fd, "%d", t->shared);
    int n = 0;
    while (t->argv[n])
        n++;
    char *argv[n + 3];
    memcpy(argv, t->argv, n * sizeof *argv);
    argv[n] = "-shared";
    argv[n + 1] = fd;
    argv[n + 2] = NULL;
    execv("/proc/self/exe", argv);
    _exit(127);
}

int gather(struct team *t)
{
    workers = t->processes * t->threads;
    t->shared = memfd_create("team", 0);
    if (t->shared < 0 || ftruncate(t->shared, sizeof *shared) || map_shared(t->shared)) {
        perror("probe: share memory");
        return 1;
    }
    pthread_barrierattr_t attr;
    pthread_barrierattr_init(&attr);
    pthread_barrierattr_setpshared(&attr, PTHREAD_PROCESS_SHARED);
    pthread_barrier_init(&shared->gate, &attr, workers + 1);

    struct sigaction act = {.sa_handler = on_child, .sa_flags = SA_RESTART | SA_NOCLDSTOP};
    sigaction(SIGCHLD, &act, NULL);
    if (open_library(t)) {
        printf("failed %s\n", shared->failure);
        return 1;
    }
    if (t->early) {
        /* A parent that computes, and a child of it that has nothing to do with
         * any of this. */
        static struct seat seat;
        static struct item item;
        CUresult r;
        const char *what = sit(&seat, &cu, t->device, &r);
        if (!what && (r = cu.cuMemAlloc_v2(&item.a, 32 << 20)) != CUDA_SUCCESS)
            what = "cuMemAlloc_v2";
        if (what) {
            printf("failed %s(%d)\n", what, r);
            return 1;
        }
        pid_t idle = fork();
        if (!idle) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            for (;;)
                pause();
        }
    }
    for (int i = 1; i < t->processes; i++)
        if (start_other(t, i)) {
            perror("probe: start a process");
            return 1;
        }
    pthread_t threads[t->threads];
    if (man(t, threads, 0))
        return 1;
    meet();
    if (shared->claimed) {
        printf("failed %s\n", shared->failure);
        return 1;
    }
    printf("ready workers=%d\n", workers);
    return 0;
}

static uint64_t step(int step)
{
    shared->step = step;
    meet();
    meet();
    return shared->live;
}

void fill(const char *name, uint64_t request, uint64_t room, uint64_t slack)
{
    const struct call *c = find_call(name);
    const char *lacks = c ? missing(&cu, c) : "the probe";
    if (lacks) {
        printf("row call=%s absent=%s\n", name, lacks);
        return;
    }
    snprintf(shared->call, sizeof shared->call, "%s", name);
    shared->request = request;
    shared->room = room;
    shared->slack = slack;
    shared->live = shared->pending = shared->highest = shared->refused = shared->early = shared->spare = 0;
    shared->claimed = 0;
    shared->failure[0] = 0;
    uint64_t first = step(TAKE);
    uint64_t kept = step(GIVE_HALF);
    uint64_t second = step(TAKE);
    uint64_t left = step(GIVE_ALL);
    for (char *p = shared->failure; *p; p++)
        if (*p == ' ')
            *p = '_';
    printf("row call=%s unit=%llu first=%llu kept=%llu second=%llu left=%llu highest=%llu refused=%llu early=%llu spare=%llu failure=%s\n", name,
           (unsigned long long)unit_of(c, request), (unsigned long long)first, (unsigned long long)kept, (unsigned long long)second,
           (unsigned long long)left, (unsigned long long)shared->highest, (unsigned long long)shared->refused,
           (unsigned long long)shared->early, (unsigned long long)shared->spare, shared->failure);
}

void dismiss(void)
{
    if (!shared)
        return;
    dismissing = 1;
    shared->step = LEAVE;
    meet();
}
