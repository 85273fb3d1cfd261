/* SPDX-License-Identifier: Apache-2.0 */

/* An attempt is a call of the driver without a reservation, made where the driver should
 * find what it needs in a pool that it has already. If the driver takes more all the same,
 * that is undone. Until then the container has more than its cap. So of all processes
 * that share a usage page only one makes an attempt at a time, and the excess is at most
 * one request. A call with a reservation never waits for an attempt.
 *
 * The page says whose turn it is: [turns:32 | 1 + slot:32], with 0 in the lower half where
 * nobody makes an attempt. The slot's lock tells whether its owner lives. The turn of a
 * dead owner ends once its memory is back, or when another process takes its slot. An owner
 * that lives and does not finish (a stopped process, or something that a tenant wrote there)
 * is waited for once; after that no attempts are made until the word changes. */
#include "pool.h"

/* How long to wait for one attempt of another's, and for all that come first: a busy machine may
 * keep a queue of many processes waiting. And how often to look whether the owner lives. */
enum { TURN_US = 500 * 1000, QUEUE_US = 16 * TURN_US, LOOK_US = 4000 };

static uint64_t turn_of(const struct account *a, uint64_t word)
{
    return ((word >> 32) + 1) << 32 | (1 + (uint64_t)(a->slot - a->usage->slots));
}

/* gone says whether the owner of a turn is dead. It waits until its memory is back. */
static bool gone(struct account *a, uint64_t word)
{
    uint64_t index = (uint32_t)word - 1;
    if (index >= SLOTS)
        return true;
    int fd = -1;
    bool dead = slot_dead(a->path, index, &fd), waited = false;
    if (fd >= 0)
        sys_close(fd);
    if (dead)
        account_await_death(&a->usage->slots[index], &waited);
    return dead;
}

bool attempt_begin(struct account *a)
{
    uint64_t *at = &a->usage->attempt, word = 0, last = 0, since = 0, looks = LOOK_US;
    for (struct wait w = {0}; w.napped - since < TURN_US && w.napped < QUEUE_US;) {
        word = count_read(at);
        if (word != last) {
            last = word;
            since = w.napped;
            looks = since + LOOK_US;
        }
        bool over = !(uint32_t)word || (w.napped >= looks && gone(a, word));
        if (w.napped >= looks)
            looks = w.napped + LOOK_US;
        if (over && __atomic_compare_exchange_n(at, &word, turn_of(a, word), false, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
            return true;
        if (over)
            continue;
        if (word == __atomic_load_n(&a->stuck, __ATOMIC_RELAXED))
            return false;
        wait_more(&w);
    }
    __atomic_store_n(&a->stuck, word, __ATOMIC_RELAXED);
    return false;
}

void attempt_end(struct account *a)
{
    uint64_t *at = &a->usage->attempt, word = count_read(at);
    if ((uint32_t)word == (uint32_t)turn_of(a, 0))
        __atomic_compare_exchange_n(at, &word, word >> 32 << 32, false, __ATOMIC_RELEASE, __ATOMIC_RELAXED);
}
