/* SPDX-License-Identifier: Apache-2.0 */

/* How memory is counted, by the properties of an allocation or a pool. Only this file decides that,
 * for cuMemCreate, pools and graphs alike, by what the properties mean:
 *
 *     managed memory           is counted as managed: the driver's figures do not include
 *                              it, and it moves to the GPU that touches it
 *     pinned, on the host      is not counted: it is not GPU memory
 *     pinned, not on the host  is counted
 *     anything else            is unknown: no header that we know has a name for its location
 *                              or its allocation type. It is refused, or under the open
 *                              policy passed and reported (property_unknown)
 *
 * The driver should refuse the allocation type 0 (INVALID). If it does not, the memory is counted.
 * The location INVISIBLE (CUDA 13.2) is that of a pool which was imported from a process whose GPU
 * this process does not see. Its memory is counted for its exporter, so it is not counted here. */
#ifndef CAP_PROPERTY_H
#define CAP_PROPERTY_H

#include "process.h"

enum means { MEANS_NOTHING, MEANS_COUNTED, MEANS_MANAGED, MEANS_UNKNOWN };

/* The location names no device. Then the current context's device counts, or the first device if
 * there is no context. */
enum { DEVICE_CURRENT = -1 };

/* property_means returns how memory of that type at that location is counted. It sets *device to
 * the device that the memory is counted on, or to DEVICE_CURRENT. That is the program's own number;
 * the driver decides whether there is such a device. */
static inline enum means property_means(int type, const CUlocation *l, CUdevice *device)
{
    /* Since CUDA 13.4 the id is a union. For a locality domain, its first byte is the device's
     * number and its second byte the domain's. */
    *device = l->type == CU_MEM_LOCATION_TYPE_DEVICE                   ? l->id
              : l->type == CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN ? l->id & 0xFF
                                                                       : DEVICE_CURRENT;
    if (type == CU_MEM_ALLOCATION_TYPE_MANAGED)
        return MEANS_MANAGED;
    if (type != CU_MEM_ALLOCATION_TYPE_PINNED && type != CU_MEM_ALLOCATION_TYPE_INVALID)
        return MEANS_UNKNOWN;
    switch (l->type) {
    case CU_MEM_LOCATION_TYPE_HOST:
    case CU_MEM_LOCATION_TYPE_HOST_NUMA:
    case CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT:
    case CU_MEM_LOCATION_TYPE_INVISIBLE: return MEANS_NOTHING;
    case CU_MEM_LOCATION_TYPE_NONE:
    case CU_MEM_LOCATION_TYPE_DEVICE:
    case CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN: return MEANS_COUNTED;
    default: return MEANS_UNKNOWN;
    }
}

/* property_place finds the device and context that memory is counted on. device is what
 * property_means returned. */
static inline void property_place(struct process *p, CUdevice device, struct where *w)
{
    *w = (struct where){.device = device};
    if (device == DEVICE_CURRENT && !where(p, w))
        *w = (struct where){.device = 0};
}

/* Call property_unknown once before each call with MEANS_UNKNOWN. True: refuse the call with out
 * of memory. False: pass it on uncounted. The usage page counts such calls (uncounted). */
bool property_unknown(struct process *p, CUdevice device);

#endif
