/* SPDX-License-Identifier: Apache-2.0 */

/* switches LIBRARY NAME: find out which of its behaviours a CUDA driver has, where
 * NVIDIA's documentation is silent or drivers may differ, and print the value that
 * the emulated driver's switch of that name has for it (tests/emulator/lib), or
 * "unknown", and why. It uses less than 2 GiB of the first visible device.
 *
 * Everything is seen through what a pool of its own has reserved, while a kernel
 * that takes five seconds keeps a stream busy. The calls are declared here by hand, so that
 * it builds without CUDA's headers. */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MIB ((size_t)1 << 20)

typedef unsigned long long pointer;
typedef void *handle;

static void *library;

/* call finds a call by its newest name of CUDA 12; a driver that lacks it ends the
 * program with what that means. */
static void *call(const char *name)
{
    void *f = dlsym(library, name);
    if (!f) {
        printf("unknown: this driver has no %s\n", name);
        exit(0);
    }
    return f;
}

#define CALL(name, ...) ((int (*)())call(#name))(__VA_ARGS__)
#define MUST(name, ...) must(CALL(name, __VA_ARGS__), #name)

static void must(int result, const char *what)
{
    if (result) {
        fprintf(stderr, "%s: CUDA error %d\n", what, result);
        exit(1);
    }
}

static void say(const char *value)
{
    printf("%s\n", value);
    fflush(stdout);
    _exit(0); /* without waiting for the kernel */
}

/* The first line is for the emulated driver, the names for both. */
static const char ptx[] =
    "// gpu-emulator: blocks 0\n"
    ".version 7.0\n.target sm_52\n.address_size 64\n"
#define SPIN(name, nanoseconds)                                                             \
    ".visible .entry " name "()\n{\n .reg .u64 %t<3>;\n .reg .pred %p;\n"                   \
    " mov.u64 %t0, %globaltimer;\nagain:\n mov.u64 %t1, %globaltimer;\n"                    \
    " sub.u64 %t2, %t1, %t0;\n setp.lt.u64 %p, %t2, " nanoseconds ";\n @%p bra again;\n ret;\n}\n"
    SPIN("busy_5000000us", "5000000000") SPIN("busy_1us", "1000");

/* A kernel that takes memory of the heap. */
static const char ptx_of_heap[] =
    "// gpu-emulator: blocks 0\n"
    ".version 7.0\n.target sm_52\n.address_size 64\n"
    ".extern .func (.param .b64 func_retval0) malloc (.param .b64 malloc_param_0);\n"
    ".visible .entry malloc_64()\n{\n .reg .b64 %a<2>;\n mov.u64 %a0, 64;\n"
    " {\n .param .b64 param0;\n st.param.b64 [param0+0], %a0;\n .param .b64 retval0;\n"
    " call.uni (retval0), malloc, (param0);\n ld.param.b64 %a1, [retval0+0];\n }\n ret;\n}\n";

struct props {
    int type, handles, location, id;
    void *security;
    size_t most;
    unsigned char rest[56];
};

static int device;
static struct props plain = {.type = 1, .location = 1};
static handle pool, s, t, u, longer, shorter;

enum { FOLLOW = 1, OPPORTUNISTIC = 2, INTERNAL = 3, THRESHOLD = 4, RESERVED = 5, USED = 7 };

static void set(int attribute, uint64_t value) { MUST(cuMemPoolSetAttribute, pool, attribute, &value); }

static size_t get(int attribute)
{
    uint64_t value = 0;
    MUST(cuMemPoolGetAttribute, pool, attribute, &value);
    return (size_t)value;
}

static pointer take(size_t size, handle stream)
{
    pointer at = 0;
    MUST(cuMemAllocFromPoolAsync, &at, size, pool, stream);
    return at;
}

static void give(pointer at, handle stream) { MUST(cuMemFreeAsync, at, stream); }

static void run(handle f, handle stream) { MUST(cuLaunchKernel, f, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL); }

/* busy says that the kernel of stream s was not over meanwhile. */
static void busy(void)
{
    if (CALL(cuStreamQuery, s) != 600)
        say("unknown: the kernel was over too soon");
}

/* freed has 64 MiB of the pool that were freed in stream s after a kernel. */
static size_t freed(handle kernel)
{
    pointer at = take(64 * MIB, s);
    run(kernel, s);
    give(at, s);
    return get(RESERVED);
}

/* pass lets the short kernel come to its end without asking after it: every way to
 * ask may be what the driver looks at. */
static void pass(void) { usleep(300000); }

static const char *grown(size_t before, const char *yes, const char *no)
{
    take(64 * MIB, t);
    return get(RESERVED) > before ? yes : no;
}

static size_t unused(void)
{
    size_t is = 0, total = 0;
    MUST(cuMemGetInfo_v2, &is, &total);
    return is;
}

static size_t piece(void)
{
    take(1, s);
    return get(RESERVED);
}

static void pools(const char *name)
{
    char text[32];
    size_t n;
    if (strcmp(name, "piece-mib") == 0) {
        snprintf(text, sizeof text, "%zu", piece() / MIB);
        say(text);
    } else if (strcmp(name, "large") == 0) {
        n = piece();
        take(2 * n + 2 * MIB, s);
        say((get(RESERVED) - n) % n ? "blocks" : "pieces");
    } else if (strcmp(name, "holes") == 0) {
        n = piece();
        MUST(cuMemPoolCreate, &pool, &plain); /* an empty one */
        set(THRESHOLD, UINT64_MAX);
        pointer at[4];
        for (int i = 0; i < 4; i++)
            at[i] = take(n / 4, s);
        give(at[0], s);
        give(at[2], s);
        MUST(cuStreamSynchronize, s);
        size_t before = get(RESERVED);
        take(n / 2, s);
        if (before != n)
            say("unknown: four quarters of a piece took more than one");
        say(get(RESERVED) > before ? "fit" : "remap");
    } else if (strcmp(name, "reuse") == 0) {
        const char *value = grown(freed(longer), "documented", "eager");
        busy();
        say(value);
    } else if (strcmp(name, "follow") == 0) {
        handle e, f;
        set(INTERNAL, 0);
        n = freed(longer);
        MUST(cuEventCreate, &e, 2);
        MUST(cuEventCreate, &f, 2);
        MUST(cuEventRecord, e, s);
        MUST(cuStreamWaitEvent, u, e, 0);
        MUST(cuEventRecord, f, u);
        MUST(cuStreamWaitEvent, t, f, 0);
        const char *value = grown(n, "direct", "all");
        busy();
        say(value);
    } else if (strcmp(name, "opportunistic") == 0) {
        set(INTERNAL, 0);
        n = freed(shorter);
        pass();
        say(grown(n, "lazy", "documented"));
    } else if (strcmp(name, "query") == 0) {
        set(INTERNAL, 0);
        set(OPPORTUNISTIC, 0);
        n = freed(shorter);
        while (CALL(cuStreamQuery, s) == 600)
            ;
        say(grown(n, "nothing", "observes"));
    } else if (strcmp(name, "trim") == 0) {
        freed(shorter);
        pass();
        MUST(cuMemPoolTrimTo, pool, (size_t)0);
        say(get(RESERVED) ? "observed" : "passed");
    } else if (strcmp(name, "shrink") == 0) {
        set(THRESHOLD, 0);
        freed(shorter);
        MUST(cuStreamSynchronize, s);
        say(get(RESERVED) ? "never" : "synchronize");
    } else if (strcmp(name, "used") == 0) {
        freed(longer);
        n = get(USED);
        busy();
        say(n ? "pending" : "live");
    } else if (strcmp(name, "ipc-pools") == 0) {
        struct props shared = {.type = 1, .handles = 1, .location = 1, .id = device};
        MUST(cuMemPoolCreate, &pool, &shared);
        freed(shorter);
        MUST(cuStreamSynchronize, s);
        MUST(cuMemPoolTrimTo, pool, (size_t)0);
        say(get(RESERVED) ? "kept" : "shrink");
    } else if (strcmp(name, "pool-max") == 0) {
        struct props bounded = {.type = 1, .location = 1, .id = device, .most = 66 * MIB};
        pointer kept, more;
        if (CALL(cuMemPoolCreate, &pool, &bounded))
            say("unknown: this driver has no greatest size of a pool");
        set(THRESHOLD, UINT64_MAX);
        kept = take(64 * MIB, s);
        if (CALL(cuMemAllocFromPoolAsync, &more, 16 * MIB, pool, s) == 0)
            say(CALL(cuMemAllocFromPoolAsync, &more, 512 * MIB, pool, s) == 0 ? "ignored" : "piece");
        run(longer, s);
        give(kept, s);
        const char *value = CALL(cuMemAllocFromPoolAsync, &more, 64 * MIB, pool, t) == 0 ? "exact" : "refuses";
        busy();
        say(value);
    } else if (strcmp(name, "pool-memory") == 0) {
        handle other;
        unsigned long long at;
        MUST(cuCtxCreate_v2, &other, 0, device);
        MUST(cuMemAllocFromPoolAsync, &at, 64 * MIB, pool, (handle)NULL);
        MUST(cuStreamSynchronize, (handle)NULL);
        MUST(cuCtxDestroy_v2, other);
        say(get(USED) ? "device" : "context");
    }
}

/* graph has 64 MiB while a kernel runs. */
static handle graph(handle kernel)
{
    handle g, e;
    unsigned long long at;
    MUST(cuStreamBeginCapture_v2, u, 2);
    MUST(cuMemAllocAsync, &at, 64 * MIB, u);
    run(kernel, u);
    MUST(cuMemFreeAsync, at, u);
    MUST(cuStreamEndCapture, u, &g);
    MUST(cuGraphInstantiateWithFlags, &e, g, 0ULL);
    return e;
}

static void others(const char *name)
{
    char text[32];
    int n = 0;
    if (strcmp(name, "version") == 0) {
        MUST(cuDriverGetVersion, &n);
        snprintf(text, sizeof text, "%d", n);
        say(text);
    } else if (strcmp(name, "domains") == 0) {
        if (CALL(cuDeviceGetAttribute, &n, 147, device) || !n)
            say("unknown: this driver knows no locality domains");
        snprintf(text, sizeof text, "%d", n);
        say(text);
    } else if (strcmp(name, "loading") == 0) {
        MUST(cuModuleGetLoadingMode, &n);
        say(n == 2 ? "lazy" : "eager");
    } else if (strcmp(name, "heap") == 0) {
        size_t before = unused();
        MUST(cuCtxSetLimit, 2, 1024 * MIB);
        if (before - unused() > 512 * MIB)
            say("set");
        run(shorter, s);
        MUST(cuStreamSynchronize, s);
        if (before - unused() > 512 * MIB)
            say("launch");
        handle module, uses;
        MUST(cuModuleLoadData, &module, ptx_of_heap);
        MUST(cuModuleGetFunction, &uses, module, "malloc_64");
        if (before - unused() > 512 * MIB)
            say("unknown: a heap of 1 GiB is there when a kernel that uses it was loaded");
        run(uses, s);
        MUST(cuStreamSynchronize, s);
        say(before - unused() > 512 * MIB ? "use" : "unknown: a heap of 1 GiB is not there after a kernel that uses it");
    } else if (strcmp(name, "graphs") == 0) {
        handle first = graph(longer), second = graph(shorter);
        uint64_t reserved = 0;
        MUST(cuGraphLaunch, first, s);
        MUST(cuGraphLaunch, second, t);
        MUST(cuDeviceGetGraphMemAttribute, device, 2, &reserved);
        busy();
        say(reserved >= 128 * MIB ? "distinct" : "ordered");
    } else if (strcmp(name, "green-mib") == 0) {
        uint64_t resource[32] = {0}; /* more than a CUdevResource */
        handle primary, desc, green;
        MUST(cuDevicePrimaryCtxRetain, &primary, device); /* which a green context would retain */
        MUST(cuDeviceGetDevResource, device, resource, 1);
        MUST(cuDevResourceGenerateDesc, &desc, resource, 1);
        size_t before = unused();
        MUST(cuGreenCtxCreate, &green, desc, device, 1);
        snprintf(text, sizeof text, "%zu", (before - unused()) / MIB);
        say(text);
    } else if (strcmp(name, "managed-create") == 0) {
        struct props managed = {.type = 2, .location = 1, .id = device};
        unsigned long long made;
        MUST(cuDriverGetVersion, &n);
        if (n < 13000)
            say("unknown: of drivers before 13.0 it is not asked");
        say(CALL(cuMemCreate, &made, 64 * MIB, &managed, 0ULL) ? "refused" : "made");
    }
}

int main(int argc, char **argv)
{
    if (argc != 3)
        return 2;
    library = dlopen(argv[1], RTLD_NOW);
    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        return 1;
    }
    handle context, module;
    MUST(cuInit, 0);
    MUST(cuDeviceGet, &device, 0);
    MUST(cuCtxCreate_v2, &context, 0, device);
    MUST(cuModuleLoadData, &module, ptx);
    MUST(cuModuleGetFunction, &longer, module, "busy_5000000us");
    MUST(cuModuleGetFunction, &shorter, module, "busy_1us");
    handle *streams[] = {&s, &t, &u};
    for (int i = 0; i < 3; i++)
        MUST(cuStreamCreate, streams[i], 1);
    /* Both have run once, so that their code is loaded before anything is looked at. */
    if (strcmp(argv[2], "heap") != 0) {
        run(shorter, s);
        MUST(cuStreamSynchronize, s);
    }
    plain.id = device;
    MUST(cuMemPoolCreate, &pool, &plain);
    set(THRESHOLD, UINT64_MAX);
    pools(argv[2]);
    others(argv[2]);
    fprintf(stderr, "there is no switch %s\n", argv[2]);
    return 2;
}
