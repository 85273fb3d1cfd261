/* SPDX-License-Identifier: Apache-2.0 */

/* share LIBRARY: begins CUDA, and says what came of it and what the environment is then. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

static const char *of(const char *name)
{
    const char *value = getenv(name);
    return value ? value : "-";
}

int main(int argc, char **argv)
{
    void *library = argc == 2 ? dlopen(argv[1], RTLD_NOW) : NULL;
    int (*init)(unsigned) = NULL;
    if (library)
        *(void **)&init = dlsym(library, "cuInit");
    if (!init) {
        puts(dlerror());
        return 1;
    }
    int result = init(0);
    printf("%d %s %s\n", result, of("CUDA_MPS_PIPE_DIRECTORY"), of("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"));
    return 0;
}
