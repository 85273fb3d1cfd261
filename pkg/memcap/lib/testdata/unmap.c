/* SPDX-License-Identifier: Apache-2.0 */

/* unmap LIBRARY USAGE_PAGE: registers and releases buffers as NCCL does, and looks
 * how often that touched memory for the first time: new memory is mapped for it. */
#include <dlfcn.h>
#include <stdio.h>
#include <sys/resource.h>

#include "driver.h"

static long faults(void)
{
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return u.ru_minflt;
}

int main(int argc, char **argv)
{
    enum { ROUNDS = 2000, WARM = 1000, BYTES = 4 << 20 };
    void *library = argc == 3 ? dlopen(argv[1], RTLD_NOW) : NULL;
    if (!library) {
        printf("FAILED: %s\n", argc == 3 ? dlerror() : "arguments");
        return 2;
    }
    CUresult (*create)(CUhandle *, size_t, const CUmemprop *, unsigned long long), (*release)(CUhandle);
    CUresult (*map)(CUdeviceptr, size_t, size_t, CUhandle, unsigned long long), (*unmap)(CUdeviceptr, size_t);
    *(void **)&create = dlsym(library, "cuMemCreate");
    *(void **)&release = dlsym(library, "cuMemRelease");
    *(void **)&map = dlsym(library, "cuMemMap");
    *(void **)&unmap = dlsym(library, "cuMemUnmap");
    CUmemprop prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}};
    long before = 0;
    for (int i = 0; i < WARM + ROUNDS; i++) {
        CUdeviceptr at = (CUdeviceptr)(1 + i % 100) << 30;
        CUhandle handle;
        if (create(&handle, BYTES, &prop, 0) || map(at, BYTES, 0, handle, 0) || unmap(at, BYTES) || release(handle)) {
            printf("FAILED: a call in round %d\n", i);
            return 1;
        }
        if (i == WARM)
            before = faults();
    }
    long took = faults() - before;
    if (took > ROUNDS / 10)
        printf("FAILED: %ld page faults in %d rounds\n", took, ROUNDS);
    return took > ROUNDS / 10;
}
