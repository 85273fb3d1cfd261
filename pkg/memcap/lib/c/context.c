/* SPDX-License-Identifier: Apache-2.0 */

/* Contexts. A context costs memory before anything is allocated in it, how much
 * depends on the GPU, the driver and the program: it is charged with what the
 * limit page says, and the agent's reading of the driver corrects that later.
 * With a context goes all that was allocated in it. */

#include "pool.h"

/* A context's charge is an entry under the context's number. */

static enum verdict context_begin(struct process *p, struct charge *c, CUdevice device)
{
    bool refuse;
    *c = (struct charge){.at.device = device, .a = account_of(p, device, &refuse)};
    if (!c->a)
        return PASS; /* a context alone is not refused for want of a count */
    uint64_t bytes = __atomic_load_n(&c->a->page->context, __ATOMIC_RELAXED);
    c->bytes = bytes < MOST ? round_up(bytes, UNIT) : 0;
    return !c->bytes || account_reserve(c->a, c->bytes) ? COUNT : REFUSE;
}

static void context_done(struct process *p, struct charge *c, CUcontext context)
{
    uint64_t number = context_number(p, context, c->at.device);
    struct entry e = {.key = number, .bytes = c->bytes, .space = SPACE_CONTEXT, .how = HOW_LARGE, .device = c->at.device}, old;
    struct slot *s = c->a->slot;
    count_add(&s->expected, c->bytes);
    count_add(&s->contexts, 1);
    account_commit(c->a, c->bytes);
    table_put(&p->table, &e, &old); /* without memory for it: charged for good */
}

static void context_cancel(struct charge *c)
{
    if (c->bytes)
        account_cancel(c->a, c->bytes);
}

/* A context that ends: context_take before, context_gone or context_back after.
 * What it was charged with above what is known of contexts by now was never
 * there. */
static bool context_take(struct process *p, struct entry *e, uint64_t number)
{
    if (!table_take(&p->table, number, SPACE_CONTEXT, e))
        return false;
    account_uncommit(&p->accounts[e->device], e->bytes);
    return true;
}

static void context_gone(struct process *p, const struct entry *e)
{
    struct account *a = &p->accounts[e->device];
    count_sub(&a->slot->expected, e->bytes);
    count_sub(&a->slot->contexts, 1);
    count_add(&a->usage->settled, account_excess(a, e->bytes, 1));
    if (e->bytes)
        account_cancel(a, e->bytes);
}

static void context_back(struct process *p, struct entry *e, uint64_t number)
{
    struct entry old;
    account_commit(&p->accounts[e->device], e->bytes);
    e->key = number;
    table_put(&p->table, e, &old);
}

#define CREATE(name, ...)                          \
    struct process *p = ENTER();                   \
    struct charge c;                               \
    if (!p || !out)                                \
        return CALL(name, __VA_ARGS__);            \
    enum verdict v = context_begin(p, &c, device); \
    if (v == REFUSE)                               \
        return CUDA_ERROR_OUT_OF_MEMORY;           \
    CUresult r = CALL(name, __VA_ARGS__);          \
    if (v == COUNT && r == CUDA_SUCCESS)           \
        context_done(p, &c, *out);                 \
    else if (v == COUNT)                           \
        context_cancel(&c);                        \
    return r;

EXPORT CUresult cuCtxCreate(CUcontext *out, unsigned int flags, CUdevice device) { CREATE(cuCtxCreate, out, flags, device) }
EXPORT CUresult cuCtxCreate_v2(CUcontext *out, unsigned int flags, CUdevice device) { CREATE(cuCtxCreate_v2, out, flags, device) }
EXPORT CUresult cuCtxCreate_v3(CUcontext *out, void *affinity, int n, unsigned int flags, CUdevice device)
{
    CREATE(cuCtxCreate_v3, out, affinity, n, flags, device)
}
EXPORT CUresult cuCtxCreate_v4(CUcontext *out, void *params, unsigned int flags, CUdevice device)
{
    CREATE(cuCtxCreate_v4, out, params, flags, device)
}

/* destroy ends a context by a call that surely does. */
static CUresult destroy(struct process *p, CUcontext context, CUresult (*call)(CUcontext), CUresult (*reset)(CUdevice), CUdevice device)
{
    struct where w;
    struct taken_list l;
    if (!context_forget(p, context, &w))
        return call ? call(context) : reset(device);
    struct entry e;
    charge_take_all(p, &l, w.context);
    bool charged = context_take(p, &e, w.context);
    CUresult r = call ? call(context) : reset(device);
    if (r == CUDA_SUCCESS) {
        charge_gone_all(p, &l, false);
        if (charged)
            context_gone(p, &e);
    } else {
        uint64_t number = context_number(p, context, w.device);
        if (charged)
            context_back(p, &e, number);
        charge_back_all(p, &l, number);
    }
    return r;
}

EXPORT CUresult cuCtxDestroy_v2(CUcontext context)
{
    struct process *p = ENTER();
    return p && real.cuCtxDestroy_v2 ? destroy(p, context, real.cuCtxDestroy_v2, NULL, 0) : CALL(cuCtxDestroy_v2, context);
}

EXPORT CUresult cuCtxDestroy(CUcontext context)
{
    struct process *p = ENTER();
    return p && real.cuCtxDestroy ? destroy(p, context, real.cuCtxDestroy, NULL, 0) : CALL(cuCtxDestroy, context);
}

/* The primary context is counted from the first retain that we see to the
 * release or reset after which the driver says that it is not active. */

static bool known_device(CUdevice device) { return device >= 0 && device < MAX_DEVICES; }

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *out, CUdevice device)
{
    struct process *p = ENTER();
    struct charge c;
    if (!p || !out || !known_device(device) || __atomic_load_n(&p->primary[device], __ATOMIC_ACQUIRE))
        return CALL(cuDevicePrimaryCtxRetain, out, device);
    enum verdict v = context_begin(p, &c, device);
    if (v == REFUSE && !__atomic_load_n(&p->primary[device], __ATOMIC_ACQUIRE))
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult r = CALL(cuDevicePrimaryCtxRetain, out, device);
    if (v != COUNT)
        return r;
    uint64_t none = 0;
    if (r == CUDA_SUCCESS && __atomic_compare_exchange_n(&p->primary[device], &none, (uintptr_t)*out, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
        context_done(p, &c, *out);
    else
        context_cancel(&c); /* it failed, or another thread was first */
    return r;
}

static CUresult release(struct process *p, CUdevice device, CUresult (*call)(CUdevice))
{
    CUresult r = call(device);
    unsigned int flags;
    int active = 1;
    uint64_t handle = known_device(device) ? __atomic_load_n(&p->primary[device], __ATOMIC_ACQUIRE) : 0;
    if (r != CUDA_SUCCESS || !handle || CALL(cuDevicePrimaryCtxGetState, device, &flags, &active) != CUDA_SUCCESS || active)
        return r;
    if (!__atomic_compare_exchange_n(&p->primary[device], &handle, 0, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
        return r;
    struct where w;
    struct taken_list l;
    if (context_forget(p, (CUcontext)(uintptr_t)handle, &w)) {
        charge_take_all(p, &l, w.context);
        charge_gone_all(p, &l, true);
        struct entry e;
        if (context_take(p, &e, w.context)) {
            count_add(&p->accounts[device].usage->settled, e.bytes);
            context_gone(p, &e);
        }
    }
    pools_settle(p, device);
    return r;
}

EXPORT CUresult cuDevicePrimaryCtxRelease(CUdevice device)
{
    struct process *p = ENTER();
    return p && real.cuDevicePrimaryCtxRelease ? release(p, device, real.cuDevicePrimaryCtxRelease) : CALL(cuDevicePrimaryCtxRelease, device);
}

EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
    struct process *p = ENTER();
    return p && real.cuDevicePrimaryCtxRelease_v2 ? release(p, device, real.cuDevicePrimaryCtxRelease_v2) : CALL(cuDevicePrimaryCtxRelease_v2, device);
}

static CUresult reset(struct process *p, CUdevice device, CUresult (*call)(CUdevice))
{
    uint64_t handle = known_device(device) ? __atomic_exchange_n(&p->primary[device], 0, __ATOMIC_ACQ_REL) : 0;
    if (!handle)
        return call(device);
    CUresult r = destroy(p, (CUcontext)(uintptr_t)handle, NULL, call, device);
    if (r != CUDA_SUCCESS)
        __atomic_store_n(&p->primary[device], handle, __ATOMIC_RELEASE);
    pools_settle(p, device);
    return r;
}

EXPORT CUresult cuDevicePrimaryCtxReset(CUdevice device)
{
    struct process *p = ENTER();
    return p && real.cuDevicePrimaryCtxReset ? reset(p, device, real.cuDevicePrimaryCtxReset) : CALL(cuDevicePrimaryCtxReset, device);
}

EXPORT CUresult cuDevicePrimaryCtxReset_v2(CUdevice device)
{
    struct process *p = ENTER();
    return p && real.cuDevicePrimaryCtxReset_v2 ? reset(p, device, real.cuDevicePrimaryCtxReset_v2) : CALL(cuDevicePrimaryCtxReset_v2, device);
}
