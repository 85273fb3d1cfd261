/* SPDX-License-Identifier: Apache-2.0 */

/* Modules. Before a module is loaded, it is not known how much memory its code and variables take.
 * After the load, the card has less free memory. The module takes at most the difference, unless
 * something was freed at that moment. Other containers may have taken a part of it.
 *
 * Far from the cap, this figure is enough if it leaves half of the room. Nothing is charged: the
 * agent's next reading has the module. A process that comes near the cap before that reading waits
 * for one (account_measure). So does a process that has loaded so much that it may be near. If no
 * reading comes, the agent is away. The figure is charged then.
 *
 * Near the cap the figure is charged, without what other processes of the container have got or
 * freed meanwhile. That part is known while nothing is under way. If the charge exceeds the cap,
 * the agent's reading decides. If the container really is over its cap, the module is unloaded
 * again and the load refused. While the agent is away, no reading will correct a charge for another
 * container's allocation. So a module that seems large is loaded twice, and the smaller of the two
 * figures counts.
 *
 * The agent keeps room free for code that a driver loads only when it is first used
 * (DefaultCode). */

#include "charge.h"

struct load {
    struct process *p;
    struct account *a; /* NULL: nothing is counted */
    struct where at;
    bool near;
    uint64_t before; /* bytes that the card had free before the load; near the cap, what beside returned */
    uint64_t took;   /* the most that the module took, in bytes */
    int loads;
};

/* A figure of at most SURE bytes is small enough to be sure; the module is not loaded twice. */
#define SURE ((uint64_t)16 << 20)

/* beside sets *bytes to what the card has free plus what the driver has given to the container. The
 * second part is known exactly while nothing is under way. So beside waits for such a moment, for
 * about a tenth of a second in all. False: the driver did not answer. */
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

static bool look(const struct load *l, uint64_t *bytes)
{
    size_t left, total;
    if (l->near)
        return beside(l->a, bytes);
    if (CALL(cuMemGetInfo_v2, &left, &total) != CUDA_SUCCESS)
        return false;
    *bytes = left;
    return true;
}

static struct load begin(struct process *p)
{
    struct load l = {.p = p, .took = MOST};
    bool refuse;
    if (!p || !where(p, &l.at) || !(l.a = account_of(p, l.at.device, &refuse)))
        return l;
    account_measure(l.a, count_read(&l.a->usage->unread));
    l.near = account_is_near(l.a);
    if (!look(&l, &l.before))
        l.a = NULL;
    return l;
}

/* again finds out what the module took that was just loaded. It reports whether to unload the
 * module and load it once more. */
static bool again(struct load *l)
{
    uint64_t after, took;
    if (!look(l, &after))
        return false;
    took = l->before > after ? l->before - after : 0;
    l->took = took < l->took ? took : l->took;
    return !l->loads++ && l->took > SURE && account_no_reading(l->a);
}

/* fits charges a module that was loaded. False: there is no room for it. */
static bool fits(struct load *l, uint64_t key)
{
    struct account *a = l->a;
    struct entry e = {.key = key, .owner = l->at.context, .space = SPACE_MODULE, .how = HOW_GUESS, .device = l->at.device};
    account_guessed(a);
    if (l->took == MOST || !(e.bytes = round_up(l->took, UNIT)))
        return true;
    uint64_t may = AMOUNT(count_read(&a->usage->bound)) + count_read(&a->usage->unread), ceiling = account_ceiling(a);
    if (!l->near && may < ceiling && e.bytes <= (ceiling - may) / 2) {
        account_unmeasured(a, e.bytes);
        return true;
    }
    if (!account_reserve_quickly(a, e.bytes)) {
        if (account_within(a, e.bytes))
            return true; /* the reading includes the module */
        account_undone(a, e.bytes);
        count_add(&a->usage->refusals, 1);
        return false;
    }
    account_commit(a, e.bytes);
    table_put(&l->p->table, &e, NULL); /* without memory for the entry, it stays charged until the process ends */
    return true;
}

#define LOAD(name, undo, ...)                       \
    struct load l = begin(ENTER());                 \
    CUresult r = CALL(name, __VA_ARGS__);           \
    if (r != CUDA_SUCCESS || !l.a || !out)          \
        return r;                                   \
    if (again(&l)) {                                \
        CALL(undo, *out);                           \
        bool looked = look(&l, &l.before);          \
        r = CALL(name, __VA_ARGS__);                \
        if (r != CUDA_SUCCESS)                      \
            return r;                               \
        if (looked)                                 \
            again(&l);                              \
    }                                               \
    if (fits(&l, (uintptr_t)*out))                  \
        return r;                                   \
    CALL(undo, *out);                               \
    account_guessed(l.a);                           \
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
