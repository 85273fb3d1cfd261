/* SPDX-License-Identifier: Apache-2.0 */

/* The order of work. No work is done; what is on a stream is only done at a
 * moment, which is known when it is put there. Each stream is a lane, and so is
 * the legacy default stream of each context:
 *
 *   "the legacy stream first waits on all blocking streams, the action is queued
 *   in the legacy stream, and then all blocking streams wait on the legacy
 *   stream" (Driver API, Stream synchronization behavior)
 *
 * A memory pool wants to know whether a stream follows a free on another one. So
 * every free has a number, its tick, and a lane knows up to which tick it follows
 * which other lanes: what it waited for by events, and what those followed. */
#include <errno.h>
#include <stdlib.h>
#include <time.h>

#include "cuda_stream.h"
#include "cuda_switch.h"

static uint64_t tick;

static uint64_t max(uint64_t a, uint64_t b) { return a > b ? a : b; }

uint64_t order_tick(void) { return tick; }

uint64_t order_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
}

bool order_passed(uint64_t at) { return !at || at <= order_now(); }

void order_sleep(uint64_t at)
{
    if (order_passed(at))
        return;
    struct timespec t = {(time_t)(at / 1000000000), (long)(at % 1000000000)};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL) == EINTR)
        ;
}

/* --- clocks ---------------------------------------------------------------- */

/* prune forgets what no free that is still pending can be asked about. */
static void prune(struct clock *c)
{
    uint64_t oldest = pools_oldest_tick(), graphs = graphs_oldest_tick();
    oldest = graphs < oldest ? graphs : oldest;
    uint32_t kept = 0;
    for (uint32_t i = 0; i < c->count; i++)
        if (c->list[i].tick >= oldest)
            c->list[kept++] = c->list[i];
    c->count = kept;
}

static void know(struct clock *c, uint64_t lane, uint64_t at)
{
    for (uint32_t i = 0; i < c->count; i++)
        if (c->list[i].lane == lane) {
            c->list[i].tick = max(c->list[i].tick, at);
            return;
        }
    if (c->count == c->room)
        prune(c);
    if (c->count >= c->room / 2 + c->room / 4) {
        uint32_t room = c->room ? c->room * 2 : 8;
        struct seen *list = realloc(c->list, room * sizeof *list);
        if (list) {
            c->list = list;
            c->room = room;
        }
    }
    if (c->count < c->room) /* else a dependency is not known, and costs memory */
        c->list[c->count++] = (struct seen){lane, at};
}

static bool knows(const struct clock *c, const struct moment *m)
{
    for (uint32_t i = 0; i < c->count; i++)
        if (c->list[i].tick >= m->tick && (c->list[i].lane == m->lane || c->list[i].lane == m->blocking))
            return true;
    return false;
}

void order_merge(struct clock *to, const struct clock *from)
{
    for (uint32_t i = 0; i < from->count; i++)
        know(to, from->list[i].lane, from->list[i].tick);
}

void order_forget(struct clock *c)
{
    free(c->list);
    *c = (struct clock){0};
}

bool order_covers(const struct clock *c, const struct moment *m) { return knows(c, m); }

/* --- lanes ----------------------------------------------------------------- */

/* settle_in readies what a context has of this for its present life. */
static void settle_in(struct context *c)
{
    if (c->order.life == c->serial)
        return;
    order_forget(&c->order.legacy.seen);
    order_forget(&c->order.others);
    c->order = (struct order){.life = c->serial, .legacy = {.id = next_serial()}, .blocking = next_serial()};
}

struct lane *lane_of(CUstream handle, struct context *c)
{
    struct stream *s;
    settle_in(c);
    if (stream_get(handle, &s) != CUDA_SUCCESS)
        return NULL;
    if (!s)
        return &c->order.legacy;
    if (!s->lane.id)
        s->lane.id = next_serial();
    s->lane.blocking = s->flags & STREAM_NON_BLOCKING ? 0 : c->order.blocking;
    return &s->lane;
}

static bool is_legacy(const struct lane *l, const struct context *c) { return l == &c->order.legacy; }

/* act is what every piece of work does to the order of the default stream. */
static void act(struct lane *l, struct context *c)
{
    if (!is_legacy(l, c))
        return;
    c->order.legacy_tick = tick;
    if (switches.follow == FOLLOW_ALL)
        order_merge(&l->seen, &c->order.others);
}

uint64_t lane_done(const struct lane *l, const struct context *c)
{
    return is_legacy(l, c) ? max(l->done_at, c->order.blocking_done_at) : l->blocking ? max(l->done_at, c->order.legacy.done_at) : l->done_at;
}

static void lane_until(struct lane *l, struct context *c, uint64_t at)
{
    l->done_at = max(l->done_at, at);
    if (l->blocking)
        c->order.blocking_done_at = max(c->order.blocking_done_at, l->done_at);
    c->order.done_at = max(c->order.done_at, l->done_at);
}

void lane_work(struct lane *l, struct context *c, uint64_t us)
{
    act(l, c);
    uint64_t before = lane_done(l, c);
    lane_until(l, c, us ? max(before, order_now()) + us * 1000 : before);
}

void lane_after(struct lane *l, struct context *c, uint64_t at)
{
    act(l, c);
    lane_until(l, c, at);
}

struct moment lane_moment(struct lane *l, struct context *c)
{
    tick++;
    act(l, c);
    lane_until(l, c, lane_done(l, c));
    return (struct moment){.lane = l->id, .blocking = l->blocking, .tick = tick, .at = l->done_at, .ctx = c, .life = c->serial};
}

bool lane_follows(const struct lane *l, const struct context *c, const struct moment *m)
{
    bool all = switches.follow == FOLLOW_ALL;
    if (m->lane == l->id || knows(&l->seen, m))
        return true;
    if (is_legacy(l, c))
        return m->blocking == c->order.blocking || (all && knows(&c->order.others, m));
    if (!l->blocking)
        return false;
    if (m->lane == c->order.legacy.id)
        return true;
    return all && ((m->blocking == c->order.blocking && m->tick <= c->order.legacy_tick) || knows(&c->order.legacy.seen, m));
}

void lane_snapshot(struct lane *l, struct context *c, struct clock *out)
{
    act(l, c);
    out->count = 0;
    know(out, l->id, tick);
    if (is_legacy(l, c))
        know(out, c->order.blocking, tick);
    if (switches.follow == FOLLOW_DIRECT)
        return;
    order_merge(out, &l->seen);
    if (!l->blocking)
        return;
    know(out, c->order.legacy.id, c->order.legacy_tick);
    know(out, c->order.blocking, c->order.legacy_tick);
    order_merge(out, &c->order.legacy.seen);
}

void lane_wait(struct lane *l, struct context *c, const struct clock *seen, uint64_t at)
{
    act(l, c);
    lane_until(l, c, max(lane_done(l, c), at));
    order_merge(&l->seen, seen);
    if (l->blocking && switches.follow == FOLLOW_ALL)
        order_merge(&c->order.others, seen);
}
