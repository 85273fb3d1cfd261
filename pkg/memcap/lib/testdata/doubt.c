/* SPDX-License-Identifier: Apache-2.0 */

/* doubt LIMIT USAGE: under a cap of 8 GiB a process has 5 GiB. At a line of its input
 * it loses 1 GiB, reserves 1 GiB that the driver has not given yet, and another process
 * asks for 2.5 GiB; at the next line the driver has given it. It says each of these, and
 * whether the other one had its memory. */
#include "count.h"

#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

#define GIB ((uint64_t)1 << 30)

static void told(void)
{
    char c;
    do
        if (read(STDIN_FILENO, &c, 1) != 1)
            _exit(9);
    while (c != '\n');
}

int main(int argc, char **argv)
{
    struct account a = {0};
    int status;
    setvbuf(stdout, NULL, _IONBF, 0);
    if (argc != 3 || account_find(&a, argv[1]) || account_open(&a, argv[2]))
        return 9;
    account_force(&a, 5 * GIB);
    puts("has 5 GiB");
    told();
    account_lost(&a, GIB);
    if (!account_reserve_quickly(&a, GIB))
        return 9;
    puts("asks for 2.5 GiB");
    pid_t child = fork();
    if (child == 0) {
        struct account b = {0};
        alarm(60);
        if (account_find(&b, argv[1]) || account_open(&b, argv[2]))
            _exit(9);
        puts(account_reserve(&b, 5 * GIB / 2) ? "had them" : "was refused");
        _exit(0);
    }
    told();
    account_commit(&a, GIB);
    puts("has 5 GiB");
    waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 9;
}
