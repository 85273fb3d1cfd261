/* SPDX-License-Identifier: Apache-2.0 */

#ifndef CAP_POOL_H
#define CAP_POOL_H

#include "attempt.h"
#include "charge.h"
#include "property.h"

/* settle brings the charge of a reservation of the driver's own to what is
 * there. held are bytes reserved towards it and not committed: what is there
 * beyond the charge is paid of them, and the rest of them is cancelled. It returns
 * what is there and not paid: it belongs to others that are under way, or to none;
 * settle_force charges that, room or none.
 *
 * loosen uncommits what may go of the charge, before a call that may free it, and
 * tighten commits after it what is left. All under the reservation's lock, which
 * is not held during the call. */
uint64_t settle(struct account *a, struct reserve *r, uint64_t there, uint64_t held);
void settle_force(struct account *a, struct reserve *r, uint64_t rest);
/* settle_exported leaves all of it charged to what may live on elsewhere. */
void settle_exported(struct account *a, struct reserve *r);
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

/* What is under way in a pool, and what lives; see struct pool. */
#define FLIGHT ((uint64_t)1 << 48)
static inline uint64_t pool_flight(const struct pool *pool) { return slot_sum(&pool->flight, &pool->others_flight); }
static inline uint64_t pool_live(const struct pool *pool) { return (pool_flight(pool) & (FLIGHT - 1)) * UNIT; }

/* PATIENCE_US is for how long in all threads at a pool nap for one another. */
enum { PATIENCE_US = 1000 * 1000 };

/* PIECE is in what pools grow, unless one was seen to grow by more. */
#define PIECE ((uint64_t)32 << 20)

/* pool_looked settles a pool where nothing was reserved, under its lock: what none that
 * is under way will pay for is there all the same. */
void pool_looked(struct process *p, struct account *a, struct pool *pool);

/* pool_loosen is loosen for a pool, of which it first finds out what is gone by itself. */
void pool_loosen(struct process *p, struct account *a, struct pool *pool, uint64_t used);

/* pool_attempt is an attempt to allocate n bytes by which the pool should not grow by more
 * than held, which is reserved. Its answer is in *r where one was made: out of memory
 * if the pool would have had to grow. */
enum attempted { NOT_ATTEMPTED, ATTEMPTED, WOULD_GROW };
enum attempted pool_attempt(struct process *p, const struct request *q, struct pool *pool, struct account *a, uint64_t n, uint64_t held, CUresult *r);

/* --- bound.c */

/* bound_create has the driver make a pool that this process counts on a device, with a
 * greatest size where that can be had: *most, else 0. */
CUresult bound_create(struct process *p, CUmempool *out, const CUpoolprops *props, CUdevice device, uint64_t *most);

/* bound_default is the pool that stands in for a device's default one, or NULL. */
CUmempool bound_default(struct process *p, CUdevice device);

/* bound_again has it stand in again, after a device's current pool was destroyed. */
void bound_again(struct process *p, CUdevice device);

/* --- pools.c */

/* pool_new writes down a pool that the driver has just made; NULL: there are more than
 * anybody has. */
struct pool *pool_new(struct process *p, CUmempool handle, enum means means, CUdevice device, uint64_t most);

/* relax is for calls in which a capture is not to fail, up to unrelax. */
CUresult relax(const struct process *p, int *mode);
void unrelax(CUresult r, int *mode);

/* pool_find says which pool a request is of; false: pass it on. changes is
 * pool_changes as it was before. */
bool pool_find(struct process *p, struct request *q, uint32_t changes, struct pool **pool);

/* pool_makes_room reserves n bytes where a pool can give back so much of what it has free. */
bool pool_makes_room(struct process *p, struct pool *pool, struct account *a, uint64_t n);

/* pool_leave gives up the place of a pool that was destroyed, if no thread is at it;
 * its lock is held. */
void pool_leave(struct process *p, struct pool *pool);

/* --- export.c */

/* place_freed writes down that a place of a pool that others can open was freed; place_for
 * says whether n bytes fit in such a place, nobody else being at the pool; places_end
 * forgets them. */
void place_freed(struct process *p, struct pool *pool, const struct entry *e);
bool place_for(struct process *p, struct pool *pool, uint64_t n);
void places_end(struct process *p, const struct pool *pool);

/* --- reuse.c */

/* reuse serves a request of n bytes from what streams have freed in a pool, easily: without
 * that a stream waits. */
CUresult reuse(struct process *p, const struct request *q, struct pool *pool, struct account *a, uint64_t n, bool easily);

/* pool_hope is to be called when a pool has come to have more that is free, or may give
 * it to more streams. */
static inline void pool_hope(struct pool *pool)
{
    if (!__atomic_load_n(&pool->hopeless, __ATOMIC_SEQ_CST))
        return;
    __atomic_add_fetch(&pool->hopes, 1, __ATOMIC_SEQ_CST);
    __atomic_store_n(&pool->hopeless, 0, __ATOMIC_SEQ_CST);
}

/* pool_is_near is to be called before a stream may have to wait for others: from then on
 * each free is written down. */
void pool_is_near(struct pool *pool);

/* freed_on writes down that a stream has freed something of a pool. */
void freed_on(struct process *p, struct pool *pool, CUstream s, bool per_thread);
void freers_end(struct pool *pool);

/* capturing says whether what is done on a stream becomes a part of a graph. */
bool capturing(const struct process *p, CUstream s, bool per_thread);

#endif
