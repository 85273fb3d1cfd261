/* SPDX-License-Identifier: Apache-2.0 */

/* multicast LIBRARY USAGE_PAGE: memory that was bound to a multicast object, by its handle or by
 * an address, stays charged after all else has let go of it. */
#include "modules.h"

int main(int argc, char **argv)
{
    CUresult (*create)(CUhandle *, size_t, const CUmemprop *, unsigned long long), (*release)(CUhandle), (*map)(CUdeviceptr, size_t, size_t, CUhandle, unsigned long long),
        (*unmap)(CUdeviceptr, size_t), (*bind)(CUhandle, size_t, CUhandle, size_t, size_t, unsigned long long),
        (*bind_at)(CUhandle, CUdevice, size_t, CUdeviceptr, size_t, unsigned long long);
    CUmemprop prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE}};
    CUhandle h;
    if (!begin(argc, argv))
        return 2;
    void *library = dlopen(argv[1], RTLD_NOW);
    *(void **)&create = dlsym(library, "cuMemCreate");
    *(void **)&release = dlsym(library, "cuMemRelease");
    *(void **)&map = dlsym(library, "cuMemMap");
    *(void **)&unmap = dlsym(library, "cuMemUnmap");
    *(void **)&bind = dlsym(library, "cuMulticastBindMem");
    *(void **)&bind_at = dlsym(library, "cuMulticastBindAddr_v2");
    WANT("create", create(&h, 64 * MIB, &prop, 0), CUDA_SUCCESS);
    WANT("release", release(h), CUDA_SUCCESS);
    WANT("MiB charged for what was never bound", bound_mib(), 0);
    WANT("create", create(&h, 64 * MIB, &prop, 0), CUDA_SUCCESS);
    WANT("bind", bind(7, 0, h, 0, 64 * MIB, 0), CUDA_SUCCESS);
    WANT("release", release(h), CUDA_SUCCESS);
    WANT("MiB charged for what is bound by its handle", bound_mib(), 64);
    WANT("create", create(&h, 64 * MIB, &prop, 0), CUDA_SUCCESS);
    WANT("map", map((CUdeviceptr)1 << 41, 64 * MIB, 0, h, 0), CUDA_SUCCESS);
    WANT("bind", bind_at(7, 0, 0, (CUdeviceptr)1 << 41, 64 * MIB, 0), CUDA_SUCCESS);
    WANT("unmap", unmap((CUdeviceptr)1 << 41, 64 * MIB), CUDA_SUCCESS);
    WANT("release", release(h), CUDA_SUCCESS);
    WANT("MiB charged for both", bound_mib(), 128);
    return 0;
}
