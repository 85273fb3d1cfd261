/* SPDX-License-Identifier: Apache-2.0 */

/* starts LIBRARY USAGE_PAGE: programs that take 700 MiB of a GiB and end, one after the other,
 * while the agent does not read. None asks for a reading, so none waits for one. */
#include <dlfcn.h>
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "driver.h"
#include "page.h"

static int program(const char *path)
{
    void *library = dlopen(path, RTLD_NOW);
    CUresult (*create)(CUcontext *, unsigned int, CUdevice), (*alloc)(CUdeviceptr *, size_t);
    CUcontext context;
    CUdeviceptr at;
    if (!library)
        return 1;
    *(void **)&create = dlsym(library, "cuCtxCreate_v2");
    *(void **)&alloc = dlsym(library, "cuMemAlloc_v2");
    return create(&context, 0, 0) ? 2 : alloc(&at, (size_t)700 << 20) ? 3 : 0;
}

int main(int argc, char **argv)
{
    for (int i = 0; argc == 3 && i < 5; i++) {
        int status;
        pid_t child = fork();
        if (child == 0)
            _exit(program(argv[1]));
        if (child < 0 || waitpid(child, &status, 0) != child || status != 0) {
            printf("FAILED: program %d ends with status %x\n", i, status);
            return 1;
        }
    }
    uint64_t asks = 1;
    FILE *f = argc == 3 ? fopen(argv[2], "r") : NULL;
    if (!f || fseek(f, offsetof(struct usage_page, asks), SEEK_SET) || fread(&asks, sizeof asks, 1, f) != 1 || asks) {
        printf("FAILED: %llu readings were asked for\n", (unsigned long long)asks);
        return 1;
    }
    fclose(f);
    return 0;
}
