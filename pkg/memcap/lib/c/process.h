/* SPDX-License-Identifier: Apache-2.0 */

/* What this library knows in this process: the driver behind it, an account for each
 * device that was used, the contexts, and what is charged for what.
 *
 * Nothing happens before the first call of an overridden function. Then the driver's
 * functions are looked up. A device's account is opened when the program first uses that
 * device. All of this lies in memory that the kernel wipes in a forked child. CUDA does
 * not survive a fork, so the child begins with nothing, and takes its own slot when it
 * allocates. */
#ifndef CAP_PROCESS_H
#define CAP_PROCESS_H

#include "count.h"
#include "driver.h"
#include "real.h"
#include "table.h"

enum { MAX_DEVICES = 64, MAX_POOLS = 16384 };

/* Whether a device has an account, or why it has none: it has no limit, or something is
 * missing or broken, under the open or the closed policy. */
enum standing { STANDING_UNKNOWN, STANDING_GOOD, STANDING_UNLIMITED, STANDING_OPEN, STANDING_CLOSED };

/* Memory that the driver reserves by its own rules, as for a pool. We ask the driver for
 * its size and charge that. */
struct reserve {
    uint64_t charge;
    uint64_t loose; /* part of the charge that is uncommitted at the moment */
    uint32_t loosers; /* calls under way that may free some of it */
    uint32_t trims; /* of these, calls under way that trim it */
    uint64_t told;  /* the limit page's ceiling when the driver was last asked */
    bool managed; /* managed memory, which the driver's figures lack */
};

/* A gate is entered by calls that may take memory, and closed by one that must be alone. */
struct gate {
    uint64_t flight; /* [calls inside:16 | of a pool, live units of 512 bytes:48] */
    uint32_t closed;
};

/* A stream that has freed something in a pool, or, after it was destroyed, the last event on it;
 * see reuse.c. */
enum { FREERS = 64, LAST_FREERS = 4 };
struct freer {
    uint64_t key;    /* the stream; 0: it was destroyed, and only the event is left */
    uint64_t number; /* of its context; 0: this place is free */
    CUcontext context;
    CUevent event; /* NULL, unless the stream was destroyed */
};

/* A memory pool; see pool.c. */
struct pool {
    uint64_t handle; /* 0: free, or destroyed */
    uint32_t used;   /* 1: this place is taken */
    uint32_t lock;   /* guards r; held for moments only */
    int32_t device;  /* DEVICE_CURRENT: a managed pool of no device that was not used yet */
    bool passed;     /* not counted: of the host, or another process's */
    bool exportable; /* other processes can open it */
    uint32_t places; /* recorded since they were last looked through; see export.c */
    struct gate gate; /* closed while an attempt is made; its flight has what lives too */
    uint32_t wait, pause; /* how many requests to wait after it made no room, and how many of them are left; see pools.c */
    uint64_t keeps;    /* bytes: its release threshold */
    uint64_t most;     /* bytes: its greatest size, which the driver enforces; 0: it has none. See bound.c */
    struct reserve r;
};

struct graph_pool { /* a device's graph memory; see graph.c */
    uint32_t lock;  /* guards r; held for moments only */
    struct gate gate; /* closed while a launch is under way that has reserved less than it may take */
    uint64_t launched; /* how many launches there were */
    uint64_t in_vain, in_vain_used; /* 1 + launched when one last waited for others in vain, and what they used then */
    struct reserve r;
};

enum { OBEYS_UNKNOWN, OBEYS, OBEYS_BY_PIECES, OBEYS_NOT };
#define NO_STAND_IN (~(uint64_t)0)

/* What a short program needs lies first, in few pages of memory. */
struct process {
    uint32_t ready; /* 0 in a forked child before its first call */
    uint32_t lock;  /* guards standing and the recording of pools */
    uint32_t pid;   /* whose memory this is, if the kernel cannot wipe it; else 1 */
    uint64_t contexts_made;
    uint32_t standing[MAX_DEVICES];
    uint64_t primary[MAX_DEVICES]; /* the primary context's handle; 0: none counted */
    uint32_t primary_refs[MAX_DEVICES];
    uint64_t hidden[MAX_DEVICES]; /* small allocations without an address; see charge.h */
    uint32_t tight[MAX_DEVICES]; /* locks; see charge.h */
    uint32_t limiting; /* a lock, held while a context's limit is changed */
    uint64_t exports; /* how many addresses were exported (entries of SPACE_EXPORT) */
    uint32_t imported; /* whether another process's pool was ever imported */
    uint32_t next_pool;                     /* where to look for a free place */
    uint32_t devices;                       /* the driver's number of devices; 0: not asked yet */
    uint64_t stands_in[MAX_DEVICES];        /* the pool in place of the default one; 0: not decided yet. See bound.c */
    uint64_t exacted;                       /* a bit for each device for which we have waited for an exact reading */
    uint32_t standing_in;                   /* a lock, held while stands_in is decided */
    uint32_t obeys;                         /* whether the driver keeps pools to a greatest size: OBEYS and so on */
    uint32_t contexts_ended;
    uint32_t freeing;  /* a lock, held while freers are looked at or their streams destroyed */
    struct freer freers[FREERS];
    uint64_t last_freers[LAST_FREERS]; /* a word for each of the streams that freed last */
    uint64_t piece;    /* bytes by which pools were seen to grow, if that is more than PIECE */
    uint32_t coarse, fine; /* how pools were seen to grow; see pool.c */
    uint64_t graph_devices; /* a bit for each with a graph that allocates */
    struct table table;
    struct account accounts[MAX_DEVICES];
    struct graph_pool graphs[MAX_DEVICES];
    uint64_t pools_charged[MAX_POOLS / 64]; /* a bit for each pool that has, or had, a charge */
    struct pool pools[MAX_POOLS];
};

extern struct driver real;
extern struct real_library real_library;

/* enter is what every override calls first, with the address that it returns to. NULL: the
 * call comes from the driver or from us, so pass it on uncounted. */
COLD struct process *enter_slowly(const void *back);
extern struct process *the_process;
extern uint32_t the_driver; /* 1 once it has been looked up */
extern bool cannot_wipe;

static inline struct process *enter(const void *back)
{
    struct process *p = __atomic_load_n(&the_process, __ATOMIC_ACQUIRE);
    if (__builtin_expect(!p || !__atomic_load_n(&p->ready, __ATOMIC_ACQUIRE) || cannot_wipe, 0))
        return enter_slowly(back);
    return real_calls(&real_library, back) ? NULL : p;
}
#define ENTER() enter(__builtin_extract_return_addr(__builtin_return_address(0)))

/* relieve has this process's pools and graphs give back what they do not use, until there
 * is room for n bytes. */
void relieve(struct account *a, uint64_t n);

/* context_lives says whether a handle still belongs to the context of that number. */
bool context_lives(struct process *p, CUcontext handle, uint64_t number);

/* CALL calls the driver. An older driver may lack the function. */
#define CALL(name, ...) (real.name ? real.name(__VA_ARGS__) : CUDA_ERROR_NOT_FOUND)

/* OVER calls ours with the driver's function, or the driver's alone. */
#define OVER(name, ours, ...)    \
    struct process *p = ENTER(); \
    return p && real.name ? ours(p, __VA_ARGS__, real.name) : CALL(name, __VA_ARGS__);

/* THEN calls the driver, and then does something if that has succeeded. */
#define THEN(name, what, ...)             \
    struct process *p = ENTER();          \
    CUresult r = CALL(name, __VA_ARGS__); \
    if (p && r == CUDA_SUCCESS) {         \
        what;                             \
    }                                     \
    return r;

/* account_of returns a device's account. NULL: it has none, and *refuse says whether
 * allocations must fail (the closed policy) or pass uncounted. */
COLD struct account *account_of_slowly(struct process *p, CUdevice device, bool *refuse);
static inline struct account *account_of(struct process *p, CUdevice device, bool *refuse)
{
    *refuse = false;
    if (__builtin_expect((uint32_t)device < MAX_DEVICES && __atomic_load_n(&p->standing[device], __ATOMIC_ACQUIRE) == STANDING_GOOD, 1))
        return account_unlimited(&p->accounts[device]) ? NULL : &p->accounts[device];
    return account_of_slowly(p, device, refuse);
}

/* where finds the device and the number of the current context. False: there is none, so
 * pass the call on, which the driver then refuses. */
struct where {
    CUdevice device;
    uint64_t context;
};
bool where(struct process *p, struct where *w);
/* where_stream does so for the context of a stream. */
bool where_stream(struct process *p, struct where *w, CUstream stream);

/* context_number returns the number of a context of that device, and gives it one if the
 * handle was not seen before. context_forget separates the handle from its number, since
 * a later context may have the same handle. False: the handle is not known. */
uint64_t context_number(struct process *p, CUcontext handle, CUdevice device);
bool context_forget(struct process *p, CUcontext handle, struct where *w);

#endif
