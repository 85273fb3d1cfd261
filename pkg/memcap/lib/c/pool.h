/* SPDX-License-Identifier: Apache-2.0 */

#ifndef CAP_POOL_H
#define CAP_POOL_H

#include "charge.h"

/* settle brings the charge of a reservation of the driver's own to what is
 * there; held are bytes reserved towards it and not committed. loosen uncommits
 * what may go of it, before a call that may free it, and tighten commits after
 * it what is left. All under the reservation's lock, which need not be held
 * during the call. */
void settle(struct account *a, struct reserve *r, uint64_t there, uint64_t held);
void loosen(struct account *a, struct reserve *r, uint64_t used);
void tighten(struct account *a, struct reserve *r);

/* pool_free frees what came from a pool; false: it did not. */
bool pool_free(struct process *p, CUdeviceptr at, CUresult *r, CUresult (*call)(CUdeviceptr), CUresult (*async)(CUdeviceptr, CUstream), CUstream s);

/* pools_settle looks at all pools of a device, graphs' too, after something
 * that may have emptied them. */
void pools_settle(struct process *p, CUdevice device);

/* relieve_graphs trims a device's graph memory. */
void relieve_graphs(struct process *p, CUdevice device);
void graphs_settle(struct process *p, CUdevice device);

#endif
