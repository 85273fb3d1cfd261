/* SPDX-License-Identifier: Apache-2.0 */

#ifndef CAP_POOL_H
#define CAP_POOL_H

#include "attempt.h"
#include "charge.h"

/* settle brings the charge of a reservation of the driver's own to what is
 * there. held are bytes reserved towards it and not committed: what is there
 * beyond the charge is paid of them, and the rest of them is cancelled. It returns
 * what is there and not paid: it belongs to others who are under way, or to nobody;
 * settle_force charges that, room or none.
 *
 * loosen uncommits what may go of the charge, before a call that may free it, and
 * tighten commits after it what is left. All under the reservation's lock, which
 * is not held during the call. */
uint64_t settle(struct account *a, struct reserve *r, uint64_t there, uint64_t held);
void settle_force(struct account *a, struct reserve *r, uint64_t rest);
void loosen(struct account *a, struct reserve *r, uint64_t used);
void tighten(struct account *a, struct reserve *r);

/* pool_free frees what came from a pool, where the program is not on a stream;
 * false: it did not. */
bool pool_free(struct process *p, CUdeviceptr at, CUresult *r, CUresult (*call)(CUdeviceptr), CUresult (*async)(CUdeviceptr, CUstream), CUstream s);

/* pools_settle looks at all pools of a device, graphs' too, after something
 * that may have emptied them. */
void pools_settle(struct process *p, CUdevice device);

/* relieve_graphs trims a device's graph memory. */
void relieve_graphs(struct process *p, CUdevice device);
void graphs_settle(struct process *p, CUdevice device);

/* A request of memory from a pool. */
struct request {
    CUdeviceptr *out;
    size_t bytes;
    CUmempool pool;
    CUstream stream;
    bool per_thread; /* no stream is the thread's default one */
    CUresult (*plain)(CUdeviceptr *, size_t, CUstream);
    CUresult (*from)(CUdeviceptr *, size_t, CUmempool, CUstream);
};

/* The word pool->flight. */
#define FLIGHT ((uint64_t)1 << 48)
static inline uint64_t pool_live(const struct pool *pool) { return (__atomic_load_n(&pool->flight, __ATOMIC_SEQ_CST) & (FLIGHT - 1)) * UNIT; }

/* pool_alone makes an allocation of n bytes from what a pool has already. Out of
 * memory: the pool would have had to grow. */
CUresult pool_alone(struct process *p, const struct request *q, struct pool *pool, struct account *a, uint64_t n);

/* --- reuse.c */

/* reuse serves a request of n bytes from what streams have freed in a pool. */
CUresult reuse(struct process *p, const struct request *q, struct pool *pool, struct account *a, uint64_t n);

/* freed_on writes down that a stream has freed something of a pool. */
void freed_on(struct process *p, struct pool *pool, CUstream s, bool per_thread);
void freers_end(struct pool *pool);

/* capturing says whether what is done on a stream becomes a part of a graph. */
bool capturing(const struct process *p, CUstream s, bool per_thread);

#endif
