/* SPDX-License-Identifier: Apache-2.0 */

/* turns LIBRARY USAGE_PAGE: a program whose page has no percentage. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

#include "driver.h"

extern char **environ;

int main(int argc, char **argv)
{
    static char own[] = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=90";
    static char *theirs[] = {own, NULL};
    void *library = argc == 3 ? dlopen(argv[1], RTLD_NOW) : NULL;
    CUresult (*init)(unsigned int), (*create)(CUcontext *, unsigned int, CUdevice);
    CUcontext context;
    environ = theirs;
    if (!library)
        return 1;
    *(void **)&init = dlsym(library, "cuInit");
    *(void **)&create = dlsym(library, "cuCtxCreate_v2");
    CUresult began = init(0), wrong = init(1), made = create(&context, 0, 0);
    if (began || wrong != CUDA_ERROR_INVALID_VALUE || made)
        printf("FAILED: cuInit answers %d and %d, cuCtxCreate %d\n", began, wrong, made);
    if (environ != theirs || theirs[0] != own || theirs[1])
        printf("FAILED: the environment is another\n");
    return 0;
}
