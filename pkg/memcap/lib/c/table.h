/* SPDX-License-Identifier: Apache-2.0 */

/* What this process holds: a hash table from a driver's address or handle to
 * what was charged for it. It is cut into shards, each with a lock of its own
 * and in open addressing, so that a look-up costs the same with one entry as
 * with a hundred thousand and threads seldom meet.
 *
 * It lies in memory of its own that a forked child does not have: a child
 * begins with an empty table, as it begins with no allocation. */
#ifndef CAP_TABLE_H
#define CAP_TABLE_H

#include "sys.h"

#define BLOCK ((uint64_t)2 << 20)

/* Addresses and the several kinds of handles may be the same number. */
enum space { SPACE_ADDRESS = 1, SPACE_BLOCK, SPACE_CONTEXT, SPACE_ARRAY, SPACE_MIPMAP, SPACE_HANDLE, SPACE_MAP, SPACE_EXEC, SPACE_POOLED, SPACE_PLACE, SPACE_EXPORT, SPACE_LIMIT, SPACE_MODULE };

struct entry {
    uint64_t key;
    uint64_t bytes;
    uint64_t owner; /* context's number, or what the space makes of it */
    uint16_t space;
    uint16_t how; /* enum how; 0 is no entry */
    int32_t device;
};

struct shard {
    uint32_t lock;
    uint32_t bits; /* log2 of the room; 0: none yet */
    uint64_t used;
    struct entry *entries;
    uint64_t gap[5];
};

enum { SHARD_BITS = 6, SHARDS = 1 << SHARD_BITS };

struct table {
    struct shard shards[SHARDS];
    struct entry *first; /* room for all of them to begin with; NULL: none yet */
};

/* table_put adds an entry, or takes the place of the one with its key, which
 * it then returns in *old (else old->how is 0). False: no memory. */
bool table_put(struct table *t, const struct entry *e, struct entry *old);

/* table_take removes an entry and returns it. */
bool table_take(struct table *t, uint64_t key, enum space space, struct entry *out);

/* table_edit calls edit under the shard's lock with the entry of that key; its
 * how is 0 where there is none, and setting it makes one. Setting it to 0
 * removes the entry. False: no memory for one, and edit was not called. */
bool table_edit(struct table *t, uint64_t key, enum space space, void (*edit)(struct entry *, void *), void *arg);

/* table_change is table_edit for an entry that is there; false: there is none. */
bool table_change(struct table *t, uint64_t key, enum space space, void (*edit)(struct entry *, void *), void *arg);

/* An address and its block are in the same shard, and change under one lock:
 * table_edit_then_put edits the one, and puts the other where first returns true;
 * else, or without memory, it returns false and puts nothing. table_take_then removes
 * the one, and edits the other where the one is of that how. */
bool table_edit_then_put(struct table *t, uint64_t key, enum space space, bool (*first)(struct entry *, void *), void *arg, const struct entry *e, struct entry *old);
bool table_take_then(struct table *t, uint64_t key, enum space space, struct entry *out, uint16_t how, uint64_t key2, enum space space2,
                     void (*edit)(struct entry *, void *), void *arg);

/* table_pick removes up to room entries that pick says yes to, and returns how
 * many; fewer than room: there are no more. Nothing is called back with a lock
 * held but pick, so what follows may use the table. */
int table_pick(struct table *t, bool (*pick)(const struct entry *, void *), void *arg, struct entry *out, int room);

/* table_any says whether there is an entry that pick says yes to. */
bool table_any(struct table *t, bool (*pick)(const struct entry *, void *), void *arg);

#endif
