/* SPDX-License-Identifier: Apache-2.0 */

/* The table of what a process holds.
 *
 *     table ROUNDS
 *
 * In each round threads begin with a new table at about the same time, and change one
 * entry so that a change is lost if two threads are at it at once. Every entry that a
 * thread puts has to be there when it takes it. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "table.h"

enum { THREADS = 3, EDITS = 300, KEY = 1 << 20 };

static struct table *table;
static uint64_t round_now, done; /* of all threads together */
static uint64_t rounds;

static void must(bool ok, const char *what)
{
    if (ok)
        return;
    printf("FAILED: %s\n", what);
    fflush(stdout);
    _exit(1);
}

static void add_slowly(struct entry *e, void *arg)
{
    uint64_t was = e->bytes;
    for (int i = 0; i < 4; i++)
        __asm__ volatile("" ::: "memory");
    e->how = 1;
    e->bytes = was + (uint64_t)(uintptr_t)arg;
}

static void use(int thread, uint64_t n)
{
    struct entry e = {.key = KEY * (2 + (uint64_t)thread), .bytes = 1, .space = SPACE_HANDLE, .how = 1}, old;
    for (uint64_t i = 0; i < n; i++) {
        must(table_edit(table, KEY, SPACE_HANDLE, add_slowly, (void *)(uintptr_t)1), "an edit found no memory");
        must(table_put(table, &e, &old) && !old.how, "an entry was put that was there already");
        must(table_take(table, e.key, SPACE_HANDLE, &old) && old.key == e.key && old.bytes == 1, "an entry that was put is not there");
    }
}

static void *work(void *arg)
{
    int thread = (int)(uintptr_t)arg;
    unsigned seed = (unsigned)thread;
    for (uint64_t r = 1; r <= rounds; r++) {
        for (struct wait w = {0}; __atomic_load_n(&round_now, __ATOMIC_ACQUIRE) < r;)
            wait_more(&w);
        seed = seed * 1103515245 + 12345;
        for (unsigned i = seed >> 16 & 1023; thread && i; i--)
            cpu_relax();
        use(thread, EDITS);
        __atomic_add_fetch(&done, 1, __ATOMIC_ACQ_REL);
    }
    return NULL;
}

int main(int argc, char **argv)
{
    if (argc < 2)
        return 2;
    rounds = strtoul(argv[1], NULL, 10);
    pthread_t threads[THREADS];
    for (uint64_t r = 1; r <= rounds; r++) {
        table = sys_map(sizeof *table, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
        must(table, "no memory");
        for (int i = 0; r == 1 && i < THREADS; i++)
            must(pthread_create(&threads[i], NULL, work, (void *)(uintptr_t)i) == 0, "no threads");
        __atomic_store_n(&round_now, r, __ATOMIC_RELEASE);
        for (struct wait w = {0}; __atomic_load_n(&done, __ATOMIC_ACQUIRE) < r * THREADS;)
            wait_more(&w);
        struct entry all;
        must(table_take(table, KEY, SPACE_HANDLE, &all), "the entry of all threads is not there");
        must(all.bytes == THREADS * EDITS, "a change was lost");
        for (int i = 0; i < SHARDS; i++)
            must(table->shards[i].used == 0 && !table->shards[i].lock, "something is left");
        sys_unmap(table, sizeof *table);
    }
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    printf("all is well\n");
    return 0;
}
