/* SPDX-License-Identifier: Apache-2.0 */

#ifndef CAP_POOL_H
#define CAP_POOL_H

#include "charge.h"

/* A reservation of the driver's own, of which we know its size by asking: it is
 * charged with that. settle brings the charge to what is there: held are bytes
 * reserved towards it and not committed, loose are those of the charge that
 * were uncommitted before something that may have freed them. */
void settle(struct account *a, uint64_t *charge, uint64_t there, uint64_t held, uint64_t loose);

/* pool_free frees what came from a pool; false: it did not. */
bool pool_free(struct process *p, CUdeviceptr at, CUresult *r, CUresult (*call)(CUdeviceptr), CUresult (*async)(CUdeviceptr, CUstream), CUstream s);

/* pools_settle looks at all pools of a device, graphs' too, after something
 * that may have emptied them. */
void pools_settle(struct process *p, CUdevice device);

/* relieve_graphs trims a device's graph memory. */
void relieve_graphs(struct process *p, CUdevice device);
void graphs_settle(struct process *p, CUdevice device);

#endif
