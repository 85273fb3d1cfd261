/* SPDX-License-Identifier: Apache-2.0 */

/* What the properties of an allocation or a pool mean for the count. This is the
 * one place that decides it, for cuMemCreate, pools and graphs alike. It goes by
 * what a property means, never by one value of it:
 *
 *     managed, wherever        counts as managed: the driver's figures lack it, and
 *                              it moves to the GPU that touches it
 *     pinned, on the host      does not count: it is no GPU's memory
 *     pinned, not on the host  counts
 *     pinned, where no header that we know has a name for, or an allocation type
 *     without a name           unknown: refused, or under the open policy passed
 *                              and reported (property_unknown)
 *
 * INVALID (a type of 0) is the driver's to refuse, and counts should it not.
 * INVISIBLE (CUDA 13.2) is where an imported pool lies of a GPU that this process
 * does not see: its exporter's, so it does not count. */
#ifndef CAP_PROPERTY_H
#define CAP_PROPERTY_H

#include "process.h"

enum means { MEANS_NOTHING, MEANS_COUNTED, MEANS_MANAGED, MEANS_UNKNOWN };

/* A location with this as its device does not say which: the current context's, or
 * where there is none the first. */
enum { DEVICE_CURRENT = -1 };

/* property_means says what an allocation type at a location means, and sets
 * *device to where it counts, or to DEVICE_CURRENT. The device is as the program
 * gave it: whether there is such a one the driver says. */
static inline enum means property_means(int type, const CUlocation *l, CUdevice *device)
{
    /* Since CUDA 13.4 the id is a union: of a locality domain, the device's number
     * and then the domain's, a byte each. */
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

/* property_place finds where something counts that names this device. */
static inline void property_place(struct process *p, CUdevice device, struct where *w)
{
    *w = (struct where){.device = device};
    if (device == DEVICE_CURRENT && !where(p, w))
        *w = (struct where){.device = 0};
}

/* property_unknown is to be asked before a call with properties of which nobody
 * knows what they mean, once for each. True: refuse it, out of memory. False: it
 * passes uncounted, and the usage page says so (uncounted). */
bool property_unknown(struct process *p, CUdevice device);

#endif
