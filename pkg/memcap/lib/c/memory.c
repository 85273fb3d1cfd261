/* SPDX-License-Identifier: Apache-2.0 */

/* Plain memory: cuMemAlloc, its managed and pitched forms, and cuMemFree. */

#include "export.h"
#include "pool.h"

/* PLAIN is COUNTED for memory at an address. */
#define PLAIN(bytes, how, undo, ...) \
    COUNTED(at, charge_begin(p, &c, bytes, how), charge_done(p, &c, *at, SPACE_ADDRESS), CALL(undo, *at), __VA_ARGS__)

HOT EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *at, size_t bytes) { PLAIN(bytes, HOW_LARGE, cuMemFree_v2, cuMemAlloc_v2, at, bytes) }

/* The old calls return addresses below 4 GiB, so their memory may lie in blocks of its own. Small
 * allocations are counted like those without an address (HOW_HIDDEN). */
EXPORT CUresult cuMemAlloc(CUdeviceptr_v1 *at, size_v1 bytes) { PLAIN(bytes, HOW_HIDDEN, cuMemFree, cuMemAlloc, at, bytes) }

EXPORT CUresult cuMemAllocManaged(CUdeviceptr *at, size_t bytes, unsigned int flags)
{
    PLAIN(bytes, HOW_MANAGED, cuMemFree_v2, cuMemAllocManaged, at, bytes, flags)
}

/* The size of a pitched allocation depends on the driver's pitch, which is known only after the
 * call. Pitches have been multiples of 512 bytes so far. So we reserve for the least such pitch. If
 * the driver chooses another one, we reserve or cancel the difference after the call. */
enum { PITCH = 512 };

static uint64_t predict(uint64_t width, uint64_t height)
{
    uint64_t bytes;
    return width >= MOST || __builtin_mul_overflow(round_up(width, PITCH), height, &bytes) ? MOST : bytes;
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

#define PITCHED(how, undo, name)                                                                                    \
    COUNTED(at && pitch, charge_begin(p, &c, predict(width, height), how),                                         \
            pitched_done(p, &c, *at, (uint64_t)*pitch * height), CALL(undo, *at), name, at, pitch, width, height, element)

EXPORT CUresult cuMemAllocPitch_v2(CUdeviceptr *at, size_t *pitch, size_t width, size_t height, unsigned int element)
{
    PITCHED(HOW_LARGE, cuMemFree_v2, cuMemAllocPitch_v2)
}

EXPORT CUresult cuMemAllocPitch(CUdeviceptr_v1 *at, size_v1 *pitch, size_v1 width, size_v1 height, unsigned int element)
{
    PITCHED(HOW_HIDDEN, cuMemFree, cuMemAllocPitch)
}

/* free_other frees memory that is not charged as plain memory: that of a pool, or uncounted
 * memory. */
COLD static CUresult free_other(struct process *p, CUdeviceptr at)
{
    CUresult r;
    return real.cuMemFree_v2 && pool_free(p, at, &r, real.cuMemFree_v2, NULL, NULL) ? r : uncounted_freed(p, CALL(cuMemFree_v2, at));
}

HOT EXPORT CUresult cuMemFree_v2(CUdeviceptr at) { FREED(at, SPACE_ADDRESS, free_other(p, at), cuMemFree_v2, at) }
EXPORT CUresult cuMemFree(CUdeviceptr_v1 at) { FREED(at, SPACE_ADDRESS, CALL(cuMemFree, at), cuMemFree, at) }
