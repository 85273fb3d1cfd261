/* SPDX-License-Identifier: Apache-2.0 */

#ifndef CAP_POOL_H
#define CAP_POOL_H

#include "charge.h"
#include "property.h"

/* settle makes the charge of a reserve (process.h) equal to there, its size in bytes. held bytes
 * were reserved for its growth and are not committed yet. They pay for what there exceeds the
 * charge; settle cancels the rest of them. It returns the growth that they do not pay for. Other
 * calls under way may have reserved that. If there are none, settle_force charges it, whether there
 * is room or not.
 *
 * uncommit_free uncommits the part of the charge that the next call may free: all but used bytes.
 * recommit commits what is left of that part after the call.
 *
 * All of these need the reserve's lock. The lock is not held during the call that may free. */
uint64_t settle(struct account *a, struct reserve *r, uint64_t there, uint64_t held);
void settle_force(struct account *a, struct reserve *r, uint64_t rest);
/* settle_exported keeps the whole charge as exported memory, since other processes may
 * still have it open. */
void settle_exported(struct account *a, struct reserve *r);
void uncommit_free(struct account *a, struct reserve *r, uint64_t used);
void recommit(struct account *a, struct reserve *r);

/* pool_free frees memory of a pool: at once by call or, in the order of a stream, by async. *r is
 * the driver's answer. False: at belongs to no pool, and nothing was freed. */
bool pool_free(struct process *p, CUdeviceptr at, CUresult *r, CUresult (*call)(CUdeviceptr), CUresult (*async)(CUdeviceptr, CUstream), CUstream s);

/* pools_settle settles all pools of a device and its graph memory. It is called after something
 * that may have emptied them. */
COLD void pools_settle(struct process *p, CUdevice device);

/* relieve_graphs trims a device's graph memory. graphs_settle settles it. */
void relieve_graphs(struct process *p, CUdevice device);
void graphs_settle(struct process *p, CUdevice device);

/* A request for memory of a pool. For cuMemAllocAsync, plain is set until the device's current pool
 * is found. from allocates from a pool. */
struct request {
    CUdeviceptr *out;
    size_t bytes;
    CUmempool pool;
    CUstream stream;
    bool per_thread; /* true: the NULL stream is the thread's default stream */
    CUresult (*plain)(CUdeviceptr *, size_t, CUstream);
    CUresult (*from)(CUdeviceptr *, size_t, CUmempool, CUstream);
};

/* A gate's flight has two parts: FLIGHT for each call inside, and the units that live. */
#define FLIGHT ((uint64_t)1 << 48)
static inline uint64_t pool_flight(const struct pool *pool) { return count_read(&pool->gate.flight); }
static inline uint64_t pool_live(const struct pool *pool) { return (pool_flight(pool) & (FLIGHT - 1)) * UNIT; }

/* gate_enter enters a gate, and adds units to those that live. It waits while the gate is closed,
 * but at most PATIENCE_US, since the thread that closed it may be stuck. gate_close closes a gate
 * and waits until only the caller's own calls are inside. False: that took longer than us, and the
 * gate is as before. */
enum { PATIENCE_US = 1000 * 1000 };
void gate_enter(struct gate *g, uint64_t units);
bool gate_close(struct gate *g, unsigned own, uint64_t us);
static inline void gate_open(struct gate *g) { __atomic_store_n(&g->closed, 0, __ATOMIC_SEQ_CST); }
static inline void gate_leave(struct gate *g, uint64_t units) { count_sub(&g->flight, FLIGHT + units); }

/* Pools are expected to grow by multiples of PIECE, unless one was seen to grow by more. */
#define PIECE ((uint64_t)32 << 20)

/* pool_resettle settles a pool if the caller has reserved nothing for it. It charges the pool's
 * growth by force, unless an allocation is under way that will pay for it. The caller holds the
 * pool's lock. */
void pool_resettle(struct process *p, struct account *a, struct pool *pool);

/* pool_uncommit_free is uncommit_free for a pool. It first settles what the pool has lost by
 * itself. */
void pool_uncommit_free(struct process *p, struct account *a, struct pool *pool, uint64_t used);

/* pool_attempt makes an attempt (attempt.c) to allocate n bytes. held bytes are reserved, and the
 * pool should not grow by more. *r is the driver's answer. It is out of memory if no attempt was
 * made or the pool would have had to grow. */
void pool_attempt(struct process *p, const struct request *q, struct pool *pool, struct account *a, uint64_t n, uint64_t held, CUresult *r);

/* --- attempt.c */

/* attempt_begin waits for its turn: at most half a second for each process that comes first, and
 * eight seconds in all. False: it did not get the turn. */
bool attempt_begin(struct account *a);
void attempt_end(struct account *a);

/* --- bound.c */

/* bound_create makes a pool that this process counts on a device. It gives the pool a greatest size
 * if the driver supports that. *most is that size in bytes; 0: the pool has none. */
CUresult bound_create(struct process *p, CUmempool *out, const CUpoolprops *props, CUdevice device, uint64_t *most);

/* bound_default returns the pool that replaces a device's default pool. NULL: the device keeps its
 * own. */
COLD CUmempool bound_default(struct process *p, CUdevice device);

/* bound_again makes that pool the device's current one again. It is called after the current pool
 * was destroyed, since the driver then goes back to its default pool. */
void bound_again(struct process *p, CUdevice device);

/* --- pools.c */

/* pool_new records a pool that the driver has just made. NULL: there is no place for it. */
struct pool *pool_new(struct process *p, CUmempool handle, enum means means, CUdevice device, uint64_t most);

/* Between relax and unrelax, this thread's calls do not invalidate a stream capture. */
CUresult relax(int *mode);
void unrelax(CUresult r, int *mode);

/* pool_find finds the pool of a request. False: pass the request on uncounted. True with a NULL
 * pool: the pool could not be recorded. */
bool pool_find(struct process *p, struct request *q, struct pool **pool);

/* pool_makes_room makes a pool give back the room that n bytes lack, and reserves n. False: the
 * pool has too little free, was asked in vain lately, or that did not help. */
bool pool_makes_room(struct process *p, struct pool *pool, struct account *a, uint64_t n);

/* pool_leave frees the place of a pool that was destroyed, unless some of it lives or is under way.
 * The caller holds the pool's lock. */
COLD void pool_leave(struct process *p, struct pool *pool);

/* --- export.c */

/* For pools that other processes can open. place_freed records a place in the pool that was freed.
 * place_for reports whether n bytes fit into such a place; no other thread may use the pool
 * meanwhile. places_end forgets all places. */
COLD void place_freed(struct process *p, struct pool *pool, const struct entry *e);
bool place_for(struct process *p, struct pool *pool, uint64_t n);
void places_end(struct process *p, const struct pool *pool);

/* --- reuse.c */

/* reuse serves a request of n bytes from memory that streams have freed in a pool. */
COLD CUresult reuse(struct process *p, const struct request *q, struct pool *pool, struct account *a, uint64_t n);

/* freed_on records that a stream has freed memory of a pool. */
void freed_on(struct process *p, CUstream s, bool per_thread);

/* capturing reports whether a stream is being captured into a graph. */
bool capturing(CUstream s, bool per_thread);

#endif
