/* SPDX-License-Identifier: Apache-2.0 */

/* Programs that take GPU memory as users' programs do: the allocators of the
 * usual frameworks, each with the constants and the way of the original, under a
 * load at the edge of what there is.
 *
 *     heap.c     memory that was had from the driver, cut into blocks
 *     trainer.c  the load of a training loop, for PyTorch's three ways
 *     torch.c    PyTorch's caching allocator, expandable segments, cudaMallocAsync
 *     rmm.c      RMM's pool and its asynchronous resource
 *     jax.c      JAX: one arena at the start
 *     nccl.c     NCCL: buffers registered with a second process, and released
 *     vllm.c     vLLM: two processes, a cache as large as there is room, CUDA IPC
 *     main.c     flags, and the books
 *
 * How a library does it was read in its source and is told in the comments; none
 * of its code is here. */
#ifndef MEMCAP_PROGRAMS_H
#define MEMCAP_PROGRAMS_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include "probe.h"

#define KiB ((uint64_t)1 << 10)
#define MiB ((uint64_t)1 << 20)
#define GiB ((uint64_t)1 << 30)

/* The books, which all threads and processes of a program share. */
struct tally {
    _Atomic uint64_t operations; /* what the allocator was asked, takes and gives */
    _Atomic uint64_t granted;    /* by the driver */
    _Atomic uint64_t refused;    /* by the driver, for want of memory */
    _Atomic uint64_t refusing;   /* ns that refusals took, in sum */
    _Atomic uint64_t slowest;    /* ns; the longest refusal */
    _Atomic uint64_t stalled;    /* ns; the longest request that was granted */
    _Atomic uint64_t stood;      /* ns; what requests that were granted took too long */
    _Atomic uint64_t failed;     /* times the program was told that there is no memory, after all that its allocator does about it */
    _Atomic uint64_t starting;   /* µs of processor time until each process was ready to begin */
    _Atomic int claimed;         /* somebody writes, or has written, failure */
    char failure[256];           /* what went wrong that should not have */
};

/* A run is what one thread of a program works with. */
struct run {
    struct cuda *cu;
    struct seat seat; /* the primary context, current, and a stream */
    struct tally *tally;
    uint64_t dice;  /* the state of the dice */
    uint64_t until; /* ns; when to end */
    uint64_t most;  /* operations after which to end */
    CUfunction kernel;
    uint64_t began; /* ns; of the request under way */
};

struct program {
    const char *name;
    void (*run)(struct run *);
    /* The program starts other processes, before it sits down by itself. */
    int early;
};

extern const struct program torch_programs[], rmm_programs[], jax_programs[], nccl_programs[], vllm_programs[];

/* going says whether there is time left and nothing has gone wrong. */
int going(struct run *r);
/* sit_down takes a seat on a device and loads the kernel; whether it could. */
int sit_down(struct run *r, int device);
/* compute lets a kernel run on a stream. */
void compute(struct run *r, CUstream stream);

uint64_t now_ns(void);
/* roll is a number below n; between is one from a to b. */
uint64_t roll(struct run *r, uint64_t n);
uint64_t between(struct run *r, uint64_t a, uint64_t b);
uint64_t round_up(uint64_t n, uint64_t to);

/* ASK makes a call that may be refused for want of memory; whether it was
 * granted. MUST makes one that has to succeed; whether it did. */
#define ASK(r, call) (ask_begins(r), ask_ended(r, #call, call))
#define MUST(r, call) must_be(r, #call, call)
void ask_begins(struct run *r);
int ask_ended(struct run *r, const char *call, CUresult result);
int must_be(struct run *r, const char *call, CUresult result);
void fail(struct run *r, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* started starts another process of the program, which shares the books; it has
 * one end of a pair of sockets, and dies with its parent. Both return: the child
 * with 0. */
int started(struct run *r, int *socket);
/* joined waits for that process. */
void joined(struct run *r, int pid);
/* tell and hear pass a message of some bytes; a descriptor goes along if fd is
 * not NULL and not -1. Whether it went. */
int tell(struct run *r, int socket, const void *data, size_t size, int fd);
int hear(struct run *r, int socket, void *data, size_t size, int *fd);

/* heap.c */

/* A heap is memory had from the driver in segments, cut into blocks by best fit
 * and put together again when neighbours are free. A block is free to one lane
 * alone, as most allocators keep them by stream. */
struct block {
    uint64_t at, size;
    int lane;
    int used;
    int mapped;    /* of expandable segments; others are always */
    CUevent event; /* whoever takes it waits for that, if there is one */
    struct block *before, *after; /* neighbours in the segment */
    struct block *next_free, *last_free;
    struct segment *segment;
    void *tag;
};

struct segment {
    uint64_t at, size;
    struct heap *heap;
    struct block *first;
    struct segment *next;
};

struct heap {
    struct segment *segments;
    struct block *free;
    uint64_t held; /* bytes in all segments */
};

/* heap_add makes memory a segment, one free block of a lane. */
struct block *heap_add(struct heap *h, uint64_t at, uint64_t size, int lane, int mapped);
/* heap_find is the smallest free block of a lane that a size fits in; -1 is any
 * lane. NULL if there is none. */
struct block *heap_find(struct heap *h, uint64_t size, int lane);
/* heap_cut takes a free block for a size and leaves the rest free, if that is at
 * least as much as rest. */
struct block *heap_cut(struct heap *h, struct block *b, uint64_t size, uint64_t rest);
/* heap_give frees a block; the block that it has become part of. */
struct block *heap_give(struct heap *h, struct block *b);
/* heap_drop takes a wholly free segment out of the heap. */
void heap_drop(struct heap *h, struct segment *s);
int wholly_free(const struct segment *s);
/* split_at cuts a block in two at an offset; the second one. They are not put
 * together again by themselves. join puts b and what follows it together. */
struct block *split_at(struct heap *h, struct block *b, uint64_t offset);
void join(struct heap *h, struct block *b);

/* trainer.c */

/* An allocator is what a training loop takes memory from. */
struct allocator {
    struct run *r;
    void *self;
    /* take returns what give wants back, NULL if there is none, whatever it did. */
    void *(*take)(void *self, uint64_t bytes, int lane);
    void (*give)(void *self, void *block);
    /* used_on says that a block is in use on another lane, too. */
    void (*used_on)(void *self, void *block, int lane);
    void (*empty)(void *self); /* gives back to the driver what is free */
    CUstream lanes[4];
};

/* train runs a training loop whose tensors take so much at most. */
void train(struct allocator *a, uint64_t bytes);

/* torch.c */

/* The caching allocator, for whoever else has PyTorch beneath: make_caching
 * prepares a, take and give work on it. */
struct caching;
struct caching *make_caching(struct run *r, struct allocator *a);
void end_caching(struct caching *c);

#endif
