/* SPDX-License-Identifier: Apache-2.0 */

/* What this process holds: a hash table from a driver's address or handle to what was charged for
 * it. It is divided into shards with open addressing, each with its own lock. So a look-up costs
 * the same with one entry as with a hundred thousand, and threads seldom wait for each other.
 *
 * A forked child does not have this memory. It begins with an empty table, as it begins without
 * allocations. */
#ifndef CAP_TABLE_H
#define CAP_TABLE_H

#include "sys.h"

#define BLOCK ((uint64_t)2 << 20)

/* A space tells keys apart that are the same number: an address and a handle, or handles of two
 * kinds. */
enum space { SPACE_ADDRESS = 1, SPACE_BLOCK, SPACE_CONTEXT, SPACE_ARRAY, SPACE_MIPMAP, SPACE_HANDLE, SPACE_MAP, SPACE_EXEC, SPACE_POOLED, SPACE_PLACE, SPACE_EXPORT, SPACE_LIMIT, SPACE_MODULE, SPACE_NUMBER, SPACE_POOL };

struct entry {
    uint64_t key;
    uint64_t bytes;
    uint64_t owner; /* the context's number; some spaces use it otherwise */
    uint16_t space;
    uint16_t how; /* enum how; 0 is no entry */
    int32_t device;
};

struct shard {
    uint32_t lock;
    uint32_t bits; /* log2 of the capacity; 0: none yet */
    uint64_t used; /* number of entries */
    struct entry *entries;
    uint64_t gap[5];
};

enum { SHARD_BITS = 6, SHARDS = 1 << SHARD_BITS };

struct table {
    struct shard shards[SHARDS];
    struct entry *first; /* the first entries of all shards; NULL: none yet */
};

/* table_put adds an entry. If there is one with that key, table_put replaces it and copies the old
 * one to *old. If there is none, it sets old->how to 0. old may be NULL. False: no memory. */
bool table_put(struct table *t, const struct entry *e, struct entry *old);

/* table_get returns a copy of an entry. table_take also removes the entry. False: there is none. */
bool table_get(struct table *t, uint64_t key, enum space space, struct entry *out);
bool table_take(struct table *t, uint64_t key, enum space space, struct entry *out);

/* table_edit calls edit with the entry of a key, under the shard's lock. If there is no such entry,
 * edit gets a blank one, whose how is 0. If edit sets how, the entry is made. If it sets how to 0,
 * the entry is removed. False: no memory for an entry, and edit was not called. */
bool table_edit(struct table *t, uint64_t key, enum space space, void (*edit)(struct entry *, void *), void *arg);

/* table_change is table_edit for an existing entry. False: there is none. */
bool table_change(struct table *t, uint64_t key, enum space space, void (*edit)(struct entry *, void *), void *arg);

/* table_pick removes up to room entries that pick accepts, copies them to out, and returns their
 * number. If that is less than room, no such entry is left. Locks are held only while pick is
 * called, so the caller may use the table afterwards. If out is NULL, nothing is removed. */
int table_pick(struct table *t, bool (*pick)(const struct entry *, void *), void *arg, struct entry *out, int room);

/* table_any reports whether pick accepts any entry. */
static inline bool table_any(struct table *t, bool (*pick)(const struct entry *, void *), void *arg) { return table_pick(t, pick, arg, NULL, 1); }

#endif
