/* SPDX-License-Identifier: Apache-2.0 */

#include "export.h"

/* --- blocks --------------------------------------------------------------- */

/* The entry of a block. Its owner is the number of small allocations in the block, and its bytes
 * are their sum. The entry exists exactly as long as the block is charged. The thread that makes
 * the entry commits the charge; the thread that removes it gives the charge back. One thread may
 * free the last allocation of a block while the driver gives another thread a part of it. Both are
 * then charged a block for a moment. */
struct block {
    CUdevice device;
    uint64_t bytes;             /* of the allocation that joins the block */
    const struct entry *leaves; /* the allocation that leaves it */
    bool old;                   /* true: join only a block that exists */
    bool joined;
    bool changed;               /* true: the entry was made, or removed */
};

static void join(struct entry *e, void *arg)
{
    struct block *b = arg;
    b->joined = e->how || !b->old;
    if (!b->joined)
        return;
    b->changed = !e->how;
    e->how = HOW_NOTE;
    e->device = b->device;
    e->owner++;
    e->bytes += b->bytes;
}

static void leave(struct entry *e, void *arg)
{
    struct block *b = arg;
    if (!e->how)
        return;
    e->bytes -= b->leaves->bytes;
    if (--e->owner == 0) {
        b->changed = true;
        e->how = 0;
    }
}

/* A search for a hole. It looks at the blocks with the most room, and marks what lies in them. That
 * takes time for each allocation of the process. So it is done only for a request that would be
 * refused otherwise. */
enum { HOLES = 8 };
struct holes {
    CUdevice device;
    uint64_t bytes;
    int n;
    uint64_t block[HOLES], room[HOLES];
    uint64_t taken[HOLES][BLOCK / UNIT / 64];
};

static bool roomy(const struct entry *e, void *arg)
{
    struct holes *h = arg;
    if (e->space != SPACE_BLOCK || e->device != h->device || e->bytes + h->bytes > BLOCK)
        return false;
    int i = h->n < HOLES ? h->n++ : HOLES;
    uint64_t room = BLOCK - e->bytes;
    if (i == HOLES) /* replace the fullest block of the list, if that is fuller */
        for (int k = 0; k < HOLES; k++)
            if (h->room[k] < room && (i == HOLES || h->room[k] < h->room[i]))
                i = k;
    if (i < HOLES) {
        h->block[i] = e->key;
        h->room[i] = room;
    }
    return false;
}

static bool mark(const struct entry *e, void *arg)
{
    struct holes *h = arg;
    if (e->space != SPACE_ADDRESS || e->how != HOW_SMALL)
        return false;
    for (int i = 0; i < h->n; i++)
        if (h->block[i] == e->key / BLOCK)
            for (uint64_t u = e->key % BLOCK / UNIT, end = u + e->bytes / UNIT; u < end && u < BLOCK / UNIT; u++)
                h->taken[i][u / 64] |= (uint64_t)1 << u % 64;
    return false;
}

static bool hole_for(struct process *p, CUdevice device, uint64_t bytes)
{
    struct holes h = {.device = device, .bytes = bytes};
    table_any(&p->table, roomy, &h);
    if (!h.n)
        return false;
    table_any(&p->table, mark, &h);
    for (int i = 0; i < h.n; i++)
        for (uint64_t u = 0, run = 0; u < BLOCK / UNIT; u++) {
            run = h.taken[i][u / 64] >> u % 64 & 1 ? 0 : run + 1;
            if (run == bytes / UNIT)
                return true;
        }
    return false;
}

static bool has_hidden(const struct process *p, CUdevice device) { return count_read(&p->hidden[device]); }

/* squeeze allows a small allocation without a reservation. It does so if there is a hole for it
 * that no other allocation under way could take first. The lock stays taken then. False: the
 * allocation needs a reservation. */
COLD static bool squeeze(struct process *p, struct charge *c)
{
    if (has_hidden(p, c->at.device))
        return false; /* what looks like a hole may be in use */
    uint32_t *lock = &p->tight[c->at.device];
    const struct slot *s = c->a->slot;
    spin_lock(lock);
    for (int i = 0; i < 100; i++) {
        uint64_t committed = slot_committed(s);
        if (slot_reserved(s) == committed) {
            if (!hole_for(p, c->at.device, c->bytes))
                break;
            c->tight = lock;
            return true;
        }
        nap_us(20);
    }
    spin_unlock(lock);
    return false;
}

/* --- allocating ----------------------------------------------------------- */

static uint64_t reserved_for(const struct charge *c) { return c->tight ? 0 : c->how == HOW_SMALL ? BLOCK : c->bytes; }

enum verdict charge_begin(struct process *p, struct charge *c, uint64_t bytes, enum how how)
{
    struct where at;
    return where(p, &at) ? charge_begin_at(p, c, &at, bytes, how) : PASS;
}

enum verdict charge_begin_at(struct process *p, struct charge *c, const struct where *at, uint64_t bytes, enum how how)
{
    bool refuse;
    *c = (struct charge){.at = *at, .how = how};
    if (how == HOW_LARGE && bytes < BLOCK)
        c->how = HOW_SMALL;
    if (how == HOW_HIDDEN && bytes >= BLOCK)
        c->how = HOW_LARGE;
    if (!bytes)
        return PASS; /* the driver will refuse it */
    c->a = account_of(p, at->device, &refuse);
    if (!c->a)
        return refuse ? REFUSE : PASS;
    c->bytes = bytes < MOST ? round_up(bytes, c->how == HOW_SMALL ? UNIT : BLOCK) : MOST;
    uint64_t n = reserved_for(c);
    if (c->how == HOW_SMALL) {
        account_measure(c->a, n);
        if (account_reserve_quickly(c->a, n) || squeeze(p, c) || account_reserve_slowly(c->a, n))
            return COUNT;
        /* Another thread may have taken the last block, and not filled it. */
        return squeeze(p, c) ? COUNT : REFUSE;
    }
    if (!account_reserve(c->a, n))
        return REFUSE;
    if (c->how == HOW_HIDDEN)
        count_add(&p->hidden[at->device], 1);
    return COUNT;
}

COLD void charge_failed(struct process *p, struct charge *c)
{
    if (reserved_for(c))
        account_cancel(c->a, reserved_for(c));
    if (c->how == HOW_HIDDEN)
        count_sub(&p->hidden[c->at.device], 1);
    charge_undone(c);
}

void charge_undone(struct charge *c)
{
    if (c->tight)
        spin_unlock(c->tight);
    c->tight = NULL;
}

/* guessed reports whether a charge is a guess: that of an array, which is charged by its
 * description, of something hidden, of a context or its limit, or of what was measured. */
static bool guessed(const struct entry *e) { return e->how == HOW_HIDDEN || e->how == HOW_GUESS || e->space == SPACE_LIMIT || e->space == SPACE_ARRAY || e->space == SPACE_MIPMAP || e->space == SPACE_CONTEXT; }

COLD bool charge_again(struct charge *c)
{
    bool tight = c->tight;
    if (tight)
        account_undone(c->a, BLOCK);
    charge_undone(c);
    return tight && account_reserve_slowly(c->a, BLOCK);
}

static void take(struct process *p, struct taken *t)
{
    t->held = t->e.bytes;
    if (t->e.how == HOW_SMALL) {
        struct block b = {.leaves = &t->e};
        table_edit(&p->table, t->e.key / BLOCK, SPACE_BLOCK, leave, &b);
        t->held = b.changed ? BLOCK : 0;
    }
    if (t->held)
        account_uncommit(&p->accounts[t->e.device], t->held);
}

COLD static void release(struct process *p, const struct entry *e)
{
    struct taken t = {.e = *e};
    take(p, &t);
    charge_gone(p, &t);
}

bool charge_done(struct process *p, struct charge *c, uint64_t key, enum space space)
{
    if (c->how == HOW_SMALL && (space != SPACE_ADDRESS || key / BLOCK != (key + c->bytes - 1) / BLOCK)) {
        /* No driver is known to place a small allocation like that. Charge it a block of its
         * own. */
        if (c->tight)
            return false;
        c->how = HOW_LARGE;
        c->bytes = BLOCK;
    }
    struct entry e = {.key = key, .bytes = c->bytes, .owner = c->at.context, .space = (uint16_t)space, .how = (uint16_t)c->how, .device = c->at.device};
    struct entry old;
    if (c->how == HOW_SMALL) {
        struct block b = {.device = c->at.device, .bytes = c->bytes, .old = c->tight};
        if (!table_edit(&p->table, key / BLOCK, SPACE_BLOCK, join, &b) || !b.joined) {
            if (!c->tight)
                charge_failed(p, c);
            return false;
        }
        if (b.changed)
            account_commit(c->a, BLOCK);
        else if (!c->tight)
            account_cancel(c->a, BLOCK); /* the block is charged already */
    } else {
        if (c->how == HOW_MANAGED)
            count_add(&c->a->slot->managed, c->bytes);
        account_commit(c->a, c->bytes);
        if (guessed(&e))
            account_guessed(c->a);
    }
    bool kept = table_put(&p->table, &e, &old);
    charge_undone(c); /* now other threads see what is taken of the block */
    if (!kept) {
        release(p, &e);
        return false;
    }
    if (__builtin_expect(old.how, 0))
        release(p, &old); /* it was freed in a way that we did not see */
    return true;
}

/* --- freeing -------------------------------------------------------------- */

bool charge_take(struct process *p, struct taken *t, uint64_t key, enum space space)
{
    if (!table_take(&p->table, key, space, &t->e))
        return false;
    take(p, t);
    return true;
}

/* export_gone is charge_gone for exported memory. False: this memory was not exported. */
COLD static bool export_gone(struct process *p, const struct taken *t)
{
    struct account *a = &p->accounts[t->e.device];
    if (t->e.space != SPACE_ADDRESS || !range_was_exported(p, t->e.key))
        return false;
    account_commit(a, t->held);
    account_exported(a, t->held);
    return true;
}

/* context_gone gives the charge of a context back. The limit page may by now say that a context
 * takes less than was charged. The driver never took the difference, so it gives no room
 * (settled). */
COLD static void context_gone(struct account *a, uint64_t bytes)
{
    count_sub(&a->slot->expected, bytes);
    count_sub(&a->slot->contexts, 1);
    count_add(&a->usage->settled, account_excess(a, bytes, 1));
    if (bytes)
        account_return(a, bytes);
}

void charge_gone(struct process *p, const struct taken *t)
{
    struct account *a = &p->accounts[t->e.device];
    if (t->e.how == HOW_MANAGED)
        count_sub(&a->slot->managed, t->e.bytes);
    if (t->e.how == HOW_PROMISED)
        count_sub(&a->slot->promised, t->e.bytes);
    if (__builtin_expect(count_read(&p->exports), 0) && export_gone(p, t))
        return;
    /* The driver may have kept the block for something hidden. Or the hidden thing was in a block
     * that stays. Then the driver had less than bound before, and the ceiling may have risen for
     * that. This free must not give the room a second time. */
    bool no_room = t->e.how == HOW_HIDDEN || t->e.how == HOW_GUESS || (t->e.how == HOW_SMALL && has_hidden(p, t->e.device));
    if (no_room)
        count_add(&a->usage->settled, t->held);
    if (t->e.space == SPACE_CONTEXT)
        context_gone(a, t->held);
    else if (t->held)
        (no_room ? account_return : account_cancel)(a, t->held);
    if (guessed(&t->e))
        account_guessed(a);
    if (t->e.how == HOW_HIDDEN)
        count_sub(&p->hidden[t->e.device], 1);
}

COLD void charge_back(struct process *p, const struct taken *t)
{
    struct account *a = &p->accounts[t->e.device];
    struct entry old;
    if (t->e.how == HOW_SMALL) {
        struct block b = {.device = t->e.device, .bytes = t->e.bytes};
        table_edit(&p->table, t->e.key / BLOCK, SPACE_BLOCK, join, &b);
        if (b.changed && !t->held)
            account_force(a, BLOCK); /* another thread has removed the block in the meantime */
        else if (b.changed)
            account_commit(a, BLOCK);
        else if (t->held)
            account_cancel(a, BLOCK); /* another thread has made the block again */
    } else {
        account_commit(a, t->held);
    }
    if (!table_put(&p->table, &t->e, &old))
        return; /* it stays charged and is never found again: the charge is too high, never too low */
    if (old.how)
        release(p, &old);
}

/* --- the end of a context ------------------------------------------------- */

struct owner {
    uint64_t context;
    struct taken_list *l;
};

static bool owned(const struct entry *e, void *arg)
{
    const struct owner *o = arg;
    if (e->space == SPACE_LIMIT)
        return e->key / LIMITS == o->context;
    return e->owner == o->context && (e->space == SPACE_ADDRESS || e->space == SPACE_ARRAY || e->space == SPACE_MIPMAP || e->space == SPACE_MODULE || e->space == SPACE_CONTEXT);
}

void taken_begin(struct taken_list *l)
{
    l->list = l->few;
    l->length = 0;
    l->room = FEW;
}

bool taken_room(struct taken_list *l, size_t more)
{
    if (l->length + more <= l->room)
        return true;
    size_t room = l->room * 16;
    struct taken *list = sys_map(room * sizeof *list, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
    if (!list)
        return false;
    for (size_t i = 0; i < l->length; i++)
        list[i] = l->list[i];
    taken_end(l);
    l->list = list;
    l->room = room;
    return true;
}

void taken_end(struct taken_list *l)
{
    if (l->list != l->few)
        sys_unmap(l->list, l->room * sizeof *l->list);
}

void charge_take_all(struct process *p, struct taken_list *l, uint64_t context)
{
    struct owner o = {context, l};
    struct entry batch[32];
    taken_begin(l);
    for (int n = 32; context && n == 32;) {
        if (!taken_room(l, 32))
            return; /* the rest stays charged */
        n = table_pick(&p->table, owned, &o, batch, 32);
        for (int i = 0; i < n; i++) {
            struct taken *t = &l->list[l->length++];
            t->e = batch[i];
            take(p, t);
        }
    }
}

void charge_gone_all(struct process *p, struct taken_list *l)
{
    for (size_t i = 0; i < l->length; i++)
        charge_gone(p, &l->list[i]);
    taken_end(l);
}

void charge_back_all(struct process *p, struct taken_list *l, uint64_t context)
{
    for (size_t i = 0; i < l->length; i++) {
        if (l->list[i].e.space == SPACE_LIMIT)
            l->list[i].e.key = context * LIMITS + l->list[i].e.key % LIMITS;
        else
            l->list[i].e.owner = context;
        if (l->list[i].e.space == SPACE_CONTEXT)
            l->list[i].e.key = context;
        charge_back(p, &l->list[i]);
    }
    taken_end(l);
}
