/* SPDX-License-Identifier: Apache-2.0 */

/* What the files about graphs share. */
#ifndef GPU_EMULATOR_CUDA_GRAPH_H
#define GPU_EMULATOR_CUDA_GRAPH_H

#include "cuda_stream.h"

/* graph_memory is what an allocation node allocates; it outlives the node while
 * an executable graph has it, or the graph has run and nothing has freed it. */
struct graph_memory {
    struct range *range;
    int device, refs;
    bool live;
    CUDA_MEM_ALLOC_NODE_PARAMS params;
};

struct node {
    int type;
    struct graph *graph, *child;
    struct node *next;
    struct graph_memory *memory; /* that it allocates or frees */
    CUdeviceptr at;
    uint64_t us;
};

struct graph {
    struct node *first, *last;
    size_t count;
    bool is_child;
};

/* exec is a graph that can run: what it does to memory, in order. */
struct exec {
    uint64_t flags, us; /* us: microseconds that its kernels take, one after the other */
    uint64_t id, done_at; /* done_at: of its last run */
    size_t count, room;
    struct step {
        struct graph_memory *memory;
        bool frees;
    } *steps;
};

/* graph_memory_release lets go of one reference; the lock is held. */
void graph_memory_release(struct graph_memory *m);

#endif
