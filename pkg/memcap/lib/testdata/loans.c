/* SPDX-License-Identifier: Apache-2.0 */

/* A process with two shares of a GPU is killed after each STRIDEth instruction of
 * allocations that it borrows for, and of their ends:
 *
 *     loans LIMIT_A USAGE_A LIMIT_B USAGE_B STRIDE
 *
 * A is its home, of 16 MiB, of which somebody else has 8, and B is of 8 MiB. After each
 * instruction both pages together have no more room than there is, and in the end all of
 * both can be had. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#include "count.h"

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
    raise(SIGSTOP);
    take(&other, 4 * MIB);
    take(&both, 3 * MIB);
    take(&both, 5 * MIB); /* borrows 4 */
    must(account_borrowed(&both) == 4 * MIB, "it borrowed another amount");
    must(!account_borrow(&both, 5 * MIB, false), "more than there is was had");
    take(&both, 4 * MIB);
    give(&both, 6 * MIB); /* repays as much */
    must(account_borrowed(&both) == 2 * MIB, "it repaid another amount");
    give(&other, 4 * MIB); /* there is room at home now */
    give(&both, 1 * MIB);
    must(account_borrowed(&both) == 0, "it has kept what it does not need");
    give(&both, 5 * MIB);

    take(&both, 10 * MIB); /* borrows 2 */
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

int main(int argc, char **argv)
{
    must(argc == 6, "arguments");
    int stride = atoi(argv[5]), steps = 0;
    given = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    must(given != MAP_FAILED, "mmap");
    opens(&home, argv + 1);
    opens(&lender, argv + 3);
    take(&home, 8 * MIB);
    *given = 0;
    for (int over = 0; !over; steps += stride) {
        int status;
        reads(&home, argv[1]);
        reads(&lender, argv[3]);
        pid_t pid = fork();
        if (pid == 0)
            borrower(argv + 1, argv + 3);
        must(waitpid(pid, &status, 0) == pid && WIFSTOPPED(status), "the tracee does not stop");
        for (int i = 0; i < steps && !over; i++) {
            ptrace(PTRACE_SINGLESTEP, pid, 0, 0);
            must(waitpid(pid, &status, 0) == pid, "wait");
            over = !WIFSTOPPED(status);
            check();
        }
        must(!over || (WIFEXITED(status) && WEXITSTATUS(status) == 0), "it failed");
        if (!over) {
            kill(pid, SIGKILL);
            waitpid(pid, &status, 0);
        }
        *given = 0;
        check();
        must(account_reserve(&home, 8 * MIB) && account_reserve(&lender, 8 * MIB), "not all can be had again");
        check();
        account_return(&home, 8 * MIB);
        account_return(&lender, 8 * MIB);
        must(AMOUNT(count_read(&home.usage->bound)) == 8 * MIB && AMOUNT(count_read(&lender.usage->bound)) == 0, "bound is not what the living have");
    }
    printf("steps %d\n", steps);
    return 0;
}
