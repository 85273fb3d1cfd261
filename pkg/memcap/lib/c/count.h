/* SPDX-License-Identifier: Apache-2.0 */

/* The counter that a container's processes share. There is one for each GPU. This code knows no
 * CUDA: the tests run it with a small driver of their own.
 *
 * The guarantee: at every instant, the driver has given the container's processes at most the
 * amount in `bound`. This holds even if a process is killed between any two instructions. A process
 * reserves memory only if bound stays within the ceiling. Bound may be too large for a while; it is
 * never too small.
 *
 * Each process has a slot in the usage page. The slot's share is its part of bound; no word holds
 * the share. Each step of each process keeps
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
 * All processes change bound, so its cache line moves from processor to processor. To avoid that, a
 * process far from the ceiling keeps part of what it frees as idle in its slot. Its next allocation
 * takes memory from there, and bound does not change:
 *
 *     allocate   reserved += n · idle -= n (CAS) · [call the driver] · committed += n
 *     free       committed -= n · [call the driver] · idle += n · reserved -= n
 *
 * A process that finds no room takes the idle memory of all slots, by idle := 0 (CAS). That amount
 * then belongs to no share. It is a remainder in bound, which a repair takes off (see below).
 *
 * A process may die after any of these steps. The inequality held until then, and the driver takes
 * all its memory back. Only the process that takes the slot's lock next changes the slot. It
 *
 *     reaps      c = committed, committed := 0 · settled += c · bound -= c · reserved := 0
 *
 * c is at most the share, so bound still covers the living. Bound may keep a remainder that is part
 * of no share: what the dead process had reserved and not committed, or c itself if the reaper dies
 * after its first step. So a process that needs room
 *
 *     repairs    b = bound · R = sum of reserved + idle · if amount(b) > R: CAS bound from b to R
 *
 * A repair is safe. A share grows only by a change of bound, and each change makes a new word,
 * because of the version. If the CAS succeeds, no share has grown since b was read. So when the
 * repair read a slot, reserved + idle was at least the share that the slot has now. So R is at
 * least the sum of the shares. Bound is below the sum of committed only if a process has written to
 * the page by hand. Then a repair raises it to R.
 *
 * The sum of reserved would be too small if idle memory became reserved, or reserved memory idle,
 * while a repair reads the two. Idle has then changed. So a repair reads idle before and after
 * reserved, and reads the slot again if idle has changed.
 *
 * The agent compares bound with the driver's figure for the living processes, and moves the ceiling
 * by the difference. This stays right as long as memory that leaves bound leaves the driver's
 * figure too. But some memory is gone from the driver before the process knows: what a pool gave
 * back by itself, the difference between a context and its estimate, and the memory of a dying
 * process, which closes its descriptors before it releases its slot's lock. A reading may have
 * found such memory in bound but not in the driver's figure. So the process takes it off as
 *
 *     lost       committed -= n · settled += n · bound -= n · reserved -= n
 *
 * Until the next reading, the ceiling is lowered by what was settled since the last reading began.
 * So lost memory does not give room twice. Committed falls first, so that a reading between the
 * steps sees that something is under way.
 *
 * Exported memory exists as long as any process has it open, and no call shows when the last one
 * closes it. When its owner frees it, it stays in bound and in committed, as if the owner still had
 * it:
 *
 *     let go     exported += n
 *
 * So committed may exceed what the driver gave, by the exported memory that is gone. Bound is then
 * too large, never too small. Once the memory is gone, the driver has less than bound. The next
 * reading shows that and raises the ceiling. So while there is exported memory, a ceiling that was
 * exact may be out of date. If the ceiling is above the limit, the owner takes off the difference:
 *
 *     gone       exported -= n · lost n
 *
 * This gives no room, whether the memory was gone or not. Bound and the ceiling fall by n together,
 * and the next reading finds what the driver has.
 *
 * The lock of a slot is a kernel lock on one byte of the file. It belongs to an open file
 * description that only one mapping of this process keeps open. It ends with the mapping: at exit,
 * at any death and at exec. A fork does not end it, since children do not have the mapping. A
 * program that closes every descriptor does not end it either.
 *
 * Arm processors reorder accesses that these proofs assume to be in order, unless an access forbids
 * it. Each access below has the weakest order that the proofs need. tests/order has a model of
 * these accesses. The model finds no fault with these orders, and finds one as soon as any of them
 * is taken out. tests/order also lists the accesses that the model leaves out, each with the
 * reason. */
#ifndef CAP_COUNT_H
#define CAP_COUNT_H

#include "claim.h"
#include "loan.h"
#include "page.h"
#include "sys.h"

/* A picture is everything that a refusal depends on. While it does not change, or leaves less room,
 * the answer stays the same. Amounts are in bytes. */
struct picture {
    uint64_t amount, committed; /* bound, and the part of it that the driver gave */
    uint64_t ceiling, settled, guesses;
};

enum { ANSWERS = 4 };

struct account {
    /* A list of other pages of the same GPU, from which this process may borrow; NULL: none. See
     * loan.h. */
    struct account *others;
    struct account *next; /* the next page of such a list */
    uint64_t lent;        /* of a page in such a list: the bytes that it lends to this process */
    uint32_t lending;     /* a lock, held while this process borrows or gives back */
    const struct limit_page *page;
    struct usage_page *usage;
    struct slot *slot;
    uint64_t nonce; /* the usage page's when it was opened */
    uint64_t waited; /* 1 + page->done when this process last waited for a reading in vain; 0: never */
    /* How many bytes this process may keep idle: now, and when it is far from the ceiling. */
    uint64_t keeps;
    uint64_t keeps_far;
    uint32_t lock;    /* guards answers; held for moments only */
    /* The last requests that were refused although everything was tried. */
    struct answer {
        uint64_t n; /* bytes; 0: this place is empty */
        struct picture at;
    } answers[ANSWERS];
    uint32_t next_answer;
    char path[PATH_ROOM]; /* of the usage page */
    void *hold;      /* the mapping that keeps the slot's lock */
    uint64_t dead, looked; /* bytes of bound that belong to dead processes, and the ticks at which that was found */
    uint64_t begun; /* when this process last made a context, in microseconds; 0: never */
    uint64_t stuck; /* the page's attempt word that this process has waited for in vain; 0: none */
    uint64_t undoing; /* bytes beyond bound that this process is about to give back */
    /* relief frees what this process can spare. It is called before a request of so many bytes is
     * refused. */
    void (*relief)(struct account *, uint64_t);
};

/* account_find maps the limit page. account_open maps the usage page and takes a slot. Both return
 * 0, or a negative error number; after an error they keep nothing. */
int account_find(struct account *a, const char *limit_path);
int account_open(struct account *a, const char *usage_path);

/* account_unlimited reports whether the GPU has no limit now. */
static inline bool account_unlimited(const struct account *a) { return __atomic_load_n(&a->page->limit, __ATOMIC_RELAXED) == NO_LIMIT; }

/* account_nonsense reports whether the pages are spoilt, so that nothing can be counted in them. */
bool account_nonsense(const struct account *a);

/* account_reading_is_ours reports whether the words of the limit page come from a reading of this
 * usage page, or are just being written. nonce is the limit page's. */
static inline bool account_reading_is_ours(const struct account *a, uint64_t nonce)
{
    return nonce == a->nonce || nonce == WRITING;
}

/* more_than returns the ceiling plus n, or NO_LIMIT if there is no ceiling. */
static inline uint64_t more_than(uint64_t ceiling, uint64_t n) { return ceiling > NO_LIMIT - n ? NO_LIMIT : ceiling + n; }

/* account_ceiling_with returns how far bound may go in bytes, or NO_LIMIT, if borrowed bytes were
 * borrowed. While the agent writes the page, some of its words are old and some new. That may
 * last, if the agent is held up. The ceiling that these words give counts all the same, up to the
 * limit. */
static inline uint64_t account_ceiling_with(const struct account *a, uint64_t borrowed)
{
    const struct limit_page *p = a->page;
    uint64_t nonce = __atomic_load_n(&p->nonce, __ATOMIC_ACQUIRE);
    if (!account_reading_is_ours(a, nonce))
        return more_than(__atomic_load_n(&p->limit, __ATOMIC_RELAXED), borrowed);
    uint64_t ceiling = __atomic_load_n(&p->ceiling, __ATOMIC_RELAXED);
    uint64_t lost = __atomic_load_n(&a->usage->settled, __ATOMIC_RELAXED) - __atomic_load_n(&p->settled, __ATOMIC_ACQUIRE);
    /* The agent may publish a reading between these loads. It writes the ceiling first. An old
     * ceiling with the new settled would be too high. So the ceiling is read again, and the lower
     * one counts. A new ceiling with the old settled is too low, which does no harm. */
    uint64_t again = __atomic_load_n(&p->ceiling, __ATOMIC_ACQUIRE);
    ceiling = more_than(again < ceiling ? again : ceiling, borrowed);
    if (lost && ceiling != NO_LIMIT)
        ceiling = lost < ceiling ? ceiling - lost : 0;
    uint64_t now = __atomic_load_n(&p->nonce, __ATOMIC_RELAXED);
    if (nonce == a->nonce && now == nonce)
        return ceiling;
    uint64_t limit = more_than(__atomic_load_n(&p->limit, __ATOMIC_RELAXED), borrowed);
    return account_reading_is_ours(a, now) && ceiling < limit ? ceiling : limit;
}

/* account_own_ceiling returns how far bound may go without borrowed memory. */
static inline uint64_t account_own_ceiling(const struct account *a) { return account_ceiling_with(a, 0); }

/* account_borrowed returns how many bytes living processes have borrowed for this page. */
static inline uint64_t account_borrowed(const struct account *a)
{
    return __builtin_expect(__atomic_load_n(&a->usage->borrows, __ATOMIC_RELAXED) != 0, 0) ? account_loans(a) : 0;
}

/* account_ceiling returns how far bound may go, in bytes, or NO_LIMIT. */
static inline uint64_t account_ceiling(const struct account *a) { return account_ceiling_with(a, account_borrowed(a)); }

/* account_last_ceiling returns the ceiling of the last reading. It changes when a reading finds
 * that the driver has more or less than bound says. */
static inline uint64_t account_last_ceiling(const struct account *a) { return __atomic_load_n(&a->page->ceiling, __ATOMIC_ACQUIRE); }

static inline uint64_t count_add(uint64_t *word, uint64_t n) { return __atomic_add_fetch(word, n, __ATOMIC_SEQ_CST); }
static inline void count_sub(uint64_t *word, uint64_t n) { __atomic_sub_fetch(word, n, __ATOMIC_SEQ_CST); }
static inline uint64_t count_read(const uint64_t *word) { return __atomic_load_n(word, __ATOMIC_SEQ_CST); }

static inline void reserved_add(struct account *a, uint64_t n) { count_add(&a->slot->reserved, n); }
static inline void reserved_sub(struct account *a, uint64_t n) { reserved_add(a, 0 - n); }
static inline void committed_add(struct account *a, uint64_t n) { count_add(&a->slot->committed, n); }
static inline void committed_sub(struct account *a, uint64_t n) { committed_add(a, 0 - n); }

/* The steps. Amounts are in bytes: multiples of 512, below MOST. */

static inline uint64_t bound_add(struct account *a, uint64_t n) { return count_add(&a->usage->bound, STEP + n / UNIT); }
static inline void bound_sub(struct account *a, uint64_t n) { count_add(&a->usage->bound, STEP - n / UNIT); }

static inline void account_peak(struct account *a, uint64_t amount)
{
    uint64_t old = __atomic_load_n(&a->usage->peak, __ATOMIC_RELAXED);
    while (amount > old)
        if (__atomic_compare_exchange_n(&a->usage->peak, &old, amount, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
            break;
}

/* account_return takes n reserved bytes off bound, and keeps none of them idle. */
static inline void account_return(struct account *a, uint64_t n)
{
    if (__builtin_expect(a->others != NULL, 0)) {
        account_repay(a, n);
        return;
    }
    bound_sub(a, n);
    reserved_sub(a, n);
}

/* IDLE_MOST is how many bytes a process keeps idle at most. It is enough for two requests of a pool
 * (see pool.h), or for many smaller ones. */
#define IDLE_MOST ((uint64_t)64 << 20)

/* account_cancel gives up n reserved bytes. It keeps them idle unless too much would be idle
 * then. */
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

/* reserve_idle reserves n from the slot's idle memory. False: less than n is idle. */
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

/* account_guessed is called after a change that is not known to the byte. Something was charged or
 * given back, and the driver may have more or less of it. Or something came and went uncharged.
 * From then on the ceiling may not be exact. */
static inline void account_guessed(struct account *a) { count_add(&a->usage->guesses, 1); }

COLD bool account_reserve_slowly(struct account *a, uint64_t n);
COLD bool account_reserve_of_idle(struct account *a, uint64_t n);

/* account_try reserves n if it fits at once. False: it does not. more is what the caller has
 * borrowed for n, in bytes. */
bool account_try(struct account *a, uint64_t n, uint64_t more);

/* account_reserve_quickly reserves n if it fits at once. False: it does not. */
static inline bool account_reserve_quickly(struct account *a, uint64_t n)
{
    if (n >= MOST || n > __atomic_load_n(&a->page->limit, __ATOMIC_RELAXED))
        return false;
    bool idle = reserve_idle(a, n);
    if (!idle && __builtin_expect(!account_try(a, n, 0), 0))
        return account_reserve_of_idle(a, n);
    /* Read the ceiling after bound. Memory that had left bound by then has lowered the ceiling if
     * it was lost. */
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

/* account_measure waits for a reading, for a bounded time, before n more bytes come near the
 * ceiling. It does so once after new contexts and modules. A new context may take more than was
 * expected, and so may its first kernels and pools. A program can take many GiB between two
 * readings, and memory that was given is not taken back. If no context of this page has ever taken
 * more, and all modules are charged, there is one exception. account_measure then does not wait
 * while this process's last context is younger than the time between two readings. A short program
 * takes no longer. The caller must hold no lock.
 *
 * account_unmeasured is called after a context was charged, with 0 bytes. It is also called after
 * so many bytes may have been taken that were not charged. If no reading comes, they are
 * charged. */
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

/* account_reserve reserves n bytes. False: there is no room. It may wait, but only near the cap. */
static inline bool account_reserve(struct account *a, uint64_t n)
{
    account_measure(a, n);
    return account_reserve_quickly(a, n) || account_reserve_slowly(a, n);
}

/* account_force charges n bytes that the driver has given already. It ignores the ceiling. */
static inline void account_force(struct account *a, uint64_t n)
{
    reserved_add(a, n);
    account_peak(a, AMOUNT(bound_add(a, n)));
    committed_add(a, n);
}

static inline void account_commit(struct account *a, uint64_t n) { committed_add(a, n); }

/* account_lost takes off n committed bytes that the driver already had back. */
static inline void account_lost(struct account *a, uint64_t n)
{
    committed_sub(a, n);
    count_add(&a->usage->settled, n);
    account_return(a, n);
}

/* account_exported keeps n bytes charged that were exported and then freed here.
 * account_exports_gone takes such bytes off once a reading shows that they are gone. */
COLD void account_exports_gone(struct account *a);
static inline void account_exported(struct account *a, uint64_t n)
{
    count_add(&a->slot->exported, n);
    account_guessed(a);
    account_exports_gone(a);
}
static inline void account_uncommit(struct account *a, uint64_t n) { committed_sub(a, n); }

/* account_within reports whether the container is within its limit, after it got memory that was
 * not counted. It waits for a reading. n is an estimate of that memory in bytes; it counts only if
 * no exact reading comes. */
bool account_within(struct account *a, uint64_t n);

/* account_no_reading reports whether no reading is to be expected: the agent does not read, or did
 * not answer when this process last asked. account_is_near reports whether the room that is left
 * may matter now: account_no_reading is true, or bound is near the ceiling. */
bool account_is_near(const struct account *a);
bool account_no_reading(const struct account *a);

/* account_exactly returns the ceiling if the last reading was exact and nothing was guessed since,
 * else 0. If waits is true, it waits for a reading first. */
uint64_t account_exactly(struct account *a, bool waits);

/* account_moves returns a number that changes whenever bound or the idle of any slot changes. */
uint64_t account_moves(const struct account *a);

/* account_rests reports whether no process has anything under way. It sets *given to the committed
 * bytes of all processes; the driver has given them at least that. If reaps is true, it clears the
 * slots of dead processes first. */
bool account_rests(struct account *a, bool reaps, uint64_t *given);

/* account_undone notes that the driver gave n bytes beyond bound and has them back. The usage page
 * keeps the largest such n. */
static inline void account_undone(struct account *a, uint64_t n)
{
    uint64_t old = __atomic_load_n(&a->usage->undone, __ATOMIC_RELAXED);
    while (n > old)
        if (__atomic_compare_exchange_n(&a->usage->undone, &old, n, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
            break;
}

/* account_await_death waits, for a bounded time, until the driver has back the memory of a process
 * that had slot s. The process must have released the slot's lock. If it cannot be watched, a fixed
 * time is waited, unless *waited is true; then *waited becomes true. */
void account_await_death(const struct slot *s, bool *waited);

/* account_excess returns how many bytes too much contexts were charged. expected is what they were
 * charged, and contexts is their number. The limit page has what one of them takes. */
uint64_t account_excess(const struct account *a, uint64_t expected, uint64_t contexts);

/* account_used returns what counts against the limit, in bytes: bound with the agent's correction,
 * without what dead processes left in it. It is at most the limit. */
uint64_t account_used(struct account *a);

/* account_limit returns how many bytes the container may have: the sum of its shares, or
 * NO_LIMIT. */
uint64_t account_limit(const struct account *a);

/* For loans. account_contend reserves n, or waits for it as account_reserve does. account_room
 * returns how many bytes fit now. */
bool account_contend(struct account *a, uint64_t n);
uint64_t account_room(struct account *a);

#endif
