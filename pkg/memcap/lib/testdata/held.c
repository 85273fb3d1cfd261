/* SPDX-License-Identifier: Apache-2.0 */

/* held LIMIT USAGE reading|other: under a cap of 8 GiB a process waits for 6 GiB, for
 * the agent's next reading, which makes room for them, or for another process, which
 * takes back what it had only reserved. All are held up for longer than it would
 * wait, and it goes on before the one that it waits for. It prints whether it had
 * them. */
#include "count.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define GIB ((uint64_t)1 << 30)

static void put(int fd, size_t at, uint64_t v)
{
    if (pwrite(fd, &v, 8, (off_t)at) != 8)
        _exit(9);
}
#define PUT(field, v) put(page, offsetof(struct limit_page, field), v)

int main(int argc, char **argv)
{
    struct account a = {0};
    int page, ready[2];
    if (argc != 4 || account_find(&a, argv[1]) || account_open(&a, argv[2]) || (page = open(argv[1], O_RDWR)) < 0 || pipe(ready))
        return 9;
    bool reading = !strcmp(argv[3], "reading");
    if (reading) {
        PUT(every_ms, 100);
        PUT(ceiling, 4 * GIB);
        PUT(nonce, a.nonce);
    } else if (!account_reserve(&a, 8 * GIB)) {
        return 9;
    }
    pid_t child = fork();
    if (child == 0) {
        struct account b = {0};
        alarm(60);
        if (account_find(&b, argv[1]) || account_open(&b, argv[2]) || write(ready[1], "", 1) != 1)
            _exit(9);
        _exit(account_reserve(&b, 6 * GIB) ? 0 : 1);
    }
    char c;
    int status;
    if (read(ready[0], &c, 1) != 1)
        return 9;
    while (reading && !count_read(&a.usage->asks))
        usleep(1000);
    usleep(10000);
    kill(child, SIGSTOP);
    sleep(1);
    kill(child, SIGCONT);
    usleep(5000);
    if (reading) {
        PUT(begun, 1);
        PUT(ceiling, 8 * GIB);
        PUT(done, 1);
    } else {
        account_cancel(&a, 8 * GIB);
    }
    waitpid(child, &status, 0);
    puts(WIFEXITED(status) && WEXITSTATUS(status) == 0 ? "had them" : "was refused");
}
