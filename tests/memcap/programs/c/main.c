/* SPDX-License-Identifier: Apache-2.0 */

/* programs NAME SEED MILLISECONDS [OPERATIONS [DOOR]] runs one of them, for so long
 * or until it has done so much, and prints
 *
 *     ended name=… operations=… granted=… refused=… failed=… refusing-us=… slowest-us=… stalled-us=… start-us=… cpu-us=… wall-us=… failure=…
 *
 * start-us is processor time until all processes were ready, cpu-us what came after.
 * With no arguments it prints their names. DOOR is one of the probe's; the default
 * is query2, which is how the CUDA runtime finds the driver. */
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "programs.h"

static int is_child;

/* A request that is granted takes a fraction of this, in ns. */
#define STANDING 100000000ull

static const struct program *const all[] = {torch_programs, rmm_programs, jax_programs, nccl_programs, vllm_programs};

uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
}

uint64_t roll(struct run *r, uint64_t n)
{
    r->dice += 0x9e3779b97f4a7c15;
    uint64_t z = r->dice;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return (z ^ (z >> 31)) % n;
}

uint64_t between(struct run *r, uint64_t a, uint64_t b) { return a + roll(r, b - a + 1); }

uint64_t round_up(uint64_t n, uint64_t to) { return (n + to - 1) / to * to; }

void fail(struct run *r, const char *format, ...)
{
    va_list args;
    if (atomic_exchange(&r->tally->claimed, 1))
        return;
    va_start(args, format);
    vsnprintf(r->tally->failure, sizeof r->tally->failure, format, args);
    va_end(args);
    for (char *p = r->tally->failure; *p; p++)
        if (*p == ' ' || *p == '\n')
            *p = '_';
}

static uint64_t cpu_us(int who)
{
    struct rusage u;
    getrusage(who, &u);
    return (uint64_t)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) * 1000000 + (uint64_t)(u.ru_utime.tv_usec + u.ru_stime.tv_usec);
}

int going(struct run *r) { return !r->tally->claimed && r->tally->operations < r->most && now_ns() < r->until + r->tally->stood; }

static void raise_to(_Atomic uint64_t *to, uint64_t v)
{
    uint64_t old = *to;
    while (old < v && !atomic_compare_exchange_weak(to, &old, v))
        ;
}

void ask_begins(struct run *r) { r->began = now_ns(); }

int ask_ended(struct run *r, const char *call, CUresult result)
{
    uint64_t took = now_ns() - r->began;
    if (result == CUDA_ERROR_OUT_OF_MEMORY) {
        r->tally->refused++;
        r->tally->refusing += took;
        raise_to(&r->tally->slowest, took);
        return 0;
    }
    if (!must_be(r, call, result))
        return 0;
    r->tally->granted++;
    raise_to(&r->tally->stalled, took);
    /* A machine that other work keeps busy stands still for seconds, which are not the
     * program's: what it has to do in its time it could not have done then. */
    if (took > STANDING)
        r->tally->stood += took - STANDING;
    return 1;
}

int must_be(struct run *r, const char *call, CUresult result)
{
    if (result != CUDA_SUCCESS)
        fail(r, "%s: %d", call, result);
    return result == CUDA_SUCCESS;
}

int sit_down(struct run *r, int device)
{
    /* An emulated driver reads the first line and the kernel's name, a real one
     * the rest. */
    static const char ptx[] = "// gpu-emulator: blocks 0\n"
                              ".version 6.0\n.target sm_50\n.address_size 64\n"
                              ".visible .entry busy_20us()\n{\n\tret;\n}\n";
    CUresult result;
    CUmodule module;
    const char *what = sit(&r->seat, r->cu, device, &result);
    if (what) {
        fail(r, "%s: %d", what, result);
        return 0;
    }
    int ready = MUST(r, r->cu->cuModuleLoadData(&module, ptx)) && MUST(r, r->cu->cuModuleGetFunction(&r->kernel, module, "busy_20us"));
    r->tally->starting += cpu_us(RUSAGE_SELF);
    return ready;
}

void compute(struct run *r, CUstream stream) { MUST(r, r->cu->cuLaunchKernel(r->kernel, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL)); }

int started(struct run *r, int *end)
{
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends)) {
        fail(r, "socketpair: %s", strerror(errno));
        return -1;
    }
    pid_t parent = getpid(), pid = fork();
    if (pid < 0) {
        fail(r, "fork: %s", strerror(errno));
        return -1;
    }
    *end = ends[pid == 0];
    close(ends[pid != 0]);
    if (!pid) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent)
            _exit(1);
        is_child = 1;
        r->dice ^= 0x5deece66d; /* both roll on their own */
    }
    return pid;
}

void joined(struct run *r, int pid)
{
    int status;
    if (!pid)
        _exit(r->tally->claimed);
    if (waitpid(pid, &status, 0) != pid || status)
        fail(r, "the other process ended with %#x", status);
}

int tell(struct run *r, int socket, const void *data, size_t size, int fd)
{
    char room[CMSG_SPACE(sizeof fd)] = {0};
    struct iovec part = {(void *)(uintptr_t)data, size};
    struct msghdr m = {.msg_iov = &part, .msg_iovlen = 1};
    if (fd >= 0) {
        m.msg_control = room;
        m.msg_controllen = sizeof room;
        struct cmsghdr *c = CMSG_FIRSTHDR(&m);
        *c = (struct cmsghdr){.cmsg_len = CMSG_LEN(sizeof fd), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
        memcpy(CMSG_DATA(c), &fd, sizeof fd);
    }
    if (sendmsg(socket, &m, MSG_NOSIGNAL) == (ssize_t)size)
        return 1;
    fail(r, "tell the other process: %s", strerror(errno));
    return 0;
}

int hear(struct run *r, int socket, void *data, size_t size, int *fd)
{
    char room[CMSG_SPACE(sizeof *fd)] = {0};
    struct iovec part = {data, size};
    struct msghdr m = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof room};
    ssize_t n = recvmsg(socket, &m, MSG_CMSG_CLOEXEC);
    if (n != (ssize_t)size) {
        fail(r, "hear from the other process: %s", n < 0 ? strerror(errno) : "it has ended");
        return 0;
    }
    struct cmsghdr *c = CMSG_FIRSTHDR(&m);
    if (fd && c && c->cmsg_type == SCM_RIGHTS)
        memcpy(fd, CMSG_DATA(c), sizeof *fd);
    return 1;
}

int main(int argc, char **argv)
{
    const struct program *p = NULL;
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        for (const struct program *q = all[i]; q->name; q++) {
            if (argc == 1)
                printf("%s\n", q->name);
            else if (!strcmp(q->name, argv[1]))
                p = q;
        }
    if (argc == 1)
        return 0;
    if (!p || argc < 4) {
        fprintf(stderr, "programs NAME SEED MILLISECONDS [OPERATIONS [DOOR]]\n");
        return 2;
    }
    static struct cuda cu;
    struct tally *t = mmap(NULL, sizeof *t, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (t == MAP_FAILED) {
        perror("programs: share memory");
        return 1;
    }
    uint64_t began = now_ns();
    struct run r = {.cu = &cu, .tally = t, .dice = strtoull(argv[2], NULL, 10), .until = began + strtoull(argv[3], NULL, 10) * 1000000,
                    .most = argc > 4 ? strtoull(argv[4], NULL, 10) : UINT64_MAX};
    const char *problem = open_door(argc > 5 ? argv[5] : "query2", &cu);
    if (problem)
        fail(&r, "%s", problem);
    else if (p->early || sit_down(&r, 0))
        p->run(&r);
    if (is_child) /* the report is the other's */
        _exit(t->claimed);
    if (!problem && !p->early && !t->claimed)
        leave(&r.seat);
    printf("ended name=%s operations=%llu granted=%llu refused=%llu failed=%llu refusing-us=%llu slowest-us=%llu stalled-us=%llu start-us=%llu cpu-us=%llu wall-us=%llu failure=%s\n",
           p->name, (unsigned long long)t->operations, (unsigned long long)t->granted, (unsigned long long)t->refused, (unsigned long long)t->failed,
           (unsigned long long)t->refusing / 1000, (unsigned long long)t->slowest / 1000, (unsigned long long)t->stalled / 1000,
           (unsigned long long)t->starting, (unsigned long long)(cpu_us(RUSAGE_SELF) + cpu_us(RUSAGE_CHILDREN) - t->starting), (unsigned long long)(now_ns() - began) / 1000, t->failure);
    return t->claimed;
}
