/* SPDX-License-Identifier: Apache-2.0 */

/* lacks LIBRARY USAGE_PAGE NAME...: the cap's library in front of a driver that
 * does not have those names. */
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "driver.h"

#define NAME(base, since, name, arguments) #name,
static const char *const overrides[] = {OVERRIDES(NAME)};

int main(int argc, char **argv)
{
    void *library = argc > 3 ? dlopen(argv[1], RTLD_NOW) : NULL, *f = NULL;
    if (!library) {
        printf("FAILED: %s\n", argc > 3 ? dlerror() : "arguments");
        return 1;
    }
    int failed = 0;
    for (size_t i = 0; i < sizeof overrides / sizeof *overrides; i++) {
        int lacks = 0;
        for (int k = 3; k < argc; k++)
            lacks |= !strcmp(argv[k], overrides[i]);
        if ((dlsym(library, overrides[i]) == NULL) == lacks)
            continue;
        printf("FAILED: dlsym %s %s\n", lacks ? "finds" : "does not find", overrides[i]);
        failed = 1;
    }
    CUresult (*ask)(const char *, void **, int, uint64_t, int *);
    *(void **)&ask = dlsym(library, "cuGetProcAddress_v2");
    if (ask("cuMemAlloc", &f, 12000, 0, NULL) != CUDA_SUCCESS || f != dlsym(library, "cuMemAlloc_v2")) {
        printf("FAILED: cuGetProcAddress is not what it was\n");
        failed = 1;
    }
    return failed;
}
