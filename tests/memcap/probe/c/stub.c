/* SPDX-License-Identifier: Apache-2.0 */

/* A libcuda.so.1 to link against, with the names and nothing behind them. */
#include "abi.h"

#define F(name, base, since, twin, parameters) \
    int name(void) { return CUDA_ERROR_NOT_FOUND; }
FUNCTIONS(F)
