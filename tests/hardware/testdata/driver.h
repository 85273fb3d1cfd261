/* SPDX-License-Identifier: Apache-2.0 */

/* What the programs here share that call the CUDA driver. The few calls are declared where
 * they are made, by hand, so that it builds without CUDA's headers. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

typedef int (*call)();

static call find(void *library, const char *name)
{
    call f = (call)dlsym(library, name);
    if (!f) {
        fprintf(stderr, "libcuda has no %s\n", name);
        exit(1);
    }
    return f;
}

static void must(int result, const char *what)
{
    if (result) {
        fprintf(stderr, "%s: CUDA error %d\n", what, result);
        exit(1);
    }
}
