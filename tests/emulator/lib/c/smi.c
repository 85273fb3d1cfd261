/* SPDX-License-Identifier: Apache-2.0 */

/* nvidia-smi, as far as operators and agents of the field call it: the list,
 * a table, the compute policy, the topology, a reset, and MIG. Like the real one
 * it loads libnvidia-ml.so.1 by its name, so that whatever stands for that library
 * in a container answers here too, and it ends with NVML's own error number. */
#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "smi.h"

static void *nvml;

void *smi_find(const char *name)
{
    void *at = dlsym(nvml, name);
    if (!at) {
        fprintf(stderr, "nvidia-smi: libnvidia-ml.so.1 has no %s\n", name);
        exit(NVML_ERROR_FUNCTION_NOT_FOUND);
    }
    return at;
}

void must(nvmlReturn_t r, const char *what)
{
    if (r == NVML_SUCCESS)
        return;
    fprintf(stderr, "%s: %s\n", what, CALL(nvmlErrorString, r));
    exit(r);
}

/* Not in nvml.h: the driver's tool has an interface of its own for these. */
nvmlReturn_t gpuEmulatorGetTimeSlice(nvmlDevice_t, unsigned int *);
nvmlReturn_t gpuEmulatorSetTimeSlice(nvmlDevice_t, unsigned int);
nvmlReturn_t gpuEmulatorReset(nvmlDevice_t);
nvmlReturn_t gpuEmulatorGetMatrix(char *, unsigned int);

static const char *const slices[] = {"Default", "Short", "Medium", "Long"};

nvmlDevice_t gpus[MAX_GPUS];
unsigned int gpu_count;

void say(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vprintf(format, args);
    va_end(args);
    putchar('\n');
}

unsigned int index_of(nvmlDevice_t d)
{
    unsigned int index = 0;
    must(CALL(nvmlDeviceGetIndex, d, &index), "index");
    return index;
}

const char *address_of(nvmlDevice_t d)
{
    static nvmlPciInfo_t pci;
    must(CALL(nvmlDeviceGetPciInfo_v3, d, &pci), "bus id");
    return pci.busId;
}

/* choose_one finds a GPU by its index, UUID or PCI address. */
static void choose_one(const char *id)
{
    char *end;
    unsigned long index = strtoul(id, &end, 10);
    nvmlDevice_t *to = &gpus[gpu_count];
    nvmlReturn_t r;
    if (gpu_count == MAX_GPUS)
        must(NVML_ERROR_INSUFFICIENT_SIZE, id);
    if (*id && !*end)
        r = CALL(nvmlDeviceGetHandleByIndex_v2, (unsigned int)index, to);
    else if (strncmp(id, "GPU-", 4) == 0)
        r = CALL(nvmlDeviceGetHandleByUUID, id, to);
    else
        r = CALL(nvmlDeviceGetHandleByPciBusId_v2, id, to);
    if (r == NVML_ERROR_NOT_FOUND || r == NVML_ERROR_INVALID_ARGUMENT) {
        fprintf(stderr, "No devices were found: %s\n", id);
        exit(NVML_ERROR_NOT_FOUND);
    }
    must(r, id);
    gpu_count++;
}

/* choose takes what -i was given, with commas between; null is every GPU. */
static void choose(const char *ids)
{
    gpu_count = 0;
    if (ids) {
        char list[1024], *rest = list;
        snprintf(list, sizeof list, "%s", ids);
        for (char *id; (id = strsep(&rest, ","));)
            choose_one(id);
        return;
    }
    unsigned int count;
    must(CALL(nvmlDeviceGetCount_v2, &count), "Failed to count GPUs");
    for (unsigned int i = 0; i < count && i < MAX_GPUS; i++) {
        char what[64];
        snprintf(what, sizeof what, "Unable to determine the device handle for GPU%u", i);
        must(CALL(nvmlDeviceGetHandleByIndex_v2, i, &gpus[i]), what);
        gpu_count++;
    }
}

static void list(void)
{
    for (unsigned int i = 0; i < gpu_count; i++) {
        char name[NVML_DEVICE_NAME_V2_BUFFER_SIZE], uuid[NVML_DEVICE_UUID_V2_BUFFER_SIZE];
        must(CALL(nvmlDeviceGetName, gpus[i], name, sizeof name), "name");
        must(CALL(nvmlDeviceGetUUID, gpus[i], uuid, sizeof uuid), "UUID");
        printf("GPU %u: %s (UUID: %s)\n", index_of(gpus[i]), name, uuid);
        list_mig_devices(gpus[i]);
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
    printf("| NVIDIA-SMI %-19s Driver Version: %-19s CUDA Version: %2d.%-3d |\n", driver, driver, cuda / 1000, cuda % 1000 / 10);
    rule('-');
    printf("| %3s  %-42s %-17s %21s |\n", "GPU", "Name", "Bus-Id", "Memory-Usage");
    rule('=');
    for (unsigned int i = 0; i < gpu_count; i++) {
        char name[NVML_DEVICE_NAME_V2_BUFFER_SIZE], used[48];
        nvmlMemory_v2_t memory = {.version = nvmlMemory_v2};
        must(CALL(nvmlDeviceGetName, gpus[i], name, sizeof name), "name");
        nvmlReturn_t told = CALL(nvmlDeviceGetMemoryInfo_v2, gpus[i], &memory);
        snprintf(used, sizeof used, "Not Supported"); // in the real one's words
        if (told != NVML_ERROR_NOT_SUPPORTED) {
            must(told, "memory");
            snprintf(used, sizeof used, "%lluMiB / %lluMiB", memory.used >> 20, memory.total >> 20);
        }
        printf("| %3u  %-42.42s %-17s %21s |\n", index_of(gpus[i]), name, address_of(gpus[i]), used);
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
        unsigned int index = index_of(gpus[i]);
        for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++) {
            static nvmlProcessInfo_t p[4096];
            unsigned int n = sizeof p / sizeof *p;
            nvmlReturn_t (*get)(nvmlDevice_t, unsigned int *, nvmlProcessInfo_t *) = smi_find(kinds[k].call);
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
        unsigned int n = 0, index = index_of(gpus[i]);
        must(CALL(gpuEmulatorGetTimeSlice, gpus[i], &n), "time-slice");
        printf("GPU %u: %s\n", index, n < sizeof slices / sizeof *slices ? slices[n] : "Unknown");
    }
    return 0;
}

static int topology(int matrix)
{
    static char text[64 << 10];
    if (!matrix) {
        fprintf(stderr, "nvidia-smi topo: give --matrix\n");
        return NVML_ERROR_INVALID_ARGUMENT;
    }
    must(CALL(gpuEmulatorGetMatrix, text, (unsigned int)sizeof text), "Failed to read the topology");
    fputs(text, stdout);
    return 0;
}

/* reset tries all that were named, then tells of those that are in use: with 255,
 * which is none of NVML's numbers. */
static int reset(void)
{
    unsigned int held = 0, n = gpu_count;
    nvmlReturn_t failed = NVML_SUCCESS;
    for (unsigned int i = 0; i < n; i++) {
        nvmlReturn_t r = CALL(gpuEmulatorReset, gpus[i]);
        if (r == NVML_SUCCESS) {
            say("GPU %s was successfully reset.", address_of(gpus[i]));
        } else if (r == NVML_ERROR_IN_USE) {
            gpus[held++] = gpus[i];
        } else {
            say("Unable to reset GPU %u: %s", i, CALL(nvmlErrorString, r));
            failed = r;
        }
    }
    if (held) {
        say("\nThe following GPUs could not be reset:");
        for (unsigned int i = 0; i < held; i++)
            say("  GPU %s: %s", address_of(gpus[i]), CALL(nvmlErrorString, NVML_ERROR_IN_USE));
        say("\n%u %s currently being used by one or more other processes (e.g., Fabric Manager, CUDA application, "
            "graphics application such as an X server, or a monitoring application such as another instance of "
            "nvidia-smi). Please first kill all processes using %s and all compute applications running in the system.",
            held, held == 1 ? "device is" : "devices are", held == 1 ? "this device" : "these devices");
        return 255;
    }
    if (failed == NVML_SUCCESS)
        say("All done.");
    return failed;
}

const char *value(char **argv, int *i, const char *brief, const char *full)
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

static int is(const char *word, const char *brief, const char *full) { return strcmp(word, brief) == 0 || strcmp(word, full) == 0; }

int main(int argc, char **argv)
{
    enum { TABLE, LIST, POLICY, TOPOLOGY, RESET, MODE, MIG } what = TABLE;
    if (argc > 1 && strcmp(argv[1], "compute-policy") == 0)
        what = POLICY;
    if (argc > 1 && strcmp(argv[1], "topo") == 0)
        what = TOPOLOGY;
    if (argc > 1 && strcmp(argv[1], "mig") == 0)
        what = MIG;
    const char *ids = NULL, *slice = NULL, *mode = NULL, *v;
    int show = 0, kept = 0, first = what == TABLE ? 1 : 2;
    for (int i = first; i < argc; i++) {
        if ((v = value(argv, &i, "-i", "--id")))
            ids = v;
        else if (what == MIG)
            argv[first + kept++] = argv[i]; /* its own matter */
        else if (what == POLICY && (v = value(argv, &i, NULL, "--set-timeslice")))
            slice = v;
        else if (what == POLICY && is(argv[i], "-l", "--list"))
            show = 1;
        else if (what == TOPOLOGY && is(argv[i], "-m", "--matrix"))
            show = 1;
        else if (what == TABLE && is(argv[i], "-L", "--list-gpus"))
            what = LIST;
        else if (what == TABLE && is(argv[i], "-r", "--gpu-reset"))
            what = RESET;
        else if (what == TABLE && (v = value(argv, &i, "-mig", "--multi-instance-gpu")))
            mode = v, what = MODE;
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
    choose(ids);
    int r = 0;
    switch (what) {
    case TABLE: table(); break;
    case LIST: list(); break;
    case POLICY: r = compute_policy(slice, show); break;
    case TOPOLOGY: r = topology(show); break;
    case RESET: r = reset(); break;
    case MODE: r = mig_mode(mode); break;
    case MIG: r = mig(argv + first, kept); break;
    }
    CALL(nvmlShutdown);
    return r;
}
