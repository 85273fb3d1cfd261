/* SPDX-License-Identifier: Apache-2.0 */

#define _GNU_SOURCE
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "scenario.h"

static const struct scenario *const themes[] = {pool_scenarios, graph_scenarios, refusal_scenarios, export_scenarios, limit_scenarios};

uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
}

void fail_scene(struct scene *s, const char *format, ...)
{
    va_list args;
    if (s->failure[0])
        return;
    va_start(args, format);
    vsnprintf(s->failure, sizeof s->failure, format, args);
    va_end(args);
    /* The answer is words with blanks between them. */
    for (char *p = s->failure; *p; p++)
        if (*p == ' ' || *p == '\n')
            *p = '_';
}

void note(struct scene *s, const char *key, uint64_t value)
{
    size_t used = strlen(s->notes);
    if (snprintf(s->notes + used, sizeof s->notes - used, " %s=%llu", key, (unsigned long long)value) >= (int)(sizeof s->notes - used))
        fail_scene(s, "no room for the note %s", key);
}

void ask_begins(struct scene *s) { s->began = now_ns(); }

int ask_ended(struct scene *s, const char *call, uint64_t bytes, CUresult r)
{
    uint64_t us = (now_ns() - s->began) / 1000;
    if (us > s->slowest_us)
        s->slowest_us = us;
    if (r == CUDA_ERROR_OUT_OF_MEMORY) {
        s->refused++;
        return 0;
    }
    if (r != CUDA_SUCCESS) {
        fail_scene(s, "%s: %d", call, r);
        return 0;
    }
    s->granted++;
    s->live += bytes;
    if (s->live > s->highest)
        s->highest = s->live;
    return 1;
}

int must_be(struct scene *s, const char *call, CUresult r)
{
    if (r != CUDA_SUCCESS)
        fail_scene(s, "%s: %d", call, r);
    return r == CUDA_SUCCESS;
}

void given_back(struct scene *s, uint64_t bytes) { s->live -= bytes; }

CUfunction kernel(struct scene *s, unsigned us)
{
    char *ptx, name[32];
    CUmodule module;
    CUfunction f = NULL;
    snprintf(name, sizeof name, "busy_%uus", us);
    /* The first line, and the kernel's name, are for an emulated driver, which
     * compiles nothing; the rest is for a real one. */
    if (asprintf(&ptx,
                 "// gpu-emulator: blocks 0\n"
                 ".version 6.0\n.target sm_50\n.address_size 64\n"
                 ".visible .entry %s()\n{\n"
                 "\t.reg .u64 %%rd<3>;\n\t.reg .pred %%p<2>;\n"
                 "\tmov.u64 %%rd1, %%globaltimer;\n"
                 "again:\n\tmov.u64 %%rd2, %%globaltimer;\n\tsub.u64 %%rd2, %%rd2, %%rd1;\n"
                 "\tsetp.lt.u64 %%p1, %%rd2, %llu;\n\t@%%p1 bra again;\n\tret;\n}\n",
                 name, us * 1000ull) < 0)
        abort();
    if (MUST(s, s->cu->cuModuleLoadData(&module, ptx)))
        MUST(s, s->cu->cuModuleGetFunction(&f, module, name));
    free(ptx);
    return f;
}

int launch(struct scene *s, CUfunction f, CUstream stream) { return f && MUST(s, s->cu->cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL)); }

static const struct scenario *find(const char *name)
{
    for (size_t t = 0; t < sizeof themes / sizeof themes[0]; t++)
        for (const struct scenario *c = themes[t]; c->name; c++)
            if (!strcmp(c->name, name))
                return c;
    return NULL;
}

void list_scenarios(void)
{
    for (size_t t = 0; t < sizeof themes / sizeof themes[0]; t++)
        for (const struct scenario *c = themes[t]; c->name; c++)
            printf("%s\n", c->name);
}

void scenario(const char *name, const char *door, int device, uint64_t room)
{
    static struct cuda cu;
    struct scene s = {.cu = &cu, .door = door, .device = device, .room = room};
    const struct scenario *c = find(name);
    CUresult r;
    const char *problem = c ? open_door(door, &cu) : "the probe has no such scenario";
    if (problem)
        fail_scene(&s, "%s", problem);
    else if (!c->early && (problem = sit(&s.seat, &cu, device, &r)))
        fail_scene(&s, "%s: %d", problem, r);
    if (!problem)
        c->run(&s);
    printf("ran name=%s granted=%llu refused=%llu highest=%llu left=%llu slowest-us=%llu failure=%s%s\n", name, (unsigned long long)s.granted,
           (unsigned long long)s.refused, (unsigned long long)s.highest, (unsigned long long)s.live, (unsigned long long)s.slowest_us, s.failure, s.notes);
}
