/* SPDX-License-Identifier: Apache-2.0 */

/* Exports by address: a descriptor for another device's driver (dma-buf), and a name
 * for another process (IPC). Either may keep the memory when it has been freed here. */

#include "export.h"

/* A search for the next entry, by its address, that has a part of a range. */
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
    struct process *p = ENTER();
    CUresult r = CALL(cuMemGetHandleForAddressRange, out, at, size, type, flags);
    if (p && r == CUDA_SUCCESS)
        exported(p, at, size);
    return r;
}

EXPORT CUresult cuIpcGetMemHandle(void *out, CUdeviceptr at)
{
    struct process *p = ENTER();
    CUresult r = CALL(cuIpcGetMemHandle, out, at);
    if (p && r == CUDA_SUCCESS)
        exported(p, at, 1);
    return r;
}
