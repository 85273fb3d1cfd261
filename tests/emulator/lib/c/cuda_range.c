/* SPDX-License-Identifier: Apache-2.0 */

/* The address space. A range of up to 2^(21+k) bytes has one slot of that size
 * in region k, so that a range is found from any address inside it without a
 * search, and taking and giving one costs the same however many there are.
 *
 * Ranges below 2 MiB share blocks of 2 MiB, as on hardware. What is free in the
 * blocks of a device lies in bins by size; a part is cut from a free one of the
 * right bin and grows together with its neighbours when it is given back. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "cuda_internal.h"

enum { REGIONS = 20, FIRST_SHIFT = 21, REGION_SHIFT = 42, BLOCK_UNITS = 4096, BINS = 96 };
#define BASE ((uint64_t)2 << 40)

struct region {
    struct range **slots;
    uint32_t *spare; /* slots that were given back */
    uint32_t used, room, spares, spare_room;
};
static struct region regions[REGIONS];
static struct range *host_ranges; /* linked by left and right */

/* Below 4 GiB, by the page. */
enum { LOW_PAGES = 1792 };
#define LOW_BASE ((uint64_t)0x10000000)
static struct range *low[LOW_PAGES];

struct block {
    struct range range;
    struct range *starts[BLOCK_UNITS]; /* the part that begins at a unit */
};

static struct range *spare_ranges;
static struct block *spare_block; /* a program that allocates and frees one thing takes it each time */

static struct range *range_new(enum kind kind, int device, struct context *ctx, uint64_t size)
{
    struct range *r = spare_ranges;
    if (r) {
        spare_ranges = r->next;
    } else {
        enum { MANY = 256 };
        r = malloc(sizeof *r * MANY);
        if (!r)
            return NULL;
        for (int i = 1; i < MANY; i++) {
            r[i].next = spare_ranges;
            spare_ranges = &r[i];
        }
    }
    *r = (struct range){.kind = kind, .device = device, .ctx = ctx, .size = size};
    if (ctx) {
        r->next = ctx->ranges;
        if (r->next)
            r->next->prev = r;
        ctx->ranges = r;
    }
    return r;
}

static void range_end(struct range *r)
{
    if (r->prev)
        r->prev->next = r->next;
    else if (r->ctx && r->ctx->ranges == r)
        r->ctx->ranges = r->next;
    if (r->next)
        r->next->prev = r->prev;
    r->next = spare_ranges;
    spare_ranges = r;
}

static int region_for(uint64_t size)
{
    int k = 0;
    while (k < REGIONS && (uint64_t)1 << (FIRST_SHIFT + k) < size)
        k++;
    return k;
}

static bool grow(void **list, uint32_t *room, size_t each)
{
    uint32_t more = *room ? *room * 2 : 64;
    void *p = realloc(*list, more * each);
    if (!p)
        return false;
    *list = p;
    *room = more;
    return true;
}

static bool place(struct range *r)
{
    int k = region_for(r->size);
    if (k == REGIONS)
        return false;
    struct region *g = &regions[k];
    uint32_t slot;
    if (g->spares) {
        slot = g->spare[--g->spares];
    } else {
        if ((uint64_t)g->used << (FIRST_SHIFT + k) >> REGION_SHIFT)
            return false;
        if (g->used == g->room && !grow((void **)&g->slots, &g->room, sizeof *g->slots))
            return false;
        slot = g->used++;
    }
    g->slots[slot] = r;
    r->at = BASE + ((uint64_t)k << REGION_SHIFT) + ((uint64_t)slot << (FIRST_SHIFT + k));
    return true;
}

static struct range **slot_of(uint64_t at, int *k)
{
    uint64_t offset = at - BASE;
    *k = (int)(offset >> REGION_SHIFT);
    if (at < BASE || *k >= REGIONS)
        return NULL;
    uint64_t slot = (offset & (((uint64_t)1 << REGION_SHIFT) - 1)) >> (FIRST_SHIFT + *k);
    return slot < regions[*k].used ? &regions[*k].slots[slot] : NULL;
}

static void unplace(struct range *r)
{
    int k;
    struct range **slot = slot_of(r->at, &k);
    struct region *g = &regions[k];
    *slot = NULL;
    if (g->spares == g->spare_room && !grow((void **)&g->spare, &g->spare_room, sizeof *g->spare))
        return; /* the slot is not used again */
    g->spare[g->spares++] = (uint32_t)(slot - g->slots);
}

struct range *range_take(enum kind kind, int device, struct context *ctx, uint64_t size)
{
    struct range *r = range_new(kind, device, ctx, size);
    if (r && !place(r)) {
        range_end(r);
        return NULL;
    }
    return r;
}

struct range *range_hidden(int device, struct context *ctx, uint64_t size) { return range_new(RANGE_HIDDEN, device, ctx, size); }

struct range *range_low(enum kind kind, int device, struct context *ctx, uint64_t size)
{
    uint32_t pages = (uint32_t)(round_up(size, BLOCK) / BLOCK), run = 0;
    for (uint32_t i = 0; i < LOW_PAGES; i++) {
        run = low[i] ? 0 : run + 1;
        if (run < pages)
            continue;
        struct range *r = range_new(kind, device, ctx, size);
        if (!r)
            return NULL;
        for (uint32_t j = i + 1 - pages; j <= i; j++)
            low[j] = r;
        r->at = LOW_BASE + (i + 1 - pages) * BLOCK;
        return r;
    }
    return NULL;
}

struct range *range_adopt(enum kind kind, int device, struct context *ctx, uint64_t at, uint64_t size)
{
    struct range *r = range_new(kind, device, ctx, size);
    if (!r)
        return NULL;
    r->at = at;
    r->right = host_ranges;
    if (host_ranges)
        host_ranges->left = r;
    host_ranges = r;
    return r;
}

/* --- parts of blocks ------------------------------------------------------- */

/* The bin of a free part: exact below 32 units, then eight to a power of two. */
static int bin_of(uint32_t units)
{
    if (units < 32)
        return (int)units;
    int top = 31 - __builtin_clz(units);
    return 32 + (top - 5) * 8 + (int)(units >> (top - 3) & 7);
}

static void bin_in(struct range *r)
{
    struct device *d = &devices[r->device];
    int b = bin_of(r->units);
    r->kind = RANGE_FREE;
    r->ctx = NULL;
    r->prev = NULL;
    r->next = d->bins[b];
    if (r->next)
        r->next->prev = r;
    d->bins[b] = r;
    d->bins_map[b / 64] |= (uint64_t)1 << b % 64;
}

static void bin_out(struct range *r)
{
    struct device *d = &devices[r->device];
    int b = bin_of(r->units);
    if (r->prev)
        r->prev->next = r->next;
    else
        d->bins[b] = r->next;
    if (r->next)
        r->next->prev = r->prev;
    if (!d->bins[b])
        d->bins_map[b / 64] &= ~((uint64_t)1 << b % 64);
    r->next = r->prev = NULL;
}

static struct range *part(struct block *b, uint32_t unit, uint32_t units)
{
    struct range *r = range_new(RANGE_FREE, b->range.device, NULL, 0);
    if (r) {
        r->owner = b;
        r->unit = unit;
        r->units = units;
        b->starts[unit] = r;
    }
    return r;
}

bool range_add_block(int device)
{
    struct block *b = spare_block ? spare_block : calloc(1, sizeof *b);
    if (!b)
        return false;
    spare_block = NULL;
    b->range = (struct range){.kind = RANGE_BLOCK, .device = device, .size = BLOCK};
    struct range *whole = part(b, 0, BLOCK_UNITS);
    if (!whole || !place(&b->range)) {
        free(b);
        return false;
    }
    bin_in(whole);
    return true;
}

/* A free part of at least so many units: the first of the bins whose parts are
 * all large enough, or one of the bin before, which has some that are. */
static struct range *find_part(struct device *d, uint32_t units)
{
    int b = bin_of(units), sure = bin_of(units) + (units >= 32);
    for (int i = sure; i < BINS; i = (i / 64 + 1) * 64) {
        uint64_t map = d->bins_map[i / 64] >> i % 64;
        if (map)
            return d->bins[i + __builtin_ctzll(map)];
    }
    int tries = 16;
    for (struct range *r = d->bins[b]; r && tries > 0; r = r->next, tries--)
        if (r->units >= units)
            return r;
    return NULL;
}

bool range_fits_small(int device, uint64_t size) { return find_part(&devices[device], (uint32_t)(round_up(size, UNIT) / UNIT)); }

struct range *range_small(int device, struct context *ctx, uint64_t size)
{
    uint32_t units = (uint32_t)(round_up(size, UNIT) / UNIT);
    struct range *r = find_part(&devices[device], units);
    if (!r)
        return NULL;
    struct block *b = r->owner;
    bin_out(r);
    if (r->units > units) {
        struct range *rest = part(b, r->unit + units, r->units - units);
        if (!rest) {
            bin_in(r);
            return NULL;
        }
        rest->left = r;
        rest->right = r->right;
        if (rest->right)
            rest->right->left = rest;
        r->right = rest;
        r->units = units;
        bin_in(rest);
    }
    r->kind = RANGE_DEVICE;
    r->at = b->range.at + (uint64_t)r->unit * UNIT;
    r->size = size;
    r->shared = 0; /* that was the identity of who had it before */
    r->ctx = ctx;
    r->next = ctx->ranges;
    if (r->next)
        r->next->prev = r;
    ctx->ranges = r;
    return r;
}

/* join makes one part of two neighbours, the right one of which ends. */
static void join(struct block *b, struct range *r, struct range *right)
{
    r->units += right->units;
    r->right = right->right;
    if (r->right)
        r->right->left = r;
    b->starts[right->unit] = NULL;
    right->next = right->prev = NULL;
    right->ctx = NULL;
    range_end(right);
}

static uint64_t give_part(struct range *r)
{
    struct block *b = r->owner;
    if (r->prev)
        r->prev->next = r->next;
    else
        r->ctx->ranges = r->next;
    if (r->next)
        r->next->prev = r->prev;
    r->next = r->prev = NULL;
    r->ctx = NULL;
    if (r->right && r->right->kind == RANGE_FREE) {
        bin_out(r->right);
        join(b, r, r->right);
    }
    if (r->left && r->left->kind == RANGE_FREE) {
        struct range *left = r->left;
        bin_out(left);
        join(b, left, r);
        r = left;
    }
    if (r->units < BLOCK_UNITS) {
        bin_in(r);
        return 0;
    }
    b->starts[0] = NULL;
    range_end(r);
    unplace(&b->range);
    free(spare_block);
    spare_block = b;
    return BLOCK;
}

/* --- finding and giving back ----------------------------------------------- */

struct range *range_around(uint64_t at)
{
    if (at - LOW_BASE < LOW_PAGES * BLOCK) {
        struct range *r = low[(at - LOW_BASE) / BLOCK];
        return r && at - r->at < r->size ? r : NULL;
    }
    int k;
    struct range **slot = slot_of(at, &k), *r;
    if (slot) {
        r = *slot;
        if (r && r->kind == RANGE_BLOCK) {
            struct block *b = (struct block *)r;
            uint32_t unit = (uint32_t)((at - r->at) / UNIT);
            while (!b->starts[unit])
                unit--;
            r = b->starts[unit]->kind == RANGE_FREE ? NULL : b->starts[unit];
        }
        return r && at - r->at < r->size ? r : NULL;
    }
    for (r = host_ranges; r; r = r->right)
        if (at - r->at < r->size)
            return r;
    return NULL;
}

struct range *range_at(uint64_t at)
{
    int k;
    struct range **slot = slot_of(at, &k);
    if (slot && *slot && (*slot)->kind == RANGE_BLOCK) {
        struct range *r = at % UNIT ? NULL : ((struct block *)*slot)->starts[(at - (*slot)->at) / UNIT];
        return r && r->kind != RANGE_FREE ? r : NULL;
    }
    struct range *r = range_around(at);
    return r && r->at == at ? r : NULL;
}

uint64_t range_give(struct range *r)
{
    uint64_t charged = r->charged;
    int k;
    if (r->units)
        return give_part(r);
    if (r->kind == RANGE_MANAGED || r->kind == RANGE_HOST) {
        if (r->left)
            r->left->right = r->right;
        else
            host_ranges = r->right;
        if (r->right)
            r->right->left = r->left;
        if (!r->owner) /* not the program's own */
            munmap((void *)(uintptr_t)r->at, r->size);
    } else if (r->kind != RANGE_HIDDEN) {
        if (slot_of(r->at, &k)) {
            unplace(r);
        } else {
            for (uint64_t i = (r->at - LOW_BASE) / BLOCK; i < LOW_PAGES && low[i] == r; i++)
                low[i] = NULL;
        }
    }
    range_end(r);
    return charged;
}

CUresult drop_unlock(const char *call, struct range *r)
{
    struct device *d = &devices[r->device];
    uint64_t shared = r->shared, own = r->charged, bytes = range_give(r);
    unlock();
    if (shared) { /* what it was charged is the world's, until the last holder lets go */
        close_shared(shared);
        bytes -= own;
    }
    return charge(call, d, -(int64_t)bytes);
}
