/* SPDX-License-Identifier: Apache-2.0 */

#include "table.h"

enum { FIRST_BITS = 5 };

/* spread is the table's hash. Its highest bits choose the shard, and are the same for an
 * address and its block. */
static inline uint64_t spread(uint64_t key, enum space space)
{
    const uint64_t odd = 0x9E3779B97F4A7C15u;
    uint64_t within = 0, h;
    if (space == SPACE_ADDRESS) {
        within = (key % BLOCK * odd) >> SHARD_BITS;
        key /= BLOCK;
    } else if (space == SPACE_BLOCK) {
        within = odd >> SHARD_BITS;
    } else {
        /* Addresses come at steps of 512 bytes and more, handles at steps of 16. */
        key ^= (uint64_t)space << 56;
    }
    h = (key ^ key >> 32) * odd;
    return h ^ h >> 29 ^ within;
}

static uint64_t place(uint64_t hash, const struct shard *s) { return hash >> (64 - SHARD_BITS - s->bits) & (((uint64_t)1 << s->bits) - 1); }

/* find returns the entry, or the free place for it. */
static struct entry *find(struct shard *s, uint64_t hash, uint64_t key, enum space space)
{
    uint64_t mask = ((uint64_t)1 << s->bits) - 1;
    for (uint64_t i = place(hash, s);; i = (i + 1) & mask) {
        struct entry *e = &s->entries[i];
        if (!e->how || (e->key == key && e->space == space))
            return e;
    }
}

static struct entry *map_entries(size_t size)
{
    struct entry *entries = sys_map(size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
    if (entries)
        SYS3(SYS_madvise, entries, size, MADV_DONTFORK);
    return entries;
}

/* first_room returns the room that a shard begins with. All shards begin in one mapping,
 * because to map memory takes a hundred times as long as anything else here, and most
 * programs never need more. */
static struct entry *first_room(struct table *t, const struct shard *s)
{
    size_t size = sizeof(struct entry) * SHARDS << FIRST_BITS;
    struct entry *all = __atomic_load_n(&t->first, __ATOMIC_ACQUIRE), *none = NULL;
    if (!all) {
        all = map_entries(size);
        if (all && !__atomic_compare_exchange_n(&t->first, &none, all, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
            sys_unmap(all, size); /* another thread was quicker */
            all = none;
        }
    }
    return all ? all + ((size_t)(s - t->shards) << FIRST_BITS) : NULL;
}

/* grow doubles a shard's room, which is wanted when it is half full. A fuller shard is
 * slower but still right, so without memory it is used until it is all but full. */
COLD static bool grow(struct table *t, struct shard *s)
{
    uint32_t bits = s->bits ? s->bits + 1 : FIRST_BITS;
    struct entry *entries = s->bits ? map_entries(sizeof(struct entry) << bits) : first_room(t, s);
    if (!entries)
        return s->bits && s->used + 2 < (uint64_t)1 << s->bits;
    struct shard old = *s;
    s->entries = entries;
    s->bits = bits;
    if (!old.bits)
        return true;
    for (uint64_t i = 0; i < (uint64_t)1 << old.bits; i++) {
        const struct entry *e = &old.entries[i];
        if (e->how)
            *find(s, spread(e->key, e->space), e->key, e->space) = *e;
    }
    if (old.bits > FIRST_BITS)
        sys_unmap(old.entries, sizeof(struct entry) << old.bits);
    return true;
}

/* drop empties a place. It moves entries behind it closer to their own places, so that
 * removed entries leave no marks and look-ups stay short. */
static void drop(struct shard *s, struct entry *e)
{
    uint64_t mask = ((uint64_t)1 << s->bits) - 1;
    uint64_t hole = (uint64_t)(e - s->entries);
    for (uint64_t i = (hole + 1) & mask; s->entries[i].how; i = (i + 1) & mask) {
        uint64_t home = place(spread(s->entries[i].key, s->entries[i].space), s);
        if (((i - home) & mask) >= ((i - hole) & mask)) {
            s->entries[hole] = s->entries[i];
            hole = i;
        }
    }
    s->entries[hole].how = 0;
    s->used--;
}

/* lock_for locks the shard of a key, with room for two more if there is memory. */
static struct shard *lock_for(struct table *t, uint64_t hash, bool *room)
{
    struct shard *s = &t->shards[hash >> (64 - SHARD_BITS)];
    spin_lock(&s->lock);
    *room = (s->bits && s->used < ((uint64_t)1 << s->bits) / 2) || grow(t, s);
    return s;
}

static void put_locked(struct shard *s, uint64_t hash, const struct entry *e, struct entry *old)
{
    struct entry *at = find(s, hash, e->key, e->space);
    if (at->how)
        *old = *at;
    else
        s->used++;
    *at = *e;
}

bool table_put(struct table *t, const struct entry *e, struct entry *old)
{
    uint64_t hash = spread(e->key, e->space);
    bool ok;
    struct shard *s = lock_for(t, hash, &ok);
    old->how = 0;
    if (ok)
        put_locked(s, hash, e, old);
    spin_unlock(&s->lock);
    return ok;
}

/* edited is called when an entry, or the place for one, was edited. */
static void edited(struct shard *s, struct entry *at, bool was)
{
    if (was && !at->how)
        drop(s, at);
    else if (!was && at->how)
        s->used++;
}

static void edit_locked(struct shard *s, uint64_t key, enum space space, void (*edit)(struct entry *, void *), void *arg)
{
    struct entry *at = find(s, spread(key, space), key, space);
    bool was = at->how;
    if (!was)
        *at = (struct entry){.key = key, .space = (uint16_t)space};
    edit(at, arg);
    edited(s, at, was);
}

bool table_take_then(struct table *t, uint64_t key, enum space space, struct entry *out, uint16_t how, uint64_t key2, enum space space2,
                     void (*edit)(struct entry *, void *), void *arg)
{
    uint64_t hash = spread(key, space);
    struct shard *s = &t->shards[hash >> (64 - SHARD_BITS)];
    bool found = false;
    spin_lock(&s->lock);
    if (s->bits) {
        struct entry *at = find(s, hash, key, space);
        if (at->how) {
            *out = *at;
            drop(s, at);
            found = true;
            if (how && out->how == how)
                edit_locked(s, key2, space2, edit, arg);
        }
    }
    spin_unlock(&s->lock);
    return found;
}

bool table_take(struct table *t, uint64_t key, enum space space, struct entry *out) { return table_take_then(t, key, space, out, 0, 0, 0, NULL, NULL); }

bool table_edit_then_put(struct table *t, uint64_t key, enum space space, bool (*first)(struct entry *, void *), void *arg, const struct entry *e, struct entry *old)
{
    uint64_t hash = spread(key, space);
    bool ok;
    struct shard *s = lock_for(t, hash, &ok);
    old->how = 0;
    if (ok) {
        struct entry *at = find(s, hash, key, space);
        bool was = at->how;
        if (!was)
            *at = (struct entry){.key = key, .space = (uint16_t)space};
        ok = first(at, arg);
        edited(s, at, was);
        if (ok)
            put_locked(s, spread(e->key, e->space), e, old);
    }
    spin_unlock(&s->lock);
    return ok;
}

bool table_edit(struct table *t, uint64_t key, enum space space, void (*edit)(struct entry *, void *), void *arg)
{
    bool ok;
    struct shard *s = lock_for(t, spread(key, space), &ok);
    if (ok)
        edit_locked(s, key, space, edit, arg);
    spin_unlock(&s->lock);
    return ok;
}

bool table_change(struct table *t, uint64_t key, enum space space, void (*edit)(struct entry *, void *), void *arg)
{
    uint64_t hash = spread(key, space);
    struct shard *s = &t->shards[hash >> (64 - SHARD_BITS)];
    bool found = false;
    spin_lock(&s->lock);
    if (s->bits) {
        struct entry *at = find(s, hash, key, space);
        found = at->how;
        if (found)
            edit(at, arg);
        if (found && !at->how)
            drop(s, at);
    }
    spin_unlock(&s->lock);
    return found;
}

int table_pick(struct table *t, bool (*pick)(const struct entry *, void *), void *arg, struct entry *out, int room)
{
    int got = 0;
    for (int n = 0; n < SHARDS && got < room; n++) {
        struct shard *s = &t->shards[n];
        spin_lock(&s->lock);
        for (uint64_t i = 0; s->bits && i < (uint64_t)1 << s->bits && got < room;)
            if (s->entries[i].how && pick(&s->entries[i], arg)) {
                out[got++] = s->entries[i];
                drop(s, &s->entries[i]); /* another entry may have moved there, so i stays */
            } else {
                i++;
            }
        spin_unlock(&s->lock);
    }
    return got;
}

bool table_any(struct table *t, bool (*pick)(const struct entry *, void *), void *arg)
{
    bool any = false;
    for (int n = 0; n < SHARDS && !any; n++) {
        struct shard *s = &t->shards[n];
        spin_lock(&s->lock);
        for (uint64_t i = 0; s->bits && i < (uint64_t)1 << s->bits && !any; i++)
            any = s->entries[i].how && pick(&s->entries[i], arg);
        spin_unlock(&s->lock);
    }
    return any;
}
