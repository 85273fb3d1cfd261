/* SPDX-License-Identifier: Apache-2.0 */

/* Plain memory: cuMemAlloc, its managed and pitched forms, and cuMemFree. */

#include "export.h"
#include "pool.h"

#define OUT_OF_MEMORY_UNLESS_COUNTED(p, c, bytes, how, pass) \
    switch (charge_begin(p, c, bytes, how)) {                \
    case PASS: return pass;                                  \
    case REFUSE: return CUDA_ERROR_OUT_OF_MEMORY;            \
    case COUNT: break;                                       \
    }

/* Makes the driver's call, then done, which charges what it gave. If done fails, undo
 * frees it again. */
#define RETURN_COUNTED(c, call, done, undo)  \
    do {                                     \
        CUresult r = call;                   \
        if (r != CUDA_SUCCESS) {             \
            charge_failed(p, c);             \
            return r;                        \
        }                                    \
        if (done)                            \
            return r;                        \
        undo;                                \
    } while (charge_again(c));               \
    return CUDA_ERROR_OUT_OF_MEMORY;

HOT EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *at, size_t bytes)
{
    struct process *p = ENTER();
    struct charge c;
    if (!p || !at)
        return CALL(cuMemAlloc_v2, at, bytes);
    OUT_OF_MEMORY_UNLESS_COUNTED(p, &c, bytes, HOW_LARGE, CALL(cuMemAlloc_v2, at, bytes))
    RETURN_COUNTED(&c, CALL(cuMemAlloc_v2, at, bytes), charge_done(p, &c, *at, SPACE_ADDRESS), CALL(cuMemFree_v2, *at))
}

/* The old calls return addresses below 4 GiB, so what they give may lie in blocks of its
 * own. Small allocations are counted like those without an address (HOW_HIDDEN). */
EXPORT CUresult cuMemAlloc(CUdeviceptr_v1 *at, size_v1 bytes)
{
    struct process *p = ENTER();
    struct charge c;
    if (!p || !at)
        return CALL(cuMemAlloc, at, bytes);
    OUT_OF_MEMORY_UNLESS_COUNTED(p, &c, bytes, HOW_HIDDEN, CALL(cuMemAlloc, at, bytes))
    RETURN_COUNTED(&c, CALL(cuMemAlloc, at, bytes), charge_done(p, &c, *at, SPACE_ADDRESS), CALL(cuMemFree, *at))
}

EXPORT CUresult cuMemAllocManaged(CUdeviceptr *at, size_t bytes, unsigned int flags)
{
    struct process *p = ENTER();
    struct charge c;
    if (!p || !at)
        return CALL(cuMemAllocManaged, at, bytes, flags);
    OUT_OF_MEMORY_UNLESS_COUNTED(p, &c, bytes, HOW_MANAGED, CALL(cuMemAllocManaged, at, bytes, flags))
    RETURN_COUNTED(&c, CALL(cuMemAllocManaged, at, bytes, flags), charge_done(p, &c, *at, SPACE_ADDRESS), CALL(cuMemFree_v2, *at))
}

/* The size of a pitched allocation depends on the driver's pitch, which is known only
 * after the call. Pitches have been multiples of 512 bytes so far, so we reserve for the
 * least such pitch. If the driver's is another one, we reserve or cancel the difference
 * after the call. */
enum { PITCH = 512 };

static bool predict(uint64_t width, uint64_t height, uint64_t *bytes)
{
    return !__builtin_mul_overflow(round_up(width, PITCH), height, bytes) && width < MOST;
}

static bool pitched_done(struct process *p, struct charge *c, uint64_t at, uint64_t bytes)
{
    if (bytes < BLOCK && c->how != HOW_LARGE) {
        if (c->how == HOW_SMALL)
            c->bytes = round_up(bytes, UNIT);
        return charge_done(p, c, at, SPACE_ADDRESS);
    }
    uint64_t right = round_up(bytes, BLOCK), had = c->how == HOW_SMALL ? BLOCK : c->bytes;
    if (c->tight)
        return false;
    if (bytes >= MOST) {
        charge_failed(p, c);
        return false;
    }
    if (right > had && !account_reserve(c->a, right - had)) {
        charge_failed(p, c);
        return false;
    }
    if (right < had)
        account_cancel(c->a, had - right);
    if (c->how == HOW_SMALL)
        c->how = HOW_LARGE;
    c->bytes = right;
    return charge_done(p, c, at, SPACE_ADDRESS);
}

EXPORT CUresult cuMemAllocPitch_v2(CUdeviceptr *at, size_t *pitch, size_t width, size_t height, unsigned int element)
{
    struct process *p = ENTER();
    struct charge c;
    uint64_t bytes;
    if (!p || !at || !pitch)
        return CALL(cuMemAllocPitch_v2, at, pitch, width, height, element);
    if (!predict(width, height, &bytes))
        bytes = MOST;
    OUT_OF_MEMORY_UNLESS_COUNTED(p, &c, bytes, HOW_LARGE, CALL(cuMemAllocPitch_v2, at, pitch, width, height, element))
    RETURN_COUNTED(&c, CALL(cuMemAllocPitch_v2, at, pitch, width, height, element), pitched_done(p, &c, *at, *pitch * height), CALL(cuMemFree_v2, *at))
}

EXPORT CUresult cuMemAllocPitch(CUdeviceptr_v1 *at, size_v1 *pitch, size_v1 width, size_v1 height, unsigned int element)
{
    struct process *p = ENTER();
    struct charge c;
    uint64_t bytes;
    if (!p || !at || !pitch)
        return CALL(cuMemAllocPitch, at, pitch, width, height, element);
    if (!predict(width, height, &bytes))
        bytes = MOST;
    OUT_OF_MEMORY_UNLESS_COUNTED(p, &c, bytes, HOW_HIDDEN, CALL(cuMemAllocPitch, at, pitch, width, height, element))
    RETURN_COUNTED(&c, CALL(cuMemAllocPitch, at, pitch, width, height, element), pitched_done(p, &c, *at, (uint64_t)*pitch * height), CALL(cuMemFree, *at))
}

/* free_other frees what is not plain memory of ours. */
COLD static CUresult free_other(struct process *p, CUdeviceptr at)
{
    CUresult r;
    return real.cuMemFree_v2 && pool_free(p, at, &r, real.cuMemFree_v2, NULL, NULL) ? r : uncounted_freed(p, CALL(cuMemFree_v2, at));
}

HOT EXPORT CUresult cuMemFree_v2(CUdeviceptr at)
{
    struct process *p = ENTER();
    struct taken t;
    if (!p)
        return CALL(cuMemFree_v2, at);
    if (__builtin_expect(!charge_take(p, &t, at, SPACE_ADDRESS), 0))
        return free_other(p, at);
    return charge_end(p, &t, CALL(cuMemFree_v2, at));
}

EXPORT CUresult cuMemFree(CUdeviceptr_v1 at)
{
    struct process *p = ENTER();
    struct taken t;
    if (!p || !charge_take(p, &t, at, SPACE_ADDRESS))
        return CALL(cuMemFree, at);
    return charge_end(p, &t, CALL(cuMemFree, at));
}
