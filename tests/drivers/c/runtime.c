/* SPDX-License-Identifier: Apache-2.0 */

/* runtime LIBCUDART: what a program without a GPU is told by a CUDA runtime. It
 * reads names, and asks for the driver's functions by them. */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "alone.h"

static void *runtime;

static void *get(const char *name)
{
    void *f = dlsym(runtime, name);
    if (!f)
        printf("%s: not there\n", name);
    return f;
}

/* call calls a function with three words that it may write to or take. */
static void call(const char *name, uintptr_t a, uintptr_t b, uintptr_t c)
{
    int (*f)(uintptr_t, uintptr_t, uintptr_t);
    *(void **)&f = get(name);
    if (f)
        printf("%s: %d\n", name, f(a, b, c));
}

int main(int argc, char **argv)
{
    static uint64_t x[64], y[64];
    if (alone() != 0)
        return 1;
    runtime = argc == 2 ? dlopen(argv[1], RTLD_NOW) : NULL;
    if (!runtime) {
        printf("FAILED: %s\n", argc == 2 ? dlerror() : "arguments");
        return 1;
    }
    setvbuf(stdout, NULL, _IOLBF, 0);
    const uintptr_t px = (uintptr_t)x, py = (uintptr_t)y;
    call("cudaRuntimeGetVersion", px, 0, 0);
    printf("runtime %d\n", (int)x[0]);
    call("cudaDriverGetVersion", px, 0, 0);
    printf("driver %d\n", (int)x[0]);
    call("cudaGetDeviceCount", px, 0, 0);
    printf("devices %d\n", (int)x[0]);
    call("cudaGetLastError", 0, 0, 0);
    call("cudaGetDevice", px, 0, 0);
    call("cudaSetDevice", 0, 0, 0);
    call("cudaFree", 0, 0, 0);
    call("cudaMalloc", px, 1 << 20, 0);
    call("cudaMallocManaged", px, 1 << 20, 1);
    call("cudaMallocHost", px, 1 << 20, 0);
    call("cudaMallocAsync", px, 1 << 20, 0);
    call("cudaMemGetInfo", px, py, 0);
    call("cudaStreamCreate", px, 0, 0);
    call("cudaEventCreate", px, 0, 0);
    call("cudaStreamSynchronize", 0, 0, 0);
    call("cudaDeviceSynchronize", 0, 0, 0);
    call("cudaDeviceGetDefaultMemPool", px, 0, 0);
    call("cudaDeviceSetLimit", 2, 8 << 20, 0);
    call("cudaGraphCreate", px, 0, 0);
    call("cudaPeekAtLastError", 0, 0, 0);
    call("cudaDeviceReset", 0, 0, 0);

    int (*entry)(const char *, void **, unsigned long long, int *);
    *(void **)&entry = get("cudaGetDriverEntryPoint");
    char line[256];
    while (entry && fgets(line, sizeof line, stdin)) {
        line[strcspn(line, "\n")] = 0;
        for (unsigned flags = 0; flags < 3; flags++) {
            void *f = NULL;
            int status = -1;
            Dl_info info;
            int result = entry(line, &f, flags, &status);
            printf("entry %s %u: %d, status %d, %s\n", line, flags, result, status,
                   f && dladdr(f, &info) && info.dli_sname ? info.dli_sname : f ? "?" : "nothing");
        }
    }
    return 0;
}
