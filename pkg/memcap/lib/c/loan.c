/* SPDX-License-Identifier: Apache-2.0 */

#include "count.h"

struct account *account_other(const char *limit_path, const char *usage_path)
{
    struct account *b = sys_map(sizeof *b, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
    if (!b)
        return NULL;
    SYS3(SYS_madvise, b, sizeof *b, MADV_DONTFORK);
    if (account_find(b, limit_path) == 0 && account_open(b, usage_path) == 0) {
        __atomic_store_n(&b->slot->lends, 1, __ATOMIC_SEQ_CST);
        return b;
    }
    if (b->page)
        sys_unmap((void *)b->page, PAGE);
    sys_unmap(b, sizeof *b);
    return NULL;
}

uint64_t account_loans(const struct account *a)
{
    uint64_t sum = 0, high = __atomic_load_n(&a->usage->high, __ATOMIC_RELAXED);
    int fd = -1;
    for (uint64_t i = 0; i < high && i < SLOTS; i++) {
        const struct slot *s = &a->usage->slots[i];
        uint64_t n = borrowed_for(s);
        if (n && (s == a->slot || (!slot_dead(a->path, i, &fd) && fd >= 0)))
            sum += n;
    }
    if (fd >= 0)
        sys_close(fd);
    return sum;
}

/* take_off takes up to n off a word, and returns how much it took off. */
static uint64_t take_off(uint64_t *word, uint64_t n)
{
    uint64_t was = count_read(word), some;
    do
        some = n < was ? n : was;
    while (some && !__atomic_compare_exchange_n(word, &was, was - some, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return some;
}

/* hand_back gives to the lenders what they lend beyond what this process's slot says. If bound is
 * above the ceiling, it keeps back the difference. Lost memory (count.h) gives no room before the
 * next reading, but the lenders would have it as room at once. */
static void hand_back(struct account *a)
{
    uint64_t lent = 0, borrowed = borrowed_for(a->slot);
    for (struct account *b = a->others; b; b = b->next)
        lent += count_read(&b->lent);
    if (lent <= borrowed)
        return;
    uint64_t amount = AMOUNT(count_read(&a->usage->bound)), ceiling = account_ceiling(a);
    uint64_t n = lent - borrowed, over = amount > ceiling ? amount - ceiling : 0;
    n = n > over ? (n - over) / UNIT * UNIT : 0;
    for (struct account *b = a->others; b && n; b = b->next) {
        uint64_t some = take_off(&b->lent, n);
        if (!some)
            continue;
        account_uncommit(b, some);
        account_return(b, some);
        n -= some;
    }
}

/* reserve_of reserves up to n on another page, and returns how much it reserved. */
static uint64_t reserve_of(struct account *b, uint64_t n)
{
    if (account_nonsense(b))
        return 0;
    if (account_try(b, n, 0))
        return n;
    uint64_t room = account_room(b);
    n = n < room ? n : room;
    return n && account_try(b, n, 0) ? n : 0;
}

/* with_loans reserves n and borrows lacks bytes for it. got bytes of these are already reserved, on
 * the pages before b. False: there is no such room. */
static bool with_loans(struct account *a, struct account *b, uint64_t n, uint64_t lacks, uint64_t got)
{
    if (got == lacks)
        return account_try(a, n, got);
    if (!b)
        return false;
    uint64_t some = reserve_of(b, lacks - got);
    bool fits = with_loans(a, b->next, n, lacks, got + some);
    if (fits && some) {
        account_commit(b, some);
        count_add(&b->lent, some);
    } else if (some) {
        account_return(b, some);
    }
    return fits;
}

/* end_spare gives to the lenders what has become free at home. It first reserves that at home, so
 * that no other process takes it meanwhile. */
static void end_spare(struct account *a)
{
    uint64_t left = count_read(&a->slot->borrowed);
    if (!left)
        return;
    uint64_t room = account_room(a);
    if (room > left)
        room = left;
    if (!room || !account_try(a, room, 0))
        return;
    take_off(&a->slot->borrowed, room);
    bound_sub(a, room);
    reserved_sub(a, room);
    hand_back(a);
}

/* could_lend returns how many bytes the other pages have free. */
static uint64_t could_lend(struct account *a)
{
    uint64_t sum = 0;
    for (struct account *b = a->others; b; b = b->next)
        sum += account_room(b);
    return sum;
}

/* TRIES is how often borrow tries again if other processes were faster. */
enum { TRIES = 8 };

static bool borrow(struct account *a, uint64_t n)
{
    hand_back(a);
    for (int i = 0; i < TRIES; i++) {
        uint64_t needs = AMOUNT(count_read(&a->usage->bound)) + n, ceiling = account_ceiling(a);
        uint64_t lacks = needs > ceiling ? (needs - ceiling + UNIT - 1) / UNIT * UNIT : 0;
        /* The ceiling may have fallen below bound. Then the process also borrows for what it
         * already has, but not for what others have. */
        if (lacks > n && lacks - n + borrowed_for(a->slot) > slot_committed(a->slot))
            return false;
        if (could_lend(a) < lacks)
            return false; /* other requests must not be refused for a loan that comes to nothing */
        if (!with_loans(a, a->others, n, lacks, 0))
            continue;
        if (lacks) {
            __atomic_store_n(&a->usage->borrows, 1, __ATOMIC_RELAXED);
            count_add(&a->slot->borrowed, lacks);
        }
        if (lacks > n)
            end_spare(a); /* another thread may have freed it */
        return true;
    }
    return false;
}

bool account_borrow(struct account *a, uint64_t n, bool waits)
{
    if (n >= MOST)
        return false;
    /* Wait before the lock is taken: other threads need it to give memory back. What the lenders
     * find is reserved only for this moment. borrow then reserves it again. */
    for (struct account *b = a->others; waits && b; b = b->next)
        if (account_contend(b, n))
            account_return(b, n);
    spin_lock(&a->lending);
    bool done = borrow(a, n);
    spin_unlock(&a->lending);
    return done;
}

void account_repay(struct account *a, uint64_t n)
{
    spin_lock(&a->lending);
    take_off(&a->slot->borrowed, n);
    bound_sub(a, n);
    reserved_sub(a, n);
    hand_back(a);
    end_spare(a);
    spin_unlock(&a->lending);
}
