/* SPDX-License-Identifier: Apache-2.0 */

/* A CUDA program that times calls of the driver, as it is told to, a line at a
 * time on its standard input, and answers each with a line:
 *
 *     begin                  initialises, has a context and loads a kernel
 *     live COUNT SIZE        keeps so many allocations
 *     pair SIZE REPEATS      cuMemAlloc and cuMemFree
 *     async SIZE REPEATS     cuMemAllocAsync and cuMemFreeAsync
 *     info REPEATS           cuMemGetInfo
 *     launch REPEATS         cuLaunchKernel
 *     spawn REPEATS FILE...  starts a program and waits for its end
 *     pulse SIZE REPEATS MS  takes memory and gives it back, with pauses
 *     where NAME             of a function: by dlsym and by cuGetProcAddress
 *
 * "CPU WALL" is the answer to all that repeat: the processor's time of this
 * process (not of children) and the time on the clock, in nanoseconds for all
 * the repeats together. A call that fails ends the program.
 *
 * With an argument it does what that says and ends:
 *
 *     first                  initialises, has a context and allocates */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>

typedef unsigned long long address;

static struct {
    int (*init)(unsigned);
    int (*retain)(void **, int);
    int (*set_current)(void *);
    int (*alloc)(address *, size_t);
    int (*free)(address);
    int (*alloc_async)(address *, size_t, void *);
    int (*free_async)(address, void *);
    int (*info)(size_t *, size_t *);
    int (*load)(void **, const void *);
    int (*function)(void **, void *, const char *);
    int (*launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
    int (*look_up)(const char *, void **, int, address, int *);
} cuda;

static void *library, *kernel;

static void fail(const char *what, long code)
{
    printf("%s failed: %ld\n", what, code);
    exit(1);
}

#define MUST(call)                  \
    do {                            \
        int code_ = (call);         \
        if (code_)                  \
            fail(#call, code_);     \
    } while (0)

static void open_library(void)
{
    library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) {
        printf("%s\n", dlerror());
        exit(1);
    }
    const struct {
        const char *name;
        void *at;
    } names[] = {
        {"cuInit", &cuda.init},
        {"cuDevicePrimaryCtxRetain", &cuda.retain},
        {"cuCtxSetCurrent", &cuda.set_current},
        {"cuMemAlloc_v2", &cuda.alloc},
        {"cuMemFree_v2", &cuda.free},
        {"cuMemAllocAsync", &cuda.alloc_async},
        {"cuMemFreeAsync", &cuda.free_async},
        {"cuMemGetInfo_v2", &cuda.info},
        {"cuModuleLoadData", &cuda.load},
        {"cuModuleGetFunction", &cuda.function},
        {"cuLaunchKernel", &cuda.launch},
        {"cuGetProcAddress_v2", &cuda.look_up},
    };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        void *f = dlsym(library, names[i].name);
        if (!f)
            fail(names[i].name, 0);
        memcpy(names[i].at, &f, sizeof f);
    }
}

static void begin(void)
{
    void *context;
    open_library();
    MUST(cuda.init(0));
    MUST(cuda.retain(&context, 0));
    MUST(cuda.set_current(context));
}

static void load(void)
{
    void *module;
    MUST(cuda.load(&module, ".version 7.0\n.target sm_70\n.address_size 64\n.visible .entry kernel() { ret; }\n"));
    MUST(cuda.function(&kernel, module, "kernel"));
}

static long long clock_ns(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void spawn(char **argv)
{
    extern char **environ;
    pid_t pid;
    int status;
    MUST(posix_spawn(&pid, argv[0], NULL, NULL, argv, environ));
    if (waitpid(pid, &status, 0) != pid || status)
        fail(argv[0], status);
}

static void measure(const char *what, size_t size, long repeats, char **argv)
{
    address at;
    size_t unused, total;
    long long wall = clock_ns(CLOCK_MONOTONIC), cpu = clock_ns(CLOCK_PROCESS_CPUTIME_ID);
    if (strcmp(what, "pair") == 0)
        for (long i = 0; i < repeats; i++) {
            MUST(cuda.alloc(&at, size));
            MUST(cuda.free(at));
        }
    else if (strcmp(what, "async") == 0)
        for (long i = 0; i < repeats; i++) {
            MUST(cuda.alloc_async(&at, size, NULL));
            MUST(cuda.free_async(at, NULL));
        }
    else if (strcmp(what, "info") == 0)
        for (long i = 0; i < repeats; i++)
            MUST(cuda.info(&unused, &total));
    else if (strcmp(what, "launch") == 0)
        for (long i = 0; i < repeats; i++)
            MUST(cuda.launch(kernel, 1, 1, 1, 32, 1, 1, 0, NULL, NULL, NULL));
    else if (strcmp(what, "spawn") == 0)
        for (long i = 0; i < repeats; i++)
            spawn(argv);
    else
        fail(what, 0);
    cpu = clock_ns(CLOCK_PROCESS_CPUTIME_ID) - cpu;
    wall = clock_ns(CLOCK_MONOTONIC) - wall;
    printf("%lld %lld\n", cpu, wall);
}

static void pulse(size_t size, long repeats, long ms)
{
    const struct timespec pause = {ms / 1000, ms % 1000 * 1000000};
    for (long i = 0; i < repeats; i++) {
        address at;
        MUST(cuda.alloc(&at, size));
        nanosleep(&pause, NULL);
        MUST(cuda.free(at));
        nanosleep(&pause, NULL);
    }
    printf("ready\n");
}

static const char *file_of(void *at)
{
    Dl_info info;
    return at && dladdr(at, &info) && info.dli_fname ? info.dli_fname : "nowhere";
}

int main(int argc, char **argv)
{
    static char line[4096];
    if (argc == 2 && strcmp(argv[1], "first") == 0) {
        address at;
        begin();
        MUST(cuda.alloc(&at, 1 << 20));
        return 0;
    }
    setvbuf(stdout, NULL, _IOLBF, 0);
    while (fgets(line, sizeof line, stdin)) {
        char *words[64] = {NULL}, *rest = line;
        int n = 0;
        for (char *w; n < 63 && (w = strsep(&rest, " \n"));)
            if (*w)
                words[n++] = w;
        if (n == 0)
            continue;
        if (strcmp(words[0], "begin") == 0) {
            begin();
            load();
            printf("ready\n");
        } else if (strcmp(words[0], "live") == 0 && n == 3) {
            address at;
            for (long i = atol(words[1]); i > 0; i--)
                MUST(cuda.alloc(&at, strtoul(words[2], NULL, 10)));
            printf("ready\n");
        } else if (strcmp(words[0], "where") == 0 && n == 2) {
            void *at = NULL;
            if (cuda.look_up(words[1], &at, 12000, 0, NULL))
                at = NULL;
            printf("%s %s\n", file_of(dlsym(library, words[1])), file_of(at));
        } else if (strcmp(words[0], "spawn") == 0 && n >= 3) {
            measure(words[0], 0, atol(words[1]), words + 2);
        } else if (strcmp(words[0], "pulse") == 0 && n == 4) {
            pulse(strtoul(words[1], NULL, 10), atol(words[2]), atol(words[3]));
        } else if (n == 3) {
            measure(words[0], strtoul(words[1], NULL, 10), atol(words[2]), NULL);
        } else if (n == 2) {
            measure(words[0], 0, atol(words[1]), NULL);
        } else {
            fail(words[0], 0);
        }
    }
    return 0;
}
