/* SPDX-License-Identifier: Apache-2.0 */

/* graphics LIBRARY USAGE_PAGE: contexts for OpenGL and VDPAU are counted as others are,
 * and gone when they are destroyed. */
#include <dlfcn.h>
#include <stdio.h>

#include "driver.h"
#include "page.h"

static const char *usage;

static uint64_t word(size_t at)
{
    uint64_t w = ~(uint64_t)0;
    FILE *f = fopen(usage, "r");
    if (f && (fseek(f, (long)at, SEEK_SET) || fread(&w, sizeof w, 1, f) != 1))
        w = ~(uint64_t)0;
    if (f)
        fclose(f);
    return w;
}

/* has says whether so many contexts are counted, of 1 MiB each. */
static int has(const char *name, const char *when, uint64_t contexts)
{
    uint64_t bound = AMOUNT(word(offsetof(struct usage_page, bound))), counted = word(PAGE + offsetof(struct slot, contexts));
    if (bound == contexts << 20 && counted == contexts)
        return 1;
    printf("FAILED: %s: %s %llu bytes are bound, of %llu contexts\n", name, when, (unsigned long long)bound, (unsigned long long)counted);
    return 0;
}

int main(int argc, char **argv)
{
    void *library = argc == 3 ? dlopen(argv[1], RTLD_NOW) : NULL;
    if (!library) {
        printf("FAILED: %s\n", argc == 3 ? dlerror() : "arguments");
        return 2;
    }
    usage = argv[2];
    CUresult (*gl)(CUcontext *, unsigned int, CUdevice), (*vdpau)(CUcontext *, unsigned int, CUdevice, uint32_t, void *), (*destroy)(CUcontext);
    *(void **)&gl = dlsym(library, "cuGLCtxCreate_v2");
    *(void **)&vdpau = dlsym(library, "cuVDPAUCtxCreate_v2");
    *(void **)&destroy = dlsym(library, "cuCtxDestroy_v2");
    for (int i = 0; i < 2; i++) {
        const char *name = i ? "cuVDPAUCtxCreate" : "cuGLCtxCreate";
        CUcontext context;
        if (i ? vdpau(&context, 0, 0, 7, argv) : gl(&context, 0, 0)) {
            printf("FAILED: %s\n", name);
            return 1;
        }
        if (!has(name, "with it", 1))
            return 1;
        if (destroy(context) && (!has(name, "when it could not be destroyed", 1) || destroy(context)))
            return 1;
        if (!has(name, "without it", 0))
            return 1;
    }
    return 0;
}
