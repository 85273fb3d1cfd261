/* SPDX-License-Identifier: Apache-2.0 */

/* naps LIMIT USAGE: a process wants more than there is, and waits for a reading that
 * never comes. It prints how often it woke up meanwhile. */
#include <stdio.h>
#include <sys/resource.h>
#include <unistd.h>

#include "count.h"

int main(int argc, char **argv)
{
    struct account a = {0};
    struct rusage before, after;
    uint64_t gib = (uint64_t)1 << 30, every = 250;
    if (argc != 3 || account_find(&a, argv[1]) || account_open(&a, argv[2]))
        return 9;
    int fd = open(argv[1], O_RDWR);
    if (pwrite(fd, &every, 8, offsetof(struct limit_page, every_ms)) != 8)
        return 9;
    account_force(&a, a.page->limit);
    account_guessed(&a);
    getrusage(RUSAGE_SELF, &before);
    uint64_t began = now_us();
    if (account_reserve_slowly(&a, gib))
        return 8;
    getrusage(RUSAGE_SELF, &after);
    if (now_us() - began < 400000)
        return 7; /* it has not waited */
    printf("%ld\n", after.ru_nvcsw - before.ru_nvcsw);
}
