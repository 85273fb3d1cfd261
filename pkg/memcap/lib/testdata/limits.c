/* SPDX-License-Identifier: Apache-2.0 */

/* limits LIBRARY USAGE_PAGE: a limit that takes memory cannot be raised where the driver does not
 * tell what it is, since that memory would not be counted; one that takes none can. */
#include <dlfcn.h>
#include <stdio.h>

#include "driver.h"

int main(int argc, char **argv)
{
    void *library = argc == 3 ? dlopen(argv[1], RTLD_NOW) : NULL;
    if (!library) {
        printf("FAILED: %s\n", argc == 3 ? dlerror() : "arguments");
        return 2;
    }
    CUresult (*set)(int, size_t);
    *(void **)&set = dlsym(library, "cuCtxSetLimit");
    enum { L2_FETCH_GRANULARITY = 5 };
    int heap = set(CU_LIMIT_MALLOC_HEAP_SIZE, (size_t)64 << 30), stack = set(CU_LIMIT_STACK_SIZE, 1 << 20), fetch = set(L2_FETCH_GRANULARITY, 64);
    if (heap != 215 || stack != 215 || fetch != CUDA_SUCCESS) {
        printf("FAILED: the heap of 64 GiB gives %d, a stack %d, a granularity %d\n", heap, stack, fetch);
        return 1;
    }
    return 0;
}
