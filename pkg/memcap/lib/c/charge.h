/* SPDX-License-Identifier: Apache-2.0 */

/* What is charged for an allocation. The driver gives 2 MiB or more in multiples of
 * 2 MiB, and cuts smaller allocations out of blocks of 2 MiB. So a small allocation is
 * charged a block, or nothing if it lies in a block that is charged already. Only the
 * driver knows which, so a block is reserved before the call and given back after it if
 * it was not needed. Where the limit has no room for another block, but a block of ours
 * has a hole for the allocation, it is made without a reservation, one at a time. If the
 * driver takes another block all the same, that is undone before the program gets it. */
#ifndef CAP_CHARGE_H
#define CAP_CHARGE_H

#include "process.h"

/* How something is charged. A request with HOW_LARGE becomes HOW_SMALL if it is smaller
 * than a block. HOW_HIDDEN is something small without an address, or with one that tells
 * nothing: nobody can see in which block it lies, or which block it keeps after all else
 * in it was freed, so each is charged a block. That is mostly too much; the agent's
 * reading corrects it. HOW_GUESS is memory that is not asked for by size, such as that of
 * modules and of contexts' limits: after it is given back it is room only after a
 * reading. HOW_PROMISED is memory for a limit that the driver may not have taken yet; see
 * limit.c. HOW_NOTE charges nothing. */
enum how { HOW_LARGE = 1, HOW_SMALL, HOW_MANAGED, HOW_WHOLE, HOW_HIDDEN, HOW_NOTE, HOW_GUESS, HOW_PROMISED };

/* The key of a context's limit is the context's number times LIMITS, plus the limit's
 * number. Its entry's owner is the value that the limit had before it was first raised. */
enum { LIMITS = 16 };

static inline uint64_t round_up(uint64_t n, uint64_t to) { return (n + to - 1) & ~(to - 1); }

struct charge {
    struct account *a;
    struct where at;
    enum how how;
    uint64_t bytes; /* what is charged; of a small allocation its own size */
    uint32_t *tight; /* a lock, held until the end of a small allocation without a reservation */
};

/* charge_begin reserves memory for the current context, charge_begin_at for a given one.
 * The answer says what to do: */
enum verdict {
    COUNT,  /* call the driver, then charge_done or charge_failed */
    PASS,   /* call the driver; nothing is counted */
    REFUSE, /* answer CUDA_ERROR_OUT_OF_MEMORY */
};
enum verdict charge_begin(struct process *p, struct charge *c, uint64_t bytes, enum how how);
enum verdict charge_begin_at(struct process *p, struct charge *c, const struct where *at, uint64_t bytes, enum how how);

/* charge_done commits what the driver has put at key. False: it cannot be counted; undo
 * it, then call charge_undone. charge_failed gives the reservation back after the driver
 * failed. */
bool charge_done(struct process *p, struct charge *c, uint64_t key, enum space space);
void charge_undone(struct charge *c);

/* charge_again may be called in place of charge_undone. True: it was a small allocation
 * without a reservation, for which the driver took another block. A block is reserved
 * now, so make the call again. */
bool charge_again(struct charge *c);
void charge_failed(struct process *p, struct charge *c);

/* A free: charge_take finds what is charged and uncommits it, or returns false where
 * nothing was charged. Then charge_gone follows the driver's success, charge_back its
 * failure. */
struct taken {
    struct entry e;
    uint64_t held; /* bytes that are still reserved, and no longer committed */
};
bool charge_take(struct process *p, struct taken *t, uint64_t key, enum space space);
void charge_gone(struct process *p, const struct taken *t);
void charge_back(struct process *p, const struct taken *t);

/* charge_end calls the one of them that fits the driver's answer. */
static inline CUresult charge_end(struct process *p, const struct taken *t, CUresult r)
{
    if (r == CUDA_SUCCESS)
        charge_gone(p, t);
    else
        charge_back(p, t);
    return r;
}

/* COUNTED is the body of an override that gives memory. begin reserves it, if asks: where the call
 * says where the answer goes. done charges what the driver gave; if it is false, undo frees that. */
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

/* FREED is the body of an override that takes memory back, and other what is done where none is
 * charged at key. */
#define FREED(key, space, other, name, handle)                                            \
    struct process *p = ENTER();                                                          \
    struct taken t;                                                                       \
    if (!p)                                                                               \
        return CALL(name, handle);                                                        \
    if (__builtin_expect(!charge_take(p, &t, key, space), 0))                             \
        return other;                                                                     \
    return charge_end(p, &t, CALL(name, handle));

/* The same for everything that a context has, which is freed with it. */
enum { FEW = 8 };
struct taken_list {
    struct taken *list; /* few, or memory of its own: to map some costs more than all else here */
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
