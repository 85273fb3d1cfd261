/* SPDX-License-Identifier: Apache-2.0 */

/* The limits of a context, which are memory of the card beside what programs
 * allocate. What they are by default is in what a context takes (Spec.ContextMiB);
 * more than that is charged to the context and given back when less is asked for.
 * The sentences in quotes are of the "CUDA Driver API 13.4", cuCtxSetLimit. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda_internal.h"
#include "cuda_switch.h"

enum { /* CUlimit */
    STACK_SIZE, PRINTF_FIFO_SIZE, MALLOC_HEAP_SIZE, DEV_RUNTIME_SYNC_DEPTH, DEV_RUNTIME_PENDING_LAUNCH_COUNT,
    MAX_L2_FETCH_GRANULARITY, PERSISTING_L2_CACHE_SIZE, SHMEM_SIZE, CIG_ENABLED, CIG_SHMEM_FALLBACK_ENABLED,
    LIMITS,
};

struct limits {
    size_t value[LIMITS], taken[LIMITS]; /* taken: the value that is charged */
    bool mallocs, prints; /* a kernel has run that calls the device's malloc, its printf */
};

static const size_t standard[LIMITS] = {
    [STACK_SIZE] = 1024,
    [PRINTF_FIFO_SIZE] = 1 << 20,
    [MALLOC_HEAP_SIZE] = 8 << 20,
    [DEV_RUNTIME_SYNC_DEPTH] = 2,
    [DEV_RUNTIME_PENDING_LAUNCH_COUNT] = 2048,
    [MAX_L2_FETCH_GRANULARITY] = 64,
};

/* One change at a time: two that are undone in another order than they were made
 * would leave a value that is not what is charged. */
static pthread_mutex_t limiting = PTHREAD_MUTEX_INITIALIZER;

bool limits_begin(struct context *c)
{
    pthread_mutex_lock(&limiting);
    struct limits *l = c->limits ? c->limits : calloc(1, sizeof *l);
    if (l) {
        *l = (struct limits){0};
        memcpy(l->value, standard, sizeof standard);
        memcpy(l->taken, standard, sizeof standard);
        c->limits = l;
    }
    pthread_mutex_unlock(&limiting);
    return l;
}

/* takes is what a limit of so much takes of the card, in whole blocks, with 0 for
 * what the context has anyway. Limits that are not here are of caches and of
 * memory on the multiprocessors. */
static uint64_t takes(const struct device *d, int limit, size_t value)
{
    uint64_t each = 1;
    switch (limit) {
    case STACK_SIZE: /* "in bytes of each GPU thread": of all that can be resident at once */
        each = (uint64_t)d->multiprocessors * THREADS_PER_MULTIPROCESSOR;
        break;
    case PRINTF_FIFO_SIZE: /* "in bytes of the FIFO" */
    case MALLOC_HEAP_SIZE: /* "in bytes of the heap" */
        break;
    case DEV_RUNTIME_SYNC_DEPTH:
        /* "additional levels of sync depth require the driver to reserve large amounts
         * of device memory"; how large it does not say: 150 MB a level says the
         * programming guide of CUDA 11. */
        each = (uint64_t)150 << 20;
        break;
    case DEV_RUNTIME_PENDING_LAUNCH_COUNT:
        /* "will require the driver to reserve larger amounts of device memory upfront";
         * how much for each launch is an estimate. */
        each = 1024;
        break;
    default:
        return 0;
    }
    if (value <= standard[limit])
        return 0;
    uint64_t more = value - standard[limit];
    return more > (uint64_t)INT64_MAX / 2 / each ? (uint64_t)INT64_MAX / 2 : round_up(more * each, BLOCK);
}

static CUresult permitted(const struct device *d, const struct limits *l, int limit, size_t *value)
{
    switch (limit) {
    case STACK_SIZE: /* a thread can have 512 KiB of local memory: programming guide, "Compute Capabilities" */
        MUST(*value <= 512 << 10);
        *value = round_up(*value, 16); /* "The driver is free to modify the requested value" */
        return CUDA_SUCCESS;
    case PRINTF_FIFO_SIZE: /* "must be performed before launching any kernel that uses the printf() device system call" */
        MUST(!l->prints);
        return CUDA_SUCCESS;
    case MALLOC_HEAP_SIZE: /* the same of malloc() and free() */
        MUST(!l->mallocs);
        return CUDA_SUCCESS;
    case DEV_RUNTIME_SYNC_DEPTH: /* "only applicable to devices of compute capability < 9.0" */
        return d->major < 9 ? CUDA_SUCCESS : CUDA_ERROR_UNSUPPORTED_LIMIT;
    case MAX_L2_FETCH_GRANULARITY: /* "can range from 0B to 128B" */
        MUST(*value <= 128);
        return CUDA_SUCCESS;
    default:
        return CUDA_SUCCESS;
    }
}

/* take charges for what a limit is; limiting is held. "If these reservations of device memory fail,
 * cuCtxSetLimit() will return CUDA_ERROR_OUT_OF_MEMORY, and the limit can be reset
 * to a lower value." */
static CUresult take(const char *call, struct context *c, int limit, size_t value)
{
    struct device *d = &devices[c->device];
    int64_t more = (int64_t)takes(d, limit, value) - (int64_t)takes(d, limit, c->limits->taken[limit]);
    TRY(charge(call, d, more));
    lock();
    bool alive = c->alive;
    if (alive)
        c->charged += (uint64_t)more;
    c->limits->taken[limit] = value;
    unlock();
    if (alive)
        return CUDA_SUCCESS;
    charge(call, d, -more); /* it was destroyed at this moment */
    return CUDA_ERROR_CONTEXT_IS_DESTROYED;
}

/* When the heap and the FIFO are made the documentation does not say: at once, before the
 * next kernel, or before the first one that uses them. Of the stack it does: "Setting this value will take effect
 * immediately". */
static bool later(int limit)
{
    return switches.heap != HEAP_SET && (limit == MALLOC_HEAP_SIZE || limit == PRINTF_FIFO_SIZE);
}

static CUresult set(const char *call, struct context *c, int limit, size_t value)
{
    if (!later(limit))
        TRY(take(call, c, limit, value));
    c->limits->value[limit] = value;
    return CUDA_SUCCESS;
}

API CUresult cuCtxSetLimit(int limit, size_t value)
{
    struct context *c;
    TRY(current(&c));
    MUST(limit >= 0 && limit < LIMITS);
    pthread_mutex_lock(&limiting);
    CUresult r = permitted(&devices[c->device], c->limits, limit, &value);
    if (r == CUDA_SUCCESS)
        r = set("cuCtxSetLimit", c, limit, value);
    pthread_mutex_unlock(&limiting);
    return r;
}

API CUresult cuCtxGetLimit(size_t *value, int limit)
{
    struct context *c;
    TRY(current(&c));
    MUST(value && limit >= 0 && limit < LIMITS);
    pthread_mutex_lock(&limiting);
    *value = c->limits->value[limit];
    pthread_mutex_unlock(&limiting);
    return CUDA_SUCCESS;
}

/* A kernel's name says what it needs: stack_<N> has frames of N bytes, malloc_… and
 * printf_… call those. "The driver automatically increases the per-thread stack size
 * for each kernel launch as needed. This size isn't reset back to the original value
 * after each launch." */
CUresult limits_launch(struct context *c, const char *name)
{
    size_t stack = 0;
    sscanf(name, "stack_%zu", &stack);
    bool mallocs = strncmp(name, "malloc_", 7) == 0, prints = strncmp(name, "printf_", 7) == 0;
    if (!mallocs && !prints && !stack && switches.heap == HEAP_SET)
        return CUDA_SUCCESS;
    pthread_mutex_lock(&limiting);
    c->limits->mallocs |= mallocs;
    c->limits->prints |= prints;
    CUresult r = CUDA_SUCCESS;
    bool wanted[] = {[PRINTF_FIFO_SIZE] = prints, [MALLOC_HEAP_SIZE] = mallocs};
    for (int limit = PRINTF_FIFO_SIZE; limit <= MALLOC_HEAP_SIZE && r == CUDA_SUCCESS; limit++)
        if ((wanted[limit] || switches.heap != HEAP_USE) && c->limits->taken[limit] != c->limits->value[limit])
            r = take("cuLaunchKernel", c, limit, c->limits->value[limit]);
    if (r == CUDA_SUCCESS && stack > c->limits->value[STACK_SIZE] && (r = permitted(&devices[c->device], c->limits, STACK_SIZE, &stack)) == CUDA_SUCCESS)
        r = set("cuLaunchKernel", c, STACK_SIZE, stack);
    pthread_mutex_unlock(&limiting);
    return r;
}
