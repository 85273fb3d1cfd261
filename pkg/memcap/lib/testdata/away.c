/* SPDX-License-Identifier: Apache-2.0 */

/* away LIMIT USAGE: the agent has read once and is away. Processes of 3 GiB come
 * and go, one at a time, under a cap of 8 GiB; then one takes all it gets. It
 * prints how many of five had theirs, and how many GiB the last one has. */
#include "count.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

static void life(char **argv, int n)
{
    struct account a = {0};
    if (account_find(&a, argv[1]) || account_open(&a, argv[2]))
        _exit(9);
    if (n == 0) { /* the one reading, of this usage page */
        int fd = open(argv[1], O_RDWR);
        uint64_t ceiling = (uint64_t)8 << 30;
        if (pwrite(fd, &ceiling, 8, offsetof(struct limit_page, ceiling)) != 8 ||
            pwrite(fd, &a.nonce, 8, offsetof(struct limit_page, nonce)) != 8)
            _exit(9);
    }
    int got = 0;
    for (int i = 0; i < (n < 5 ? 3 : 100) && account_reserve(&a, (uint64_t)1 << 30); i++, got++)
        account_commit(&a, (uint64_t)1 << 30);
    if (n < 5 && got == 3)
        kill(getpid(), SIGKILL);
    _exit(got);
}

int main(int argc, char **argv)
{
    int served = 0, status;
    for (int n = 0; argc == 3 && n <= 5; n++) {
        pid_t child = fork();
        if (child == 0)
            life(argv, n);
        waitpid(child, &status, 0);
        served += n < 5 && WIFSIGNALED(status);
    }
    printf("%d of 5, then %d GiB\n", served, WIFEXITED(status) ? WEXITSTATUS(status) : -1);
}
