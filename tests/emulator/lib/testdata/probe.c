/* SPDX-License-Identifier: Apache-2.0 */

/* A program that makes the calls it reads, one a line, and prints what each
 * answered: the result, then the variables that were passed by address.
 *
 *     cuMemAlloc_v2 &p 4096
 *     0 p=2199023255552
 *
 * An argument is a number, a "string", a variable's value (p), its address (&p,
 * 256 bytes), or its first 64 bytes passed by value (@p). What is no call:
 *
 *     poke p 8 4 17         four bytes at offset 8
 *     peek p 8 4
 *     fork CALL...          in a child
 *     threads N R SIZE      N threads allocate and free R times, small and large
 *     pooled N R SIZE       N threads do so by the device's pool, each on its own stream
 *     take PID FD           another process's descriptor
 *     exec FILE...          becomes another program
 *     close FD
 *     address NAME          of an exported name
 *     burn N SIZE           keeps N allocations
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cuda_abi.h"

enum { VARIABLES = 64, ARGUMENTS = 20, SIZE = 256 };
static struct variable {
    char name[16];
    union {
        long value;
        char bytes[SIZE];
    };
} variables[VARIABLES];

static void *library;

static struct variable *variable(const char *name)
{
    for (int i = 0; i < VARIABLES; i++) {
        if (!variables[i].name[0])
            snprintf(variables[i].name, sizeof variables[i].name, "%s", name);
        if (strcmp(variables[i].name, name) == 0)
            return &variables[i];
    }
    abort();
}

static long value(const char *word)
{
    char *end;
    long n = strtol(word, &end, 0);
    return *word && !*end ? n : variable(word)->value;
}

typedef int function(long, long, long, long, long, long, long, long, long, long, long, long, long, long);

static int make(char **words, int count)
{
    function *f = (function *)dlsym(library, words[0]);
    long a[ARGUMENTS] = {0};
    struct variable *out[ARGUMENTS];
    int n = 0, outs = 0;
    if (!f) {
        printf("missing %s\n", words[0]);
        return -1;
    }
    for (int i = 1; i < count; i++) {
        char *w = words[i];
        if (*w == '"') {
            a[n++] = (long)(w + 1);
        } else if (*w == '&') {
            out[outs] = variable(w + 1);
            a[n++] = (long)out[outs++]->bytes;
        } else if (*w == '@') { /* on the stack, after the six in registers */
            memcpy(a + 6, variable(w + 1)->bytes, 64);
        } else {
            a[n++] = value(w);
        }
    }
    int r = f(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12], a[13]);
    printf("%d", r);
    for (int i = 0; i < outs; i++)
        printf(" %s=%ld", out[i]->name, out[i]->value);
    printf("\n");
    return r;
}

static int (*alloc)(CUdeviceptr *, size_t), (*release)(CUdeviceptr), (*set)(CUcontext);
static CUcontext shared_context;
static long rounds, size;

static void *work(void *arg)
{
    unsigned int seed = (unsigned int)(long)arg;
    long bad = set(shared_context);
    CUdeviceptr held[16] = {0};
    for (long i = 0; i < rounds; i++) {
        CUdeviceptr *p = &held[rand_r(&seed) % 16];
        if (*p)
            bad += release(*p) != 0;
        bad += alloc(p, (size_t)(rand_r(&seed) % (unsigned int)size) + 1) != 0;
    }
    for (int i = 0; i < 16; i++)
        if (held[i])
            bad += release(held[i]) != 0;
    return (void *)bad;
}

/* pooled has memory of the device's pool and gives it back, on a stream of its own;
 * each synchronisation lets the pool give back all that nobody has. */
static void *pooled(void *arg)
{
    (void)arg;
    int (*stream)(CUstream *, unsigned int) = dlsym(library, "cuStreamCreate"), (*take)(CUdeviceptr *, size_t, CUstream) = dlsym(library, "cuMemAllocAsync");
    int (*give)(CUdeviceptr, CUstream) = dlsym(library, "cuMemFreeAsync"), (*synchronize)(CUstream) = dlsym(library, "cuStreamSynchronize");
    CUstream s = NULL;
    CUdeviceptr at = 0;
    long bad = set(shared_context) + stream(&s, 1);
    for (long i = 0; i < rounds && !bad; i++)
        bad = take(&at, (size_t)size, s) || give(at, s) || synchronize(s);
    return (void *)bad;
}

static void threads(int n, void *(*work)(void *))
{
    pthread_t t[64];
    long bad = 0;
    ((int (*)(CUcontext *))dlsym(library, "cuCtxGetCurrent"))(&shared_context);
    for (long i = 0; i < n && i < 64; i++)
        pthread_create(&t[i], NULL, work, (void *)i);
    for (int i = 0; i < n && i < 64; i++) {
        void *r;
        pthread_join(t[i], &r);
        bad += (long)r;
    }
    printf("%ld\n", bad);
}

static void obey(char **words, int count)
{
    if (strcmp(words[0], "poke") == 0 && count == 5) {
        long v = value(words[4]);
        memcpy(variable(words[1])->bytes + value(words[2]), &v, (size_t)value(words[3]));
        printf("0\n");
    } else if (strcmp(words[0], "peek") == 0 && count == 4) {
        long v = 0;
        memcpy(&v, variable(words[1])->bytes + value(words[2]), (size_t)value(words[3]));
        printf("%ld\n", v);
    } else if ((strcmp(words[0], "threads") == 0 || strcmp(words[0], "pooled") == 0) && count == 4) {
        rounds = value(words[2]);
        size = value(words[3]);
        threads((int)value(words[1]), words[0][0] == 'p' ? pooled : work);
    } else if (strcmp(words[0], "burn") == 0 && count == 3) {
        long n = value(words[1]), i;
        CUdeviceptr p;
        for (i = 0; i < n && alloc(&p, (size_t)value(words[2])) == 0; i++)
            ;
        printf("%ld\n", i);
    } else if (strcmp(words[0], "take") == 0 && count == 3) {
        int pid = (int)syscall(SYS_pidfd_open, value(words[1]), 0);
        variable("fd")->value = syscall(SYS_pidfd_getfd, pid, value(words[2]), 0);
        close(pid);
        printf("0 fd=%ld\n", variable("fd")->value);
    } else if (strcmp(words[0], "address") == 0 && count == 2) {
        printf("%ld\n", (long)dlsym(library, words[1]));
    } else if (strcmp(words[0], "close") == 0 && count == 2) {
        printf("%d\n", close((int)value(words[1])));
    } else if (strcmp(words[0], "fork") == 0) {
        fflush(stdout);
        pid_t child = fork();
        if (child == 0) {
            make(words + 1, count - 1);
            fflush(stdout);
            _exit(0);
        }
        waitpid(child, NULL, 0);
    } else if (strcmp(words[0], "exec") == 0) {
        words[count] = NULL;
        execv(words[1], words + 1);
        printf("-1\n");
    } else {
        make(words, count);
    }
    fflush(stdout);
}

int main(int argc, char **argv)
{
    bool apart = argc > 2 && strcmp(argv[2], "apart") == 0;
    library = apart ? dlmopen(LM_ID_NEWLM, argv[1], RTLD_NOW) : dlopen(argv[1], RTLD_NOW);
    if (!library) {
        printf("%s\n", dlerror());
        return 1;
    }
    alloc = (int (*)(CUdeviceptr *, size_t))dlsym(library, "cuMemAlloc_v2");
    release = (int (*)(CUdeviceptr))dlsym(library, "cuMemFree_v2");
    set = (int (*)(CUcontext))dlsym(library, "cuCtxSetCurrent");
    printf("%d\n", getpid());
    fflush(stdout);
    char line[1024];
    while (fgets(line, sizeof line, stdin)) {
        char *words[ARGUMENTS + 2], *at = line;
        int count = 0;
        line[strcspn(line, "\n")] = 0;
        while (*at && count < ARGUMENTS) {
            at += strspn(at, " ");
            if (!*at)
                break;
            words[count++] = at;
            char *end = *at == '"' ? strchr(at + 1, '"') : at + strcspn(at, " ");
            if (!end)
                break;
            at = *end ? end + 1 : end;
            *end = 0;
        }
        if (count)
            obey(words, count);
    }
    return 0;
}
