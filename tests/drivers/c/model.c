/* SPDX-License-Identifier: Apache-2.0 */

/* A model of a driver's library, by names.txt: it exports what a driver of that
 * version of CUDA does, and its cuGetProcAddress chooses as the real ones do. Each
 * function is another, and does nothing. model.h has a line for each:
 * FUNCTION(version, base, twin, symbol). WHOLE: where a form has a number of its
 * own, it is also given by its whole name. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define FUNCTION(version, base, twin, symbol) \
    int symbol(void) { return __LINE__ * 1000 + (version) % 997; }
#include "model.h"
#undef FUNCTION

static const struct row {
    int version;
    const char *base;
    int twin;
    const char *symbol;
    void *f;
} rows[] = {
#define FUNCTION(version, base, twin, symbol) {version, base, twin, #symbol, (void *)symbol},
#include "model.h"
};

int cuGetProcAddress(const char *symbol, void **f, int version, uint64_t flags);
int cuGetProcAddress_v2(const char *symbol, void **f, int version, uint64_t flags, int *status);

static uint32_t sums[sizeof rows / sizeof *rows][2]; /* of base and symbol: there are many questions */

static uint32_t sum_of(const char *s)
{
    uint32_t h = 5381;
    while (*s)
        h = h * 33 + (unsigned char)*s++;
    return h;
}

__attribute__((constructor)) static void sum_up(void)
{
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        sums[i][0] = sum_of(rows[i].base);
        sums[i][1] = sum_of(rows[i].symbol);
    }
}

static const struct row own[] = {
    {11030, "cuGetProcAddress", 0, "cuGetProcAddress", (void *)cuGetProcAddress},
    {12000, "cuGetProcAddress", 0, "cuGetProcAddress_v2", (void *)cuGetProcAddress_v2},
};

static void consider(const struct row *r, const char *symbol, int version, int twin, const struct row **best, int *known)
{
    int whole = WHOLE && !strcmp(r->symbol, symbol);
    if (!r->version || (strcmp(r->base, symbol) && !whole))
        return;
    *known = 1;
    if (r->version > version || (r->twin && !twin))
        return;
    if (!*best || r->twin > (*best)->twin || (r->twin == (*best)->twin && r->version >= (*best)->version))
        *best = r;
}

int cuGetProcAddress_v2(const char *symbol, void **f, int version, uint64_t flags, int *status)
{
    const struct row *best = NULL;
    int known = 0;
    if (flags > 2)
        return 1;
    uint32_t sum = sum_of(symbol);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (sums[i][0] == sum || sums[i][1] == sum)
            consider(&rows[i], symbol, version, flags == 2, &best, &known);
    for (size_t i = 0; i < sizeof own / sizeof *own; i++)
        consider(&own[i], symbol, version, 0, &best, &known);
    *f = best ? best->f : NULL;
    if (status)
        *status = best ? 0 : known ? 2 : 1;
    return best ? 0 : 500;
}

int cuGetProcAddress(const char *symbol, void **f, int version, uint64_t flags)
{
    return cuGetProcAddress_v2(symbol, f, version, flags, NULL);
}
