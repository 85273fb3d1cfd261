/* SPDX-License-Identifier: Apache-2.0 */

/* hold LIBRARY MIB [busy]: take so much memory of the first visible CUDA device, say
 * "ready" and keep it until standard input ends, with the device busy or idle. */
#include <poll.h>
#include <unistd.h>

#include "driver.h"

/* A kernel that takes 20 ms. */
static const char ptx[] =
    "// gpu-emulator: blocks 0\n"
    ".version 7.0\n.target sm_52\n.address_size 64\n"
    ".visible .entry busy_20000us()\n{\n .reg .u64 %t<3>;\n .reg .pred %p;\n"
    " mov.u64 %t0, %globaltimer;\nagain:\n mov.u64 %t1, %globaltimer;\n"
    " sub.u64 %t2, %t1, %t0;\n setp.lt.u64 %p, %t2, 20000000;\n @%p bra again;\n ret;\n}\n";

/* work runs kernels until there is something to read. */
static void work(void *lib)
{
    void *module, *kernel;
    must(find(lib, "cuModuleLoadData")(&module, ptx), "cuModuleLoadData");
    must(find(lib, "cuModuleGetFunction")(&kernel, module, "busy_20000us"), "cuModuleGetFunction");
    struct pollfd in = {.fd = STDIN_FILENO, .events = POLLIN};
    while (poll(&in, 1, 0) == 0) {
        must(find(lib, "cuLaunchKernel")(kernel, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL), "cuLaunchKernel");
        must(find(lib, "cuCtxSynchronize")(), "cuCtxSynchronize");
    }
}

int main(int argc, char **argv)
{
    if (argc < 3)
        return 2;
    void *lib = dlopen(argv[1], RTLD_NOW);
    if (!lib) {
        fprintf(stderr, "%s\n", dlerror());
        return 1;
    }
    int device = 0;
    void *context = NULL;
    unsigned long long at = 0;
    must(find(lib, "cuInit")(0u), "cuInit");
    must(find(lib, "cuDeviceGet")(&device, 0), "cuDeviceGet");
    must(find(lib, "cuDevicePrimaryCtxRetain")(&context, device), "cuDevicePrimaryCtxRetain");
    must(find(lib, "cuCtxSetCurrent")(context), "cuCtxSetCurrent");
    must(find(lib, "cuMemAlloc_v2")(&at, (size_t)strtoull(argv[2], NULL, 10) << 20), "cuMemAlloc");
    puts("ready");
    fflush(stdout);
    if (argc > 3)
        work(lib);
    char c;
    while (read(STDIN_FILENO, &c, 1) > 0)
        ;
    return 0;
}
