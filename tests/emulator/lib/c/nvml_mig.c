/* SPDX-License-Identifier: Apache-2.0 */

/* The calls of libnvidia-ml.so.1 about MIG: modes, GPU instances, compute
 * instances and the devices that they are. */
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "nvml_internal.h"

/* Handles of instances are places in arrays too. The daemon tells what they are
 * of by a bit above the number. */
enum { INSTANCES = 1 << 12, ABOUT_INSTANCE = 1 << 16, ABOUT_COMPUTE = 1 << 17 };
static char instances[INSTANCES], computes[INSTANCES];
_Static_assert(sizeof(nvmlGpuInstance_t) == sizeof(void *) && sizeof(nvmlComputeInstance_t) == sizeof(void *), "a handle is no longer one pointer");

static uint32_t within(const void *handle, const char *space, uint32_t about)
{
    const char *p = handle;
    return p >= space && p < space + INSTANCES ? (uint32_t)(p - space) | about : NO_HANDLE;
}

static uint32_t instance_number(nvmlGpuInstance_t i) { return within(i.handle, instances, ABOUT_INSTANCE); }
static uint32_t compute_number(nvmlComputeInstance_t i) { return within(i.handle, computes, ABOUT_COMPUTE); }

/* Both kinds of handle are one pointer, which the calls below fill in. */
static void put_place(void *handle, char *space, uint32_t n) { memcpy(handle, &(void *){space + n % INSTANCES}, sizeof(void *)); }

static nvmlReturn_t find_place(const char *name, uint32_t about, unsigned int id, char *space, void *out)
{
    unsigned int n;
    nvmlReturn_t r = ask_u32_arg(name, about, id, &n);
    if (r == NVML_SUCCESS)
        put_place(out, space, n);
    return r;
}

static nvmlReturn_t create_at(const char *name, uint32_t about, unsigned int id, unsigned int start, unsigned int size, char *space, void *out)
{
    struct call c;
    begin(&c, name, about);
    put_u32(&c, id);
    put_u32(&c, start);
    put_u32(&c, size);
    nvmlReturn_t r = send_call(&c);
    if (r == NVML_SUCCESS)
        put_place(out, space, get_u32(&c));
    return r;
}

/* The caller's array holds as many as the profile allows, without saying so. */
static nvmlReturn_t list_places(const char *name, uint32_t about, unsigned int id, char *space, void *out, unsigned int *count)
{
    struct call c;
    begin(&c, name, about);
    put_u32(&c, id);
    nvmlReturn_t r = send_call(&c);
    if (r == NVML_SUCCESS) {
        *count = get_u32(&c);
        for (unsigned int i = 0; i < *count; i++)
            put_place((char *)out + i * sizeof(void *), space, get_u32(&c));
    }
    return r;
}

/* --- modes and devices ----------------------------------------------------- */

nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t d, unsigned int *current, unsigned int *pending) { return ask_two(__func__, device_number(d), current, pending); }

nvmlReturn_t nvmlDeviceSetMigMode(nvmlDevice_t d, unsigned int mode, nvmlReturn_t *activation)
{
    return ask_u32_arg(__func__, device_number(d), mode, (unsigned int *)activation);
}

nvmlReturn_t nvmlDeviceIsMigDeviceHandle(nvmlDevice_t d, unsigned int *is) { return ask_u32(__func__, device_number(d), is); }
nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t d, unsigned int *id) { return ask_u32(__func__, device_number(d), id); }
nvmlReturn_t nvmlDeviceGetComputeInstanceId(nvmlDevice_t d, unsigned int *id) { return ask_u32(__func__, device_number(d), id); }
nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t d, unsigned int *count) { return ask_u32(__func__, device_number(d), count); }

nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t d, unsigned int index, nvmlDevice_t *mig)
{
    NEED(mig);
    struct call c;
    begin(&c, __func__, device_number(d));
    put_u32(&c, index);
    return find(&c, mig);
}

nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t mig, nvmlDevice_t *d)
{
    NEED(d);
    struct call c;
    begin(&c, __func__, device_number(mig));
    return find(&c, d);
}

static nvmlReturn_t attributes(const char *name, nvmlDevice_t d, nvmlDeviceAttributes_t *a)
{
    NEED(a);
    struct call c;
    begin(&c, name, device_number(d));
    nvmlReturn_t r = send_call(&c);
    if (r == NVML_SUCCESS) {
        a->multiprocessorCount = get_u32(&c);
        a->sharedCopyEngineCount = get_u32(&c);
        a->sharedDecoderCount = get_u32(&c);
        a->sharedEncoderCount = get_u32(&c);
        a->sharedJpegCount = get_u32(&c);
        a->sharedOfaCount = get_u32(&c);
        a->gpuInstanceSliceCount = get_u32(&c);
        a->computeInstanceSliceCount = get_u32(&c);
        a->memorySizeMB = get_u64(&c);
    }
    return r;
}

nvmlReturn_t nvmlDeviceGetAttributes(nvmlDevice_t d, nvmlDeviceAttributes_t *a) { return attributes(__func__, d, a); }
nvmlReturn_t nvmlDeviceGetAttributes_v2(nvmlDevice_t d, nvmlDeviceAttributes_t *a) { return attributes(__func__, d, a); }

/* --- GPU instances --------------------------------------------------------- */

/* ask_profile reads into the newest form; the older ones are parts of it. */
static nvmlReturn_t ask_profile(const char *name, nvmlDevice_t d, unsigned int profile, nvmlGpuInstanceProfileInfo_v3_t *info)
{
    struct call c;
    begin(&c, name, device_number(d));
    put_u32(&c, profile);
    nvmlReturn_t r = send_call(&c);
    if (r == NVML_SUCCESS) {
        memset(info, 0, sizeof *info);
        info->id = get_u32(&c);
        info->sliceCount = get_u32(&c);
        info->instanceCount = get_u32(&c);
        info->multiprocessorCount = get_u32(&c);
        info->copyEngineCount = get_u32(&c);
        info->decoderCount = get_u32(&c);
        info->encoderCount = get_u32(&c);
        info->jpegCount = get_u32(&c);
        info->ofaCount = get_u32(&c);
        info->capabilities = get_u32(&c) ? NVML_GPU_INSTANCE_PROFILE_CAPS_GFX : 0;
        info->memorySizeMB = get_u64(&c);
        get_str(&c, info->name, sizeof info->name);
    }
    return r;
}

nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfo(nvmlDevice_t d, unsigned int profile, nvmlGpuInstanceProfileInfo_t *info)
{
    NEED(info);
    nvmlGpuInstanceProfileInfo_v3_t v3;
    nvmlReturn_t r = ask_profile(__func__, d, profile, &v3);
    if (r == NVML_SUCCESS)
        *info = (nvmlGpuInstanceProfileInfo_t){
            .id = v3.id, .sliceCount = v3.sliceCount, .instanceCount = v3.instanceCount, .multiprocessorCount = v3.multiprocessorCount,
            .copyEngineCount = v3.copyEngineCount, .decoderCount = v3.decoderCount, .encoderCount = v3.encoderCount,
            .jpegCount = v3.jpegCount, .ofaCount = v3.ofaCount, .memorySizeMB = v3.memorySizeMB,
        };
    return r;
}

/* The versioned calls take a v2 and fill what its version asks for, as driver 580.159.04 did
 * on an H200: it says nothing of the version, calls one that it does not know an invalid
 * argument, and writes form 3's name as if it were form 2: at that one's place, over the
 * capabilities, and made of that one's fields, where form 3 has others. */
static nvmlReturn_t ask_profile_v(const char *name, nvmlDevice_t d, unsigned int profile, nvmlGpuInstanceProfileInfo_v2_t *info)
{
    NEED(info && (info->version == nvmlGpuInstanceProfileInfo_v2 || info->version == nvmlGpuInstanceProfileInfo_v3));
    _Static_assert(sizeof(nvmlGpuInstanceProfileInfo_v2_t) == sizeof(nvmlGpuInstanceProfileInfo_v3_t), "the forms differ in size");
    int newest = info->version == nvmlGpuInstanceProfileInfo_v3;
    nvmlGpuInstanceProfileInfo_v3_t v3;
    nvmlReturn_t r = ask_profile(name, d, profile, &v3);
    if (r != NVML_SUCCESS)
        return r;
    if (newest) {
        memset(info, 0, sizeof *info);
        memcpy(info, &v3, offsetof(nvmlGpuInstanceProfileInfo_v3_t, name));
        snprintf(info->name, sizeof info->name, "MIG %ug.0gb", v3.instanceCount);
        return r;
    }
    *info = (nvmlGpuInstanceProfileInfo_v2_t){
        .id = v3.id, .sliceCount = v3.sliceCount, .instanceCount = v3.instanceCount,
        .multiprocessorCount = v3.multiprocessorCount, .copyEngineCount = v3.copyEngineCount, .decoderCount = v3.decoderCount,
        .encoderCount = v3.encoderCount, .jpegCount = v3.jpegCount, .ofaCount = v3.ofaCount, .memorySizeMB = v3.memorySizeMB,
    };
    memcpy(info->name, v3.name, sizeof info->name);
    return r;
}

nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfoV(nvmlDevice_t d, unsigned int profile, nvmlGpuInstanceProfileInfo_v2_t *info)
{
    return ask_profile_v(__func__, d, profile, info);
}

nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfoByIdV(nvmlDevice_t d, unsigned int id, nvmlGpuInstanceProfileInfo_v2_t *info)
{
    return ask_profile_v(__func__, d, id, info);
}

/* Both kinds of placement are a start and a size. */
_Static_assert(sizeof(nvmlGpuInstancePlacement_t) == sizeof(nvmlComputeInstancePlacement_t), "placements differ");

static nvmlReturn_t placements(const char *name, uint32_t handle, unsigned int id, nvmlGpuInstancePlacement_t *out, unsigned int *count)
{
    NEED(count);
    struct call c;
    begin(&c, name, handle);
    put_u32(&c, id);
    nvmlReturn_t r = send_call(&c);
    if (r != NVML_SUCCESS)
        return r;
    unsigned int n = get_u32(&c), room = *count;
    *count = n;
    if (!out) /* asked for the number alone */
        return NVML_SUCCESS;
    if (room < n)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    for (unsigned int i = 0; i < n; i++) {
        out[i].start = get_u32(&c);
        out[i].size = get_u32(&c);
    }
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetGpuInstancePossiblePlacements(nvmlDevice_t d, unsigned int id, nvmlGpuInstancePlacement_t *out, unsigned int *count)
{
    return placements(__func__, device_number(d), id, out, count);
}

nvmlReturn_t nvmlDeviceGetGpuInstancePossiblePlacements_v2(nvmlDevice_t d, unsigned int id, nvmlGpuInstancePlacement_t *out, unsigned int *count)
{
    return placements(__func__, device_number(d), id, out, count);
}

nvmlReturn_t nvmlDeviceGetGpuInstanceRemainingCapacity(nvmlDevice_t d, unsigned int id, unsigned int *count)
{
    return ask_u32_arg(__func__, device_number(d), id, count);
}

nvmlReturn_t nvmlDeviceCreateGpuInstance(nvmlDevice_t d, unsigned int id, nvmlGpuInstance_t *out)
{
    NEED(out);
    return find_place(__func__, device_number(d), id, instances, out);
}

nvmlReturn_t nvmlDeviceCreateGpuInstanceWithPlacement(nvmlDevice_t d, unsigned int id, const nvmlGpuInstancePlacement_t *at, nvmlGpuInstance_t *out)
{
    NEED(at && out);
    return create_at(__func__, device_number(d), id, at->start, at->size, instances, out);
}

static nvmlReturn_t destroy(const char *name, uint32_t handle)
{
    struct call c;
    begin(&c, name, handle);
    return send_call(&c);
}

nvmlReturn_t nvmlGpuInstanceDestroy(nvmlGpuInstance_t gi) { return destroy(__func__, instance_number(gi)); }

nvmlReturn_t nvmlDeviceGetGpuInstances(nvmlDevice_t d, unsigned int id, nvmlGpuInstance_t *out, unsigned int *count)
{
    NEED(out && count);
    return list_places(__func__, device_number(d), id, instances, out, count);
}

nvmlReturn_t nvmlDeviceGetGpuInstanceById(nvmlDevice_t d, unsigned int id, nvmlGpuInstance_t *out)
{
    NEED(out);
    return find_place(__func__, device_number(d), id, instances, out);
}

nvmlReturn_t nvmlGpuInstanceGetInfo(nvmlGpuInstance_t gi, nvmlGpuInstanceInfo_t *info)
{
    NEED(info);
    struct call c;
    begin(&c, __func__, instance_number(gi));
    nvmlReturn_t r = send_call(&c);
    if (r == NVML_SUCCESS) {
        info->device = to_device(get_u32(&c));
        get_u32(&c); /* no parent of its kind */
        info->id = get_u32(&c);
        info->profileId = get_u32(&c);
        info->placement.start = get_u32(&c);
        info->placement.size = get_u32(&c);
    }
    return r;
}

/* --- compute instances ----------------------------------------------------- */

static nvmlReturn_t ask_compute(const char *name, nvmlGpuInstance_t gi, unsigned int profile, unsigned int engines, nvmlComputeInstanceProfileInfo_v3_t *info)
{
    struct call c;
    begin(&c, name, instance_number(gi));
    put_u32(&c, profile);
    put_u32(&c, engines);
    nvmlReturn_t r = send_call(&c);
    if (r == NVML_SUCCESS) {
        memset(info, 0, sizeof *info);
        info->id = get_u32(&c);
        info->sliceCount = get_u32(&c);
        info->instanceCount = get_u32(&c);
        info->multiprocessorCount = get_u32(&c);
        info->sharedCopyEngineCount = get_u32(&c);
        info->sharedDecoderCount = get_u32(&c);
        info->sharedEncoderCount = get_u32(&c);
        info->sharedJpegCount = get_u32(&c);
        info->sharedOfaCount = get_u32(&c);
        info->capabilities = get_u32(&c) ? NVML_COMPUTE_INSTANCE_PROFILE_CAPS_GFX : 0;
        get_str(&c, info->name, sizeof info->name);
    }
    return r;
}

nvmlReturn_t nvmlGpuInstanceGetComputeInstanceProfileInfo(nvmlGpuInstance_t gi, unsigned int profile, unsigned int engines, nvmlComputeInstanceProfileInfo_t *info)
{
    NEED(info);
    nvmlComputeInstanceProfileInfo_v3_t v3;
    nvmlReturn_t r = ask_compute(__func__, gi, profile, engines, &v3);
    if (r == NVML_SUCCESS)
        *info = (nvmlComputeInstanceProfileInfo_t){
            .id = v3.id, .sliceCount = v3.sliceCount, .instanceCount = v3.instanceCount, .multiprocessorCount = v3.multiprocessorCount,
            .sharedCopyEngineCount = v3.sharedCopyEngineCount, .sharedDecoderCount = v3.sharedDecoderCount,
            .sharedEncoderCount = v3.sharedEncoderCount, .sharedJpegCount = v3.sharedJpegCount, .sharedOfaCount = v3.sharedOfaCount,
        };
    return r;
}

/* Of the two versions one is the beginning of the other. */
_Static_assert(offsetof(nvmlComputeInstanceProfileInfo_v3_t, capabilities) == sizeof(nvmlComputeInstanceProfileInfo_v2_t), "version 3 is no longer version 2 and more");

nvmlReturn_t nvmlGpuInstanceGetComputeInstanceProfileInfoV(nvmlGpuInstance_t gi, unsigned int profile, unsigned int engines, nvmlComputeInstanceProfileInfo_v2_t *info)
{
    NEED(info);
    NEED_VERSION(info->version, nvmlComputeInstanceProfileInfo_v2, nvmlComputeInstanceProfileInfo_v3);
    nvmlComputeInstanceProfileInfo_v3_t v3;
    nvmlReturn_t r = ask_compute(__func__, gi, profile, engines, &v3);
    if (r == NVML_SUCCESS) {
        v3.version = info->version;
        memcpy(info, &v3, info->version == nvmlComputeInstanceProfileInfo_v3 ? sizeof v3 : sizeof *info);
    }
    return r;
}

nvmlReturn_t nvmlGpuInstanceGetComputeInstanceRemainingCapacity(nvmlGpuInstance_t gi, unsigned int id, unsigned int *count)
{
    return ask_u32_arg(__func__, instance_number(gi), id, count);
}

nvmlReturn_t nvmlGpuInstanceGetComputeInstancePossiblePlacements(nvmlGpuInstance_t gi, unsigned int id, nvmlComputeInstancePlacement_t *out, unsigned int *count)
{
    return placements(__func__, instance_number(gi), id, (nvmlGpuInstancePlacement_t *)out, count);
}

nvmlReturn_t nvmlGpuInstanceCreateComputeInstance(nvmlGpuInstance_t gi, unsigned int id, nvmlComputeInstance_t *out)
{
    NEED(out);
    return find_place(__func__, instance_number(gi), id, computes, out);
}

nvmlReturn_t nvmlGpuInstanceCreateComputeInstanceWithPlacement(nvmlGpuInstance_t gi, unsigned int id, const nvmlComputeInstancePlacement_t *at, nvmlComputeInstance_t *out)
{
    NEED(at && out);
    return create_at(__func__, instance_number(gi), id, at->start, at->size, computes, out);
}

nvmlReturn_t nvmlComputeInstanceDestroy(nvmlComputeInstance_t ci) { return destroy(__func__, compute_number(ci)); }

nvmlReturn_t nvmlGpuInstanceGetComputeInstances(nvmlGpuInstance_t gi, unsigned int id, nvmlComputeInstance_t *out, unsigned int *count)
{
    NEED(out && count);
    return list_places(__func__, instance_number(gi), id, computes, out, count);
}

nvmlReturn_t nvmlGpuInstanceGetComputeInstanceById(nvmlGpuInstance_t gi, unsigned int id, nvmlComputeInstance_t *out)
{
    NEED(out);
    return find_place(__func__, instance_number(gi), id, computes, out);
}

/* The first version's struct ends before the placement. */
static nvmlReturn_t compute_info(const char *name, nvmlComputeInstance_t ci, nvmlComputeInstanceInfo_t *info, int v2)
{
    NEED(info);
    struct call c;
    begin(&c, name, compute_number(ci));
    nvmlReturn_t r = send_call(&c);
    if (r == NVML_SUCCESS) {
        info->device = to_device(get_u32(&c));
        put_place(&info->gpuInstance, instances, get_u32(&c));
        info->id = get_u32(&c);
        info->profileId = get_u32(&c);
        if (v2) {
            info->placement.start = get_u32(&c);
            info->placement.size = get_u32(&c);
        }
    }
    return r;
}

nvmlReturn_t nvmlComputeInstanceGetInfo(nvmlComputeInstance_t ci, nvmlComputeInstanceInfo_t *info) { return compute_info(__func__, ci, info, 0); }
nvmlReturn_t nvmlComputeInstanceGetInfo_v2(nvmlComputeInstance_t ci, nvmlComputeInstanceInfo_t *info) { return compute_info(__func__, ci, info, 1); }
