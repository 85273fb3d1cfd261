/* SPDX-License-Identifier: Apache-2.0 */

/* half LIMIT USAGE CEILING: the agent is in the middle of writing a page with a
 * cap of 8 GiB, after 1 GiB was lost. It prints how many GiB a process gets. */
#include "count.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

int main(int argc, char **argv)
{
    struct account a = {0};
    uint64_t gib = (uint64_t)1 << 30, nonce = WRITING;
    if (argc != 4 || account_find(&a, argv[1]) || account_open(&a, argv[2]))
        return 9;
    int fd = open(argv[1], O_RDWR);
    uint64_t ceiling = strtoull(argv[3], NULL, 10) * gib;
    if (pwrite(fd, &ceiling, 8, offsetof(struct limit_page, ceiling)) != 8 ||
        pwrite(fd, &nonce, 8, offsetof(struct limit_page, nonce)) != 8)
        return 9;
    account_force(&a, gib);
    account_lost(&a, gib);
    int got = 0;
    while (got < 100 && account_reserve_quickly(&a, gib))
        got++;
    printf("%d GiB\n", got);
}
