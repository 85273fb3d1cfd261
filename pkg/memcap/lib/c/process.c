/* SPDX-License-Identifier: Apache-2.0 */

#include "property.h"

struct driver real;
struct real_library real_library;
struct process *the_process;
uint32_t the_driver;
bool cannot_wipe;

/* Where the kernel has no memory for us, so that even then nothing
 * passes uncounted. */
static struct process spare;

/* find_driver may be run by several threads at once: each writes the same. */
static void find_driver(void)
{
    if (__atomic_load_n(&the_driver, __ATOMIC_ACQUIRE))
        return;
    struct real_library lib = {0};
    if (real_find(&lib, CAP_REAL_CUDA, "cuDriverGetVersion")) {
#define FIND(name, arguments) real.name = (CUresult(*) arguments)real_symbol(&lib, #name);
        OVERRIDES(FIND)
        HELPERS(FIND)
#undef FIND
    }
    real_library = lib;
    __atomic_store_n(&the_driver, 1, __ATOMIC_RELEASE);
}

static struct process *make(void)
{
    size_t size = sizeof(struct process);
    struct process *p = sys_map(size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1), *old = NULL;
    if (!p || SYS3(SYS_madvise, p, size, MADV_WIPEONFORK) < 0)
        cannot_wipe = true; /* before Linux 4.14: the process's number is asked instead */
    if (!p)
        p = &spare;
    if (__atomic_compare_exchange_n(&the_process, &old, p, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
        return p;
    if (p != &spare)
        sys_unmap(p, size);
    return old;
}

struct process *enter_slowly(const void *back)
{
    find_driver();
    struct process *p = __atomic_load_n(&the_process, __ATOMIC_ACQUIRE);
    if (!p)
        p = make();
    uint32_t pid = cannot_wipe ? (uint32_t)SYS1(SYS_getpid, 0) : 1;
    if (__atomic_load_n(&p->pid, __ATOMIC_ACQUIRE) != pid && __atomic_load_n(&p->ready, __ATOMIC_ACQUIRE)) {
        /* A child with its parent's memory. It has one thread as yet. */
        char *bytes = (char *)p;
        for (size_t i = 0; i < sizeof *p; i++)
            bytes[i] = 0;
    }
    __atomic_store_n(&p->pid, pid, __ATOMIC_RELEASE);
    __atomic_store_n(&p->ready, 1, __ATOMIC_RELEASE);
    return real_calls(&real_library, back) ? NULL : p;
}

/* --- accounts ------------------------------------------------------------- */

/* uuid_text writes the name that the agent's files have: the driver's, in the
 * form that NVML gives it. */
static void uuid_text(char *out, const char *prefix, const CUuuid *u)
{
    while (*prefix)
        *out++ = *prefix++;
    for (int i = 0; i < 16; i++) {
        if (i == 4 || i == 6 || i == 8 || i == 10)
            *out++ = '-';
        *out++ = "0123456789abcdef"[u->bytes[i] >> 4];
        *out++ = "0123456789abcdef"[u->bytes[i] & 15];
    }
    *out = 0;
}

static CUresult device_uuid(CUdevice device, CUuuid *u)
{
    /* The second version names the MIG instance where there is one. */
    return CALL(cuDeviceGetUuid_v2, u, device) == CUDA_SUCCESS ? CUDA_SUCCESS : CALL(cuDeviceGetUuid, u, device);
}

/* nothing_there says of a driver's answer that there is no such device, so none of
 * its calls gives memory of it. */
static bool nothing_there(CUresult r)
{
    return r == CUDA_ERROR_NOT_INITIALIZED || r == CUDA_ERROR_DEINITIALIZED || r == CUDA_ERROR_NO_DEVICE || r == CUDA_ERROR_INVALID_DEVICE;
}

/* open_account opens what can be opened and says how things stand. */
COLD static enum standing open_account(struct account *a, CUdevice device)
{
    CUuuid uuid;
    struct claim claim;
    char name[64];
    a->relief = relieve;
    CUresult r = device_uuid(device, &uuid);
    if (r != CUDA_SUCCESS)
        return nothing_there(r) ? STANDING_UNKNOWN : STANDING_CLOSED;
    for (int mig = 0; mig <= 1; mig++) {
        uuid_text(name, mig ? "MIG-" : "GPU-", &uuid);
        if (!claim_find(&claim, name) || (!a->page && account_find(a, claim.limit) != 0))
            continue;
        if (account_unlimited(a))
            return STANDING_UNLIMITED;
        return account_open(a, claim.usage) == 0 ? STANDING_GOOD : STANDING_CLOSED;
    }
    return STANDING_CLOSED;
}

bool is_open(void)
{
    int fd = sys_open(CAP_OPEN_MARK, O_PATH | O_NOFOLLOW, 0);
    if (fd < 0)
        return false;
    sys_close(fd);
    return true;
}

struct account *account_of(struct process *p, CUdevice device, bool *refuse)
{
    *refuse = false;
    if (device < 0 || device >= MAX_DEVICES)
        return NULL;
    struct account *a = &p->accounts[device];
    uint32_t now = __atomic_load_n(&p->standing[device], __ATOMIC_ACQUIRE);
    if (__builtin_expect(now == STANDING_GOOD, 1))
        return account_unlimited(a) ? NULL : a;
    if (now == STANDING_OPEN || (now == STANDING_UNLIMITED && account_unlimited(a)))
        return NULL;
    spin_lock(&p->lock);
    /* Where the cap is open one failure is the last word; where it is closed,
     * what was missing (a descriptor, say) may come to be there. */
    now = p->standing[device];
    if (now != STANDING_GOOD && now != STANDING_OPEN) {
        now = open_account(a, device);
        if (now == STANDING_CLOSED && is_open())
            now = STANDING_OPEN;
        __atomic_store_n(&p->standing[device], now, __ATOMIC_RELEASE);
    }
    spin_unlock(&p->lock);
    *refuse = now == STANDING_CLOSED;
    return now == STANDING_GOOD ? a : NULL;
}

bool property_unknown(struct process *p, CUdevice device)
{
    struct where w;
    bool refuse = false;
    property_place(p, device, &w);
    struct account *a = account_of(p, w.device, &refuse);
    if (!a)
        return refuse;
    if (is_open()) {
        count_add(&a->usage->uncounted, 1);
        return false;
    }
    count_add(&a->usage->refusals, 1);
    return true;
}

/* --- contexts ------------------------------------------------------------- */

static uint64_t context_home(uint64_t handle) { return (handle * 0x9E3779B97F4A7C15u) >> 57; }

/* look finds a context without a lock. An entry's handle is written last and
 * taken away first, and its number is used once only. */
static uint64_t look(const struct process *p, uint64_t handle)
{
    for (uint64_t i = context_home(handle), n = 0; n < 8; i = (i + 1) % MAX_CONTEXTS, n++) {
        const struct context *c = &p->contexts[i];
        if (__atomic_load_n(&c->handle, __ATOMIC_ACQUIRE) == handle) {
            uint64_t info = __atomic_load_n(&c->info, __ATOMIC_ACQUIRE);
            if (__atomic_load_n(&c->handle, __ATOMIC_ACQUIRE) == handle)
                return info;
        }
    }
    return 0;
}

COLD uint64_t context_number(struct process *p, CUcontext context, CUdevice device)
{
    uint64_t handle = (uintptr_t)context;
    spin_lock(&p->lock);
    uint64_t info = look(p, handle);
    if (!info) {
        info = ++p->contexts_made << 8 | (uint64_t)(device & 0xFF);
        for (uint64_t i = context_home(handle), n = 0; n < 8; i = (i + 1) % MAX_CONTEXTS, n++)
            if (!p->contexts[i].handle) {
                __atomic_store_n(&p->contexts[i].info, info, __ATOMIC_RELEASE);
                __atomic_store_n(&p->contexts[i].handle, handle, __ATOMIC_RELEASE);
                break;
            }
        /* With no place its allocations outlive it in the count: too much
         * counted, by a program with a hundred contexts. */
    }
    spin_unlock(&p->lock);
    return info >> 8;
}

bool context_forget(struct process *p, CUcontext context, struct where *w)
{
    uint64_t handle = (uintptr_t)context, info = 0;
    spin_lock(&p->lock);
    for (uint64_t i = context_home(handle), n = 0; n < 8; i = (i + 1) % MAX_CONTEXTS, n++)
        if (p->contexts[i].handle == handle) {
            info = p->contexts[i].info;
            __atomic_store_n(&p->contexts[i].handle, 0, __ATOMIC_RELEASE);
            break;
        }
    p->contexts_ended++;
    spin_unlock(&p->lock);
    w->device = (CUdevice)(info & 0xFF);
    w->context = info >> 8;
    return info;
}

bool context_lives(const struct process *p, CUcontext handle, uint64_t number) { return look(p, (uintptr_t)handle) >> 8 == number; }

bool where_stream(struct process *p, struct where *w, CUstream stream)
{
    CUcontext context = NULL, popped;
    if (!stream || stream == CU_STREAM_LEGACY || stream == CU_STREAM_PER_THREAD)
        return where(p, w);
    if (CALL(cuStreamGetCtx, stream, &context) != CUDA_SUCCESS || !context)
        return where(p, w);
    uint64_t info = look(p, (uintptr_t)context);
    if (!info) {
        if (CALL(cuCtxPushCurrent_v2, context) != CUDA_SUCCESS)
            return false;
        bool found = where(p, w);
        CALL(cuCtxPopCurrent_v2, &popped);
        return found;
    }
    w->device = (CUdevice)(info & 0xFF);
    w->context = info >> 8;
    return true;
}

bool where(struct process *p, struct where *w)
{
    CUcontext now = NULL;
    if (CALL(cuCtxGetCurrent, &now) != CUDA_SUCCESS || !now)
        return false;
    uint64_t info = look(p, (uintptr_t)now);
    if (info) {
        w->device = (CUdevice)(info & 0xFF);
        w->context = info >> 8;
        return true;
    }
    if (CALL(cuCtxGetDevice, &w->device) != CUDA_SUCCESS)
        return false;
    w->context = context_number(p, now, w->device);
    return true;
}
