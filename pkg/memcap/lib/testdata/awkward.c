/* SPDX-License-Identifier: Apache-2.0 */

/* awkward LIBRARY USAGE_PAGE: the cap in front of the driver of driver.c. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "driver.h"
#include "page.h"

static int failed;
static void *library;

static void must(int ok, const char *what, const char *name)
{
    if (!ok) {
        printf("FAILED: %s: %s\n", name, what);
        failed = 1;
    }
}

static void *get(const char *symbol, int version, uint64_t flags)
{
    static CUresult (*ask)(const char *, void **, int, uint64_t, int *);
    void *f = NULL;
    if (!ask)
        *(void **)&ask = dlsym(library, "cuGetProcAddress_v2");
    ask(symbol, &f, version, flags, NULL);
    return f;
}

struct door {
    const char *base, *name;
    int since, twin;
};
#define DOOR(base, since, name, arguments) {#base, #name, since, sizeof #name >= sizeof #base + 5},
static const struct door doors[] = {OVERRIDES(DOOR)};
#define COUNT (sizeof doors / sizeof *doors)

/* counted is the usage page and the slot of this process, which is the first. */
struct counted {
    struct usage_page head;
    char rest[PAGE + sizeof(struct slot) - sizeof(struct usage_page)];
};

static bool counted(const char *path, struct counted *page)
{
    FILE *f = fopen(path, "r");
    bool read = f && fread(page, sizeof *page, 1, f) == 1;
    if (f)
        fclose(f);
    return read;
}

/* bound is what is counted for this process. */
static uint64_t bound(const char *path)
{
    static struct counted page;
    return counted(path, &page) ? AMOUNT(page.head.bound) - AMOUNT(page.head.slots[0].idle) : ~(uint64_t)0;
}

/* settled is what gives no room before the next reading. */
static uint64_t settled(const char *path)
{
    static struct counted page;
    return counted(path, &page) ? page.head.settled : ~(uint64_t)0;
}

int main(int argc, char **argv)
{
    library = argc == 3 ? dlopen(argv[1], RTLD_NOW) : NULL;
    if (!library) {
        printf("FAILED: %s\n", argc == 3 ? dlerror() : "arguments");
        return 1;
    }
    /* The driver's answers tell nothing, so the list does. */
    for (size_t i = 0; i < COUNT; i++) {
        const struct door *d = &doors[i];
        void *ours = dlsym(library, d->name);
        must(get(d->base, d->since, d->twin ? 2 : 0) == ours, "not to be had as of its version", d->name);
        int is_base = 0, is_name = 0; /* of another line */
        for (size_t k = 0; k < COUNT; k++) {
            is_base |= !strcmp(doors[k].base, d->name);
            is_name |= !strcmp(doors[k].name, d->base) && strcmp(doors[k].base, d->base);
        }
        if (!is_name)
            must(get(d->base, d->since - 1, d->twin ? 2 : 0) != ours, "given before its version", d->name);
        if (!is_base)
            must(get(d->name, 99000, 0) == ours, "not to be had by its whole name", d->name);
        if (d->twin)
            must(get(d->base, 99000, 0) != ours, "given without the flag", d->name);
        int last = 1, twins = 0;
        for (size_t k = 0; k < COUNT; k++)
            if (!strcmp(doors[k].base, d->base)) {
                twins |= doors[k].twin;
                if (doors[k].twin == d->twin && doors[k].since > d->since)
                    last = 0;
            }
        if (last)
            must(get(d->base, 99000, d->twin ? 2 : 0) == ours, "not to be had as of the newest version", d->name);
        if (last && !twins)
            must(get(d->base, 99000, 2) == ours, "not to be had with the flag that it has no twin for", d->name);
    }
    must(get("cuLaunchKernel", 12000, 0) == get("cuNothing", 12000, 2), "not the driver's own", "cuLaunchKernel");
    must(get("none", 12000, 0) == NULL, "found", "none");

    /* One allocation is counted once, whatever the driver does by itself. */
    CUresult (*alloc)(CUdeviceptr_v1 *, size_v1), (*give)(CUdeviceptr_v1);
    *(void **)&alloc = dlsym(library, "cuMemAlloc");
    *(void **)&give = dlsym(library, "cuMemFree");
    CUdeviceptr_v1 at = 0;
    must(alloc(&at, 4 << 20) == CUDA_SUCCESS, "failed", "cuMemAlloc");
    must(bound(argv[2]) == 4 << 20, "is not counted once", "cuMemAlloc");
    must(give(at) == CUDA_SUCCESS, "failed", "cuMemFree");
    must(bound(argv[2]) == 0, "is not counted once", "cuMemFree");

    /* A context, and what is in it, counts from its creation to its end. */
    CUresult (*create)(CUcontext *, unsigned int, CUdevice), (*destroy)(CUcontext), (*large)(CUdeviceptr *, size_t);
    *(void **)&create = dlsym(library, "cuCtxCreate_v2");
    *(void **)&destroy = dlsym(library, "cuCtxDestroy_v2");
    *(void **)&large = dlsym(library, "cuMemAlloc_v2");
    const uint64_t each = 1 << 20, mib = 1 << 20;
    for (int round = 0; round < 3; round++) {
        CUcontext context = NULL;
        CUdeviceptr wide;
        must(create(&context, 0, 0) == CUDA_SUCCESS && bound(argv[2]) == each, "is not counted", "cuCtxCreate_v2");
        must(large(&wide, 4 * mib) == CUDA_SUCCESS && large(&wide, 4096) == CUDA_SUCCESS, "failed", "cuMemAlloc_v2");
        must(bound(argv[2]) == each + 6 * mib, "is not counted", "cuMemAlloc_v2");
        if (round == 0)
            must(destroy(context) != CUDA_SUCCESS && bound(argv[2]) == each + 6 * mib, "gives back and fails", "cuCtxDestroy_v2");
        must(destroy(context) == CUDA_SUCCESS && bound(argv[2]) == 0, "does not give back", "cuCtxDestroy_v2");
    }
    CUresult (*retain)(CUcontext *, CUdevice), (*release)(CUdevice);
    *(void **)&retain = dlsym(library, "cuDevicePrimaryCtxRetain");
    *(void **)&release = dlsym(library, "cuDevicePrimaryCtxRelease_v2");
    for (int round = 0; round < 3; round++) {
        CUcontext context = NULL;
        must(retain(&context, 0) == CUDA_SUCCESS && bound(argv[2]) == each, "is not counted", "cuDevicePrimaryCtxRetain");
        must(retain(&context, 0) == CUDA_SUCCESS && bound(argv[2]) == each, "is counted twice", "cuDevicePrimaryCtxRetain");
        must(release(0) == CUDA_SUCCESS && bound(argv[2]) == each, "gives back too early", "cuDevicePrimaryCtxRelease_v2");
        must(release(0) == CUDA_SUCCESS && bound(argv[2]) == 0, "does not give back", "cuDevicePrimaryCtxRelease_v2");
        must(release(0) != CUDA_SUCCESS && bound(argv[2]) == 0, "is released once too often", "cuDevicePrimaryCtxRelease_v2");
    }

    /* One that ends before we expect it, since the driver's own function was called: a
     * reading may have told already that its memory has gone. */
    void *driver = dlopen("/mnt/driver/libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    CUresult (*unseen)(CUdevice), (*set)(CUcontext);
    must(driver != NULL, "is not there", "the driver");
    *(void **)&unseen = dlsym(driver, "cuDevicePrimaryCtxRelease_v2");
    *(void **)&set = dlsym(driver, "cuCtxSetCurrent");
    CUcontext context = NULL;
    CUdeviceptr wide;
    must(retain(&context, 0) == CUDA_SUCCESS && retain(&context, 0) == CUDA_SUCCESS && set(context) == CUDA_SUCCESS, "failed", "cuDevicePrimaryCtxRetain");
    must(large(&wide, 4 * mib) == CUDA_SUCCESS && bound(argv[2]) == each + 4 * mib, "is not counted", "cuMemAlloc_v2");
    uint64_t before = settled(argv[2]);
    must(unseen(0) == CUDA_SUCCESS && release(0) == CUDA_SUCCESS && bound(argv[2]) == 0, "does not give back", "cuDevicePrimaryCtxRelease_v2");
    must(settled(argv[2]) == before + each + 4 * mib, "gives room that a reading may have given", "cuDevicePrimaryCtxRelease_v2");
    return failed;
}
