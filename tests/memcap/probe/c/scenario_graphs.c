/* SPDX-License-Identifier: Apache-2.0 */

/* The memory of graphs: a driver keeps some for all graphs of a device, and takes for a
 * launch what that lacks. */

#include "scenario.h"

static CUstream new_stream(struct scene *s)
{
    CUstream stream = NULL;
    MUST(s, s->cu->cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    return stream;
}

/* captured makes a graph that has, one after the other, memory of these sizes while a
 * kernel runs. */
static CUgraphExec captured(struct scene *s, CUfunction busy, const uint64_t *sizes, int count)
{
    CUgraph graph;
    CUgraphExec exec = NULL;
    CUstream stream = new_stream(s);
    if (!stream || !MUST(s, s->cu->cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)))
        return NULL;
    for (int i = 0; i < count; i++) {
        CUdeviceptr p;
        if (!MUST(s, s->cu->cuMemAllocAsync(&p, sizes[i], stream)) || !launch(s, busy, stream) || !MUST(s, s->cu->cuMemFreeAsync(p, stream)))
            return NULL;
    }
    if (MUST(s, s->cu->cuStreamEndCapture(stream, &graph)) && MUST(s, s->cu->cuGraphInstantiateWithFlags(&exec, graph, 0)))
        MUST(s, s->cu->cuGraphDestroy(graph));
    MUST(s, s->cu->cuStreamDestroy_v2(stream));
    return exec;
}

/* Its allocations come to more than there is, but what one has freed the next has. */
static void graph_that_has_its_own_again(struct scene *s)
{
    const uint64_t sizes[] = {s->room * 5 / 8, s->room / 4, s->room / 2};
    CUfunction busy = kernel(s, 500);
    CUgraphExec exec = busy ? captured(s, busy, sizes, 3) : NULL;
    CUstream stream = new_stream(s);
    CUdeviceptr p;
    for (int round = 0; exec && round < 3; round++) {
        for (int i = 0; i < 4; i++)
            ASK(s, 0, s->cu->cuGraphLaunch(exec, stream));
        MUST(s, s->cu->cuStreamSynchronize(stream));
        /* What the graph does not have now, others may. */
        if (ASK(s, s->room / 2, s->cu->cuMemAlloc_v2(&p, s->room / 2)) && MUST(s, s->cu->cuMemFree_v2(p)))
            given_back(s, s->room / 2);
    }
}

/* Each is as large as a card that would hold one of them: it runs them one after the
 * other. */
static void graphs_on_two_streams(struct scene *s)
{
    const uint64_t size = s->room * 3 / 4;
    CUfunction busy = kernel(s, 3000);
    CUgraphExec execs[2];
    CUstream streams[2];
    for (int i = 0; i < 2; i++) {
        execs[i] = busy ? captured(s, busy, &size, 1) : NULL;
        streams[i] = new_stream(s);
        if (!execs[i] || !streams[i])
            return;
    }
    for (int i = 0; i < 16; i++)
        ASK(s, 0, s->cu->cuGraphLaunch(execs[i % 2], streams[i % 2]));
    for (int i = 0; i < 2; i++)
        MUST(s, s->cu->cuStreamSynchronize(streams[i]));
}

/* What is refused is refused at once the next time, and leaves nothing behind. */
static void graph_refused_again_and_again(struct scene *s)
{
    const uint64_t sizes[] = {s->room / 4, s->room / 2};
    CUfunction busy = kernel(s, 100);
    CUgraphExec exec = busy ? captured(s, busy, sizes, 2) : NULL;
    CUstream stream = new_stream(s);
    CUdeviceptr most, p;
    if (!exec || !MUST(s, s->cu->cuMemAlloc_v2(&most, s->room * 5 / 8)))
        return;
    for (int i = 0; i < 50; i++)
        ASK(s, 0, s->cu->cuGraphLaunch(exec, stream));
    if (ASK(s, s->room * 5 / 16, s->cu->cuMemAlloc_v2(&p, s->room * 5 / 16)))
        MUST(s, s->cu->cuMemFree_v2(p));
    MUST(s, s->cu->cuMemFree_v2(most));
    ASK(s, 0, s->cu->cuGraphLaunch(exec, stream));
    MUST(s, s->cu->cuStreamSynchronize(stream));
}

const struct scenario graph_scenarios[] = {
    {"graph-that-has-its-own-again", graph_that_has_its_own_again, 0},
    {"graphs-on-two-streams", graphs_on_two_streams, 0},
    {"graph-refused-again-and-again", graph_refused_again_and_again, 0},
    {0},
};
