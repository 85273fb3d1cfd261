/* SPDX-License-Identifier: Apache-2.0 */

/* Checkpoints of other processes (CUDA 12.8). The world moves the memory; this process only waits
 * while it is locked. Contents are kept of words that are copied one at a time. */
#include "cuda_internal.h"
#include "transport.h"

typedef struct {
    unsigned int timeoutMs, reserved0;
    uint64_t reserved1[7];
} CUcheckpointLockArgs;
_Static_assert(sizeof(CUcheckpointLockArgs) == 64, "CUcheckpointLockArgs");
typedef struct {
    uint64_t reserved[8];
} CUcheckpointArgs;

static CUresult about(const char *call, int pid, const unsigned int *more, unsigned int *out)
{
    struct call c;
    TRY(ready());
    begin(&c, call, NO_HANDLE);
    put_u32(&c, (uint32_t)pid);
    if (more)
        put_u32(&c, *more);
    TRY(translate(send_call(&c)));
    if (out)
        *out = get_u32(&c);
    return CUDA_SUCCESS;
}

/* unused says that nothing is set that has no meaning yet. */
static bool unused(const void *args, size_t from)
{
    for (size_t i = from; args && i < 64; i++)
        if (((const char *)args)[i])
            return false;
    return true;
}

API CUresult cuCheckpointProcessGetRestoreThreadId(int pid, int *tid)
{
    MUST(tid);
    return about(__func__, pid, NULL, (unsigned int *)tid);
}

API CUresult cuCheckpointProcessGetState(int pid, int *state)
{
    MUST(state);
    return about(__func__, pid, NULL, (unsigned int *)state);
}

API CUresult cuCheckpointProcessLock(int pid, const CUcheckpointLockArgs *args)
{
    unsigned int ms = args ? args->timeoutMs : 0;
    MUST(unused(args, 4));
    return about(__func__, pid, &ms, NULL);
}

#define CHANGE(name)                                          \
    API CUresult name(int pid, const CUcheckpointArgs *args) \
    {                                                         \
        MUST(unused(args, 0));                                \
        return about(__func__, pid, NULL, NULL);              \
    }
CHANGE(cuCheckpointProcessCheckpoint)
CHANGE(cuCheckpointProcessRestore)
CHANGE(cuCheckpointProcessUnlock)

CUresult await_turn(void)
{
    struct call c;
    begin(&c, "cuEmulatorTurn", NO_HANDLE);
    return translate(send_call(&c));
}

CUresult store(uint64_t at, uint64_t word)
{
    struct call c;
    if (asks_nobody())
        return CUDA_SUCCESS;
    begin(&c, "cuEmulatorStore", NO_HANDLE);
    put_u64(&c, at);
    put_u64(&c, word);
    return translate(send_call(&c));
}

CUresult load_word(uint64_t at, uint64_t *word)
{
    struct call c;
    *word = 0;
    if (asks_nobody())
        return CUDA_SUCCESS;
    begin(&c, "cuEmulatorLoad", NO_HANDLE);
    put_u64(&c, at);
    TRY(translate(send_call(&c)));
    *word = get_u64(&c);
    return CUDA_SUCCESS;
}
