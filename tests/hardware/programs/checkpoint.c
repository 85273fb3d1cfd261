/* SPDX-License-Identifier: Apache-2.0 */

/* checkpoint LIBRARY WHAT PID: one step of another process's checkpoint, by the driver: lock,
 * checkpoint, restore, unlock, or state. It says CUDA's number, the microseconds that it took,
 * and the state. A driver that has no such call is -1. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef int (*function)();

int main(int argc, char **argv)
{
    static const struct {
        const char *what, *call;
    } steps[] = {
        {"lock", "cuCheckpointProcessLock"},
        {"checkpoint", "cuCheckpointProcessCheckpoint"},
        {"restore", "cuCheckpointProcessRestore"},
        {"unlock", "cuCheckpointProcessUnlock"},
        {"state", "cuCheckpointProcessGetState"},
    };
    /* No step takes more of its arguments than this, and zeros are the defaults. */
    _Alignas(8) char arguments[256] = {0};
    void *library = argc == 4 ? dlopen(argv[1], RTLD_NOW) : NULL;
    function init, step = NULL;
    struct timespec began, ended;
    int state = -1, r;
    if (!library) {
        fprintf(stderr, "%s\n", argc == 4 ? dlerror() : "usage: checkpoint LIBRARY WHAT PID");
        return 2;
    }
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++)
        if (!strcmp(steps[i].what, argv[2]))
            *(void **)&step = dlsym(library, steps[i].call);
    *(void **)&init = dlsym(library, "cuInit");
    if (!step || !init) {
        printf("-1 0 -1\n");
        return 0;
    }
    if ((r = init(0u))) {
        printf("%d 0 -1\n", r);
        return 0;
    }
    clock_gettime(CLOCK_MONOTONIC, &began);
    r = strcmp(argv[2], "state") ? step(atoi(argv[3]), (void *)arguments) : step(atoi(argv[3]), &state);
    clock_gettime(CLOCK_MONOTONIC, &ended);
    printf("%d %lld %d\n", r, (long long)(ended.tv_sec - began.tv_sec) * 1000000 + (ended.tv_nsec - began.tv_nsec) / 1000, state);
    return 0;
}
