/* SPDX-License-Identifier: Apache-2.0 */

/* vain LIMIT USAGE: 6 of 8 GiB were lost, and the agent, which reads every 20 ms, is held up. A
 * process waits for a reading in vain, and gets 3 GiB by the limit alone. Then the agent ends a
 * reading that tells nothing, since something changed during it, and is held up again: 3 GiB more
 * must be had, as the 3 before. */
#include <stdio.h>
#include <unistd.h>

#include "count.h"

int main(int argc, char **argv)
{
    struct account a = {0};
    uint64_t gib = (uint64_t)1 << 30, every = 20, done = 1;
    if (argc != 3 || account_find(&a, argv[1]) || account_open(&a, argv[2]))
        return 9;
    int fd = open(argv[1], O_RDWR);
    uint64_t ceiling = 8 * gib;
#define PUT(field, value) (pwrite(fd, &(value), 8, offsetof(struct limit_page, field)) == 8)
    if (fd < 0 || !PUT(every_ms, every) || !PUT(ceiling, ceiling) || !PUT(nonce, a.nonce))
        return 9;
    account_force(&a, 6 * gib);
    account_lost(&a, 6 * gib);
    bool first = account_reserve(&a, 3 * gib);
    if (!PUT(begun, done) || !PUT(done, done))
        return 9;
    bool second = account_reserve(&a, 3 * gib);
    printf("%d %d\n", first, second);
}
