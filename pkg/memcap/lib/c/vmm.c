/* SPDX-License-Identifier: Apache-2.0 */

/* Memory of cuMemCreate. It exists as long as a handle or a mapping holds it.
 * cuMemRetainAllocationHandle makes more handles. The memory belongs to the process, not to a
 * context. Imported memory is charged to the process that exported it. Its mappings are recorded
 * too, so that an unmap can find all mappings of a range. */

#include "export.h"
#include "property.h"

/* The owner of a handle's entry is [exported:1 | refs:31 | maps:32]. */
#define EXPORTED ((uint64_t)1 << 63)
#define REF ((uint64_t)1 << 32)
#define MAPPED ((uint64_t)1)

static enum verdict create_begin(struct process *p, struct charge *c, size_t size, const CUmemprop *prop)
{
    CUdevice device;
    struct where at;
    enum means means = property_means(prop->type, &prop->location, &device);
    if (means == MEANS_UNKNOWN && property_unknown(p, device))
        return REFUSE;
    if (means != MEANS_COUNTED && means != MEANS_MANAGED)
        return PASS;
    property_place(p, device, &at);
    at.context = REF;
    return charge_begin_at(p, c, &at, size, means == MEANS_MANAGED ? HOW_MANAGED : HOW_WHOLE);
}

EXPORT CUresult cuMemCreate(CUhandle *out, size_t size, const CUmemprop *prop, unsigned long long flags)
{
    COUNTED(out && prop, create_begin(p, &c, size, prop), charge_done(p, &c, *out, SPACE_HANDLE), CALL(cuMemRelease, *out), cuMemCreate, out, size, prop, flags)
}

struct change {
    uint64_t add, sub, set;
    bool ended;
    struct entry was;
};

static void apply(struct entry *e, void *arg)
{
    struct change *c = arg;
    c->was = *e;
    e->owner = (e->owner + c->add - c->sub) | c->set;
    if (!(e->owner & ~EXPORTED)) {
        c->ended = true;
        e->how = 0;
    }
}

/* hold adds to what holds a handle; let_go takes off. *was becomes the handle's former entry. If
 * nothing is left that holds it, let_go uncommits the memory and returns true. Exported memory
 * stays committed, since others may hold it. For a handle that is not ours, *was is blank. */
static void hold(struct process *p, CUhandle handle, uint64_t what)
{
    struct change c = {.add = what};
    table_change(&p->table, handle, SPACE_HANDLE, apply, &c);
}

static bool let_go(struct process *p, CUhandle handle, uint64_t what, struct entry *was)
{
    struct change c = {.sub = what};
    table_change(&p->table, handle, SPACE_HANDLE, apply, &c);
    *was = c.was;
    if (!c.ended)
        return false;
    if (!(was->owner & EXPORTED))
        account_uncommit(&p->accounts[was->device], was->bytes);
    return true;
}

void handle_exported(struct process *p, CUhandle handle)
{
    struct change c = {.set = EXPORTED};
    table_change(&p->table, handle, SPACE_HANDLE, apply, &c);
}

static void ended(struct process *p, const struct entry *e)
{
    struct account *a = &p->accounts[e->device];
    if (e->owner & EXPORTED) {
        /* No reading shows managed memory, so it is charged until the process ends. */
        if (e->how != HOW_MANAGED)
            account_exported(a, e->bytes);
        return;
    }
    if (e->how == HOW_MANAGED)
        count_sub(&a->slot->managed, e->bytes);
    account_cancel(a, e->bytes);
}

static void not_ended(struct process *p, const struct entry *e)
{
    if (!(e->owner & EXPORTED))
        account_commit(&p->accounts[e->device], e->bytes);
    table_put(&p->table, e, NULL);
}

/* The call makes a descriptor, or a handle for other processes and other nodes. */
EXPORT CUresult cuMemExportToShareableHandle(void *out, CUhandle handle, int type, unsigned long long flags)
{
    struct process *p = ENTER();
    struct entry was;
    if (!p)
        return CALL(cuMemExportToShareableHandle, out, handle, type, flags);
    hold(p, handle, REF); /* so that another thread's release is not the last */
    CUresult r = CALL(cuMemExportToShareableHandle, out, handle, type, flags);
    if (r == CUDA_SUCCESS)
        handle_exported(p, handle);
    if (let_go(p, handle, REF, &was))
        ended(p, &was);
    return r;
}

EXPORT CUresult cuMemRelease(CUhandle handle)
{
    struct process *p = ENTER();
    struct entry was;
    if (!p)
        return CALL(cuMemRelease, handle);
    bool last = let_go(p, handle, REF, &was);
    CUresult r = CALL(cuMemRelease, handle);
    if (last && r == CUDA_SUCCESS)
        ended(p, &was);
    else if (last)
        not_ended(p, &was);
    else if (r != CUDA_SUCCESS)
        hold(p, handle, REF);
    else if (!was.how)
        import_released(p);
    return r;
}

EXPORT CUresult cuMemRetainAllocationHandle(CUhandle *out, void *at) { THEN(cuMemRetainAllocationHandle, if (out) hold(p, *out, REF), out, at) }

EXPORT CUresult cuMemMap(CUdeviceptr at, size_t size, size_t offset, CUhandle handle, unsigned long long flags)
{
    struct process *p = ENTER();
    struct entry e = {.key = at, .bytes = size, .owner = handle, .space = SPACE_MAP, .how = HOW_NOTE}, was;
    if (!p)
        return CALL(cuMemMap, at, size, offset, handle, flags);
    hold(p, handle, MAPPED); /* first, so that another thread's release is not the last */
    CUresult r = CALL(cuMemMap, at, size, offset, handle, flags);
    if (r != CUDA_SUCCESS) {
        if (let_go(p, handle, MAPPED, &was))
            ended(p, &was);
    } else {
        table_put(&p->table, &e, NULL); /* without memory for the entry, the memory is charged until the process ends */
    }
    return r;
}

/* An unmap takes one or several whole mappings. The list has each mapping of the range. If a
 * mapping was the last to hold a handle, the handle follows it in the list. */
static bool push(struct taken_list *u, const struct entry *e)
{
    if (!taken_room(u, 1))
        return false;
    u->list[u->length++].e = *e;
    return true;
}

EXPORT CUresult cuMemUnmap(CUdeviceptr at, size_t size)
{
    struct process *p = ENTER();
    struct taken_list u;
    struct entry e, was;
    if (!p)
        return CALL(cuMemUnmap, at, size);
    taken_begin(&u);
    bool theirs = false;
    uint64_t step = size % BLOCK ? 65536 : BLOCK;
    for (uint64_t i = at; i - at < size; i += step) {
        while (i - at < size && table_take(&p->table, i, SPACE_MAP, &e)) {
            bool kept = push(&u, &e);
            if (kept && let_go(p, e.owner, MAPPED, &was))
                if (!push(&u, &was))
                    not_ended(p, &was); /* without memory to note it, it is charged until the process ends */
            theirs |= kept && !was.how;
            i += e.bytes;
        }
    }
    CUresult r = CALL(cuMemUnmap, at, size);
    if (theirs && r == CUDA_SUCCESS)
        import_released(p);
    for (size_t i = 0; i < u.length; i++) {
        const struct entry *t = &u.list[i].e;
        bool last = i + 1 < u.length && u.list[i + 1].e.space == SPACE_HANDLE;
        if (t->space == SPACE_HANDLE)
            r == CUDA_SUCCESS ? ended(p, t) : not_ended(p, t);
        else if (r != CUDA_SUCCESS) {
            table_put(&p->table, t, NULL);
            if (!last)
                hold(p, t->owner, MAPPED);
        }
    }
    taken_end(&u);
    return r;
}

/* Memory that is mapped into a sparse array exists as long as it is mapped there. An unmap does not
 * name the memory. So after the first such mapping, the memory is charged until the process
 * ends. */

static CUresult map_array(struct process *p, CUmapinfo *list, unsigned int n, CUstream s, CUresult (*call)(CUmapinfo *, unsigned int, CUstream))
{
    struct entry was;
    for (unsigned int i = 0; list && i < n; i++)
        if (list[i].operation == CU_MEM_OPERATION_TYPE_MAP)
            hold(p, list[i].handle, MAPPED);
    CUresult r = call(list, n, s);
    for (unsigned int i = 0; list && r != CUDA_SUCCESS && i < n; i++)
        if (list[i].operation == CU_MEM_OPERATION_TYPE_MAP && let_go(p, list[i].handle, MAPPED, &was))
            ended(p, &was);
    return r;
}

EXPORT CUresult cuMemMapArrayAsync(CUmapinfo *list, unsigned int n, CUstream s) { OVER(cuMemMapArrayAsync, map_array, list, n, s) }
EXPORT CUresult cuMemMapArrayAsync_ptsz(CUmapinfo *list, unsigned int n, CUstream s) { OVER(cuMemMapArrayAsync_ptsz, map_array, list, n, s) }
