/* SPDX-License-Identifier: Apache-2.0 */

/* Modules. Nobody knows before a module is loaded how much memory its code and variables
 * take. So we load it, and charge what the card then has less of free memory. We know what
 * other processes of the container have got or freed meanwhile, and leave that out. On a
 * card that other containers use too, the difference is no more than a hint. So if the
 * container would be over its cap by it, the agent's reading decides. If it really is
 * over, the module is unloaded again and the load refused. Code that a driver loads only
 * when it is first used is seen by the next reading. */

#include "charge.h"

struct load {
    struct process *p;
    struct account *a; /* NULL: nothing is counted */
    struct where at;
    uint64_t beside; /* bytes; see below */
};

/* beside returns the sum of what the card has free and what the driver has given to the
 * container, in bytes. The second is known exactly while nothing is under way, so it waits
 * for such a moment, for about a tenth of a second in all. */
enum { LOOKS = 30, LONGEST_NAP = 8 };
static bool beside(struct account *a, uint64_t *bytes)
{
    size_t left, total;
    for (int i = 0; i < LOOKS; i++) {
        uint64_t given, moves = account_moves(a);
        if (CALL(cuMemGetInfo_v2, &left, &total) != CUDA_SUCCESS)
            return false;
        bool rests = account_rests(a, i == LOOKS / 2, &given);
        *bytes = left + given;
        if (rests && account_moves(a) == moves)
            break;
        nap_us((uint64_t)20 << (i < LONGEST_NAP ? i : LONGEST_NAP));
    }
    return true;
}

static struct load begin(struct process *p)
{
    struct load l = {.p = p};
    bool refuse;
    if (p && where(p, &l.at)) {
        l.a = account_of(p, l.at.device, &refuse);
        if (l.a && !beside(l.a, &l.beside))
            l.a = NULL;
    }
    return l;
}

/* fits charges a module that was loaded. False: there is no room for it. */
static bool fits(struct load *l, uint64_t key)
{
    uint64_t left;
    struct entry old;
    if (!l->a || !beside(l->a, &left))
        return true;
    account_guessed(l->a);
    struct entry e = {.key = key, .owner = l->at.context, .space = SPACE_MODULE, .how = HOW_GUESS, .device = l->at.device};
    e.bytes = l->beside > left ? round_up(l->beside - left, UNIT) : 0;
    if (!e.bytes)
        return true;
    if (!account_reserve_quickly(l->a, e.bytes)) {
        if (account_within(l->a, e.bytes))
            return true; /* that reading counts the module */
        account_undone(l->a, e.bytes);
        count_add(&l->a->usage->refusals, 1);
        return false;
    }
    account_commit(l->a, e.bytes);
    table_put(&l->p->table, &e, &old); /* without memory for the entry, it stays charged until the process ends */
    return true;
}

#define LOAD(name, undo, ...)                          \
    struct load l = begin(ENTER());                    \
    CUresult r = CALL(name, __VA_ARGS__);              \
    if (r != CUDA_SUCCESS || !l.a || !out)             \
        return r;                                      \
    if (fits(&l, (uintptr_t)*out))                     \
        return r;                                      \
    CALL(undo, *out);                                  \
    account_guessed(l.a);                              \
    return CUDA_ERROR_OUT_OF_MEMORY;

#define UNLOAD(name, handle)                                            \
    struct load l = {.p = ENTER()};                                     \
    struct taken t;                                                     \
    bool refuse;                                                        \
    if (l.p && charge_take(l.p, &t, (uintptr_t)handle, SPACE_MODULE))   \
        return charge_end(l.p, &t, CALL(name, handle));                 \
    if (l.p && where(l.p, &l.at))                                       \
        l.a = account_of(l.p, l.at.device, &refuse);                    \
    CUresult r = CALL(name, handle);                                    \
    if (l.a)                                                            \
        account_guessed(l.a);                                           \
    return r;

EXPORT CUresult cuModuleLoad(CUmodule *out, const char *path) { LOAD(cuModuleLoad, cuModuleUnload, out, path) }
EXPORT CUresult cuModuleLoadData(CUmodule *out, const void *image) { LOAD(cuModuleLoadData, cuModuleUnload, out, image) }
EXPORT CUresult cuModuleLoadDataEx(CUmodule *out, const void *image, unsigned int n, int *options, void **values)
{
    LOAD(cuModuleLoadDataEx, cuModuleUnload, out, image, n, options, values)
}
EXPORT CUresult cuModuleLoadFatBinary(CUmodule *out, const void *image) { LOAD(cuModuleLoadFatBinary, cuModuleUnload, out, image) }
EXPORT CUresult cuModuleUnload(CUmodule module) { UNLOAD(cuModuleUnload, module) }

EXPORT CUresult cuLibraryLoadData(CUlibrary *out, const void *code, int *jit, void **jit_values, unsigned int jits, int *options, void **values, unsigned int n)
{
    LOAD(cuLibraryLoadData, cuLibraryUnload, out, code, jit, jit_values, jits, options, values, n)
}
EXPORT CUresult cuLibraryLoadFromFile(CUlibrary *out, const char *path, int *jit, void **jit_values, unsigned int jits, int *options, void **values, unsigned int n)
{
    LOAD(cuLibraryLoadFromFile, cuLibraryUnload, out, path, jit, jit_values, jits, options, values, n)
}
EXPORT CUresult cuLibraryUnload(CUlibrary library) { UNLOAD(cuLibraryUnload, library) }
