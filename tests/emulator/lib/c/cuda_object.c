/* SPDX-License-Identifier: Apache-2.0 */

/* Handles: places in one array, so that what is none is known for what it is. */
#define _GNU_SOURCE
#include <string.h>
#include <sys/mman.h>

#include "cuda_internal.h"

struct slot {
    enum type type; /* 0 is free */
    uint32_t next;  /* free slot, as its number and one */
    _Alignas(16) char room[OBJECT_ROOM];
};
_Static_assert(sizeof(struct slot) == 256, "a slot is a power of two");

enum { SLOTS = 1 << 20 };
/* Guarded by the lock, like the objects. The oldest free slot is taken first, so
 * that an old handle stays dead for long. */
static struct slot *slots;
static uint32_t used, first, last;

bool objects_begin(void)
{
    void *p = mmap(NULL, sizeof *slots * SLOTS, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED)
        return false;
    slots = p;
    return true;
}

void *object_new(enum type type)
{
    struct slot *s;
    if (used < 4096 || (!first && used < SLOTS)) {
        s = &slots[used++];
    } else if (first) {
        s = &slots[first - 1];
        first = s->next;
        if (!first)
            last = 0;
    } else {
        return NULL;
    }
    memset(s, 0, sizeof *s);
    s->type = type;
    return s->room;
}

static struct slot *slot_of(const void *handle)
{
    uintptr_t at = (uintptr_t)handle - offsetof(struct slot, room) - (uintptr_t)slots;
    return at < sizeof *slots * (uintptr_t)used && at % sizeof *slots == 0 ? &slots[at / sizeof *slots] : NULL;
}

void *object_get(const void *handle, enum type type)
{
    struct slot *s = slot_of(handle);
    return s && s->type == type ? s->room : NULL;
}

void object_free(void *object)
{
    struct slot *s = slot_of(object);
    uint32_t number = (uint32_t)(s - slots) + 1;
    s->type = 0;
    s->next = 0;
    if (last)
        slots[last - 1].next = number;
    else
        first = number;
    last = number;
}

void object_each(enum type type, bool (*visit)(void *, void *), void *arg)
{
    for (uint32_t i = 0; i < used; i++)
        if (slots[i].type == type && !visit(slots[i].room, arg))
            return;
}
