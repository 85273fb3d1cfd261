/* SPDX-License-Identifier: Apache-2.0 */

/* From an allocation to what is charged for it. The driver gives 2 MiB or more
 * in multiples of 2 MiB, and cuts what is smaller out of blocks of 2 MiB: so a
 * small allocation is charged nothing if it came to lie in a block that is
 * charged already, and a block if not. Which of them it will be only the driver
 * knows, so a block is reserved before its call and given back after. Where the
 * limit has no room for another block, but one that we have has a hole for the
 * allocation, it is made without a reservation, one at a time; should the driver
 * take another block all the same, that is undone before the program has it. */
#ifndef CAP_CHARGE_H
#define CAP_CHARGE_H

#include "process.h"

/* How something is charged. Asking for HOW_LARGE means HOW_SMALL for what is
 * smaller than a block. HOW_HIDDEN is a small thing without an address, or with
 * one that says nothing: it cannot be seen in which block it lies, or which block it
 * keeps when all else has left it, so each is charged a block. That is too much
 * mostly, which the agent's reading makes good. HOW_GUESS is what is not allocated by
 * a size, the memory of modules and of contexts' limits: what is given back of it is
 * room only after a reading. HOW_PROMISED is a limit of which the driver may not have
 * taken the memory yet; see limit.c. */
enum how { HOW_LARGE = 1, HOW_SMALL, HOW_MANAGED, HOW_WHOLE, HOW_HIDDEN, HOW_NOTE, HOW_GUESS, HOW_PROMISED };

/* The entry of a context's limit has as key the context's number times this, and the
 * limit's; as owner the value that the limit had before it was first raised. */
enum { LIMITS = 16 };

static inline uint64_t round_up(uint64_t n, uint64_t to) { return (n + to - 1) & ~(to - 1); }

struct charge {
    struct account *a;
    struct where at;
    enum how how;
    uint64_t bytes; /* of a small one its own, else what is charged */
    uint32_t *tight; /* a small one without a reservation; locked until the end */
};

/* charge_begin reserves for the current context, charge_begin_at for one that
 * is known. What they answer says what to do: */
enum verdict {
    COUNT,  /* call the driver, then charge_done or charge_failed */
    PASS,   /* call the driver; nothing is counted */
    REFUSE, /* answer CUDA_ERROR_OUT_OF_MEMORY */
};
enum verdict charge_begin(struct process *p, struct charge *c, uint64_t bytes, enum how how);
enum verdict charge_begin_at(struct process *p, struct charge *c, const struct where *at, uint64_t bytes, enum how how);

/* charge_done commits what lies at key now; false: it cannot be counted, so
 * undo it and then call charge_undone. charge_failed gives back what was
 * reserved where the driver failed. */
bool charge_done(struct process *p, struct charge *c, uint64_t key, enum space space);
void charge_undone(struct charge *c);

/* charge_again comes after charge_done's false and its undoing, instead of
 * charge_undone. True: it was a small allocation without a reservation for which the
 * driver took another block, and now one is reserved: make the call again. */
bool charge_again(struct charge *c);
void charge_failed(struct process *p, struct charge *c);

/* A free: charge_take finds what is charged and uncommits it; charge_gone comes
 * after the driver's success, charge_back after its failure. charge_take is
 * false for what was never charged. */
struct taken {
    struct entry e;
    uint64_t held; /* bytes reserved yet, and not committed */
};
bool charge_take(struct process *p, struct taken *t, uint64_t key, enum space space);
void charge_gone(struct process *p, const struct taken *t);
void charge_back(struct process *p, const struct taken *t);

/* charge_end is which of the two the driver's answer calls for. */
static inline CUresult charge_end(struct process *p, const struct taken *t, CUresult r)
{
    if (r == CUDA_SUCCESS)
        charge_gone(p, t);
    else
        charge_back(p, t);
    return r;
}

/* The same for all that a context has, which ends with it. */
struct taken_list {
    struct taken *list;
    size_t length, room;
};
void charge_take_all(struct process *p, struct taken_list *l, uint64_t context);
void charge_gone_all(struct process *p, struct taken_list *l);
void charge_back_all(struct process *p, struct taken_list *l, uint64_t context);

#endif
