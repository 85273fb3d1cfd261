/* SPDX-License-Identifier: Apache-2.0 */

/* libcuda.so.1: a library that loads and links, of a driver that finds no
 * device to compute on. */

enum { CUDA_ERROR_INVALID_VALUE = 1, CUDA_ERROR_NO_DEVICE = 100 };

int cuInit(unsigned int flags) { return flags ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_NO_DEVICE; }

int cuDriverGetVersion(int *version)
{
    if (!version)
        return CUDA_ERROR_INVALID_VALUE;
    *version = CUDA_VERSION;
    return 0;
}
