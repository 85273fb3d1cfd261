/* SPDX-License-Identifier: Apache-2.0 */

/* news LIMIT USAGE TIMES first|later: under a cap of 8 GiB, of which the last reading left
 * 4 for want of knowing better, a thread wants 6 GiB. At any moment of its way to the
 * answer a reading comes that is exact, and leaves all 8. later: it comes when the thread
 * has waited for as long as it does where nothing moves, and another reading has told
 * nothing. It must never be refused. */
#include "count.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define GIB ((uint64_t)1 << 30)

enum { STILL_US = 350 * 1000 };

static struct account a;
static struct limit_page *page; /* as the agent has it */
static uint64_t turn, over, refused;

#define PUT(field, v) __atomic_store_n(&page->field, v, __ATOMIC_SEQ_CST)

static void publish(uint64_t ceiling, bool exact)
{
    PUT(nonce, WRITING);
    PUT(ceiling, ceiling);
    PUT(stamp, exact ? count_read(&a.usage->guesses) + 1 : 0);
    PUT(nonce, a.nonce);
}

/* answer finishes a reading if one was asked for since the last. */
static void answer(void)
{
    static uint64_t asks;
    uint64_t now = count_read(&a.usage->asks);
    if (now == asks)
        return;
    asks = now;
    PUT(begun, page->begun + 1);
    PUT(done, page->begun);
}

static void *want(void *arg)
{
    for (uint64_t i = 1; i <= (uint64_t)(uintptr_t)arg; i++) {
        while (count_read(&turn) < i)
            cpu_relax();
        if (account_reserve_slowly(&a, 6 * GIB))
            account_return(&a, 6 * GIB);
        else
            refused++;
        __atomic_store_n(&over, i, __ATOMIC_SEQ_CST);
    }
    return NULL;
}

int main(int argc, char **argv)
{
    pthread_t t;
    if (argc != 5 || account_find(&a, argv[1]) || account_open(&a, argv[2]))
        return 9;
    page = sys_map(PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, open(argv[1], O_RDWR));
    if (!page)
        return 9;
    uint64_t times = (uint64_t)atoi(argv[3]);
    bool later = !strcmp(argv[4], "later");
    PUT(every_ms, 5000);
    pthread_create(&t, NULL, want, (void *)(uintptr_t)times);
    srand(1);
    for (uint64_t i = 1; i <= times; i++) {
        publish(4 * GIB, false);
        uint64_t asks = count_read(&a.usage->asks);
        __atomic_store_n(&turn, i, __ATOMIC_SEQ_CST);
        if (later) {
            while (count_read(&a.usage->asks) == asks)
                usleep(1000);
            usleep(STILL_US);
            answer();
        }
        for (int k = rand() % 300; k > 0; k--)
            cpu_relax();
        publish(8 * GIB, true);
        while (count_read(&over) < i) {
            usleep(100);
            answer();
        }
    }
    pthread_join(t, NULL);
    printf("refused %llu times\n", (unsigned long long)refused);
}
