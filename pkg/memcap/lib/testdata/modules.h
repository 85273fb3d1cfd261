/* SPDX-License-Identifier: Apache-2.0 */

/* What the programs about modules have in common. */
#include <dlfcn.h>
#include <stdio.h>

#include "driver.h"
#include "page.h"

static CUresult (*load)(CUmodule *, const void *), (*unload)(CUmodule), (*alloc)(CUdeviceptr *, size_t), (*give)(CUdeviceptr);
static int *looks;
static FILE *usage;

static int begin(int argc, char **argv)
{
    void *library = argc == 3 ? dlopen(argv[1], RTLD_NOW) : NULL, *driver = library ? dlopen(CAP_REAL_CUDA, RTLD_NOW) : NULL;
    usage = argc == 3 ? fopen(argv[2], "r") : NULL;
    if (!library || !driver || !usage) {
        printf("FAILED: %s\n", dlerror());
        return 0;
    }
    setvbuf(usage, NULL, _IONBF, 0);
    *(void **)&load = dlsym(library, "cuModuleLoadData");
    *(void **)&unload = dlsym(library, "cuModuleUnload");
    *(void **)&alloc = dlsym(library, "cuMemAlloc_v2");
    *(void **)&give = dlsym(library, "cuMemFree_v2");
    looks = dlsym(driver, "looks");
    return looks != NULL;
}

static uint64_t word(long at)
{
    uint64_t w = 0;
    return fseek(usage, at, SEEK_SET) || fread(&w, sizeof w, 1, usage) != 1 ? 0 : w;
}

/* bound_mib is what the page says, without what is idle in the only slot. */
static inline uint64_t bound_mib(void)
{
    return (AMOUNT(word(offsetof(struct usage_page, bound))) - AMOUNT(word(offsetof(struct usage_page, slots) + offsetof(struct slot, idle)))) >> 20;
}

#define MIB ((size_t)1 << 20)
#define WANT(what, is, wants)                                                                              \
    do {                                                                                                   \
        unsigned long long got = (unsigned long long)(is), want = (unsigned long long)(wants);             \
        if (got != want) {                                                                                 \
            printf("FAILED: %s: %llu, want %llu\n", what, got, want);                                      \
            return 1;                                                                                      \
        }                                                                                                  \
    } while (0)
