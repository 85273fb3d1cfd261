/* SPDX-License-Identifier: Apache-2.0 */

/* The door of programs that were linked against libcuda.so.1: the loader has
 * found the functions before main. Weak, so that a driver without one of the
 * names is no reason not to start. */
#include "probe.h"

#define F(name, base, since, twin, parameters) extern __attribute__((weak)) CUresult name parameters;
FUNCTIONS(F)
#undef F

const struct linked linked_table[] = {
#define F(name, base, since, twin, parameters) {#name, (void *)name},
    FUNCTIONS(F)
#undef F
    {0},
};
