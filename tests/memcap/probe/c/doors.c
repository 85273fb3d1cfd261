/* SPDX-License-Identifier: Apache-2.0 */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "probe.h"

#define SONAME "libcuda.so.1"
#define LIBRARIES "/usr/lib/x86_64-linux-gnu/"

/* Which path a door by path opens; the environment's LIBCUDA, for drivers that
 * stand elsewhere. */
static const char *path(void)
{
    const char *over = getenv("LIBCUDA");
    return over ? over : LIBRARIES SONAME;
}

/* The name that each function has for the loader and for cuGetProcAddress. */
static const struct name {
    const char *exported, *base;
    int since, twin;
    size_t at;
} names[] = {
#define F(name, base, since, twin, parameters) {#name, base, since, twin, offsetof(struct cuda, name)},
    FUNCTIONS(F)
#undef F
};
enum { NAMES = sizeof names / sizeof names[0] };

static void set(struct cuda *cu, const struct name *n, void *function) { memcpy((char *)cu + n->at, &function, sizeof function); }

static const char *by_dlsym(void *library, struct cuda *cu, int twins)
{
    if (!library)
        return dlerror();
    for (const struct name *n = names; n < names + NAMES; n++) {
        char twin[80];
        snprintf(twin, sizeof twin, "%s_ptsz", n->exported);
        void *f = twins && n->twin ? dlsym(library, twin) : NULL;
        set(cu, n, f ? f : dlsym(library, n->exported));
    }
    return NULL;
}

typedef CUresult (*get_v1)(const char *, void **, int version, uint64_t flags);
typedef CUresult (*get_v2)(const char *, void **, int version, uint64_t flags, int *status);

/* As the CUDA runtime does: the first look-up is of cuGetProcAddress, and the
 * next is of itself. */
static const char *by_query(void *library, struct cuda *cu, int second, uint64_t flags)
{
    if (!library)
        return dlerror();
    union {
        void *p;
        get_v1 v1;
        get_v2 v2;
    } get, own = {.p = NULL};
    int status;
    get.p = dlsym(library, second ? "cuGetProcAddress_v2" : "cuGetProcAddress");
    if (!get.p)
        return dlerror();
    CUresult r = second ? get.v2("cuGetProcAddress", &own.p, 12000, flags, &status) : get.v1("cuGetProcAddress", &own.p, 11030, flags);
    if (r != CUDA_SUCCESS || !own.p)
        return "cuGetProcAddress does not know itself";
    for (const struct name *n = names; n < names + NAMES; n++) {
        void *f = NULL;
        r = second ? own.v2(n->base, &f, n->since, flags, &status) : own.v1(n->base, &f, n->since, flags);
        set(cu, n, r == CUDA_SUCCESS ? f : NULL);
    }
    return NULL;
}

static const char *by_link(const struct linked *table, struct cuda *cu)
{
    if (!table)
        return "this program was not linked against " SONAME;
    for (size_t i = 0; i < NAMES; i++)
        set(cu, &names[i], table[i].function);
    return NULL;
}

/* A plugin is linked against the library, and opened by a program that wants
 * the plugin's own libraries to come before all others. */
static const char *by_plugin(struct cuda *cu)
{
    char file[4096];
    ssize_t n = readlink("/proc/self/exe", file, sizeof file - 32);
    if (n < 0)
        return "cannot find this program's folder";
    file[n] = 0;
    strcpy(strrchr(file, '/') + 1, "plugin.so");
    void *plugin = dlopen(file, RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND);
    return plugin ? by_link(dlsym(plugin, "linked_table"), cu) : dlerror();
}

const char *open_door(const char *door, struct cuda *cu)
{
    const int now = RTLD_NOW | RTLD_LOCAL;
    memset(cu, 0, sizeof *cu);
    if (!strcmp(door, "soname"))
        return by_dlsym(dlopen(SONAME, now), cu, 0);
    if (!strcmp(door, "name"))
        return by_dlsym(dlopen("libcuda.so", now), cu, 0);
    if (!strcmp(door, "path"))
        return by_dlsym(dlopen(path(), now), cu, 0);
    if (!strcmp(door, "dlmopen"))
        return by_dlsym(dlmopen(LM_ID_NEWLM, SONAME, now), cu, 0);
    if (!strcmp(door, "deepbind"))
        return by_dlsym(dlopen(SONAME, now | RTLD_DEEPBIND), cu, 0);
    if (!strcmp(door, "ptsz"))
        return by_dlsym(dlopen(SONAME, now), cu, 1);
    if (!strcmp(door, "plugin"))
        return by_plugin(cu);
    if (!strcmp(door, "linked"))
        return by_link(linked_table, cu);
    if (!strcmp(door, "query"))
        return by_query(dlopen(SONAME, now), cu, 0, CU_GET_PROC_ADDRESS_DEFAULT);
    if (!strcmp(door, "query-thread"))
        return by_query(dlopen(SONAME, now), cu, 0, CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM);
    if (!strcmp(door, "query2"))
        return by_query(dlopen(SONAME, now), cu, 1, CU_GET_PROC_ADDRESS_DEFAULT);
    if (!strcmp(door, "query2-thread"))
        return by_query(dlopen(SONAME, now), cu, 1, CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM);
    return "there is no door of this name";
}
