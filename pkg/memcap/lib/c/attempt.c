/* SPDX-License-Identifier: Apache-2.0 */

/* An attempt is a call of the driver without a reservation. It is made when the driver should find
 * what it needs in a pool that it has already. If the driver takes more all the same, the attempt
 * is undone. Until then the container has more than its cap. So of all processes that share a usage
 * page, only one makes an attempt at a time, and the excess is at most one request. A call with a
 * reservation never waits for an attempt.
 *
 * The page's word attempt holds whose turn it is: [turns:32 | 1 + slot:32]. The lower half is 0
 * while no process makes an attempt. If the slot's lock is free, the turn's owner is dead. The turn
 * of a dead owner ends once its memory is back, or when another process takes its slot. An owner
 * may live and never finish: a stopped process, or a number that a tenant wrote there. Others wait
 * for such an owner once. After that they make no attempts until the word changes. */
#include "pool.h"

/* How long to wait: TURN_US for the attempt of one other process, QUEUE_US for all that come first,
 * since on a busy machine many processes may queue. LOOK_US is how often to look whether the owner
 * lives. */
enum { TURN_US = 500 * 1000, QUEUE_US = 16 * TURN_US, LOOK_US = 4000 };

static uint64_t turn_of(const struct account *a, uint64_t word)
{
    return ((word >> 32) + 1) << 32 | (1 + (uint64_t)(a->slot - a->usage->slots));
}

/* gone reports whether the owner of a turn is dead. If it is, gone waits until its memory is
 * back. */
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
