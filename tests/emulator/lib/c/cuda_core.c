/* SPDX-License-Identifier: Apache-2.0 */

/* Initialisation, devices, and how memory is asked for. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "cuda_internal.h"
#include "cuda_switch.h"
#include "transport.h"

struct device devices[MAX_DEVICES];
int device_count;
pthread_mutex_t cuda_lock = PTHREAD_MUTEX_INITIALIZER, growing = PTHREAD_MUTEX_INITIALIZER;

/* A page that the kernel wipes in a forked child: its first word says that this
 * process, and not a parent, has initialised the driver. */
static _Atomic(uint32_t *) living;
static bool in_process; /* accounting */
static int cuda_version = CUDA_VERSION;

CUresult ready(void)
{
    uint32_t *p = atomic_load_explicit(&living, memory_order_acquire);
    if (!p || !*(volatile uint32_t *)p)
        return CUDA_ERROR_NOT_INITIALIZED;
    return __builtin_expect(is_locked(), 0) ? await_turn() : CUDA_SUCCESS;
}

uint64_t next_serial(void)
{
    static _Atomic uint64_t last;
    return atomic_fetch_add(&last, 1) + 1;
}

/* Injected faults carry numbers of their own; the world's are NVML's. */
CUresult translate(int nvml)
{
    switch (nvml) {
    case 0: return CUDA_SUCCESS;
    case 1: return CUDA_ERROR_NOT_INITIALIZED;
    case 2: return CUDA_ERROR_INVALID_VALUE;
    case 3: return CUDA_ERROR_NOT_SUPPORTED;
    case 4: return CUDA_ERROR_NOT_PERMITTED;
    case 6: return CUDA_ERROR_NOT_FOUND;
    case 9: return CUDA_ERROR_NO_DEVICE;
    case 15: return CUDA_ERROR_UNKNOWN; /* off the bus: nothing more specific comes back */
    case 16: return CUDA_ERROR_DEVICE_UNAVAILABLE;
    case 19: return CUDA_ERROR_DEVICE_UNAVAILABLE; /* by the compute mode */
    case 18: return CUDA_ERROR_SYSTEM_DRIVER_MISMATCH;
    case 20: return CUDA_ERROR_OUT_OF_MEMORY;
    case 23: return CUDA_ERROR_OPERATING_SYSTEM;
    default: return nvml;
    }
}

static CUresult ask(struct call *c, struct device *d)
{
    int r = send_call(c);
    if (r == 15 && d)
        atomic_store(&d->lost, true);
    return translate(r);
}

/* --- the visible devices --------------------------------------------------- */

/* Of a GPU in MIG mode the devices are its instances that the process reaches,
 * and a process can have one of those alone, and then no GPU beside it: the first,
 * if nothing else was said. Where GPUs are named, an instance stands for its GPU. */
static bool is_mig(const struct device *d) { return d->gi != NO_INSTANCE; }

/* first_of says whether a device is the one that stands for its GPU. */
static bool first_of(const struct device *d, const struct device *all)
{
    return d == all || d[-1].gpu != d->gpu;
}

/* begins compares without regard to case. */
static bool begins(const char *uuid, const char *entry, size_t n) { return n > 4 && strncasecmp(uuid, entry, n) == 0; }

/* named finds what one entry of CUDA_VISIBLE_DEVICES means: an index, the
 * beginning of one UUID only, or MIG-GPU-…/gi/ci. */
static int named(const char *entry, size_t n, const struct device *all, int count)
{
    int found = -1, index = 0;
    bool number = n && strspn(entry, "0123456789") >= n;
    unsigned long want = number ? strtoul(entry, NULL, 10) : 0;
    for (int i = 0; i < count; i++) {
        const struct device *d = &all[i];
        bool match;
        if (number) {
            match = first_of(d, all) && (unsigned long)index++ == want;
        } else {
            char path[96];
            snprintf(path, sizeof path, "MIG-%s/%u/%u", d->gpu_uuid, d->gi, d->ci);
            match = (is_mig(d) && (begins(d->uuid, entry, n) || (strlen(path) == n && begins(path, entry, n)))) ||
                    (first_of(d, all) && begins(d->gpu_uuid, entry, n));
        }
        if (match && found >= 0)
            return -1;
        if (match)
            found = i;
    }
    return found;
}

/* choose keeps the devices that CUDA_VISIBLE_DEVICES names, in its order, up to
 * the first entry that means none. One that stands twice leaves none at all. */
static void choose(const struct device *all, int count)
{
    const char *list = getenv("CUDA_VISIBLE_DEVICES");
    device_count = 0;
    if (!list) {
        for (int i = 0; i < count; i++)
            if (first_of(&all[i], all))
                devices[device_count++] = all[i];
        return;
    }
    bool seen[MAX_INSTANCES] = {false};
    for (;;) {
        list += strspn(list, " \t");
        size_t whole = strcspn(list, ","), n = whole;
        while (n && strchr(" \t", list[n - 1]))
            n--;
        int i = named(list, n, all, count);
        if (i < 0)
            return;
        if (seen[i] || device_count == MAX_DEVICES) {
            device_count = 0;
            return;
        }
        seen[i] = true;
        devices[device_count++] = all[i];
        if (!list[whole])
            return;
        list += whole + 1;
    }
}

/* one_instance leaves the first instance, if there is one among the devices. */
static void one_instance(void)
{
    for (int i = 0; i < device_count; i++)
        if (is_mig(&devices[i])) {
            if (i)
                memcpy(&devices[0], &devices[i], sizeof devices[0]);
            device_count = 1;
            return;
        }
}

static CUresult find_devices(void)
{
    static struct device all[MAX_INSTANCES];
    static unsigned char reply[MAX_LIST];
    struct call c;
    int count = 0;
    begin(&c, "cuEmulatorDevices", NO_HANDLE);
    c.reply = reply;
    c.room = sizeof reply;
    TRY(ask(&c, NULL));
    cuda_version = (int)get_u32(&c);
    memset(all, 0, sizeof all);
    for (uint32_t n = get_u32(&c); n > 0 && count < MAX_INSTANCES; n--) {
        struct device *d = &all[count];
        d->handle = get_u32(&c);
        bool lost = get_u32(&c);
        d->major = (int)get_u32(&c);
        d->minor = (int)get_u32(&c);
        d->multiprocessors = (int)get_u32(&c);
        d->total = get_u64(&c);
        d->limit = get_u64(&c);
        d->context = get_u64(&c);
        d->domain = get_u32(&c);
        d->bus = get_u32(&c);
        d->slot = get_u32(&c);
        d->gpu = get_u32(&c);
        d->gi = get_u32(&c);
        d->ci = get_u32(&c);
        if (get_str(&c, d->uuid, sizeof d->uuid) || get_str(&c, d->gpu_uuid, sizeof d->gpu_uuid) || get_str(&c, d->name, sizeof d->name))
            return CUDA_ERROR_UNKNOWN;
        if (!lost) /* a driver that starts does not find it */
            count++;
    }
    choose(all, count);
    one_instance();
    for (int i = 0; i < device_count; i++)
        devices[i].primary = (struct context){.device = i, .primary = true};
    return device_count ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

static CUresult initialise(void)
{
    uint32_t *p = atomic_load(&living);
    if (p)
        return *(volatile uint32_t *)p ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
    MUST(switches_read());
    int server;
    TRY(mps_connect(&server));
    CUresult r = translate(driver_open("cuInit"));
    if (r != CUDA_SUCCESS) {
        mps_leave();
        return r;
    }
    r = server ? mps_join(server) : CUDA_SUCCESS;
    if (r == CUDA_SUCCESS)
        r = find_devices();
    if (r != CUDA_SUCCESS) {
        driver_close("cuEmulatorClose");
        mps_leave();
        return r;
    }
    const char *how = getenv("GPU_EMULATOR_ACCOUNTING");
    in_process = how && strcmp(how, "process") == 0;
    p = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED || madvise(p, 4096, MADV_WIPEONFORK) || !objects_begin() || !pools_begin()) {
        driver_close("cuEmulatorClose");
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *p = 1;
    atomic_store_explicit(&living, p, memory_order_release);
    return CUDA_SUCCESS;
}

API CUresult cuInit(unsigned int flags)
{
    MUST(flags == 0);
    lock();
    CUresult r = initialise();
    unlock();
    return r;
}

API CUresult cuDriverGetVersion(int *version)
{
    MUST(version);
    *version = driver_version();
    return CUDA_SUCCESS;
}

int driver_version(void) { return switches.version ? switches.version : cuda_version; }

static void child(void)
{
    pthread_mutex_init(&cuda_lock, NULL);
    mps_leave();
}

__attribute__((constructor)) static void load(void) { pthread_atfork(lock, unlock, child); }

/* --- memory of the card ---------------------------------------------------- */

/* map spends the processor time that a driver needs to map memory of the card, by its
 * amount. A pool that maps 1 GiB and gives it back at the next synchronisation takes
 * 31.2 ms, one that keeps it 1.4 us (vortex-data/vortex, pull request 7831). 16 GB that
 * were freed before take cudaMalloc 300 to 400 ms, fresh ones 10 to 20 (ggml-org/llama.cpp,
 * pull request 5429, on an A10). So 1 MiB takes some 20 to 30 us, other than right after
 * the start, and what was kept takes nothing. */
static void map(uint64_t bytes)
{
    struct timespec now;
    if (!switches.map_us)
        return;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    int64_t ns = (int64_t)(bytes / 1024 * (uint64_t)switches.map_us * 1000 / 1024), sec = now.tv_sec, nsec = now.tv_nsec;
    do
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    while ((now.tv_sec - sec) * 1000000000 + now.tv_nsec - nsec < ns);
}

bool asks_nobody(void) { return in_process; }

static CUresult charge_card(const char *call, struct device *d, int64_t bytes)
{
    if (in_process) {
        uint64_t now = atomic_fetch_add(&d->used, (uint64_t)bytes) + (uint64_t)bytes;
        if (bytes < 0 || now <= d->limit)
            return CUDA_SUCCESS;
        atomic_fetch_sub(&d->used, (uint64_t)bytes);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (atomic_load(&d->lost))
        return CUDA_ERROR_UNKNOWN;
    struct call c;
    begin(&c, call, d->handle);
    put_u64(&c, (uint64_t)bytes);
    return ask(&c, d);
}

CUresult charge(const char *call, struct device *d, int64_t bytes)
{
    if (bytes == 0)
        return CUDA_SUCCESS;
    CUresult r = charge_card(call, d, bytes);
    if (bytes > 0 && r == CUDA_SUCCESS)
        map((uint64_t)bytes);
    return r;
}

CUresult free_memory(const char *call, struct device *d, uint64_t *bytes)
{
    if (in_process) {
        *bytes = d->limit - atomic_load(&d->used);
        return CUDA_SUCCESS;
    }
    struct call c;
    begin(&c, call, d->handle);
    TRY(ask(&c, d));
    *bytes = get_u64(&c);
    return CUDA_SUCCESS;
}

CUresult share(struct device *d, uint64_t bytes, uint64_t *id)
{
    if (in_process)
        return CUDA_ERROR_NOT_SUPPORTED;
    struct call c;
    begin(&c, "cuEmulatorShare", d->handle);
    put_u64(&c, bytes);
    TRY(ask(&c, d));
    *id = get_u64(&c);
    return CUDA_SUCCESS;
}

CUresult open_shared(const char *call, uint64_t id, int *device, uint64_t *bytes)
{
    if (in_process)
        return CUDA_ERROR_NOT_SUPPORTED;
    struct call c;
    begin(&c, call, NO_HANDLE);
    put_u64(&c, id);
    TRY(ask(&c, NULL));
    uint32_t handle = get_u32(&c);
    *bytes = get_u64(&c);
    for (int i = 0; i < device_count; i++)
        if (devices[i].handle == handle) {
            *device = i;
            return CUDA_SUCCESS;
        }
    close_shared(id);
    return CUDA_ERROR_INVALID_DEVICE;
}

void close_shared(uint64_t id)
{
    struct call c;
    begin(&c, "cuEmulatorUnshare", NO_HANDLE);
    put_u64(&c, id);
    ask(&c, NULL);
}

CUresult export_shared(uint64_t id, int *fd)
{
    struct call c;
    begin(&c, "cuMemExportToShareableHandle", NO_HANDLE);
    put_u64(&c, id);
    TRY(ask(&c, NULL));
    *fd = c.fd;
    return c.fd >= 0 ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM;
}

/* --- what a device is ------------------------------------------------------ */

CUresult find_device(CUdevice ordinal, struct device **d)
{
    TRY(ready());
    if (ordinal < 0 || ordinal >= device_count)
        return CUDA_ERROR_INVALID_DEVICE;
    *d = &devices[ordinal];
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetCount(int *count)
{
    TRY(ready());
    MUST(count);
    *count = device_count;
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
    struct device *d;
    TRY(ready());
    MUST(device);
    TRY(find_device(ordinal, &d));
    *device = ordinal;
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetName(char *name, int room, CUdevice device)
{
    struct device *d;
    TRY(find_device(device, &d));
    MUST(name && room > 0);
    snprintf(name, (size_t)room, "%s", d->name);
    return CUDA_SUCCESS;
}

static void parse_uuid(CUuuid *out, const char *text)
{
    const char *p = text + 4; /* GPU- or MIG- */
    for (int i = 0; i < 16; i++, p += 2) {
        unsigned int byte = 0;
        p += *p == '-';
        sscanf(p, "%2x", &byte);
        out->bytes[i] = (char)byte;
    }
}

/* The first form knows GPUs only. */
API CUresult cuDeviceGetUuid(CUuuid *out, CUdevice device)
{
    struct device *d;
    TRY(find_device(device, &d));
    MUST(out);
    parse_uuid(out, d->gpu_uuid);
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetUuid_v2(CUuuid *out, CUdevice device)
{
    struct device *d;
    TRY(find_device(device, &d));
    MUST(out);
    parse_uuid(out, d->uuid);
    return CUDA_SUCCESS;
}

API CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device)
{
    struct device *d;
    TRY(find_device(device, &d));
    MUST(bytes);
    *bytes = d->total;
    return CUDA_SUCCESS;
}

API CUresult cuDeviceTotalMem(unsigned int *bytes, CUdevice device)
{
    struct device *d;
    TRY(find_device(device, &d));
    MUST(bytes);
    *bytes = d->total < UINT32_MAX ? (unsigned int)d->total : UINT32_MAX;
    return CUDA_SUCCESS;
}

API CUresult cuDeviceComputeCapability(int *major, int *minor, CUdevice device)
{
    struct device *d;
    TRY(find_device(device, &d));
    MUST(major && minor);
    *major = d->major;
    *minor = d->minor;
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetPCIBusId(char *id, int room, CUdevice device)
{
    struct device *d;
    TRY(find_device(device, &d));
    MUST(id && room >= 13);
    snprintf(id, (size_t)room, "%04x:%02x:%02x.0", d->domain, d->bus, d->slot);
    return CUDA_SUCCESS;
}

API CUresult cuDeviceGetByPCIBusId(CUdevice *device, const char *id)
{
    TRY(ready());
    MUST(device && id);
    unsigned int domain = 0, bus, slot;
    if (sscanf(id, "%x:%x:%x", &domain, &bus, &slot) != 3) {
        domain = 0;
        MUST(sscanf(id, "%x:%x", &bus, &slot) == 2);
    }
    for (int i = 0; i < device_count; i++)
        if (devices[i].domain == domain && devices[i].bus == bus && devices[i].slot == slot) {
            *device = i;
            return CUDA_SUCCESS;
        }
    return CUDA_ERROR_INVALID_DEVICE;
}

/* Of a client of MPS these are its current context's, or what its next one has. */
static int multiprocessors_of(struct device *d)
{
    struct context *c = peek();
    if (mps_client() && c && c->alive && !c->green_of && &devices[c->device] == d && c->multiprocessors)
        return (int)c->multiprocessors;
    return mps_multiprocessors(d);
}

API CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device)
{
    struct device *d;
    TRY(find_device(device, &d));
    MUST(value && attribute > 0 && attribute < 160);
    switch (attribute) {
    case 1: *value = 1024; break;                  /* MAX_THREADS_PER_BLOCK */
    case 2: case 3: *value = 1024; break;          /* MAX_BLOCK_DIM_X, Y */
    case 4: *value = 64; break;                    /* MAX_BLOCK_DIM_Z */
    case 5: *value = INT32_MAX; break;             /* MAX_GRID_DIM_X */
    case 6: case 7: *value = 65535; break;         /* MAX_GRID_DIM_Y, Z */
    case 8: *value = 49152; break;                 /* MAX_SHARED_MEMORY_PER_BLOCK */
    case 10: *value = 32; break;                   /* WARP_SIZE */
    case 11: *value = INT32_MAX; break;            /* MAX_PITCH */
    case 12: *value = 65536; break;                /* MAX_REGISTERS_PER_BLOCK */
    case 14: *value = 512; break;                  /* TEXTURE_ALIGNMENT */
    case 16: *value = multiprocessors_of(d); break; /* MULTIPROCESSOR_COUNT */
    case 33: *value = (int)d->bus; break;          /* PCI_BUS_ID */
    case 34: *value = (int)d->slot; break;         /* PCI_DEVICE_ID */
    case 39: *value = THREADS_PER_MULTIPROCESSOR; break; /* MAX_THREADS_PER_MULTIPROCESSOR */
    case 50: *value = (int)d->domain; break;       /* PCI_DOMAIN_ID */
    case 75: *value = d->major; break;             /* COMPUTE_CAPABILITY_MAJOR */
    case 76: *value = d->minor; break;             /* COMPUTE_CAPABILITY_MINOR */
    case 133: *value = mps_client(); break;        /* MPS_ENABLED */
    case 147: *value = locality_domains(d); break; /* LOCALITY_DOMAIN_COUNT */
    case 15: case 19: case 31: case 41: case 78:   /* GPU_OVERLAP, CAN_MAP_HOST_MEMORY, CONCURRENT_KERNELS, UNIFIED_ADDRESSING, … */
    case 83: case 89: case 90: case 91: case 95:   /* MANAGED_MEMORY, CONCURRENT_MANAGED_ACCESS, COMPUTE_PREEMPTION, … */
    case 102: case 103: case 115: *value = 1; break; /* virtual memory, by file descriptor, memory pools */
    default: *value = 0;
    }
    return CUDA_SUCCESS;
}

API CUresult cuGetExportTable(const void **table, const CUuuid *id)
{
    MUST(table && id);
    *table = NULL;
    return CUDA_ERROR_NOT_FOUND;
}

/* A call that no header knows: whatever stands between a program and this
 * library has to let it through. It answers twice its argument. */
API CUresult cuEmulatorFutureCall(unsigned int n, unsigned int *out)
{
    TRY(ready());
    MUST(out);
    *out = 2 * n;
    return CUDA_SUCCESS;
}
