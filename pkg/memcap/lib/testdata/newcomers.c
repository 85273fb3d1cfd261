/* SPDX-License-Identifier: Apache-2.0 */

/* newcomers LIBRARY USAGE_PAGE LIMIT_PAGE: programs that come to a GPU while its page holds
 * newcomers, and one that was there before. This process plays the agent: the last argument is the
 * limit page where it can be written. */
#include <dlfcn.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "driver.h"
#include "page.h"

static const char *name;
static void *library, *driver;
static struct limit_page *limit;
static struct usage_page *usage;

#define MUST(ok) (void)((ok) || printf("FAILED: %s: not: %s\n", name, #ok))
#define IN(f, ...) ((CUresult (*)())dlsym(library, #f))(__VA_ARGS__)
#define BEGINS (*(int *)dlsym(driver, "begins"))

static void *map_page(const char *path, size_t size)
{
    int fd = open(path, O_RDWR);
    void *at = fd < 0 ? MAP_FAILED : mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    return at == MAP_FAILED ? NULL : at;
}

static void control(uint64_t bits, bool wake)
{
    __atomic_store_n(&limit->control, bits, __ATOMIC_SEQ_CST);
    if (wake)
        syscall(SYS_futex, &limit->control, 1 /* FUTEX_WAKE */, 64, NULL, NULL, 0);
}

static uint64_t waits(void) { return __atomic_load_n(&usage->waits, __ATOMIC_SEQ_CST); }

/* --- programs -------------------------------------------------------------- */

static int go[2], ready[2]; /* pipes: the agent lets the program go on; the program has come so far */

static void say(int fd) { MUST(write(fd, "x", 1) == 1); }
static void hear(int fd)
{
    char c;
    MUST(read(fd, &c, 1) == 1);
}

/* A program that begins. */
static void begins(void)
{
    MUST(IN(cuInit, 0) == 0 && BEGINS == 1);
    MUST(IN(cuInit, 0) == 0 && BEGINS == 2); /* not held again */
}

/* A program whose child has CUDA for itself. */
static void forks(void)
{
    int status;
    MUST(IN(cuInit, 0) == 0);
    say(ready[1]), hear(go[0]);
    pid_t pid = fork();
    if (pid == 0) {
        MUST(IN(cuInit, 0) == 0);
        fflush(stdout);
        _exit(0);
    }
    MUST(waitpid(pid, &status, 0) == pid && status == 0);
}

/* Programs that have begun and have no context yet, by each kind of door. */
static void inside(void)
{
    MUST(IN(cuInit, 0) == 0);
    say(ready[1]), hear(go[0]);
}
static void creates(void)
{
    CUcontext context;
    inside();
    MUST(IN(cuCtxCreate_v2, &context, 0, 0) == 0);
}
static void retains(void)
{
    CUcontext context;
    inside();
    MUST(IN(cuDevicePrimaryCtxRetain, &context, 0) == 0);
}
static void by_address(void)
{
    CUcontext context;
    CUresult (*create)(CUcontext *, unsigned int, CUdevice) = NULL;
    MUST(IN(cuGetProcAddress_v2, "cuCtxCreate", &create, 4000, (uint64_t)0, NULL) == 0);
    inside();
    MUST(create && create(&context, 0, 0) == 0);
}

/* A program that has a context goes on with it. */
static void works(void)
{
    CUcontext context;
    CUdeviceptr at;
    MUST(IN(cuInit, 0) == 0 && IN(cuDevicePrimaryCtxRetain, &context, 0) == 0);
    say(ready[1]), hear(go[0]);
    MUST(IN(cuDevicePrimaryCtxRetain, &context, 0) == 0 && IN(cuMemAlloc_v2, &at, (size_t)2 << 20) == 0);
    MUST(IN(cuInit, 0) == 0);
}

/* --- the agent ------------------------------------------------------------- */

static pid_t start(void (*run)(void))
{
    MUST(pipe(go) == 0 && pipe(ready) == 0);
    pid_t pid = fork();
    if (pid == 0) {
        run();
        fflush(stdout);
        _exit(0);
    }
    return pid;
}

/* ends waits for a program's end; false: it has not ended after some seconds. */
static bool ends(pid_t pid, bool at_once)
{
    int status;
    for (int i = 0; i < (at_once ? 50 : 10000); i++, usleep(1000))
        if (waitpid(pid, &status, WNOHANG) == pid) {
            MUST(status == 0);
            return true;
        }
    return false;
}

/* is_held waits until a program waits, and looks whether it goes on. */
static void is_held(pid_t pid, uint64_t before)
{
    for (int i = 0; waits() == before && i < 10000; i++)
        usleep(1000);
    MUST(waits() == before + 1);
    MUST(!ends(pid, true));
    MUST(waits() == before + 1);
}

static void done(pid_t pid)
{
    bool ended = ends(pid, false);
    MUST(ended);
    if (!ended)
        kill(pid, SIGKILL), waitpid(pid, NULL, 0);
    for (int i = 0; i < 2; i++)
        close(go[i]), close(ready[i]);
    control(0, true);
}

/* passes: nothing holds the program; a bit that asks for a checkpoint does not either. */
static void passes(void (*run)(void), uint64_t bits)
{
    uint64_t before = waits();
    control(bits, true);
    done(start(run));
    MUST(waits() == before);
}

static void held_at_once(void (*run)(void), bool wake)
{
    uint64_t before = waits();
    control(CONTROL_HOLD | CONTROL_YIELD, true);
    pid_t pid = start(run);
    is_held(pid, before);
    control(CONTROL_HOLD, wake); /* another bit changes */
    kill(pid, SIGCONT);          /* a signal ends the kernel's wait */
    MUST(!ends(pid, true));
    control(CONTROL_YIELD, wake);
    done(pid);
}

static void held_inside(void (*run)(void))
{
    uint64_t before = waits();
    pid_t pid = start(run);
    hear(ready[0]);
    control(CONTROL_HOLD, true);
    say(go[1]);
    is_held(pid, before);
    control(0, true);
    done(pid);
}

static void goes_on(void)
{
    uint64_t before = waits();
    pid_t pid = start(works);
    hear(ready[0]);
    control(CONTROL_HOLD, true);
    say(go[1]);
    MUST(ends(pid, false) && waits() == before);
    control(0, true); /* lets it go on if it was held */
}

/* The agent replaces the page: what has the old one mounted is not held for ever, whatever the new
 * page says. */
static void replaced(const char *path)
{
    char fresh[PATH_MAX];
    uint64_t before = waits();
    snprintf(fresh, sizeof fresh, "%s.new", path);
    control(CONTROL_HOLD, true);
    pid_t pid = start(begins), later;
    is_held(pid, before);
    FILE *f = fopen(fresh, "w");
    MUST(f && fwrite(limit, PAGE, 1, f) == 1 && fclose(f) == 0 && rename(fresh, path) == 0);
    MUST(ends(pid, false) || kill(pid, SIGKILL));
    later = start(begins); /* nor one that comes later */
    MUST(ends(later, false) || kill(later, SIGKILL));
    MUST(waits() == before + 1);
}

int main(int argc, char **argv)
{
    if (argc != 4 || !(library = dlopen(argv[1], RTLD_NOW)) || !(driver = dlopen(CAP_REAL_CUDA, RTLD_NOW | RTLD_NOLOAD)))
        return 2;
    limit = map_page(argv[3], PAGE);
    usage = map_page(argv[2], PAGE);
    if (!limit || !usage)
        return 2;
    name = "nothing asked", passes(begins, 0);
    name = "a checkpoint asked", passes(begins, CONTROL_YIELD);
    name = "held in cuInit", held_at_once(begins, true);
    name = "held in cuInit, by an agent that reaches nobody", held_at_once(begins, false);
    name = "held before cuCtxCreate", held_inside(creates);
    name = "held before cuDevicePrimaryCtxRetain", held_inside(retains);
    name = "held before a context by the function's address", held_inside(by_address);
    name = "a forked child", held_inside(forks);
    name = "a program at work", goes_on();
    name = "a page replaced", replaced(argv[3]);
    return 0;
}
