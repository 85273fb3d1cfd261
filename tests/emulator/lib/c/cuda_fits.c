/* SPDX-License-Identifier: Apache-2.0 */

/* What tests ask of the emulator that no driver tells. */
#include "cuda_internal.h"

enum { FITS_LINEAR, FITS_POOL, FITS_BLOCKS, FITS_GRAPH };

/* cuEmulatorFits says whether the driver would grant a request now if the card had
 * so many bytes: of linear memory (kind 0), from a pool or the current one (1), or of
 * whole blocks of 2 MiB (2), or to launch a graph (3), which is given instead of a pool. Whatever is on the card counts, whoever has it. A pool
 * that has to grow needs whole pieces here: a card that is full to the last of them
 * gives it less, but one that only seems to be so cannot. Managed memory is asked about as
 * if it were the card's. */
CUresult emulator_fits(int kind, CUmemoryPool pool, size_t size, CUstream s, size_t card, int *fits) __asm__("cuEmulatorFits");
API CUresult emulator_fits(int kind, CUmemoryPool pool, size_t size, CUstream s, size_t card, int *fits)
{
    struct context *c;
    uint64_t unused;
    TRY(current(&c));
    MUST(fits && kind >= FITS_LINEAR && kind <= FITS_GRAPH);
    struct device *d = &devices[c->device];
    TRY(free_memory("cuMemGetInfo_v2", d, &unused));
    uint64_t used = d->total - unused, left = card > used ? card - used : 0;
    bool is = left >= round_up(size, BLOCK);
    if (kind == FITS_POOL)
        TRY(pool_fits(pool, size, s, left, &is));
    if (kind == FITS_GRAPH)
        TRY(graph_fits((CUgraphExec)pool, s, left, &is));
    if (kind == FITS_LINEAR && size < BLOCK && !is) {
        lock();
        is = range_fits_small(c->device, size);
        unlock();
    }
    *fits = is;
    return CUDA_SUCCESS;
}
