/* SPDX-License-Identifier: Apache-2.0 */

/* neighbour LIBRARY USAGE_PAGE: while no agent reads, a module is charged by what the card has
 * less after it, but not what another container takes at that moment: no reading would correct
 * that. */
#include "modules.h"

int main(int argc, char **argv)
{
    size_t image[2] = {MIB, 300 * MIB}, large[2] = {100 * MIB, 0};
    CUmodule m, n;
    if (!begin(argc, argv))
        return 2;
    WANT("load", load(&m, image), CUDA_SUCCESS);
    WANT("MiB charged for another's 300 and a module of one", bound_mib(), 1);
    WANT("load", load(&n, large), CUDA_SUCCESS);
    WANT("MiB charged for modules of 1 and 100", bound_mib(), 101);
    large[0] = 1000 * MIB;
    WANT("load of more than there is room for", load(&n, large), CUDA_ERROR_OUT_OF_MEMORY);
    WANT("MiB charged after it", bound_mib(), 101);
    WANT("unload", unload(m), CUDA_SUCCESS);
    WANT("MiB charged for 100", bound_mib(), 100);
    return 0;
}
