/* SPDX-License-Identifier: Apache-2.0 */

/* What takes memory without an allocation: a context's limits, and modules. And what
 * programs are told that there is. */

#define _GNU_SOURCE
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "scenario.h"

static void heap_beyond_the_cap(struct scene *s)
{
    CUdeviceptr p;
    if (!ASK(s, s->room - MiB, s->cu->cuMemAlloc_v2(&p, s->room - MiB)))
        return;
    if (ASK(s, 40 * GiB, s->cu->cuCtxSetLimit(CU_LIMIT_MALLOC_HEAP_SIZE, 40 * GiB)))
        given_back(s, 40 * GiB);
}

/* 64 KiB for each thread that the GPU can have at a time are many GiB. */
static void stacks_beyond_the_cap(struct scene *s) { ASK(s, 0, s->cu->cuCtxSetLimit(CU_LIMIT_STACK_SIZE, 64 << 10)); }

/* What a heap has taken is to be had again when it has become small. */
static void heap_rises_and_falls(struct scene *s)
{
    uint64_t heap = s->room / 2, rest = s->room * 3 / 4;
    for (int i = 0; i < 20 && !s->failure[0]; i++) {
        CUdeviceptr p;
        if (ASK(s, heap, s->cu->cuCtxSetLimit(CU_LIMIT_MALLOC_HEAP_SIZE, heap))) {
            if (ASK(s, rest, s->cu->cuMemAlloc_v2(&p, rest)))
                fail_scene(s, "a heap and an allocation that do not fit together");
            MUST(s, s->cu->cuCtxSetLimit(CU_LIMIT_MALLOC_HEAP_SIZE, 8 * MiB));
            given_back(s, heap);
        }
        if (ASK(s, rest, s->cu->cuMemAlloc_v2(&p, rest))) {
            MUST(s, s->cu->cuMemFree_v2(p));
            given_back(s, rest);
        }
    }
}

/* heap_kernel is a kernel that uses the heap. */
static CUfunction heap_kernel(struct scene *s)
{
    CUmodule module;
    CUfunction f = NULL;
    if (MUST(s, s->cu->cuModuleLoadData(&module,
                                        "// gpu-emulator: blocks 0\n"
                                        ".version 6.0\n.target sm_50\n.address_size 64\n"
                                        ".extern .func (.param .b64 func_retval0) malloc (.param .b64 malloc_param_0);\n"
                                        ".visible .entry malloc_64()\n{\n\t.reg .b64 %rd<3>;\n\tmov.u64 %rd1, 64;\n"
                                        "\t{\n\t.param .b64 param0;\n\tst.param.b64 [param0+0], %rd1;\n\t.param .b64 retval0;\n"
                                        "\tcall.uni (retval0), malloc, (param0);\n\tld.param.b64 %rd2, [retval0+0];\n\t}\n\tret;\n}\n")))
        MUST(s, s->cu->cuModuleGetFunction(&f, module, "malloc_64"));
    return f;
}

/* A driver may take a heap's memory with the first kernel, or the first one that uses it:
 * until then nobody else is to have it. */
static void heap_taken_at_the_first_kernel(struct scene *s)
{
    CUfunction user = heap_kernel(s);
    uint64_t heap = s->room / 2, rest = s->room / 16;
    CUdeviceptr p;
    if (!user || !ASK(s, heap, s->cu->cuCtxSetLimit(CU_LIMIT_MALLOC_HEAP_SIZE, heap)))
        return;
    for (int i = 0; i < 9; i++)
        if (!ASK(s, rest, s->cu->cuMemAlloc_v2(&p, rest)))
            break;
    if (launch(s, user, NULL))
        for (int i = 0; i < 2; i++)
            ASK(s, rest, s->cu->cuMemAlloc_v2(&p, rest));
}

/* What one process's heap has taken with its kernel, another is not to be refused for: the
 * one rests from then on. */
static void heap_taken_by_another_process(struct scene *s)
{
    int go[2], said[2];
    char c;
    CUresult r;
    CUdeviceptr p;
    uint64_t heap = s->room / 4, taken = 0;
    if (pipe(go) || pipe(said)) {
        fail_scene(s, "no pipes");
        return;
    }
    pid_t child = fork();
    if (child == 0) {
        close(go[1]); /* it ends when the other end is closed */
        const char *problem = sit(&s->seat, s->cu, s->device, &r);
        CUfunction user = problem ? NULL : heap_kernel(s);
        if (user && s->cu->cuCtxSetLimit(CU_LIMIT_MALLOC_HEAP_SIZE, heap) == CUDA_SUCCESS && launch(s, user, NULL) && write(said[1], "", 1) == 1 && read(go[0], &c, 1) >= 0)
            _exit(0);
        _exit(1);
    }
    close(said[1]);
    close(go[0]);
    const char *problem = sit(&s->seat, s->cu, s->device, &r);
    if (problem)
        fail_scene(s, "%s: %d", problem, r);
    else if (read(said[0], &c, 1) != 1)
        fail_scene(s, "the other process has not what it should have");
    for (int i = 0; i < 3 && !s->failure[0]; i++)
        while (ASK(s, 2 * MiB, s->cu->cuMemAlloc_v2(&p, 2 * MiB)))
            taken += 2 * MiB;
    note(s, "taken", taken);
    close(go[1]);
    waitpid(child, NULL, 0);
}

/* A heap is raised at the moment at which the driver has as much back of what was
 * exported: the one must not hide the other. What the heap leaves is to be had. */
static void heap_raised_while_exports_go(struct scene *s)
{
    CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED, .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                .location = {CU_MEM_LOCATION_TYPE_DEVICE, s->seat.device}};
    uint64_t heap = 40 * MiB, gone = 64 * MiB, rest = s->room - heap;
    for (int i = 0; i < 192 && !s->failure[0]; i++) {
        CUmemGenericAllocationHandle handle;
        CUdeviceptr p;
        int fd, had = 0;
        if (!ASK(s, gone, s->cu->cuMemCreate(&handle, gone, &prop, 0)) || !MUST(s, s->cu->cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0)) ||
            !MUST(s, s->cu->cuMemRelease(handle)))
            return;
        close(fd);
        for (uint64_t begin = now_ns(); now_ns() - begin < (uint64_t)(i % 16) * 5000;)
            ; /* the driver hears of it a moment later */
        if (!MUST(s, s->cu->cuCtxSetLimit(CU_LIMIT_MALLOC_HEAP_SIZE, heap)))
            return;
        given_back(s, gone);
        /* What was exported is room when a reading has seen that it is gone. */
        for (uint64_t begin = now_ns(); !(had = ASK(s, rest, s->cu->cuMemAlloc_v2(&p, rest))) && now_ns() - begin < 5000000000;)
            usleep(10000);
        if (!had) {
            fail_scene(s, "what the heap leaves was not to be had for five seconds, in round %d", i);
            return;
        }
        MUST(s, s->cu->cuMemFree_v2(p));
        given_back(s, rest);
        MUST(s, s->cu->cuCtxSetLimit(CU_LIMIT_MALLOC_HEAP_SIZE, 8 * MiB));
    }
}

static const char image_of_64_mib[] = "// gpu-emulator: blocks 32\n.version 6.0\n.target sm_50\n.address_size 64\n";

static void modules_beyond_the_cap(struct scene *s)
{
    enum { MOST = 64 };
    CUmodule m[MOST];
    int n = 0;
    while (n < MOST && ASK(s, 64 * MiB, s->cu->cuModuleLoadData(&m[n], image_of_64_mib)))
        n++;
    if (!n || n == MOST)
        return;
    /* What one has left another has. */
    for (int i = 0; i < 4; i++) {
        MUST(s, s->cu->cuModuleUnload(m[n - 1]));
        given_back(s, 64 * MiB);
        if (!ASK(s, 64 * MiB, s->cu->cuModuleLoadData(&m[n - 1], image_of_64_mib)))
            return;
    }
}

/* What another process gets while a module is loaded is not the module's. */
static void modules_beside_another_process(struct scene *s)
{
    enum { MODULES = 60 };
    static const char image[] = "// gpu-emulator: blocks 0\n.version 6.0\n.target sm_50\n.address_size 64\n";
    int go[2];
    CUresult r;
    CUdeviceptr p;
    CUmodule m;
    uint64_t bytes = s->room / 4;
    if (pipe(go)) {
        fail_scene(s, "no pipe");
        return;
    }
    pid_t child = fork();
    const char *problem = sit(&s->seat, s->cu, s->device, &r);
    if (child == 0) {
        struct pollfd end = {.fd = go[0]};
        close(go[1]);
        while (!problem && poll(&end, 1, 0) == 0 && s->cu->cuMemAlloc_v2(&p, bytes) == CUDA_SUCCESS) {
            usleep(300);
            if (s->cu->cuMemFree_v2(p) != CUDA_SUCCESS)
                _exit(1);
            usleep(300);
        }
        _exit(0);
    }
    if (problem)
        fail_scene(s, "%s: %d", problem, r);
    for (int i = 0; i < MODULES && !s->failure[0]; i++) {
        MUST(s, s->cu->cuModuleLoadData(&m, image));
        usleep(100);
    }
    close(go[1]);
    waitpid(child, NULL, 0);
    /* A process that is held up in the middle of a call may be seen so once. */
    if (!s->failure[0])
        ASK(s, s->room / 2, s->cu->cuMemAlloc_v2(&p, s->room / 2));
}

/* A block of 2 MiB has a hole by the program's own allocations, in which the variable
 * of a module lies: the driver takes another block for 8 KiB. There is room for one,
 * once what a process that was killed has left is found. */
static void small_one_without_its_hole(struct scene *s)
{
    static const char image[] = "// gpu-emulator: blocks 0 global table 2088960\n.version 6.0\n.target sm_50\n.address_size 64\n";
    int go[2], said[2];
    char c;
    CUresult r;
    if (pipe(go) || pipe(said)) {
        fail_scene(s, "no pipes");
        return;
    }
    pid_t child = fork();
    const char *problem;
    CUdeviceptr p;
    CUmodule m;
    if (child == 0) {
        if (read(go[0], &c, 1) == 1 && !sit(&s->seat, s->cu, s->device, &r) && s->cu->cuMemAlloc_v2(&p, s->room - 8 * MiB) == CUDA_SUCCESS && write(said[1], "", 1) == 1)
            pause();
        _exit(1);
    }
    close(said[1]);
    if ((problem = sit(&s->seat, s->cu, s->device, &r)))
        fail_scene(s, "%s: %d", problem, r);
    if (!problem && MUST(s, s->cu->cuMemAlloc_v2(&p, 4 << 10)) && MUST(s, s->cu->cuModuleLoadData(&m, image))) {
        if (write(go[1], "", 1) != 1 || read(said[0], &c, 1) != 1)
            fail_scene(s, "the other process has not what it should have");
        while (s->cu->cuMemAlloc_v2(&p, 2 * MiB) == CUDA_SUCCESS)
            ;
    }
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    if (!s->failure[0])
        ASK(s, 8 << 10, s->cu->cuMemAlloc_v2(&p, 8 << 10));
}

static void asked_for_one_figure(struct scene *s)
{
    size_t unused = 0, total = 0;
    MUST(s, s->cu->cuMemGetInfo_v2(NULL, &total));
    MUST(s, s->cu->cuMemGetInfo_v2(&unused, NULL));
    note(s, "total", total);
    note(s, "free", unused);
}

/* A green context retains the primary one, which is as large as any, and lets go of it
 * when it is destroyed. */
static void green_context_without_room(struct scene *s)
{
    struct cuda *cu = s->cu;
    CUdevice device;
    CUcontext context;
    CUdevResource all;
    CUdeviceptr p[16];
    void *desc, *green;
    uint64_t bytes = s->room / 8;
    int n = 0;
    if (!MUST(s, cu->cuInit(0)) || !MUST(s, cu->cuDeviceGet(&device, s->device)) || !ASK(s, 0, cu->cuCtxCreate_v2(&context, 0, device)))
        return;
    while (n < 16 && ASK(s, bytes, cu->cuMemAlloc_v2(&p[n], bytes)))
        n++;
    MUST(s, cu->cuDeviceGetDevResource(device, &all, CU_DEV_RESOURCE_TYPE_SM));
    MUST(s, cu->cuDevResourceGenerateDesc(&desc, &all, 1));
    if (ASK(s, 0, cu->cuGreenCtxCreate(&green, desc, device, CU_GREEN_CTX_DEFAULT_STREAM)))
        fail_scene(s, "a green context without room for the primary one");
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < 4 && n > 0; i++)
            MUST(s, cu->cuMemFree_v2(p[--n]));
        if (!MUST(s, cu->cuGreenCtxCreate(&green, desc, device, CU_GREEN_CTX_DEFAULT_STREAM)))
            return;
        MUST(s, cu->cuGreenCtxDestroy(green));
        for (int i = 0; i < 4; i++, n++)
            MUST(s, cu->cuMemAlloc_v2(&p[n], bytes));
    }
}

/* What the primary context and its allocations took is room at once when the last one who
 * has it lets go, before anybody has read again. */
static void primary_context_again(struct scene *s)
{
    struct cuda *cu = s->cu;
    CUdevice device;
    CUcontext context;
    CUdeviceptr p;
    uint64_t bytes = s->room / 4 * 3;
    if (!MUST(s, cu->cuInit(0)) || !MUST(s, cu->cuDeviceGet(&device, s->device)))
        return;
    for (int round = 0; round < 100; round++) {
        if (!MUST(s, cu->cuDevicePrimaryCtxRetain(&context, device)) || !MUST(s, cu->cuCtxSetCurrent(context)) ||
            !ASK(s, bytes, cu->cuMemAlloc_v2(&p, bytes)) || !MUST(s, cu->cuCtxSetCurrent(NULL)) ||
            !MUST(s, cu->cuDevicePrimaryCtxRelease_v2(device)))
            return;
        given_back(s, bytes);
    }
}

const struct scenario limit_scenarios[] = {
    {"heap-beyond-the-cap", heap_beyond_the_cap, 0},
    {"stacks-beyond-the-cap", stacks_beyond_the_cap, 0},
    {"heap-rises-and-falls", heap_rises_and_falls, 0},
    {"heap-taken-at-the-first-kernel", heap_taken_at_the_first_kernel, 0},
    {"heap-taken-by-another-process", heap_taken_by_another_process, 1},
    {"heap-raised-while-exports-go", heap_raised_while_exports_go, 0},
    {"modules-beyond-the-cap", modules_beyond_the_cap, 0},
    {"modules-beside-another-process", modules_beside_another_process, 1},
    {"small-one-without-its-hole", small_one_without_its_hole, 1},
    {"green-context-without-room", green_context_without_room, 1},
    {"primary-context-again", primary_context_again, 1},
    {"asked-for-one-figure", asked_for_one_figure, 0},
    {0},
};
