/* SPDX-License-Identifier: Apache-2.0 */

#include "scenario.h"

/* Eight streams, one after the other: each takes a quarter of the room, runs a
 * kernel and gives it back. No more than that is ever in use by the program, but a
 * driver whose pool grows before it reuses what another stream has freed ends up
 * with eight times as much. */
static void eight_streams(struct scene *s)
{
    CUstream streams[8];
    CUfunction busy = kernel(s, 2000);
    uint64_t bytes = s->room / 4;
    for (int i = 0; i < 8; i++)
        if (!MUST(s, s->cu->cuStreamCreate(&streams[i], CU_STREAM_NON_BLOCKING)))
            return;
    for (int round = 0; round < 4; round++)
        for (int i = 0; i < 8; i++) {
            CUdeviceptr p;
            if (!ASK(s, bytes, s->cu->cuMemAllocAsync(&p, bytes, streams[i])))
                continue;
            if (!launch(s, busy, streams[i]) || !MUST(s, s->cu->cuMemFreeAsync(p, streams[i])))
                return;
            given_back(s, bytes);
        }
    for (int i = 0; i < 8; i++)
        MUST(s, s->cu->cuStreamSynchronize(streams[i]));
}

/* A pool that keeps everything: what one stream has freed behind a kernel, another
 * wants, again and again. */
static void freed_on_one_wanted_on_another(struct scene *s)
{
    CUstream streams[2];
    CUfunction busy = kernel(s, 2000);
    CUmemoryPool pool;
    uint64_t keep = UINT64_MAX, bytes = s->room / 8;
    CUdeviceptr p[8];
    for (int i = 0; i < 2; i++)
        if (!MUST(s, s->cu->cuStreamCreate(&streams[i], CU_STREAM_NON_BLOCKING)))
            return;
    if (!MUST(s, s->cu->cuDeviceGetDefaultMemPool(&pool, s->seat.device)) ||
        !MUST(s, s->cu->cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &keep)))
        return;
    for (int round = 0; round < 8; round++) {
        CUstream stream = streams[round % 2];
        int got = 0;
        while (got < 7 && ASK(s, bytes, s->cu->cuMemAllocAsync(&p[got], bytes, stream)))
            got++;
        if (!launch(s, busy, stream))
            return;
        while (got) {
            if (!MUST(s, s->cu->cuMemFreeAsync(p[--got], stream)))
                return;
            given_back(s, bytes);
        }
    }
    for (int i = 0; i < 2; i++)
        MUST(s, s->cu->cuStreamSynchronize(streams[i]));
}

const struct scenario pool_scenarios[] = {
    {"eight-streams-take-run-and-give-back", eight_streams, 0},
    {"freed-on-one-stream-wanted-on-another", freed_on_one_wanted_on_another, 0},
    {0},
};
