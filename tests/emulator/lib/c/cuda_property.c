/* SPDX-License-Identifier: Apache-2.0 */

/* What an allocation type and a location mean together, by CUDA version, and the
 * pools that go with them. Numbers and layouts: cuda.h's as bindings of 13.2 have
 * them (rust and cuda-python) and, of 13.4, NVIDIA's CCCL, whose locality domain
 * benchmark declares them for older headers (type 6, attribute 147). The sentences
 * in quotes are of the "CUDA Driver API 13.4": cuMemCreate, cuMemPoolCreate and
 * its neighbours. */
#include <string.h>

#include "cuda_internal.h"
#include "cuda_switch.h"

enum { WITH_MANAGED_POOLS = 13000, WITH_POOL_PROPERTIES = 13020, WITH_DOMAINS = 13040, NUMA_NODES = 8 };

int locality_domains(const struct device *d)
{
    (void)d;
    return driver_version() >= WITH_DOMAINS ? switches.domains : 0;
}

static CUresult managed(enum purpose purpose, struct property *p)
{
    /* Whether cuMemCreate takes this type the documentation does not say. */
    MUST(driver_version() >= WITH_MANAGED_POOLS && (purpose == FOR_POOL || switches.managed_create == MANAGED_CREATE_MADE));
    p->backing = BACKED_BY_MANAGED;
    switch (p->location.type) {
    case CU_MEM_LOCATION_TYPE_NONE: /* "to indicate no preferred location" */
    case CU_MEM_LOCATION_TYPE_HOST:
        p->location.id = 0;
        return CUDA_SUCCESS;
    case CU_MEM_LOCATION_TYPE_HOST_NUMA:
        MUST(p->location.id >= 0 && p->location.id < NUMA_NODES);
        return CUDA_SUCCESS;
    case CU_MEM_LOCATION_TYPE_DEVICE:
        MUST(p->location.id >= 0 && p->location.id < device_count);
        p->device = p->location.id;
        return CUDA_SUCCESS;
    default: /* "CU_MEM_ALLOCATION_TYPE_MANAGED can not be used with CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN." */
        return CUDA_ERROR_INVALID_VALUE;
    }
}

CUresult property_of(int type, const CUmemLocation *location, enum purpose purpose, struct property *p)
{
    *p = (struct property){.location = *location};
    if (type == CU_MEM_ALLOCATION_TYPE_MANAGED)
        return managed(purpose, p);
    MUST(type == CU_MEM_ALLOCATION_TYPE_PINNED);
    switch (location->type) {
    case CU_MEM_LOCATION_TYPE_DEVICE:
        MUST(location->id >= 0 && location->id < device_count);
        p->device = location->id;
        return CUDA_SUCCESS;
    case CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN:
        /* "The locality domain ID must be a valid locality domain ID for the
         * specified device." The memory is the device's, whichever domain it is in. */
        p->device = location->localized.deviceId;
        MUST(p->device < device_count && location->localized.localityDomainId < locality_domains(&devices[p->device]));
        p->location.id &= 0xFFFF;
        return CUDA_SUCCESS;
    case CU_MEM_LOCATION_TYPE_HOST: /* "CUmemLocation::id is ignored" */
        p->location.id = 0;
        p->backing = BACKED_BY_HOST;
        return CUDA_SUCCESS;
    case CU_MEM_LOCATION_TYPE_HOST_NUMA:
        MUST(location->id >= 0 && location->id < NUMA_NODES);
        p->backing = BACKED_BY_HOST;
        return CUDA_SUCCESS;
    default:
        /* "Specifying CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT […] will result in
         * CUDA_ERROR_INVALID_VALUE"; NONE is for managed memory, and INVISIBLE is
         * what an imported pool may say of itself, not what can be asked for. */
        return CUDA_ERROR_INVALID_VALUE;
    }
}

CUresult property_attribute(const CUmemPoolProps *props, int attribute, void *value)
{
    MUST(driver_version() >= WITH_POOL_PROPERTIES);
    bool domain = props->location.type == CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN;
    switch (attribute) {
    case CU_MEMPOOL_ATTR_ALLOCATION_TYPE: *(int *)value = props->allocType; break;
    case CU_MEMPOOL_ATTR_EXPORT_HANDLE_TYPES: *(int *)value = props->handleTypes; break;
    case CU_MEMPOOL_ATTR_LOCATION_ID: *(int *)value = domain ? props->location.localized.deviceId : props->location.id; break;
    case CU_MEMPOOL_ATTR_LOCATION_TYPE: *(int *)value = props->location.type; break;
    case CU_MEMPOOL_ATTR_MAX_POOL_SIZE: *(cuuint64_t *)value = pool_max_size(props); break;
    case CU_MEMPOOL_ATTR_HW_DECOMPRESS_ENABLED: *(int *)value = 0; break;
    default: return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

/* --- pools by their properties ---------------------------------------------- */

API CUresult cuMemPoolCreate(CUmemoryPool *out, const CUmemPoolProps *props)
{
    struct property of;
    TRY(ready());
    MUST(out && props);
    TRY(property_of(props->allocType, &props->location, FOR_POOL, &of));
    /* "Pools created with the type CU_MEM_LOCATION_TYPE_HOST are not IPC capable and
     * CUmemPoolProps::handleTypes must be 0, any other values will result in
     * CUDA_ERROR_INVALID_VALUE." */
    MUST(of.location.type != CU_MEM_LOCATION_TYPE_HOST || !props->handleTypes);
    /* Managed: "CUmemAllocationHandleType must also be set to CU_MEM_HANDLE_TYPE_NONE
     * since IPC is not supported", "maxSize must be set to zero", "usage should be
     * zero as decompress for managed memory is not supported". */
    MUST(of.backing != BACKED_BY_MANAGED || (!props->handleTypes && !props->maxSize && !props->usage));
    /* A field that came with CUDA 12.2 (intel/llvm, pull request 17733); before, it was "reserved for future use, must be 0". */
    MUST(!props->maxSize || driver_version() >= 12020);
    if (props->handleTypes & ~CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        return CUDA_ERROR_NOT_SUPPORTED;
    CUmemPoolProps made = *props;
    /* "On devices with a single locality domain, a memory pool created with
     * CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN and localityDomainId 0 is equivalent
     * to a full-device memory pool created with CU_MEM_LOCATION_TYPE_DEVICE." */
    if (of.location.type == CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN && locality_domains(&devices[of.device]) == 1)
        of.location = (CUmemLocation){.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = of.device};
    lock();
    struct pool *p = pool_new(&made, &of, false);
    unlock();
    *out = (CUmemoryPool)p;
    return p ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

/* A place has a default pool and a current one. Those of the devices' pinned
 * memory are with the devices, all others here, made when first asked for. */
static struct place {
    int type;
    CUmemLocation location;
    struct pool *normal, *now;
} places[MAX_DEVICES * 8];
static int place_count;

static bool is_device(int type, const CUmemLocation *l) { return type == CU_MEM_ALLOCATION_TYPE_PINNED && l->type == CU_MEM_LOCATION_TYPE_DEVICE; }

static struct place *place_of(int type, const struct property *of)
{
    for (int i = 0; i < place_count; i++)
        if (places[i].type == type && places[i].location.type == of->location.type && places[i].location.id == of->location.id)
            return &places[i];
    CUmemPoolProps props = {.allocType = type, .location = of->location};
    struct pool *p = place_count < (int)(sizeof places / sizeof *places) ? pool_new(&props, of, true) : NULL;
    if (!p)
        return NULL;
    places[place_count] = (struct place){.type = type, .location = of->location, .normal = p, .now = p};
    return &places[place_count++];
}

static CUresult pool_of(int type, const CUmemLocation *location, CUmemoryPool *out, bool normal)
{
    struct property of;
    TRY(ready());
    MUST(out && location);
    TRY(property_of(type, location, FOR_POOL, &of));
    lock();
    struct place *at = is_device(type, &of.location) ? NULL : place_of(type, &of);
    const struct device *d = &devices[of.device];
    struct pool *p = is_device(type, &of.location) ? (normal ? d->default_pool : d->pool) : !at ? NULL : normal ? at->normal : at->now;
    unlock();
    *out = (CUmemoryPool)p;
    return p ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

API CUresult cuMemGetDefaultMemPool(CUmemoryPool *out, CUmemLocation *location, int type) { return pool_of(type, location, out, true); }
API CUresult cuMemGetMemPool(CUmemoryPool *out, CUmemLocation *location, int type) { return pool_of(type, location, out, false); }

/* "The location and allocation type specified must match those of the pool
 * otherwise CUDA_ERROR_INVALID_VALUE is returned." */
static CUresult pool_set(int type, const CUmemLocation *location, CUmemoryPool handle)
{
    struct property of;
    TRY(ready());
    MUST(location);
    TRY(property_of(type, location, FOR_POOL, &of));
    lock();
    struct pool *p = pool_find(handle);
    const CUmemPoolProps *has = p ? pool_props(p) : NULL;
    bool ok = p && !pool_imported(p) && has->allocType == type && has->location.type == of.location.type && has->location.id == of.location.id;
    struct place *at = ok && !is_device(type, &of.location) ? place_of(type, &of) : NULL;
    if (ok && is_device(type, &of.location))
        devices[of.device].pool = p;
    else if (at)
        at->now = p;
    else
        ok = false;
    unlock();
    return ok ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API CUresult cuMemSetMemPool(CUmemLocation *location, int type, CUmemoryPool pool) { return pool_set(type, location, pool); }

/* "Destroying the current mempool of a device sets the default mempool of that
 * device as the current mempool for that device." */
void property_forget(const struct pool *p)
{
    for (int i = 0; i < device_count; i++)
        if (devices[i].pool == p)
            devices[i].pool = devices[i].default_pool;
    for (int i = 0; i < place_count; i++)
        if (places[i].now == p)
            places[i].now = places[i].normal;
}

static CUresult device_pool(CUmemoryPool *out, CUdevice device, bool normal)
{
    struct device *d;
    TRY(find_device(device, &d));
    CUmemLocation location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device};
    return pool_of(CU_MEM_ALLOCATION_TYPE_PINNED, &location, out, normal);
}

API CUresult cuDeviceGetDefaultMemPool(CUmemoryPool *out, CUdevice device) { return device_pool(out, device, true); }
API CUresult cuDeviceGetMemPool(CUmemoryPool *out, CUdevice device) { return device_pool(out, device, false); }

/* "If the location type is CU_MEM_LOCATION_TYPE_DEVICE and the allocation type is
 * CU_MEM_ALLOCATION_TYPE_PINNED, then [cuMemSetMemPool] is the equivalent of calling
 * cuDeviceSetMemPool with the location id as the device." */
API CUresult cuDeviceSetMemPool(CUdevice device, CUmemoryPool handle)
{
    struct device *d;
    TRY(find_device(device, &d));
    CUmemLocation location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device};
    return pool_set(CU_MEM_ALLOCATION_TYPE_PINNED, &location, handle);
}
