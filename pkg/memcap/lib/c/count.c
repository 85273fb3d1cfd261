/* SPDX-License-Identifier: Apache-2.0 */

#include "count.h"

#include <poll.h>
#include <sys/stat.h>

/* How long a refusal waits, beside the agent's next reading. It waits until nothing that other
 * processes have under way has moved for CONTEND_US, and EACH_US more for each of them. It waits no
 * longer than LONGEST_CONTEND_US. On a busy machine these processes get the processor one after the
 * other. Meanwhile it looks for dead processes: first after REAP_US, then each time after twice as
 * long, up to LONGEST_REAP_US. Asking for other processes' locks costs most. DEATH_MS is how long
 * it waits for a dead process's memory. */
enum { DEATH_MS = 100, CONTEND_US = 200 * 1000, EACH_US = 50 * 1000, LONGEST_CONTEND_US = 16 * CONTEND_US, REAP_US = 4 * 1000, LONGEST_REAP_US = 64 * 1000 };

/* --- opening -------------------------------------------------------------- */

static uint64_t random_word(void)
{
    uint64_t w = 0;
    if (SYS3(SYS_getrandom, &w, sizeof w, 0) != sizeof w)
        w = now_us() * 0x9E3779B97F4A7C15u ^ (uint64_t)SYS1(SYS_getpid, 0) << 32;
    return w ? w : 1;
}

static void *map_file(const char *path, size_t size, int flags, int prot, int *err)
{
    int fd = open_sized(path, flags, size);
    void *at = fd < 0 ? NULL : sys_map(size, prot, MAP_SHARED, fd);
    *err = fd < 0 ? fd : at ? 0 : -12; /* ENOMEM */
    if (at)
        SYS3(SYS_madvise, at, size, MADV_DONTFORK);
    if (fd >= 0)
        sys_close(fd);
    return at;
}

/* take_lock takes a slot's lock with a new open file description. It returns the descriptor, or a
 * negative error number; AGAIN: a living process holds the lock. */
static int take_lock(const struct account *a, uint64_t index)
{
    int fd = sys_open(a->path, O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY, 0);
    if (fd < 0)
        return fd;
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = (off_t)index, .l_len = 1};
    long err = SYS3(SYS_fcntl, fd, OFD_SETLK, &lock);
    if (err < 0) {
        sys_close(fd);
        return (int)err;
    }
    return fd;
}

static bool ours(const struct account *a)
{
    const struct usage_page *u = a->usage;
    if (!begins(u->magic, USAGE_MAGIC))
        return false;
    return count_read(&u->nonce) == a->nonce && a->nonce && __atomic_load_n(&u->high, __ATOMIC_RELAXED) <= SLOTS;
}

bool account_nonsense(const struct account *a)
{
    uint64_t limit = __atomic_load_n(&a->page->limit, __ATOMIC_RELAXED);
    return !ours(a) || (limit >= MOST && limit != NO_LIMIT);
}

static uint64_t high(const struct account *a)
{
    uint64_t n = __atomic_load_n(&a->usage->high, __ATOMIC_RELAXED);
    return n < SLOTS ? n : SLOTS;
}

/* own_pids returns the number of this process's PID namespace; 0: /proc does not show it. */
static uint64_t own_pids(void)
{
    struct stat st;
    return SYS4(SYS_newfstatat, AT_FDCWD, "/proc/self/ns/pid", &st, 0) == 0 ? st.st_ino : 0;
}

/* The kernel releases the lock of a process a moment before the driver has back all of its memory.
 * So we wait for the end of the process. The wait is bounded, since another process may have that
 * ID by now, or the process may run another program. The ID of a process in another PID namespace
 * (of another container, or of an earlier start of this one) does not identify it here. We then
 * wait a fixed time, once for all slots that are reaped together. */
void account_await_death(const struct slot *s, bool *waited)
{
    uint64_t pid = count_read(&s->pid);
    if (!pid || pid > INT32_MAX)
        return;
    if (count_read(&s->pids) != own_pids()) {
        if (!*waited)
            nap_us(DEATH_MS * 1000);
        *waited = true;
        return;
    }
    if (pid == (uint64_t)SYS1(SYS_getpid, 0))
        return;
    int fd = (int)SYS2(SYS_pidfd_open, pid, 0);
    if (fd < 0)
        return;
    SYS3(SYS_fcntl, fd, F_SETFD, FD_CLOEXEC);
    struct pollfd p = {.fd = fd, .events = POLLIN};
    struct timespec limit = {0, DEATH_MS * 1000000L};
    SYS5(SYS_ppoll, &p, 1, &limit, 0, 8);
    sys_close(fd);
}

uint64_t account_excess(const struct account *a, uint64_t expected, uint64_t contexts)
{
    uint64_t each = __atomic_load_n(&a->page->context, __ATOMIC_RELAXED);
    if (each >= MOST || contexts >= MOST / UNIT || expected <= contexts * each)
        return 0;
    return expected - contexts * each;
}

/* empty_idle sets a slot's idle to 0. It reports whether it was more. */
static bool empty_idle(struct slot *s)
{
    uint64_t was = count_read(&s->idle);
    while (AMOUNT(was) != 0)
        if (__atomic_compare_exchange_n(&s->idle, &was, (was & ~(STEP - 1)) + STEP, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
            return true;
    return false;
}

/* blank reports whether a slot has no part of bound. */
static bool blank(const struct slot *s) { return !slot_reserved(s) && !slot_committed(s) && AMOUNT(count_read(&s->idle)) == 0; }

/* end_loans is called as soon as a dead process's lock is held. From then on that process looks
 * alive, and a reading may give all that it had as room. So none of that may be the lender's
 * too. */
static void end_loans(struct slot *s) { __atomic_store_n(&s->borrowed, 0, __ATOMIC_SEQ_CST); }

/* clear reaps a slot. The caller holds its lock. */
static void clear(struct account *a, struct slot *s)
{
    uint64_t c = __atomic_exchange_n(&s->committed, 0, __ATOMIC_RELAXED);
    c += __atomic_exchange_n(&s->others_committed, 0, __ATOMIC_RELAXED);
    if (c && c < MOST) {
        /* Settle all of it. A dying process closes its descriptors before it releases the lock, so
         * a reading may have found it alive and without memory. */
        count_add(&a->usage->settled, c);
        bound_sub(a, c);
    }
    __atomic_store_n(&s->managed, 0, __ATOMIC_SEQ_CST);
    __atomic_store_n(&s->promised, 0, __ATOMIC_SEQ_CST);
    __atomic_store_n(&s->expected, 0, __ATOMIC_SEQ_CST);
    __atomic_store_n(&s->exported, 0, __ATOMIC_SEQ_CST);
    __atomic_store_n(&s->contexts, 0, __ATOMIC_SEQ_CST);
    __atomic_store_n(&s->pid, 0, __ATOMIC_SEQ_CST);
    empty_idle(s);
    __atomic_store_n(&s->lends, 0, __ATOMIC_SEQ_CST);
    __atomic_store_n(&s->others_reserved, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&s->reserved, 0, __ATOMIC_RELEASE);
}

static bool reap(struct account *a)
{
    bool any = false, waited = false;
    uint64_t n = high(a);
    int look = -1;
    for (uint64_t i = 0; i < n; i++) {
        struct slot *s = &a->usage->slots[i];
        if (s == a->slot || blank(s))
            continue;
        /* Nearly all owners are alive, and to ask for a lock is cheaper than to try to take it. */
        if (!slot_dead(a->path, i, &look))
            continue;
        int fd = take_lock(a, i);
        if (fd < 0)
            continue;
        end_loans(s);
        account_await_death(s, &waited);
        clear(a, s);
        sys_close(fd);
        any = true;
    }
    if (look >= 0)
        sys_close(look);
    return any;
}

struct sums {
    uint64_t reserved, committed, idle;
    unsigned moving; /* number of slots with something under way */
    bool sane, exported;
};

enum { SLOT_READS = 100 };

static struct sums sum(const struct account *a)
{
    struct sums t = {.sane = true};
    uint64_t n = high(a);
    for (uint64_t i = 0; i < n; i++) {
        const struct slot *s = &a->usage->slots[i];
        uint64_t c, r, before, after = count_read(&s->idle);
        int reads = 0;
        do {
            before = after;
            c = slot_committed(s), r = slot_reserved(s);
            after = count_read(&s->idle);
        } while (after != before && ++reads < SLOT_READS);
        if (after != before || c >= MOST || r >= MOST || AMOUNT(after) >= MOST || (c | r) % UNIT) {
            t.sane = false;
            continue;
        }
        t.committed += c;
        t.reserved += r;
        t.moving += r != c;
        t.idle += AMOUNT(after);
        t.exported |= count_read(&s->exported) != 0;
    }
    return t;
}

uint64_t account_moves(const struct account *a)
{
    uint64_t n = high(a), sum = count_read(&a->usage->bound);
    for (uint64_t i = 0; i < n; i++)
        sum += count_read(&a->usage->slots[i].idle);
    return sum;
}

bool account_rests(struct account *a, bool reaps, uint64_t *given)
{
    if (reaps)
        reap(a);
    struct sums t = sum(a);
    *given = t.committed;
    return t.sane && t.reserved == t.committed;
}

/* repair repairs bound (see count.h) and returns the sums that it read last. */
static struct sums repair(struct account *a)
{
    for (int tries = 0;; tries++) {
        uint64_t b = count_read(&a->usage->bound);
        struct sums t = sum(a);
        uint64_t all = t.reserved + t.idle;
        if (!t.sane || tries == 1000 || all >= STEP * UNIT || (AMOUNT(b) <= all && AMOUNT(b) >= t.committed))
            return t;
        uint64_t right = ((b & ~(STEP - 1)) + STEP) | all / UNIT;
        if (__atomic_compare_exchange_n(&a->usage->bound, &b, right, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
            return t;
    }
}

/* reclaim takes what is idle in all slots off bound, and reports whether there was any. If t is not
 * NULL, it sets *t to the sums after that. */
static bool reclaim(struct account *a, struct sums *t)
{
    bool any = false;
    for (uint64_t i = 0, n = high(a); i < n; i++)
        any |= empty_idle(&a->usage->slots[i]);
    if (any || t)
        *(t ? t : &(struct sums){0}) = repair(a);
    return any;
}

/* end_turn ends the attempt (attempt.c) during which the last owner of a slot died. No other
 * process can find out from now on: the slot's lock is held again, so the turn looks like one of
 * the new owner, who never ends it. Then no process would make attempts, and no reading would be at
 * rest. */
static void end_turn(struct account *a, uint64_t slot, bool *waited)
{
    uint64_t *at = &a->usage->attempt, word = count_read(at);
    if ((uint32_t)word != 1 + slot)
        return;
    account_await_death(&a->usage->slots[slot], waited);
    __atomic_compare_exchange_n(at, &word, word >> 32 << 32, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}

/* take_slot takes the first slot that is free and blank. It clears the slot of a dead process only
 * if there is no other, since that may have to wait. It returns 0, or a negative error number. */
static int take_slot(struct account *a)
{
    for (int clean = 1; clean >= 0; clean--)
        for (uint64_t i = 0; i < SLOTS; i++) {
            struct slot *s = &a->usage->slots[i];
            if (clean && i < high(a) && !blank(s))
                continue;
            int fd = take_lock(a, i);
            if (fd == AGAIN)
                continue;
            if (fd < 0)
                return fd;
            /* While the lock is held, this does not change. */
            bool waited = false;
            if (!blank(s)) {
                if (clean) {
                    sys_close(fd);
                    continue;
                }
                end_loans(s);
                account_await_death(s, &waited);
                clear(a, s);
            }
            end_turn(a, i, &waited);
            a->hold = sys_map(PAGE, PROT_READ, MAP_SHARED, fd);
            if (a->hold)
                SYS3(SYS_madvise, a->hold, PAGE, MADV_DONTFORK);
            sys_close(fd);
            if (!a->hold)
                return -12;
            /* Readers sum the slots below high. So raise high before the slot is used. */
            uint32_t old = __atomic_load_n(&a->usage->high, __ATOMIC_RELAXED);
            while (old < i + 1)
                if (__atomic_compare_exchange_n(&a->usage->high, &old, (uint32_t)i + 1, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
                    break;
            end_loans(s);
            __atomic_store_n(&s->lends, 0, __ATOMIC_SEQ_CST);
            __atomic_store_n(&s->sms, 0, __ATOMIC_RELAXED);
            __atomic_store_n(&s->starting, 0, __ATOMIC_RELAXED);
            __atomic_store_n(&s->pids, own_pids(), __ATOMIC_SEQ_CST);
            __atomic_store_n(&s->pid, (uint64_t)SYS1(SYS_getpid, 0), __ATOMIC_SEQ_CST);
            a->slot = s;
            a->keeps_far = IDLE_MOST;
            return 0;
        }
    return -28;
}

int account_find(struct account *a, const char *limit_path)
{
    int err;
    struct limit_page *page = map_file(limit_path, PAGE, O_RDONLY, PROT_READ, &err);
    if (page && !begins(page->magic, LIMIT_MAGIC)) {
        sys_unmap(page, PAGE);
        return SPOILT;
    }
    a->page = page;
    return err;
}

int account_open(struct account *a, const char *usage_path)
{
    int err;
    if (!text_join(a->path, sizeof a->path, usage_path, ""))
        return -36;
    a->usage = map_file(usage_path, USAGE_SIZE, O_RDWR, PROT_READ | PROT_WRITE, &err);
    if (!a->usage)
        return err;
    a->nonce = count_read(&a->usage->nonce);
    /* A page that the limit page does not name is not the agent's. A tenant may have mounted it
     * over the real one, to begin again with nothing counted. */
    bool other = a->nonce != __atomic_load_n(&a->page->usage, __ATOMIC_ACQUIRE);
    err = other || account_nonsense(a) ? SPOILT : take_slot(a);
    if (err) {
        sys_unmap(a->usage, USAGE_SIZE);
        a->usage = NULL;
    }
    return err;
}

/* --- near the cap --------------------------------------------------------- */

/* Patience is a time limit by the clock. If this thread was held up between two looks, only a part
 * of that time counts. On a busy node, or at the container's CPU limit, the processes that it waits
 * for were held up too. */
struct patience {
    uint64_t whole, left, counted; /* in microseconds */
};

enum { LOOKS = 8 }; /* the time is up after this many looks at the earliest */

static struct patience patience(uint64_t us)
{
    return (struct patience){us, us, now_us()};
}

static bool runs_out(struct patience *p, uint64_t most)
{
    uint64_t now = now_us(), gone = now - p->counted < most ? now - p->counted : most;
    p->counted = now;
    p->left -= gone < p->left ? gone : p->left;
    return !p->left;
}

/* look must be called before each nap. It reports whether the time is up. */
static bool look(struct patience *p)
{
    return runs_out(p, p->whole / LOOKS);
}

/* try_below reserves n only if it fits. So processes that wait do not see amounts of each other
 * that are taken back at once. more is what the caller has borrowed for n and not yet written to
 * its slot. */
static bool try_below(struct account *a, uint64_t n, uint64_t more, uint64_t (*ceiling)(const struct account *))
{
    uint64_t b = count_read(&a->usage->bound);
    if (n >= MOST || AMOUNT(b) + n > more_than(ceiling(a), more))
        return false;
    reserved_add(a, n);
    b = count_read(&a->usage->bound);
    /* Read the ceiling after bound: memory that was lost before then has lowered it. */
    while (AMOUNT(b) + n <= more_than(ceiling(a), more)) {
        uint64_t next = b + STEP + n / UNIT;
        if (__atomic_compare_exchange_n(&a->usage->bound, &b, next, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
            account_peak(a, AMOUNT(next));
            return true;
        }
    }
    reserved_sub(a, n);
    return false;
}

bool account_try(struct account *a, uint64_t n, uint64_t more) { return try_below(a, n, more, account_ceiling); }

static bool try(struct account *a, uint64_t n) { return account_try(a, n, 0) || (a->others && account_borrow(a, n, false)); }

/* ceiling_alone returns the ceiling while the agent does not read. No reading then corrects what
 * was lost, and a container whose processes come and go would end with no room. So lost memory is
 * room again, up to the limit. It is not room above the limit: a higher ceiling is for memory that
 * was in bound and not in the driver's figure, and that may be the same memory. */
static uint64_t ceiling_alone(const struct account *a)
{
    const struct limit_page *p = a->page;
    uint64_t limit = __atomic_load_n(&p->limit, __ATOMIC_RELAXED), ceiling = __atomic_load_n(&p->ceiling, __ATOMIC_ACQUIRE);
    return more_than(account_reading_is_ours(a, __atomic_load_n(&p->nonce, __ATOMIC_ACQUIRE)) && ceiling < limit ? ceiling : limit, account_borrowed(a));
}

/* account_reserve_of_idle tries again after n did not fit, with what is idle or can be borrowed. */
bool account_reserve_of_idle(struct account *a, uint64_t n)
{
    __atomic_store_n(&a->keeps, 0, __ATOMIC_RELAXED);
    return (reclaim(a, NULL) && account_try(a, n, 0)) || (a->others && account_borrow(a, n, false));
}

void account_exports_gone(struct account *a)
{
    uint64_t had = count_read(&a->slot->exported), ceiling = account_own_ceiling(a), limit = __atomic_load_n(&a->page->limit, __ATOMIC_ACQUIRE);
    if (!had || ceiling == NO_LIMIT || ceiling <= limit)
        return;
    uint64_t gone = (had < ceiling - limit ? had : ceiling - limit) / UNIT * UNIT;
    if (gone && __atomic_compare_exchange_n(&a->slot->exported, &had, had - gone, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
        account_lost(a, gone);
}

/* fresh reports whether the ceiling is exact. It is if the last reading was exact, and everything
 * that was charged or given back since is known to the byte. Another reading would show nothing
 * new. */
static bool fresh(const struct account *a)
{
    const struct limit_page *p = a->page;
    uint64_t stamp = __atomic_load_n(&p->stamp, __ATOMIC_ACQUIRE), settled = __atomic_load_n(&p->settled, __ATOMIC_ACQUIRE);
    return stamp && stamp == count_read(&a->usage->guesses) + 1 && settled == count_read(&a->usage->settled) &&
           __atomic_load_n(&p->nonce, __ATOMIC_ACQUIRE) == a->nonce;
}

static struct picture picture(const struct account *a, uint64_t committed)
{
    return (struct picture){AMOUNT(count_read(&a->usage->bound)), committed, account_ceiling(a), count_read(&a->usage->settled), count_read(&a->usage->guesses)};
}

/* answered reports whether n or less was refused when there was at least as much room. What was
 * under way then may still be under way. Only if less is committed now, something else is being
 * given back. */
static bool answered(struct account *a, uint64_t n, const struct picture *now)
{
    bool any = false;
    spin_lock(&a->lock);
    for (int i = 0; i < ANSWERS && !any; i++) {
        const struct answer *r = &a->answers[i];
        any = r->n && n >= r->n && now->amount >= r->at.amount && now->committed >= r->at.committed && now->ceiling <= r->at.ceiling &&
              now->settled == r->at.settled && now->guesses == r->at.guesses;
    }
    spin_unlock(&a->lock);
    return any;
}

static void remember(struct account *a, uint64_t n, const struct picture *at)
{
    spin_lock(&a->lock);
    a->answers[a->next_answer++ % ANSWERS] = (struct answer){n, *at};
    spin_unlock(&a->lock);
}

/* beyond reports whether n certainly does not fit, since it exceeds the roof. The ceiling alone
 * does not show that: it may be too low if processes allocated during the reading. */
static bool beyond(const struct account *a, uint64_t n)
{
    const struct limit_page *p = a->page;
    uint64_t stamp = __atomic_load_n(&p->roof_stamp, __ATOMIC_ACQUIRE), roof = __atomic_load_n(&p->roof, __ATOMIC_ACQUIRE);
    return stamp && stamp == count_read(&a->usage->guesses) + 1 && AMOUNT(count_read(&a->usage->bound)) + n > roof + account_borrowed(a) &&
           __atomic_load_n(&p->roof_stamp, __ATOMIC_ACQUIRE) == stamp && __atomic_load_n(&p->nonce, __ATOMIC_ACQUIRE) == a->nonce;
}

bool account_no_reading(const struct account *a)
{
    return !__atomic_load_n(&a->page->every_ms, __ATOMIC_ACQUIRE) || count_read(&a->waited) == count_read(&a->page->done) + 1;
}

/* An inquiry asks the agent for a reading that begins after the request, and for further ones while
 * they leave open whether there is room. It ends after twice the time between two readings, if
 * READINGS readings have come by then. An agent on a busy node is late. Then each reading may take
 * twice that time. If one takes longer, the inquiry ends. An inquiry asks for nothing if the agent
 * does not read or did not answer last time, or if the answer is known. */
enum { READINGS = 2 };

struct inquiry {
    bool begun, asked, over;
    bool exported; /* true: exported memory may be gone, which no call shows */
    uint64_t after;    /* number of readings begun before we asked */
    unsigned readings; /* number of readings that we have asked for and got */
    struct patience all, one;
    uint64_t nap; /* in microseconds */
};

static void ask_reading(struct account *a, struct inquiry *h)
{
    uint64_t every = __atomic_load_n(&a->page->every_ms, __ATOMIC_ACQUIRE);
    h->one = patience(2000 * (every < 5000 ? every : 5000));
    if (!h->begun)
        h->all = h->one;
    /* In this order: a reading that begins because of this request has a higher number. */
    h->after = count_read(&a->page->begun);
    count_add(&a->usage->asks, 1);
    h->begun = h->asked = true;
}

enum news { NEWS_NOT_YET, NEWS_TRY_AGAIN, NEWS_OVER };

/* inquire must be called before each nap. NEWS_TRY_AGAIN: there is a new reading, or no other will
 * come, so try again. NEWS_OVER: there was nothing left to wait for before the last try. A reading
 * may come between a try and this call, for another process or by itself. Its answer is known then,
 * but the try failed by an older reading. So inquire returns NEWS_TRY_AGAIN before it returns
 * NEWS_OVER. */
static enum news inquire(struct account *a, struct inquiry *h, uint64_t n)
{
    if (h->over)
        return NEWS_OVER;
    if (h->asked && count_read(&a->page->done) >= h->after + 1) {
        h->asked = false;
        h->readings++;
        return NEWS_TRY_AGAIN;
    }
    if (h->asked) {
        look(&h->all);
        if (!look(&h->one))
            return NEWS_NOT_YET;
        __atomic_store_n(&a->waited, count_read(&a->page->done) + 1, __ATOMIC_SEQ_CST);
        h->over = true;
        return NEWS_TRY_AGAIN;
    }
    bool known = (fresh(a) || beyond(a, n)) && (h->begun || !h->exported);
    h->over = known || account_no_reading(a) || (h->begun && runs_out(&h->all, UINT64_MAX) && h->readings >= READINGS);
    if (h->over)
        return NEWS_TRY_AGAIN;
    ask_reading(a, h);
    return NEWS_NOT_YET;
}

/* await_reading naps until a reading is finished. The agent then wakes the processes that wait on a
 * word of the limit page. That does not reach a process with a kernel of its own, as in a sandbox.
 * And nothing wakes us when another process frees memory. So naps are short. Each is longer than
 * the last, since a nap costs as much CPU time as a hundred allocations. */
enum { SHORT_NAP_US = 400, NAP_US = 1000, LONGEST_NAP_US = 16000 };

static void await_reading(const struct account *a, struct inquiry *h)
{
    const uint32_t *word = (const uint32_t *)&a->page->done; /* the low half */
    uint32_t done = __atomic_load_n(word, __ATOMIC_ACQUIRE);
    uint64_t most = h->all.whole / (4 * LOOKS) < LONGEST_NAP_US ? h->all.whole / (4 * LOOKS) : LONGEST_NAP_US;
    h->nap = 2 * h->nap < most ? 2 * h->nap : most;
    if (h->nap < NAP_US)
        h->nap = NAP_US;
    if (h->asked && count_read(&a->page->done) >= h->after + 1)
        return;
    struct timespec t = {0, (long)h->nap * 1000};
    long r = SYS4(SYS_futex, word, 0 /* FUTEX_WAIT */, done, &t);
    if (r != 0 && r != AGAIN && r != -4 /* EINTR */ && r != -110 /* ETIMEDOUT */)
        nap_us(h->nap);
}

/* near reports whether n more bytes come near the ceiling, which is within a quarter of it. That is
 * more than what is not counted usually takes. */
static bool near(const struct account *a, uint64_t n)
{
    uint64_t ceiling = account_ceiling(a);
    return AMOUNT(count_read(&a->usage->bound)) + n > ceiling - ceiling / 4;
}

bool account_is_near(const struct account *a) { return account_no_reading(a) || near(a, 0); }

/* charge_unread charges what modules may have taken. It is called if no reading will show that. */
static void charge_unread(struct account *a)
{
    uint64_t n = __atomic_exchange_n(&a->usage->unread, 0, __ATOMIC_SEQ_CST);
    if (!n || n >= MOST)
        return;
    account_force(a, n / UNIT * UNIT);
    account_guessed(a);
}

void account_await_measure(struct account *a, uint64_t n)
{
    uint64_t unmeasured = count_read(&a->usage->unmeasured), unread = count_read(&a->usage->unread), limit = __atomic_load_n(&a->page->limit, __ATOMIC_RELAXED);
    if (n > limit || !near(a, n))
        return;
    if (account_no_reading(a)) {
        charge_unread(a);
        return;
    }
    /* What ended programs left in bound is no reason to wait. Otherwise each of many short
     * programs, one after the other, would wait for a reading. */
    if (reap(a) && !near(a, n))
        return;
    uint64_t every = __atomic_load_n(&a->page->every_ms, __ATOMIC_ACQUIRE);
    if (!unread && __atomic_load_n(&a->page->sure, __ATOMIC_RELAXED) && now_us() - __atomic_load_n(&a->begun, __ATOMIC_RELAXED) < 1000 * every)
        return;
    struct inquiry h = {0};
    ask_reading(a, &h);
    while (inquire(a, &h, n) == NEWS_NOT_YET)
        await_reading(a, &h);
    if (!h.readings) {
        charge_unread(a);
        return;
    }
    __atomic_compare_exchange_n(&a->usage->unread, &unread, 0, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    __atomic_compare_exchange_n(&a->usage->unmeasured, &unmeasured, 0, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}

/* contend tries to reserve n until there is nothing left to wait for: no reading, no reservation of
 * others that may be taken back, and no free under way. It does not wait if as much was refused
 * before and the room has not grown since. */
static bool contend(struct account *a, uint64_t n, uint64_t limit)
{
    struct patience still = {0}, all = patience(LONGEST_CONTEND_US);
    struct inquiry h = {.over = n > limit}; /* no reading makes more than the limit fit */
    struct picture now = {0}; /* nothing yet, so the first look finds a change */
    uint64_t nap = SHORT_NAP_US, dice = random_word(), reaped = 0, every = REAP_US / 2;
    bool looked_again = false;
    for (bool first = true;; first = false) {
        if (try(a, n))
            return true;
        uint64_t time = now_us();
        if (time - reaped >= every) {
            reaped = time;
            if (every < LONGEST_REAP_US)
                every *= 2;
            reap(a);
        }
        account_exports_gone(a);
        struct sums t;
        reclaim(a, &t);
        if (try(a, n))
            return true;
        if (first && a->relief) {
            a->relief(a, n);
            if (try(a, n))
                return true;
            t = sum(a);
        }
        struct picture before = now;
        now = picture(a, t.committed);
        if (answered(a, n, &now))
            return false;
        if (now.amount != before.amount || now.committed != before.committed || now.ceiling != before.ceiling)
            still = patience(CONTEND_US + t.moving * EACH_US);
        bool waits = !look(&all) && !look(&still);
        bool under_way = waits && t.sane && now.committed + n <= now.ceiling;
        h.exported = t.exported;
        enum news news = inquire(a, &h, n);
        if (news == NEWS_OVER && !under_way) {
            if (looked_again || now_us() - reaped < REAP_US)
                break;
            looked_again = true; /* look once for processes that have died since */
            every = 0;
            continue;
        }
        dice = dice * 6364136223846793005u + 1442695040888963407u;
        if (news == NEWS_TRY_AGAIN)
            continue;
        if (under_way) {
            nap_us(20 + (dice >> 33) % nap);
            if (nap < LONGEST_NAP_US)
                nap += nap / 8; /* otherwise those who wait keep the processor from those they wait for */
        } else
            await_reading(a, &h);
    }
    /* Remember the refusal only if the last try found no room. Room that has come since is for the
     * next request. While the agent does not answer, another ceiling decides (ceiling_alone), and
     * nothing is remembered. */
    if (now.amount + n > now.ceiling && !account_no_reading(a))
        remember(a, n, &now);
    return false;
}

bool account_within(struct account *a, uint64_t n)
{
    struct inquiry h = {0};
    for (enum news news; (news = inquire(a, &h, n)) != NEWS_OVER && !(news == NEWS_TRY_AGAIN && fresh(a));)
        if (!h.over)
            await_reading(a, &h);
    reclaim(a, NULL);
    uint64_t bound = AMOUNT(count_read(&a->usage->bound));
    return fresh(a) ? bound <= account_ceiling(a) : bound + n <= account_ceiling(a);
}

uint64_t account_exactly(struct account *a, bool waits)
{
    if (waits && !fresh(a))
        account_within(a, 0);
    uint64_t ceiling = account_ceiling(a);
    return fresh(a) ? ceiling : 0;
}

uint64_t account_limit(const struct account *a)
{
    uint64_t sum = 0;
    for (const struct account *b = a; b; b = b == a ? a->others : b->next)
        sum = more_than(sum, __atomic_load_n(&b->page->limit, __ATOMIC_ACQUIRE));
    return sum;
}

bool account_reserve_slowly(struct account *a, uint64_t n)
{
    uint64_t limit = account_limit(a);
    if (n < MOST && limit && !account_nonsense(a)) {
        __atomic_store_n(&a->keeps, 0, __ATOMIC_RELAXED);
        if (contend(a, n, limit) || (a->others && account_borrow(a, n, true)))
            return true;
        if (n <= limit && (account_no_reading(a) ? try_below(a, n, 0, ceiling_alone) : try(a, n)))
            return true; /* a reading may have come just now */
    }
    count_add(&a->usage->refusals, 1);
    return false;
}

bool account_contend(struct account *a, uint64_t n) { return contend(a, n, __atomic_load_n(&a->page->limit, __ATOMIC_ACQUIRE)); }

uint64_t account_room(struct account *a)
{
    reclaim(a, NULL);
    uint64_t ceiling = account_ceiling(a), amount = AMOUNT(count_read(&a->usage->bound));
    return amount < ceiling ? (ceiling - amount) / UNIT * UNIT : 0;
}

/* left_dead returns how many bytes of bound belong to slots whose owner is dead. It looks every few
 * milliseconds at most. */
static uint64_t left_dead(struct account *a)
{
    uint64_t n = high(a), sum = 0;
    int fd = -1;
    for (uint64_t i = 0; i < n; i++) {
        const struct slot *s = &a->usage->slots[i];
        uint64_t c = slot_committed(s);
        if (s == a->slot || !c || c >= MOST)
            continue;
        if (fd < 0) {
            uint64_t now = ticks(), last = __atomic_load_n(&a->looked, __ATOMIC_RELAXED);
            if (last && now - last < TICKS)
                return __atomic_load_n(&a->dead, __ATOMIC_RELAXED);
            __atomic_store_n(&a->looked, now, __ATOMIC_RELAXED);
        }
        if (slot_dead(a->path, i, &fd))
            sum += c;
    }
    if (fd >= 0)
        sys_close(fd);
    __atomic_store_n(&a->dead, sum, __ATOMIC_RELAXED);
    return sum;
}

uint64_t account_used(struct account *a)
{
    const struct limit_page *p = a->page;
    uint64_t limit = __atomic_load_n(&p->limit, __ATOMIC_ACQUIRE);
    if (limit == NO_LIMIT)
        return 0;
    int64_t used = 0;
    uint64_t dead = left_dead(a), bound = AMOUNT(count_read(&a->usage->bound)), idle = idle_in(a->usage->slots, high(a)) + account_borrowed(a);
    bound -= idle < bound ? idle : bound;
    bool read = false;
    if (__atomic_load_n(&p->nonce, __ATOMIC_ACQUIRE) == a->nonce) {
        int64_t shown = __atomic_load_n(&p->shown, __ATOMIC_ACQUIRE);
        uint64_t settled = __atomic_load_n(&p->shown_settled, __ATOMIC_ACQUIRE);
        uint64_t known = __atomic_load_n(&p->shown_dead, __ATOMIC_ACQUIRE);
        read = __atomic_load_n(&p->nonce, __ATOMIC_ACQUIRE) == a->nonce;
        used = shown_used(shown, settled, known, bound, count_read(&a->usage->settled), dead);
    }
    if (!read) /* there is no reading of this page */
        used = (int64_t)(bound - dead);
    if (used < 0)
        return 0;
    return (uint64_t)used < limit ? (uint64_t)used : limit;
}
