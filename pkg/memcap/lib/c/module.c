/* SPDX-License-Identifier: Apache-2.0 */

/* Modules. What a module takes, its code and its variables, cannot be known before it is
 * loaded. So it is loaded, and what the card has less of free memory then is charged.
 * What others of the container have got or given back meanwhile is known, and left out.
 * On a card that other containers use too that is no more than a hint: where by it the
 * container would be over its cap, the agent's reading decides, and what is over is
 * unloaded again and was out of memory. Code that a driver loads later, when it is first used,
 * is seen by the next reading. */

#include "charge.h"

struct load {
    struct process *p;
    struct account *a; /* NULL: nothing is counted */
    struct where at;
    uint64_t beside; /* bytes: free and the container's together */
};

/* beside is what the card has free and what the driver has given to the container, which
 * is known to the byte while nothing is under way. */
enum { LOOKS = 30, LONGEST_NAP = 8 }; /* a tenth of a second in all */
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

/* fits charges what was loaded, or says that there is no room for it. */
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
            return true; /* and counted, as the reading has it */
        account_undone(l->a, e.bytes);
        count_add(&l->a->usage->refusals, 1);
        return false;
    }
    account_commit(l->a, e.bytes);
    table_put(&l->p->table, &e, &old); /* without memory for it: charged for good */
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
