/* SPDX-License-Identifier: Apache-2.0 */

/* The counter without CUDA: processes and threads that reserve, commit and free
 * against a driver that is one number for each process, and die at any moment.
 *
 *     hammer storm LIMIT_PAGE USAGE_PAGE PROCESSES THREADS KILLS SEED
 *     hammer step LIMIT_PAGE USAGE_PAGE life|idle|reclaim|reap|mixed|export STRIDE
 *     hammer layout
 *
 * storm kills at random times; step kills a process after each single
 * instruction (or each STRIDEth) of an allocation and its end, with room that is idle, of
 * taking what another has idle, of a reaping, or of letting go of exported memory. The dead
 * one that is reaped had an earlier library. A STRIDE of 0 is after each change, see step.h.
 * Both look on that bound is never below what the driver gave, and that
 * in the end it is just what the living have. */
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "count.h"
#include "step.h"

#define MIB ((uint64_t)1 << 20)
enum { CELLS = 256 };

/* A cell is what the driver has given to a worker. The parent says that it is
 * over before it kills: from then on nothing is asked of it. */
struct cell {
    uint64_t given, over;
    uint64_t gap[6];
};
static struct cell *cells;
static uint64_t *stop;

static void *shared(size_t size)
{
    void *p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
        abort();
    return p;
}

static void must(int ok, const char *what)
{
    if (ok)
        return;
    printf("FAILED: %s\n", what);
    fflush(stdout);
    _exit(1);
}

/* --- the driver ----------------------------------------------------------- */

static bool driver_take(struct cell *c, uint64_t n)
{
    count_add(&c->given, n);
    return true;
}
static void driver_give(struct cell *c, uint64_t n) { count_sub(&c->given, n); }

static bool take(struct account *a, struct cell *c, uint64_t n)
{
    if (!account_reserve(a, n))
        return false;
    driver_take(c, n);
    account_commit(a, n);
    return true;
}

static void give(struct account *a, struct cell *c, uint64_t n)
{
    account_uncommit(a, n);
    driver_give(c, n);
    account_cancel(a, n);
}

/* --- storm ---------------------------------------------------------------- */

static const char *limit_path, *usage_path;
static struct account worker_account;
static struct cell *worker_cell;

enum { HELD = 16 };
static uint64_t held[HELD]; /* by all threads of a worker: any of them frees it */

static void *work(void *arg)
{
    uint64_t dice = (uint64_t)(uintptr_t)arg;
    while (!count_read(stop)) {
        dice = dice * 6364136223846793005u + 1442695040888963407u;
        uint64_t *h = &held[(dice >> 60) % HELD], none = 0, n = __atomic_exchange_n(h, 0, __ATOMIC_SEQ_CST);
        if (n) {
            give(&worker_account, worker_cell, n);
            continue;
        }
        n = (1 + (dice >> 40 & 15)) * 2 * MIB;
        if (dice >> 50 & 1) {
            if (take(&worker_account, worker_cell, n) && !__atomic_compare_exchange_n(h, &none, n, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
                give(&worker_account, worker_cell, n);
        } else if (account_reserve_quickly(&worker_account, n)) {
            account_cancel(&worker_account, n); /* the driver refused */
        }
    }
    for (int i = 0; i < HELD; i++) {
        uint64_t n = __atomic_exchange_n(&held[i], 0, __ATOMIC_SEQ_CST);
        if (n)
            give(&worker_account, worker_cell, n);
    }
    return NULL;
}

static void worker(int cell, int threads, uint64_t seed)
{
    worker_cell = &cells[cell];
    must(account_find(&worker_account, limit_path) == 0, "find");
    must(account_open(&worker_account, usage_path) == 0, "open");
    /* A child must not keep the slot's lock, nor close it. */
    pid_t child = fork();
    if (child == 0) {
        for (int fd = 0; fd < 64; fd++)
            close(fd);
        for (int i = 0; i < 200 && !count_read(stop); i++)
            usleep(1000);
        _exit(0);
    }
    pthread_t t[64];
    for (int i = 0; i < threads; i++)
        pthread_create(&t[i], NULL, work, (void *)(uintptr_t)(seed * 77 + (uint64_t)i));
    work((void *)(uintptr_t)seed); /* the first thread, too */
    for (int i = 0; i < threads; i++)
        pthread_join(t[i], NULL);
    _exit(count_read(&worker_cell->given) ? 3 : 0);
}

static struct account watcher;

/* watch holds bound against the driver whenever nothing changed meanwhile. */
static uint64_t watch(uint64_t ceiling)
{
    uint64_t seen = 0, given = 0;
    uint64_t before = count_read(&watcher.usage->bound);
    for (int i = 0; i < CELLS; i++)
        if (!count_read(&cells[i].over)) {
            uint64_t g = count_read(&cells[i].given);
            if (!count_read(&cells[i].over))
                given += g;
        }
    /* Cells are read one after the other: together they are of one moment only if
     * nothing was reserved or given back meanwhile. */
    if (count_read(&watcher.usage->bound) == before) {
        must(given <= ceiling, "the driver gave more than the limit");
        must(given <= AMOUNT(before), "bound is less than the driver gave");
        seen = 1;
    }
    return seen;
}

static int storm(int processes, int threads, int kills, unsigned seed)
{
    pid_t pid[CELLS] = {0};
    uint64_t looked = 0;
    int status, next = 0, at[CELLS];
    srand(seed);
    must(account_find(&watcher, limit_path) == 0 && account_open(&watcher, usage_path) == 0, "open");
    uint64_t ceiling = account_ceiling(&watcher);
    for (int done = -processes; done < kills; done++) {
        int i = done < 0 ? done + processes : rand() % processes;
        if (done >= 0) {
            for (int k = rand() % 40; k >= 0; k--) {
                looked += watch(ceiling);
                usleep((useconds_t)(rand() % 100));
            }
            __atomic_store_n(&cells[at[i]].over, 1, __ATOMIC_SEQ_CST);
            kill(pid[i], SIGKILL);
            must(waitpid(pid[i], &status, 0) == pid[i] && WIFSIGNALED(status), "a worker ended by itself");
        }
        /* The cell of a dead one is used again much later. */
        at[i] = next++ % CELLS;
        cells[at[i]].given = 0;
        __atomic_store_n(&cells[at[i]].over, 0, __ATOMIC_SEQ_CST);
        pid[i] = fork();
        if (pid[i] == 0)
            worker(at[i], threads, (uint64_t)rand());
    }
    __atomic_store_n(stop, 1, __ATOMIC_SEQ_CST);
    for (int i = 0; i < processes; i++) {
        must(waitpid(pid[i], &status, 0) == pid[i], "wait");
        must(WIFEXITED(status) && WEXITSTATUS(status) == 0, "a worker failed");
    }
    /* All that there is must be had now, which reaps and repairs. */
    must(account_reserve(&watcher, ceiling), "not all can be had again");
    account_cancel(&watcher, ceiling);
    must(AMOUNT(count_read(&watcher.usage->bound)) == 0, "bound is not what the living have");
    printf("looked %llu\n", (unsigned long long)looked);
    return looked ? 0 : 1;
}

/* --- step ----------------------------------------------------------------- */

static void stepped(const char *what, struct cell *c)
{
    struct account a = {0};
    must(account_find(&a, limit_path) == 0 && account_open(&a, usage_path) == 0, "open");
    must(ptrace(PTRACE_TRACEME, 0, 0, 0) == 0, "it may not be traced and does not stop");
    mark();
    if (!strcmp(what, "idle")) { /* there is room for all of that */
        take(&a, c, 2 * MIB);
        mark();
        take(&a, c, 1 * MIB);
        mark();
        give(&a, c, 1 * MIB);
        mark();
        give(&a, c, 2 * MIB);
        mark();
        take(&a, c, 3 * MIB);
        mark();
        give(&a, c, 3 * MIB);
    } else if (!strcmp(what, "life")) {
        take(&a, c, 6 * MIB);
        mark();
        account_reserve(&a, 2 * MIB);
        account_cancel(&a, 2 * MIB);
        mark();
        give(&a, c, 6 * MIB);
        mark();
        take(&a, c, 4 * MIB);
        mark();
        give(&a, c, 4 * MIB);
    } else if (!strcmp(what, "export")) { /* let go of, and gone: the ceiling says so */
        take(&a, c, 6 * MIB);
        mark();
        take(&a, c, 2 * MIB);
        mark();
        driver_give(c, 6 * MIB);
        account_exported(&a, 6 * MIB);
        mark();
        account_exported(&a, 2 * MIB);
    } else if (!strcmp(what, "reclaim")) { /* more than fits beside what another has idle */
        must(account_reserve_quickly(&a, 6 * MIB), "what is idle is not to be had");
        driver_take(c, 6 * MIB);
        account_commit(&a, 6 * MIB);
    } else { /* more than fits, while a dead one has half of it */
        if (account_reserve_slowly(&a, 6 * MIB))
            account_cancel(&a, 6 * MIB);
    }
    _exit(0);
}

/* dead leaves a slot behind in the middle of things. If mixed, it is one of an earlier library,
 * and of the two words of what it has one is below zero; the other one if reversed. */
static void dead(struct cell *c, bool mixed, bool reversed)
{
    pid_t pid = fork();
    if (pid == 0) {
        struct account a = {0};
        must(account_find(&a, limit_path) == 0 && account_open(&a, usage_path) == 0, "open");
        must(take(&a, c, 2 * MIB) && take(&a, c, 2 * MIB), "take");
        if (mixed) {
            give(&a, c, 2 * MIB);
            uint64_t n = reversed ? 0 - 6 * MIB : 6 * MIB;
            count_add(&a.slot->committed, n);
            count_sub(&a.slot->others_committed, n);
            count_add(&a.slot->reserved, n);
            count_sub(&a.slot->others_reserved, n);
        }
        account_reserve(&a, 2 * MIB);
        kill(getpid(), SIGKILL);
    }
    waitpid(pid, NULL, 0);
    c->given = 0;
}

/* shows makes the limit page say that the driver has so much less than is bound. */
static void shows(uint64_t gone)
{
    static const uint64_t none;
    uint64_t ceiling = watcher.page->limit + gone, settled = watcher.usage->settled;
    int fd = open(limit_path, O_RDWR);
#define PUT(field, value) pwrite(fd, &(value), 8, offsetof(struct limit_page, field)) == 8
    must(fd >= 0 && PUT(nonce, none) && PUT(ceiling, ceiling) && PUT(settled, settled) && PUT(nonce, watcher.nonce), "write the limit page");
    close(fd);
}

/* changed is for what a process that dies leaves: the usage page, and what the driver gave. */
static bool changed(void)
{
    static struct {
        struct cell cell;
        struct usage_page head;
        struct slot slots[64];
    } was;
    size_t slots = watcher.usage->high, page = sizeof was.head + slots * sizeof *was.slots;
    must(slots <= sizeof was.slots / sizeof *was.slots, "there are more slots than are looked at");
    if (!memcmp(&was.head, watcher.usage, page) && !memcmp(&was.cell, cells, sizeof was.cell))
        return false;
    memcpy(&was.head, watcher.usage, page);
    was.cell = *cells;
    return true;
}

static void check(void) { must(AMOUNT(count_read(&watcher.usage->bound)) >= count_read(&cells->given) + 8 * MIB, "bound is less than the driver gave"); }

/* kills has a process die at each of its points, and returns how many these were. */
static int kills(const char *what, int stride, bool reversed)
{
    struct cell *c = &cells[0], *other = &cells[1];
    bool lends = !strcmp(what, "reclaim");
    struct account lender = {0};
    must(!lends || (account_find(&lender, limit_path) == 0 && account_open(&lender, usage_path) == 0), "open");
    struct point at = {0};
    while (!at.over) {
        int status;
        if (!strcmp(what, "reap") || !strcmp(what, "mixed"))
            dead(other, !strcmp(what, "mixed"), reversed);
        if (!strcmp(what, "export"))
            shows(6 * MIB);
        if (lends) {
            uint64_t given;
            must(account_rests(&watcher, true, &given), "a dead one has something under way");
            must(account_reserve(&lender, 6 * MIB), "reserve");
            lender.keeps = IDLE_MOST;
            account_cancel(&lender, 6 * MIB);
            must(AMOUNT(lender.slot->idle) == 6 * MIB, "nothing is idle");
        }
        c->given = 0;
        pid_t pid = fork();
        if (pid == 0)
            stepped(what, c);
        must(stop_at(pid, &at, stride, changed, check, &status), "the tracee does not stop");
        must(!at.over || (WIFEXITED(status) && WEXITSTATUS(status) == 0), "the tracee failed");
        c->given = 0;
        if (!strcmp(what, "export"))
            shows(0);
        must(AMOUNT(count_read(&watcher.usage->bound)) >= 8 * MIB, "what the living have is gone");
        uint64_t rest = account_ceiling(&watcher) - 8 * MIB;
        must(account_reserve(&watcher, rest), "not all can be had again");
        account_cancel(&watcher, rest);
        must(AMOUNT(count_read(&watcher.usage->bound)) == 8 * MIB, "bound is not what the living have");
    }
    return at.points;
}

static int step(const char *what, int stride)
{
    must(account_find(&watcher, limit_path) == 0 && account_open(&watcher, usage_path) == 0, "open");
    must(take(&watcher, &cells[2], 8 * MIB), "take");
    int n = kills(what, stride, false);
    if (!strcmp(what, "mixed"))
        n += kills(what, stride, true);
    printf("points %d\n", n);
    return 0;
}

/* --- layout --------------------------------------------------------------- */

static int layout(void)
{
#define SAY(type, field) printf("%s.%s %zu\n", #type, #field, offsetof(struct type, field))
    SAY(limit_page, limit), SAY(limit_page, context), SAY(limit_page, every_ms), SAY(limit_page, uuid);
    SAY(limit_page, usage), SAY(limit_page, since), SAY(limit_page, code), SAY(limit_page, sure), SAY(limit_page, nonce);
    SAY(limit_page, ceiling), SAY(limit_page, stamp), SAY(limit_page, begun), SAY(limit_page, done), SAY(limit_page, settled);
    SAY(limit_page, shown), SAY(limit_page, shown_settled), SAY(limit_page, shown_dead), SAY(limit_page, roof), SAY(limit_page, roof_stamp), SAY(limit_page, held), SAY(limit_page, surely), SAY(limit_page, bare), SAY(limit_page, percent), SAY(limit_page, control);
    SAY(usage_page, nonce), SAY(usage_page, bound), SAY(usage_page, asks), SAY(usage_page, refusals), SAY(usage_page, peak);
    SAY(usage_page, high), SAY(usage_page, settled), SAY(usage_page, undone), SAY(usage_page, uncounted), SAY(usage_page, guesses), SAY(usage_page, attempt), SAY(usage_page, borrows);
    SAY(usage_page, unmeasured), SAY(usage_page, unread), SAY(usage_page, waits), SAY(usage_page, slots);
    SAY(slot, reserved), SAY(slot, committed), SAY(slot, managed), SAY(slot, expected), SAY(slot, contexts), SAY(slot, pid), SAY(slot, pids), SAY(slot, others_reserved), SAY(slot, others_committed),
        SAY(slot, promised), SAY(slot, exported), SAY(slot, idle), SAY(slot, borrowed), SAY(slot, lends), SAY(slot, sms), SAY(slot, starting);
    printf("size.limit_page %d\nsize.usage_page %d\nsize.slot %zu\n", PAGE, USAGE_SIZE, sizeof(struct slot));
    printf("slots %d\nunit %llu\namount_bits %d\nmost %llu\n", SLOTS, (unsigned long long)UNIT, AMOUNT_BITS, (unsigned long long)MOST);
    printf("yield %llu\nhold %llu\n", (unsigned long long)CONTROL_YIELD, (unsigned long long)CONTROL_HOLD);
    printf("magic %s %s\n", LIMIT_MAGIC, USAGE_MAGIC);
    return 0;
}

int main(int argc, char **argv)
{
    cells = shared(sizeof *cells * CELLS);
    stop = shared(sizeof *stop);
    if (argc == 2 && !strcmp(argv[1], "layout"))
        return layout();
    must(argc > 5, "arguments");
    limit_path = argv[2];
    usage_path = argv[3];
    if (!strcmp(argv[1], "step"))
        return step(argv[4], atoi(argv[5]));
    must(argc == 8, "arguments");
    return storm(atoi(argv[4]), atoi(argv[5]), atoi(argv[6]), (unsigned)atoi(argv[7]));
}
