/* SPDX-License-Identifier: Apache-2.0 */

/* Modules, whose code takes memory beside what programs allocate. An image is
 * text (PTX), or anything that begins as a cubin or a fat binary does. One that
 * begins with a line such as
 *
 *     // gpu-emulator: blocks 12 global table 4096
 *
 * takes so many blocks of 2 MiB, 1 if it does not say, and has such a variable. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda_internal.h"

struct module {
    struct context *ctx; /* NULL: a library that no context has loaded yet */
    uint64_t serial;
    struct range *code, *global;
    size_t global_size, blocks;
    char name[64]; /* of the global */
    bool library;
};

struct function {
    struct module *module;
    struct context *ctx;
    uint64_t serial;
    char name[64];
};

static CUresult read_image(const void *image, struct module *m)
{
    static const char mark[] = "// gpu-emulator:";
    const char *text = image;
    uint32_t magic;
    MUST(image);
    memcpy(&magic, image, 4);
    m->blocks = 1;
    if (magic == 0x464c457f || magic == 0xba55ed50 || magic == 0x466243b1) /* ELF, fat binary, its wrapper */
        return CUDA_SUCCESS;
    if (strncmp(text, mark, sizeof mark - 1) != 0)
        return strchr("/. \t\r\n", text[0]) && text[0] ? CUDA_SUCCESS : CUDA_ERROR_INVALID_IMAGE;
    char line[256];
    snprintf(line, sizeof line, "%.*s", (int)strcspn(text, "\n"), text);
    const char *blocks = strstr(line, "blocks "), *global = strstr(line, "global ");
    if (blocks)
        m->blocks = strtoul(blocks + 7, NULL, 10);
    if (global && sscanf(global, "global %63s %zu", m->name, &m->global_size) != 2)
        return CUDA_ERROR_INVALID_IMAGE;
    return CUDA_SUCCESS;
}

/* settle_in gives a module its memory in a context. */
static CUresult settle_in(const char *call, struct module *m, struct context *c)
{
    uint64_t bytes = m->blocks * BLOCK;
    CUdeviceptr at = 0;
    if (m->global_size)
        TRY(allocate(call, &at, m->global_size));
    CUresult r = charge(call, &devices[c->device], (int64_t)bytes);
    lock();
    m->global = at ? range_at(at) : NULL;
    if (m->global)
        m->global->kind = RANGE_GLOBAL; /* which the program cannot free */
    if (r == CUDA_SUCCESS && bytes) {
        m->code = range_hidden(c->device, c, bytes);
        if (m->code)
            m->code->charged = bytes;
    }
    m->ctx = c;
    m->serial = c->serial;
    if (r != CUDA_SUCCESS && m->global)
        drop_unlock(call, m->global);
    else
        unlock();
    return r;
}

static CUresult unload_locked(const char *call, struct module *m)
{
    struct range *code = NULL, *global = NULL;
    if (m->ctx && lives(m->ctx, m->serial)) {
        code = m->code;
        global = m->global;
    }
    object_free(m);
    if (global) {
        drop_unlock(call, global);
        lock();
    }
    if (code)
        return drop_unlock(call, code);
    unlock();
    return CUDA_SUCCESS;
}

static CUresult module_load(const char *call, enum type type, void *out, const void *image)
{
    struct context *c = NULL;
    struct module made = {.library = type == LIBRARY};
    TRY(ready());
    if (type == MODULE)
        TRY(current(&c));
    MUST(out);
    TRY(read_image(image, &made));
    lock();
    struct module *m = object_new(type);
    if (m)
        *m = made;
    unlock();
    if (!m)
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult r = c ? settle_in(call, m, c) : CUDA_SUCCESS;
    if (r != CUDA_SUCCESS) {
        lock();
        object_free(m);
        unlock();
        return r;
    }
    *(void **)out = m;
    return CUDA_SUCCESS;
}

API CUresult cuModuleLoadData(CUmodule *out, const void *image) { return module_load("cuModuleLoadData", MODULE, out, image); }
API CUresult cuModuleLoadFatBinary(CUmodule *out, const void *image) { return module_load("cuModuleLoadFatBinary", MODULE, out, image); }

API CUresult cuModuleLoadDataEx(CUmodule *out, const void *image, unsigned int count, int *options, void **values)
{
    MUST(!count || (options && values));
    return module_load("cuModuleLoadDataEx", MODULE, out, image);
}

API CUresult cuModuleUnload(CUmodule handle)
{
    TRY(ready());
    lock();
    struct module *m = object_get(handle, MODULE);
    if (m)
        return unload_locked("cuModuleUnload", m);
    unlock();
    return CUDA_ERROR_INVALID_HANDLE;
}

static CUresult function_new(void **out, struct module *m, enum type type, const char *name)
{
    struct function *f = object_new(type);
    if (!f)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *f = (struct function){.module = m, .ctx = m->ctx, .serial = m->serial};
    snprintf(f->name, sizeof f->name, "%s", name);
    *out = f;
    return CUDA_SUCCESS;
}

API CUresult cuModuleGetFunction(CUfunction *out, CUmodule handle, const char *name)
{
    TRY(ready());
    MUST(out && name && *name);
    lock();
    struct module *m = object_get(handle, MODULE);
    CUresult r = m ? function_new((void **)out, m, FUNCTION, name) : CUDA_ERROR_INVALID_HANDLE;
    unlock();
    return r;
}

static CUresult global_of(void *handle, enum type type, const char *name, CUdeviceptr *at, size_t *size)
{
    TRY(ready());
    MUST(name);
    CUresult r = CUDA_SUCCESS;
    lock();
    struct module *m = object_get(handle, type);
    if (!m)
        r = CUDA_ERROR_INVALID_HANDLE;
    else if (!m->global || !lives(m->ctx, m->serial) || strcmp(m->name, name) != 0)
        r = CUDA_ERROR_NOT_FOUND;
    if (r == CUDA_SUCCESS) {
        if (at)
            *at = m->global->at;
        if (size)
            *size = m->global_size;
    }
    unlock();
    return r;
}

API CUresult cuModuleGetGlobal_v2(CUdeviceptr *at, size_t *size, CUmodule m, const char *name) { return global_of(m, MODULE, name, at, size); }

API CUresult cuModuleGetGlobal(CUdeviceptr_v1 *at, unsigned int *size, CUmodule m, const char *name)
{
    CUdeviceptr wide;
    size_t n;
    TRY(global_of(m, MODULE, name, &wide, &n));
    if (wide > UINT32_MAX)
        return CUDA_ERROR_INVALID_VALUE;
    if (at)
        *at = (CUdeviceptr_v1)wide;
    if (size)
        *size = (unsigned int)n;
    return CUDA_SUCCESS;
}

API CUresult cuModuleGetLoadingMode(int *loading)
{
    TRY(ready());
    MUST(loading);
    *loading = 1; /* eager: a module has its memory when it is loaded */
    return CUDA_SUCCESS;
}

/* --- libraries, which a context loads at its first use of them -------------- */

API CUresult cuLibraryLoadData(CUlibrary *out, const void *code, int *jit, void **jit_values, unsigned int jit_count, int *options, void **values, unsigned int count)
{
    (void)jit_values, (void)values;
    MUST((!jit_count || jit) && (!count || options));
    return module_load("cuLibraryLoadData", LIBRARY, out, code);
}

API CUresult cuLibraryUnload(CUlibrary handle)
{
    TRY(ready());
    lock();
    struct module *m = object_get(handle, LIBRARY);
    if (m)
        return unload_locked("cuLibraryUnload", m);
    unlock();
    return CUDA_ERROR_INVALID_HANDLE;
}

static CUresult load_here(const char *call, void *handle)
{
    struct context *c;
    TRY(current(&c));
    lock();
    struct module *m = object_get(handle, LIBRARY);
    bool loaded = m && m->ctx && lives(m->ctx, m->serial);
    unlock();
    if (!m)
        return CUDA_ERROR_INVALID_HANDLE;
    return loaded ? CUDA_SUCCESS : settle_in(call, m, c);
}

API CUresult cuLibraryGetKernel(CUkernel *out, CUlibrary handle, const char *name)
{
    TRY(ready());
    MUST(out && name && *name);
    lock();
    struct module *m = object_get(handle, LIBRARY);
    CUresult r = m ? function_new((void **)out, m, FUNCTION, name) : CUDA_ERROR_INVALID_HANDLE;
    unlock();
    return r;
}

API CUresult cuLibraryGetGlobal(CUdeviceptr *at, size_t *size, CUlibrary m, const char *name)
{
    TRY(load_here("cuLibraryGetGlobal", m));
    return global_of(m, LIBRARY, name, at, size);
}

API CUresult cuKernelGetFunction(CUfunction *out, CUkernel kernel)
{
    TRY(ready());
    MUST(out);
    lock();
    struct function *f = object_get(kernel, FUNCTION);
    struct module *m = f && object_get(f->module, LIBRARY) ? f->module : NULL;
    unlock();
    if (!m)
        return CUDA_ERROR_INVALID_HANDLE;
    TRY(load_here("cuKernelGetFunction", m));
    lock();
    f->ctx = m->ctx;
    f->serial = m->serial;
    unlock();
    *out = (CUfunction)kernel;
    return CUDA_SUCCESS;
}

/* --- functions ------------------------------------------------------------- */

API CUresult cuFuncGetAttribute(int *value, int attribute, CUfunction handle)
{
    TRY(ready());
    MUST(value && attribute >= 0 && attribute < 16);
    lock();
    bool is = object_get(handle, FUNCTION);
    unlock();
    if (!is)
        return CUDA_ERROR_INVALID_HANDLE;
    *value = attribute == 0 ? 1024 : attribute == 4 ? 32 : attribute == 5 || attribute == 6 ? 90 : 0; /* threads, registers, versions */
    return CUDA_SUCCESS;
}

API CUresult cuFuncSetAttribute(CUfunction handle, int attribute, int value)
{
    int now;
    (void)value;
    return cuFuncGetAttribute(&now, attribute, handle);
}

API CUresult cuFuncGetModule(CUmodule *out, CUfunction handle)
{
    TRY(ready());
    MUST(out);
    lock();
    struct function *f = object_get(handle, FUNCTION);
    if (f)
        *out = (CUmodule)f->module;
    unlock();
    return f ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

/* A launch finds its context and its function, and no more. */
static CUresult launch(CUfunction handle, CUstream s, unsigned int blocks, unsigned int threads)
{
    struct context *c;
    CUresult r;
    TRY(stream_check(s, &c));
    if (!object_get(handle, FUNCTION)) /* handles never go out of the mapped room: no lock needed to look */
        return CUDA_ERROR_INVALID_HANDLE;
    MUST(blocks && threads && threads <= 1024);
    return capture_work(s, CU_GRAPH_NODE_TYPE_KERNEL, &r) ? r : CUDA_SUCCESS;
}

API CUresult cuLaunchKernel(CUfunction f, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx, unsigned int by, unsigned int bz,
                            unsigned int shared, CUstream s, void **parameters, void **extra)
{
    (void)shared, (void)parameters, (void)extra;
    return launch(f, s, gx * gy * gz, bx * by * bz);
}

API CUresult cuLaunchKernel_ptsz(CUfunction f, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx, unsigned int by, unsigned int bz,
                                 unsigned int shared, CUstream s, void **parameters, void **extra)
{
    (void)shared, (void)parameters, (void)extra;
    return launch(f, per_thread(s), gx * gy * gz, bx * by * bz);
}

API CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction f, void **parameters, void **extra)
{
    (void)parameters, (void)extra;
    MUST(c);
    return launch(f, c->hStream, c->gridDimX * c->gridDimY * c->gridDimZ, c->blockDimX * c->blockDimY * c->blockDimZ);
}

API CUresult cuLaunchKernelEx_ptsz(const CUlaunchConfig *c, CUfunction f, void **parameters, void **extra)
{
    (void)parameters, (void)extra;
    MUST(c);
    return launch(f, per_thread(c->hStream), c->gridDimX * c->gridDimY * c->gridDimZ, c->blockDimX * c->blockDimY * c->blockDimZ);
}
