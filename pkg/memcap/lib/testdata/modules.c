/* SPDX-License-Identifier: Apache-2.0 */

/* modules LIBRARY USAGE_PAGE: with an agent that reads, or so it says. Far from the cap of 1 GiB a
 * load is not measured, however busy other threads are, and what another container takes meanwhile
 * is not charged. If the reading that has to tell does not come, what was loaded is charged
 * before the cap is near. */
#include <pthread.h>

#include "modules.h"

static int stop;

static void *busy(void *arg)
{
    CUdeviceptr at;
    while (!__atomic_load_n(&stop, __ATOMIC_RELAXED))
        if (alloc(&at, 2 * MIB) != CUDA_SUCCESS || give(at) != CUDA_SUCCESS)
            return "FAILED";
    return arg;
}

int main(int argc, char **argv)
{
    enum { LOADS = 20 };
    size_t image[2] = {MIB, 300 * MIB};
    CUmodule m;
    CUdeviceptr at;
    pthread_t thread;
    void *said = NULL;
    if (!begin(argc, argv))
        return 2;
    WANT("load", load(&m, image), CUDA_SUCCESS);
    WANT("MiB charged for another's 300 and a module of one", bound_mib(), 0);
    WANT("unload", unload(m), CUDA_SUCCESS);

    int before = *looks;
    WANT("thread", pthread_create(&thread, NULL, busy, NULL), 0);
    for (int i = 0; i < LOADS; i++) {
        WANT("load beside a busy thread", load(&m, image), CUDA_SUCCESS);
        WANT("unload", unload(m), CUDA_SUCCESS);
    }
    __atomic_store_n(&stop, 1, __ATOMIC_RELAXED);
    pthread_join(thread, &said);
    WANT("busy thread", said != NULL, 0);
    WANT("looks at what the card has free", *looks - before, 2 * LOADS);

    /* What was loaded so far may be 321 MiB, since nobody has told. */
    WANT("readings asked for", word(offsetof(struct usage_page, asks)), 0);
    WANT("allocation", alloc(&at, 600 * MIB), CUDA_SUCCESS);
    WANT("allocation near the cap", alloc(&at, 200 * MIB), CUDA_ERROR_OUT_OF_MEMORY);
    WANT("MiB charged when no reading came", bound_mib(), 600 + 301 + LOADS);
    return 0;
}
