/* SPDX-License-Identifier: Apache-2.0 */

/* talk LIBRARY: a program that does with the first visible CUDA device what it is told, a
 * line for each:
 *
 *     context                  take the primary context, and make it current
 *     attribute N              the device's attribute of that number
 *     env 0 NAME=VALUE         in the program's own environment from now on
 *     memory                   free and total, in bytes, by cuMemGetInfo
 *     take MIB                 memory, by cuMemAlloc; all of it stays to the end
 *     managed MIB              managed memory
 *     fill BYTE, check BYTE    what was taken last; check counts the bytes that differ
 *     code                     load a module, without running what is in it
 *     run                      run what is in it once
 *     work MS                  run kernels on all multiprocessors for so long: how many ended,
 *                              the median and the 99th percentile of their times, in us
 *     spin MS                  one kernel of one block that takes so long; not waited for
 *     wait                     for all that was begun
 *     sms                      on how many multiprocessors blocks run
 *     green SMS                make a green context of so many
 *     export MIB               memory by hand, mapped here, to be had as a descriptor
 *     share N SOCKET           the descriptor for N others, who each say `import`
 *     import 0 SOCKET          have it from there, and map it
 *     illegal                  a kernel that writes where nothing is
 *     trap                     a kernel that traps
 *
 * For each it says a line: the result, as CUDA's number, and what it found. Calls are declared
 * by hand and looked up by name, so that it builds without CUDA's headers and runs with
 * drivers that lack some: then it says -1 and the name. It ends with its input. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define MIB ((size_t)1 << 20)

typedef unsigned long long pointer;
typedef void *handle;

static void *library;
static const char *missing;

/* A driver that lacks a call has this one instead. */
static int lacking(void) { return -1; }

typedef int (*function)();

static function call(const char *name)
{
    function f;
    *(void **)&f = dlsym(library, name);
    if (f)
        return f;
    missing = name;
    return (function)lacking;
}
#define CALL(name, ...) call(#name)(__VA_ARGS__)

/* TRY ends a command with the first result that is not 0. */
#define TRY(name, ...)                                    \
    do {                                                  \
        int r_ = CALL(name, __VA_ARGS__);                 \
        if (r_) {                                         \
            snprintf(said, sizeof said, "%s", #name);     \
            return r_;                                    \
        }                                                 \
    } while (0)

static char said[256];

static int device;
static handle context, module, spins, works, places, writes, traps;
static pointer last;
static size_t last_size;
static handle exported;
static int exported_fd = -1;

/* Kernels. The first line, and names of the kind busy_17us, are for the emulated driver. */
static const char ptx[] =
    "// gpu-emulator: blocks 1\n"
    ".version 7.0\n.target sm_52\n.address_size 64\n"
    /* For the time that it is given. */
    ".visible .entry busy_1us(.param .u64 ns)\n{\n .reg .u64 %t<4>;\n .reg .pred %p;\n"
    " ld.param.u64 %t3, [ns];\n mov.u64 %t0, %globaltimer;\nagain:\n mov.u64 %t1, %globaltimer;\n"
    " sub.u64 %t2, %t1, %t0;\n setp.lt.u64 %p, %t2, %t3;\n @%p bra again;\n ret;\n}\n"
    /* A fixed number of multiplications, whose result nobody has. */
    ".visible .entry busy_200us(.param .u64 out, .param .u32 rounds)\n{\n .reg .f32 %f<4>;\n .reg .u32 %r<3>;\n .reg .u64 %o;\n .reg .pred %p;\n"
    " ld.param.u64 %o, [out];\n ld.param.u32 %r0, [rounds];\n mov.f32 %f0, 0f3F800001;\n mov.f32 %f1, 0f3F800001;\n mov.f32 %f2, 0f00000000;\n mov.u32 %r1, 0;\n"
    "more:\n fma.rn.f32 %f2, %f2, %f0, %f1;\n fma.rn.f32 %f2, %f2, %f0, %f1;\n fma.rn.f32 %f2, %f2, %f0, %f1;\n fma.rn.f32 %f2, %f2, %f0, %f1;\n"
    " add.u32 %r1, %r1, 1;\n setp.lt.u32 %p, %r1, %r0;\n @%p bra more;\n st.global.f32 [%o], %f2;\n ret;\n}\n"
    /* Each block says where it runs, and stays long enough for the next to go elsewhere. */
    ".visible .entry busy_20us(.param .u64 out)\n{\n .reg .u32 %r<3>;\n .reg .u64 %t<5>;\n .reg .pred %p;\n"
    " ld.param.u64 %t3, [out];\n mov.u32 %r0, %ctaid.x;\n mov.u32 %r1, %smid;\n add.u32 %r1, %r1, 1;\n mul.wide.u32 %t4, %r0, 4;\n add.u64 %t3, %t3, %t4;\n st.global.u32 [%t3], %r1;\n"
    " mov.u64 %t0, %globaltimer;\nstay:\n mov.u64 %t1, %globaltimer;\n sub.u64 %t2, %t1, %t0;\n setp.lt.u64 %p, %t2, 20000;\n @%p bra stay;\n ret;\n}\n"
    ".visible .entry nowhere()\n{\n .reg .u64 %a;\n .reg .u32 %r;\n mov.u64 %a, 64;\n mov.u32 %r, 1;\n st.global.u32 [%a], %r;\n ret;\n}\n"
    ".visible .entry ends()\n{\n trap;\n ret;\n}\n";

static uint64_t now_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000 + (uint64_t)t.tv_nsec / 1000;
}

static int load(void)
{
    if (module)
        return 0;
    TRY(cuModuleLoadData, &module, ptx);
    TRY(cuModuleGetFunction, &spins, module, "busy_1us");
    TRY(cuModuleGetFunction, &works, module, "busy_200us");
    TRY(cuModuleGetFunction, &places, module, "busy_20us");
    TRY(cuModuleGetFunction, &writes, module, "nowhere");
    TRY(cuModuleGetFunction, &traps, module, "ends");
    return 0;
}

static int do_context(long n)
{
    (void)n;
    TRY(cuInit, 0u);
    TRY(cuDeviceGet, &device, 0);
    TRY(cuDevicePrimaryCtxRetain, &context, device);
    TRY(cuCtxSetCurrent, context);
    return 0;
}

static int do_attribute(long n)
{
    int value = 0;
    TRY(cuInit, 0u);
    TRY(cuDeviceGet, &device, 0);
    TRY(cuDeviceGetAttribute, &value, (int)n, device);
    snprintf(said, sizeof said, "%d", value);
    return 0;
}

static int do_memory(long n)
{
    size_t is = 0, total = 0;
    (void)n;
    TRY(cuMemGetInfo_v2, &is, &total);
    snprintf(said, sizeof said, "%zu %zu", is, total);
    return 0;
}

static int do_take(long n)
{
    last_size = (size_t)n * MIB;
    TRY(cuMemAlloc_v2, &last, last_size);
    return 0;
}

static int do_managed(long n)
{
    last_size = (size_t)n * MIB;
    TRY(cuMemAllocManaged, &last, last_size, 1u);
    return 0;
}

static int do_fill(long n)
{
    TRY(cuMemsetD8_v2, last, (unsigned char)n, last_size);
    TRY(cuCtxSynchronize);
    return 0;
}

static int do_check(long n)
{
    static unsigned char piece[1 << 20];
    size_t differ = 0;
    for (size_t at = 0; at < last_size; at += sizeof piece) {
        TRY(cuMemcpyDtoH_v2, (void *)piece, last + at, sizeof piece);
        for (size_t i = 0; i < sizeof piece; i++)
            differ += piece[i] != (unsigned char)n;
    }
    snprintf(said, sizeof said, "%zu", differ);
    return 0;
}

static int do_code(long n)
{
    (void)n;
    return load();
}

static int spin(uint64_t ns)
{
    void *arguments[] = {&ns};
    int r = load();
    if (r)
        return r;
    TRY(cuLaunchKernel, spins, 1, 1, 1, 1, 1, 1, 0, NULL, arguments, NULL);
    return 0;
}

static int do_spin(long n) { return spin((uint64_t)n * 1000000); }

static int do_wait(long n)
{
    (void)n;
    TRY(cuCtxSynchronize);
    return 0;
}

static int do_run(long n)
{
    (void)n;
    int r = spin(1000);
    return r ? r : do_wait(0);
}

static int by_size(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

static int do_work(long n)
{
    enum { MOST = 1 << 20, MULTIPROCESSORS = 16 };
    static uint32_t *took;
    static pointer out;
    int sms = 0, r = load();
    unsigned rounds = 20000;
    if (r)
        return r;
    if (!took && !(took = malloc(MOST * sizeof *took)))
        return 2;
    if (!out)
        TRY(cuMemAlloc_v2, &out, (size_t)4096);
    TRY(cuDeviceGetAttribute, &sms, MULTIPROCESSORS, device);
    void *arguments[] = {&out, &rounds};
    uint64_t until = now_us() + (uint64_t)n * 1000, began;
    size_t count = 0;
    while ((began = now_us()) < until && count < MOST) {
        TRY(cuLaunchKernel, works, 4 * sms, 1, 1, 256, 1, 1, 0, NULL, arguments, NULL);
        TRY(cuCtxSynchronize);
        took[count++] = (uint32_t)(now_us() - began);
    }
    if (!count)
        return 2;
    qsort(took, count, sizeof *took, by_size);
    snprintf(said, sizeof said, "%zu %u %u", count, took[count / 2], took[count * 99 / 100]);
    return 0;
}

static int do_sms(long n)
{
    enum { BLOCKS = 4096, MOST = 1024 };
    static uint32_t where[BLOCKS];
    static char met[MOST];
    pointer out = 0;
    void *arguments[] = {&out};
    int count = 0, r = load();
    (void)n;
    if (r)
        return r;
    TRY(cuMemAlloc_v2, &out, sizeof where);
    TRY(cuMemsetD8_v2, out, 0, sizeof where);
    TRY(cuLaunchKernel, places, BLOCKS, 1, 1, 32, 1, 1, 0, NULL, arguments, NULL);
    TRY(cuCtxSynchronize);
    TRY(cuMemcpyDtoH_v2, (void *)where, out, sizeof where);
    memset(met, 0, sizeof met);
    for (int i = 0; i < BLOCKS; i++)
        if (where[i] && where[i] < MOST && !met[where[i]]++)
            count++;
    TRY(cuMemFree_v2, out);
    snprintf(said, sizeof said, "%d", count);
    return 0;
}

static int do_green(long n)
{
    enum { KIND_SM = 1, DEFAULT_STREAM = 1 };
    struct {
        _Alignas(8) char bytes[256];
    } all, part, rest;
    unsigned groups = 1;
    void *desc = NULL, *green = NULL;
    memset(&all, 0, sizeof all);
    TRY(cuDeviceGetDevResource, device, (void *)&all, KIND_SM);
    TRY(cuDevSmResourceSplitByCount, (void *)&part, &groups, (void *)&all, (void *)&rest, 0u, (unsigned)n);
    TRY(cuDevResourceGenerateDesc, &desc, (void *)&part, 1u);
    TRY(cuGreenCtxCreate, &green, desc, device, DEFAULT_STREAM);
    return 0;
}

/* --- memory that others map ------------------------------------------------ */

struct property {
    int type, handles, location, id;
    void *security;
    unsigned char rest[64];
};
struct access {
    int location, id, flags;
};

static int map(handle memory, size_t size)
{
    struct access access = {.location = 1, .id = device, .flags = 3};
    TRY(cuMemAddressReserve, &last, size, (size_t)0, (pointer)0, 0ull);
    TRY(cuMemMap, last, size, (size_t)0, memory, 0ull);
    TRY(cuMemSetAccess, last, size, &access, (size_t)1);
    last_size = size;
    return 0;
}

static int do_export(long n)
{
    struct property p = {.type = 1, .handles = 1, .location = 1, .id = device};
    TRY(cuMemCreate, &exported, (size_t)n * MIB, &p, 0ull);
    TRY(cuMemExportToShareableHandle, &exported_fd, exported, 1, 0ull);
    return map(exported, (size_t)n * MIB);
}

static struct sockaddr_un at(const char *path)
{
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    snprintf(a.sun_path, sizeof a.sun_path, "%s", path);
    return a;
}

/* A descriptor goes through a socket, with the memory's size. */
union control {
    char bytes[CMSG_SPACE(sizeof(int))];
    struct cmsghdr head;
};

static int do_share(long n, const char *path)
{
    struct sockaddr_un a = at(path);
    int s = socket(AF_UNIX, SOCK_SEQPACKET, 0);
    if (s < 0 || bind(s, (struct sockaddr *)&a, sizeof a) || listen(s, 64))
        return 304;
    printf("0 listening\n");
    fflush(stdout);
    for (; n > 0; n--) {
        int peer = accept(s, NULL, NULL);
        union control control = {.bytes = {0}};
        struct iovec part = {&last_size, sizeof last_size};
        struct msghdr m = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = sizeof control.bytes};
        struct cmsghdr *c = CMSG_FIRSTHDR(&m);
        c->cmsg_level = SOL_SOCKET, c->cmsg_type = SCM_RIGHTS, c->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(c), &exported_fd, sizeof exported_fd);
        if (peer < 0 || sendmsg(peer, &m, 0) < 0)
            return 304;
        close(peer);
    }
    close(s);
    return 0;
}

static int do_import(long n, const char *path)
{
    struct sockaddr_un a = at(path);
    int s = socket(AF_UNIX, SOCK_SEQPACKET, 0), fd = -1;
    size_t size = 0;
    handle memory = NULL;
    union control control;
    struct iovec part = {&size, sizeof size};
    struct msghdr m = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = sizeof control.bytes};
    (void)n;
    if (s < 0 || connect(s, (struct sockaddr *)&a, sizeof a) || recvmsg(s, &m, 0) < 0 || !CMSG_FIRSTHDR(&m))
        return 304;
    memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&m)), sizeof fd);
    close(s);
    TRY(cuMemImportFromShareableHandle, &memory, (void *)(intptr_t)fd, 1);
    close(fd);
    return map(memory, size);
}

/* --- faults ---------------------------------------------------------------- */

static int fault(handle f)
{
    TRY(cuLaunchKernel, f, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL);
    TRY(cuCtxSynchronize);
    return 0;
}

static int do_illegal(long n)
{
    int r = load();
    (void)n;
    return r ? r : fault(writes);
}

static int do_trap(long n)
{
    int r = load();
    (void)n;
    return r ? r : fault(traps);
}

static int do_env(long n, const char *text)
{
    (void)n;
    return putenv(strdup(text)) ? 1 : 0;
}

static const struct command {
    const char *name;
    int (*plain)(long);
    int (*path)(long, const char *);
} commands[] = {
    {"context", do_context, NULL},
    {"attribute", do_attribute, NULL},
    {"env", NULL, do_env},
    {"memory", do_memory, NULL},
    {"take", do_take, NULL},
    {"managed", do_managed, NULL},
    {"fill", do_fill, NULL},
    {"check", do_check, NULL},
    {"code", do_code, NULL},
    {"run", do_run, NULL},
    {"work", do_work, NULL},
    {"spin", do_spin, NULL},
    {"wait", do_wait, NULL},
    {"sms", do_sms, NULL},
    {"green", do_green, NULL},
    {"export", do_export, NULL},
    {"share", NULL, do_share},
    {"import", NULL, do_import},
    {"illegal", do_illegal, NULL},
    {"trap", do_trap, NULL},
};

int main(int argc, char **argv)
{
    char line[512], name[32], path[256];
    library = argc == 2 ? dlopen(argv[1], RTLD_NOW) : NULL;
    if (!library) {
        fprintf(stderr, "%s\n", argc == 2 ? dlerror() : "usage: talk LIBRARY");
        return 2;
    }
    while (fgets(line, sizeof line, stdin)) {
        const struct command *c = NULL;
        long n = 0;
        path[0] = name[0] = 0;
        if (sscanf(line, "%31s %ld %255s", name, &n, path) < 1)
            continue;
        for (size_t i = 0; i < sizeof commands / sizeof *commands; i++)
            if (!strcmp(commands[i].name, name))
                c = &commands[i];
        if (!c) {
            fprintf(stderr, "there is no command %s\n", name);
            return 2;
        }
        said[0] = 0;
        missing = NULL;
        int r = c->plain ? c->plain(n) : c->path(n, path);
        printf("%d %s\n", r, r == -1 && missing ? missing : said);
        fflush(stdout);
    }
    return 0;
}
