/* SPDX-License-Identifier: Apache-2.0 */

/* What the files about streams, events and captures share. */
#ifndef GPU_EMULATOR_CUDA_STREAM_H
#define GPU_EMULATOR_CUDA_STREAM_H

#include "cuda_internal.h"

struct capture {
    uint64_t id;
    struct graph *graph;
    void *thread;
    struct stream *origin;
    int mode;
    bool invalid, adopted; /* adopted: into a graph of the program's own */
    struct capture *next;
};

struct stream {
    struct context *ctx;
    uint64_t serial, id, captured; /* captured: the capture's number */
    unsigned int flags;
    int priority;
    struct node *last;
    struct lane lane;
    struct context *green; /* it is of, or NULL */
};
_Static_assert(sizeof(struct stream) <= OBJECT_ROOM, "a stream is an object");

struct event {
    struct context *ctx;
    uint64_t serial, captured;
    struct node *last;
    uint64_t at, stamp; /* when what it was recorded after is done, and itself */
    struct clock seen;
};

enum { STREAM_NON_BLOCKING = 1 };

/* --- cuda_stream.c */

/* The thread's default stream. */
extern _Thread_local struct stream own_stream;
/* stream_get is a stream by its handle; the legacy default stream is NULL. The
 * lock is held, as for all that follow. */
CUresult stream_get(CUstream handle, struct stream **s);
/* events_wait sleeps until a moment, and tells the pools what is over then; the
 * lock is free. */
CUresult events_wait(const char *call, int device, struct clock *seen, uint64_t at);

/* --- cuda_capture.c */
struct capture *capture_by(uint64_t id);
/* capture_locked finds a stream and its capture, or NULL. */
CUresult capture_locked(CUstream handle, struct stream **s, struct capture **c);

/* --- cuda_order.c */

/* order_merge has a clock know what another knows. */
void order_merge(struct clock *to, const struct clock *from);
void order_forget(struct clock *c);
uint64_t order_tick(void); /* of the last free */
/* lane_snapshot is what a lane follows, itself included. */
void lane_snapshot(struct lane *l, struct context *c, struct clock *out);
/* lane_wait has a lane go on after what an event was recorded after. */
void lane_wait(struct lane *l, struct context *c, const struct clock *seen, uint64_t at);
/* lane_done is when all that is on a lane will be done. */
uint64_t lane_done(const struct lane *l, const struct context *c);

#endif
