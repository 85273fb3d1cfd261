/* SPDX-License-Identifier: Apache-2.0 */

/* System calls without the C library, for two reasons. errno belongs to the program that has loaded
 * us, so we must not change it. And functions such as fstat, fcntl64 and pthread_* would bind us to
 * the version of the C library that we were built with. Each call returns what the kernel returns:
 * a negative result is an error number. */
#ifndef CAP_SYS_H
#define CAP_SYS_H

#include <fcntl.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>

#if !defined(__LP64__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the cap is for 64-bit little-endian machines"
#endif

/* HOT is for functions that programs call a million times a second. The compiler inlines all that
 * they call, except for COLD functions. A COLD function is called only once, near the cap, or after
 * the driver has failed. This halves the time that an allocation spends here. What a HOT function
 * seldom needs must be COLD: inlined, it would take the registers that the rest needs. */
#define HOT __attribute__((flatten))
#define COLD __attribute__((noinline, cold))

/* Old headers lack these. */
#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif
#ifndef MADV_WIPEONFORK
#define MADV_WIPEONFORK 18
#endif
enum { OFD_GETLK = 36, OFD_SETLK = 37, AGAIN = -11 };

#if defined(__x86_64__)
static inline long sys(long nr, long a, long b, long c, long d, long e, long f)
{
    long ret;
    register long r10 __asm__("r10") = d;
    register long r8 __asm__("r8") = e;
    register long r9 __asm__("r9") = f;
    __asm__ volatile("syscall"
                     : "=a"(ret)
                     : "a"(nr), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    return ret;
}
static inline void cpu_relax(void) { __asm__ volatile("pause" ::: "memory"); }
/* ticks reads a clock without a system call. Its unit depends on the processor. TICKS of these
 * units are some milliseconds. */
enum { TICKS = 1 << 24 }; /* of 2 to 5 GHz */
static inline uint64_t ticks(void) { return __builtin_ia32_rdtsc(); }
#elif defined(__aarch64__)
static inline long sys(long nr, long a, long b, long c, long d, long e, long f)
{
    register long x8 __asm__("x8") = nr;
    register long x0 __asm__("x0") = a;
    register long x1 __asm__("x1") = b;
    register long x2 __asm__("x2") = c;
    register long x3 __asm__("x3") = d;
    register long x4 __asm__("x4") = e;
    register long x5 __asm__("x5") = f;
    __asm__ volatile("svc #0"
                     : "+r"(x0)
                     : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5)
                     : "memory");
    return x0;
}
static inline void cpu_relax(void) { __asm__ volatile("yield" ::: "memory"); }
enum { TICKS = 1 << 18 }; /* of 25 MHz to 1 GHz */
static inline uint64_t ticks(void)
{
    uint64_t t;
    __asm__ volatile("mrs %0, cntvct_el0" : "=r"(t));
    return t;
}
#else
#error "which processor is this?"
#endif

#define SYS1(nr, a) sys(nr, (long)(a), 0, 0, 0, 0, 0)
#define SYS2(nr, a, b) sys(nr, (long)(a), (long)(b), 0, 0, 0, 0)
#define SYS3(nr, a, b, c) sys(nr, (long)(a), (long)(b), (long)(c), 0, 0, 0)
#define SYS4(nr, a, b, c, d) sys(nr, (long)(a), (long)(b), (long)(c), (long)(d), 0, 0)
#define SYS5(nr, a, b, c, d, e) sys(nr, (long)(a), (long)(b), (long)(c), (long)(d), (long)(e), 0)

static inline int sys_open(const char *path, int flags, int mode)
{
    return (int)SYS4(SYS_openat, AT_FDCWD, path, flags | O_CLOEXEC, mode);
}

static inline void sys_close(int fd) { SYS1(SYS_close, fd); }

/* sys_map returns NULL if there is no memory. */
static inline void *sys_map(size_t size, int prot, int flags, int fd)
{
    long at = sys(SYS_mmap, 0, (long)size, prot, flags, fd, 0);
    return at < 0 && at > -4096 ? NULL : (void *)at;
}

static inline void sys_unmap(void *at, size_t size)
{
    if (at)
        SYS2(SYS_munmap, at, size);
}

static inline uint64_t now_us(void)
{
    struct timespec t = {0, 0};
    SYS2(SYS_clock_gettime, CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000 + (uint64_t)t.tv_nsec / 1000;
}

static inline void nap_us(uint64_t us)
{
    struct timespec t = {(time_t)(us / 1000000), (long)(us % 1000000 * 1000)};
    SYS2(SYS_nanosleep, &t, 0);
}

/* A wait is for something that takes microseconds, or longer if a thread has lost its processor or
 * waits for the driver. It spins first and then naps. Naps double up to a limit, because a nap
 * costs the processor as much as fifty allocations. wait_more returns the time that it has napped
 * in all, in microseconds. Callers limit this time, not that of the clock: what holds this thread
 * up may also hold up the thread that it waits for. */
struct wait {
    uint32_t spins;
    uint64_t nap, napped;
};

static inline uint64_t wait_more(struct wait *w)
{
    if (w->spins++ < 200) {
        cpu_relax();
        return 0;
    }
    w->nap = !w->nap ? 20 : w->nap < 500 ? 2 * w->nap : w->nap;
    nap_us(w->nap);
    return w->napped += w->nap;
}

/* A lock between the threads of one process, held for moments only. It lies in memory that the
 * kernel wipes in a forked child, so no child inherits a held lock. */
static inline void spin_lock(uint32_t *lock)
{
    for (struct wait w = {0}; __atomic_exchange_n(lock, 1, __ATOMIC_ACQUIRE);)
        wait_more(&w);
}

static inline void spin_unlock(uint32_t *lock) { __atomic_store_n(lock, 0, __ATOMIC_RELEASE); }

/* The few text functions that we need, instead of the C library's. */
static inline bool text_equal(const char *a, const char *b)
{
    while (*a && *a == *b)
        a++, b++;
    return *a == *b;
}

static inline bool text_before(const char *a, const char *b)
{
    while (*a && *a == *b)
        a++, b++;
    return (unsigned char)*a < (unsigned char)*b;
}

/* text_join writes a and then b to out, which may be a. False: they do not fit. */
static inline bool text_join(char *out, size_t room, const char *a, const char *b)
{
    size_t n = 0;
    for (; *a && n < room; a++)
        out[n++] = *a;
    for (; *b && n < room; b++)
        out[n++] = *b;
    if (n == room)
        return false;
    out[n] = 0;
    return true;
}

#endif
