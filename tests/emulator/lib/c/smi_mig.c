/* SPDX-License-Identifier: Apache-2.0 */

/* nvidia-smi mig and nvidia-smi -mig: what there is, and a hand to change it. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "smi.h"

enum { MOST = 64, PROFILES = NVML_GPU_INSTANCE_PROFILE_COUNT };

static int enabled(nvmlDevice_t gpu)
{
    unsigned int current = 0, pending;
    return CALL(nvmlDeviceGetMigMode, gpu, &current, &pending) == NVML_SUCCESS && current == NVML_DEVICE_MIG_ENABLE;
}

/* short_name is the profile in "NVIDIA A100-SXM4-80GB MIG 1g.10gb". */
static const char *short_name(const char *name)
{
    const char *at = strstr(name, "MIG ");
    return at ? at + 4 : name;
}

void list_mig_devices(nvmlDevice_t gpu)
{
    unsigned int most = 0;
    if (!enabled(gpu))
        return;
    must(CALL(nvmlDeviceGetMaxMigDeviceCount, gpu, &most), "MIG devices");
    for (unsigned int i = 0; i < most; i++) {
        char name[NVML_DEVICE_NAME_V2_BUFFER_SIZE], uuid[NVML_DEVICE_UUID_V2_BUFFER_SIZE];
        nvmlDevice_t d;
        nvmlReturn_t r = CALL(nvmlDeviceGetMigDeviceHandleByIndex, gpu, i, &d);
        if (r == NVML_ERROR_NOT_FOUND)
            continue;
        must(r, "MIG device");
        must(CALL(nvmlDeviceGetName, d, name, sizeof name), "name");
        must(CALL(nvmlDeviceGetUUID, d, uuid, sizeof uuid), "UUID");
        printf("  MIG %-11s Device %2u: (UUID: %s)\n", short_name(name), i, uuid);
    }
}

int mig_mode(const char *wish)
{
    int on;
    if (strcmp(wish, "1") == 0 || strcasecmp(wish, "ENABLED") == 0)
        on = 1;
    else if (strcmp(wish, "0") == 0 || strcasecmp(wish, "DISABLED") == 0)
        on = 0;
    else {
        fprintf(stderr, "Invalid MIG mode: %s (0 or DISABLED, 1 or ENABLED)\n", wish);
        return NVML_ERROR_INVALID_ARGUMENT;
    }
    for (unsigned int i = 0; i < gpu_count; i++) {
        const char *at = address_of(gpus[i]);
        nvmlReturn_t status = NVML_SUCCESS;
        nvmlReturn_t r = CALL(nvmlDeviceSetMigMode, gpus[i], (unsigned int)on, &status);
        if (r != NVML_SUCCESS) {
            say("Unable to %s MIG Mode for GPU %s: %s", on ? "enable" : "disable", at, CALL(nvmlErrorString, r));
            return r;
        }
        if (status == NVML_SUCCESS)
            say("%s MIG Mode for GPU %s", on ? "Enabled" : "Disabled", at);
        else
            say("Warning: MIG mode is in pending %s state for GPU %s:%s", on ? "enable" : "disable", at, CALL(nvmlErrorString, status));
    }
    say("All done.");
    return 0;
}

/* --- what stands ------------------------------------------------------------ */

struct gi {
    nvmlGpuInstance_t handle;
    nvmlGpuInstanceInfo_t info;
    char profile[NVML_DEVICE_NAME_V2_BUFFER_SIZE];
};

struct ci {
    nvmlComputeInstance_t handle;
    nvmlComputeInstanceInfo_t info;
    char profile[NVML_DEVICE_NAME_V2_BUFFER_SIZE];
};

/* profile_of asks for a GPU's profile by its enum; 0 where the GPU has no such one. */
static int profile_of(nvmlDevice_t gpu, unsigned int n, nvmlGpuInstanceProfileInfo_v2_t *out)
{
    *out = (nvmlGpuInstanceProfileInfo_v2_t){.version = nvmlGpuInstanceProfileInfo_v2};
    nvmlReturn_t r = CALL(nvmlDeviceGetGpuInstanceProfileInfoV, gpu, n, out);
    if (r == NVML_ERROR_NOT_SUPPORTED || r == NVML_ERROR_INVALID_ARGUMENT)
        return 0;
    must(r, "GPU instance profile");
    return 1;
}

static unsigned int gpu_instances(nvmlDevice_t gpu, struct gi *out)
{
    unsigned int count = 0;
    for (unsigned int n = 0; enabled(gpu) && n < PROFILES; n++) {
        nvmlGpuInstanceProfileInfo_v2_t p;
        nvmlGpuInstance_t list[MOST];
        unsigned int found = MOST;
        if (!profile_of(gpu, n, &p))
            continue;
        must(CALL(nvmlDeviceGetGpuInstances, gpu, p.id, list, &found), "GPU instances");
        for (unsigned int i = 0; i < found && count < MOST; i++, count++) {
            out[count].handle = list[i];
            snprintf(out[count].profile, sizeof out->profile, "%s", p.name);
            must(CALL(nvmlGpuInstanceGetInfo, list[i], &out[count].info), "GPU instance");
        }
    }
    return count;
}

static unsigned int compute_instances(const struct gi *gi, struct ci *out)
{
    unsigned int count = 0;
    for (unsigned int n = 0; n < NVML_COMPUTE_INSTANCE_PROFILE_COUNT; n++) {
        nvmlComputeInstanceProfileInfo_v2_t p = {.version = nvmlComputeInstanceProfileInfo_v2};
        nvmlComputeInstance_t list[MOST];
        unsigned int found = MOST;
        nvmlReturn_t r = CALL(nvmlGpuInstanceGetComputeInstanceProfileInfoV, gi->handle, n, NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED, &p);
        if (r == NVML_ERROR_NOT_SUPPORTED || r == NVML_ERROR_INVALID_ARGUMENT)
            continue;
        must(r, "compute instance profile");
        must(CALL(nvmlGpuInstanceGetComputeInstances, gi->handle, p.id, list, &found), "compute instances");
        for (unsigned int i = 0; i < found && count < MOST; i++, count++) {
            out[count].handle = list[i];
            snprintf(out[count].profile, sizeof out->profile, "%s", p.name);
            must(CALL(nvmlComputeInstanceGetInfo_v2, list[i], &out[count].info), "compute instance");
        }
    }
    return count;
}

/* none is what a list says that has nothing to list. */
static int none(const char *what)
{
    say("No %s found: %s", what, CALL(nvmlErrorString, NVML_ERROR_NOT_FOUND));
    return NVML_ERROR_NOT_FOUND;
}

/* placement is start:size, in a column of its own width. */
static const char *placement(unsigned int start, unsigned int size)
{
    static char text[32];
    snprintf(text, sizeof text, "%u:%u", start, size);
    return text;
}

static int list_gpu_instances(void)
{
    static const char rule[] = "+-------------------------------------------------------+";
    unsigned int all = 0;
    for (unsigned int g = 0; g < gpu_count; g++) {
        struct gi gi[MOST];
        unsigned int n = gpu_instances(gpus[g], gi);
        for (unsigned int i = 0; i < n; i++) {
            if (all++ == 0)
                printf("%s\n| GPU instances:                                        |\n"
                       "| GPU   Name             Profile  Instance   Placement  |\n"
                       "|                          ID       ID       Start:Size |\n"
                       "|=======================================================|\n", rule);
            printf("| %3u  %-18.18s %5u %8u  %9s     |\n%s\n", index_of(gpus[g]), gi[i].profile, gi[i].info.profileId, gi[i].info.id,
                   placement(gi[i].info.placement.start, gi[i].info.placement.size), rule);
        }
    }
    return all ? 0 : none("GPU instances");
}

static int list_compute_instances(void)
{
    static const char rule[] = "+--------------------------------------------------------------------+";
    unsigned int all = 0;
    for (unsigned int g = 0; g < gpu_count; g++) {
        struct gi gi[MOST];
        unsigned int n = gpu_instances(gpus[g], gi);
        for (unsigned int i = 0; i < n; i++) {
            struct ci ci[MOST];
            unsigned int m = compute_instances(&gi[i], ci);
            for (unsigned int j = 0; j < m; j++) {
                if (all++ == 0)
                    printf("%s\n| Compute instances:                                                 |\n"
                           "| GPU     GPU       Name             Profile   Instance   Placement  |\n"
                           "|       Instance                       ID        ID       Start:Size |\n"
                           "|         ID                                                         |\n"
                           "|====================================================================|\n", rule);
                printf("| %3u %6u       %-18.18s %4u %9u %11s     |\n%s\n", index_of(gpus[g]), gi[i].info.id, ci[j].profile, ci[j].info.profileId, ci[j].info.id,
                       placement(ci[j].info.placement.start, ci[j].info.placement.size), rule);
            }
        }
    }
    return all ? 0 : none("compute instances");
}

static int list_profiles(void)
{
    static const char rule[] = "+-----------------------------------------------------------------------------+";
    unsigned int all = 0;
    for (unsigned int g = 0; g < gpu_count; g++) {
        for (unsigned int n = 0; enabled(gpus[g]) && n < PROFILES; n++) {
            nvmlGpuInstanceProfileInfo_v2_t p;
            unsigned int free = 0;
            char of[32];
            if (!profile_of(gpus[g], n, &p))
                continue;
            must(CALL(nvmlDeviceGetGpuInstanceRemainingCapacity, gpus[g], p.id, &free), "remaining capacity");
            if (all++ == 0)
                printf("%s\n| GPU instance profiles:                                                      |\n"
                       "| GPU   Name             ID    Instances   Memory     P2P    SM    DEC   ENC  |\n"
                       "|                              Free/Total   GiB              CE    JPEG  OFA  |\n"
                       "|=============================================================================|\n", rule);
            snprintf(of, sizeof of, "%u/%u", free, p.instanceCount);
            printf("| %3u  %-17.17s %3u %8s %11.2f %7s %5u %5u %5u   |\n| %61u %5u %5u   |\n%s\n", index_of(gpus[g]), p.name, p.id, of,
                   (double)p.memorySizeMB / 1024, p.isP2pSupported ? "Yes" : "No", p.multiprocessorCount, p.decoderCount, p.encoderCount,
                   p.copyEngineCount, p.jpegCount, p.ofaCount, rule);
        }
    }
    return all ? 0 : none("MIG-enabled devices");
}

/* --- changes ---------------------------------------------------------------- */

/* fail is the two lines of a change that the driver refused. */
static int fail(nvmlReturn_t r, const char *change)
{
    say("Failed to %s: %s", change, CALL(nvmlErrorString, r));
    return r;
}

/* find_profile reads a profile's number or name. */
static int find_profile(nvmlDevice_t gpu, const char *word, nvmlGpuInstanceProfileInfo_v2_t *out)
{
    char *end;
    unsigned long id = strtoul(word, &end, 10);
    for (unsigned int n = 0; n < PROFILES; n++)
        if (profile_of(gpu, n, out) && (*end ? strcmp(short_name(out->name), short_name(word)) == 0 : out->id == id))
            return 1;
    return 0;
}

/* create_compute makes the compute instance that has all of a GPU instance. */
static nvmlReturn_t create_compute(nvmlDevice_t gpu, nvmlGpuInstance_t gi, unsigned int slices)
{
    nvmlGpuInstanceInfo_t at;
    must(CALL(nvmlGpuInstanceGetInfo, gi, &at), "GPU instance");
    for (unsigned int n = 0; n < NVML_COMPUTE_INSTANCE_PROFILE_COUNT; n++) {
        nvmlComputeInstanceProfileInfo_v2_t p = {.version = nvmlComputeInstanceProfileInfo_v2};
        nvmlComputeInstance_t made;
        nvmlComputeInstanceInfo_t info;
        if (CALL(nvmlGpuInstanceGetComputeInstanceProfileInfoV, gi, n, NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED, &p) != NVML_SUCCESS || p.sliceCount != slices)
            continue;
        nvmlReturn_t r = CALL(nvmlGpuInstanceCreateComputeInstance, gi, p.id, &made);
        if (r != NVML_SUCCESS) {
            say("Unable to create a compute instance on GPU %2u GPU instance ID %2u using profile %u: %s", index_of(gpu), at.id, p.id, CALL(nvmlErrorString, r));
            return r;
        }
        must(CALL(nvmlComputeInstanceGetInfo_v2, made, &info), "compute instance");
        say("Successfully created compute instance ID %2u on GPU %2u GPU instance ID %2u using profile %s (ID %2u)", info.id, index_of(gpu), at.id, p.name, p.id);
        return NVML_SUCCESS;
    }
    return NVML_ERROR_NOT_SUPPORTED;
}

/* create reads profiles with commas between, each with :start where it is to stand
 * at a place. */
static int create(const char *profiles, int compute)
{
    for (unsigned int g = 0; g < gpu_count; g++) {
        char list[512], *rest = list;
        snprintf(list, sizeof list, "%s", profiles);
        for (char *word; (word = strsep(&rest, ","));) {
            char *start = strchr(word, ':');
            nvmlGpuInstanceProfileInfo_v2_t p;
            nvmlGpuInstance_t made;
            nvmlGpuInstanceInfo_t info;
            nvmlReturn_t r;
            if (start)
                *start++ = 0;
            if (!find_profile(gpus[g], word, &p)) {
                r = NVML_ERROR_NOT_FOUND;
            } else if (start) {
                nvmlGpuInstancePlacement_t all[MOST], at = {.start = (unsigned int)strtoul(start, NULL, 10)};
                unsigned int n = MOST;
                must(CALL(nvmlDeviceGetGpuInstancePossiblePlacements_v2, gpus[g], p.id, all, &n), "placements");
                at.size = n ? all[0].size : 0;
                r = CALL(nvmlDeviceCreateGpuInstanceWithPlacement, gpus[g], p.id, &at, &made);
            } else {
                r = CALL(nvmlDeviceCreateGpuInstance, gpus[g], p.id, &made);
            }
            if (r != NVML_SUCCESS) {
                say("Unable to create a GPU instance on GPU %2u using profile %s: %s", index_of(gpus[g]), word, CALL(nvmlErrorString, r));
                return fail(r, "create GPU instances");
            }
            must(CALL(nvmlGpuInstanceGetInfo, made, &info), "GPU instance");
            say("Successfully created GPU instance ID %2u on GPU %2u using profile %s (ID %2u)", info.id, index_of(gpus[g]), p.name, p.id);
            if (compute && (r = create_compute(gpus[g], made, p.sliceCount)) != NVML_SUCCESS)
                return fail(r, "create compute instances");
        }
    }
    return 0;
}

/* in_list says whether a number is among those of a list with commas; null is any. */
static int in_list(const char *list, unsigned int n)
{
    for (char *end; list; list = *end ? end + 1 : NULL) {
        if (strtoul(list, &end, 10) == n && end != list)
            return 1;
        if (*end && *end != ',')
            break;
    }
    return 0;
}

/* destroy takes away the compute instances, or the GPU instances, of certain
 * numbers. */
static int destroy(const char *gis, const char *cis, int compute)
{
    const char *what = compute ? "compute" : "GPU";
    char change[64];
    unsigned int all = 0;
    snprintf(change, sizeof change, "destroy %s instances", what);
    for (unsigned int g = 0; g < gpu_count; g++) {
        struct gi gi[MOST];
        unsigned int n = gpu_instances(gpus[g], gi), gpu = index_of(gpus[g]);
        for (unsigned int i = 0; i < n; i++) {
            struct ci ci[MOST];
            nvmlReturn_t r;
            if (gis && !in_list(gis, gi[i].info.id))
                continue;
            if (!compute) {
                all++;
                if ((r = CALL(nvmlGpuInstanceDestroy, gi[i].handle)) != NVML_SUCCESS) {
                    say("Unable to destroy GPU instance ID %2u from GPU %2u: %s", gi[i].info.id, gpu, CALL(nvmlErrorString, r));
                    return fail(r, change);
                }
                say("Successfully destroyed GPU instance ID %2u from GPU %2u", gi[i].info.id, gpu);
                continue;
            }
            unsigned int m = compute_instances(&gi[i], ci);
            for (unsigned int j = 0; j < m; j++) {
                if (cis && !in_list(cis, ci[j].info.id))
                    continue;
                all++;
                if ((r = CALL(nvmlComputeInstanceDestroy, ci[j].handle)) != NVML_SUCCESS) {
                    say("Unable to destroy compute instance ID %2u from GPU %2u GPU instance ID %2u: %s", ci[j].info.id, gpu, gi[i].info.id, CALL(nvmlErrorString, r));
                    return fail(r, change);
                }
                say("Successfully destroyed compute instance ID %2u from GPU %2u GPU instance ID %2u", ci[j].info.id, gpu, gi[i].info.id);
            }
        }
    }
    snprintf(change, sizeof change, "%s instances", what);
    return all ? 0 : none(change);
}

int mig(char **argv, int argc)
{
    const char *profiles = NULL, *gis = NULL, *cis = NULL, *v;
    int compute = 0, what = 0;
    static const struct {
        const char *brief, *full;
    } verbs[] = {
        {"-lgi", "--list-gpu-instances"}, {"-lci", "--list-compute-instances"}, {"-lgip", "--list-gpu-instance-profiles"},
        {"-dgi", "--destroy-gpu-instance"}, {"-dci", "--destroy-compute-instance"},
    };
    enum { LGI = 1, LCI, LGIP, DGI, DCI, CGI };
    argv[argc] = NULL;
    for (int i = 0; i < argc; i++) {
        int verb = 0;
        for (size_t k = 0; k < sizeof verbs / sizeof *verbs; k++)
            if (strcmp(argv[i], verbs[k].brief) == 0 || strcmp(argv[i], verbs[k].full) == 0)
                verb = (int)k + 1;
        if (verb && !what)
            what = verb;
        else if (!what && (v = value(argv, &i, "-cgi", "--create-gpu-instance")))
            profiles = v, what = CGI;
        else if (what == CGI && (strcmp(argv[i], "-C") == 0 || strcmp(argv[i], "--default-compute-instance") == 0))
            compute = 1;
        else if (what && (v = value(argv, &i, "-gi", "--gpu-instance-id")))
            gis = v;
        else if (what && (v = value(argv, &i, "-ci", "--compute-instance-id")))
            cis = v;
        else {
            fprintf(stderr, "Invalid combination of input arguments: %s\n", argv[i]);
            return NVML_ERROR_INVALID_ARGUMENT;
        }
    }
    switch (what) {
    case LGI: return list_gpu_instances();
    case LCI: return list_compute_instances();
    case LGIP: return list_profiles();
    case DGI: return destroy(gis, NULL, 0);
    case DCI: return destroy(gis, cis, 1);
    case CGI: return create(profiles, compute);
    default:
        fprintf(stderr, "nvidia-smi mig: give -lgi, -lci, -lgip, -cgi, -dgi or -dci\n");
        return NVML_ERROR_INVALID_ARGUMENT;
    }
}
