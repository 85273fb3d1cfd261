/* SPDX-License-Identifier: Apache-2.0 */

/* What a refusal costs the program that is refused, and the others. */

#include <pthread.h>
#include <stdlib.h>

#include "scenario.h"

enum { TRIES = 400 };

static int by_size(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

/* An allocator that is refused asks again: with the same size, with a larger one,
 * and after it has given something back and taken it again. The first refusal may
 * take a reading of the agent's; those after it take what a driver takes. */
static void refused_again_and_again(struct scene *s)
{
    static uint64_t took[TRIES];
    CUdeviceptr p[64], q;
    uint64_t bytes = s->room / 16;
    int n = 0;
    while (n < 64 && ASK(s, bytes, s->cu->cuMemAlloc_v2(&p[n], bytes)))
        n++;
    if (!n || s->failure[0])
        return;
    for (int i = 0; i < TRIES; i++) {
        uint64_t from = now_ns();
        CUresult r = s->cu->cuMemAlloc_v2(&q, bytes * (1 + (uint64_t)i % 3));
        took[i] = (now_ns() - from) / 1000;
        if (r != CUDA_ERROR_OUT_OF_MEMORY) {
            fail_scene(s, "try %d: %d", i, r);
            return;
        }
        if (i % 4 == 3 && (!MUST(s, s->cu->cuMemFree_v2(p[n - 1])) || !MUST(s, s->cu->cuMemAlloc_v2(&p[n - 1], bytes))))
            return;
    }
    qsort(took, TRIES, sizeof *took, by_size);
    note(s, "median-us", took[TRIES / 2]);
    note(s, "p99-us", took[TRIES * 99 / 100]);
    while (n) {
        MUST(s, s->cu->cuMemFree_v2(p[--n]));
        given_back(s, bytes);
    }
}

/* A context that comes or goes leaves open what it takes: one reading tells, and the
 * refusals after that one do not wait. */
static void refused_after_a_context(struct scene *s)
{
    enum { ROUNDS = 3, EACH = 50 };
    static uint64_t took[2 * ROUNDS * EACH];
    uint64_t bytes = s->room / 16;
    CUcontext second;
    CUdeviceptr q;
    int n = 0;
    while (ASK(s, bytes, s->cu->cuMemAlloc_v2(&q, bytes)) && s->live < s->room)
        ;
    for (int i = 0; i < 2 * ROUNDS && !s->failure[0]; i++) {
        if (i % 2 ? !MUST(s, s->cu->cuCtxDestroy_v2(second)) || !MUST(s, s->cu->cuCtxSetCurrent(s->seat.context)) : !MUST(s, s->cu->cuCtxCreate_v2(&second, 0, s->seat.device)))
            return;
        for (int k = 0; k < EACH; k++) {
            uint64_t from = now_ns();
            if (s->cu->cuMemAlloc_v2(&q, 512 * MiB) != CUDA_ERROR_OUT_OF_MEMORY)
                fail_scene(s, "room for more than there is");
            took[n++] = (now_ns() - from) / 1000;
        }
    }
    qsort(took, (size_t)n, sizeof *took, by_size);
    note(s, "median-us", took[n / 2]);
    note(s, "p99-us", took[n * 99 / 100]);
}

/* While one thread is refused again and again, another takes and gives back what
 * fits. */
struct other {
    struct scene *s;
    int stop;
};

static void *be_refused(void *arg)
{
    struct other *o = arg;
    CUdeviceptr q;
    if (o->s->cu->cuCtxSetCurrent(o->s->seat.context) != CUDA_SUCCESS)
        return NULL;
    for (uint64_t i = 0; !__atomic_load_n(&o->stop, __ATOMIC_ACQUIRE); i++)
        if (o->s->cu->cuMemAlloc_v2(&q, o->s->room - i % 4 * 32 * MiB) == CUDA_SUCCESS)
            o->s->cu->cuMemFree_v2(q);
    return NULL;
}

static void refused_beside_one_that_fits(struct scene *s)
{
    static uint64_t took[TRIES];
    struct other o = {.s = s};
    pthread_t thread;
    CUdeviceptr p, q;
    if (!MUST(s, s->cu->cuMemAlloc_v2(&p, s->room / 2)) || pthread_create(&thread, NULL, be_refused, &o))
        return;
    for (int i = 0; i < TRIES && !s->failure[0]; i++) {
        uint64_t from = now_ns();
        if (ASK(s, MiB, s->cu->cuMemAlloc_v2(&q, MiB))) {
            took[i] = (now_ns() - from) / 1000;
            MUST(s, s->cu->cuMemFree_v2(q));
            given_back(s, MiB);
        }
    }
    __atomic_store_n(&o.stop, 1, __ATOMIC_RELEASE);
    pthread_join(thread, NULL);
    qsort(took, TRIES, sizeof *took, by_size);
    note(s, "median-us", took[TRIES / 2]);
    note(s, "p99-us", took[TRIES * 99 / 100]);
    MUST(s, s->cu->cuMemFree_v2(p));
}

const struct scenario refusal_scenarios[] = {
    {"refused-again-and-again", refused_again_and_again, 0},
    {"refused-after-a-context", refused_after_a_context, 0},
    {"refused-beside-one-that-fits", refused_beside_one_that_fits, 0},
    {0},
};
