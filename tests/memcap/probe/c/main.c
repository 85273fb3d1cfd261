/* SPDX-License-Identifier: Apache-2.0 */

/* probe [flags] reads commands from standard input and answers each with a
 * line, words of the form key=value:
 *
 *     fill CALL REQUEST ROOM SLACK   all workers; row call=... (see team.c)
 *     take CALL BYTES [COUNT]        one thread; took id=... count=... result=...
 *     give ID                        gave id=... result=...
 *     mark SEED                      words into all that cuMemAlloc_v2 has given; marked words=... result=...
 *     check SEED                     whether they are there; checked words=... wrong=... result=...
 *     info                           info result=... free=... total=... device-total=...
 *     sms                            multiprocessors count=... result=... (by the library that the name finds)
 *     lookup NAME                    lookup name=... found=... result=... (calls it)
 *     cuda, nvml                     a line for each GPU, then end
 *     calls                          a line for each call, then end
 *     scenario NAME ROOM             ran name=... and what scenarios.c says
 *     scenarios                      their names
 *     walk SEED STEPS CAP JUDGE      walked steps=... granted=... refused=... (see walk.c)
 *     churn SEED                     takes and gives at random until it is killed
 *                                    or the input ends; ended result=...
 *
 * At the end of its input it exits with 0. Flags:
 *
 *     -door NAME       soname (default), name, path, dlmopen, deepbind, plugin,
 *                      linked, query, query-thread, query2, query2-thread, ptsz
 *     -device N        ordinal of the GPU; default 0
 *     -processes N     the team for fill; default none
 *     -threads N       of each process; default 1
 *     -start HOW       fork (before anything of CUDA), exec, or both in turn
 *     -early           the first process has memory before it starts others
 *     -most BYTES      the largest request of churn; default 64 MiB
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "probe.h"

static struct cuda cu;
static struct seat seat;
static int opened, seated;

/* ready opens the library and takes a seat, each once. The text is what failed. */
static const char *ready(const struct team *t, CUresult *r)
{
    *r = CUDA_SUCCESS;
    if (!opened) {
        const char *problem = open_door(t->door, &cu);
        if (problem) {
            fprintf(stderr, "probe: %s\n", problem);
            *r = ABSENT;
            return "open";
        }
        opened = 1;
    }
    if (!seated) {
        const char *what = sit(&seat, &cu, t->device, r);
        if (what)
            return what;
        seated = 1;
    }
    return NULL;
}

static struct held {
    const struct call *call;
    struct item item;
    uint64_t bytes;
} *held;
static size_t holds, hold_room;

static void keep(const struct call *c, struct item i, uint64_t bytes)
{
    if (holds == hold_room) {
        hold_room = hold_room * 2 + 64;
        held = realloc(held, hold_room * sizeof *held);
        if (!held)
            abort();
    }
    held[holds++] = (struct held){c, i, bytes};
}

static void take(const struct team *t, const char *name, uint64_t bytes, int count)
{
    CUresult r;
    const struct call *c = find_call(name);
    const char *what = c ? ready(t, &r) : "no-such-call";
    int got = 0;
    size_t first = holds;
    if (!c)
        r = ABSENT;
    if (!what && (what = missing(&cu, c)))
        r = ABSENT;
    while (!what && got < count) {
        struct item i = {0};
        if ((r = c->take(&seat, &i, bytes)) != CUDA_SUCCESS)
            what = name;
        else {
            keep(c, i, bytes);
            got++;
        }
    }
    printf("took id=%zu count=%d result=%d failure=%s\n", first, got, r, what ? what : "");
}

static void give(size_t id)
{
    CUresult r = CUDA_ERROR_INVALID_VALUE;
    if (id < holds && held[id].call) {
        r = held[id].call->give(&seat, &held[id].item);
        held[id].call = NULL;
    }
    printf("gave id=%zu result=%d\n", id, r);
}

static void info(const struct team *t)
{
    CUresult r;
    const char *what = ready(t, &r);
    size_t unused = 0, total = 0, device_total = 0;
    if (!what && (r = cu.cuMemGetInfo_v2(&unused, &total)) != CUDA_SUCCESS)
        what = "cuMemGetInfo_v2";
    if (!what && (r = cu.cuDeviceTotalMem_v2(&device_total, seat.device)) != CUDA_SUCCESS)
        what = "cuDeviceTotalMem_v2";
    printf("info result=%d free=%zu total=%zu device-total=%zu failure=%s\n", r, unused, total, device_total, what ? what : "");
}

static void multiprocessors(const struct team *t)
{
    CUresult r;
    const char *what = ready(t, &r);
    int count = 0;
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    CUresult (*attribute)(int *, int, CUdevice) = library ? (CUresult(*)(int *, int, CUdevice))dlsym(library, "cuDeviceGetAttribute") : NULL;
    if (!what && !attribute)
        what = "cuDeviceGetAttribute", r = ABSENT;
    if (!what && (r = attribute(&count, 16 /* MULTIPROCESSOR_COUNT */, seat.device)) != CUDA_SUCCESS)
        what = "cuDeviceGetAttribute";
    printf("multiprocessors count=%d result=%d failure=%s\n", count, r, what ? what : "");
}

static void lookup(const char *name)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    int (*f)(void) = library ? (int (*)(void))dlsym(library, name) : NULL;
    /* A function that takes nothing: what it returns says whose it is. */
    printf("lookup name=%s found=%d result=%d\n", name, f != NULL, f ? f() : 0);
}

static uint64_t dice(uint64_t *state)
{
    *state += 0x9e3779b97f4a7c15;
    uint64_t z = *state;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
}

/* contents puts words made from a seed into all memory that cuMemAlloc_v2 has given, spread over each piece, or
 * compares what is there with them. */
static void contents(uint64_t seed, int compares)
{
    enum { WORDS = 16 };
    const char *name = compares ? "cuMemcpyDtoH_v2" : "cuMemcpyHtoD_v2";
    void *library = dlopen("libcuda.so.1", RTLD_NOW), *copy = library ? dlsym(library, name) : NULL;
    CUresult r = copy ? CUDA_SUCCESS : ABSENT;
    size_t words = 0, wrong = 0;
    for (size_t i = 0; i < holds && r == CUDA_SUCCESS; i++) {
        if (!held[i].call || strcmp(held[i].call->name, "cuMemAlloc_v2") || held[i].bytes < WORDS * sizeof seed)
            continue;
        for (uint64_t k = 0; k < WORDS && r == CUDA_SUCCESS; k++, words++) {
            CUdeviceptr at = held[i].item.a + held[i].bytes / WORDS / sizeof seed * sizeof seed * k;
            uint64_t want = dice(&seed), is = 0;
            if (compares) {
                r = ((CUresult(*)(void *, CUdeviceptr, size_t))copy)(&is, at, sizeof is);
                wrong += is != want;
            } else {
                r = ((CUresult(*)(CUdeviceptr, const void *, size_t))copy)(at, &want, sizeof want);
            }
        }
    }
    printf("%s words=%zu wrong=%zu result=%d\n", compares ? "checked" : "marked", words, wrong, r);
}

/* churn keeps up to 48 items of any call and size, and begins anew with a
 * context of its own now and then. What is refused is refused; any other error
 * ends it. */
static int churn(const struct team *t, uint64_t seed, uint64_t most)
{
    enum { ITEMS = 48 };
    struct held mine[ITEMS] = {0};
    uint64_t taken = 0, refused = 0;
    CUresult r;
    const char *what;
    struct pollfd input = {.fd = STDIN_FILENO, .events = POLLIN};
    int usable[64], n = 0;

    while ((what = ready(t, &r)) && r == CUDA_ERROR_OUT_OF_MEMORY) {
        /* No room for a context; others will go. */
        refused++;
        if (poll(&input, 1, 1) > 0)
            goto end;
    }
    if (what)
        goto end;
    for (int i = 0; calls[i].name && i < 64; i++)
        if (!missing(&cu, &calls[i]) && strcmp(calls[i].name, "cuModuleLoadData") && strcmp(calls[i].name, "cuMemHostAlloc"))
            usable[n++] = i;
    printf("churning\n");
    while (poll(&input, 1, 0) == 0) {
        struct held *h = &mine[dice(&seed) % ITEMS];
        if (h->call) {
            r = h->call->give(&seat, &h->item);
            what = h->call->name;
            h->call = NULL;
            if (r != CUDA_SUCCESS)
                goto end;
            continue;
        }
        const struct call *c = &calls[usable[dice(&seed) % n]];
        h->item = (struct item){0};
        r = c->take(&seat, &h->item, (dice(&seed) % most >> 18 << 18) + (1 << 18));
        if (r == CUDA_SUCCESS) {
            h->call = c;
            taken++;
        } else if (r == CUDA_ERROR_OUT_OF_MEMORY) {
            refused++;
        } else {
            what = c->name;
            goto end;
        }
    }
    for (int i = 0; i < ITEMS; i++)
        if (mine[i].call && (r = mine[i].call->give(&seat, &mine[i].item)) != CUDA_SUCCESS) {
            what = mine[i].call->name;
            goto end;
        }
    r = settle(&seat);
end:
    printf("ended result=%d failure=%s taken=%llu refused=%llu\n", r, what ? what : "", (unsigned long long)taken, (unsigned long long)refused);
    /* No room for a context until the end is an end like another. */
    return r != CUDA_SUCCESS && r != CUDA_ERROR_OUT_OF_MEMORY;
}

int main(int argc, char **argv)
{
    struct team team = {.door = "soname", .threads = 1, .start = BY_FORK, .argv = argv, .shared = -1};
    uint64_t most = 64 << 20;
    for (int i = 1; i < argc; i++) {
        const char *flag = argv[i];
        if (!strcmp(flag, "-early")) {
            team.early = 1;
            continue;
        }
        if (++i == argc) {
            fprintf(stderr, "probe: %s wants a value\n", flag);
            return 2;
        }
        if (!strcmp(flag, "-door"))
            team.door = argv[i];
        else if (!strcmp(flag, "-device"))
            team.device = atoi(argv[i]);
        else if (!strcmp(flag, "-processes"))
            team.processes = atoi(argv[i]);
        else if (!strcmp(flag, "-threads"))
            team.threads = atoi(argv[i]);
        else if (!strcmp(flag, "-start"))
            team.start = !strcmp(argv[i], "exec") ? BY_EXEC : !strcmp(argv[i], "both") ? BY_BOTH : BY_FORK;
        else if (!strcmp(flag, "-most"))
            most = strtoull(argv[i], NULL, 10);
        else if (!strcmp(flag, "-shared"))
            team.shared = atoi(argv[i]);
        else {
            fprintf(stderr, "probe: no flag %s\n", flag);
            return 2;
        }
    }
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (team.shared >= 0)
        return work(&team);
    if (team.processes > 0 && gather(&team))
        return 1;

    char line[512];
    while (fgets(line, sizeof line, stdin)) {
        char verb[32] = "", name[128] = "";
        unsigned long long a = 0, b = 0, c = 0;
        int n = sscanf(line, "%31s %127s %llu %llu %llu", verb, name, &a, &b, &c);
        CUresult r;
        if (!strcmp(verb, "fill") && n == 5 && team.processes > 0)
            fill(name, a, b, c);
        else if (!strcmp(verb, "take") && n >= 3)
            take(&team, name, a, n > 3 ? (int)b : 1);
        else if (!strcmp(verb, "scenario") && n == 3)
            scenario(name, team.door, team.device, a);
        else if (!strcmp(verb, "walk") && n == 4) {
            char judge[256] = "";
            sscanf(line, "%*s %*s %*s %*s %255s", judge);
            walk(team.door, team.device, strtoull(name, NULL, 10), a, b, judge);
        } else if (!strcmp(verb, "scenarios"))
            list_scenarios();
        else if (!strcmp(verb, "give") && n == 2)
            give(strtoul(name, NULL, 10));
        else if ((!strcmp(verb, "mark") || !strcmp(verb, "check")) && n == 2)
            contents(strtoull(name, NULL, 10), *verb == 'c');
        else if (!strcmp(verb, "info"))
            info(&team);
        else if (!strcmp(verb, "sms"))
            multiprocessors(&team);
        else if (!strcmp(verb, "lookup") && n == 2)
            lookup(name);
        else if (!strcmp(verb, "cuda")) {
            if (!open_door(team.door, &cu))
                show_cuda(&cu);
            printf("end\n");
        } else if (!strcmp(verb, "nvml")) {
            show_nvml();
            printf("end\n");
        } else if (!strcmp(verb, "calls")) {
            ready(&team, &r);
            for (const struct call *k = calls; k->name; k++) {
                const char *lacks = missing(&cu, k);
                printf("call name=%s absent=%s\n", k->name, lacks ? lacks : "");
            }
            printf("end\n");
        } else if (!strcmp(verb, "churn") && n == 2)
            return churn(&team, strtoull(name, NULL, 10), most);
        else
            printf("failed no such command: %s", line);
    }
    dismiss();
    return 0;
}
