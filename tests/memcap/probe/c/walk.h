/* SPDX-License-Identifier: Apache-2.0 */

/* A walk makes calls at random, of all that take and give memory and of all that
 * order them, near the edge of what there is. Some threads of two processes take turns
 * at it, each thread with a default stream of its own, and now and then all of them go
 * at once. What one process exports the other opens, and they let go of it in any order.
 *
 *     walk.c          turns, steps, and the judge
 *     walk_things.c   memory: asking, giving back, passing on
 *     walk_order.c    what orders it: contexts, streams, events, pools, limits
 *
 * The judge is the emulated driver, which says before each request whether a card
 * of the cap's size would grant it (cuEmulatorFits): one that is refused all the
 * same was refused early, and if the next try of the same is too, it was refused
 * twice. What is refused while others are at work is tried again when they rest,
 * and judged then. */
#ifndef MEMCAP_WALK_H
#define MEMCAP_WALK_H

#include <pthread.h>
#include <sys/types.h>

#include "scenario.h"

enum {
    PROCESSES = 2, THREADS = 3, /* of each process */
    EVERYBODY = PROCESSES * THREADS,
    CONTEXTS = 3, STREAMS = 8, EVENTS = 6, POOLS = 5, THINGS = 400, KERNELS = 3, GRAPHS = 4, LETTERS = 6, SHIFT = 48, ERRAND = 24,
    TOLD = 40, /* refusals of what would fit, of each process, that are told one by one */
};
enum kind { LINEAR, POOLED, BLOCKS, GRAPH }; /* as the judge knows them */

/* A thing is memory that is held: by a call, or of a pool. */
struct thing {
    const struct call *call; /* NULL: of a pool */
    CUmemoryPool pool;       /* that it came from, if not from the current one */
    struct item item;
    uint64_t bytes;
    int ctx;
    int used, managed;
    int letter; /* 1 plus that which offers it to the other process; 0 none */
};

struct request {
    const struct call *call; /* NULL: of a pool */
    CUmemoryPool pool;       /* NULL: the current one; of a launch: the graph */
    CUstream stream;
    uint64_t bytes;
};

struct thread {
    pthread_t id;
    int number, ctx;
    uint64_t seed;
    struct request refused[ERRAND]; /* while all were at it */
    int refusals;
};

/* A book is what one process writes down; the other reads it in its own turn. */
struct book {
    uint64_t live, managed, pooled; /* bytes: held; managed of them; of managed pools */
    uint64_t granted, refused, early, twice, errands, passed;
    char first[256], failure[256];
    int ready;
};

/* A letter offers ordinary memory, or memory of a pool, to the other process. While it is
 * open the owner may not free it: "undefined behavior", says cuIpcOpenMemHandle, and "must
 * be freed from all importing processes before", cuMemPoolImportPointer. */
struct letter {
    int from, offered, open; /* from: 1 plus the process */
    uint64_t pool;           /* the pool's number; 0: it is of none */
    CUipcMemHandle handle;
    CUmemPoolPtrExportData data;
};

/* What both processes have. */
struct common {
    struct book books[PROCESSES];
    struct letter letters[LETTERS];
    uint64_t steps, target;

    /* Whose turn it is, or EVERYBODY's, and the how manieth. */
    pthread_mutex_t lock;
    pthread_cond_t turned;
    int turn, at_work, over;
    uint64_t turns, share; /* share: steps of this turn */
};

struct pool_of {
    CUmemoryPool pool;
    int managed, shared;
    uint64_t number; /* never used again; 0: it was not sent to the other process */
};

struct walk {
    struct cuda *cu;
    CUdevice device;
    CUresult (*fits)(int kind, CUmemoryPool pool, size_t bytes, CUstream s, size_t card, int *fits);
    CUresult (*info)(size_t *, size_t *); /* the driver's own */
    uint64_t cap, room, seed;
    int process, post; /* post: the socket to the other process */
    pid_t child;
    int domains, managed; /* whether the driver has locality domains, and managed memory by hand */
    struct {
        CUcontext ctx;
        CUfunction busy[KERNELS];
    } contexts[CONTEXTS]; /* the first is the primary one */
    struct {
        CUstream stream;
        int ctx;
    } streams[STREAMS];
    struct {
        CUevent event;
        int ctx;
    } events[EVENTS];
    struct pool_of pools[POOLS], theirs[POOLS]; /* theirs: opened here */
    struct {
        CUgraphExec exec;
        uint64_t bytes;
    } graphs[GRAPHS]; /* of the primary context, that have memory while they run */
    struct thing things[THINGS];
    struct thread threads[THREADS];
    struct common *common;
    struct book *book; /* of this process */
};
extern struct walk w;

/* --- walk.c */

uint64_t dice(uint64_t *state, uint64_t n);
/* say writes down the first of its kind, as one word. */
void say(char to[256], const char *format, ...) __attribute__((format(printf, 2, 3)));
/* right says whether a call did what it had to. */
int right(const char *call, CUresult r);
#define RIGHT(call) right(#call, w.cu->call)
/* fits asks the judge. What is managed is the cap's, but not on the card. */
int fits(const struct request *q);
/* refused writes down a request that was refused; fit is what the judge had said. */
void refused(const struct request *q, int fit);

/* --- walk_things.c */

/* wish is a request at random. */
struct request wish(struct thread *t);
uint64_t size_of(uint64_t *seed);
CUresult ask(const struct request *q, struct thread *t, struct item *i);
const char *name_of(const struct request *q);
int is(const struct request *q, const char *name);
void keep(struct thing *to, const struct thread *t, const struct request *q, struct item i);
struct thing *room_for_one(void);
/* give gives a thing back, give_any so many at random. What the other process has open
 * may have to stay. */
void give(struct thread *t, struct thing *o);
void give_any(struct thread *t, int count);
/* forget is for what went with something else. */
void forget(struct thing *o);
/* survives says whether a thing is there still when the context is gone in which it
 * was made. */
int survives(const struct thing *o);
/* pass_on does something to what was, or could be, exported; collect opens what the other
 * process has sent. */
void pass_on(struct thread *t);
/* pool_in_use says whether the other process may have something of a pool open. */
int pool_in_use(const struct pool_of *p);
void collect(struct thread *t);

/* --- walk_order.c */

void sit_in(struct thread *t, int ctx);
void furnish(int ctx);
void new_stream(struct thread *t, int i);
void new_event(struct thread *t, int i);
CUstream any_stream(struct thread *t);
CUfunction kernel_for(struct thread *t, CUstream s);
/* context_of is whose a stream is. */
int context_of(const struct thread *t, CUstream s);
/* order does one thing that takes no memory, change one that is rare. */
void order(struct thread *t);
void change(struct thread *t);

#endif
