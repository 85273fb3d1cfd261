/* SPDX-License-Identifier: Apache-2.0 */

/* nvidia-smi, as far as operators and agents of the field call it: the list,
 * a table, and the compute policy. Like the real one it loads
 * libnvidia-ml.so.1 by its name, so that whatever stands for that library in a
 * container answers here too, and it ends with NVML's own error number. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "nvml.h"

static void *nvml;

/* find ends the program where the library lacks a name, as a link error would. */
static void *find(const char *name)
{
    void *at = dlsym(nvml, name);
    if (!at) {
        fprintf(stderr, "nvidia-smi: libnvidia-ml.so.1 has no %s\n", name);
        exit(NVML_ERROR_FUNCTION_NOT_FOUND);
    }
    return at;
}

#define CALL(name, ...) (((__typeof__(&name))find(#name))(__VA_ARGS__))

static void must(nvmlReturn_t r, const char *what)
{
    if (r == NVML_SUCCESS)
        return;
    fprintf(stderr, "%s: %s\n", what, CALL(nvmlErrorString, r));
    exit(r);
}

/* Not in nvml.h: the driver's tool has an interface of its own for these. */
nvmlReturn_t gpuEmulatorGetTimeSlice(nvmlDevice_t, unsigned int *);
nvmlReturn_t gpuEmulatorSetTimeSlice(nvmlDevice_t, unsigned int);

static const char *const slices[] = {"Default", "Short", "Medium", "Long"};

enum { MAX_GPUS = 64 };
static nvmlDevice_t gpus[MAX_GPUS];
static unsigned int gpu_count;

/* choose takes what -i was given: an index, a UUID or a PCI address; null is
 * every GPU. */
static void choose(const char *id)
{
    if (!id) {
        must(CALL(nvmlDeviceGetCount_v2, &gpu_count), "Failed to count GPUs");
        if (gpu_count > MAX_GPUS)
            gpu_count = MAX_GPUS;
        for (unsigned int i = 0; i < gpu_count; i++) {
            char what[64];
            snprintf(what, sizeof what, "Unable to determine the device handle for GPU%u", i);
            must(CALL(nvmlDeviceGetHandleByIndex_v2, i, &gpus[i]), what);
        }
        return;
    }
    char *end;
    unsigned long index = strtoul(id, &end, 10);
    nvmlReturn_t r;
    if (*id && !*end)
        r = CALL(nvmlDeviceGetHandleByIndex_v2, (unsigned int)index, &gpus[0]);
    else if (strncmp(id, "GPU-", 4) == 0)
        r = CALL(nvmlDeviceGetHandleByUUID, id, &gpus[0]);
    else
        r = CALL(nvmlDeviceGetHandleByPciBusId_v2, id, &gpus[0]);
    if (r == NVML_ERROR_NOT_FOUND || r == NVML_ERROR_INVALID_ARGUMENT) {
        fprintf(stderr, "No devices were found: %s\n", id);
        exit(6);
    }
    must(r, id);
    gpu_count = 1;
}

static void list(void)
{
    for (unsigned int i = 0; i < gpu_count; i++) {
        char name[NVML_DEVICE_NAME_V2_BUFFER_SIZE], uuid[NVML_DEVICE_UUID_V2_BUFFER_SIZE];
        unsigned int index;
        must(CALL(nvmlDeviceGetIndex, gpus[i], &index), "index");
        must(CALL(nvmlDeviceGetName, gpus[i], name, sizeof name), "name");
        must(CALL(nvmlDeviceGetUUID, gpus[i], uuid, sizeof uuid), "UUID");
        printf("GPU %u: %s (UUID: %s)\n", index, name, uuid);
    }
}

static void rule(char c)
{
    putchar('+');
    for (int i = 0; i < 89; i++)
        putchar(c);
    puts("+");
}

static void table(void)
{
    char driver[80];
    int cuda;
    must(CALL(nvmlSystemGetDriverVersion, driver, sizeof driver), "driver version");
    must(CALL(nvmlSystemGetCudaDriverVersion_v2, &cuda), "CUDA version");
    rule('-');
    printf("| NVIDIA-SMI %-19s Driver Version: %-19s CUDA Version: %2d.%-6d |\n", driver, driver, cuda / 1000, cuda % 1000 / 10);
    rule('-');
    printf("| %3s  %-42s %-17s %21s |\n", "GPU", "Name", "Bus-Id", "Memory-Usage");
    rule('=');
    for (unsigned int i = 0; i < gpu_count; i++) {
        char name[NVML_DEVICE_NAME_V2_BUFFER_SIZE], used[48];
        unsigned int index;
        nvmlPciInfo_t pci;
        nvmlMemory_v2_t memory = {.version = nvmlMemory_v2};
        must(CALL(nvmlDeviceGetIndex, gpus[i], &index), "index");
        must(CALL(nvmlDeviceGetName, gpus[i], name, sizeof name), "name");
        must(CALL(nvmlDeviceGetPciInfo_v3, gpus[i], &pci), "bus id");
        must(CALL(nvmlDeviceGetMemoryInfo_v2, gpus[i], &memory), "memory");
        snprintf(used, sizeof used, "%lluMiB / %lluMiB", memory.used >> 20, memory.total >> 20);
        printf("| %3u  %-42.42s %-17s %21s |\n", index, name, pci.busId, used);
    }
    rule('-');
    printf("| %3s  %10s  %-4s  %-46s %17s |\n", "GPU", "PID", "Type", "Process name", "Memory-Usage");
    rule('=');
    for (unsigned int i = 0; i < gpu_count; i++) {
        static const struct {
            const char *type, *call;
        } kinds[] = {
            {"C", "nvmlDeviceGetComputeRunningProcesses_v3"},
            {"G", "nvmlDeviceGetGraphicsRunningProcesses_v3"},
            {"M+C", "nvmlDeviceGetMPSComputeRunningProcesses_v3"},
        };
        unsigned int index;
        must(CALL(nvmlDeviceGetIndex, gpus[i], &index), "index");
        for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++) {
            static nvmlProcessInfo_t p[4096];
            unsigned int n = sizeof p / sizeof *p;
            nvmlReturn_t (*get)(nvmlDevice_t, unsigned int *, nvmlProcessInfo_t *) = find(kinds[k].call);
            must(get(gpus[i], &n, p), "processes");
            for (unsigned int j = 0; j < n; j++) {
                char name[256] = "[Not Found]", used[32] = "N/A";
                CALL(nvmlSystemGetProcessName, p[j].pid, name, sizeof name);
                if (p[j].usedGpuMemory != (unsigned long long)NVML_VALUE_NOT_AVAILABLE)
                    snprintf(used, sizeof used, "%lluMiB", p[j].usedGpuMemory >> 20);
                printf("| %3u  %10u  %-4s  %-46.46s %17s |\n", index, p[j].pid, kinds[k].type, name, used);
            }
        }
    }
    rule('-');
}

static int compute_policy(const char *slice, int show)
{
    if (slice) {
        char *end;
        unsigned long n = strtoul(slice, &end, 10);
        if (!*slice || *end || n >= sizeof slices / sizeof *slices) {
            fprintf(stderr, "Invalid time-slice: %s (0 default, 1 short, 2 medium, 3 long)\n", slice);
            return NVML_ERROR_INVALID_ARGUMENT;
        }
        for (unsigned int i = 0; i < gpu_count; i++) {
            must(CALL(gpuEmulatorSetTimeSlice, gpus[i], (unsigned int)n), "Failed to set time-slice");
            char uuid[NVML_DEVICE_UUID_V2_BUFFER_SIZE];
            must(CALL(nvmlDeviceGetUUID, gpus[i], uuid, sizeof uuid), "UUID");
            printf("Successfully set time-slice for GPU %s to %s\n", uuid, slices[n]);
        }
        return 0;
    }
    if (!show) {
        fprintf(stderr, "nvidia-smi compute-policy: give --list or --set-timeslice\n");
        return NVML_ERROR_INVALID_ARGUMENT;
    }
    puts("Compute policies (GPU: time-slice)");
    for (unsigned int i = 0; i < gpu_count; i++) {
        unsigned int n = 0, index;
        must(CALL(nvmlDeviceGetIndex, gpus[i], &index), "index");
        must(CALL(gpuEmulatorGetTimeSlice, gpus[i], &n), "time-slice");
        printf("GPU %u: %s\n", index, n < sizeof slices / sizeof *slices ? slices[n] : "Unknown");
    }
    return 0;
}

/* value is an option's value, after = or in the next argument. */
static const char *value(char **argv, int *i, const char *brief, const char *full)
{
    size_t n = strlen(full);
    if (strncmp(argv[*i], full, n) == 0 && argv[*i][n] == '=')
        return argv[*i] + n + 1;
    if (strcmp(argv[*i], full) != 0 && (!brief || strcmp(argv[*i], brief) != 0))
        return NULL;
    if (!argv[*i + 1]) {
        fprintf(stderr, "Option %s is missing its value.\n", argv[*i]);
        exit(NVML_ERROR_INVALID_ARGUMENT);
    }
    return argv[++*i];
}

int main(int argc, char **argv)
{
    int policy = argc > 1 && strcmp(argv[1], "compute-policy") == 0, show = 0;
    const char *id = NULL, *slice = NULL, *v;
    for (int i = 1 + policy; i < argc; i++) {
        if ((v = value(argv, &i, "-i", "--id")))
            id = v;
        else if (policy && (v = value(argv, &i, NULL, "--set-timeslice")))
            slice = v;
        else if (policy && (strcmp(argv[i], "-l") == 0 || strcmp(argv[i], "--list") == 0))
            show = 1;
        else if (!policy && (strcmp(argv[i], "-L") == 0 || strcmp(argv[i], "--list-gpus") == 0))
            show = 1;
        else {
            fprintf(stderr, "Invalid combination of input arguments: %s\n", argv[i]);
            return NVML_ERROR_INVALID_ARGUMENT;
        }
    }

    nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    if (!nvml) {
        fprintf(stderr, "NVIDIA-SMI couldn't find libnvidia-ml.so library in your system: %s\n", dlerror());
        return NVML_ERROR_LIBRARY_NOT_FOUND;
    }
    must(CALL(nvmlInit_v2), "Failed to initialize NVML");
    choose(id);
    int r = 0;
    if (policy)
        r = compute_policy(slice, show);
    else if (show)
        list();
    else
        table();
    CALL(nvmlShutdown);
    return r;
}
