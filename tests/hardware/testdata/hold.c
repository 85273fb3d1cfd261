/* SPDX-License-Identifier: Apache-2.0 */

/* hold LIBRARY MIB: take so much memory of the first visible CUDA device, say
 * "ready" and keep it until standard input ends. The few calls are declared
 * here by hand, so that it builds without CUDA's headers. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

typedef int (*call)();

static call find(void *lib, const char *name)
{
    call f = (call)dlsym(lib, name);
    if (!f) {
        fprintf(stderr, "libcuda has no %s\n", name);
        exit(1);
    }
    return f;
}

static void must(int result, const char *what)
{
    if (result) {
        fprintf(stderr, "%s: CUDA error %d\n", what, result);
        exit(1);
    }
}

int main(int argc, char **argv)
{
    if (argc != 3)
        return 2;
    void *lib = dlopen(argv[1], RTLD_NOW);
    if (!lib) {
        fprintf(stderr, "%s\n", dlerror());
        return 1;
    }
    int device = 0;
    void *context = NULL;
    unsigned long long at = 0;
    must(find(lib, "cuInit")(0u), "cuInit");
    must(find(lib, "cuDeviceGet")(&device, 0), "cuDeviceGet");
    must(find(lib, "cuDevicePrimaryCtxRetain")(&context, device), "cuDevicePrimaryCtxRetain");
    must(find(lib, "cuCtxSetCurrent")(context), "cuCtxSetCurrent");
    must(find(lib, "cuMemAlloc_v2")(&at, (size_t)strtoull(argv[2], NULL, 10) << 20), "cuMemAlloc");
    puts("ready");
    fflush(stdout);
    char c;
    while (read(STDIN_FILENO, &c, 1) > 0)
        ;
    return 0;
}
