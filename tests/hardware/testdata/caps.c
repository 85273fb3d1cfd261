/* SPDX-License-Identifier: Apache-2.0 */

/* caps STOP: take memory of the first visible CUDA device by cuMemAlloc until it is
 * refused, give half back and take it again. With a STOP that is not 0 it takes no more
 * than so many bytes, for a run without a cap. It says what it does, a line each, and
 * goes on when it gets one. */
#include <time.h>

#include "driver.h"

#define MIB ((size_t)1 << 20)
#define REFUSED 2 /* CUDA_ERROR_OUT_OF_MEMORY */

static unsigned long long at[1 << 16];
static size_t of[1 << 16], held, stop;
static int n;

static void go_on(void)
{
    char line[16];
    fflush(stdout);
    if (!fgets(line, sizeof line, stdin))
        exit(1);
}

static void take(call allocate, size_t size)
{
    while (n < 1 << 16 && (!stop || held + size <= stop)) {
        int result = allocate(&at[n], size);
        if (result == REFUSED)
            return;
        must(result, "cuMemAlloc");
        of[n++] = size;
        held += size;
    }
}

static void fill(call allocate)
{
    take(allocate, 256 * MIB);
    take(allocate, 64 * MIB);
    take(allocate, 16 * MIB);
    take(allocate, 2 * MIB);
    printf("full request=%zu\n", 2 * MIB);
    go_on();
}

static void give(call release, int every)
{
    int kept = 0;
    for (int i = 0; i < n; i++) {
        if (i % every == 0) {
            must(release(at[i]), "cuMemFree");
            held -= of[i];
        } else {
            at[kept] = at[i];
            of[kept++] = of[i];
        }
    }
    n = kept;
}

static void pairs(call allocate, call release, size_t size)
{
    struct timespec a, b;
    unsigned long long one = 0;
    clock_gettime(CLOCK_MONOTONIC, &a);
    for (int i = 0; i < 2000; i++) {
        must(allocate(&one, size), "cuMemAlloc");
        must(release(one), "cuMemFree");
    }
    clock_gettime(CLOCK_MONOTONIC, &b);
    printf("time what=2000-pairs-of-%zu-KiB ms=%.1f\n", size / 1024, (b.tv_sec - a.tv_sec) * 1e3 + (b.tv_nsec - a.tv_nsec) / 1e6);
    go_on();
}

int main(int argc, char **argv)
{
    int device = 0;
    void *context = NULL;
    size_t unused = 0, total = 0;
    if (argc != 2)
        return 2;
    stop = strtoull(argv[1], NULL, 10);
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        return 1;
    }
    must(find(library, "cuInit")(0u), "cuInit");
    must(find(library, "cuDeviceGet")(&device, 0), "cuDeviceGet");
    must(find(library, "cuDevicePrimaryCtxRetain")(&context, device), "cuDevicePrimaryCtxRetain");
    must(find(library, "cuCtxSetCurrent")(context), "cuCtxSetCurrent");
    must(find(library, "cuMemGetInfo_v2")(&unused, &total), "cuMemGetInfo");
    printf("sees total=%zu free=%zu\n", total, unused);
    go_on();
    call allocate = find(library, "cuMemAlloc_v2"), release = find(library, "cuMemFree_v2");
    fill(allocate);
    give(release, 2);
    puts("half");
    go_on();
    fill(allocate);
    give(release, 1);
    pairs(allocate, release, 64 << 10);
    pairs(allocate, release, 4 * MIB);
    puts("end");
    go_on();
    return 0;
}
