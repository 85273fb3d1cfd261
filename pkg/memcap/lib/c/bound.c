/* SPDX-License-Identifier: Apache-2.0 */

/* Pools that the driver itself keeps within the cap. The driver lets a pool grow before it uses
 * again what another stream has freed. On a card of the cap's size the pool could not grow, so the
 * driver would use that memory at once. To get the same behaviour, we give a pool a greatest size
 * (CUmemPoolProps.maxSize): the cap without the contexts of this process. A pool of its greatest
 * size cannot grow. So an allocation from it needs no reservation, no attempt and no trimming. That
 * saves much time, because a driver takes a thousand times as long to map memory as to use it
 * again.
 *
 * The greatest size of a pool cannot be changed later, and must not make the driver refuse what
 * would fit. So we set it only after an exact reading, and do not subtract what other processes
 * have. If they or this process take more later, the pool may want to grow by more than there is
 * room for. We then treat it like a pool without a greatest size.
 *
 * A device's default pool cannot have a greatest size. So we make another pool that replaces it,
 * before the program first asks for the default pool or allocates from it. That pool becomes the
 * current one, and the program gets it when it asks for the default pool. Pools that other
 * processes can open, and pools that belong to no device, are left as they are. */

#include "pool.h"

/* obeys finds out, once, whether the driver enforces a greatest size, as drivers do since CUDA
 * 12.2. It also finds out whether the driver rounds the size up to whole pieces (OBEYS_BY_PIECES).
 * The current context must be on that device. */
static uint32_t obeys(struct process *p, struct account *a, CUdevice device)
{
    CUpoolprops props = {.type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device}, .most = BLOCK};
    uint32_t known = __atomic_load_n(&p->obeys, __ATOMIC_ACQUIRE);
    CUmempool pool;
    CUdeviceptr small, large;
    if (known || !account_reserve_quickly(a, 3 * PIECE))
        return known;
    known = OBEYS_NOT;
    if (CALL(cuMemPoolCreate, &pool, &props) == CUDA_SUCCESS) {
        bool rounds = CALL(cuMemAllocFromPoolAsync, &small, PIECE, pool, CU_STREAM_LEGACY) == CUDA_SUCCESS;
        CUresult r = CALL(cuMemAllocFromPoolAsync, &large, 2 * PIECE, pool, CU_STREAM_LEGACY);
        if (r == CUDA_ERROR_OUT_OF_MEMORY)
            known = rounds ? OBEYS_BY_PIECES : OBEYS;
        if (r == CUDA_SUCCESS)
            CALL(cuMemFree_v2, large);
        if (rounds)
            CALL(cuMemFree_v2, small);
        CALL(cuMemPoolDestroy, pool);
    }
    account_cancel(a, 3 * PIECE);
    __atomic_store_n(&p->obeys, known, __ATOMIC_RELEASE);
    return known;
}

/* most_for returns the greatest size for a new pool of a device, in bytes; 0: none. */
static uint64_t most_for(struct process *p, CUdevice device)
{
    bool refuse;
    struct where w;
    struct account *a = account_of(p, device, &refuse);
    if (!a || account_unlimited(a) || a->others || !where(p, &w) || w.device != device)
        return 0; /* with several shares, it is not known to the byte what can be borrowed */
    int mode;
    CUresult relaxed = relax(&mode);
    uint64_t step = 0, bit = (uint64_t)1 << device, ceiling = 0;
    switch (obeys(p, a, device)) {
    case OBEYS: step = BLOCK; break;
    case OBEYS_BY_PIECES: step = PIECE; break;
    }
    if (step)
        ceiling = account_exactly(a, !(__atomic_fetch_or(&p->exacted, bit, __ATOMIC_RELAXED) & bit));
    uint64_t contexts = __atomic_load_n(&a->slot->expected, __ATOMIC_RELAXED);
    unrelax(relaxed, &mode);
    return ceiling > contexts ? (ceiling - contexts) / step * step : 0;
}

CUresult bound_create(struct process *p, CUmempool *out, const CUpoolprops *props, CUdevice device, uint64_t *most)
{
    *most = most_for(p, device);
    if (*most && (!props->most || props->most > *most)) {
        CUpoolprops bounded = *props;
        bounded.most = *most;
        CUresult r = CALL(cuMemPoolCreate, out, &bounded);
        if (r == CUDA_SUCCESS)
            return r;
    }
    *most = 0;
    return CALL(cuMemPoolCreate, out, props);
}

/* --- the default pool -------------------------------------------------------- */

/* stand_in makes the pool that replaces a device's default pool. NULL: the device keeps its own. */
static CUmempool stand_in(struct process *p, CUdevice device)
{
    CUmempool normal, now, made;
    uint64_t there, most;
    CUpoolprops props = {.type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device}};
    if (CALL(cuDeviceGetDefaultMemPool, &normal, device) != CUDA_SUCCESS || CALL(cuDeviceGetMemPool, &now, device) != CUDA_SUCCESS || now != normal ||
        CALL(cuMemPoolGetAttribute, normal, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &there) != CUDA_SUCCESS || there)
        return NULL;
    if (bound_create(p, &made, &props, device, &most) != CUDA_SUCCESS)
        return NULL;
    if (most && pool_new(p, made, MEANS_COUNTED, device, most) && CALL(cuDeviceSetMemPool, device, made) == CUDA_SUCCESS)
        return made;
    CALL(cuMemPoolDestroy, made);
    return NULL;
}

CUmempool bound_default(struct process *p, CUdevice device)
{
    if (device < 0 || device >= MAX_DEVICES)
        return NULL;
    uint64_t *at = &p->stands_in[device], is = __atomic_load_n(at, __ATOMIC_ACQUIRE);
    if (is)
        return is == NO_STAND_IN ? NULL : (CUmempool)(uintptr_t)is;
    spin_lock(&p->standing_in);
    if (!(is = __atomic_load_n(at, __ATOMIC_ACQUIRE))) {
        CUmempool made = stand_in(p, device);
        __atomic_store_n(at, is = made ? (uintptr_t)made : NO_STAND_IN, __ATOMIC_RELEASE);
    }
    spin_unlock(&p->standing_in);
    return is == NO_STAND_IN ? NULL : (CUmempool)(uintptr_t)is;
}

void bound_again(struct process *p, CUdevice device)
{
    CUmempool normal, now;
    uint64_t in = device >= 0 ? __atomic_load_n(&p->stands_in[device], __ATOMIC_ACQUIRE) : 0;
    if (in && in != NO_STAND_IN && CALL(cuDeviceGetDefaultMemPool, &normal, device) == CUDA_SUCCESS &&
        CALL(cuDeviceGetMemPool, &now, device) == CUDA_SUCCESS && now == normal)
        CALL(cuDeviceSetMemPool, device, (CUmempool)(uintptr_t)in);
}
