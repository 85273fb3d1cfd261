/* SPDX-License-Identifier: Apache-2.0 */

/* What is charged for an allocation. The driver gives 2 MiB or more in multiples of 2 MiB, and cuts
 * smaller allocations out of blocks of 2 MiB. So a small allocation is charged a block, or nothing
 * if it lies in a block that is charged already. Only the driver knows in advance where it will
 * lie. So a block is reserved before the call, and given back after it if it was not needed.
 *
 * If the limit has no room for another block, but one of our blocks has a hole for the allocation,
 * it is made without a reservation. Only one such allocation is made at a time. If the driver takes
 * another block all the same, that is undone before the program gets it. */
#ifndef CAP_CHARGE_H
#define CAP_CHARGE_H

#include "process.h"

/* How something is charged.
 *
 * - HOW_LARGE: in whole blocks. A request smaller than a block becomes HOW_SMALL.
 * - HOW_SMALL: as a part of a block.
 * - HOW_MANAGED: as managed memory, in whole blocks.
 * - HOW_WHOLE: by its own size, never as a part of a block.
 * - HOW_HIDDEN: something small whose address is unknown or tells nothing. It is unknown which
 *   block it lies in, and which block it keeps after all else there was freed. So each is charged a
 *   block. That is mostly too much; the agent's reading corrects it.
 * - HOW_NOTE: not at all.
 * - HOW_GUESS: memory that is not asked for by size, such as that of modules and of contexts'
 *   limits. Once given back, it gives room only after a reading.
 * - HOW_PROMISED: memory for a limit that the driver may not have taken yet; see limit.c. */
enum how { HOW_LARGE = 1, HOW_SMALL, HOW_MANAGED, HOW_WHOLE, HOW_HIDDEN, HOW_NOTE, HOW_GUESS, HOW_PROMISED };

/* The key of a context's limit is the context's number times LIMITS plus the limit's number. Its
 * entry's owner is the limit's value before it was first raised. */
enum { LIMITS = 16 };

static inline uint64_t round_up(uint64_t n, uint64_t to) { return (n + to - 1) & ~(to - 1); }

struct charge {
    struct account *a;
    struct where at;
    enum how how;
    uint64_t bytes; /* what is charged; for a small allocation its own size */
    uint32_t *tight; /* a lock, held during a small allocation without a reservation; NULL: none */
};

/* charge_begin reserves memory for the current context, charge_begin_at for a given one. They
 * return what to do next: */
enum verdict {
    COUNT,  /* call the driver, then charge_done or charge_failed */
    PASS,   /* call the driver; nothing is counted */
    REFUSE, /* answer CUDA_ERROR_OUT_OF_MEMORY */
};
enum verdict charge_begin(struct process *p, struct charge *c, uint64_t bytes, enum how how);
enum verdict charge_begin_at(struct process *p, struct charge *c, const struct where *at, uint64_t bytes, enum how how);

/* charge_done commits what the driver has put at key. False: it cannot be counted; undo it, then
 * call charge_undone. charge_failed gives the reservation back after the driver has failed. */
bool charge_done(struct process *p, struct charge *c, uint64_t key, enum space space);
void charge_undone(struct charge *c);

/* charge_again may be called instead of charge_undone. True: it was a small allocation without a
 * reservation, and the driver took another block for it. A block is reserved now, so make the call
 * again. */
bool charge_again(struct charge *c);
void charge_failed(struct process *p, struct charge *c);

/* A free. charge_take finds what is charged at key and uncommits it. False: nothing was charged.
 * After charge_take, call charge_gone if the driver succeeds, or charge_back if it fails. */
struct taken {
    struct entry e;
    uint64_t held; /* bytes that are reserved and no longer committed */
};
bool charge_take(struct process *p, struct taken *t, uint64_t key, enum space space);
void charge_gone(struct process *p, const struct taken *t);
void charge_back(struct process *p, const struct taken *t);

/* charge_end calls charge_gone or charge_back, whichever fits the driver's answer r, and returns
 * r. */
static inline CUresult charge_end(struct process *p, const struct taken *t, CUresult r)
{
    if (r == CUDA_SUCCESS)
        charge_gone(p, t);
    else
        charge_back(p, t);
    return r;
}

/* COUNTED is the body of an override that gives memory. If asks is true, the program has said where
 * to put the answer, and begin reserves the memory. done charges what the driver gave. If done is
 * false, undo frees that. */
#define COUNTED(asks, begin, done, undo, name, ...)        \
    struct process *p = ENTER();                           \
    struct charge c;                                       \
    enum verdict v = p && (asks) ? begin : PASS;           \
    if (v == REFUSE)                                       \
        return CUDA_ERROR_OUT_OF_MEMORY;                   \
    do {                                                   \
        CUresult r = CALL(name, __VA_ARGS__);              \
        if (v == COUNT && r != CUDA_SUCCESS)               \
            charge_failed(p, &c);                          \
        if (v == PASS || r != CUDA_SUCCESS || (done))      \
            return r;                                      \
        undo;                                              \
    } while (charge_again(&c));                            \
    return CUDA_ERROR_OUT_OF_MEMORY;

/* FREED is the body of an override that takes memory back. other is what it does if nothing is
 * charged at key. */
#define FREED(key, space, other, name, handle)                                            \
    struct process *p = ENTER();                                                          \
    struct taken t;                                                                       \
    if (!p)                                                                               \
        return CALL(name, handle);                                                        \
    if (__builtin_expect(!charge_take(p, &t, key, space), 0))                             \
        return other;                                                                     \
    return charge_end(p, &t, CALL(name, handle));

/* The same for everything that a context has. All of it is freed with the context. */
enum { FEW = 8 };
struct taken_list {
    struct taken *list; /* few, or a mapping: mapping memory costs more than all else here */
    size_t length, room;
    struct taken few[FEW];
};
void taken_begin(struct taken_list *l);
bool taken_room(struct taken_list *l, size_t more);
void taken_end(struct taken_list *l);
void charge_take_all(struct process *p, struct taken_list *l, uint64_t context);
void charge_gone_all(struct process *p, struct taken_list *l);
void charge_back_all(struct process *p, struct taken_list *l, uint64_t context);

#endif
