/* SPDX-License-Identifier: Apache-2.0 */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "probe.h"

static void print_uuid(const unsigned char *b)
{
    printf(" uuid=GPU-");
    for (int i = 0; i < 16; i++)
        printf("%s%02x", i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", b[i]);
}

void show_cuda(struct cuda *cu)
{
    int count = 0;
    CUresult r = cu->cuInit(0);
    if (r == CUDA_SUCCESS)
        r = cu->cuDeviceGetCount(&count);
    printf("cuda result=%d count=%d\n", r, count);
    for (int i = 0; i < count; i++) {
        CUdevice device;
        CUuuid uuid;
        size_t device_total = 0, unused = 0, total = 0;
        struct seat s;
        if (cu->cuDeviceGet(&device, i) || cu->cuDeviceGetUuid_v2(&uuid, device) || cu->cuDeviceTotalMem_v2(&device_total, device)) {
            printf("device ordinal=%d failure=look-up\n", i);
            continue;
        }
        printf("device ordinal=%d", i);
        print_uuid(uuid.bytes);
        printf(" device-total=%zu", device_total);
        const char *what = sit(&s, cu, i, &r);
        if (what) {
            printf(" failure=%s result=%d\n", what, r);
            continue;
        }
        r = cu->cuMemGetInfo_v2(&unused, &total);
        printf(" free=%zu total=%zu result=%d\n", unused, total, r);
        leave(&s);
    }
}

/* NVML, as much of it as this needs; its structures are NVIDIA's. */
struct memory {
    unsigned long long total, unused, used;
};
struct memory_v2 {
    unsigned version;
    unsigned long long total, reserved, unused, used;
};

void show_nvml(void)
{
    void *ml = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    if (!ml) {
        printf("nvml failure=%s\n", dlerror());
        return;
    }
    int (*init)(void) = (int (*)(void))dlsym(ml, "nvmlInit_v2");
    int (*count)(unsigned *) = (int (*)(unsigned *))dlsym(ml, "nvmlDeviceGetCount_v2");
    int (*by_index)(unsigned, void **) = (int (*)(unsigned, void **))dlsym(ml, "nvmlDeviceGetHandleByIndex_v2");
    int (*get_uuid)(void *, char *, unsigned) = (int (*)(void *, char *, unsigned))dlsym(ml, "nvmlDeviceGetUUID");
    int (*memory)(void *, struct memory *) = (int (*)(void *, struct memory *))dlsym(ml, "nvmlDeviceGetMemoryInfo");
    int (*memory_v2)(void *, struct memory_v2 *) = (int (*)(void *, struct memory_v2 *))dlsym(ml, "nvmlDeviceGetMemoryInfo_v2");
    int (*shutdown)(void) = (int (*)(void))dlsym(ml, "nvmlShutdown");
    if (!init || !count || !by_index || !get_uuid || !memory || !memory_v2 || !shutdown) {
        printf("nvml failure=missing-names\n");
        return;
    }
    unsigned n = 0;
    int r = init();
    if (!r)
        r = count(&n);
    printf("nvml result=%d count=%u\n", r, n);
    for (unsigned i = 0; i < n; i++) {
        void *device;
        char uuid[96] = "";
        struct memory m = {0};
        struct memory_v2 m2 = {.version = sizeof m2 | 2 << 24};
        r = by_index(i, &device);
        if (!r)
            r = get_uuid(device, uuid, sizeof uuid);
        int r1 = r ? r : memory(device, &m), r2 = r ? r : memory_v2(device, &m2);
        printf("nvml-device ordinal=%u uuid=%s total=%llu used=%llu free=%llu result=%d total2=%llu reserved2=%llu used2=%llu free2=%llu result2=%d\n", i, uuid,
               m.total, m.used, m.unused, r1, m2.total, m2.reserved, m2.used, m2.unused, r2);
    }
    shutdown();
}
