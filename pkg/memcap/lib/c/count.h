/* SPDX-License-Identifier: Apache-2.0 */

/* The counter that a container's processes share, one for each GPU. Nothing here knows
 * CUDA: the tests have a small driver of their own that uses the same code.
 *
 * The guarantee: at every instant the driver has given the container's processes at most
 * the amount in `bound`, also when a process is killed between any two instructions.
 * A reservation is made only where bound stays within the ceiling. Bound may be too large
 * for a time; it is never too small.
 *
 * A slot's share is the part of bound that belongs to it. It is written down nowhere.
 * Each step of each process keeps
 *
 *     committed <= what the driver gave to the slot's owner <= share - idle <= reserved
 *
 * Each step is one atomic addition, in this order:
 *
 *     allocate   reserved += n · bound += n · [call the driver] · committed += n
 *     it failed                bound -= n · reserved -= n
 *     free       committed -= n · [call the driver] · bound -= n · reserved -= n
 *     it failed  committed += n
 *
 * All processes change bound, so its cache line moves from processor to processor. To
 * avoid that, a process far from the ceiling keeps some of what it frees as idle in its
 * slot, and allocates from there the next time. Bound does not change then:
 *
 *     allocate   reserved += n · idle -= n (CAS) · [call the driver] · committed += n
 *     free       committed -= n · [call the driver] · idle += n · reserved -= n
 *
 * A process that finds no room takes what is idle in all slots, by idle := 0 (CAS). That
 * is then part of no share, but a remainder (see below), which a repair takes off bound.
 *
 * If a process dies after any of these steps, the inequality still holds, and the driver
 * has given it nothing any more. The process that takes the slot's lock next is the only
 * one that changes the slot, and
 *
 *     reaps      c = committed, committed := 0 · settled += c · bound -= c · reserved := 0
 *
 * c is at most the share, so bound still covers the living. Bound may keep a remainder
 * that is part of no share: what the dead process had reserved and not committed, or c
 * itself if the reaper dies after its first step. So a process that needs room
 *
 *     repairs    b = bound · R = sum of reserved + idle · if amount(b) > R: CAS bound from b to R
 *
 * A share grows only by a change of bound, and each change makes a new word, because of
 * the version. If the CAS succeeds, no share grew since b was read. So each slot, when it
 * was read, had reserved and idle of at least the share that it has now, and R is at
 * least the sum of the shares. Bound is below the sum of committed only if a process
 * has written to the page by hand; it is raised to R then.
 *
 * The sum of reserved would be too small if what is idle became reserved, or reserved idle,
 * while the two are read. Then idle has changed, which is read before and after reserved, and
 * both are read again.
 *
 * The agent compares bound with the driver's figure for the living processes, and moves
 * the ceiling by the difference. That stays right as long as what leaves bound leaves the
 * driver too. Some memory is gone before we know: what a pool gave back by itself, the
 * difference between a context and its estimate, and the memory of a dying process,
 * which closes its descriptors before it lets go of its slot's lock. The
 * driver's figure may have lacked it while bound had it, so it is taken off as
 *
 *     lost       committed -= n · settled += n · bound -= n · reserved -= n
 *
 * and until the next reading the ceiling is lowered by what was settled since the last
 * one began, so that lost memory does not give room twice. n is uncommitted first, so
 * that a reading between the steps sees that something is under way.
 *
 * Exported memory exists as long as any process has it open, and no call tells us when
 * the last one closes it. When its owner frees it, it stays bound and committed, as if
 * the owner still had it
 *
 *     let go     exported += n
 *
 * so committed may be more than the driver gave, by what is gone meanwhile. Too much is
 * bound then, never too little. When it is gone the driver has less than bound; a reading
 * shows that and raises the ceiling. So while there is exported memory, a ceiling that
 * was exact may be out of date. The owner takes off as much as the ceiling is above the
 * limit
 *
 *     gone       exported -= n · lost n
 *
 * which gives no room, whether it was gone or not: bound and the ceiling fall by n
 * together, and the next reading tells what the driver has.
 *
 * The lock of a slot is a kernel's lock on one byte of the file. It belongs to an open
 * file description that only one mapping of this process holds, and ends with the
 * mapping: at exit, at any death and at exec. A fork does not end it (children do not
 * have the mapping), nor does a program that closes every descriptor.
 *
 * Arm's processors reorder what these proofs take to be in order, unless an access forbids
 * it. Each access below says how much order it needs, and no more: tests/order has a model
 * of them, which finds no fault, and finds one as soon as any of these orders is taken out.
 * Words with an order that the model lacks are listed there, with the reason. */
#ifndef CAP_COUNT_H
#define CAP_COUNT_H

#include "claim.h"
#include "loan.h"
#include "page.h"
#include "sys.h"

/* A picture is everything that a refusal depends on. While it does not change, or leaves
 * less room, the answer stays the same. */
struct picture {
    uint64_t amount, committed; /* bound, and what of it the driver gave */
    uint64_t ceiling, settled, guesses;
};

enum { ANSWERS = 4 };

struct account {
    /* Other pages of the same GPU of which this process may borrow; see loan.h. */
    struct account *others;
    struct account *next; /* the next of these */
    uint64_t lent;        /* of one of these: so much is lent, in bytes */
    uint32_t lending;     /* a lock: something is borrowed or given back */
    const struct limit_page *page;
    struct usage_page *usage;
    struct slot *slot;
    uint64_t nonce;
    uint64_t waited; /* 1 + page->done when a reading was awaited in vain; 0: never */
    uint64_t keeps; /* how many bytes may be idle, and when far from the ceiling */
    uint64_t keeps_far;
    uint32_t lock;    /* guards answers; held for moments only */
    /* Requests that were refused after everything was tried. */
    struct answer {
        uint64_t n; /* 0: none */
        struct picture at;
    } answers[ANSWERS];
    uint32_t next_answer;
    char path[PATH_ROOM]; /* the usage page's */
    void *hold;      /* the mapping that keeps the slot's lock */
    uint64_t dead, looked; /* what dead processes have in bound, and when we looked */
    uint64_t begun; /* when this process's last context was made, in microseconds */
    uint64_t stuck; /* the page's attempt that was waited for in vain */
    uint64_t undoing; /* bytes beyond bound that this process is about to give back */
    /* relief frees what the process can spare, before so many bytes are refused. */
    void (*relief)(struct account *, uint64_t);
};

/* account_find maps the limit page. account_open maps the usage page and takes a slot. They
 * return 0, or a negative error number; then nothing was kept. */
int account_find(struct account *a, const char *limit_path);
int account_open(struct account *a, const char *usage_path);

/* account_unlimited says whether the GPU has no limit now. */
static inline bool account_unlimited(const struct account *a) { return __atomic_load_n(&a->page->limit, __ATOMIC_RELAXED) == NO_LIMIT; }

/* account_nonsense says whether the pages are spoilt, so that nothing can be counted in
 * them. */
bool account_nonsense(const struct account *a);

/* account_told says, by the limit page's nonce, whether its words come from a reading of
 * this usage page, or are just being written. */
static inline bool account_told(const struct account *a, uint64_t nonce) { return nonce == a->nonce || nonce == WRITING; }

/* account_ceiling_with returns how far bound may go where so many bytes were borrowed, or
 * NO_LIMIT. While the agent writes the page, some of its words are old and some new; that may last, if the agent is
 * held up. The ceiling that they give counts all the same, up to the limit. */
static inline uint64_t more_than(uint64_t ceiling, uint64_t n) { return ceiling > NO_LIMIT - n ? NO_LIMIT : ceiling + n; }

static inline uint64_t account_ceiling_with(const struct account *a, uint64_t borrowed)
{
    const struct limit_page *p = a->page;
    uint64_t nonce = __atomic_load_n(&p->nonce, __ATOMIC_ACQUIRE);
    if (!account_told(a, nonce))
        return more_than(__atomic_load_n(&p->limit, __ATOMIC_RELAXED), borrowed);
    uint64_t ceiling = __atomic_load_n(&p->ceiling, __ATOMIC_RELAXED);
    uint64_t lost = __atomic_load_n(&a->usage->settled, __ATOMIC_RELAXED) - __atomic_load_n(&p->settled, __ATOMIC_ACQUIRE);
    /* The agent may have published a reading meanwhile. It writes the ceiling first. An
     * old ceiling with the new settled is noticed by reading the ceiling again; a new one
     * with the old settled is too low, which does no harm. */
    uint64_t again = __atomic_load_n(&p->ceiling, __ATOMIC_ACQUIRE);
    ceiling = more_than(again < ceiling ? again : ceiling, borrowed);
    if (lost && ceiling != NO_LIMIT)
        ceiling = lost < ceiling ? ceiling - lost : 0;
    uint64_t now = __atomic_load_n(&p->nonce, __ATOMIC_RELAXED);
    if (nonce == a->nonce && now == nonce)
        return ceiling;
    uint64_t limit = more_than(__atomic_load_n(&p->limit, __ATOMIC_RELAXED), borrowed);
    return account_told(a, now) && ceiling < limit ? ceiling : limit;
}

/* account_own_ceiling returns how far bound may go without what was borrowed. */
static inline uint64_t account_own_ceiling(const struct account *a) { return account_ceiling_with(a, 0); }

/* account_borrowed returns what living processes have borrowed for a page. */
static inline uint64_t account_borrowed(const struct account *a)
{
    return __builtin_expect(__atomic_load_n(&a->usage->borrows, __ATOMIC_RELAXED) != 0, 0) ? account_loans(a) : 0;
}

/* account_ceiling returns how far bound may go, in bytes, or NO_LIMIT. */
static inline uint64_t account_ceiling(const struct account *a) { return account_ceiling_with(a, account_borrowed(a)); }

/* account_told_ceiling returns the ceiling of the last reading. It changes when a reading
 * finds that the driver has more or less than was bound. */
static inline uint64_t account_told_ceiling(const struct account *a) { return __atomic_load_n(&a->page->ceiling, __ATOMIC_ACQUIRE); }

static inline uint64_t count_add(uint64_t *word, uint64_t n) { return __atomic_add_fetch(word, n, __ATOMIC_SEQ_CST); }
static inline void count_sub(uint64_t *word, uint64_t n) { __atomic_sub_fetch(word, n, __ATOMIC_SEQ_CST); }
static inline uint64_t count_read(const uint64_t *word) { return __atomic_load_n(word, __ATOMIC_SEQ_CST); }

static inline void reserved_add(struct account *a, uint64_t n) { count_add(&a->slot->reserved, n); }
static inline void reserved_sub(struct account *a, uint64_t n) { reserved_add(a, 0 - n); }
static inline void committed_add(struct account *a, uint64_t n) { count_add(&a->slot->committed, n); }
static inline void committed_sub(struct account *a, uint64_t n) { committed_add(a, 0 - n); }

/* The steps. Amounts are in bytes, multiples of 512 below MOST. */

static inline uint64_t bound_add(struct account *a, uint64_t n) { return count_add(&a->usage->bound, STEP + n / UNIT); }
static inline void bound_sub(struct account *a, uint64_t n) { count_add(&a->usage->bound, STEP - n / UNIT); }

static inline void account_peak(struct account *a, uint64_t amount)
{
    uint64_t old = __atomic_load_n(&a->usage->peak, __ATOMIC_RELAXED);
    while (amount > old)
        if (__atomic_compare_exchange_n(&a->usage->peak, &old, amount, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
            break;
}

/* account_return gives n back to bound at once. */
static inline void account_return(struct account *a, uint64_t n)
{
    if (__builtin_expect(a->others != NULL, 0)) {
        account_repay(a, n);
        return;
    }
    bound_sub(a, n);
    reserved_sub(a, n);
}

/* IDLE_MOST is enough for two requests of a pool (see pool.h), or many smaller ones. */
#define IDLE_MOST ((uint64_t)64 << 20)

/* account_cancel gives n back. It keeps n idle as long as not too much is. */
static inline void account_cancel(struct account *a, uint64_t n)
{
    uint64_t was = __atomic_load_n(&a->slot->idle, __ATOMIC_RELAXED);
    if (AMOUNT(was) + n > __atomic_load_n(&a->keeps, __ATOMIC_RELAXED)) {
        account_return(a, n);
        return;
    }
    count_add(&a->slot->idle, STEP + n / UNIT);
    reserved_sub(a, n);
}

/* reserve_idle reserves n from idle. False: less than n is idle. */
static inline bool reserve_idle(struct account *a, uint64_t n)
{
    uint64_t was = __atomic_load_n(&a->slot->idle, __ATOMIC_RELAXED);
    if (AMOUNT(was) < n)
        return false;
    reserved_add(a, n);
    do {
        if (__atomic_compare_exchange_n(&a->slot->idle, &was, was + STEP - n / UNIT, false, __ATOMIC_RELEASE, __ATOMIC_RELAXED))
            return true;
    } while (AMOUNT(was) >= n);
    reserved_sub(a, n);
    return false;
}

/* account_guessed is called after something was charged or given back of which the driver
 * may have more or less, or came and went uncharged. From then on the ceiling may not be
 * exact. */
static inline void account_guessed(struct account *a) { count_add(&a->usage->guesses, 1); }

COLD bool account_reserve_slowly(struct account *a, uint64_t n);
COLD bool account_reserve_of_idle(struct account *a, uint64_t n);

/* account_try adds n to bound where it fits at once, with more that the caller has borrowed for
 * it. */
bool account_try(struct account *a, uint64_t n, uint64_t more);

/* account_reserve_quickly reserves n where it fits at once. */
static inline bool account_reserve_quickly(struct account *a, uint64_t n)
{
    if (n >= MOST || n > __atomic_load_n(&a->page->limit, __ATOMIC_RELAXED))
        return false;
    bool idle = reserve_idle(a, n);
    if (!idle && __builtin_expect(!account_try(a, n, 0), 0))
        return account_reserve_of_idle(a, n);
    /* Read the ceiling after bound: memory lost meanwhile has left bound and lowered it. */
    uint64_t amount = AMOUNT(count_read(&a->usage->bound)), ceiling = account_ceiling(a);
    if (idle && __builtin_expect(amount > ceiling, 0)) {
        bound_sub(a, n);
        reserved_sub(a, n);
        return account_reserve_of_idle(a, n);
    }
    uint64_t keeps = amount <= ceiling - ceiling / 8 ? a->keeps_far : 0;
    if (__builtin_expect(keeps != __atomic_load_n(&a->keeps, __ATOMIC_RELAXED), 0))
        __atomic_store_n(&a->keeps, keeps, __ATOMIC_RELAXED);
    return true;
}

/* account_measure waits for a reading, for a bounded time, where n more bytes come near the
 * ceiling for the first time since a context was charged. Programs can take many GiB in the
 * time between two readings, and what was given is not taken back. Until then a context may
 * have taken more than was expected, and so may what comes with its first kernels and
 * pools. Where the contexts of this page have never taken more, a new one need not wait before
 * the time of a reading has passed: that is all that a short program takes. No lock may be held. account_unmeasured is called when a context was charged, or when
 * so many bytes may have been taken that were not charged: if no reading comes, they are. */
static inline void account_unmeasured(struct account *a, uint64_t bytes)
{
    if (bytes)
        count_add(&a->usage->unread, bytes);
    count_add(&a->usage->unmeasured, 1);
}
COLD void account_await_measure(struct account *a, uint64_t n);
static inline void account_measure(struct account *a, uint64_t n)
{
    if (__builtin_expect(__atomic_load_n(&a->usage->unmeasured, __ATOMIC_RELAXED) != 0, 0))
        account_await_measure(a, n);
}

/* account_reserve reserves n bytes. False: there is no room. Near the cap, and only there,
 * it may wait. */
static inline bool account_reserve(struct account *a, uint64_t n)
{
    account_measure(a, n);
    return account_reserve_quickly(a, n) || account_reserve_slowly(a, n);
}

/* account_force charges what the driver has given already, whatever the ceiling. */
static inline void account_force(struct account *a, uint64_t n)
{
    reserved_add(a, n);
    account_peak(a, AMOUNT(bound_add(a, n)));
    committed_add(a, n);
}

static inline void account_commit(struct account *a, uint64_t n) { committed_add(a, n); }

/* account_lost takes off what was gone before. */
static inline void account_lost(struct account *a, uint64_t n)
{
    committed_sub(a, n);
    count_add(&a->usage->settled, n);
    account_return(a, n);
}

/* account_exported keeps n charged that was exported and freed here, until a reading shows
 * that it is gone. */
COLD void account_exports_gone(struct account *a);
static inline void account_exported(struct account *a, uint64_t n)
{
    count_add(&a->slot->exported, n);
    account_guessed(a);
    account_exports_gone(a);
}
static inline void account_uncommit(struct account *a, uint64_t n) { committed_sub(a, n); }

/* account_within says whether the container is within its limit, after it got memory that
 * was not counted. It waits for a reading; n is an estimate of that memory in bytes, for
 * the case that no reading tells. */
bool account_within(struct account *a, uint64_t n);

/* account_is_near says whether the room that is left may matter now: bound is near the ceiling,
 * or the agent does not read. account_unheard says the latter. */
bool account_is_near(const struct account *a);
bool account_unheard(const struct account *a);

/* account_exactly returns the ceiling where a reading was exact and nothing was guessed
 * since, else 0. With waits it waits for a reading first. */
uint64_t account_exactly(struct account *a, bool waits);

/* account_moves returns a number that is different after each change of bound or idle. */
uint64_t account_moves(const struct account *a);

/* account_rests says whether no process has anything under way, and puts into *given what
 * the driver has given to them at least. With reaps it clears dead processes first. */
bool account_rests(struct account *a, bool reaps, uint64_t *given);

/* account_undone notes that the driver gave n bytes beyond bound, and has them back. */
static inline void account_undone(struct account *a, uint64_t n)
{
    uint64_t old = __atomic_load_n(&a->usage->undone, __ATOMIC_RELAXED);
    while (n > old)
        if (__atomic_compare_exchange_n(&a->usage->undone, &old, n, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
            break;
}

/* account_await_death waits, for a bounded time, until the driver has back the memory of a
 * process that had a slot. The slot's lock must be free. *waited says whether a fixed time was
 * waited before. */
void account_await_death(const struct slot *s, bool *waited);

/* account_excess returns by how much contexts were charged more than is known by now that
 * they take. */
uint64_t account_excess(const struct account *a, uint64_t expected, uint64_t contexts);

/* account_used returns what counts against the limit, in bytes: bound with the agent's
 * correction, without what dead processes left in it, and at most the limit. */
uint64_t account_used(struct account *a);

/* account_limit returns what the container may have: the sum of its shares, or NO_LIMIT. */
uint64_t account_limit(const struct account *a);

/* For loans. account_contend reserves n, or waits for it as account_reserve does.
 * account_room returns what fits now. */
bool account_contend(struct account *a, uint64_t n);
uint64_t account_room(struct account *a);

#endif
