/* SPDX-License-Identifier: Apache-2.0 */

/* What this library knows in this process: the driver's functions, an account for each device that
 * the program has used, the contexts, and the charge of each allocation.
 *
 * The library does nothing before the first call of an overridden function. Then it looks up the
 * driver's functions. It opens a device's account when the program first uses that device. All of
 * this lies in memory that the kernel wipes in a forked child. CUDA does not survive a fork. So the
 * child begins with nothing, and takes a slot of its own when it allocates. */
#ifndef CAP_PROCESS_H
#define CAP_PROCESS_H

#include "count.h"
#include "driver.h"
#include "real.h"
#include "table.h"

enum { MAX_DEVICES = 64, MAX_POOLS = 16384 };

/* Whether a device has an account. UNKNOWN: it was not opened yet. GOOD: it has one. UNLIMITED: it
 * has no limit. OPEN, CLOSED: something is missing or broken, under the open or the closed
 * policy. */
enum standing { STANDING_UNKNOWN, STANDING_GOOD, STANDING_UNLIMITED, STANDING_OPEN, STANDING_CLOSED };

/* Memory that the driver reserves by its own rules, such as that of a pool. We ask the driver for
 * its size and charge that. Amounts are in bytes. */
struct reserve {
    uint64_t charge; /* what is charged for it */
    uint64_t uncommitted; /* the part of the charge that is uncommitted now */
    uint32_t freeing; /* calls under way that may free some of it */
    uint32_t trims; /* those of them that trim it */
    uint64_t ceiling; /* the limit page's ceiling when we last asked the driver */
    bool managed; /* true: managed memory, which the driver's figures lack */
};

/* Calls that may take memory enter a gate. A call that must be alone closes it. */
struct gate {
    uint64_t flight; /* [calls inside:16 | for a pool, live units of 512 bytes:48] */
    uint32_t closed; /* 1 while it is closed */
};

/* A stream that has freed memory of a pool. After the stream was destroyed, the last event on it
 * stays here. See reuse.c. */
enum { FREERS = 64, LAST_FREERS = 4 };
struct freer {
    uint64_t key;    /* the stream; 0: it was destroyed, and only the event is left */
    uint64_t number; /* the number of its context; 0: this place is free */
    CUcontext context;
    CUevent event; /* NULL, unless the stream was destroyed */
};

/* A memory pool; see pool.c. */
struct pool {
    uint64_t handle; /* 0: free, or destroyed */
    uint32_t used;   /* 1: this place is taken */
    uint32_t lock;   /* guards r; held for moments only */
    int32_t device;  /* DEVICE_CURRENT: a managed pool without a device, from which nothing was allocated yet */
    bool passed;     /* true: not counted, since it is the host's, another process's or unknown */
    bool exportable; /* true: other processes can open it */
    uint32_t places; /* number of freed places recorded since they were last forgotten; see export.c */
    struct gate gate; /* closed while an attempt is made; its flight also has what lives */
    /* After it made no room, wait requests do not ask it; pause of them are left. See pools.c. */
    uint32_t wait, pause;
    uint64_t keeps;    /* its release threshold, in bytes */
    uint64_t most;     /* its greatest size in bytes, which the driver enforces; 0: it has none. See bound.c */
    struct reserve r;
};

struct graph_pool { /* a device's graph memory; see graph.c */
    uint32_t lock;  /* guards r; held for moments only */
    struct gate gate; /* closed during a launch that has reserved less than it may take */
    uint64_t launched; /* number of launches */
    /* 1 + launched when a launch last waited for others in vain, and the bytes they used then. */
    uint64_t in_vain, in_vain_used;
    struct reserve r;
};

enum { OBEYS_UNKNOWN, OBEYS, OBEYS_BY_PIECES, OBEYS_NOT };
#define NO_STAND_IN (~(uint64_t)0)

/* Whether the process must be a client of MPS. UNKNOWN: its pages were not looked at. NONE: it has no
 * share of the SMs. MUST: it has one, and is no client yet. CLIENT: it is one. OUTSIDE: the driver
 * has begun without MPS. */
enum mps_standing { MPS_UNKNOWN, MPS_NONE, MPS_MUST, MPS_CLIENT, MPS_OUTSIDE };

struct mps {
    uint32_t standing;
    uint32_t lock;   /* guards all else; held for moments only */
    uint32_t inside; /* number of threads in cuInit */
    uint64_t percent;
    struct slot *slot; /* NULL: it could not be opened, or the GPU has no limit */
    struct claim claim;
    struct account account; /* until the device's account takes it over */
};

/* The fields that a short program needs come first, in few pages of memory. */
struct process {
    uint32_t ready; /* 1 after the first call; 0 again in a forked child */
    uint32_t lock;  /* guards standing and the recording of pools */
    uint32_t pid;   /* the process that has this memory, if the kernel cannot wipe it; else 1 */
    uint32_t held;  /* 1 once a limit page was seen to hold newcomers before cuInit; see newcomer.c */
    uint64_t contexts_made; /* the last number that a context got; 0: none yet */
    uint32_t standing[MAX_DEVICES];
    uint64_t primary[MAX_DEVICES]; /* the primary context's handle; 0: none counted */
    uint32_t primary_refs[MAX_DEVICES];
    uint64_t hidden[MAX_DEVICES]; /* number of small allocations without an address; see charge.h */
    uint32_t tight[MAX_DEVICES]; /* locks for allocations without a reservation; see charge.h */
    uint32_t limiting; /* a lock, held while a context's limit is changed */
    uint64_t exports; /* number of exported addresses (entries of SPACE_EXPORT) */
    uint32_t imported; /* 1 once another process's pool was imported */
    uint32_t next_pool;                     /* index from which to look for a free place */
    uint32_t devices;                       /* the driver's number of devices; 0: not asked yet */
    /* the pool that replaces the default one; 0: not decided yet. See bound.c */
    uint64_t stands_in[MAX_DEVICES];
    uint64_t exacted;                       /* a bit for each device that has waited for an exact reading */
    uint32_t standing_in;                   /* a lock, held while stands_in is decided */
    uint32_t obeys;                         /* OBEYS or the like: whether the driver enforces a pool's greatest size */
    uint32_t contexts_ended; /* number of calls of context_forget */
    uint32_t freeing;  /* a lock, held while freers are read or their streams destroyed */
    struct freer freers[FREERS];
    uint64_t last_freers[LAST_FREERS]; /* words of streams that freed last and are recorded; see freed_on */
    uint64_t piece;    /* the largest growth of a pool for a small request, in bytes; used if above PIECE */
    uint32_t coarse, fine; /* how pools were seen to grow; see pool.c */
    uint64_t graph_devices; /* a bit for each device with a graph that allocates */
    struct table table;
    struct mps mps;
    struct account accounts[MAX_DEVICES];
    struct graph_pool graphs[MAX_DEVICES];
    uint64_t pools_charged[MAX_POOLS / 64]; /* a bit for each pool that has or had a charge */
    struct pool pools[MAX_POOLS];
};

extern struct driver real;
extern struct real_library real_library;

/* Every override calls enter first, with the address that it returns to. NULL: the call comes from
 * the driver or from us, so pass it on uncounted. */
COLD struct process *enter_slowly(const void *back);
extern struct process *the_process;
extern uint32_t the_driver; /* 1 once its functions have been looked up */
extern bool cannot_wipe;

static inline struct process *enter(const void *back)
{
    struct process *p = __atomic_load_n(&the_process, __ATOMIC_ACQUIRE);
    if (__builtin_expect(!p || !__atomic_load_n(&p->ready, __ATOMIC_ACQUIRE) || cannot_wipe, 0))
        return enter_slowly(back);
    return real_calls(&real_library, back) ? NULL : p;
}
#define ENTER() enter(__builtin_extract_return_addr(__builtin_return_address(0)))

/* relieve makes this process's pools and graphs give back what they do not use, until there is room
 * for n bytes. */
void relieve(struct account *a, uint64_t n);

/* newcomer_waits waits as long as a limit page of any GPU holds newcomers. newcomer_waits_on does
 * the same for the pages of one GPU; the caller has seen that one of them does. */
COLD void newcomer_waits(struct process *p);
COLD void newcomer_waits_on(const char *gpu);

/* is_held reports whether a limit page holds newcomers. */
static inline bool is_held(const struct limit_page *page) { return __atomic_load_n(&page->control, __ATOMIC_ACQUIRE) & CONTROL_HOLD; }

/* mps_refuses reports whether no context may be made on a device, since the process has a share of
 * the SMs and is no client of MPS. mps_made is called after a context was made. mps_account moves
 * the account that was opened before cuInit to a, if it is that of this limit page. */
bool mps_refuses(struct process *p, CUdevice device);
void mps_made(struct process *p, CUdevice device);
bool mps_account(struct process *p, struct account *a, const char *limit);

/* context_lives reports whether a handle still belongs to the context with that number. */
bool context_lives(struct process *p, CUcontext handle, uint64_t number);

/* CALL calls the driver. An older driver may lack the function. */
#define CALL(name, ...) (real.name ? real.name(__VA_ARGS__) : CUDA_ERROR_NOT_FOUND)

/* OVER calls ours and passes it the driver's function. If the call is not to be counted, it calls
 * the driver alone. */
#define OVER(name, ours, ...)    \
    struct process *p = ENTER(); \
    return p && real.name ? ours(p, __VA_ARGS__, real.name) : CALL(name, __VA_ARGS__);

/* THEN calls the driver, and does what if the driver succeeds. */
#define THEN(name, what, ...)             \
    struct process *p = ENTER();          \
    CUresult r = CALL(name, __VA_ARGS__); \
    if (p && r == CUDA_SUCCESS) {         \
        what;                             \
    }                                     \
    return r;

/* account_of returns a device's account. NULL: it has none. Then *refuse is true if allocations
 * must fail (the closed policy), and false if they pass uncounted. */
COLD struct account *account_of_slowly(struct process *p, CUdevice device, bool *refuse);
static inline struct account *account_of(struct process *p, CUdevice device, bool *refuse)
{
    *refuse = false;
    if (__builtin_expect((uint32_t)device < MAX_DEVICES && __atomic_load_n(&p->standing[device], __ATOMIC_ACQUIRE) == STANDING_GOOD, 1))
        return account_unlimited(&p->accounts[device]) ? NULL : &p->accounts[device];
    return account_of_slowly(p, device, refuse);
}

/* where finds the device and the number of the current context. False: there is no context. Then
 * pass the call on; the driver refuses it. */
struct where {
    CUdevice device;
    uint64_t context;
};
bool where(struct process *p, struct where *w);
/* where_stream does the same for the context of a stream. */
bool where_stream(struct process *p, struct where *w, CUstream stream);

/* context_number returns the number of a context on that device. It gives a new handle a number.
 * context_forget separates the handle from its number, since a later context may have the same
 * handle. False: the handle is unknown. */
uint64_t context_number(struct process *p, CUcontext handle, CUdevice device);
bool context_forget(struct process *p, CUcontext handle, struct where *w);

#endif
