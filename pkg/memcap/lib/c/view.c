/* SPDX-License-Identifier: Apache-2.0 */

/* What a program sees of its GPU's memory. The total is the limit. Free is what is left of the
 * limit, but at most what the card has free. */

#include "charge.h"

/* info turns the driver's figures into the container's. */
static void info(struct account *a, uint64_t *free, uint64_t *total)
{
    uint64_t limit = account_limit(a), used = account_used(a);
    if (limit == NO_LIMIT)
        return;
    for (struct account *b = a->others; b; b = b->next)
        used += account_used(b);
    if (limit < *total)
        *total = limit;
    uint64_t left = limit > used ? limit - used : 0;
    if (left < *free)
        *free = left;
}

/* changed replaces the driver's figures for the current context by the container's. False: there is
 * nothing to change. */
static bool changed(struct process *p, uint64_t *free, uint64_t *total)
{
    struct where at;
    bool refuse = false;
    struct account *a = p && where(p, &at) ? account_of(p, at.device, &refuse) : NULL;
    if (a)
        info(a, free, total);
    else if (refuse)
        *free = 0;
    return a || refuse;
}

EXPORT CUresult cuMemGetInfo_v2(size_t *free, size_t *total)
{
    struct process *p = ENTER();
    CUresult r = CALL(cuMemGetInfo_v2, free, total);
    uint64_t f = free ? *free : 0, t = total ? *total : 0; /* a program may ask for one of them */
    if (r != CUDA_SUCCESS || !changed(p, &f, &t))
        return r;
    if (free)
        *free = f;
    if (total)
        *total = t;
    return r;
}

static size_v1 clip(uint64_t n) { return n < UINT32_MAX ? (size_v1)n : UINT32_MAX; }

EXPORT CUresult cuMemGetInfo(size_v1 *free, size_v1 *total)
{
    struct process *p = ENTER();
    uint64_t f, t;
    CUresult r = CALL(cuMemGetInfo, free, total);
    if (r != CUDA_SUCCESS || CALL(cuMemGetInfo_v2, &f, &t) != CUDA_SUCCESS || !changed(p, &f, &t))
        return r;
    if (free)
        *free = clip(f);
    if (total)
        *total = clip(t);
    return r;
}

/* total_of returns a device's limit, or bytes if that is less. */
static uint64_t total_of(struct process *p, CUdevice device, uint64_t bytes)
{
    bool refuse;
    struct account *a = account_of(p, device, &refuse);
    return a && account_limit(a) < bytes ? account_limit(a) : bytes;
}

EXPORT CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device)
{
    THEN(cuDeviceTotalMem_v2, if (bytes) *bytes = total_of(p, device, *bytes), bytes, device)
}

EXPORT CUresult cuDeviceTotalMem(size_v1 *bytes, CUdevice device)
{
    THEN(cuDeviceTotalMem, if (bytes) *bytes = clip(total_of(p, device, *bytes)), bytes, device)
}
