/* SPDX-License-Identifier: Apache-2.0 */

/* What the files of the emulated libcuda.so.1 share. A call checks that the
 * driver is initialised, finds the current context, asks the world (or, with
 * GPU_EMULATOR_ACCOUNTING=process, its own count) for the physical memory, and
 * only then takes the lock to write down what it got: a call that waits for the
 * world keeps no other waiting. */
#ifndef GPU_EMULATOR_CUDA_INTERNAL_H
#define GPU_EMULATOR_CUDA_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "cuda_abi.h"

#define API __attribute__((visibility("default")))
#define MUST(condition)                     \
    do {                                    \
        if (!(condition))                   \
            return CUDA_ERROR_INVALID_VALUE; \
    } while (0)
#define TRY(call)                  \
    do {                           \
        CUresult try_ = (call);    \
        if (try_ != CUDA_SUCCESS)  \
            return try_;           \
    } while (0)

enum { MAX_DEVICES = 16, MAX_INSTANCES = MAX_DEVICES * 16, UNIT = 512, THREADS_PER_MULTIPROCESSOR = 2048 };
#define NO_INSTANCE 0xFFFFFFFFu
#define BLOCK ((uint64_t)2 << 20) /* in which the hardware's memory is given out */

static inline uint64_t round_up(uint64_t n, uint64_t to) { return (n + to - 1) / to * to; }

struct context;
struct pool;
struct segment;

/* A clock is up to which free (its tick) something follows each of some lanes. */
struct clock {
    struct seen {
        uint64_t lane, tick;
    } *list;
    uint32_t count, room;
};

/* A lane is what is done in order: a stream. Times are nanoseconds of the
 * monotonic clock; 0 is always over. */
struct lane {
    uint64_t id;       /* never used again; 0 before its first use */
    uint64_t blocking; /* stands for all blocking streams of the context; 0: it is not one */
    uint64_t done_at;  /* of all that is on it */
    struct clock seen;
};

/* A moment is the place of a free in the order of work. */
struct moment {
    uint64_t lane, blocking, tick, at;
    struct context *ctx;
    uint64_t life; /* the context's serial */
};

/* order is what a context knows about its lanes. */
struct order {
    uint64_t life;
    struct lane legacy;
    uint64_t blocking, blocking_done_at, done_at;
    uint64_t legacy_tick; /* the last action in the legacy stream saw */
    struct clock others;  /* followed by blocking streams */
};

/* A range is a part of the address space that is given out: an allocation, a
 * reservation, or memory that has no address of its own (an array, a module).
 * `charged` is what it has of the card by itself; small ranges share blocks. */
enum kind {
    RANGE_DEVICE, RANGE_POOL, RANGE_GRAPH, RANGE_RESERVED, RANGE_IMPORTED, RANGE_MANAGED, RANGE_HOST,
    RANGE_GLOBAL, /* a module's variable */
    RANGE_HIDDEN, /* of an array or a module's code */
    RANGE_BLOCK, RANGE_FREE, /* inside cuda_range.c only */
};

struct range {
    enum kind kind;
    int device; /* ordinal */
    uint64_t at, size, charged;
    struct context *ctx;
    struct range *next, *prev; /* of the context's list, or of a bin */
    void *owner;               /* a pool, a graph's node, the mappings, the block */
    uint64_t shared;           /* the world's identity for it, 0 none */
    struct range *left, *right;
    uint32_t unit, units;
    struct segment *segment; /* of a pool */
};

struct context {
    int device;
    bool primary, alive;
    uint32_t flags, refs, version;
    uint64_t serial;  /* of this life: objects of an earlier one are dead */
    uint64_t charged; /* by the context itself */
    struct range *ranges;
    struct limits *limits; /* never NULL in a context that has lived */
    struct order order;
    struct context *green_of; /* of a green context: the primary one, whose memory it uses */
    unsigned int multiprocessors; /* of a green context, and of a client of MPS; else 0 */
    bool converted; /* it is known as a context */
};

struct device {
    uint32_t handle; /* the world's */
    char name[96], uuid[48], gpu_uuid[48]; /* the same where the device is a whole GPU */
    uint32_t domain, bus, slot;
    uint32_t gpu, gi, ci; /* the GPU, by the world's handle, and the instance on it or NO_INSTANCE */
    int major, minor, multiprocessors;
    uint64_t total, context; /* bytes: of memory, and of one context */
    atomic_bool lost;
    struct context primary;
    /* With accounting in the process: */
    uint64_t limit;
    _Atomic uint64_t used;
    /* Guarded by the lock: */
    struct pool *default_pool, *pool;
    uint64_t bins_map[2];
    struct range *bins[96];
};

/* mps_connect asks the daemon of the pipe directory for its server; *server is 0 if no daemon
 * listens there. mps_join tells the world, once the driver is open. mps_leave is for a process that
 * does not become a client, or is a fork of one. */
CUresult mps_connect(int *server);
CUresult mps_join(int server);
void mps_leave(void);
bool mps_client(void);
/* mps_multiprocessors is how many a context has that is made now. mps_alive is the error by which
 * a client learns that its contexts are gone. */
int mps_multiprocessors(struct device *d);
CUresult mps_alive(void);

extern struct device devices[MAX_DEVICES];
extern int device_count;
extern pthread_mutex_t cuda_lock;

/* growing is held, before the lock, by what asks for memory that others of the
 * process will share: a block, a pool's piece, a graph's. Two at once would ask
 * for more than the process needs, which the hardware's driver does not. */
extern pthread_mutex_t growing;

static inline void lock(void) { pthread_mutex_lock(&cuda_lock); }
static inline void unlock(void) { pthread_mutex_unlock(&cuda_lock); }

/* --- cuda_core.c */

/* ready is CUDA_ERROR_NOT_INITIALIZED before cuInit, and for ever in a child of
 * a process that had called it. */
CUresult ready(void);
CUresult find_device(CUdevice ordinal, struct device **d);
/* charge asks for so many bytes of a card under the name of a call, or gives
 * them back if they are negative. */
CUresult charge(const char *call, struct device *d, int64_t bytes);
CUresult free_memory(const char *call, struct device *d, uint64_t *bytes);
CUresult share(struct device *d, uint64_t bytes, uint64_t *id);
CUresult open_shared(const char *call, uint64_t id, int *device, uint64_t *bytes);
void close_shared(uint64_t id);
CUresult export_shared(uint64_t id, int *fd);
uint64_t next_serial(void);
int driver_version(void); /* of CUDA, as cuDriverGetVersion has it */

/* --- cuda_checkpoint.c */

/* await_turn waits until the process is unlocked. */
CUresult await_turn(void);
/* store and load keep a word of the card's memory. */
CUresult store(uint64_t at, uint64_t word);
CUresult load_word(uint64_t at, uint64_t *word);
/* asks_nobody says that the process counts by itself, so that the world knows nothing of it. */
bool asks_nobody(void);
/* translate makes an error of CUDA of the world's answer. */
CUresult translate(int nvml);

/* --- cuda_version.c */

/* names_until is the version after which names came that are not there. */
int names_until(void);

/* --- cuda_context.c */

/* current is the thread's context, ready to be used. */
CUresult current(struct context **ctx);
struct context *peek(void); /* or NULL; it may be a green one, which current never is */
struct context *context_get(CUcontext handle);
static inline bool lives(const struct context *ctx, uint64_t serial) { return ctx->alive && ctx->serial == serial; }

/* --- cuda_limit.c */
bool limits_begin(struct context *c); /* for a new life */
/* limits_launch makes room for a kernel of that name. */
CUresult limits_launch(struct context *c, const char *name);

/* --- cuda_range.c: all under the lock, but for range_free_all */

/* range_take gives addresses to a range of so many bytes; NULL if there are none. */
struct range *range_take(enum kind kind, int device, struct context *ctx, uint64_t size);
/* range_low is the same below 4 GiB, for the calls of CUDA 2. */
struct range *range_low(enum kind kind, int device, struct context *ctx, uint64_t size);
/* range_small takes a part of a block; NULL if no block has room. */
struct range *range_small(int device, struct context *ctx, uint64_t size);
bool range_fits_small(int device, uint64_t size); /* whether one has */
bool range_add_block(int device);
/* range_hidden is memory without an address. */
struct range *range_hidden(int device, struct context *ctx, uint64_t size);
/* range_adopt enters host memory. */
struct range *range_adopt(enum kind kind, int device, struct context *ctx, uint64_t at, uint64_t size);
/* range_at is the range that begins at an address, range_around the one that
 * has it inside. */
struct range *range_at(uint64_t at);
struct range *range_around(uint64_t at);
/* range_give ends a range, and returns what is to be given back to the card. */
uint64_t range_give(struct range *r);
/* drop ends a range and tells the world, for whom the lock must be free. */
CUresult drop_unlock(const char *call, struct range *r);

/* --- cuda_object.c */

enum type { CONTEXT = 1, STREAM, EVENT, MODULE, FUNCTION, LIBRARY, ARRAY, MIPMAP, POOL, MEMORY, GRAPH, NODE, EXEC, DESC };

/* object_new gives room for an object of up to OBJECT_ROOM bytes, all zero;
 * object_get finds it by its handle, or NULL for whatever is none: freed
 * handles and handles of another type are known for what they are. */
enum { OBJECT_ROOM = 240 };
void *object_new(enum type type);
void *object_get(const void *handle, enum type type);
void object_free(void *object);
/* object_each visits all objects of a type, until visit returns false. */
void object_each(enum type type, bool (*visit)(void *object, void *arg), void *arg);
bool objects_begin(void);

/* --- cuda_module.c */
/* modules_begin loads into a new context what every context has. */
CUresult modules_begin(const char *call, struct context *c);
/* kernel_us is how many microseconds a kernel takes: that is in its name, busy_17us,
 * or a switch. */
uint64_t kernel_us(CUfunction f);

/* --- cuda_memory.c */
/* allocate takes ordinary memory for the current context, allocate_in for another. */
CUresult allocate(const char *call, CUdeviceptr *out, uint64_t size);
CUresult allocate_in(const char *call, CUdeviceptr *out, struct context *c, uint64_t size);

/* --- cuda_property.c */

/* What an allocation type and a location mean together. */
enum backing { BACKED_BY_CARD, BACKED_BY_HOST, BACKED_BY_MANAGED };
struct property {
    enum backing backing;
    int device;             /* ordinal: of the card, or the preferred one, else 0 */
    CUmemLocation location; /* with 0 for an id that is to be ignored */
};
enum purpose { FOR_CREATE, FOR_POOL };
/* property_of is CUDA_ERROR_INVALID_VALUE for what this version does not have,
 * or not for this purpose. */
CUresult property_of(int type, const CUmemLocation *location, enum purpose purpose, struct property *p);
/* property_attribute answers cuMemPoolGetAttribute about a pool's properties. */
CUresult property_attribute(const CUmemPoolProps *props, int attribute, void *value);
/* property_forget takes a pool that is destroyed out of the current ones; the lock is held. */
void property_forget(const struct pool *p);
int locality_domains(const struct device *d);

/* --- cuda_order.c: under the lock, but for the first three */
uint64_t order_now(void);
bool order_passed(uint64_t at);
void order_sleep(uint64_t at);
/* lane_of is a stream's lane; NULL if it is none. */
struct lane *lane_of(CUstream s, struct context *c);
/* lane_work puts work that takes so many microseconds on a lane, lane_after work
 * that is done at a moment. */
void lane_work(struct lane *l, struct context *c, uint64_t us);
void lane_after(struct lane *l, struct context *c, uint64_t at);
/* lane_moment is the place of a free that is put on a lane now. */
struct moment lane_moment(struct lane *l, struct context *c);
/* lane_follows says whether what is put on a lane now comes after a free. */
bool lane_follows(const struct lane *l, const struct context *c, const struct moment *m);
bool order_covers(const struct clock *seen, const struct moment *m);

/* --- cuda_piece.c: under the lock */

/* A heap is the memory of a pool, in pieces. A usable says which freed memory may
 * be taken. */
struct heap;
typedef bool usable(const struct moment *m, void *arg);
struct heap *heap_new(void);
void heap_end(struct heap *h);
/* heap_add adds a piece, which goes back in parts of so many bytes. */
bool heap_add(struct heap *h, uint64_t size, uint64_t grain);
/* heap_take is a used segment, or NULL if there is no hole that is large enough. */
struct segment *heap_take(struct heap *h, uint64_t size, usable *may, void *arg);
/* heap_remap is the same, of blocks from anywhere. */
struct segment *heap_remap(struct heap *h, uint64_t size, usable *may, void *arg);
/* heap_fits says whether heap_take would find a hole, or heap_remap make one. */
bool heap_fits(struct heap *h, uint64_t size, usable *may, void *arg, bool remap);
/* segment_over is when the last use is over of what a segment was before. */
uint64_t segment_over(const struct segment *s);
/* segment_shared is the world's number for the memory that a segment is part of, which
 * has so many bytes; 0: it has none. segment_share gives it one: from then on that memory
 * stays as long as the pool. */
uint64_t segment_shared(const struct segment *s, uint64_t *size);
void segment_share(struct heap *h, struct segment *s, uint64_t id);
/* heap_free gives back what was freed at a moment; NULL: nothing uses it any more. */
void heap_free(struct heap *h, struct segment *s, const struct moment *m);
/* heap_settle makes freed memory free. */
void heap_settle(struct heap *h, usable *may, void *arg);
/* heap_shrink takes free parts away, and returns their bytes, while so many stay. */
uint64_t heap_shrink(struct heap *h, uint64_t keep);
struct amounts {
    uint64_t reserved, live, freed; /* bytes: of all pieces, allocated, freed but not free */
    uint64_t shared;                /* of pieces of which something was exported */
    uint64_t oldest;                /* tick of the freed; UINT64_MAX if there are none */
};
struct amounts heap_amounts(const struct heap *h);

/* --- cuda_vmm.c: under the lock */
struct memory;
/* memory_map holds the memory of a handle as a mapping does, if it was made for
 * tiles; NULL if it is none. memory_unmap_unlock ends that. */
struct memory *memory_map(CUmemGenericAllocationHandle handle, uint64_t offset);
CUresult memory_unmap_unlock(const char *call, struct memory *m);

/* --- cuda_array.c */
/* arrays_end unmaps what sparse arrays of a context have; the lock is held. */
void arrays_end(const char *call, const struct context *c);

/* --- cuda_pool.c */
bool pools_begin(void);
/* pool_new makes a pool, pool_find finds one that was not destroyed, by its
 * handle, or NULL, both under the lock. */
struct pool *pool_new(const CUmemPoolProps *props, const struct property *of, bool is_default);
struct pool *pool_find(CUmemoryPool handle);
const CUmemPoolProps *pool_props(const struct pool *p);
uint64_t pool_max_size(const CUmemPoolProps *props);
bool pool_imported(const struct pool *p);
/* pools_observe is what a synchronisation that has ended does to the pools: the
 * frees that it covers are over, and pools give back what is beyond their
 * thresholds on a device. */
CUresult pools_observe(const char *call, int device, usable *covered, void *arg);
/* pools_oldest_tick is that of the oldest free that is not over; UINT64_MAX: none. */
uint64_t pools_oldest_tick(void);
/* pools_empty gives up all that is not used; the lock is held. */
uint64_t pools_empty(int device);
/* pool_fits says whether a pool has room for a request on a stream, or grows by whole
 * pieces for it on a card that has so many bytes left. */
CUresult pool_fits(CUmemoryPool handle, uint64_t size, CUstream s, uint64_t left, bool *fits);
/* pool_free ends an allocation, at a moment or at once (NULL). It takes the lock
 * held and gives it up. */
CUresult pool_free(const char *call, struct range *r, const struct moment *m);

/* --- cuda_pool_ipc.c */
/* let_go_later is for what is shared and not held any more, if it is anything; the lock is
 * held. pools_let_go tells the world of it; the lock is free. */
void let_go_later(uint64_t shared);
void pools_let_go(void);
/* pool_close ends an imported allocation. It takes the lock held and gives it up. */
CUresult pool_close(const char *call, struct range *r);

/* --- cuda_stream.c */

/* stream_check finds the current context, and whether a stream may be used in
 * it; the default ones always may. */
CUresult stream_check(CUstream s, struct context **ctx);
/* stream_work puts work on a stream that takes so many microseconds. */
void stream_work(CUstream s, struct context *c, uint64_t us);
/* context_wait waits for all that a context has been given to do. */
CUresult context_wait(const char *call, struct context *c);
/* legacy_wait waits like a copy that is no stream's. */
void legacy_wait(CUstream s, struct context *c);
/* The twins of calls on streams know the default stream by another handle. */
static inline CUstream per_thread(CUstream s) { return s ? s : CU_STREAM_PER_THREAD; }

/* --- cuda_capture.c */
struct graph;
struct node;
/* capture_of is the graph that a stream is being captured into, or NULL. */
CUresult capture_of(CUstream s, struct graph **into);
/* capture_step makes a node what the capture of a stream goes on from. */
void capture_step(CUstream s, struct node *n);
/* capture_work makes a node of what would be done on a stream, in so many
 * microseconds; false if the
 * stream is not being captured. */
bool capture_work(CUstream s, int node_type, uint64_t us, CUresult *r);
/* unsafe_in_capture is CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED where a capture
 * forbids the call. */
CUresult unsafe_in_capture(void);

/* --- cuda_graph.c, cuda_graph_run.c */
struct graph *graph_new(void); /* with the lock held, like the next two */
void graph_end(struct graph *g);
struct node *graph_add(struct graph *g, int type);
struct node *graph_add_work(struct graph *g, int type, uint64_t us);
CUresult graph_capture_alloc(struct graph *g, CUstream s, int device, uint64_t size, CUdeviceptr *out);
CUresult graph_capture_free(struct graph *g, CUstream s, CUdeviceptr at);
/* graph_memory_free ends an allocation, at a moment or at once (NULL). It takes the lock
 * held and gives it up. */
CUresult graph_memory_free(struct range *r, const struct moment *m);
uint64_t graph_empty(int device);    /* like pools_empty */
uint64_t graphs_oldest_tick(void);   /* like pools_oldest_tick */
/* graph_fits says whether a launch has memory enough, or can get it on a card that has so
 * many bytes left. */
CUresult graph_fits(CUgraphExec handle, CUstream s, uint64_t left, bool *fits);

#endif
