/* SPDX-License-Identifier: Apache-2.0 */

/* What a process keeps idle:
 *
 *     idle LIMIT_PAGE USAGE_PAGE
 *
 * The limit is 512 MiB. Two accounts stand for two processes. */
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "count.h"

#define MIB ((uint64_t)1 << 20)

static struct account a, b;

static void must(bool ok, const char *what)
{
    if (ok)
        return;
    printf("FAILED: %s: %llu MiB bound, %llu and %llu idle\n", what, (unsigned long long)(AMOUNT(a.usage->bound) / MIB),
           (unsigned long long)(AMOUNT(a.slot->idle) / MIB), (unsigned long long)(AMOUNT(b.slot->idle) / MIB));
    exit(1);
}

static void set_limit(const char *path, uint64_t bytes)
{
    FILE *f = fopen(path, "r+");
    must(f && !fseek(f, offsetof(struct limit_page, limit), SEEK_SET) && fwrite(&bytes, 8, 1, f) == 1 &&
             !fseek(f, offsetof(struct limit_page, ceiling), SEEK_SET) && fwrite(&bytes, 8, 1, f) == 1 && !fclose(f),
         "the limit page cannot be written");
}

static void pair(uint64_t n)
{
    must(account_reserve(&a, n), "it is refused");
    account_commit(&a, n);
    account_uncommit(&a, n);
    account_cancel(&a, n);
}

int main(int argc, char **argv)
{
    must(argc == 3 && account_find(&a, argv[1]) == 0 && account_open(&a, argv[2]) == 0 && account_find(&b, argv[1]) == 0 && account_open(&b, argv[2]) == 0, "open");
    pair(32 * MIB);
    uint64_t word = a.usage->bound;
    for (int i = 0; i < 1000; i++)
        pair(i % 2 ? 32 * MIB : 2 * MIB);
    must(a.usage->bound == word, "the word that all processes share was changed");
    must(account_used(&a) == 0 && account_used(&b) == 0, "what is idle counts as used");
    pair(IDLE_MOST);
    must(AMOUNT(a.usage->bound) <= IDLE_MOST, "more is kept than may be");

    /* All of the limit is to be had, at once, whoever keeps what of it. */
    must(AMOUNT(a.slot->idle) != 0 && account_reserve_quickly(&b, 512 * MIB), "what another keeps idle is not to be had");
    must(AMOUNT(a.usage->bound) == 512 * MIB, "the limit is not what is bound");
    must(!account_reserve_quickly(&a, UNIT), "there is more than the limit");
    account_cancel(&b, 512 * MIB);
    must(AMOUNT(a.usage->bound) == 0, "near the limit something is kept");

    /* A limit that falls counts for what is idle as well. */
    must(account_reserve(&b, 128 * MIB), "it is refused");
    pair(32 * MIB);
    must(AMOUNT(a.slot->idle) == 32 * MIB, "nothing is idle");
    set_limit(argv[1], 144 * MIB);
    must(!account_reserve_quickly(&a, 32 * MIB), "what is idle passes the limit");
    must(account_reserve_quickly(&a, 16 * MIB), "what is left of the limit is not to be had");
    puts("all is well");
    return 0;
}
