/* SPDX-License-Identifier: Apache-2.0 */

/* smshare LIBRARY USAGE_PAGE: programs whose page says 26 percent, each a child of its own. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "driver.h"
#include "page.h"

#define OLD "CUDA_MPS_PIPE_DIRECTORY"
#define SHARE "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
enum { REFUSED = CUDA_ERROR_MPS_CONNECTION_FAILED };
static const char *const beat = CAP_ROOT "/mps/beat";

extern char **environ;
static const char *name, *usage;
static void *library, *driver;
static int failed;

#define MUST(ok) (void)((ok) || (failed = printf("FAILED: %s: not: %s\n", name, #ok)))
#define IN(lib, f, ...) ((CUresult (*)())dlsym(lib, #f))(__VA_ARGS__)
#define OF(type, variable) (*(__typeof__(type) *)dlsym(driver, #variable))

static uint64_t boot(void)
{
    struct timespec t;
    clock_gettime(CLOCK_BOOTTIME, &t);
    return (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
}

/* stamp makes the beat file, of so many bytes. */
static void stamp(const char *magic, uint64_t at, int size)
{
    char page[PAGE + 1] = {0};
    mkdir(CAP_ROOT "/mps", 0755);
    memcpy(page, magic, 8);
    memcpy(page + 8, &at, sizeof at);
    FILE *f = fopen(beat, "w");
    MUST(f && fwrite(page, (size_t)size, 1, f) == 1);
    if (f)
        fclose(f);
}

/* slot is this process's; all zero: it has none. */
static struct slot slot(void)
{
    struct slot s = {0};
    FILE *f = fopen(usage, "r");
    fseek(f, PAGE, SEEK_SET);
    while (fread(&s, sizeof s, 1, f) == 1 && s.pid != (uint64_t)getpid())
        s = (struct slot){0};
    fclose(f);
    return s;
}

static bool is(const char *variable, const char *want) { return getenv(variable) && !strcmp(getenv(variable), want); }

/* --- no daemon that answers ----------------------------------------------- */

static void silent(void)
{
    CUcontext context;
    remove(beat);
    MUST(IN(library, cuInit, 0) == REFUSED);
    stamp("GPUMPS01", 0, PAGE);
    MUST(IN(library, cuInit, 0) == REFUSED);
    stamp("GPUMPS01", boot() - 2100000000, PAGE);
    MUST(IN(library, cuInit, 0) == REFUSED);
    stamp("GPUMPS01", boot() + 60000000000, PAGE);
    MUST(IN(library, cuInit, 0) == REFUSED);
    stamp("GPUMPS99", boot(), PAGE);
    MUST(IN(library, cuInit, 0) == REFUSED);
    stamp("GPUMPS01", boot(), PAGE + 1);
    MUST(IN(library, cuInit, 0) == REFUSED);
    remove(beat);
    MUST(symlink("/dev/zero", beat) == 0 && IN(library, cuInit, 0) == REFUSED && remove(beat) == 0);
    MUST(OF(int, begins) == 0);
    MUST(IN(library, cuCtxCreate_v2, &context, 0, 0) == REFUSED);
    OF(int, client) = 1; /* it answers again: honest programs are not refused */
    stamp("GPUMPS01", boot() - 1000000000, PAGE);
    MUST(IN(library, cuInit, 0) == 0 && OF(int, begins) == 1);
}

/* --- the environment ------------------------------------------------------ */

static uint32_t stop;
static void *reads(void *none)
{
    while (!__atomic_load_n(&stop, __ATOMIC_RELAXED))
        MUST(is("KEPT", "1"));
    return none;
}

static uint64_t began;
static void in_init(void) { began = slot().starting; }

static void begins(void)
{
    CUcontext context;
    uint64_t before = boot();
    OF(int, client) = 1;
    OF(void (*)(void), beginning) = in_init;
    stamp("GPUMPS01", before, PAGE);
    MUST(IN(library, cuInit, 0) == 0);
    MUST(!strcmp(dlsym(driver, "pipe_was"), CAP_ROOT "/mps") && !strcmp(dlsym(driver, "percent_was"), "26"));
    MUST(began >= before && began <= boot() && slot().starting == 0);
    MUST(slot().sms == 34);
    /* Once it is a client, the daemon may be away. */
    stamp("GPUMPS01", 0, PAGE);
    MUST(IN(library, cuInit, 0) == 0 && IN(library, cuInit, 1) == CUDA_ERROR_INVALID_VALUE);
    /* A context has what the server gives then. */
    setenv(SHARE, "100", 1);
    OF(int, sms) = 40;
    MUST(IN(library, cuCtxCreate_v2, &context, 0, 0) == 0 && is(SHARE, "26") && slot().sms == 40);
    OF(int, sms) = 20;
    MUST(IN(library, cuDevicePrimaryCtxRetain, &context, 0) == 0 && slot().sms == 40);
    MUST(slot().contexts == 2); /* all in one slot */
}

static void none(void)
{
    environ = NULL;
    begins();
}

static void lowered(void)
{
    /* Two of a name: programs and libraries differ in which of them counts. */
    static char *twice[] = {SHARE "=100", "KEPT=1", OLD "=/tmp/nvidia-mps", SHARE "=26", OLD "S=/x", NULL};
    pthread_t other;
    environ = twice;
    pthread_create(&other, NULL, reads, NULL);
    begins();
    __atomic_store_n(&stop, 1, __ATOMIC_RELAXED);
    pthread_join(other, NULL);
    int n = 0;
    for (char **e = environ; *e; e++)
        n += !strncmp(*e, "CUDA_MPS_", 9);
    MUST(n == 3 && is(OLD "S", "/x"));
    setenv("LATER", "2", 1);
    unsetenv("KEPT");
    MUST(is("LATER", "2") && !getenv("KEPT") && is(SHARE, "26"));
}

static void right(void)
{
    setenv(OLD, CAP_ROOT "/mps", 1);
    setenv(SHARE, "26", 1);
    char **was = environ;
    OF(int, client) = 1;
    stamp("GPUMPS01", boot(), PAGE);
    MUST(IN(library, cuInit, 0) == 0 && environ == was);
}

/* A program that has no descriptor left does not get round its page. */
static void blind(void)
{
    CUcontext context;
    struct rlimit all, none;
    stamp("GPUMPS01", 0, PAGE);
    getrlimit(RLIMIT_NOFILE, &all);
    for (int left = 0; left < 4; left++) {
        none = (struct rlimit){(rlim_t)(3 + left), all.rlim_max};
        MUST(setrlimit(RLIMIT_NOFILE, &none) == 0);
        MUST(IN(library, cuInit, 0) != 0 && IN(library, cuCtxCreate_v2, &context, 0, 0) != 0 && OF(int, begins) == 0);
    }
    setrlimit(RLIMIT_NOFILE, &all);
    OF(int, client) = 1;
    stamp("GPUMPS01", boot(), PAGE);
    MUST(IN(library, cuInit, 0) == 0);
}

static void by_address(void)
{
    CUresult (*init)(unsigned int) = NULL;
    stamp("GPUMPS01", 0, PAGE);
    MUST(IN(library, cuGetProcAddress_v2, "cuInit", &init, 12000, (uint64_t)0, NULL) == 0);
    MUST(init && init(0) == REFUSED && OF(int, begins) == 0);
}

/* --- outside -------------------------------------------------------------- */

static void makes_nothing(void)
{
    CUcontext c;
    CUhandle h;
    CUmemprop prop = {.type = 1, .location = {1, 0}};
    MUST(IN(library, cuCtxCreate, &c, 0, 0) == REFUSED && IN(library, cuCtxCreate_v2, &c, 0, 0) == REFUSED);
    MUST(IN(library, cuCtxCreate_v3, &c, NULL, 0, 0, 0) == REFUSED && IN(library, cuCtxCreate_v4, &c, NULL, 0, 0) == REFUSED);
    MUST(IN(library, cuGLCtxCreate, &c, 0, 0) == REFUSED && IN(library, cuGLCtxCreate_v2, &c, 0, 0) == REFUSED);
    MUST(IN(library, cuVDPAUCtxCreate, &c, 0, 0, 7, &c) == REFUSED && IN(library, cuVDPAUCtxCreate_v2, &c, 0, 0, 7, &c) == REFUSED);
    MUST(IN(library, cuDevicePrimaryCtxRetain, &c, 0) == REFUSED && IN(library, cuGreenCtxCreate, &c, NULL, 0, 1) == REFUSED);
    MUST(IN(library, cuMemCreate, &h, (size_t)2 << 20, &prop, 0ull) == CUDA_ERROR_OUT_OF_MEMORY);
}

static void outside(void)
{
    stamp("GPUMPS01", boot(), PAGE);
    MUST(IN(library, cuInit, 0) == REFUSED && OF(int, begins) == 1);
    makes_nothing();
    OF(int, client) = 1; /* what has begun outside stays there */
    MUST(IN(library, cuInit, 0) == REFUSED && OF(int, begins) == 1);
    makes_nothing();
    MUST(slot().sms == 0 && slot().starting == 0);
}

/* A program that begins by the driver's own door. */
static void beneath(void)
{
    CUcontext context;
    MUST(IN(driver, cuInit, 0) == 0);
    makes_nothing();
    OF(int, client) = 1;
    MUST(IN(library, cuCtxCreate_v2, &context, 0, 0) == 0 && is(SHARE, "26") && slot().sms == 34);
}

/* A child has what its parent had in mind, but not its driver. */
static void child(void)
{
    OF(int, client) = 1;
    stamp("GPUMPS01", boot(), PAGE);
    MUST(IN(library, cuInit, 0) == 0);
    pid_t pid = fork();
    if (pid == 0) {
        name = "the child's child";
        OF(int, client) = 0;
        unsetenv(OLD);
        stamp("GPUMPS01", 0, PAGE);
        MUST(slot().sms == 0 && IN(library, cuInit, 0) == REFUSED);
        makes_nothing();
        fflush(stdout);
        _exit(0);
    }
    waitpid(pid, NULL, 0);
    MUST(slot().sms == 34);
}

int main(int argc, char **argv)
{
    static const struct {
        const char *name;
        void (*run)(void);
    } all[] = {{"silent", silent}, {"none", none}, {"lowered", lowered}, {"right", right}, {"blind", blind}, {"by address", by_address}, {"outside", outside}, {"beneath", beneath}, {"child", child}};
    if (argc != 3)
        return 2;
    library = dlopen(argv[1], RTLD_NOW);
    driver = dlopen(CAP_REAL_CUDA, RTLD_NOW | RTLD_NOLOAD);
    usage = argv[2];
    if (!library || !driver)
        return 2;
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        int status = 0;
        pid_t pid = fork();
        if (pid == 0) {
            name = all[i].name;
            all[i].run();
            fflush(stdout);
            _exit(0);
        }
        if (pid < 0 || waitpid(pid, &status, 0) != pid || status)
            printf("FAILED: %s ends with %x\n", all[i].name, status);
    }
    return 0;
}
