/* SPDX-License-Identifier: Apache-2.0 */

/* Scenarios: programs in a few lines that once went over their cap, were refused
 * what would have fitted, or were kept waiting. A routine does what such a program
 * does and keeps the books; what must hold is the business of whoever asks for it
 * (tests/memcap/scenarios_test.go, where each has a row of the same name).
 *
 * One file for each theme, with a table of its routines at its end:
 *
 *     scenario_pools.c      stream-ordered memory: streams, events, pools
 *     scenario_graphs.c     the memory of graphs
 *     scenario_refusals.c   what a refusal costs
 *     scenario_exports.c    memory by hand: properties, exports
 *     scenario_limits.c     what takes memory beside allocations, and what is shown
 */
#ifndef MEMCAP_SCENARIO_H
#define MEMCAP_SCENARIO_H

#include "probe.h"

/* A scene is what a routine works in. */
struct scene {
    struct cuda *cu;
    struct seat seat; /* the primary context, current; not in an early routine */
    const char *door;
    int device;
    uint64_t room; /* what the cap leaves to all processes together, beside one context for each */

    /* The books, in bytes and counts. */
    uint64_t live, highest;
    uint64_t granted, refused;
    uint64_t slowest_us; /* the longest call that ASK made */
    uint64_t began;      /* ns; of the call that ASK is making */
    char failure[256];   /* the first thing that went wrong that should not have */
    char notes[512];     /* " key=value" for the row's own check */
};

struct scenario {
    const char *name;
    void (*run)(struct scene *);
    /* The routine is called before anything of CUDA is, since it starts other
     * processes: it takes a seat by itself (sit). */
    int early;
};

/* The themes; each ends with an empty entry. */
extern const struct scenario pool_scenarios[];
extern const struct scenario graph_scenarios[];
extern const struct scenario refusal_scenarios[];
extern const struct scenario export_scenarios[];
extern const struct scenario limit_scenarios[];

/* ASK makes a call that may be refused for want of memory and enters it in the
 * books; what it returns is whether memory was given. Any other error is a
 * failure.
 *
 *     if (ASK(s, 32 * MiB, s->cu->cuMemAlloc_v2(&p, 32 * MiB)))
 */
#define ASK(s, bytes, call) (ask_begins(s), ask_ended(s, #call, bytes, call))
void ask_begins(struct scene *s);
int ask_ended(struct scene *s, const char *call, uint64_t bytes, CUresult r);

/* MUST makes a call that has to succeed; what it returns is whether it did. */
#define MUST(s, call) must_be(s, #call, call)
int must_be(struct scene *s, const char *call, CUresult r);

/* given_back enters in the books what ASK had given. */
void given_back(struct scene *s, uint64_t bytes);

/* fail says what went wrong, as printf; only the first is kept. */
void fail_scene(struct scene *s, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* note hands a figure to the row's check. */
void note(struct scene *s, const char *key, uint64_t value);

uint64_t now_ns(void);

/* kernel returns a kernel that is busy for so many microseconds, on an emulated
 * driver and a real one alike. NULL, and the scene has failed, if there is none. */
CUfunction kernel(struct scene *s, unsigned us);
/* launch runs it once on a stream. */
int launch(struct scene *s, CUfunction f, CUstream stream);

#define MiB ((uint64_t)1 << 20)
#define GiB ((uint64_t)1 << 30)

#endif
