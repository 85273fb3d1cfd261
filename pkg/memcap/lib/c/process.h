/* SPDX-License-Identifier: Apache-2.0 */

/* What this library knows in this process: the driver behind it, an account
 * for each device that was used, the contexts, and what is charged for what.
 *
 * Nothing happens before the first call of an overridden function; then the
 * driver's functions are looked up, and a device's account is opened when
 * something is first wanted of it. All of it lies in memory that the kernel
 * wipes in a forked child: the child has no CUDA of its own yet, so it begins
 * with nothing, and with a slot of its own once it allocates. */
#ifndef CAP_PROCESS_H
#define CAP_PROCESS_H

#include "count.h"
#include "driver.h"
#include "real.h"
#include "table.h"

enum { MAX_DEVICES = 64, MAX_CONTEXTS = 128, MAX_POOLS = 16384 };

/* A device's account, or why there is none: no limit, or something that is
 * missing or broken, under the open or the closed policy. */
enum standing { STANDING_UNKNOWN, STANDING_GOOD, STANDING_UNLIMITED, STANDING_OPEN, STANDING_CLOSED };

struct context {
    uint64_t handle; /* the driver's; 0: free */
    uint64_t info;   /* number << 8 | device */
};

/* A reservation of the driver's own, which it fills and empties: we know its size
 * by asking, and charge that. */
struct reserve {
    uint64_t charge;
    uint64_t loose; /* of the charge, uncommitted at the moment */
    uint32_t loosers;
    uint32_t trims; /* under way */
    uint64_t told;  /* the limit page's ceiling when the driver was last asked */
    bool managed; /* memory that the driver's figures lack */
};

/* A memory pool; see pool.c. */
enum { LAST_FREERS = 4 };
struct pool {
    uint64_t handle; /* 0: free, or destroyed */
    uint32_t used;   /* this place is taken */
    uint32_t lock;   /* for moments: guards r */
    int32_t device;  /* -1: a managed one of nowhere, that has not been used */
    bool passed;     /* the host's, or another process's: not counted */
    bool near;       /* an allocation has not had the room to let it grow */
    bool exportable; /* other processes can open it */
    uint32_t places; /* written down since they were last looked through; see export.c */
    uint32_t alone;  /* an attempt is under way, and nothing trims it */
    uint32_t closed; /* an attempt is being undone, and no other allocation made */
    uint64_t flight, others_flight; /* [allocations under way:16 | live units of 512 bytes:48], a sum of two as a slot has them */
    uint64_t hopeless; /* bytes: what it has free cannot serve these; see reuse.c */
    uint32_t hopes;    /* times that this was ended */
    struct ease {      /* which requests no stream has to wait for; see reuse.c */
        uint64_t size;
        uint32_t good, trust;
    } ease;
    struct spare {     /* what it gives back to have room; see pools.c */
        uint32_t wait, pause; /* how many requests go without */
    } spare;
    uint64_t freer[LAST_FREERS]; /* streams of the last frees, each in a word */
    uint64_t keeps;    /* bytes: its release threshold */
    uint64_t most;     /* bytes: the driver lets it have no more; 0: it may. See bound.c */
    uint64_t trimmed;  /* times */
    struct freers *freers;
    struct reserve r;
};

struct graph_pool { /* what graphs have of a device */
    uint32_t lock;  /* for moments */
    uint32_t tight; /* a launch is under way that has reserved less than it may take */
    uint64_t flying;   /* launches under way */
    uint64_t credit;   /* what others leave to that one: reserved, and not committed */
    uint64_t launched; /* so many, ever */
    uint64_t in_vain, in_vain_used; /* 1 + that, when a launch waited in vain for others; they used so much */
    struct reserve r;
};

enum { OBEYS_UNKNOWN, OBEYS, OBEYS_BY_PIECES, OBEYS_NOT };
#define NO_STAND_IN (~(uint64_t)0)

enum fences { FENCES_UNKNOWN, FENCES_GOOD, FENCES_NONE }; /* see fence_all_threads */

struct process {
    uint32_t ready; /* 0 in a child */
    uint32_t lock;  /* guards what opens accounts and changes contexts */
    uint32_t pid;   /* where the kernel cannot wipe: whose memory this is */
    uint64_t contexts_made;
    uint32_t standing[MAX_DEVICES];
    struct account accounts[MAX_DEVICES];
    struct context contexts[MAX_CONTEXTS];
    uint64_t primary[MAX_DEVICES]; /* the primary context's handle; 0: none counted */
    uint32_t primary_refs[MAX_DEVICES];
    uint64_t hidden[MAX_DEVICES]; /* small things without an address; see charge.h */
    uint32_t tight[MAX_DEVICES]; /* locks; see charge.h */
    uint32_t limiting; /* a lock: a context's limit is being changed */
    uint64_t exports; /* addresses that were exported: entries of SPACE_EXPORT */
    uint32_t imported; /* whether another process's pool was ever imported */
    struct pool pools[MAX_POOLS];
    uint64_t pools_charged[MAX_POOLS / 64]; /* a bit for each with a charge */
    uint32_t fences; /* enum fences, known before the first pool is */
    uint64_t pools_words[MAX_POOLS / 4096]; /* a bit for each word of these that is not 0 */
    uint32_t pools_probe;                   /* how far from its home one has had to be put */
    uint32_t devices;                       /* as the driver counts them; 0: not asked yet */
    uint64_t current[MAX_DEVICES];          /* a device's current pool: [pool_changes:32 | 1 + index:32] */
    uint32_t pool_changes;                  /* grows whenever that may have changed */
    uint64_t stands_in[MAX_DEVICES];        /* the pool in place of the default one; 0: not decided yet. See bound.c */
    uint64_t exacted;                       /* a bit for each device of which an exact reading was waited for */
    uint32_t standing_in;                   /* a lock: that is being decided */
    uint32_t obeys;                         /* whether the driver keeps pools to a greatest size */
    uint32_t contexts_ended;
    uint32_t captures; /* 1 once a stream was captured */
    uint64_t piece;    /* bytes by which pools grow, where that is more than PIECE */
    uint32_t coarse, fine; /* what growing was seen to do; see pool.c */
    struct graph_pool graphs[MAX_DEVICES];
    uint64_t graph_devices; /* a bit for each with a graph that allocates */
    struct table table;
};

extern struct driver real;
extern struct real_library real_library;

/* enter is called first by every override, with the address that it returns
 * to. NULL: the call is none of ours to count, pass it on. */
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

/* relieve gives back what this process's pools have and do not use, until there is
 * room for n bytes. */
void relieve(struct account *a, uint64_t n);

/* context_lives says whether the context of a handle still is the one of that
 * number. */
bool context_lives(const struct process *p, CUcontext handle, uint64_t number);

/* CALL passes a call on. An older driver may not have the function. */
#define CALL(name, ...) (real.name ? real.name(__VA_ARGS__) : CUDA_ERROR_NOT_FOUND)

/* account_of returns a device's account. NULL: see *refuse, which says whether
 * allocations are to fail (closed) or to pass uncounted. */
struct account *account_of(struct process *p, CUdevice device, bool *refuse);

/* is_open says whether what cannot be counted passes (the open policy) or is
 * refused. */
bool is_open(void);

/* where finds the device and the number of the current context. False: there
 * is none, and the driver is the one to say so. */
struct where {
    CUdevice device;
    uint64_t context;
};
bool where(struct process *p, struct where *w);
/* where_stream does so for the context of a stream. */
bool where_stream(struct process *p, struct where *w, CUstream stream);

/* context_number returns the number of a context of that device, a new one
 * where the handle was not seen before. context_forget takes the handle away
 * from its number, since a later context may have the same handle; false:
 * nothing is known of it. */
uint64_t context_number(struct process *p, CUcontext handle, CUdevice device);
bool context_forget(struct process *p, CUcontext handle, struct where *w);

#endif
