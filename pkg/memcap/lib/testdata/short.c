/* SPDX-License-Identifier: Apache-2.0 */

/* short LIBRARY USAGE_PAGE: no context of this page was seen to take more than was expected, and
 * the agent reads every second, or would. A program that takes 900 MiB of a GiB as soon as it has a
 * context does not wait for a reading. Later it waits, once: its first kernels have run. */
#include <unistd.h>

#include "modules.h"

int main(int argc, char **argv)
{
    CUresult (*create)(CUcontext *, unsigned int, CUdevice);
    CUcontext context;
    CUdeviceptr at;
    if (!begin(argc, argv))
        return 2;
    *(void **)&create = dlsym(dlopen(argv[1], RTLD_NOW), "cuCtxCreate_v2");
    WANT("context", create(&context, 0, 0), CUDA_SUCCESS);
    WANT("allocation", alloc(&at, 900 * MIB), CUDA_SUCCESS);
    WANT("readings asked for by then", word(offsetof(struct usage_page, asks)), 0);
    sleep(1);
    WANT("allocation", alloc(&at, 20 * MIB), CUDA_SUCCESS);
    WANT("readings asked for a second later", word(offsetof(struct usage_page, asks)), 1);
    return 0;
}
