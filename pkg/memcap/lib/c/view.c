/* SPDX-License-Identifier: Apache-2.0 */

/* What a program is told about its GPU's memory. The total is the limit. Free is what is
 * left of the limit, but no more than the card has free. */

#include "charge.h"

static uint64_t limit_of(const struct account *a) { return account_limit(a); }

/* info turns the driver's figures into the container's. */
static void info(struct account *a, uint64_t *free, uint64_t *total)
{
    uint64_t limit = limit_of(a), used = account_used(a);
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

EXPORT CUresult cuMemGetInfo_v2(size_t *free, size_t *total)
{
    struct process *p = ENTER();
    struct where at;
    bool refuse;
    CUresult r = CALL(cuMemGetInfo_v2, free, total);
    if (!p || r != CUDA_SUCCESS || !where(p, &at))
        return r;
    struct account *a = account_of(p, at.device, &refuse);
    uint64_t f = free ? *free : 0, t = total ? *total : 0; /* a program may ask for one of them */
    if (a)
        info(a, &f, &t);
    else if (refuse)
        f = 0;
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
    struct where at;
    bool refuse;
    size_t f, t;
    CUresult r = CALL(cuMemGetInfo, free, total);
    if (!p || r != CUDA_SUCCESS || !where(p, &at))
        return r;
    struct account *a = account_of(p, at.device, &refuse);
    if (refuse && free)
        *free = 0;
    if (!a || CALL(cuMemGetInfo_v2, &f, &t) != CUDA_SUCCESS)
        return r;
    uint64_t free64 = f, total64 = t;
    info(a, &free64, &total64);
    if (free)
        *free = clip(free64);
    if (total)
        *total = clip(total64);
    return r;
}

EXPORT CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device)
{
    struct process *p = ENTER();
    bool refuse;
    CUresult r = CALL(cuDeviceTotalMem_v2, bytes, device);
    if (!p || r != CUDA_SUCCESS || !bytes)
        return r;
    struct account *a = account_of(p, device, &refuse);
    if (a && limit_of(a) < *bytes)
        *bytes = limit_of(a);
    return r;
}

EXPORT CUresult cuDeviceTotalMem(size_v1 *bytes, CUdevice device)
{
    struct process *p = ENTER();
    bool refuse;
    CUresult r = CALL(cuDeviceTotalMem, bytes, device);
    if (!p || r != CUDA_SUCCESS || !bytes)
        return r;
    struct account *a = account_of(p, device, &refuse);
    if (a && limit_of(a) < *bytes)
        *bytes = clip(limit_of(a));
    return r;
}
