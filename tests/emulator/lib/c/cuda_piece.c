/* SPDX-License-Identifier: Apache-2.0 */

/* The memory of pools. A pool grows by pieces and hands out parts of them; a part
 * that is free can serve one that needs no more, so holes may be too small
 * (GPU_EMULATOR_CUDA=holes=fit), or the driver puts blocks of 2 MiB from anywhere
 * together (holes=remap): NVIDIA's documentation says only that pools "help reduce
 * overhead and prevent fragmentation" (Stream-Ordered Memory Allocator, Memory
 * Management). A part that was freed on a stream is not free before the stream has
 * come there; until then it serves those alone who come later.
 *
 *   "The allocator cannot release OS allocations that back outstanding
 *   asynchronous allocations. The OS allocations may happen at different
 *   granularity from the user allocations." (cuMemPoolTrimTo)
 *
 * So what a piece gives back is whole grains of it in which nothing is used. */
#include <stdlib.h>

#include "cuda_internal.h"

struct piece {
    uint64_t size, grain, shared; /* shared: the world's number for it, once something of it was exported */
    uint32_t segments; /* that are left of it */
};

struct segment {
    struct piece *piece;
    uint64_t offset, size;
    enum { FREE, USED, FREED } state;
    struct segment *left, *right; /* beside it in the piece */
    struct segment *next, *prev;  /* of a bin, or of the freed ones, oldest first */
    struct moment moment;         /* of a freed one */
};

enum { BINS = 32 + 8 * 58, WORDS = (BINS + 63) / 64 };

struct heap {
    struct amounts amounts;
    struct segment *freed, *last;
    uint64_t map[WORDS];
    struct segment *bins[BINS];
};

static struct segment *spare;

static struct segment *segment_new(void)
{
    struct segment *s = spare;
    if (s)
        spare = s->next;
    else
        s = malloc(sizeof *s);
    if (s)
        *s = (struct segment){0};
    return s;
}

/* segment_end ends one that is in no list. */
static void segment_end(struct segment *s)
{
    if (!--s->piece->segments) {
        let_go_later(s->piece->shared);
        free(s->piece);
    }
    s->next = spare;
    spare = s;
}

struct heap *heap_new(void)
{
    struct heap *h = calloc(1, sizeof *h);
    if (h)
        h->amounts.oldest = UINT64_MAX;
    return h;
}

struct amounts heap_amounts(const struct heap *h) { return h->amounts; }

/* The bin of a free part: exact below 32 units, then eight to a power of two. */
static int bin_of(uint64_t size)
{
    uint64_t units = size / UNIT;
    if (units < 32)
        return (int)units;
    int top = 63 - __builtin_clzll(units);
    return 32 + (top - 5) * 8 + (int)(units >> (top - 3) & 7);
}

static void link_first(struct segment **first, struct segment *s)
{
    s->prev = NULL;
    s->next = *first;
    if (s->next)
        s->next->prev = s;
    *first = s;
}

static void unlink_from(struct segment **first, struct segment *s)
{
    if (s->prev)
        s->prev->next = s->next;
    else
        *first = s->next;
    if (s->next)
        s->next->prev = s->prev;
    s->next = s->prev = NULL;
}

static void list_in(struct heap *h, struct segment *s)
{
    int b = bin_of(s->size);
    if (s->state == FREE) {
        link_first(&h->bins[b], s);
        h->map[b / 64] |= (uint64_t)1 << b % 64;
    }
    if (s->state != FREED)
        return;
    s->next = NULL;
    s->prev = h->last;
    if (h->last)
        h->last->next = s;
    else
        h->freed = s;
    h->last = s;
    h->amounts.freed += s->size;
    h->amounts.oldest = h->freed->moment.tick;
}

static void list_out(struct heap *h, struct segment *s)
{
    int b = bin_of(s->size);
    if (s->state == FREE) {
        unlink_from(&h->bins[b], s);
        if (!h->bins[b])
            h->map[b / 64] &= ~((uint64_t)1 << b % 64);
    }
    if (s->state != FREED)
        return;
    if (h->last == s)
        h->last = s->prev;
    unlink_from(&h->freed, s);
    h->amounts.freed -= s->size;
    h->amounts.oldest = h->freed ? h->freed->moment.tick : UINT64_MAX;
}

/* cut makes two neighbours of a segment, the left one of so many bytes. The right
 * one takes its state along, and its place in the list. */
static bool cut(struct heap *h, struct segment *s, uint64_t size)
{
    struct segment *rest = segment_new();
    if (!rest)
        return false;
    if (s->state == FREE)
        list_out(h, s);
    *rest = (struct segment){
        .piece = s->piece, .offset = s->offset + size, .size = s->size - size, .state = s->state,
        .left = s, .right = s->right, .moment = s->moment,
    };
    rest->piece->segments++;
    if (rest->right)
        rest->right->left = rest;
    s->right = rest;
    s->size = size;
    if (s->state == FREE) {
        list_in(h, s);
        list_in(h, rest);
    } else if (s->state == FREED) {
        rest->prev = s;
        rest->next = s->next;
        if (rest->next)
            rest->next->prev = rest;
        else
            h->last = rest;
        s->next = rest;
    }
    return true;
}

/* join makes one of two neighbours that are in no list. */
static void join(struct segment *s, struct segment *right)
{
    s->size += right->size;
    s->right = right->right;
    if (s->right)
        s->right->left = s;
    segment_end(right);
}

/* set_free makes what is in no list free, with its neighbours. */
static void set_free(struct heap *h, struct segment *s)
{
    s->state = FREE;
    if (s->right && s->right->state == FREE) {
        list_out(h, s->right);
        join(s, s->right);
    }
    if (s->left && s->left->state == FREE) {
        struct segment *left = s->left;
        list_out(h, left);
        join(left, s);
        s = left;
    }
    list_in(h, s);
}

bool heap_add(struct heap *h, uint64_t size, uint64_t grain)
{
    struct segment *s = segment_new();
    struct piece *p = s ? malloc(sizeof *p) : NULL;
    if (!p) {
        if (s) {
            s->next = spare;
            spare = s;
        }
        return false;
    }
    *p = (struct piece){.size = size, .grain = grain, .segments = 1};
    s->piece = p;
    s->size = size;
    list_in(h, s);
    h->amounts.reserved += size;
    return true;
}

/* --- taking ---------------------------------------------------------------- */

static struct segment *find_free(struct heap *h, uint64_t size)
{
    int b = bin_of(size), sure = b + (b >= 32);
    for (int i = sure; i < BINS; i = (i / 64 + 1) * 64) {
        uint64_t map = h->map[i / 64] >> i % 64;
        if (map)
            return h->bins[i + __builtin_ctzll(map)];
    }
    for (struct segment *s = h->bins[b]; s; s = s->next)
        if (s->size >= size)
            return s;
    return NULL;
}

static bool open_to(const struct segment *s, usable *may, void *arg)
{
    return s->state == FREE || (s->state == FREED && may(&s->moment, arg));
}

/* find_run is the first of neighbours that are enough together. */
static struct segment *find_run(struct heap *h, uint64_t size, usable *may, void *arg)
{
    if (!may || !h->freed)
        return find_free(h, size);
    struct segment *hole = find_free(h, size);
    for (struct segment *s = hole ? NULL : h->last; s; s = s->prev) {
        if (!may(&s->moment, arg))
            continue;
        struct segment *first = s;
        while (first->left && open_to(first->left, may, arg))
            first = first->left;
        uint64_t sum = 0;
        for (struct segment *n = first; n && open_to(n, may, arg) && sum < size; n = n->right)
            sum += n->size;
        if (sum >= size)
            return first;
    }
    return hole;
}

/* use makes a segment a used one; `at` is when the last of what it was is over. */
static struct segment *use(struct heap *h, struct segment *s, uint64_t at)
{
    s->state = USED;
    s->moment = (struct moment){.at = at};
    h->amounts.live += s->size;
    return s;
}

static uint64_t over_at(const struct segment *s) { return s->state == FREED ? s->moment.at : 0; }

struct segment *heap_take(struct heap *h, uint64_t size, usable *may, void *arg)
{
    struct segment *s = find_run(h, size, may, arg);
    if (!s || (s->size > size && !cut(h, s, size)))
        return NULL;
    uint64_t at = over_at(s);
    list_out(h, s);
    s->state = USED; /* in no list */
    while (s->size < size) {
        uint64_t lacks = size - s->size;
        if (s->right->size > lacks && !cut(h, s->right, lacks)) {
            set_free(h, s);
            return NULL;
        }
        at = over_at(s->right) > at ? over_at(s->right) : at;
        list_out(h, s->right);
        join(s, s->right);
    }
    return use(h, s, at);
}

uint64_t segment_over(const struct segment *s) { return s->moment.at; }

void heap_free(struct heap *h, struct segment *s, const struct moment *m)
{
    h->amounts.live -= s->size;
    if (!m) {
        set_free(h, s);
        return;
    }
    s->state = FREED;
    s->moment = *m;
    list_in(h, s);
}

void heap_settle(struct heap *h, usable *may, void *arg)
{
    for (struct segment *s = h->freed, *next; s; s = next) {
        next = s->next;
        if (!may(&s->moment, arg))
            continue;
        list_out(h, s);
        set_free(h, s);
    }
}

/* --- giving back ----------------------------------------------------------- */

/* take_away ends a part of a free segment; what is left of it stays free. */
static bool take_away(struct heap *h, struct segment *s, uint64_t from, uint64_t size)
{
    if (from > s->offset) {
        if (!cut(h, s, from - s->offset))
            return false;
        s = s->right;
    }
    if (s->size > size && !cut(h, s, size))
        return false;
    list_out(h, s);
    if (s->left)
        s->left->right = NULL;
    if (s->right)
        s->right->left = NULL;
    segment_end(s);
    return true;
}

/* whole is the part of a segment that is whole grains: it returns how many, from
 * an offset. */
static uint64_t whole(const struct segment *s, uint64_t grain, uint64_t *from)
{
    if (s->piece->shared) /* as a whole, with its pool */
        return 0;
    *from = round_up(s->offset, grain);
    uint64_t to = (s->offset + s->size) / grain * grain;
    return to > *from ? (to - *from) / grain : 0;
}

uint64_t segment_shared(const struct segment *s, uint64_t *size)
{
    *size = s->piece->size;
    return s->piece->shared;
}

void segment_share(struct heap *h, struct segment *s, uint64_t id)
{
    s->piece->shared = id;
    h->amounts.shared += s->piece->size;
}

uint64_t heap_shrink(struct heap *h, uint64_t keep)
{
    uint64_t before = h->amounts.reserved;
    for (int b = BINS - 1; b >= bin_of(BLOCK) && h->amounts.reserved > keep; b--)
        for (struct segment *s = h->bins[b], *next; s; s = next) {
            uint64_t from, grain = s->piece->grain, may = (h->amounts.reserved - keep) / grain, is = whole(s, grain, &from);
            next = s->next;
            if (is < may)
                may = is;
            if (may && take_away(h, s, from + (is - may) * grain, may * grain))
                h->amounts.reserved -= may * grain;
            if (h->amounts.reserved <= keep)
                break;
        }
    return before - h->amounts.reserved;
}

/* blocks takes whole blocks out of a segment, and returns how many bytes. */
static uint64_t blocks(struct heap *h, struct segment *s, uint64_t most)
{
    uint64_t from, is = whole(s, BLOCK, &from) * BLOCK;
    is = is < most ? is : most;
    return is && take_away(h, s, from, is) ? is : 0;
}

/* open_blocks is how much can be put together of whole blocks. */
static uint64_t open_blocks(const struct heap *h, usable *may, void *arg)
{
    uint64_t sum = 0, from;
    for (struct segment *s = h->freed; s; s = s->next)
        sum += may(&s->moment, arg) ? whole(s, BLOCK, &from) * BLOCK : 0;
    for (int b = bin_of(BLOCK); b < BINS; b++)
        for (struct segment *s = h->bins[b]; s; s = s->next)
            sum += whole(s, BLOCK, &from) * BLOCK;
    return sum;
}

bool heap_fits(struct heap *h, uint64_t size, usable *may, void *arg, bool remap)
{
    return find_run(h, size, may, arg) || (remap && open_blocks(h, may, arg) >= round_up(size, BLOCK));
}

struct segment *heap_remap(struct heap *h, uint64_t size, usable *may, void *arg)
{
    uint64_t want = round_up(size, BLOCK), got = 0, at = 0;
    if (open_blocks(h, may, arg) < want)
        return NULL;
    for (int b = BINS - 1; b >= bin_of(BLOCK); b--)
        for (struct segment *s = h->bins[b], *next; s && got < want; s = next) {
            next = s->next;
            got += blocks(h, s, want - got);
        }
    for (struct segment *s = h->freed, *next; s && got < want; s = next) {
        next = s->next;
        if (!may(&s->moment, arg))
            continue;
        at = s->moment.at > at ? s->moment.at : at;
        got += blocks(h, s, want - got);
    }
    h->amounts.reserved -= got;
    if (!got || !heap_add(h, got, BLOCK))
        return NULL;
    struct segment *s = heap_take(h, size, NULL, NULL);
    if (s && s->moment.at < at)
        s->moment.at = at;
    return s;
}

void heap_end(struct heap *h)
{
    while (h->freed) {
        struct segment *s = h->freed;
        list_out(h, s);
        segment_end(s);
    }
    for (int b = 0; b < BINS; b++)
        while (h->bins[b]) {
            struct segment *s = h->bins[b];
            list_out(h, s);
            segment_end(s);
        }
    free(h);
}
