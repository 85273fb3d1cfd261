/* SPDX-License-Identifier: Apache-2.0 */

/* What the files about memory pools share. */
#ifndef GPU_EMULATOR_CUDA_POOL_H
#define GPU_EMULATOR_CUDA_POOL_H

#include "cuda_internal.h"

struct pool {
    int device;
    bool is_default, doomed, on_host, imported; /* doomed: destroyed, but for what is outstanding; on_host: nothing is charged */
    int reuse[3];
    uint64_t threshold, reserved_high, used_high;
    struct heap *heap;
    struct pool *next;
    CUmemPoolProps props;
    uint64_t shared;          /* the world's number for it, once exported or imported */
    uint64_t imports, opened; /* of an imported one: allocations, and their bytes */
};
_Static_assert(sizeof(struct pool) <= OBJECT_ROOM, "a pool is an object");

/* pool_leave ends a pool that was destroyed when nothing is outstanding, and returns the
 * bytes that the world is to be told of (pool_settle). The lock is held. */
uint64_t pool_leave(struct pool *p);
/* pool_settle tells the world of what pools have given up. The lock is free. */
CUresult pool_settle(const char *call, int device, uint64_t bytes);

#endif
