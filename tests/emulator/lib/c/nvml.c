/* SPDX-License-Identifier: Apache-2.0 */

/* The calls of libnvidia-ml.so.1 that the emulator answers. Every other name
 * of nvml.h is exported by a generated stub, see stub.c. Checks come in the
 * driver's order: is it open, are the arguments sound, then the world. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "nvml_internal.h"

char devices[HANDLES], sets[HANDLES];

uint32_t number(const void *handle, const char *space)
{
    const char *p = handle;
    return p >= space && p < space + HANDLES ? (uint32_t)(p - space) : NO_HANDLE;
}

static uint32_t set_number(nvmlEventSet_t s) { return number(s.handle, sets); }

nvmlReturn_t refuse(nvmlReturn_t r) { return is_open() ? r : NVML_ERROR_UNINITIALIZED; }

/* --- shapes that many calls share ----------------------------------------- */

static nvmlReturn_t ask_str(const char *name, uint32_t handle, char *out, unsigned int length)
{
    NEED(out);
    struct call c;
    begin(&c, name, handle);
    nvmlReturn_t r = send_call(&c);
    return r == NVML_SUCCESS ? (nvmlReturn_t)get_str(&c, out, length) : r;
}

nvmlReturn_t ask_u32(const char *name, uint32_t handle, unsigned int *out)
{
    NEED(out);
    struct call c;
    begin(&c, name, handle);
    nvmlReturn_t r = send_call(&c);
    if (r == NVML_SUCCESS)
        *out = get_u32(&c);
    return r;
}

nvmlReturn_t ask_u32_arg(const char *name, uint32_t handle, uint32_t arg, unsigned int *out)
{
    NEED(out);
    struct call c;
    begin(&c, name, handle);
    put_u32(&c, arg);
    nvmlReturn_t r = send_call(&c);
    if (r == NVML_SUCCESS)
        *out = get_u32(&c);
    return r;
}

nvmlReturn_t ask_two(const char *name, uint32_t handle, unsigned int *a, unsigned int *b)
{
    NEED(a && b);
    struct call c;
    begin(&c, name, handle);
    nvmlReturn_t r = send_call(&c);
    if (r == NVML_SUCCESS) {
        *a = get_u32(&c);
        *b = get_u32(&c);
    }
    return r;
}

/* Finders have an argument and answer a device. */
nvmlReturn_t find(struct call *c, nvmlDevice_t *device)
{
    nvmlReturn_t r = send_call(c);
    if (r == NVML_SUCCESS)
        *device = to_device(get_u32(c));
    return r;
}

static nvmlReturn_t find_index(const char *name, unsigned int index, nvmlDevice_t *device)
{
    NEED(device);
    struct call c;
    begin(&c, name, NO_HANDLE);
    put_u32(&c, index);
    return find(&c, device);
}

static nvmlReturn_t find_str(const char *name, const char *key, nvmlDevice_t *device)
{
    NEED(key && device);
    struct call c;
    begin(&c, name, NO_HANDLE);
    put_str(&c, key);
    return find(&c, device);
}

/* --- library and system ---------------------------------------------------- */

nvmlReturn_t nvmlInit(void) { return driver_open(__func__); }
nvmlReturn_t nvmlInit_v2(void) { return driver_open(__func__); }

nvmlReturn_t nvmlInitWithFlags(unsigned int flags)
{
    (void)flags;
    return driver_open(__func__);
}

nvmlReturn_t nvmlShutdown(void) { return driver_close(__func__); }

const char *nvmlErrorString(nvmlReturn_t result)
{
    switch (result) {
    case NVML_SUCCESS: return "Success";
    case NVML_ERROR_UNINITIALIZED: return "Uninitialized";
    case NVML_ERROR_INVALID_ARGUMENT: return "Invalid Argument";
    case NVML_ERROR_NOT_SUPPORTED: return "Not Supported";
    case NVML_ERROR_NO_PERMISSION: return "Insufficient Permissions";
    case NVML_ERROR_ALREADY_INITIALIZED: return "Already Initialized";
    case NVML_ERROR_NOT_FOUND: return "Not Found";
    case NVML_ERROR_INSUFFICIENT_SIZE: return "Insufficient Size";
    case NVML_ERROR_INSUFFICIENT_POWER: return "Insufficient External Power";
    case NVML_ERROR_DRIVER_NOT_LOADED: return "Driver Not Loaded";
    case NVML_ERROR_TIMEOUT: return "Timeout";
    case NVML_ERROR_IRQ_ISSUE: return "Interrupt Request Issue";
    case NVML_ERROR_LIBRARY_NOT_FOUND: return "NVML Shared Library Not Found";
    case NVML_ERROR_FUNCTION_NOT_FOUND: return "Function Not Found";
    case NVML_ERROR_CORRUPTED_INFOROM: return "Corrupted infoROM";
    case NVML_ERROR_GPU_IS_LOST: return "GPU is lost";
    case NVML_ERROR_RESET_REQUIRED: return "GPU requires reset";
    case NVML_ERROR_OPERATING_SYSTEM: return "GPU access blocked by the operating system";
    case NVML_ERROR_LIB_RM_VERSION_MISMATCH: return "Driver/library version mismatch";
    case NVML_ERROR_IN_USE: return "In use by another client";
    case NVML_ERROR_MEMORY: return "Insufficient Memory";
    case NVML_ERROR_NO_DATA: return "No data";
    case NVML_ERROR_VGPU_ECC_NOT_SUPPORTED: return "Operation not available on this GPU with ECC on";
    case NVML_ERROR_INSUFFICIENT_RESOURCES: return "Insufficient Resources";
    case NVML_ERROR_FREQ_NOT_SUPPORTED: return "Frequency Not Supported";
    case NVML_ERROR_ARGUMENT_VERSION_MISMATCH: return "Argument Version Mismatch";
    case NVML_ERROR_DEPRECATED: return "Deprecated";
    case NVML_ERROR_NOT_READY: return "Not Ready";
    case NVML_ERROR_GPU_NOT_FOUND: return "GPU Not Found";
    case NVML_ERROR_INVALID_STATE: return "Invalid State";
    case NVML_ERROR_RESET_TYPE_NOT_SUPPORTED: return "Reset Type Not Supported";
    default: return "Unknown Error";
    }
}

nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned int length) { return ask_str(__func__, NO_HANDLE, version, length); }
nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned int length) { return ask_str(__func__, NO_HANDLE, version, length); }
nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *v) { return ask_u32(__func__, NO_HANDLE, (unsigned int *)v); }
nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *v) { return ask_u32(__func__, NO_HANDLE, (unsigned int *)v); }
nvmlReturn_t nvmlUnitGetCount(unsigned int *count) { return ask_u32(__func__, NO_HANDLE, count); }
nvmlReturn_t nvmlGetExcludedDeviceCount(unsigned int *count) { return ask_u32(__func__, NO_HANDLE, count); }

/* The caller's own /proc knows the name: no call of the daemon, and none that
 * is counted. */
nvmlReturn_t nvmlSystemGetProcessName(unsigned int pid, char *name, unsigned int length)
{
    NEED(name && length);
    char path[64], line[4096];
    snprintf(path, sizeof path, "/proc/%u/cmdline", pid);
    FILE *f = fopen(path, "re");
    if (!f)
        return refuse(NVML_ERROR_NOT_FOUND);
    size_t n = fread(line, 1, sizeof line - 1, f);
    fclose(f);
    line[n] = 0; /* arguments end in zeros: what is left is the program */
    if (strlen(line) >= length)
        return refuse(NVML_ERROR_INSUFFICIENT_SIZE);
    strcpy(name, line);
    return refuse(NVML_SUCCESS);
}

/* --- finding devices ------------------------------------------------------- */

nvmlReturn_t nvmlDeviceGetCount(unsigned int *count) { return ask_u32(__func__, NO_HANDLE, count); }
nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count) { return ask_u32(__func__, NO_HANDLE, count); }
nvmlReturn_t nvmlDeviceGetHandleByIndex(unsigned int index, nvmlDevice_t *device) { return find_index(__func__, index, device); }
nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device) { return find_index(__func__, index, device); }
nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device) { return find_str(__func__, uuid, device); }
nvmlReturn_t nvmlDeviceGetHandleBySerial(const char *serial, nvmlDevice_t *device) { return find_str(__func__, serial, device); }
nvmlReturn_t nvmlDeviceGetHandleByPciBusId(const char *id, nvmlDevice_t *device) { return find_str(__func__, id, device); }
nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *id, nvmlDevice_t *device) { return find_str(__func__, id, device); }

nvmlReturn_t nvmlDeviceGetHandleByUUIDV(const nvmlUUID_t *uuid, nvmlDevice_t *device)
{
    NEED(uuid && device);
    NEED_VERSION(uuid->version, nvmlUUID_v1);
    char text[NVML_DEVICE_UUID_ASCII_LEN + 1] = "";
    const unsigned char *b = uuid->value.bytes;
    switch (uuid->type) {
    case NVML_UUID_TYPE_ASCII:
        memcpy(text, uuid->value.str, NVML_DEVICE_UUID_ASCII_LEN);
        break;
    case NVML_UUID_TYPE_BINARY:
        snprintf(text, sizeof text, "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", b[0], b[1], b[2], b[3], b[4],
                 b[5], b[6], b[7], b[8], b[9], b[10], b[11], b[12], b[13], b[14], b[15]);
        break;
    default:
        return refuse(NVML_ERROR_INVALID_ARGUMENT);
    }
    nvmlReturn_t r = find_str(__func__, text, device);
    if (r == NVML_ERROR_NOT_FOUND && uuid->type == NVML_UUID_TYPE_BINARY) { /* it may be a MIG device's */
        memcpy(text, "MIG", 3);
        r = find_str(__func__, text, device);
    }
    return r;
}

/* --- what a device is ------------------------------------------------------ */

nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t d, char *name, unsigned int length) { return ask_str(__func__, device_number(d), name, length); }
nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t d, char *uuid, unsigned int length) { return ask_str(__func__, device_number(d), uuid, length); }
nvmlReturn_t nvmlDeviceGetSerial(nvmlDevice_t d, char *serial, unsigned int length) { return ask_str(__func__, device_number(d), serial, length); }
nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t d, unsigned int *index) { return ask_u32(__func__, device_number(d), index); }
nvmlReturn_t nvmlDeviceGetMinorNumber(nvmlDevice_t d, unsigned int *minor) { return ask_u32(__func__, device_number(d), minor); }
nvmlReturn_t nvmlDeviceGetNumaNodeId(nvmlDevice_t d, unsigned int *node) { return ask_u32(__func__, device_number(d), node); }
nvmlReturn_t nvmlDeviceGetModuleId(nvmlDevice_t d, unsigned int *id) { return ask_u32(__func__, device_number(d), id); }
nvmlReturn_t nvmlDeviceGetBoardId(nvmlDevice_t d, unsigned int *id) { return ask_u32(__func__, device_number(d), id); }
nvmlReturn_t nvmlDeviceGetMultiGpuBoard(nvmlDevice_t d, unsigned int *multi) { return ask_u32(__func__, device_number(d), multi); }
nvmlReturn_t nvmlDeviceGetBrand(nvmlDevice_t d, nvmlBrandType_t *brand) { return ask_u32(__func__, device_number(d), (unsigned int *)brand); }
nvmlReturn_t nvmlDeviceGetArchitecture(nvmlDevice_t d, nvmlDeviceArchitecture_t *arch) { return ask_u32(__func__, device_number(d), arch); }

nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t d, int *major, int *minor)
{
    return ask_two(__func__, device_number(d), (unsigned int *)major, (unsigned int *)minor);
}

nvmlReturn_t nvmlDeviceGetPersistenceMode(nvmlDevice_t d, nvmlEnableState_t *mode) { return ask_u32(__func__, device_number(d), (unsigned int *)mode); }
nvmlReturn_t nvmlDeviceGetDisplayMode(nvmlDevice_t d, nvmlEnableState_t *mode) { return ask_u32(__func__, device_number(d), (unsigned int *)mode); }
nvmlReturn_t nvmlDeviceGetDisplayActive(nvmlDevice_t d, nvmlEnableState_t *on) { return ask_u32(__func__, device_number(d), (unsigned int *)on); }
nvmlReturn_t nvmlDeviceGetComputeMode(nvmlDevice_t d, nvmlComputeMode_t *mode) { return ask_u32(__func__, device_number(d), (unsigned int *)mode); }

nvmlReturn_t nvmlDeviceSetComputeMode(nvmlDevice_t d, nvmlComputeMode_t mode)
{
    struct call c;
    begin(&c, __func__, device_number(d));
    put_u32(&c, mode);
    return send_call(&c);
}

nvmlReturn_t nvmlDeviceGetAccountingMode(nvmlDevice_t d, nvmlEnableState_t *mode) { return ask_u32(__func__, device_number(d), (unsigned int *)mode); }
nvmlReturn_t nvmlDeviceGetNumGpuCores(nvmlDevice_t d, unsigned int *cores) { return ask_u32(__func__, device_number(d), cores); }
nvmlReturn_t nvmlDeviceGetPowerManagementLimit(nvmlDevice_t d, unsigned int *limit) { return ask_u32(__func__, device_number(d), limit); }
nvmlReturn_t nvmlDeviceGetPowerManagementDefaultLimit(nvmlDevice_t d, unsigned int *limit) { return ask_u32(__func__, device_number(d), limit); }
nvmlReturn_t nvmlDeviceGetApplicationsClock(nvmlDevice_t d, nvmlClockType_t type, unsigned int *mhz) { return ask_u32_arg(__func__, device_number(d), type, mhz); }
nvmlReturn_t nvmlDeviceGetDefaultApplicationsClock(nvmlDevice_t d, nvmlClockType_t type, unsigned int *mhz) { return ask_u32_arg(__func__, device_number(d), type, mhz); }

nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t d, nvmlClockType_t type, unsigned int *mhz) { return ask_u32_arg(__func__, device_number(d), type, mhz); }

static nvmlReturn_t clock_reasons(const char *name, nvmlDevice_t d, unsigned long long *reasons)
{
    NEED(reasons);
    struct call c;
    begin(&c, name, device_number(d));
    nvmlReturn_t r = send_call(&c);
    if (r == NVML_SUCCESS)
        *reasons = get_u64(&c);
    return r;
}

nvmlReturn_t nvmlDeviceGetCurrentClocksThrottleReasons(nvmlDevice_t d, unsigned long long *reasons) { return clock_reasons(__func__, d, reasons); }
nvmlReturn_t nvmlDeviceGetCurrentClocksEventReasons(nvmlDevice_t d, unsigned long long *reasons) { return clock_reasons(__func__, d, reasons); }

nvmlReturn_t nvmlDeviceGetDefaultEccMode(nvmlDevice_t d, nvmlEnableState_t *mode) { return ask_u32(__func__, device_number(d), (unsigned int *)mode); }

nvmlReturn_t nvmlDeviceGetVirtualizationMode(nvmlDevice_t d, nvmlGpuVirtualizationMode_t *mode)
{
    return ask_u32(__func__, device_number(d), (unsigned int *)mode);
}

nvmlReturn_t nvmlDeviceGetEccMode(nvmlDevice_t d, nvmlEnableState_t *current, nvmlEnableState_t *pending)
{
    return ask_two(__func__, device_number(d), (unsigned int *)current, (unsigned int *)pending);
}

static nvmlReturn_t ecc_count(struct call *c, unsigned long long *count)
{
    NEED(count);
    nvmlReturn_t r = send_call(c);
    if (r == NVML_SUCCESS)
        *count = get_u64(c);
    return r;
}

nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t d, nvmlMemoryErrorType_t error, nvmlEccCounterType_t counter, unsigned long long *count)
{
    struct call c;
    begin(&c, __func__, device_number(d));
    put_u32(&c, error);
    put_u32(&c, counter);
    return ecc_count(&c, count);
}

nvmlReturn_t nvmlDeviceGetMemoryErrorCounter(nvmlDevice_t d, nvmlMemoryErrorType_t error, nvmlEccCounterType_t counter, nvmlMemoryLocation_t at,
                                             unsigned long long *count)
{
    struct call c;
    begin(&c, __func__, device_number(d));
    put_u32(&c, error);
    put_u32(&c, counter);
    put_u32(&c, at);
    return ecc_count(&c, count);
}

nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t d, unsigned int *correctable, unsigned int *uncorrectable, unsigned int *pending, unsigned int *failed)
{
    NEED(correctable && uncorrectable && pending && failed);
    struct call c;
    begin(&c, __func__, device_number(d));
    nvmlReturn_t r = send_call(&c);
    if (r == NVML_SUCCESS) {
        *correctable = get_u32(&c);
        *uncorrectable = get_u32(&c);
        *pending = get_u32(&c);
        *failed = get_u32(&c);
    }
    return r;
}

nvmlReturn_t nvmlDeviceGetRetiredPagesPendingStatus(nvmlDevice_t d, nvmlEnableState_t *pending)
{
    return ask_u32(__func__, device_number(d), (unsigned int *)pending);
}

nvmlReturn_t nvmlDeviceGetRetiredPages(nvmlDevice_t d, nvmlPageRetirementCause_t cause, unsigned int *count, unsigned long long *addresses)
{
    NEED(count && (*count == 0 || addresses));
    struct call c;
    begin(&c, __func__, device_number(d));
    put_u32(&c, cause);
    put_u32(&c, *count);
    nvmlReturn_t r = send_call(&c);
    if (r == NVML_SUCCESS || r == NVML_ERROR_INSUFFICIENT_SIZE)
        *count = get_u32(&c);
    for (unsigned int i = 0; r == NVML_SUCCESS && i < *count; i++)
        addresses[i] = get_u64(&c);
    return r;
}

/* As many fields as a request has room for go in one. */
nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t d, int count, nvmlFieldValue_t *values)
{
    enum { MOST = 100 };
    NEED(values && count > 0);
    for (int from = 0, n; from < count; from += n) {
        n = count - from < MOST ? count - from : MOST;
        nvmlFieldValue_t *v = values + from;
        struct call c;
        begin(&c, __func__, device_number(d));
        for (int i = 0; i < n; i++) {
            put_u32(&c, v[i].fieldId);
            put_u32(&c, v[i].scopeId);
        }
        nvmlReturn_t r = send_call(&c);
        if (r != NVML_SUCCESS)
            return r;
        struct timespec now;
        clock_gettime(CLOCK_REALTIME, &now);
        for (int i = 0; i < n; i++) {
            v[i].timestamp = now.tv_sec * 1000000ll + now.tv_nsec / 1000;
            v[i].latencyUsec = 0;
            v[i].nvmlReturn = get_u32(&c);
            v[i].valueType = get_u32(&c);
            v[i].value.ullVal = get_u64(&c); /* the shorter ones are its low half */
        }
    }
    return NVML_SUCCESS;
}

/* read_pci reads an address; the forms before v3 end with the subsystem. */
static void read_pci(struct call *c, nvmlPciInfo_t *pci, int v3)
{
    char id[NVML_DEVICE_PCI_BUS_ID_BUFFER_SIZE] = "";
    pci->domain = get_u32(c);
    pci->bus = get_u32(c);
    pci->device = get_u32(c);
    pci->pciDeviceId = get_u32(c);
    pci->pciSubSystemId = get_u32(c);
    get_str(c, id, sizeof id);
    snprintf(pci->busIdLegacy, sizeof pci->busIdLegacy, "%04X:%02X:%02X.0", pci->domain & 0xFFFF, pci->bus & 0xFF, pci->device & 0xFF);
    if (v3)
        memcpy(pci->busId, id, sizeof id);
}

static nvmlReturn_t ask_pci(struct call *c, nvmlPciInfo_t *pci, int v3)
{
    NEED(pci);
    nvmlReturn_t r = send_call(c);
    if (r == NVML_SUCCESS)
        read_pci(c, pci, v3);
    return r;
}

static nvmlReturn_t device_pci(const char *name, nvmlDevice_t d, nvmlPciInfo_t *pci, int v3)
{
    struct call c;
    begin(&c, name, device_number(d));
    return ask_pci(&c, pci, v3);
}

nvmlReturn_t nvmlDeviceGetPciInfo(nvmlDevice_t d, nvmlPciInfo_t *pci) { return device_pci(__func__, d, pci, 0); }
nvmlReturn_t nvmlDeviceGetPciInfo_v2(nvmlDevice_t d, nvmlPciInfo_t *pci) { return device_pci(__func__, d, pci, 0); }
nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t d, nvmlPciInfo_t *pci) { return device_pci(__func__, d, pci, 1); }

nvmlReturn_t nvmlDeviceGetPciInfoExt(nvmlDevice_t d, nvmlPciInfoExt_t *pci)
{
    NEED(pci);
    NEED_VERSION(pci->version, nvmlPciInfoExt_v1);
    nvmlPciInfo_t plain;
    nvmlReturn_t r = device_pci(__func__, d, &plain, 1);
    if (r == NVML_SUCCESS) {
        pci->domain = plain.domain;
        pci->bus = plain.bus;
        pci->device = plain.device;
        pci->pciDeviceId = plain.pciDeviceId;
        pci->pciSubSystemId = plain.pciSubSystemId;
        pci->baseClass = 0x03; /* a display controller, 3D */
        pci->subClass = 0x02;
        memcpy(pci->busId, plain.busId, sizeof pci->busId);
    }
    return r;
}

/* A set of CPUs or NUMA nodes, near the device in the scope. */
static nvmlReturn_t near_set(const char *name, nvmlDevice_t d, nvmlAffinityScope_t scope, unsigned int size, unsigned long *set)
{
    NEED(set && size && (scope == NVML_AFFINITY_SCOPE_NODE || scope == NVML_AFFINITY_SCOPE_SOCKET));
    struct call c;
    begin(&c, name, device_number(d));
    put_u32(&c, scope);
    nvmlReturn_t r = send_call(&c);
    if (r != NVML_SUCCESS)
        return r;
    unsigned int words = get_u32(&c);
    for (unsigned int i = 0; i < size; i++)
        set[i] = i < words ? get_u64(&c) : 0;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCpuAffinity(nvmlDevice_t d, unsigned int size, unsigned long *set)
{
    return near_set(__func__, d, NVML_AFFINITY_SCOPE_NODE, size, set);
}

nvmlReturn_t nvmlDeviceGetCpuAffinityWithinScope(nvmlDevice_t d, unsigned int size, unsigned long *set, nvmlAffinityScope_t scope)
{
    return near_set(__func__, d, scope, size, set);
}

nvmlReturn_t nvmlDeviceGetMemoryAffinity(nvmlDevice_t d, unsigned int size, unsigned long *set, nvmlAffinityScope_t scope)
{
    return near_set(__func__, d, scope, size, set);
}

/* --- memory and processes -------------------------------------------------- */

nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t d, nvmlMemory_t *memory)
{
    NEED(memory);
    struct call c;
    begin(&c, __func__, device_number(d));
    nvmlReturn_t r = send_call(&c);
    if (r == NVML_SUCCESS) {
        memory->total = get_u64(&c);
        memory->used = get_u64(&c); /* this form counts what is reserved as used */
        memory->free = get_u64(&c);
        memory->used += get_u64(&c);
    }
    return r;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t d, nvmlMemory_v2_t *memory)
{
    NEED(memory);
    NEED_VERSION(memory->version, nvmlMemory_v2);
    struct call c;
    begin(&c, __func__, device_number(d));
    nvmlReturn_t r = send_call(&c);
    if (r == NVML_SUCCESS) {
        memory->total = get_u64(&c);
        memory->reserved = get_u64(&c);
        memory->free = get_u64(&c);
        memory->used = get_u64(&c);
    }
    return r;
}

nvmlReturn_t nvmlDeviceGetBAR1MemoryInfo(nvmlDevice_t d, nvmlBAR1Memory_t *memory)
{
    NEED(memory);
    struct call c;
    begin(&c, __func__, device_number(d));
    nvmlReturn_t r = send_call(&c);
    if (r == NVML_SUCCESS) {
        memory->bar1Total = get_u64(&c);
        memory->bar1Free = get_u64(&c);
        memory->bar1Used = get_u64(&c);
    }
    return r;
}

/* Limits are of a cgroup, which the driver opens by its path, in the caller's
 * own view of the files; the daemon takes it by the descriptor. */
static int open_cgroup(const char *path) { return open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC); }

static void close_cgroup(int fd)
{
    if (fd >= 0)
        close(fd);
}

nvmlReturn_t nvmlDeviceSetMemoryLimits_v1(nvmlDevice_t d, nvmlSetMemoryLimits_v1_t *limits)
{
    NEED(limits && limits->nameSpace);
    int fd = open_cgroup(limits->nameSpace);
    struct call c;
    begin(&c, __func__, device_number(d));
    put_u32(&c, (uint32_t)fd);
    put_u64(&c, limits->softLimit);
    put_u64(&c, limits->hardLimit);
    nvmlReturn_t r = send_call(&c);
    close_cgroup(fd);
    return r;
}

nvmlReturn_t nvmlDeviceGetMemoryLimits_v1(nvmlDevice_t d, nvmlGetMemoryLimits_v1_t *limits)
{
    NEED(limits && limits->nameSpace);
    int fd = open_cgroup(limits->nameSpace);
    struct call c;
    begin(&c, __func__, device_number(d));
    put_u32(&c, (uint32_t)fd);
    nvmlReturn_t r = send_call(&c);
    if (r == NVML_SUCCESS) {
        limits->softLimit = get_u64(&c);
        limits->hardLimit = get_u64(&c);
        limits->currentUsed = get_u64(&c);
    }
    close_cgroup(fd);
    return r;
}

/* process_list fills v1 entries or, where v1 is null, those of v2 and v3. */
static nvmlReturn_t process_list(const char *name, nvmlDevice_t d, unsigned int *count, nvmlProcessInfo_v1_t *v1, nvmlProcessInfo_v2_t *v2)
{
    NEED(count && (*count == 0 || v1 || v2));
    unsigned char *big = NULL;
    struct call c;
    begin(&c, name, device_number(d));
    put_u32(&c, *count);
    if (*count > (sizeof c.own - 64) / 20) {
        big = malloc(MAX_LIST);
        if (!big)
            return NVML_ERROR_MEMORY;
        c.reply = big;
        c.room = MAX_LIST;
    }
    nvmlReturn_t r = send_call(&c);
    if (r == NVML_SUCCESS || r == NVML_ERROR_INSUFFICIENT_SIZE)
        *count = get_u32(&c);
    for (unsigned int i = 0; r == NVML_SUCCESS && i < *count; i++) {
        nvmlProcessInfo_v2_t p;
        p.pid = get_u32(&c);
        p.usedGpuMemory = get_u64(&c);
        p.gpuInstanceId = get_u32(&c);
        p.computeInstanceId = get_u32(&c);
        if (v1) {
            v1[i].pid = p.pid;
            v1[i].usedGpuMemory = p.usedGpuMemory;
        } else {
            v2[i] = p;
        }
    }
    free(big);
    return r;
}

#define PROCESSES(what)                                                                                            \
    nvmlReturn_t nvmlDeviceGet##what##RunningProcesses(nvmlDevice_t d, unsigned int *n, nvmlProcessInfo_v1_t *p)      \
    {                                                                                                              \
        return process_list(__func__, d, n, p, NULL);                                                              \
    }                                                                                                              \
    nvmlReturn_t nvmlDeviceGet##what##RunningProcesses_v2(nvmlDevice_t d, unsigned int *n, nvmlProcessInfo_v2_t *p)   \
    {                                                                                                              \
        return process_list(__func__, d, n, NULL, p);                                                              \
    }                                                                                                              \
    nvmlReturn_t nvmlDeviceGet##what##RunningProcesses_v3(nvmlDevice_t d, unsigned int *n, nvmlProcessInfo_t *p)      \
    {                                                                                                              \
        return process_list(__func__, d, n, NULL, p);                                                              \
    }

PROCESSES(Compute)
PROCESSES(Graphics)
PROCESSES(MPSCompute)

nvmlReturn_t nvmlDeviceGetProcessUtilization(nvmlDevice_t d, nvmlProcessUtilizationSample_t *samples, unsigned int *count, unsigned long long since)
{
    NEED(count && (*count == 0 || samples));
    enum { MOST = 200 }; /* that a reply has room for */
    struct call c;
    begin(&c, __func__, device_number(d));
    put_u64(&c, since);
    put_u32(&c, samples ? (*count < MOST ? *count : MOST) : 0);
    nvmlReturn_t r = send_call(&c);
    if (r == NVML_SUCCESS || r == NVML_ERROR_INSUFFICIENT_SIZE)
        *count = get_u32(&c);
    for (unsigned int i = 0; r == NVML_SUCCESS && i < *count; i++) {
        samples[i] = (nvmlProcessUtilizationSample_t){.pid = get_u32(&c), .timeStamp = get_u64(&c)};
        samples[i].smUtil = get_u32(&c);
    }
    return r;
}

/* --- topology -------------------------------------------------------------- */

nvmlReturn_t nvmlDeviceGetTopologyCommonAncestor(nvmlDevice_t a, nvmlDevice_t b, nvmlGpuTopologyLevel_t *level)
{
    return ask_u32_arg(__func__, device_number(a), device_number(b), (unsigned int *)level);
}

nvmlReturn_t nvmlDeviceOnSameBoard(nvmlDevice_t a, nvmlDevice_t b, int *same)
{
    return ask_u32_arg(__func__, device_number(a), device_number(b), (unsigned int *)same);
}

nvmlReturn_t nvmlDeviceGetP2PStatus(nvmlDevice_t a, nvmlDevice_t b, nvmlGpuP2PCapsIndex_t index, nvmlGpuP2PStatus_t *status)
{
    NEED(index < NVML_P2P_CAPS_INDEX_UNKNOWN && status);
    struct call c;
    begin(&c, __func__, device_number(a));
    put_u32(&c, device_number(b));
    put_u32(&c, index);
    nvmlReturn_t r = send_call(&c);
    if (r == NVML_SUCCESS)
        *status = get_u32(&c);
    return r;
}

nvmlReturn_t nvmlDeviceGetTopologyNearestGpus(nvmlDevice_t d, nvmlGpuTopologyLevel_t level, unsigned int *count, nvmlDevice_t *out)
{
    NEED(count && (*count == 0 || out));
    struct call c;
    begin(&c, __func__, device_number(d));
    put_u32(&c, level);
    nvmlReturn_t r = send_call(&c);
    if (r != NVML_SUCCESS)
        return r;
    unsigned int n = get_u32(&c), room = *count;
    *count = n;
    for (unsigned int i = 0; i < n && i < room; i++)
        out[i] = to_device(get_u32(&c));
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t d, unsigned int link, nvmlEnableState_t *on)
{
    return ask_u32_arg(__func__, device_number(d), link, (unsigned int *)on);
}

nvmlReturn_t nvmlDeviceGetNvLinkVersion(nvmlDevice_t d, unsigned int link, unsigned int *version)
{
    return ask_u32_arg(__func__, device_number(d), link, version);
}

nvmlReturn_t nvmlDeviceGetNvLinkCapability(nvmlDevice_t d, unsigned int link, nvmlNvLinkCapability_t which, unsigned int *can)
{
    NEED(which < NVML_NVLINK_CAP_COUNT);
    return ask_u32_arg(__func__, device_number(d), link, can);
}

nvmlReturn_t nvmlDeviceGetNvLinkRemoteDeviceType(nvmlDevice_t d, unsigned int link, nvmlIntNvLinkDeviceType_t *type)
{
    return ask_u32_arg(__func__, device_number(d), link, (unsigned int *)type);
}

static nvmlReturn_t remote_pci(const char *name, nvmlDevice_t d, unsigned int link, nvmlPciInfo_t *pci, int v3)
{
    struct call c;
    begin(&c, name, device_number(d));
    put_u32(&c, link);
    return ask_pci(&c, pci, v3);
}

nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo(nvmlDevice_t d, unsigned int link, nvmlPciInfo_t *pci) { return remote_pci(__func__, d, link, pci, 0); }
nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo_v2(nvmlDevice_t d, unsigned int link, nvmlPciInfo_t *pci) { return remote_pci(__func__, d, link, pci, 1); }

/* --- fabric ---------------------------------------------------------------- */

/* fabric reads the state and clique, and the cluster's UUID as bytes. */
static nvmlReturn_t fabric(const char *name, nvmlDevice_t d, unsigned char *state, unsigned int *clique, unsigned char *cluster)
{
    char text[64] = "";
    struct call c;
    begin(&c, name, device_number(d));
    nvmlReturn_t r = send_call(&c);
    if (r != NVML_SUCCESS)
        return r;
    *state = (unsigned char)get_u32(&c);
    *clique = get_u32(&c);
    get_str(&c, text, sizeof text);
    memset(cluster, 0, NVML_GPU_FABRIC_UUID_LEN);
    const char *p = text;
    for (int i = 0; i < NVML_GPU_FABRIC_UUID_LEN && *p; i++, p += 2) {
        unsigned int byte;
        p += *p == '-';
        if (sscanf(p, "%2x", &byte) != 1)
            return NVML_ERROR_UNKNOWN;
        cluster[i] = (unsigned char)byte;
    }
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetGpuFabricInfo(nvmlDevice_t d, nvmlGpuFabricInfo_t *info)
{
    NEED(info);
    nvmlReturn_t r = fabric(__func__, d, &info->state, &info->cliqueId, info->clusterUuid);
    if (r == NVML_SUCCESS)
        info->status = NVML_SUCCESS;
    return r;
}

/* The two versions begin alike; a fabric that stands is healthy. */
nvmlReturn_t nvmlDeviceGetGpuFabricInfoV(nvmlDevice_t d, nvmlGpuFabricInfoV_t *info)
{
    NEED(info);
    NEED_VERSION(info->version, nvmlGpuFabricInfo_v2, nvmlGpuFabricInfo_v3);
    nvmlReturn_t r = fabric(__func__, d, &info->state, &info->cliqueId, info->clusterUuid);
    if (r == NVML_SUCCESS) {
        info->status = NVML_SUCCESS;
        info->healthMask = 0;
        if (info->version == nvmlGpuFabricInfo_v3)
            info->healthSummary = NVML_GPU_FABRIC_HEALTH_SUMMARY_HEALTHY;
    }
    return r;
}

/* --- events ---------------------------------------------------------------- */

nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *set)
{
    unsigned int n;
    NEED(set);
    nvmlReturn_t r = ask_u32(__func__, NO_HANDLE, &n);
    if (r == NVML_SUCCESS) {
        if (n >= HANDLES)
            return NVML_ERROR_INSUFFICIENT_RESOURCES;
        set->handle = (void *)(sets + n);
    }
    return r;
}

nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t set)
{
    struct call c;
    begin(&c, __func__, NO_HANDLE);
    put_u32(&c, set_number(set));
    return send_call(&c);
}

nvmlReturn_t nvmlDeviceGetSupportedEventTypes(nvmlDevice_t d, unsigned long long *types)
{
    NEED(types);
    struct call c;
    begin(&c, __func__, device_number(d));
    nvmlReturn_t r = send_call(&c);
    if (r == NVML_SUCCESS)
        *types = get_u64(&c);
    return r;
}

nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t d, unsigned long long types, nvmlEventSet_t set)
{
    struct call c;
    begin(&c, __func__, device_number(d));
    put_u32(&c, set_number(set));
    put_u64(&c, types);
    return send_call(&c);
}

static nvmlReturn_t event_wait(const char *name, nvmlEventSet_t set, nvmlEventData_t *data, unsigned int ms, int v2)
{
    NEED(data);
    struct call c;
    begin(&c, name, NO_HANDLE);
    put_u32(&c, set_number(set));
    put_u32(&c, ms);
    nvmlReturn_t r = send_call(&c);
    if (r == NVML_SUCCESS) {
        data->device = to_device(get_u32(&c));
        data->eventType = get_u64(&c);
        data->eventData = get_u64(&c);
        if (v2) {
            data->gpuInstanceId = get_u32(&c);
            data->computeInstanceId = get_u32(&c);
        }
    }
    return r;
}

nvmlReturn_t nvmlEventSetWait(nvmlEventSet_t set, nvmlEventData_t *data, unsigned int ms) { return event_wait(__func__, set, data, ms, 0); }
nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *data, unsigned int ms) { return event_wait(__func__, set, data, ms, 1); }

/* --- beyond nvml.h --------------------------------------------------------- */

/* What nvidia-smi compute-policy does through the driver's private interface. */
nvmlReturn_t gpuEmulatorGetTimeSlice(nvmlDevice_t d, unsigned int *slice)
{
    return ask_u32(__func__, device_number(d), slice);
}

nvmlReturn_t gpuEmulatorSetTimeSlice(nvmlDevice_t d, unsigned int slice)
{
    struct call c;
    begin(&c, __func__, device_number(d));
    put_u32(&c, slice);
    return send_call(&c);
}

/* What nvidia-smi topo -m puts together from many calls and sysfs. */
nvmlReturn_t gpuEmulatorGetMatrix(char *text, unsigned int length)
{
    NEED(text);
    unsigned char *big = malloc(MAX_LIST);
    if (!big)
        return NVML_ERROR_MEMORY;
    struct call c;
    begin(&c, __func__, NO_HANDLE);
    c.reply = big;
    c.room = MAX_LIST;
    nvmlReturn_t r = send_call(&c);
    if (r == NVML_SUCCESS)
        r = (nvmlReturn_t)get_str(&c, text, length);
    free(big);
    return r;
}

/* What nvidia-smi --gpu-reset does likewise. */
nvmlReturn_t gpuEmulatorReset(nvmlDevice_t d)
{
    struct call c;
    begin(&c, __func__, device_number(d));
    return send_call(&c);
}

/* unsupported is what a generated stub calls, with the device that the call is
 * about where it has one. */
int unsupported(const char *name, int about_device, const void *device)
{
    uint32_t handle = about_device ? number(device, devices) : NO_HANDLE;
    if (about_device && handle == NO_HANDLE)
        return refuse(NVML_ERROR_INVALID_ARGUMENT);
    struct call c;
    begin(&c, name, handle);
    return send_call(&c);
}
