/* SPDX-License-Identifier: Apache-2.0 */

/* All that is overridden is there in the driver of driver.c, as far as it is not
 * defined in that file. Built with -std=gnu2x, for arguments without names. */
#include "driver.h"

#define STUB(base, since, name, arguments) \
    __attribute__((weak)) CUresult name arguments { return 801; }
OVERRIDES(STUB)
