/* SPDX-License-Identifier: Apache-2.0 */

/* Exports by address: a descriptor for another device's driver (dma-buf), a handle for another
 * process (IPC), and memory that is bound to a multicast object. Each may keep the memory after it
 * was freed here. */

#include "export.h"
#include "pool.h"

/* A search for the entries that overlap a range, in the order of their addresses. */
struct search {
    uint64_t at, size, last;
    enum space space;
    struct entry found;
};

static bool overlaps(const struct entry *e, void *arg)
{
    struct search *s = arg;
    if (e->space == s->space && e->key >= s->last && e->key < s->at + s->size && s->at < e->key + e->bytes && (!s->found.how || e->key < s->found.key))
        s->found = *e;
    return false;
}

static bool next(struct process *p, struct search *s)
{
    s->found.how = 0;
    table_any(&p->table, overlaps, s);
    s->last = s->found.key + 1;
    return s->found.how;
}

static void exported(struct process *p, CUdeviceptr at, size_t size)
{
    struct search s = {.at = at, .size = size, .space = SPACE_ADDRESS};
    while (next(p, &s)) {
        struct entry e = {.key = s.found.key, .space = SPACE_EXPORT, .how = HOW_NOTE}, old;
        if (table_put(&p->table, &e, &old) && !old.how)
            count_add(&p->exports, 1);
    }
    s = (struct search){.at = at, .size = size, .space = SPACE_MAP};
    while (next(p, &s))
        handle_exported(p, s.found.owner);
}

bool range_was_exported(struct process *p, CUdeviceptr at)
{
    struct entry e;
    if (!table_take(&p->table, at, SPACE_EXPORT, &e))
        return false;
    count_sub(&p->exports, 1);
    return true;
}

EXPORT CUresult cuMemGetHandleForAddressRange(void *out, CUdeviceptr at, size_t size, int type, unsigned long long flags)
{
    THEN(cuMemGetHandleForAddressRange, exported(p, at, size), out, at, size, type, flags)
}

EXPORT CUresult cuIpcGetMemHandle(void *out, CUdeviceptr at) { THEN(cuIpcGetMemHandle, exported(p, at, 1), out, at) }

/* Memory that is bound to a multicast object can be reached through that object. By no document
 * does the memory exist as long as it is bound, after all else has released it; we assume that. */
EXPORT CUresult cuMulticastBindMem(CUhandle to, size_t at, CUhandle handle, size_t offset, size_t size, unsigned long long flags)
{
    THEN(cuMulticastBindMem, handle_exported(p, handle), to, at, handle, offset, size, flags)
}
EXPORT CUresult cuMulticastBindMem_v2(CUhandle to, CUdevice device, size_t at, CUhandle handle, size_t offset, size_t size, unsigned long long flags)
{
    THEN(cuMulticastBindMem_v2, handle_exported(p, handle), to, device, at, handle, offset, size, flags)
}
EXPORT CUresult cuMulticastBindAddr(CUhandle to, size_t at, CUdeviceptr memory, size_t size, unsigned long long flags)
{
    THEN(cuMulticastBindAddr, exported(p, memory, size), to, at, memory, size, flags)
}
EXPORT CUresult cuMulticastBindAddr_v2(CUhandle to, CUdevice device, size_t at, CUdeviceptr memory, size_t size, unsigned long long flags)
{
    THEN(cuMulticastBindAddr_v2, exported(p, memory, size), to, device, at, memory, size, flags)
}

void import_released(struct process *p)
{
    for (CUdevice d = 0; d < MAX_DEVICES; d++)
        if (__atomic_load_n(&p->standing[d], __ATOMIC_ACQUIRE) == STANDING_GOOD)
            account_guessed(&p->accounts[d]);
}

CUresult uncounted_freed(struct process *p, CUresult r)
{
    if (r == CUDA_SUCCESS && __atomic_load_n(&p->imported, __ATOMIC_RELAXED))
        import_released(p);
    return r;
}

EXPORT CUresult cuIpcCloseMemHandle(CUdeviceptr at) { THEN(cuIpcCloseMemHandle, import_released(p), at) }

/* --- pools that others can open --------------------------------------------- */

/* Such a pool gives nothing back before its end ("IPC pools currently do not support releasing
 * physical blocks back to the OS"). If it grew in an attempt, that could not be undone. So an
 * attempt is made only if something large enough was freed and no part of it was allocated since. A
 * driver that finds that place need not grow the pool. Each freed place is recorded by itself, even
 * if two are adjacent. */
enum { PLACES = 64, MANY_PLACES = 4096 };

struct places {
    uint64_t pool, bytes;
    int n;
    struct entry list[PLACES];
    bool taken[PLACES];
};

static bool of_pool(const struct entry *e, void *arg)
{
    const struct places *f = arg;
    return e->space == SPACE_PLACE && e->owner == f->pool;
}

void places_end(struct process *p, const struct pool *pool)
{
    struct places f = {.pool = (uint64_t)(pool - p->pools)};
    while (table_pick(&p->table, of_pool, &f, f.list, PLACES) == PLACES)
        ;
}

void place_freed(struct process *p, struct pool *pool, const struct entry *e)
{
    struct entry place = *e;
    if (__atomic_add_fetch(&pool->places, 1, __ATOMIC_RELAXED) > MANY_PLACES) {
        __atomic_store_n(&pool->places, 0, __ATOMIC_RELAXED);
        places_end(p, pool); /* too many: begin again */
    }
    place.space = SPACE_PLACE;
    table_put(&p->table, &place, NULL);
}

static bool large(const struct entry *e, void *arg)
{
    struct places *f = arg;
    if (of_pool(e, arg) && e->bytes >= f->bytes && f->n < PLACES)
        f->list[f->n++] = *e;
    return f->n == PLACES;
}

static bool takes(const struct entry *e, void *arg)
{
    struct places *f = arg;
    for (int i = 0; i < f->n && e->space == SPACE_POOLED && e->owner == f->pool; i++)
        if (e->key < f->list[i].key + f->list[i].bytes && f->list[i].key < e->key + e->bytes)
            f->taken[i] = true;
    return false;
}

bool place_for(struct process *p, struct pool *pool, uint64_t n)
{
    for (bool all = true; all;) {
        struct places f = {.pool = (uint64_t)(pool - p->pools), .bytes = n};
        all = table_any(&p->table, large, &f);
        table_any(&p->table, takes, &f);
        for (int i = 0; i < f.n; i++) {
            struct entry gone;
            if (!f.taken[i])
                return true;
            table_take(&p->table, f.list[i].key, SPACE_PLACE, &gone);
        }
    }
    return false;
}
