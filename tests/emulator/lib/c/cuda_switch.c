/* SPDX-License-Identifier: Apache-2.0 */

#include "cuda_switch.h"

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PIECE_MIB = 32, DOMAINS = 2, GREEN_MIB = 6 };

struct switches switches = {.piece_mib = PIECE_MIB, .domains = DOMAINS, .green_mib = GREEN_MIB};

/* A switch is a number from least to most, or one of some words. */
static const struct name {
    const char *name;
    size_t at;
    long least, most;
    const char *words[5]; /* and a NULL */
} names[] = {
#define NUMBER(name, field, least, most) {name, offsetof(struct switches, field), least, most, {0}}
#define WORDS(name, field, ...) {name, offsetof(struct switches, field), 0, 0, {__VA_ARGS__}}
    NUMBER("version", version, 2000, 99990),
    NUMBER("kernel-us", kernel_us, 0, 60000000),
    NUMBER("map-us", map_us, 0, 1000000),
    NUMBER("piece-mib", piece_mib, 2, 65536),
    WORDS("holes", holes, "fit", "remap"),
    WORDS("large", large, "pieces", "blocks"),
    WORDS("reuse", reuse, "documented", "eager"),
    WORDS("opportunistic", opportunistic, "documented", "lazy"),
    WORDS("follow", follow, "all", "direct"),
    WORDS("trim", trim, "observed", "passed"),
    WORDS("shrink", shrink, "synchronize", "never"),
    WORDS("query", query, "nothing", "observes"),
    WORDS("used", used, "live", "pending"),
    WORDS("ipc-pools", ipc_pools, "shrink", "kept"),
    WORDS("pool-max", pool_max, "piece", "exact", "refuses", "ignored"),
    NUMBER("domains", domains, 1, 8),
    NUMBER("green-mib", green_mib, 0, 65536),
    WORDS("loading", loading, "environment", "lazy", "eager"),
    WORDS("heap", heap, "use", "launch", "set"),
    WORDS("managed-create", managed_create, "refused", "made"),
    WORDS("pool-memory", pool_memory, "device", "context"),
    WORDS("graphs", graphs, "distinct", "ordered"),
#undef NUMBER
#undef WORDS
};

/* strict is the combination that is hardest for who holds a program to an amount:
 * work is still under way when its memory is freed, a pool grows wherever it may,
 * and gives back as little as it may. */
static const char strict[] = "kernel-us=200,holes=fit,large=pieces,reuse=documented,opportunistic=lazy,follow=direct,"
                             "trim=observed,shrink=never,query=nothing,used=live,ipc-pools=kept,pool-max=piece,pool-memory=device,graphs=distinct,"
                             "loading=lazy,heap=launch,managed-create=made";

static bool put(const struct name *n, const char *text)
{
    int *to = (int *)((char *)&switches + n->at);
    if (n->words[0]) {
        for (int i = 0; n->words[i]; i++)
            if (strcmp(n->words[i], text) == 0) {
                *to = i;
                return true;
            }
        return false;
    }
    char *end;
    long v = strtol(text, &end, 10);
    *to = (int)v;
    return *text && !*end && v >= n->least && v <= n->most;
}

static bool put_one(char *word)
{
    char *text = strchr(word, '=');
    if (text)
        *text++ = 0;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (text && strcmp(names[i].name, word) == 0) {
            if (put(&names[i], text))
                return true;
            fprintf(stderr, "emulated libcuda: GPU_EMULATOR_CUDA: %s cannot be \"%s\"\n", word, text);
            return false;
        }
    fprintf(stderr, "emulated libcuda: GPU_EMULATOR_CUDA: there is no switch \"%s\"%s\n", word, text ? "" : " without a value");
    return false;
}

static bool put_all(const char *list)
{
    char *copy = strdup(list), *rest = copy, *word;
    bool ok = copy;
    while (ok && (word = strsep(&rest, ",")))
        if (*word)
            ok = strcmp(word, "strict") == 0 ? put_all(strict) : put_one(word);
    free(copy);
    return ok;
}

bool switches_read(void)
{
    const char *list = getenv("GPU_EMULATOR_CUDA");
    switches = (struct switches){.piece_mib = PIECE_MIB, .domains = DOMAINS, .green_mib = GREEN_MIB};
    if (!list || !put_all(list))
        return !list;
    if (switches.piece_mib % 2 == 0)
        return true;
    fprintf(stderr, "emulated libcuda: GPU_EMULATOR_CUDA: piece-mib is a multiple of 2\n");
    return false;
}
