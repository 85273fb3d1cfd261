/* SPDX-License-Identifier: Apache-2.0 */

/* The program hold has the driver limit a container's GPU memory before the container's first
 * instruction. The container runtime runs it as an OCI createRuntime hook: as root, in the host's
 * namespaces, after it has made the container's cgroup. Drivers of R615 and later can limit cgroups.
 *
 *     hold closed|open DIR KEY LIBRARY GPU=BYTES...
 *
 * LIBRARY is the driver's libnvidia-ml.so. hold finds the container's cgroup from the OCI state on
 * standard input, sets the limit of each GPU, and reads it back. What it came to is in DIR. If it
 * fails, it writes a sentence to standard error. With "closed" its status is then 1, the runtime
 * throws the container away, and the kubelet shows the sentence in the pod's Events. With "open" the
 * container starts without the driver's limit.
 *
 * A limit has a soft part, which guarantees memory, and a hard one. The soft part is 0: what it
 * raises in the cgroups above stays there when the container is gone. So the hook also takes away a
 * soft limit that another program has set on the container's cgroup.
 *
 * hold never reads the container's environment, configuration, or files. */

#include "hold.h"

#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Since glibc 2.34 these are in libc and have a new version, which older systems lack. */
#if defined(__x86_64__)
#define OLD(name) __asm__(".symver " #name "," #name "@GLIBC_2.2.5")
#elif defined(__aarch64__)
#define OLD(name) __asm__(".symver " #name "," #name "@GLIBC_2.17")
#else
#error "the cap is for x86_64 and aarch64"
#endif
OLD(dlopen);
OLD(dlsym);
OLD(dlerror);

/* The start files of a newer glibc would need that glibc. */
#if defined(__x86_64__)
__asm__(".globl _start\n.hidden _start\n_start:\n\txor %ebp, %ebp\n\tmov %rsp, %rdi\n\tand $-16, %rsp\n\tcall begin\n\thlt\n");
#else
__asm__(".globl _start\n.hidden _start\n_start:\n\tmov x29, #0\n\tmov x30, #0\n\tmov x0, sp\n\tb begin\n");
#endif

/* How long the driver may take, in seconds. Then hold gives up, and the sentence says why. */
enum { PATIENCE = 10 };

char why[WHY_BYTES];
static bool closed = true;

bool failed(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(why, sizeof why, format, args);
    va_end(args);
    for (char *c = why; *c; c++)
        if ((unsigned char)*c < ' ')
            *c = ' ';
    return false;
}

char *read_all(int fd, size_t most, size_t *length)
{
    size_t size = 4096, have = 0;
    char *all = malloc(size + 1);
    while (all) {
        ssize_t n = read(fd, all + have, size - have);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            break;
        if (n == 0) {
            all[have] = 0;
            *length = have;
            return all;
        }
        have += (size_t)n;
        if (have > most) {
            errno = EFBIG;
            break;
        }
        if (have == size) {
            char *more = realloc(all, 2 * size + 1);
            if (!more)
                break;
            all = more;
            size *= 2;
        }
    }
    int kept = errno;
    free(all);
    errno = kept;
    return NULL;
}

bool number(const char *text, const char *end, uint64_t *value)
{
    uint64_t n = 0;
    if (text == end)
        return false;
    for (; text < end; text++)
        if (*text < '0' || *text > '9' || __builtin_mul_overflow(n, 10, &n) ||
            __builtin_add_overflow(n, (uint64_t)(*text - '0'), &n))
            return false;
    *value = n;
    return true;
}

/* NVML, as nvml.h declares it. */
struct set_limits {
    const char *cgroup;
    unsigned long long soft, hard;
};
struct get_limits {
    const char *cgroup;
    unsigned long long soft, hard, used;
};
enum { NOT_SUPPORTED = 3, NOT_FOUND = 6, OPERATING_SYSTEM = 17 };

static int (*nvml_init)(void);
static int (*nvml_shutdown)(void);
static int (*nvml_handle)(const char *uuid, void **device);
static int (*nvml_set)(void *device, struct set_limits *);
static int (*nvml_get)(void *device, struct get_limits *);
static const char *(*nvml_error)(int);

static bool load(const char *library)
{
    static const struct {
        const char *name;
        void *to;
    } functions[] = {
        {"nvmlInit_v2", &nvml_init}, {"nvmlShutdown", &nvml_shutdown},
        {"nvmlDeviceGetHandleByUUID", &nvml_handle}, {"nvmlErrorString", &nvml_error},
        {"nvmlDeviceSetMemoryLimits_v1", &nvml_set}, {"nvmlDeviceGetMemoryLimits_v1", &nvml_get},
    };
    void *nvml = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    if (!nvml)
        return failed("load the driver's library: %s", dlerror());
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        void *f = dlsym(nvml, functions[i].name);
        if (!f)
            return failed("%s has no %s; driver R615 is the first with memory limits", library, functions[i].name);
        memcpy(functions[i].to, &f, sizeof f);
    }
    return true;
}

static const char *meaning(int r)
{
    switch (r) {
    case NOT_SUPPORTED: return "the GPU cannot limit memory by cgroup";
    case NOT_FOUND: return "the cgroup lacks the controller dmem: enable it in the cgroup.subtree_control of each cgroup above";
    case OPERATING_SYSTEM: return "the driver cannot open the cgroup";
    }
    const char *text = nvml_error(r);
    return text ? text : "unknown error";
}

/* limit_one limits one cgroup on one GPU, and reads the limit back. */
static bool limit_one(void *device, const char *cgroup, struct gpu_limit *l)
{
    struct set_limits to = {cgroup, 0, l->sum};
    int r = nvml_set(device, &to);
    if (r)
        return failed("limit cgroup %s to %llu bytes of %s: %s (NVML error %d)", cgroup, to.hard, l->gpu, meaning(r), r);
    struct get_limits is = {.cgroup = cgroup};
    r = nvml_get(device, &is);
    if (r)
        return failed("read the limit of cgroup %s on %s back: %s (NVML error %d)", cgroup, l->gpu, meaning(r), r);
    /* The driver may round down, but not up. */
    if (is.hard > l->sum || is.soft != 0)
        return failed("limit cgroup %s to %llu bytes of %s: the driver reports %llu bytes, and %llu guaranteed", cgroup,
                      to.hard, l->gpu, is.hard, is.soft);
    l->got = is.hard;
    return true;
}

static bool limit_all(const struct cgroups *of, struct gpu_limit *limits, int count)
{
    for (int i = 0; i < count; i++) {
        void *device;
        int r = nvml_handle(limits[i].gpu, &device);
        if (r)
            return failed("find %s: %s (NVML error %d)", limits[i].gpu, nvml_error(r), r);
        for (int j = 0; j < of->count; j++)
            if (!limit_one(device, of->path[j], &limits[i]))
                return false;
    }
    return true;
}

/* too_late ends the program. The record says already that the hook did not come to its end. */
static void too_late(int signal)
{
    (void)signal;
    static const char text[] = "gpu-agent: limit GPU memory in the driver: the driver has not answered in time\n";
    ssize_t ignored = write(2, text, sizeof text - 1);
    (void)ignored;
    _exit(closed ? 1 : 0);
}

static bool parse(int argc, char **argv, struct gpu_limit *limits, int *count)
{
    if (argc < 6 || argc - 5 > GPUS_MOST)
        return failed("want closed|open DIR KEY LIBRARY and 1 to %d of GPU=BYTES, got %d arguments", GPUS_MOST, argc - 1);
    if (strcmp(argv[1], "open") && strcmp(argv[1], "closed"))
        return failed("the policy is \"%s\", want closed or open", argv[1]);
    closed = strcmp(argv[1], "open") != 0;
    for (int i = 5; i < argc; i++) {
        struct gpu_limit *l = &limits[(*count)++];
        char *equals = strchr(argv[i], '=');
        if (!equals || equals == argv[i] || !number(equals + 1, argv[i] + strlen(argv[i]), &l->own) || l->own == 0)
            return failed("\"%s\" is not GPU=BYTES", argv[i]);
        *equals = 0;
        l->gpu = argv[i];
        l->sum = l->own;
    }
    return true;
}

/* hold does all of it. The record is open once its directory is there. */
static bool hold(int argc, char **argv, struct record *r)
{
    static struct gpu_limit limits[GPUS_MOST];
    static struct cgroups cgroups;
    static char id[ID_BYTES];
    uint64_t pid = 0;
    int count = 0;
    if (!parse(argc, argv, limits, &count) || !read_state(0, id, &pid))
        return false;
    *r = (struct record){.dir = -1, .key = argv[3], .cgroup = "", .limits = limits, .count = count};
    if (!open_record(r, argv[2], id) || !add_others(r) || !find_cgroups(id, pid, &cgroups))
        return false;
    r->cgroup = cgroups.relative;
    /* If this program is killed, or the driver hangs, the record is true all the same. */
    if (!write_record(r, "it did not come to its end"))
        return false;
    signal(SIGALRM, too_late);
    alarm(PATIENCE);
    if (!load(argv[4]))
        return false;
    int code = nvml_init();
    if (code)
        return failed("start the driver's library: %s (NVML error %d)", nvml_error(code), code);
    bool done = limit_all(&cgroups, limits, count);
    nvml_shutdown();
    alarm(0);
    return done && write_record(r, "");
}

__attribute__((used, noreturn, visibility("hidden"))) void begin(long *stack)
{
    struct record r = {.dir = -1};
    if (hold((int)stack[0], (char **)(stack + 1), &r))
        _exit(0);
    alarm(0);
    static char sentence[WHY_BYTES];
    memcpy(sentence, why, sizeof sentence);
    dprintf(2, "gpu-agent: limit GPU memory in the driver: %s\n", sentence);
    if (r.dir >= 0 && !write_record(&r, sentence))
        dprintf(2, "gpu-agent: and the agent cannot be told: %s\n", why);
    _exit(closed ? 1 : 0);
}
