/* SPDX-License-Identifier: Apache-2.0 */

/* The probe: a program that takes GPU memory by every call that gives some,
 * each found through every door by which a program finds the driver's library,
 * and says what it was given and what it was refused.
 *
 *     doors.c   how the library is opened and a name looked up in it
 *     linked.c  the door of programs that name the library when they are linked
 *     calls.c   the calls, each as a way to take memory and to give it back
 *     team.c    workers: threads and processes that do one command together
 *     views.c   what the library says of the memory there is
 *     scenarios.c  what programs do that once went wrong, each by a name
 *     walk.c    calls at random, near the edge
 *     main.c    flags, and the commands read from standard input
 */
#ifndef MEMCAP_PROBE_H
#define MEMCAP_PROBE_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include "abi.h"

/* A function table of libcuda: cu->cuMemAlloc_v2(...), or NULL where the door
 * does not have the name. */
struct cuda {
#define F(name, base, since, twin, parameters) CUresult(*name) parameters;
    FUNCTIONS(F)
#undef F
};

/* doors.c */

/* open_door fills the table by the way that a door names. On failure it
 * returns a text that says what was missing. */
const char *open_door(const char *door, struct cuda *cu);

/* One entry of the table that linked.c makes. */
struct linked {
    const char *name;
    void *function;
};
extern const struct linked linked_table[] __attribute__((weak));

/* calls.c */

/* A seat is where one thread works: a context that is current to it, and a
 * stream and pools of its own. */
struct seat {
    struct cuda *cu;
    CUdevice device;
    CUcontext context;
    CUstream stream;
    CUmemoryPool pool, kept; /* the second one keeps what is freed */
};

/* An item is memory that one call gave. */
struct item {
    uint64_t a, b, c;
};

struct call {
    const char *name;
    CUresult (*take)(struct seat *, struct item *, uint64_t bytes);
    CUresult (*give)(struct seat *, struct item *);
    /* What one request of so many bytes takes. NULL: just these. */
    uint64_t (*unit)(uint64_t bytes);
    /* Offsets in struct cuda of the names it cannot do without, -1 at the end. */
    int needs[12];
};
extern const struct call calls[];
const struct call *find_call(const char *name);
/* missing names a function that a call needs and the door has not; NULL if
 * there is none. */
const char *missing(const struct cuda *cu, const struct call *c);
uint64_t unit_of(const struct call *c, uint64_t bytes);

/* sit makes a seat: initialises the library and retains the device's primary
 * context. NULL, or where it failed, with the result in *r. */
const char *sit(struct seat *s, struct cuda *cu, int device, CUresult *r);
void leave(struct seat *s);
/* settle waits for the stream and lets pools give back what is free. */
CUresult settle(struct seat *s);

/* team.c */

struct team {
    const char *door;
    int device, processes, threads;
    enum { BY_FORK, BY_EXEC, BY_BOTH } start;
    int early; /* the first process works before it starts others */
    char **argv;
    int shared; /* descriptor of the shared memory in a process that was started */
};

/* gather starts the team's other processes and threads. The report is one line
 * on standard output. */
int gather(struct team *t);
/* work is the life of a process that gather started. */
int work(struct team *t);
/* fill lets all workers take memory until each has been refused, give half
 * back, take again and give all back, and prints the row. */
void fill(const char *call, uint64_t request, uint64_t room, uint64_t slack);
void dismiss(void);

/* scenarios.c */

/* scenario lets the routine of a name run and prints how it went. */
void scenario(const char *name, const char *door, int device, uint64_t room);
void list_scenarios(void);

/* walk.c */

/* walk makes so many calls at random and prints how it went. judge is the path of
 * the emulated driver's library, which is asked what would have fitted. */
void walk(const char *door, int device, uint64_t seed, uint64_t steps, uint64_t cap, const char *judge);

/* views.c */
void show_cuda(struct cuda *cu);
void show_nvml(void);

#endif
