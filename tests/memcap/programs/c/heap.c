/* SPDX-License-Identifier: Apache-2.0 */

#define _GNU_SOURCE
#include <stdlib.h>

#include "programs.h"

static void *zeroed(size_t size)
{
    void *p = calloc(1, size);
    if (!p)
        abort();
    return p;
}

static void set_free(struct heap *h, struct block *b)
{
    b->used = 0;
    b->last_free = NULL;
    b->next_free = h->free;
    if (h->free)
        h->free->last_free = b;
    h->free = b;
}

static void set_used(struct heap *h, struct block *b)
{
    if (b->last_free)
        b->last_free->next_free = b->next_free;
    else
        h->free = b->next_free;
    if (b->next_free)
        b->next_free->last_free = b->last_free;
    b->used = 1;
}

struct block *heap_add(struct heap *h, uint64_t at, uint64_t size, int lane, int mapped)
{
    struct segment *s = zeroed(sizeof *s);
    struct block *b = zeroed(sizeof *b);
    *s = (struct segment){.at = at, .size = size, .heap = h, .first = b, .next = h->segments};
    *b = (struct block){.at = at, .size = size, .lane = lane, .mapped = mapped, .segment = s};
    h->segments = s;
    h->held += size;
    set_free(h, b);
    return b;
}

struct block *heap_find(struct heap *h, uint64_t size, int lane)
{
    struct block *best = NULL;
    for (struct block *b = h->free; b; b = b->next_free)
        if (b->mapped && b->size >= size && (lane < 0 || b->lane == lane) &&
            (!best || b->size < best->size || (b->size == best->size && b->at < best->at)))
            best = b;
    return best;
}

struct block *split_at(struct heap *h, struct block *b, uint64_t offset)
{
    struct block *rest = zeroed(sizeof *rest);
    *rest = (struct block){.at = b->at + offset, .size = b->size - offset, .lane = b->lane, .mapped = b->mapped, .used = b->used,
                           .event = b->event, .before = b, .after = b->after, .segment = b->segment};
    if (b->after)
        b->after->before = rest;
    b->after = rest;
    b->size = offset;
    if (!rest->used)
        set_free(h, rest);
    return rest;
}

struct block *heap_cut(struct heap *h, struct block *b, uint64_t size, uint64_t rest)
{
    if (b->size - size >= rest && b->size > size)
        split_at(h, b, size);
    set_used(h, b);
    return b;
}

void join(struct heap *h, struct block *b)
{
    struct block *gone = b->after;
    if (!gone->used)
        set_used(h, gone);
    b->size += gone->size;
    b->after = gone->after;
    if (gone->after)
        gone->after->before = b;
    free(gone);
}

/* Blocks that must be waited for in different ways stay apart. */
static int alike(const struct block *a, const struct block *b)
{
    return !a->used && !b->used && a->mapped == b->mapped && a->lane == b->lane && a->event == b->event;
}

struct block *heap_give(struct heap *h, struct block *b)
{
    set_free(h, b);
    if (b->after && alike(b, b->after))
        join(h, b);
    if (b->before && alike(b->before, b)) {
        b = b->before;
        join(h, b);
    }
    return b;
}

int wholly_free(const struct segment *s)
{
    for (const struct block *b = s->first; b; b = b->after)
        if (b->used)
            return 0;
    return 1;
}

void heap_drop(struct heap *h, struct segment *s)
{
    struct segment **at = &h->segments;
    while (*at != s)
        at = &(*at)->next;
    *at = s->next;
    h->held -= s->size;
    for (struct block *b = s->first, *after; b; b = after) {
        after = b->after;
        if (!b->used)
            set_used(h, b);
        free(b);
    }
    free(s);
}
