/* SPDX-License-Identifier: Apache-2.0 */

/* Stands in front of a library, BEHIND, in the place of libcuda.so.1, and writes
 * down what is asked of cuGetProcAddress, and with what it answers. It has the
 * forms of that function that the driver has: FORM_1, FORM_2. With PRETEND in the
 * environment cuInit succeeds, though there is no GPU, and there is one device: so
 * a runtime goes on, as far as the driver lets it. */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int cuGetProcAddress(const char *symbol, void **f, int version, uint64_t flags);
int cuGetProcAddress_v2(const char *symbol, void **f, int version, uint64_t flags, int *status);

static void *behind(const char *name)
{
    static void *library;
    if (!library)
        library = dlopen(BEHIND, RTLD_NOW | RTLD_NOLOAD);
    return library ? dlsym(library, name) : NULL;
}

static int begin(unsigned flags) { return flags != 0; }
static int one(int *count) { return *count = 1, 0; }

/* instead writes an answer down, and returns what the runtime gets for it. */
static void *instead(const char *symbol, void *f, int version, uint64_t flags, int result, int status)
{
    Dl_info info;
    const char *name = "nothing";
    if (result == 0 && f)
        name = dladdr(f, &info) && info.dli_sname ? info.dli_sname : "?";
    printf("asked %s %d %d: %d, status %d, %s\n", symbol, version, (int)flags, result, status, name);
#if FORM_1
    if (f && f == behind("cuGetProcAddress"))
        return (void *)cuGetProcAddress;
#endif
#if FORM_2
    if (f && f == behind("cuGetProcAddress_v2"))
        return (void *)cuGetProcAddress_v2;
#endif
    if (getenv("PRETEND") && !strcmp(symbol, "cuInit"))
        return (void *)begin;
    if (getenv("PRETEND") && !strcmp(symbol, "cuDeviceGetCount"))
        return (void *)one;
    return f;
}

#if FORM_1
int cuGetProcAddress(const char *symbol, void **f, int version, uint64_t flags)
{
    int (*ask)(const char *, void **, int, uint64_t);
    *(void **)&ask = behind("cuGetProcAddress");
    int result = ask(symbol, f, version, flags);
    *f = instead(symbol, *f, version, flags, result, -1);
    return result;
}
#endif

#if FORM_2
int cuGetProcAddress_v2(const char *symbol, void **f, int version, uint64_t flags, int *status)
{
    int (*ask)(const char *, void **, int, uint64_t, int *), own = -1;
    *(void **)&ask = behind("cuGetProcAddress_v2");
    int result = ask(symbol, f, version, flags, status ? status : &own);
    *f = instead(symbol, *f, version, flags, result, status ? *status : own);
    return result;
}
#endif
