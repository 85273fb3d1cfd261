/* SPDX-License-Identifier: Apache-2.0 */

/* The library that this one stands in front of, and the functions in it.
 *
 * It is in memory already, since this library needs it by its absolute path.
 * dlsym is no way to it: RTLD_NEXT and RTLD_DEFAULT find whatever else is
 * loaded, the function has had a new version since glibc 2.34, and programs
 * hook it. So the objects of our own namespace are walked and the symbol table
 * of the right one is read, which is also quicker. */
#ifndef CAP_REAL_H
#define CAP_REAL_H

#include "sys.h"

struct real_library {
    const char *text, *text_end; /* where its code lies */
    const char *own, *own_end;   /* and ours */
    uintptr_t base;
    const void *symbols; /* ElfW(Sym) */
    const char *strings;
    const uint32_t *gnu_hash, *sysv_hash;
};

/* real_find looks for the library that was loaded from path, else for one that
 * is not this and defines witness: the same file may have been loaded by
 * another name before. */
bool real_find(struct real_library *r, const char *path, const char *witness);

/* real_symbol returns NULL where the library has no such function. */
void *real_symbol(const struct real_library *r, const char *name);

/* real_calls says whether a call that returns to this address was made by the
 * driver itself, or by us: a driver that reaches its own functions by their
 * exported names comes through here a second time, with what was counted the
 * first time. */
static inline bool real_calls(const struct real_library *r, const void *back)
{
    const char *p = back;
    return (p >= r->text && p < r->text_end) || (p >= r->own && p < r->own_end);
}

#endif
