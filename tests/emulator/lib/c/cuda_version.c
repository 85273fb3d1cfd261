/* SPDX-License-Identifier: Apache-2.0 */

/* Drivers of several CUDA versions in one build. Names that came after a driver's
 * version are found neither by cuGetProcAddress nor by dlsym. An installed driver is
 * of its world's version: OfVersion (version.go) takes the names out of the file's
 * table of symbols. The switch version=12080 makes the library one of 12.8: the names
 * are taken out of the table in memory, before anybody can look them up, as the
 * library is loaded. */
#include <elf.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "cuda_internal.h"
#include "cuda_switch.h"

extern const Elf64_Ehdr __ehdr_start __attribute__((visibility("hidden")));
extern const Elf64_Dyn _DYNAMIC[] __attribute__((visibility("hidden")));

static const struct name {
    const char *symbol, *twin;
    int version;
} names[] = {
#define V(name, version, symbol) {#symbol, "", version},
#define T(name, version, symbol, twin) {#symbol, #twin, version},
#include "cuda_names.h"
#undef V
#undef T
};

/* file_version is the version that the file was made to be of; 0: of none. */
static const volatile int file_version __attribute__((used)) = 0;

int names_until(void) { return switches.version ? switches.version : file_version ? file_version : INT_MAX; }

/* since is the version that a symbol came with, or 0. */
static int since(const char *symbol)
{
    int first = 0;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(names[i].symbol, symbol) == 0 || strcmp(names[i].twin, symbol) == 0)
            first = first && first < names[i].version ? first : names[i].version;
    return first;
}

/* dynamic is an address in the library's dynamic section, which one C library's
 * loader has made absolute and another has not. */
static char *dynamic(int64_t tag)
{
    for (const Elf64_Dyn *d = _DYNAMIC; d->d_tag != DT_NULL; d++)
        if (d->d_tag == tag) {
            uintptr_t at = d->d_un.d_ptr, base = (uintptr_t)&__ehdr_start;
            return (char *)(at < base ? at + base : at);
        }
    return NULL;
}

/* hide makes symbols undefined that are of later versions. */
static bool hide(int until)
{
    char *strings = dynamic(DT_STRTAB);
    Elf64_Sym *first = (Elf64_Sym *)dynamic(DT_SYMTAB), *end = (Elf64_Sym *)strings; /* linkers put one behind the other */
    if (!first || end <= first)
        return false;
    uintptr_t page = (uintptr_t)first & ~(uintptr_t)4095;
    size_t size = (uintptr_t)end - page;
    if (mprotect((void *)page, size, PROT_READ | PROT_WRITE))
        return false;
    for (Elf64_Sym *s = first; s + 1 <= end; s++)
        if (s->st_shndx != SHN_UNDEF && since(strings + s->st_name) > until) {
            s->st_shndx = SHN_UNDEF;
            s->st_value = 0;
        }
    return mprotect((void *)page, size, PROT_READ) == 0;
}

__attribute__((constructor)) static void version_begin(void)
{
    switches_read(); /* what it does not understand cuInit says again, and refuses */
    if (switches.version && !hide(switches.version))
        abort(); /* a driver of no version */
}
