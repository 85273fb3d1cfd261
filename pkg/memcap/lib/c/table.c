/* SPDX-License-Identifier: Apache-2.0 */

#include "table.h"

enum { FIRST_BITS = 5 };

/* spread is the table's hash. Its highest bits choose the shard. Addresses come in steps of 512
 * bytes and more, handles in steps of 16. */
static inline uint64_t spread(uint64_t key, enum space space)
{
    key ^= (uint64_t)space << 56;
    key = (key ^ key >> 32) * 0x9E3779B97F4A7C15u;
    return key ^ key >> 29;
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

/* first_room returns the room that a shard begins with. All shards begin in one mapping. To map
 * memory takes a hundred times as long as anything else here, and most programs never need more. */
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

/* grow doubles a shard's room. It is called when the shard is half full. A fuller shard is slower
 * but still right. So without memory the shard is used until it is all but full. False: it is. */
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

/* drop empties a place. It moves later entries closer to their own places. So removed entries leave
 * no marks, and look-ups stay short. */
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

/* change calls edit with the entry of a key. If there is none and make is true, it calls edit with
 * a blank entry. False: it did not call edit. */
static inline bool change(struct table *t, uint64_t key, enum space space, void (*edit)(struct entry *, void *), void *arg, bool make)
{
    uint64_t hash = spread(key, space);
    struct shard *s = &t->shards[hash >> (64 - SHARD_BITS)];
    spin_lock(&s->lock);
    bool room = make ? (s->bits && s->used < ((uint64_t)1 << s->bits) / 2) || grow(t, s) : s->bits;
    struct entry *e = room ? find(s, hash, key, space) : NULL;
    bool was = e && e->how, done = was || (e && make);
    if (done && !was)
        *e = (struct entry){.key = key, .space = (uint16_t)space};
    if (done)
        edit(e, arg);
    if (was && !e->how)
        drop(s, e);
    else if (done && !was && e->how)
        s->used++;
    spin_unlock(&s->lock);
    return done;
}

bool table_edit(struct table *t, uint64_t key, enum space space, void (*edit)(struct entry *, void *), void *arg) { return change(t, key, space, edit, arg, true); }

bool table_change(struct table *t, uint64_t key, enum space space, void (*edit)(struct entry *, void *), void *arg) { return change(t, key, space, edit, arg, false); }

static void copy(struct entry *e, void *out) { *(struct entry *)out = *e; }

bool table_get(struct table *t, uint64_t key, enum space space, struct entry *out) { return change(t, key, space, copy, out, false); }

static void take(struct entry *e, void *out)
{
    copy(e, out);
    e->how = 0;
}

bool table_take(struct table *t, uint64_t key, enum space space, struct entry *out) { return change(t, key, space, take, out, false); }

static void exchange(struct entry *e, void *pair)
{
    struct entry *both = pair;
    both[1] = *e;
    *e = both[0];
}

bool table_put(struct table *t, const struct entry *e, struct entry *old)
{
    struct entry both[2] = {*e, {.how = 0}};
    bool ok = change(t, e->key, e->space, exchange, both, true);
    if (old)
        *old = both[1];
    return ok;
}

int table_pick(struct table *t, bool (*pick)(const struct entry *, void *), void *arg, struct entry *out, int room)
{
    int got = 0;
    for (int n = 0; n < SHARDS && got < room; n++) {
        struct shard *s = &t->shards[n];
        spin_lock(&s->lock);
        for (uint64_t i = 0; s->bits && i < (uint64_t)1 << s->bits && got < room;)
            if (s->entries[i].how && pick(&s->entries[i], arg)) {
                if (out) {
                    out[got] = s->entries[i];
                    drop(s, &s->entries[i]); /* another entry may have moved there, so i stays */
                }
                got++;
            } else {
                i++;
            }
        spin_unlock(&s->lock);
    }
    return got;
}
