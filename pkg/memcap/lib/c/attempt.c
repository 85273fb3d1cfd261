/* SPDX-License-Identifier: Apache-2.0 */

#include "attempt.h"

/* Attempts take microseconds, unless a thread is held up in one. Patience is counted in
 * naps, not by the clock: where this thread is held up, so is that one. */
enum { SPINS = 200, NAP_US = 50, NAPS = 10 * 1000, LOOK = 64 };

static uint64_t turn_of(const struct account *a, uint64_t word)
{
    return ((word >> 32) + 1) << 32 | (1 + (uint64_t)(a->slot - a->usage->slots));
}

/* gone says whether a turn's owner is no more, and its memory is back. */
static bool gone(struct account *a, uint64_t word)
{
    uint64_t index = (uint32_t)word - 1;
    if (index >= SLOTS)
        return true;
    int fd = sys_open(a->path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY, 0);
    bool dead = fd >= 0 && slot_free(fd, index);
    if (fd >= 0)
        sys_close(fd);
    if (dead)
        account_await_death(&a->usage->slots[index]);
    return dead;
}

bool attempt_begin(struct account *a)
{
    uint64_t *at = &a->usage->attempt, word = 0;
    for (uint32_t i = 0; i < SPINS + NAPS; i++) {
        word = count_read(at);
        bool over = !(uint32_t)word || (i >= SPINS && (i - SPINS) % LOOK == LOOK - 1 && gone(a, word));
        if (over && __atomic_compare_exchange_n(at, &word, turn_of(a, word), false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
            return true;
        if (over)
            continue;
        if (word == __atomic_load_n(&a->stuck, __ATOMIC_RELAXED))
            return false;
        if (i < SPINS)
            cpu_relax();
        else
            nap_us(NAP_US);
    }
    __atomic_store_n(&a->stuck, word, __ATOMIC_RELAXED);
    return false;
}

void attempt_end(struct account *a)
{
    uint64_t *at = &a->usage->attempt, word = count_read(at);
    if ((uint32_t)word == (uint32_t)turn_of(a, 0))
        __atomic_compare_exchange_n(at, &word, word >> 32 << 32, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}
