/* SPDX-License-Identifier: Apache-2.0 */

/* The counter that the processes of a container share, one per GPU. Nothing
 * here knows CUDA: a small driver of the tests' own goes through the same code.
 *
 * The promise: at every instant the memory that the driver has given to the
 * container's processes is at most the amount in `bound`, also when a process is
 * killed between any two instructions; and bound reaches past the ceiling only for
 * moments, by a reservation that is then taken back without a call of the
 * driver. The promise may be kept with too large a bound, for a time; never
 * with too small a one.
 *
 * Call a slot's share what bound has of it (there is no such number anywhere).
 * Every step of every process keeps
 *
 *     committed <= what the driver gave to the slot's owner <= share - idle <= reserved
 *
 * by its order, each step being one atomic addition:
 *
 *     allocate   reserved += n · bound += n · [call the driver] · committed += n
 *     it failed                bound -= n · reserved -= n
 *     free       committed -= n · [call the driver] · bound -= n · reserved -= n
 *     it failed  committed += n
 *
 * One word for all processes goes from processor to processor with each step. So far
 * from the ceiling a process keeps some of what it gives back as idle, in its
 * slot, and takes it from there the next time; bound stays as it is:
 *
 *     allocate   reserved += n · idle -= n (CAS) · [call the driver] · committed += n
 *     free       committed -= n · [call the driver] · idle += n · reserved -= n
 *
 * Who finds no room takes what is idle in all slots, by idle := 0 (CAS): from then on it
 * is no part of a share, but a remainder (below), and is taken off bound by a repair.
 *
 * Death after any of these steps leaves the inequality as it is, with the
 * middle term 0. The process that takes the slot's lock next is the only one that
 * changes the slot, and
 *
 *     reaps      c = committed, committed := 0 · settled += c · bound -= c · reserved := 0
 *
 * c is at most the share, so bound keeps what the living have. It may keep a
 * remainder that is no slot's share: what the dead one had reserved and not
 * committed, or c itself where the reaper dies after its first step. So
 *
 *     repairs    b = bound · R = sum of reserved + idle · if amount(b) > R: CAS bound from b to R
 *
 * Shares grow only by a change of bound, and each such change makes a word
 * that was not there before (the version). If the CAS succeeds no share grew
 * since b was read, so every slot was read at a time when it had reserved and idle at
 * least the share that it has now: R is at least the sum of the shares. In the
 * same way bound is below the sum of committed only if a process has written to the
 * page by hand; it is raised to R then.
 *
 * Reserved and committed are sums of two words each (slot_add), which are read one
 * after the other. A sum of reserved would be too small if it lacked what one thread
 * has added, and had what another has taken off since. Bound changed between these two
 * steps, and so between the two reads, and the CAS fails; or idle did, which is read
 * before and after the two, and they are read again.
 *
 * The agent corrects: it holds bound against the driver's own figure, for the
 * living, and moves the ceiling by the difference. That stays right as long as
 * what leaves bound leaves the driver too. Some memory is gone before we know:
 * what a pool gave back by itself, and the difference between a context and its
 * estimate; and a dying process gives its descriptors back, and so its memory,
 * before the lock of its slot. It may have been missing in the driver's figure
 * while it stood in bound, so it is taken off as
 *
 *     lost       committed -= n · settled += n · bound -= n · reserved -= n
 *
 * and the ceiling is lowered by what was settled since the reading began, until
 * the next one: what is lost is no room gained twice. That n is uncommitted
 * first lets a reading that falls between the steps see that something is under
 * way.
 *
 * Exported memory lives as long as any process has it open, and no call tells us when
 * the last of them lets go. When its owner does, it stays bound and
 * committed as if it were held yet
 *
 *     let go     exported += n
 *
 * so that committed may be more than what the driver gave, by what is gone meanwhile:
 * too much is bound, never too little. A reading shows what is gone, by the driver's
 * having less than bound, which raises the ceiling; so as long as there is any, a
 * ceiling that was exact need not be so any more. By as much as the ceiling is above
 * the limit the owner takes it off
 *
 *     gone       exported -= n · lost n
 *
 * and that gives no room, whether it was gone or not: bound and the ceiling fall by n
 * together, and the next reading tells what the driver has.
 *
 * The lock of a slot is a kernel's lock on one byte of the file, of an open
 * file description that nothing but one mapping of this process holds. It ends
 * with the mapping: at exit, at any death and at exec, not by fork (the mapping
 * is not for children) and not by a program that closes every descriptor. */
#ifndef CAP_COUNT_H
#define CAP_COUNT_H

#include "claim.h"
#include "page.h"
#include "sys.h"

/* A picture is all that decides a refusal: while it stays as it is, or what it
 * leaves becomes less, so does the answer. */
struct picture {
    uint64_t amount, committed; /* bound, and what of it the driver gave */
    uint64_t ceiling, settled, guesses;
};

enum { ANSWERS = 4 };

struct account {
    const struct limit_page *page;
    struct usage_page *usage;
    struct slot *slot;
    const void *first; /* the thread that has the slot's first words for itself */
    uint64_t nonce;
    uint64_t waited; /* 1 + page->done as it was when no reading came; 0: never */
    uint32_t careful; /* the ceiling was met not long ago; see account_reserve_quickly */
    uint32_t shared; /* other threads than the first have kept something idle, too */
    uint64_t keeps; /* so many bytes may be idle */
    uint32_t lock;    /* guards answers, for moments */
    /* Requests for which all was done that can be done, and there was no room. */
    struct answer {
        uint64_t n; /* 0: none */
        struct picture at;
    } answers[ANSWERS];
    uint32_t next_answer;
    char path[PATH_ROOM]; /* the usage page's */
    void *hold;      /* the mapping that keeps the slot's lock */
    uint64_t dead, looked; /* what dead processes have in bound, and when that was looked at */
    uint64_t stuck; /* the page's attempt, where it was waited for in vain */
    uint64_t undoing; /* bytes beyond what is bound that this process is about to give back */
    /* relief gives back what the process can spare, before a refusal of so many bytes. */
    void (*relief)(struct account *, uint64_t);
};

/* account_find maps the limit page; account_open the usage page too, and takes a
 * slot. 0, or a negative error number with nothing more held than before. */
int account_find(struct account *a, const char *limit_path);
int account_open(struct account *a, const char *usage_path);

/* account_unlimited says whether the GPU has no limit now. */
static inline bool account_unlimited(const struct account *a) { return __atomic_load_n(&a->page->limit, __ATOMIC_RELAXED) == NO_LIMIT; }

/* account_nonsense says whether the pages are such that nothing can be counted
 * in them. */
bool account_nonsense(const struct account *a);

/* account_told says of the limit page's nonce whether its words are of a reading of
 * this usage page, or on the way to be. */
static inline bool account_told(const struct account *a, uint64_t nonce) { return nonce == a->nonce || nonce == WRITING; }

/* account_ceiling is what bound may reach, in bytes, or NO_LIMIT. While the agent
 * writes, which may be long where it is kept from going on, the page's words are
 * old ones and new ones: the ceiling that they make holds, up to the limit. */
static inline uint64_t account_ceiling(const struct account *a)
{
    const struct limit_page *p = a->page;
    uint64_t nonce = __atomic_load_n(&p->nonce, __ATOMIC_ACQUIRE);
    if (!account_told(a, nonce))
        return __atomic_load_n(&p->limit, __ATOMIC_RELAXED);
    uint64_t ceiling = __atomic_load_n(&p->ceiling, __ATOMIC_ACQUIRE);
    uint64_t lost = __atomic_load_n(&a->usage->settled, __ATOMIC_RELAXED) - __atomic_load_n(&p->settled, __ATOMIC_ACQUIRE);
    /* The agent may have published meanwhile, all of it. It writes the ceiling
     * first: an old one with the new settled is seen by a second look, and a
     * new one with the old settled is too low, which does no harm. */
    uint64_t again = __atomic_load_n(&p->ceiling, __ATOMIC_ACQUIRE);
    if (again < ceiling)
        ceiling = again;
    if (lost && ceiling != NO_LIMIT)
        ceiling = lost < ceiling ? ceiling - lost : 0;
    uint64_t now = __atomic_load_n(&p->nonce, __ATOMIC_RELAXED);
    if (nonce == a->nonce && now == nonce)
        return ceiling;
    uint64_t limit = __atomic_load_n(&p->limit, __ATOMIC_RELAXED);
    return account_told(a, now) && ceiling < limit ? ceiling : limit;
}

/* account_told_ceiling is the ceiling as the last reading has it: it changes where one has
 * found that the driver has more or less than was bound. */
static inline uint64_t account_told_ceiling(const struct account *a) { return __atomic_load_n(&a->page->ceiling, __ATOMIC_ACQUIRE); }

static inline uint64_t count_add(uint64_t *word, uint64_t n) { return __atomic_add_fetch(word, n, __ATOMIC_SEQ_CST); }
static inline void count_sub(uint64_t *word, uint64_t n) { __atomic_sub_fetch(word, n, __ATOMIC_SEQ_CST); }
static inline uint64_t count_read(const uint64_t *word) { return __atomic_load_n(word, __ATOMIC_SEQ_CST); }

/* first_thread says whether this one may change the words that are the first thread's. */
static inline bool first_thread(const struct account *a)
{
#if defined(__x86_64__)
    return __builtin_expect(__builtin_thread_pointer() == a->first, 1);
#else
    (void)a;
    return false;
#endif
}

/* slot_add adds to a slot's reserved or committed, a pair of words. A locked
 * instruction takes as long as thirty others, and there would be four in each
 * allocation and its end. The thread that took the slot, in most programs the one
 * that allocates, changes the first word by an unlocked one. All are seen in their
 * order by others: an x86 keeps that of stores, and what changes bound is locked.
 * What has no such order, or does not tell threads apart, has locked ones only.
 * A thread that comes when that one has ended may have its address, and is the
 * first then. */
static inline void slot_add(const struct account *a, uint64_t *first, uint64_t *others, uint64_t n)
{
#if defined(__x86_64__)
    if (first_thread(a)) {
        __asm__ volatile("addq %1, %0" : "+m"(*first) : "er"(n) : "memory", "cc");
        return;
    }
    count_add(others, n);
#else
    (void)a, (void)others;
    count_add(first, n);
#endif
}
static inline void reserved_add(struct account *a, uint64_t n) { slot_add(a, &a->slot->reserved, &a->slot->others_reserved, n); }
static inline void reserved_sub(struct account *a, uint64_t n) { reserved_add(a, 0 - n); }
static inline void committed_add(struct account *a, uint64_t n) { slot_add(a, &a->slot->committed, &a->slot->others_committed, n); }
static inline void committed_sub(struct account *a, uint64_t n) { committed_add(a, 0 - n); }

/* The steps. Amounts are bytes, multiples of 512, below MOST. */

static inline uint64_t bound_add(struct account *a, uint64_t n) { return count_add(&a->usage->bound, STEP + n / UNIT); }
static inline void bound_sub(struct account *a, uint64_t n) { count_add(&a->usage->bound, STEP - n / UNIT); }

static inline void account_peak(struct account *a, uint64_t amount)
{
    uint64_t old = __atomic_load_n(&a->usage->peak, __ATOMIC_RELAXED);
    while (amount > old)
        if (__atomic_compare_exchange_n(&a->usage->peak, &old, amount, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
            break;
}

/* account_return takes n off bound at once. */
static inline void account_return(struct account *a, uint64_t n)
{
    bound_sub(a, n);
    reserved_sub(a, n);
}

/* IDLE_MOST lets a process allocate and free two of what pools ask for (see pool.h), or
 * many that are smaller. */
#define IDLE_MOST ((uint64_t)64 << 20)

/* account_cancel keeps n idle where that is little. While nothing is, no other process
 * changes the word, so the first thread needs no locked instruction for it as long as it
 * is the only one. Should another begin in this moment, what that keeps may be lost
 * from idle, once, and is taken off bound by the next repair. */
static inline void account_cancel(struct account *a, uint64_t n)
{
    uint64_t was = __atomic_load_n(&a->slot->idle, __ATOMIC_RELAXED);
    if (AMOUNT(was) + n > __atomic_load_n(&a->keeps, __ATOMIC_RELAXED)) {
        account_return(a, n);
        return;
    }
    if (first_thread(a) && AMOUNT(was) == 0 && !__atomic_load_n(&a->shared, __ATOMIC_RELAXED)) {
        __atomic_store_n(&a->slot->idle, was + STEP + n / UNIT, __ATOMIC_RELEASE);
    } else {
        if (!first_thread(a))
            __atomic_store_n(&a->shared, 1, __ATOMIC_SEQ_CST);
        count_add(&a->slot->idle, STEP + n / UNIT);
    }
    reserved_sub(a, n);
}

/* reserve_idle reserves n of what is idle; false: that is less. */
static inline bool reserve_idle(struct account *a, uint64_t n)
{
    uint64_t was = __atomic_load_n(&a->slot->idle, __ATOMIC_RELAXED);
    if (AMOUNT(was) < n)
        return false;
    reserved_add(a, n);
    do {
        if (__atomic_compare_exchange_n(&a->slot->idle, &was, was + STEP - n / UNIT, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
            return true;
    } while (AMOUNT(was) >= n);
    reserved_sub(a, n);
    return false;
}

/* account_guessed is to be called where something was charged that the driver may
 * have more or less of, or was given back so, or came and went uncharged: from then
 * on the ceiling is not known to be exact. */
static inline void account_guessed(struct account *a) { count_add(&a->usage->guesses, 1); }

COLD bool account_reserve_slowly(struct account *a, uint64_t n);
COLD bool account_reserve_carefully(struct account *a, uint64_t n);
COLD bool account_reserve_of_idle(struct account *a, uint64_t n);

/* account_reserve_quickly adds first and looks then, which is cheapest, and for a
 * moment others see what may not fit. Near the ceiling it would stand in the way
 * of theirs that does, so there it looks first. */
static inline bool account_reserve_quickly(struct account *a, uint64_t n)
{
    if (__builtin_expect(__atomic_load_n(&a->careful, __ATOMIC_RELAXED), 0))
        return account_reserve_carefully(a, n);
    if (n >= MOST || n > __atomic_load_n(&a->page->limit, __ATOMIC_RELAXED))
        return false;
    bool idle = reserve_idle(a, n);
    if (!idle)
        reserved_add(a, n);
    uint64_t amount = AMOUNT(idle ? count_read(&a->usage->bound) : bound_add(a, n));
    /* The ceiling of now: what was lost meanwhile has left bound and lowered it. */
    uint64_t ceiling = account_ceiling(a);
    if (__builtin_expect(amount > ceiling, 0)) {
        account_return(a, n);
        return account_reserve_of_idle(a, n);
    }
    if (!idle)
        account_peak(a, amount);
    uint64_t keeps = amount <= ceiling - ceiling / 8 ? IDLE_MOST : 0;
    if (__builtin_expect(keeps != __atomic_load_n(&a->keeps, __ATOMIC_RELAXED), 0))
        __atomic_store_n(&a->keeps, keeps, __ATOMIC_RELAXED);
    return true;
}

/* account_reserve makes room for n bytes, or says that there is none. It may
 * take some time over that, near the cap only. */
static inline bool account_reserve(struct account *a, uint64_t n)
{
    return account_reserve_quickly(a, n) || account_reserve_slowly(a, n);
}

/* account_force counts what is there already, whatever the ceiling. */
static inline void account_force(struct account *a, uint64_t n)
{
    reserved_add(a, n);
    account_peak(a, AMOUNT(bound_add(a, n)));
    committed_add(a, n);
}

static inline void account_commit(struct account *a, uint64_t n) { committed_add(a, n); }

/* account_lost takes off what is gone already. */
static inline void account_lost(struct account *a, uint64_t n)
{
    committed_sub(a, n);
    count_add(&a->usage->settled, n);
    account_return(a, n);
}

/* account_exported leaves n charged that was exported and let go of, until the
 * driver is seen to have it no more. */
COLD void account_exports_gone(struct account *a);
static inline void account_exported(struct account *a, uint64_t n)
{
    count_add(&a->slot->exported, n);
    account_guessed(a);
    account_exports_gone(a);
}
static inline void account_uncommit(struct account *a, uint64_t n) { committed_sub(a, n); }

/* account_within is for what came uncounted, n bytes of it by a hint: whether the
 * container is within its limit with that, by a reading of now, or by the hint where
 * no reading tells. */
bool account_within(struct account *a, uint64_t n);

/* account_exactly is the ceiling where a reading was exact and nothing was guessed since,
 * or else 0; waits: after it has waited for one. */
uint64_t account_exactly(struct account *a, bool waits);

/* account_moves is another number after each change of bound, or of what is idle. */
uint64_t account_moves(const struct account *a);

/* account_rests says whether nothing is under way in any process, and what the driver has
 * given to them, at least; reaps: after it has looked for dead ones. */
bool account_rests(struct account *a, bool reaps, uint64_t *given);

/* account_undone notes that the driver had given n beyond what is bound, and has been
 * given it back. */
static inline void account_undone(struct account *a, uint64_t n)
{
    uint64_t old = __atomic_load_n(&a->usage->undone, __ATOMIC_RELAXED);
    while (n > old)
        if (__atomic_compare_exchange_n(&a->usage->undone, &old, n, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
            break;
}

/* account_await_death waits, for a bounded time, until the driver has the memory back
 * of the process that had a slot and whose lock is free. */
void account_await_death(const struct slot *s);

/* account_excess is by how much contexts were charged with more than is known of
 * them by now. */
uint64_t account_excess(const struct account *a, uint64_t expected, uint64_t contexts);

/* account_used is what counts against the limit: bound with the agent's
 * correction, without what dead processes left in it, at most the limit. */
uint64_t account_used(struct account *a);

#endif
