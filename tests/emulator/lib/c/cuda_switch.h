/* SPDX-License-Identifier: Apache-2.0 */

/* How the emulated driver behaves where drivers may differ, from the environment
 * variable GPU_EMULATOR_CUDA: name=value,name=value. The package's documentation
 * lists the names. A word's first value is the default, which
 * is what an NVIDIA H200 with driver 580.159.04 does, as far as that is known. */
#ifndef GPU_EMULATOR_CUDA_SWITCH_H
#define GPU_EMULATOR_CUDA_SWITCH_H

#include <stdbool.h>

enum { HOLES_FIT, HOLES_REMAP };
enum { LARGE_PIECES, LARGE_BLOCKS };
enum { REUSE_DOCUMENTED, REUSE_EAGER };
enum { OPPORTUNISTIC_DOCUMENTED, OPPORTUNISTIC_LAZY };
enum { FOLLOW_ALL, FOLLOW_DIRECT };
enum { TRIM_OBSERVED, TRIM_PASSED };
enum { SHRINK_SYNCHRONIZE, SHRINK_NEVER };
enum { QUERY_NOTHING, QUERY_OBSERVES };
enum { USED_LIVE, USED_PENDING };
enum { IPC_POOLS_SHRINK, IPC_POOLS_KEPT };
enum { POOL_MAX_PIECE, POOL_MAX_EXACT, POOL_MAX_REFUSES, POOL_MAX_IGNORED };
enum { POOL_MEMORY_DEVICE, POOL_MEMORY_CONTEXT };
enum { LOADING_ENVIRONMENT, LOADING_LAZY, LOADING_EAGER };
enum { HEAP_USE, HEAP_LAUNCH, HEAP_SET };
enum { GRAPHS_DISTINCT, GRAPHS_ORDERED };
enum { MANAGED_CREATE_REFUSED, MANAGED_CREATE_MADE };

struct switches {
    int version; /* as cuDriverGetVersion tells it; 0 is the world's */
    int kernel_us, map_us, piece_mib, domains, green_mib;
    int loading, heap, managed_create;
    int holes, large, reuse, opportunistic, follow, trim, shrink, query, used, ipc_pools, pool_max, pool_memory, graphs;
};
extern struct switches switches;

/* switches_read says on standard error what it does not understand. */
bool switches_read(void);

#endif
