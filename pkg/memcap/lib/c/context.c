/* SPDX-License-Identifier: Apache-2.0 */

/* Contexts. A context takes memory before anything is allocated in it. How much depends on the GPU,
 * the driver and the program. So a context is charged the estimate of the limit page, and the
 * agent's reading of the driver corrects that later. When a context ends, all that was allocated in
 * it ends too. */

#include "pool.h"

static bool known_device(CUdevice device) { return device >= 0 && device < MAX_DEVICES; }

/* A context's charge is an entry in the table. The context's number is its key and its owner. */

/* await_turn waits if a limit page of the device holds newcomers. A GPU without a limit has a page,
 * too. */
static void await_turn(const struct process *p, CUdevice device)
{
    const struct account *first = known_device(device) ? &p->accounts[device] : NULL;
    for (const struct account *a = first; a && a->page; a = a == first ? a->others : a->next)
        if (__builtin_expect(is_held(a->page), 0))
            newcomer_waits_on(a->page->uuid);
}

static enum verdict context_begin(struct process *p, struct charge *c, CUdevice device)
{
    bool refuse;
    *c = (struct charge){.at.device = device, .a = account_of(p, device, &refuse)};
    await_turn(p, device);
    if (!c->a)
        return PASS; /* what cannot be counted is refused when the program allocates in the context */
    uint64_t bytes = __atomic_load_n(&c->a->page->context, __ATOMIC_RELAXED);
    c->bytes = bytes < MOST ? round_up(bytes, UNIT) : 0;
    return !c->bytes || account_reserve(c->a, c->bytes) ? COUNT : REFUSE;
}

static bool context_done(struct process *p, struct charge *c, CUcontext context)
{
    uint64_t number = context_number(p, context, c->at.device);
    struct entry e = {.key = number, .bytes = c->bytes, .owner = number, .space = SPACE_CONTEXT, .how = HOW_WHOLE, .device = c->at.device};
    struct slot *s = c->a->slot;
    count_add(&s->expected, c->bytes);
    count_add(&s->contexts, 1);
    account_commit(c->a, c->bytes);
    account_guessed(c->a);
    __atomic_store_n(&c->a->begun, now_us(), __ATOMIC_RELAXED);
    account_unmeasured(c->a, 0);
    table_put(&p->table, &e, NULL); /* without memory for the entry, it stays charged until the process ends */
    mps_made(p, c->at.device);
    return true;
}

#define CREATE(name, ...)                            \
    if (mps_refuses(ENTER(), device))                \
        return CUDA_ERROR_MPS_CONNECTION_FAILED;     \
    COUNTED(out, context_begin(p, &c, device), context_done(p, &c, *out), , name, __VA_ARGS__)

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

/* Contexts for programs that use OpenGL or VDPAU. They end as all others do. */
EXPORT CUresult cuGLCtxCreate(CUcontext *out, unsigned int flags, CUdevice device) { CREATE(cuGLCtxCreate, out, flags, device) }
EXPORT CUresult cuGLCtxCreate_v2(CUcontext *out, unsigned int flags, CUdevice device) { CREATE(cuGLCtxCreate_v2, out, flags, device) }
EXPORT CUresult cuVDPAUCtxCreate(CUcontext *out, unsigned int flags, CUdevice device, uint32_t vdpau, void *find)
{
    CREATE(cuVDPAUCtxCreate, out, flags, device, vdpau, find)
}
EXPORT CUresult cuVDPAUCtxCreate_v2(CUcontext *out, unsigned int flags, CUdevice device, uint32_t vdpau, void *find)
{
    CREATE(cuVDPAUCtxCreate_v2, out, flags, device, vdpau, find)
}

/* What ends with a context is taken out of the table before the call that may end the context.
 * After the call it is given back or, if the context lives on, put back into the table. */
struct ending {
    bool known;
    struct where w;
    struct taken_list l;
};

static void ending_begin(struct process *p, struct ending *x, CUcontext context)
{
    *x = (struct ending){.known = false};
    x->known = context_forget(p, context, &x->w);
    if (x->known)
        charge_take_all(p, &x->l, x->w.context);
}

static void ending_end(struct process *p, struct ending *x, CUcontext context, bool gone)
{
    if (x->known && gone)
        charge_gone_all(p, &x->l);
    else if (x->known)
        charge_back_all(p, &x->l, context_number(p, context, x->w.device));
}

static CUresult destroy(struct process *p, CUcontext context, CUresult (*call)(CUcontext))
{
    struct ending x;
    ending_begin(p, &x, context);
    CUresult r = call(context);
    ending_end(p, &x, context, r == CUDA_SUCCESS);
    return r;
}

EXPORT CUresult cuCtxDestroy_v2(CUcontext context) { OVER(cuCtxDestroy_v2, destroy, context) }

EXPORT CUresult cuCtxDestroy(CUcontext context) { OVER(cuCtxDestroy, destroy, context) }

/* The primary context is counted from the first retain that we see. It is counted until the driver
 * answers, after a release or reset, that the context is not active. */

static CUresult retain(struct process *p, CUcontext *out, CUdevice device)
{
    CUresult r = CALL(cuDevicePrimaryCtxRetain, out, device);
    if (r == CUDA_SUCCESS)
        __atomic_add_fetch(&p->primary_refs[device], 1, __ATOMIC_ACQ_REL);
    return r;
}

/* retain_primary counts the context if this is the first retain. */
static CUresult retain_primary(struct process *p, CUcontext *out, CUdevice device)
{
    struct charge c;
    if (__atomic_load_n(&p->primary[device], __ATOMIC_ACQUIRE))
        return retain(p, out, device);
    if (mps_refuses(p, device))
        return CUDA_ERROR_MPS_CONNECTION_FAILED;
    enum verdict v = context_begin(p, &c, device);
    if (v == REFUSE && !__atomic_load_n(&p->primary[device], __ATOMIC_ACQUIRE))
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult r = retain(p, out, device);
    if (v != COUNT)
        return r;
    uint64_t none = 0;
    if (r == CUDA_SUCCESS && __atomic_compare_exchange_n(&p->primary[device], &none, (uintptr_t)*out, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
        context_done(p, &c, *out);
    else
        charge_failed(p, &c); /* the call failed, or another thread has counted the context */
    return r;
}

EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *out, CUdevice device)
{
    struct process *p = ENTER();
    return p && out && known_device(device) ? retain_primary(p, out, device) : CALL(cuDevicePrimaryCtxRetain, out, device);
}

static bool is_active(CUdevice device)
{
    unsigned int flags;
    int active = 1;
    return CALL(cuDevicePrimaryCtxGetState, device, &flags, &active) != CUDA_SUCCESS || active;
}

/* end_primary makes a call that may end the primary context. If surely is true, the context has
 * ended once the call succeeds. Otherwise the driver is asked whether it has. */
static CUresult end_primary(struct process *p, CUdevice device, uint64_t handle, CUresult (*call)(CUdevice), bool surely)
{
    struct ending x;
    CUcontext context = (CUcontext)(uintptr_t)handle;
    ending_begin(p, &x, context);
    CUresult r = call(device);
    bool gone = r == CUDA_SUCCESS && (surely || !is_active(device));
    ending_end(p, &x, context, gone);
    if (gone)
        __atomic_store_n(&p->primary_refs[device], 0, __ATOMIC_RELEASE);
    else
        __atomic_store_n(&p->primary[device], handle, __ATOMIC_RELEASE);
    pools_settle(p, device);
    return r;
}

/* primary_gone is for a primary context that has ended without our expecting it. Its memory was
 * gone before we take it off, so it gives no room before the next reading (settled). */
static void primary_gone(struct process *p, CUdevice device)
{
    uint64_t handle = __atomic_exchange_n(&p->primary[device], 0, __ATOMIC_ACQ_REL);
    struct ending x;
    if (!handle)
        return;
    ending_begin(p, &x, (CUcontext)(uintptr_t)handle);
    for (size_t i = 0; i < x.l.length; i++)
        count_add(&p->accounts[device].usage->settled, x.l.list[i].held);
    ending_end(p, &x, NULL, true);
    pools_settle(p, device);
}

static CUresult release(struct process *p, CUdevice device, CUresult (*call)(CUdevice))
{
    uint64_t handle = known_device(device) ? __atomic_load_n(&p->primary[device], __ATOMIC_ACQUIRE) : 0;
    if (!handle)
        return call(device);
    /* Is this the last release, as far as we have seen the retains? */
    if (__atomic_load_n(&p->primary_refs[device], __ATOMIC_ACQUIRE) <= 1 &&
        __atomic_compare_exchange_n(&p->primary[device], &handle, 0, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
        return end_primary(p, device, handle, call, false);
    CUresult r = call(device);
    if (r == CUDA_SUCCESS)
        __atomic_sub_fetch(&p->primary_refs[device], 1, __ATOMIC_ACQ_REL);
    if (r != CUDA_SUCCESS || is_active(device))
        return r;
    primary_gone(p, device);
    return r;
}

EXPORT CUresult cuDevicePrimaryCtxRelease(CUdevice device) { OVER(cuDevicePrimaryCtxRelease, release, device) }

EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) { OVER(cuDevicePrimaryCtxRelease_v2, release, device) }

static CUresult reset(struct process *p, CUdevice device, CUresult (*call)(CUdevice))
{
    uint64_t handle = known_device(device) ? __atomic_exchange_n(&p->primary[device], 0, __ATOMIC_ACQ_REL) : 0;
    return handle ? end_primary(p, device, handle, call, true) : call(device);
}

EXPORT CUresult cuDevicePrimaryCtxReset(CUdevice device) { OVER(cuDevicePrimaryCtxReset, reset, device) }

EXPORT CUresult cuDevicePrimaryCtxReset_v2(CUdevice device) { OVER(cuDevicePrimaryCtxReset_v2, reset, device) }

/* A green context uses the memory of the primary context. It retains the primary context, and
 * releases it when it is destroyed. We retain the primary context before it does, so that the
 * primary context is counted. We release it once the green context has retained it. What the green
 * context takes by itself is small, and the next reading includes it. */
EXPORT CUresult cuGreenCtxCreate(void **out, void *desc, CUdevice device, unsigned int flags)
{
    struct process *p = ENTER();
    CUcontext primary;
    if (!p || !known_device(device) || !real.cuGreenCtxCreate || !real.cuDevicePrimaryCtxRelease_v2)
        return CALL(cuGreenCtxCreate, out, desc, device, flags);
    CUresult r = retain_primary(p, &primary, device);
    if (r != CUDA_SUCCESS)
        return r;
    r = real.cuGreenCtxCreate(out, desc, device, flags);
    release(p, device, real.cuDevicePrimaryCtxRelease_v2);
    return r;
}

EXPORT CUresult cuGreenCtxDestroy(void *green)
{
    struct process *p = ENTER();
    CUresult r = CALL(cuGreenCtxDestroy, green);
    for (CUdevice d = 0; p && r == CUDA_SUCCESS && d < MAX_DEVICES; d++)
        if (__atomic_load_n(&p->primary[d], __ATOMIC_ACQUIRE) && !is_active(d))
            primary_gone(p, d);
    return r;
}
