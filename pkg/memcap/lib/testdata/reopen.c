/* SPDX-License-Identifier: Apache-2.0 */

/* reopen LIBRARY USAGE_PAGE: opens and closes the cap's library, with an
 * allocation each time, and looks how many slots of the usage page that took. */
#include <dlfcn.h>
#include <stdio.h>

#include "driver.h"
#include "page.h"

int main(int argc, char **argv)
{
    enum { ROUNDS = 40 };
    if (argc != 3)
        return 2;
    for (int i = 0; i < ROUNDS; i++) {
        void *library = dlopen(argv[1], RTLD_NOW);
        if (!library) {
            printf("FAILED: %s\n", dlerror());
            return 1;
        }
        CUresult (*take)(CUdeviceptr_v1 *, size_v1), (*give)(CUdeviceptr_v1);
        *(void **)&take = dlsym(library, "cuMemAlloc");
        *(void **)&give = dlsym(library, "cuMemFree");
        CUdeviceptr_v1 at = 0;
        if (take(&at, 4 << 20) != CUDA_SUCCESS || give(at) != CUDA_SUCCESS) {
            printf("FAILED: no memory in round %d\n", i);
            return 1;
        }
        dlclose(library);
    }
    FILE *f = fopen(argv[2], "r");
    uint32_t slots = 0;
    if (!f || fseek(f, offsetof(struct usage_page, high), SEEK_SET) || fread(&slots, sizeof slots, 1, f) != 1) {
        printf("FAILED: the usage page cannot be read\n");
        return 1;
    }
    fclose(f);
    if (slots != 1)
        printf("FAILED: %u slots for one process that opened the library %d times\n", slots, ROUNDS);
    return slots != 1;
}
