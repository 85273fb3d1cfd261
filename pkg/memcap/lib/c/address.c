/* SPDX-License-Identifier: Apache-2.0 */

/* cuGetProcAddress, by which the CUDA runtime finds nearly every function. It asks for a name
 * without its suffix, for the CUDA version whose form of the function it wants, and for the form
 * with the per-thread default stream or without. The driver answers first. If its answer is a
 * function that we override, the program gets ours instead. If the driver lacks a function, or has
 * a newer form of it than we know, the program gets the driver's answer. */

#include "process.h"

struct form {
    const char *base, *name;
    int since; /* the first CUDA version that has this form */
    bool per_thread;
    void *ours;
    size_t real; /* offset of the driver's function in struct driver */
};

/* The name of a form for the per-thread default stream ends with _ptsz. Other names end with _v2 or
 * have no suffix. */
#define FORM(base, since, name, arguments) {#base, #name, since, sizeof #name >= sizeof #base + 5, (void *)name, offsetof(struct driver, name)},
static const struct form forms[] = {OVERRIDES(FORM)};
enum { FORMS = sizeof forms / sizeof *forms };

static void *real_function(const struct form *d) { return *(void *const *)((const char *)&real + d->real); }

/* plain reports whether the driver answers with the functions that it exports. If it does, an
 * answer that we do not know is a newer form. */
static bool plain(void)
{
    void *f = NULL;
    CUresult r = real.cuGetProcAddress_v2 ? real.cuGetProcAddress_v2("cuMemAlloc", &f, 3020, 0, NULL)
                                          : CALL(cuGetProcAddress, "cuMemAlloc", &f, 3020, 0);
    return r == CUDA_SUCCESS && f && f == (void *)real.cuMemAlloc_v2;
}

static void *ours(const char *symbol, void *f, int version, uint64_t flags)
{
    const struct form *best = NULL, *same = NULL;
    bool per_thread = flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM, known = false;
    for (int i = 0; i < FORMS; i++) {
        const struct form *d = &forms[i];
        if (d->ours == f)
            return f; /* a driver that looks up its own functions by name has found ours */
        if (!real_function(d))
            continue; /* the driver lacks this form */
        bool base = text_equal(d->base, symbol), whole = text_equal(d->name, symbol);
        if (real_function(d) == f && (base || whole || !same))
            same = d;
        if (whole && !base)
            best = d;
        if (!base)
            continue;
        known = true;
        if (d->since <= version && (!d->per_thread || per_thread) &&
            (!best || d->per_thread > best->per_thread || (d->per_thread == best->per_thread && d->since >= best->since)))
            best = d;
    }
    if (same)
        return same->ours;
    return best && (!known || !plain()) ? best->ours : f;
}

#define ADDRESS(name, ...) THEN(name, if (symbol && out && *out) *out = ours(symbol, *out, version, flags), __VA_ARGS__)

EXPORT CUresult cuGetProcAddress_v2(const char *symbol, void **out, int version, uint64_t flags, int *status)
{
    ADDRESS(cuGetProcAddress_v2, symbol, out, version, flags, status)
}

EXPORT CUresult cuGetProcAddress(const char *symbol, void **out, int version, uint64_t flags)
{
    ADDRESS(cuGetProcAddress, symbol, out, version, flags)
}
