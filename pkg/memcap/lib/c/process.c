/* SPDX-License-Identifier: Apache-2.0 */

#include "property.h"

struct driver real;
struct real_library real_library;
struct process *the_process;
uint32_t the_driver;
bool cannot_wipe;

/* The process to use if the kernel has no memory for one, so that nothing passes uncounted even
 * then. */
static struct process spare;

/* Several threads may run find_driver at once; all of them write the same. */
static void find_driver(void)
{
    if (__atomic_load_n(&the_driver, __ATOMIC_ACQUIRE))
        return;
    struct real_library lib = {0};
    if (real_find(&lib, CAP_REAL_CUDA, "cuDriverGetVersion")) {
#define FIND(name, arguments) real.name = (CUresult(*) arguments)real_symbol(&lib, #name);
#define OVERRIDDEN(base, since, name, arguments) FIND(name, arguments)
        OVERRIDES(OVERRIDDEN)
        HELPERS(FIND)
#undef OVERRIDDEN
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
        cannot_wipe = true; /* Linux before 4.14: enter_slowly compares PIDs instead */
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
        /* This is a forked child that has its parent's memory. It has one thread so far. */
        char *bytes = (char *)p;
        for (size_t i = 0; i < sizeof *p; i++)
            bytes[i] = 0;
    }
    __atomic_store_n(&p->pid, pid, __ATOMIC_RELEASE);
    __atomic_store_n(&p->ready, 1, __ATOMIC_RELEASE);
    return real_calls(&real_library, back) ? NULL : p;
}

/* --- accounts ------------------------------------------------------------- */

/* uuid_text writes a UUID as NVML does, which is how the agent names its files. */
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
    /* On a MIG instance the second version returns the instance's UUID. */
    return CALL(cuDeviceGetUuid_v2, u, device) == CUDA_SUCCESS ? CUDA_SUCCESS : CALL(cuDeviceGetUuid, u, device);
}

/* nothing_there reports whether a driver's answer means that there is no such device. Then no call
 * can give memory of it. */
static bool nothing_there(CUresult r)
{
    return r == CUDA_ERROR_NOT_INITIALIZED || r == CUDA_ERROR_DEINITIALIZED || r == CUDA_ERROR_NO_DEVICE || r == CUDA_ERROR_INVALID_DEVICE;
}

/* open_others opens the other pages of a GPU, from which this process may borrow. A page that
 * cannot be opened lends nothing. */
static void open_others(struct account *a, const char *gpu, struct claim *claim)
{
    struct claim last = *claim;
    struct account **end = &a->others;
    for (; claim_find(claim, gpu, &last); last = *claim) {
        struct account *b = account_other(claim->limit, claim->usage);
        if (!b)
            continue;
        __atomic_store_n(end, b, __ATOMIC_RELEASE);
        end = &b->next;
        a->keeps_far = a->keeps = 0;
    }
}

/* open_account opens a device's account and returns its standing. */
COLD static enum standing open_account(struct process *p, struct account *a, CUdevice device)
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
        if (!claim_find(&claim, name, NULL))
            continue;
        if (claim.percent && mps_refuses(p, device))
            return STANDING_CLOSED;
        bool opened = mps_account(p, a, claim.limit);
        if (!a->page && account_find(a, claim.limit) != 0)
            continue;
        if (account_unlimited(a))
            return STANDING_UNLIMITED;
        if (!opened && account_open(a, claim.usage) != 0)
            return STANDING_CLOSED;
        if (claim.others)
            open_others(a, name, &claim);
        return STANDING_GOOD;
    }
    return STANDING_CLOSED;
}

COLD struct account *account_of_slowly(struct process *p, CUdevice device, bool *refuse)
{
    if (device < 0 || device >= MAX_DEVICES)
        return NULL;
    struct account *a = &p->accounts[device];
    uint32_t now = __atomic_load_n(&p->standing[device], __ATOMIC_ACQUIRE);
    if (now == STANDING_OPEN || (now == STANDING_UNLIMITED && account_unlimited(a)))
        return NULL;
    spin_lock(&p->lock);
    /* Under the open policy a failure is final. Under the closed policy we try again each time.
     * What was missing, such as a descriptor, may be there now. */
    now = p->standing[device];
    if (now != STANDING_GOOD && now != STANDING_OPEN) {
        now = open_account(p, a, device);
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

/* look finds the device and the number of a context; the entry's owner is the number. No number is
 * used twice. */
static bool look(struct process *p, CUcontext context, struct where *w)
{
    struct entry e;
    if (!table_get(&p->table, (uintptr_t)context, SPACE_NUMBER, &e))
        return false;
    *w = (struct where){e.device, e.owner};
    return true;
}

static void number(struct entry *e, void *arg)
{
    if (!e->how)
        *e = *(const struct entry *)arg;
}

COLD uint64_t context_number(struct process *p, CUcontext context, CUdevice device)
{
    struct where w;
    if (look(p, context, &w))
        return w.context;
    struct entry e = {.key = (uintptr_t)context, .owner = __atomic_add_fetch(&p->contexts_made, 1, __ATOMIC_RELAXED), .space = SPACE_NUMBER, .how = 1, .device = device};
    w.context = e.owner;
    /* Without memory for the entry, the context's allocations stay charged after it has ended. The
     * charge is then too high, never too low. */
    table_edit(&p->table, e.key, SPACE_NUMBER, number, &e);
    look(p, context, &w);
    return w.context;
}

bool context_forget(struct process *p, CUcontext context, struct where *w)
{
    struct entry e;
    __atomic_add_fetch(&p->contexts_ended, 1, __ATOMIC_RELAXED);
    if (!table_take(&p->table, (uintptr_t)context, SPACE_NUMBER, &e))
        return false;
    *w = (struct where){e.device, e.owner};
    return true;
}

bool context_lives(struct process *p, CUcontext handle, uint64_t number)
{
    struct where w;
    return look(p, handle, &w) && w.context == number;
}

bool where_stream(struct process *p, struct where *w, CUstream stream)
{
    CUcontext context = NULL, popped;
    if (!stream || stream == CU_STREAM_LEGACY || stream == CU_STREAM_PER_THREAD)
        return where(p, w);
    if (CALL(cuStreamGetCtx, stream, &context) != CUDA_SUCCESS || !context)
        return where(p, w);
    if (look(p, context, w))
        return true;
    if (CALL(cuCtxPushCurrent_v2, context) != CUDA_SUCCESS)
        return false;
    bool found = where(p, w);
    CALL(cuCtxPopCurrent_v2, &popped);
    return found;
}

/* where_unseen is where for a context that is new to us. */
COLD static bool where_unseen(struct process *p, struct where *w, CUcontext now)
{
    if (CALL(cuCtxGetDevice, &w->device) != CUDA_SUCCESS)
        return false;
    w->context = context_number(p, now, w->device);
    return true;
}

bool where(struct process *p, struct where *w)
{
    CUcontext now = NULL;
    if (CALL(cuCtxGetCurrent, &now) != CUDA_SUCCESS || !now)
        return false;
    return __builtin_expect(look(p, now, w), 1) || where_unseen(p, w, now);
}
