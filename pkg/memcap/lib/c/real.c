/* SPDX-License-Identifier: Apache-2.0 */

#include "real.h"

#include <elf.h>
#include <link.h>

struct search {
    struct real_library *found;
    const char *path, *witness;
    bool exact; /* true: search by path only */
    bool done;
};

/* in_place returns the address that a pointer of the dynamic section means. Some loaders have added
 * the base to the pointer already, others leave it as it is in the file. */
static const void *in_place(uintptr_t base, ElfW(Addr) value)
{
    return (const void *)(value < base ? base + value : value);
}

static bool read_dynamic(struct real_library *r, uintptr_t base, const ElfW(Dyn) * d)
{
    r->base = base;
    for (; d->d_tag != DT_NULL; d++)
        switch (d->d_tag) {
        case DT_SYMTAB: r->symbols = in_place(base, d->d_un.d_ptr); break;
        case DT_STRTAB: r->strings = in_place(base, d->d_un.d_ptr); break;
        case DT_GNU_HASH: r->gnu_hash = in_place(base, d->d_un.d_ptr); break;
        case DT_HASH: r->sysv_hash = in_place(base, d->d_un.d_ptr); break;
        }
    return r->symbols && r->strings && (r->gnu_hash || r->sysv_hash);
}

static int visit(struct dl_phdr_info *info, size_t size, void *arg)
{
    (void)size;
    struct search *s = arg;
    struct real_library r = {0};
    const ElfW(Dyn) *dynamic = NULL;
    bool own = false;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *p = &info->dlpi_phdr[i];
        const char *at = (const char *)info->dlpi_addr + p->p_vaddr;
        if (p->p_type == PT_DYNAMIC)
            dynamic = (const void *)at;
        if (p->p_type != PT_LOAD || !(p->p_flags & PF_X))
            continue;
        if (!r.text || at < r.text)
            r.text = at;
        if (at + p->p_memsz > r.text_end)
            r.text_end = at + p->p_memsz;
        const char *here = (const char *)(uintptr_t)&real_find;
        own |= here >= at && here < at + p->p_memsz;
    }
    if (own) {
        s->found->own = r.text;
        s->found->own_end = r.text_end;
        return 0;
    }
    if (s->done || !dynamic || !info->dlpi_name || !info->dlpi_name[0])
        return 0;
    if (s->exact && !text_equal(info->dlpi_name, s->path))
        return 0;
    if (!read_dynamic(&r, info->dlpi_addr, dynamic) || !real_symbol(&r, s->witness))
        return 0;
    r.own = s->found->own;
    r.own_end = s->found->own_end;
    *s->found = r;
    s->done = true;
    return 0; /* go on: our own library may come later in the list */
}

bool real_find(struct real_library *r, const char *path, const char *witness)
{
    /* dl_iterate_phdr lists the objects of its caller's namespace. That is our own, even if a
     * program has loaded us with dlmopen. */
    struct search s = {.found = r, .path = path, .witness = witness, .exact = true};
    dl_iterate_phdr(visit, &s);
    if (!s.done) {
        s.exact = false;
        dl_iterate_phdr(visit, &s);
    }
    return s.done;
}

/* address returns where a symbol is. NULL: it is not a function of that name. */
static void *address(const struct real_library *r, uint32_t i, const char *name)
{
    const ElfW(Sym) *s = (const ElfW(Sym) *)r->symbols + i;
    unsigned type = ELF64_ST_TYPE(s->st_info), bind = ELF64_ST_BIND(s->st_info);
    if (!text_equal(r->strings + s->st_name, name) || s->st_shndx == SHN_UNDEF || !s->st_value || (bind != STB_GLOBAL && bind != STB_WEAK))
        return NULL;
    void *at = (void *)(r->base + s->st_value);
    if (type == STT_GNU_IFUNC)
        return ((void *(*)(void))at)();
    return type == STT_FUNC || type == STT_NOTYPE ? at : NULL;
}

static void *by_gnu_hash(const struct real_library *r, const char *name)
{
    const uint32_t *t = r->gnu_hash;
    uint32_t buckets = t[0], first = t[1], words = t[2], shift = t[3];
    const ElfW(Addr) *bloom = (const void *)(t + 4);
    const uint32_t *bucket = (const void *)(bloom + words), *chain = bucket + buckets;
    uint32_t h = 5381;
    for (const char *p = name; *p; p++)
        h = h * 33 + (unsigned char)*p;
    ElfW(Addr) mask = (ElfW(Addr))1 << h % 64 | (ElfW(Addr))1 << (h >> shift) % 64;
    if (!buckets || !words || (bloom[h / 64 % words] & mask) != mask)
        return NULL;
    uint32_t i = bucket[h % buckets];
    if (i < first)
        return NULL;
    for (;; i++) {
        void *at = (chain[i - first] | 1) == (h | 1) ? address(r, i, name) : NULL;
        if (at)
            return at;
        if (chain[i - first] & 1)
            return NULL;
    }
}

static void *by_sysv_hash(const struct real_library *r, const char *name)
{
    const uint32_t *t = r->sysv_hash;
    uint32_t buckets = t[0], h = 0;
    const uint32_t *bucket = t + 2, *chain = bucket + buckets;
    for (const char *p = name; *p; p++) {
        h = (h << 4) + (unsigned char)*p;
        h = (h ^ (h >> 24 & 0xF0)) & 0x0FFFFFFF;
    }
    void *at = NULL;
    for (uint32_t i = buckets ? bucket[h % buckets] : 0; i && !at; i = chain[i])
        at = address(r, i, name);
    return at;
}

void *real_symbol(const struct real_library *r, const char *name)
{
    return r->gnu_hash ? by_gnu_hash(r, name) : by_sysv_hash(r, name);
}
