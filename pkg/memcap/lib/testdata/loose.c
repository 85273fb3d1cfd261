/* SPDX-License-Identifier: Apache-2.0 */

/* A pool from which several calls may take at once:
 *
 *     loose LIMIT_PAGE USAGE_PAGE
 *
 * The limit is 512 MiB. What is committed is what no call may free, whatever begins and
 * ends in which order. */
#include <stdio.h>
#include <stdlib.h>

#include "export.h"
#include "pool.h"

#define MIB ((uint64_t)1 << 20)

static struct account a;
static struct reserve r;

static void must(bool ok, const char *what, int step)
{
    if (ok)
        return;
    printf("FAILED at step %d: %s: %llu MiB charged, %llu of them loose for %u calls, %llu committed, %llu reserved\n", step, what, (unsigned long long)(r.charge / MIB),
           (unsigned long long)(r.uncommitted / MIB), (unsigned)r.freeing, (unsigned long long)(a.slot->committed / MIB), (unsigned long long)(a.slot->reserved / MIB));
    exit(1);
}

int main(int argc, char **argv)
{
    uint64_t dice = 1;
    must(argc == 3 && account_find(&a, argv[1]) == 0 && account_open(&a, argv[2]) == 0, "open", 0);
    for (int step = 1; step <= 10000; step++) {
        dice = dice * 6364136223846793005u + 1442695040888963407u;
        uint64_t n = (dice >> 40) % 64 * 2 * MIB;
        switch (dice >> 33 & 3) {
        case 0:
            uncommit_free(&a, &r, n);
            break;
        case 1:
            if (r.freeing)
                recommit(&a, &r);
            break;
        case 2: /* it grows */
            must(account_reserve(&a, n), "it is refused", step);
            must(settle(&a, &r, r.charge + n > 256 * MIB ? r.charge : r.charge + n, n) == 0, "it does not pay", step);
            break;
        default: /* it shrinks */
            settle(&a, &r, r.charge - (n < r.charge ? n : r.charge), 0);
        }
        must(r.uncommitted <= r.charge && (r.freeing || !r.uncommitted), "more is loose than there is", step);
        must(a.slot->committed == r.charge - r.uncommitted, "committed is not what is fast", step);
    }
    printf("ok\n");
    return 0;
}
