/* SPDX-License-Identifier: Apache-2.0 */

/* judge: the cap's library beside the real one that it stands in front of.
 *
 *   judge names CAP REAL        of each name of the standard input, whose it is
 *   judge addresses CAP REAL    the same questions to both, by cuGetProcAddress
 *   judge since CAP REAL        as of which version the real one has each name
 *
 * addresses reads "over NAME" for each override, then "ask NAME". It prints the
 * answers that differ, and how many questions there were. */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "alone.h"

static void *cap, *real;
static const char *cap_path;

static void *open_library(const char *path)
{
    void *l = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!l) {
        printf("FAILED: %s\n", dlerror());
        exit(1);
    }
    return l;
}

/* whose says where a function lies. */
static const char *whose(const void *f, const void *of_real)
{
    Dl_info info;
    if (!f)
        return "none";
    if (f == of_real)
        return "real";
    return dladdr(f, &info) && info.dli_fname && !strcmp(info.dli_fname, cap_path) ? "cap" : "other";
}

static int next_line(char *line, size_t size)
{
    if (!fgets(line, (int)size, stdin))
        return 0;
    line[strcspn(line, "\n")] = 0;
    return 1;
}

static int names(void)
{
    char line[256];
    while (next_line(line, sizeof line))
        printf("%s %s\n", line, whose(dlsym(cap, line), dlsym(real, line)));
    return 0;
}

struct override {
    void *real, *ours;
};
static struct override overrides[256];
static int count;

/* wanted is what the cap should answer where the driver answers with f: the
 * override of exactly that function. Two names of one function are one. */
static int as_wanted(void *f, void *got)
{
    int stands = 0;
    for (int i = 0; i < count; i++)
        if (overrides[i].real && overrides[i].real == f) {
            stands = 1;
            if (overrides[i].ours == got)
                return 1;
        }
    return !stands && f == got;
}

static const char *name_of(void *f)
{
    Dl_info info;
    return f && dladdr(f, &info) && info.dli_sname ? info.dli_sname : f ? "?" : "nothing";
}

/* Every version of CUDA, what lies beside some of them, and no version at all. */
static const int versions[] = {
    0, -1, 1000, 1999, 2000, 2010, 2020, 2030, 3000, 3010, 3019, 3020, 3021, 3999, 4000, 4010, 4020, 5000, 5050, 6000, 6050, 6999, 7000, 7050, 8000,
    9000, 9010, 9020, 10000, 10010, 10020, 11000, 11010, 11020, 11030, 11039, 11040, 11050, 11060, 11070, 11080, 12000, 12010, 12020, 12030,
    12040, 12050, 12060, 12070, 12080, 12090, 12999, 13000, 13010, 13020, 13030, 13040, 99000,
};
/* The default, the legacy stream, the per-thread one, both, and what is none. */
static const uint64_t flags[] = {0, 1, 2, 3, 4};

typedef int query(const char *, void **, int, uint64_t);
typedef int query2(const char *, void **, int, uint64_t, int *);

struct answer {
    int result, status;
    void *f;
};

static struct answer ask(void *library, const char *form, const char *name, int version, uint64_t flag)
{
    static void *const untouched = (void *)0x55;
    struct answer a = {-1, -1, untouched};
    void *f = dlsym(library, form);
    if (strlen(form) > strlen("cuGetProcAddress"))
        a.result = ((query2 *)f)(name, &a.f, version, flag, &a.status);
    else
        a.result = ((query *)f)(name, &a.f, version, flag);
    return a;
}

static int addresses(void)
{
    static const char *const forms[] = {"cuGetProcAddress", "cuGetProcAddress_v2"};
    char line[256];
    long questions = 0, found = 0, ours = 0, wrong = 0;
    while (next_line(line, sizeof line)) {
        if (!strncmp(line, "over ", 5)) {
            struct override *o = &overrides[count++];
            o->real = dlsym(real, line + 5);
            o->ours = dlsym(cap, line + 5);
            continue;
        }
        const char *name = line + 4;
        for (size_t i = 0; i < sizeof forms / sizeof *forms; i++) {
            if (!dlsym(real, forms[i]))
                continue;
            for (size_t v = 0; v < sizeof versions / sizeof *versions; v++)
                for (size_t k = 0; k < sizeof flags / sizeof *flags; k++) {
                    struct answer bare = ask(real, forms[i], name, versions[v], flags[k]);
                    struct answer held = ask(cap, forms[i], name, versions[v], flags[k]);
                    questions++;
                    found += bare.result == 0;
                    ours += bare.f != held.f;
                    if (bare.result == held.result && bare.status == held.status && as_wanted(bare.f, held.f))
                        continue;
                    if (++wrong <= 40)
                        printf("%s(%s, %d, %d): the driver says %d, status %d, %s; the cap %d, status %d, %s (%s)\n", forms[i], name,
                               versions[v], (int)flags[k], bare.result, bare.status, name_of(bare.f), held.result, held.status, name_of(held.f),
                               whose(held.f, bare.f));
                }
        }
    }
    printf("%ld questions, %ld found, %ld of the cap, %ld wrong\n", questions, found, ours, wrong);
    return 0;
}

/* since prints, of each name "SYMBOL BASE" that is read, the first version as of
 * which the driver answers BASE with SYMBOL, 0 if none. A name of the per-thread
 * default stream is had by its flag. */
static int since(void)
{
    char line[256];
    while (next_line(line, sizeof line)) {
        char *base = strchr(line, ' ');
        *base++ = 0;
        const char *form = dlsym(real, "cuGetProcAddress_v2") ? "cuGetProcAddress_v2" : "cuGetProcAddress";
        void *f = dlsym(real, line);
        size_t length = strlen(line);
        int first = 0, twin = length > 5 && (!strcmp(line + length - 5, "_ptsz") || !strcmp(line + length - 5, "_ptds"));
        for (int v = 2000; v <= 13000 && !first; v += 10) {
            struct answer a = ask(real, form, base, v, twin ? 2 : 0);
            if (a.result == 0 && a.f == f)
                first = v;
        }
        printf("%s %s %d\n", line, base, first);
    }
    return 0;
}

int main(int argc, char **argv)
{
    if (argc != 4)
        return 2;
    if (alone() != 0)
        return 1;
    cap_path = argv[2];
    cap = open_library(argv[2]);
    real = open_library(argv[3]);
    if (!strcmp(argv[1], "since"))
        return since();
    return !strcmp(argv[1], "names") ? names() : addresses();
}
