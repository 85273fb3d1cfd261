/* SPDX-License-Identifier: Apache-2.0 */

/* A process with two shares of a GPU is killed after each STRIDEth instruction of
 * allocations that it borrows for, and of their ends; a STRIDE of 0 is after each change, see
 * step.h:
 *
 *     loans LIMIT_A USAGE_A LIMIT_B USAGE_B STRIDE
 *
 * A is its home, of 16 MiB, of which somebody else has 8, and B is of 8 MiB. After each
 * instruction both pages together have no more room than there is, and in the end all of
 * both can be had. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "count.h"
#include "step.h"

#define MIB ((uint64_t)1 << 20)

static uint64_t *given; /* by the driver, to the process that is killed */
static struct account home, lender; /* of those who have one share alone */

static void must(int ok, const char *what)
{
    if (ok)
        return;
    printf("FAILED: %s\n", what);
    fflush(stdout);
    _exit(1);
}

static void take(struct account *a, uint64_t n)
{
    must(account_reserve(a, n), "what fits is refused");
    count_add(given, n);
    account_commit(a, n);
}

static void give(struct account *a, uint64_t n)
{
    account_uncommit(a, n);
    count_sub(given, n);
    account_cancel(a, n);
}

static void opens(struct account *a, char **page)
{
    must(account_find(a, page[0]) == 0 && account_open(a, page[1]) == 0, "open");
}

static uint64_t room(const struct account *a)
{
    uint64_t ceiling = account_ceiling(a), amount = AMOUNT(count_read(&a->usage->bound));
    return amount < ceiling ? ceiling - amount : 0;
}

static void borrower(char **a, char **b)
{
    struct account both = {0}, other = {0};
    opens(&both, a);
    opens(&other, a);
    both.others = account_other(b[0], b[1]);
    both.keeps_far = 0;
    must(both.others != NULL, "open the other page");
    must(ptrace(PTRACE_TRACEME, 0, 0, 0) == 0, "it may not be traced and does not stop");
    mark();
    take(&other, 4 * MIB);
    take(&both, 3 * MIB);
    mark();
    take(&both, 5 * MIB); /* borrows 4 */
    must(account_borrowed(&both) == 4 * MIB, "it borrowed another amount");
    mark();
    must(!account_borrow(&both, 5 * MIB, false), "more than there is was had");
    mark();
    take(&both, 4 * MIB);
    mark();
    give(&both, 6 * MIB); /* repays as much */
    must(account_borrowed(&both) == 2 * MIB, "it repaid another amount");
    mark();
    give(&other, 4 * MIB); /* there is room at home now */
    mark();
    give(&both, 1 * MIB);
    must(account_borrowed(&both) == 0, "it has kept what it does not need");
    mark();
    give(&both, 5 * MIB);
    mark();
    take(&both, 10 * MIB); /* borrows 2 */
    mark();
    count_sub(given, 4 * MIB);
    account_lost(&both, 4 * MIB); /* no room before a reading */
    must(room(&both) == 0 && room(both.others) == 6 * MIB, "what is lost is room");
    _exit(0);
}

/* reads makes a limit page say what the agent would after a reading. */
static void reads(const struct account *a, const char *path)
{
    uint64_t limit = a->page->limit, settled = a->usage->settled;
    int fd = open(path, O_RDWR);
#define PUT(field, value) pwrite(fd, &(value), 8, offsetof(struct limit_page, field)) == 8
    must(fd >= 0 && PUT(ceiling, limit) && PUT(settled, settled) && PUT(nonce, a->nonce), "write the limit page");
    close(fd);
}

static void check(void)
{
    uint64_t has = 8 * MIB + count_read(given);
    must(AMOUNT(count_read(&home.usage->bound)) >= has, "bound is less than the driver gave");
    must(has + room(&home) + room(&lender) <= 24 * MIB, "there is more room than memory");
}

/* changed is for what a process that dies leaves: both usage pages, and what the driver gave. */
static bool changed(void)
{
    static struct {
        struct usage_page head;
        struct slot slots[64];
    } was[2];
    static uint64_t gave;
    bool is = gave != *given;
    gave = *given;
    for (int i = 0; i < 2; i++) {
        const struct usage_page *usage = (i ? &lender : &home)->usage;
        must(usage->high <= sizeof was->slots / sizeof *was->slots, "there are more slots than are looked at");
        size_t size = sizeof was->head + usage->high * sizeof *was->slots;
        if (memcmp(&was[i], usage, size)) {
            memcpy(&was[i], usage, size);
            is = true;
        }
    }
    return is;
}

int main(int argc, char **argv)
{
    must(argc == 6, "arguments");
    int stride = atoi(argv[5]);
    given = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    must(given != MAP_FAILED, "mmap");
    opens(&home, argv + 1);
    opens(&lender, argv + 3);
    take(&home, 8 * MIB);
    *given = 0;
    struct point at = {0};
    while (!at.over) {
        int status;
        uint64_t has;
        must(account_rests(&home, true, &has) && account_rests(&lender, true, &has), "a dead one has something under way");
        reads(&home, argv[1]);
        reads(&lender, argv[3]);
        pid_t pid = fork();
        if (pid == 0)
            borrower(argv + 1, argv + 3);
        must(stop_at(pid, &at, stride, changed, check, &status), "the tracee does not stop");
        must(!at.over || (WIFEXITED(status) && WEXITSTATUS(status) == 0), "it failed");
        *given = 0;
        check();
        must(account_reserve(&home, 8 * MIB) && account_reserve(&lender, 8 * MIB), "not all can be had again");
        check();
        account_return(&home, 8 * MIB);
        account_return(&lender, 8 * MIB);
        must(AMOUNT(count_read(&home.usage->bound)) == 8 * MIB && AMOUNT(count_read(&lender.usage->bound)) == 0, "bound is not what the living have");
    }
    printf("points %d\n", at.points);
    return 0;
}
