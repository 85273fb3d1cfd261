/* SPDX-License-Identifier: Apache-2.0 */

/* The real library, whose place this library takes for programs, and the functions in it.
 *
 * It is in memory already, because this library is linked against it by its absolute path. dlsym
 * cannot look its functions up: RTLD_NEXT and RTLD_DEFAULT may find another library, dlsym has a
 * new symbol version since glibc 2.34, and programs hook it. So we go through the objects of our
 * own namespace and read the symbol table of the right one. That is also quicker. */
#ifndef CAP_REAL_H
#define CAP_REAL_H

#include "sys.h"

struct real_library {
    const char *text, *text_end; /* where its code lies in memory */
    const char *own, *own_end;   /* where our code lies */
    uintptr_t base;
    const void *symbols; /* ElfW(Sym) */
    const char *strings;
    const uint32_t *gnu_hash, *sysv_hash;
};

/* real_find looks for the library that was loaded from path. If there is none, it takes another
 * library that defines witness, except this one: the same file may have been loaded by another name
 * before. False: there is none. */
bool real_find(struct real_library *r, const char *path, const char *witness);

/* real_symbol returns the address of a function. NULL: the library has no such function. */
void *real_symbol(const struct real_library *r, const char *name);

/* real_calls reports whether the driver or this library made the call that returns to this address.
 * A driver that calls its own functions by their exported names reaches ours. What it asks for was
 * counted already when the program called. */
static inline bool real_calls(const struct real_library *r, const void *back)
{
    const char *p = back;
    return (p >= r->text && p < r->text_end) || (p >= r->own && p < r->own_end);
}

#endif
