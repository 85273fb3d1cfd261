/* SPDX-License-Identifier: Apache-2.0 */

/* Modules, whose code takes memory beside what programs allocate. An image is
 * text (PTX), or anything that begins as a cubin or a fat binary does. One that
 * begins with a line such as
 *
 *     // gpu-emulator: blocks 12 global table 4096
 *
 * takes so many blocks of 2 MiB, 1 if it does not say, and has such a variable.
 * Its kernels have any name; busy_17us takes 17 microseconds.
 *
 * When code is loaded a switch or the environment variable CUDA_MODULE_LOADING says. EAGER: with
 * the module. LAZY (what drivers have done since CUDA 12.2 where it says nothing):
 * "delays loading of CUDA modules and kernels from program initialization closer to
 * kernels execution" (programming guide, "Lazy Loading"); here a module's variables
 * are loaded with it and all of its code before its first kernel runs, or at
 * cuFuncLoad. Without the variable modules are loaded eagerly here and libraries at
 * the first look at them in a context. Of libraries cuLibraryLoadData says: "the code
 * within the library is loaded immediately into all contexts at the time of the call
 * and loaded into any future contexts at the time of creation" where loading is eager,
 * and if it is lazy that it "will only be loaded when a function is needed for that
 * context, such as a kernel launch". */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cuda_internal.h"
#include "cuda_switch.h"

/* A copy is what one context has of a module. */
struct copy {
    struct context *ctx;
    uint64_t serial;
    struct range *code, *global; /* NULL: none, or not yet loaded */
    bool loaded;                 /* the code */
    struct copy *next;
};

struct module {
    struct copy *copies; /* one, of a module; of a library those of the contexts that have it */
    size_t global_size, blocks;
    char name[64]; /* of the global */
    bool library;
};

struct function {
    struct module *module;
    uint64_t serial; /* of the context's life in which its code is known to be loaded */
    char name[64];
};

/* One copy is loaded at a time, so that two threads do not load the same. */
static pthread_mutex_t loading = PTHREAD_MUTEX_INITIALIZER;

enum mode { MIXED, EAGER, LAZY };

static enum mode mode(void)
{
    if (switches.loading != LOADING_ENVIRONMENT)
        return switches.loading == LOADING_LAZY ? LAZY : EAGER;
    const char *how = getenv("CUDA_MODULE_LOADING");
    return !how ? MIXED : strcmp(how, "EAGER") == 0 ? EAGER : strcmp(how, "LAZY") == 0 ? LAZY : MIXED;
}

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

/* copy_in is what a context has of a module; the lock is held. */
static struct copy *copy_in(const struct module *m, const struct context *c)
{
    for (struct copy *o = m->copies; o; o = o->next)
        if (lives(o->ctx, o->serial) && (o->ctx == c || !m->library))
            return o;
    return NULL;
}

/* take_variables makes a copy with the module's variables, which are loaded first.
 * loading is held. */
static CUresult take_variables(const char *call, struct module *m, struct context *c)
{
    CUdeviceptr at = 0;
    if (m->global_size)
        TRY(allocate_in(call, &at, c, m->global_size));
    lock();
    struct copy *o = calloc(1, sizeof *o);
    struct range *global = at ? range_at(at) : NULL;
    if (!o && global)
        return drop_unlock(call, global), CUDA_ERROR_OUT_OF_MEMORY;
    if (o) {
        if (global)
            global->kind = RANGE_GLOBAL; /* which the program cannot free */
        *o = (struct copy){.ctx = c, .serial = c->serial, .global = global, .next = m->copies};
        m->copies = o;
    }
    unlock();
    return o ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

/* load gives a context what it needs of a module: all, or all but the code. */
static CUresult load(const char *call, struct module *m, struct context *c, bool code)
{
    pthread_mutex_lock(&loading);
    lock();
    struct copy *o = copy_in(m, c);
    unlock();
    CUresult r = o ? CUDA_SUCCESS : take_variables(call, m, c);
    bool fresh = !o;
    if (r == CUDA_SUCCESS && code && !(o && o->loaded)) {
        uint64_t bytes = m->blocks * BLOCK;
        r = charge(call, &devices[c->device], (int64_t)bytes);
        lock();
        o = copy_in(m, c);
        if (r == CUDA_SUCCESS && o) {
            o->code = bytes ? range_hidden(c->device, c, bytes) : NULL;
            if (o->code)
                o->code->charged = bytes;
            o->loaded = true;
        } else if (o && fresh && o->global) { /* nothing of a module that does not fit */
            struct range *global = o->global;
            m->copies = o->next;
            free(o);
            drop_unlock(call, global);
            lock();
        }
        unlock();
    }
    pthread_mutex_unlock(&loading);
    return r;
}

/* unload_locked takes the lock held and gives it up. */
static CUresult unload_locked(const char *call, struct module *m)
{
    CUresult r = CUDA_SUCCESS;
    struct copy *copies = m->copies;
    object_free(m);
    for (struct copy *o; (o = copies);) {
        copies = o->next;
        struct range *of[] = {o->global, o->code};
        for (int i = 0; i < 2 && lives(o->ctx, o->serial); i++)
            if (of[i]) {
                CUresult dropped = drop_unlock(call, of[i]);
                r = dropped != CUDA_SUCCESS ? dropped : r;
                lock();
            }
        free(o);
    }
    unlock();
    return r;
}

/* --- libraries in all contexts ---------------------------------------------- */

enum { MOST_CONTEXTS = 256 };
struct list {
    void *at[MOST_CONTEXTS];
    int count;
};

static bool collect(void *object, void *arg)
{
    struct list *l = arg;
    if (l->count < MOST_CONTEXTS)
        l->at[l->count++] = object;
    return true;
}

static CUresult load_everywhere(const char *call, struct module *m)
{
    struct list contexts = {.count = 0};
    lock();
    for (int i = 0; i < device_count; i++)
        collect(&devices[i].primary, &contexts);
    object_each(CONTEXT, collect, &contexts);
    unlock();
    CUresult r = CUDA_SUCCESS;
    for (int i = 0; i < contexts.count && r == CUDA_SUCCESS; i++) {
        struct context *c = contexts.at[i];
        if (c->alive)
            r = load(call, m, c, true);
    }
    return r;
}

CUresult modules_begin(const char *call, struct context *c)
{
    struct list libraries = {.count = 0};
    if (mode() != EAGER)
        return CUDA_SUCCESS;
    lock();
    object_each(LIBRARY, collect, &libraries);
    unlock();
    for (int i = 0; i < libraries.count; i++)
        TRY(load(call, libraries.at[i], c, true));
    return CUDA_SUCCESS;
}

/* --- modules ----------------------------------------------------------------- */

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
    CUresult r = CUDA_SUCCESS;
    if (c)
        r = load(call, m, c, mode() != LAZY);
    else if (mode() == EAGER)
        r = load_everywhere(call, m);
    if (r != CUDA_SUCCESS) {
        lock();
        unload_locked(call, m);
        return r;
    }
    *(void **)out = m;
    return CUDA_SUCCESS;
}

/* module_load_file maps a file, with a zero after its last byte as text has. */
static CUresult module_load_file(const char *call, enum type type, void *out, const char *path)
{
    struct stat is;
    MUST(path);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return CUDA_ERROR_FILE_NOT_FOUND;
    char *image = fstat(fd, &is) == 0 && is.st_size >= 4 ? calloc(1, (size_t)is.st_size + 1) : NULL;
    ssize_t n = image ? read(fd, image, (size_t)is.st_size) : 0;
    close(fd);
    CUresult r = n >= 4 ? module_load(call, type, out, image) : CUDA_ERROR_INVALID_IMAGE;
    free(image);
    return r;
}

API CUresult cuModuleLoad(CUmodule *out, const char *path) { return module_load_file("cuModuleLoad", MODULE, out, path); }
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
    *f = (struct function){.module = m};
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
    struct context *c = NULL;
    TRY(ready());
    MUST(name);
    if (type == LIBRARY)
        TRY(current(&c));
    CUresult r = CUDA_SUCCESS;
    lock();
    struct module *m = object_get(handle, type);
    struct copy *o = m ? copy_in(m, c) : NULL;
    if (!m)
        r = CUDA_ERROR_INVALID_HANDLE;
    else if (!o || !o->global || strcmp(m->name, name) != 0)
        r = CUDA_ERROR_NOT_FOUND;
    if (r == CUDA_SUCCESS) {
        if (at)
            *at = o->global->at;
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

API CUresult cuModuleGetLoadingMode(int *how)
{
    TRY(ready());
    MUST(how);
    *how = mode() == LAZY ? 2 : 1;
    return CUDA_SUCCESS;
}

/* --- libraries --------------------------------------------------------------- */

API CUresult cuLibraryLoadData(CUlibrary *out, const void *code, int *jit, void **jit_values, unsigned int jit_count, int *options, void **values, unsigned int count)
{
    (void)jit_values, (void)values;
    MUST((!jit_count || jit) && (!count || options));
    return module_load("cuLibraryLoadData", LIBRARY, out, code);
}

API CUresult cuLibraryLoadFromFile(CUlibrary *out, const char *path, int *jit, void **jit_values, unsigned int jit_count, int *options, void **values, unsigned int count)
{
    (void)jit_values, (void)values;
    MUST((!jit_count || jit) && (!count || options));
    return module_load_file("cuLibraryLoadFromFile", LIBRARY, out, path);
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

/* load_here gives the current context what it needs of a library. */
static CUresult load_here(const char *call, void *handle, bool code)
{
    struct context *c;
    TRY(current(&c));
    lock();
    struct module *m = object_get(handle, LIBRARY);
    unlock();
    return m ? load(call, m, c, code) : CUDA_ERROR_INVALID_HANDLE;
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
    TRY(load_here("cuLibraryGetGlobal", m, mode() != LAZY));
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
    TRY(load_here("cuKernelGetFunction", m, mode() != LAZY));
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

/* prepare makes a function ready to run in a context. */
static CUresult prepare(const char *call, struct function *f, struct context *c)
{
    if (f->serial == c->serial && (object_get(f->module, MODULE) || object_get(f->module, LIBRARY)))
        return CUDA_SUCCESS;
    lock();
    struct module *m = object_get(f->module, MODULE);
    m = m ? m : object_get(f->module, LIBRARY);
    struct copy *o = m ? copy_in(m, c) : NULL;
    bool has = o || (m && m->library);
    unlock();
    if (!has) /* it was unloaded, or its context is gone */
        return CUDA_ERROR_INVALID_HANDLE;
    TRY(load(call, m, c, true));
    f->serial = c->serial;
    return CUDA_SUCCESS;
}

/* "Finalizes function loading. Calling this API with a fully loaded function has no
 * effect." */
API CUresult cuFuncLoad(CUfunction handle)
{
    struct context *c;
    TRY(current(&c));
    lock();
    struct function *f = object_get(handle, FUNCTION);
    unlock();
    return f ? prepare("cuFuncLoad", f, c) : CUDA_ERROR_INVALID_HANDLE;
}

API CUresult cuFuncIsLoaded(int *state, CUfunction handle)
{
    struct context *c;
    TRY(current(&c));
    MUST(state);
    lock();
    struct function *f = object_get(handle, FUNCTION);
    struct module *m = f ? object_get(f->module, MODULE) : NULL;
    m = m || !f ? m : object_get(f->module, LIBRARY);
    struct copy *o = m ? copy_in(m, c) : NULL;
    *state = o && o->loaded;
    unlock();
    return m ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

uint64_t kernel_us(CUfunction handle)
{
    struct function *f = object_get(handle, FUNCTION);
    unsigned int us;
    char end[3] = "";
    if (f && sscanf(f->name, "busy_%u%2s", &us, end) == 2 && strcmp(end, "us") == 0)
        return us;
    return (uint64_t)switches.kernel_us;
}

/* A launch finds its context and its function, whose code is loaded first, and
 * takes the stream's time. */
static CUresult launch(CUfunction handle, CUstream s, unsigned int blocks, unsigned int threads)
{
    struct context *c;
    CUresult r;
    TRY(stream_check(s, &c));
    struct function *f = object_get(handle, FUNCTION);
    if (!f) /* handles never go out of the mapped room: no lock needed to look */
        return CUDA_ERROR_INVALID_HANDLE;
    MUST(blocks && threads && threads <= 1024);
    TRY(prepare("cuLaunchKernel", f, c));
    TRY(limits_launch(c, f->name));
    uint64_t us = kernel_us(handle);
    if (capture_work(s, CU_GRAPH_NODE_TYPE_KERNEL, us, &r))
        return r;
    stream_work(s, c, us);
    return CUDA_SUCCESS;
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
