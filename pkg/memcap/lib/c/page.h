/* SPDX-License-Identifier: Apache-2.0 */

/* The layout of the two pages of a cap. page.go has the same numbers for the agent; a test compares
 * the two.
 *
 * The agent makes both pages. Only the agent writes the limit page, which is mounted read-only. The
 * usage page is mounted writable for the processes that share the cap. It may hold nonsense. A
 * process that writes nonsense there harms only those that share the page with it. */
#ifndef CAP_PAGE_H
#define CAP_PAGE_H

#include "sys.h"

#ifndef CAP_ROOT
#define CAP_ROOT "/usr/lib/gpu-agent"
#endif
#define CAP_REAL_CUDA CAP_ROOT "/driver/libcuda.so.1"
#define CAP_REAL_NVML CAP_ROOT "/driver/libnvidia-ml.so.1"
#define CAP_ALLOCATIONS CAP_ROOT "/allocations/" /* GPU/KEY/limit and GPU/KEY/usage; see claim.h */
#define CAP_OPEN_MARK CAP_ROOT "/open"

#define LIMIT_MAGIC "GPUCAP02"
#define USAGE_MAGIC "GPUUSE05"

#define NO_LIMIT (~(uint64_t)0)
/* MOST is 2^48 bytes, more than any GPU has. A valid amount is below it. */
#define MOST ((uint64_t)1 << 48)
#define UNIT ((uint64_t)512)
#define WRITING (~(uint64_t)0)
#define SLOTS 16384
#define PAGE 4096
#define USAGE_SIZE (PAGE + SLOTS * 128)

struct limit_page {
    char magic[8];
    uint64_t limit;    /* bytes; NO_LIMIT: none */
    uint64_t context;  /* bytes that one context is expected to take, with its code */
    uint64_t every_ms; /* how often the agent reads the driver, in milliseconds; 0: never */
    char uuid[64];
    uint64_t usage; /* the nonce of the usage page that belongs to this page */
    uint64_t since; /* for the agent: when the page's allocation was made or renewed, in ns */
    uint64_t code;  /* for the agent: the part of context that is code */
    uint64_t sure;  /* 1: no context of this usage page was seen to take more than context */
    /* The agent's last reading of the driver, for the usage page with this nonce. It is one cache
     * line. nonce is WRITING while the agent writes it, and 0 if there is no reading. */
    uint64_t nonce;
    uint64_t ceiling; /* how far bound may go, in bytes: limit - correction */
    uint64_t stamp;   /* 1 + the usage page's guesses if the reading was exact, else 0 */
    uint64_t begun;   /* number of readings begun */
    uint64_t done;    /* number of readings finished; the low half is a futex, on which processes wait */
    uint64_t settled; /* the usage page's settled before the reading, in bytes */
    /* For views such as nvidia-smi. shown is what was used at the reading less what was bound then,
     * in bytes. shown_settled is the usage page's settled then. If it is unknown whether the driver
     * has a dead process's memory back, the ceiling is rather too low than too high. A view need
     * not be that careful. */
    int64_t shown;
    uint64_t shown_settled;
    uint64_t shown_dead; /* the bytes of bound that were gone at the reading: of dead processes, or exported */
    /* The highest that the ceiling can really be, in bytes. The ceiling may be too low if processes
     * allocated during the reading. The roof is never too low, as long as nothing is charged or
     * given back by guess. */
    uint64_t roof;
    uint64_t roof_stamp; /* 1 + the usage page's guesses at that reading; 0: no roof */
    /* For the agent: by how many bytes ceiling and roof are lower for code that contexts may yet
     * load. */
    uint64_t held, surely;
    uint64_t bare; /* for the agent: the least that a context was seen to take, in bytes; 0: unknown */
    /* The holder's share of the GPU's SMs under MPS, in percent, from 1 to 100. 0: its processes are
     * no clients of MPS. */
    uint64_t percent;
    /* What the agent asks of the processes, as bits CONTROL_...; see newcomer.c. The low half is a
     * futex, on which newcomers wait. */
    uint64_t control;
};

/* The bits of control. YIELD: programs should write a checkpoint now, since their container will
 * lose the GPU soon. HOLD: a process that comes to the GPU waits until the bit is cleared. */
#define CONTROL_YIELD ((uint64_t)1)
#define CONTROL_HOLD ((uint64_t)2)

/* bound = [version:24 | units of 512 bytes:40]: how much of this GPU the container's processes may
 * have now. Every change adds one to the version. So if two looks find the same word, it did not
 * change between them. 40 bits are 512 TiB, which is room for thousands of reservations at once,
 * each as large as a GPU. */
#define AMOUNT_BITS 40
#define STEP ((uint64_t)1 << AMOUNT_BITS)
#define AMOUNT(word) (((word) & (STEP - 1)) * UNIT)

/* A slot belongs to one loaded copy of this library. Mostly that is a process; a program that loads
 * a second copy by dlmopen has two slots. Amounts are bytes, in multiples of 512.
 *
 * Reserved and committed are sums of two words each. A process may still run under an earlier
 * library. There the first thread changes the first word, and all other threads change the second.
 * So one word alone may be below zero.
 *
 * Idle is a word like bound, with a version and units. */
struct slot {
    uint64_t reserved;  /* reserved + idle is at least this slot's share of bound */
    uint64_t committed; /* at most that share, and at most what the driver gave */
    uint64_t managed;   /* the part of committed that is not in the driver's figures */
    uint64_t expected;  /* the part of committed that was charged for contexts */
    uint64_t contexts;  /* number of contexts that are charged */
    uint64_t pid;       /* the owner's process ID in its own PID namespace */
    uint64_t pids;      /* the number of that PID namespace; 0: unknown */
    uint64_t exported;  /* the part of committed that was exported and freed here; others may have it open */
    uint64_t others_reserved;
    uint64_t others_committed;
    uint64_t promised; /* the part of committed that the driver may take later; see limit.c */
    uint64_t idle;     /* freed memory that is still in bound; any process may take it */
    uint64_t borrowed; /* bytes of the share, at most all, that are charged to other pages too; see loan.h */
    uint64_t lends;    /* 1: the whole share is lent to a page on which the owner counts its memory */
    /* Under MPS; see mps.c. The most SMs that the driver gave the owner; 0: it has not said. And the
     * boot time in ns since which it has been in cuInit; 0: it is not. */
    uint64_t sms, starting;
};

struct usage_page {
    char magic[8];
    uint64_t nonce; /* random, not 0, different for each page */
    uint64_t gap0[6];
    uint64_t bound; /* see AMOUNT above; in a cache line of its own */
    uint64_t gap1[7];
    uint64_t asks; /* number of times that a process near the cap asked for a reading */
    uint64_t refusals; /* number of requests that were refused */
    uint64_t peak;   /* the highest bound so far, in bytes */
    uint32_t high;   /* slots from this index on were never used */
    uint32_t gap2;
    uint64_t settled;   /* total of bytes that were taken off bound after they were gone */
    uint64_t undone;    /* the most bytes that the driver gave beyond bound and took back at once */
    uint64_t uncounted; /* number of allocations of an unknown type that passed under the open policy */
    /* Number of changes after which the driver may have more or less than was charged. Until the
     * next reading, the ceiling may be too low by the difference. */
    uint64_t guesses;
    uint64_t attempt; /* the slot that may allocate without a reservation; see attempt.c */
    uint64_t borrows; /* 1 once a process has borrowed for this page */
    /* number of new contexts and modules since bound was last near the ceiling; see
     * account_measure */
    uint64_t unmeasured;
    uint64_t unread;     /* bytes that modules may have taken since then without a charge; see module.c */
    uint64_t waits;      /* number of times that a process began to wait as a newcomer */
    uint64_t gap3[PAGE / 8 - 29];
    struct slot slots[]; /* SLOTS of them */
};

/* slot_free reports whether a slot's lock is free. fd is the usage page, opened apart from the
 * description that holds the lock. */
static inline bool slot_free(int fd, uint64_t index)
{
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = (off_t)index, .l_len = 1};
    return SYS3(SYS_fcntl, fd, OFD_GETLK, &lock) == 0 && lock.l_type == F_UNLCK;
}

/* slot_dead reports whether a slot's lock is free, so that its owner is dead. It looks at the usage
 * page at path. If *fd is negative, it opens the page and sets *fd. */
static inline bool slot_dead(const char *path, uint64_t index, int *fd)
{
    if (*fd < 0)
        *fd = sys_open(path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY, 0);
    return *fd >= 0 && slot_free(*fd, index);
}

static inline uint64_t slot_reserved(const struct slot *s)
{
    return __atomic_load_n(&s->reserved, __ATOMIC_ACQUIRE) + __atomic_load_n(&s->others_reserved, __ATOMIC_ACQUIRE);
}
static inline uint64_t slot_committed(const struct slot *s)
{
    return __atomic_load_n(&s->committed, __ATOMIC_ACQUIRE) + __atomic_load_n(&s->others_committed, __ATOMIC_ACQUIRE);
}

/* idle_in returns how many bytes are idle in n slots. */
static inline uint64_t idle_in(const struct slot *s, uint64_t n)
{
    uint64_t sum = 0;
    for (uint64_t i = 0; i < n; i++)
        sum += AMOUNT(__atomic_load_n(&s[i].idle, __ATOMIC_SEQ_CST));
    return sum;
}

/* borrowed_for returns how many bytes a slot's owner has borrowed for it; 0 if the word is
 * invalid. */
static inline uint64_t borrowed_for(const struct slot *s)
{
    uint64_t n = __atomic_load_n(&s->borrowed, __ATOMIC_RELAXED);
    return n < MOST ? n : 0;
}

/* shown_used returns the bytes that views show as used. The first three arguments come from a
 * reading of the same nonce; the others are of now. bound is without what is idle. A process that
 * died since the reading was in the driver's figure, so its memory is subtracted. A process that
 * was dead before was not in the figure, but its memory is in bound until it is taken off. So is
 * exported memory that is gone. */
static inline int64_t shown_used(int64_t shown, uint64_t shown_settled, uint64_t shown_dead, uint64_t bound, uint64_t settled, uint64_t dead)
{
    uint64_t lost = settled - shown_settled, gone = lost < shown_dead ? lost : shown_dead;
    uint64_t still = shown_dead - gone;
    return (int64_t)(bound + (uint64_t)shown + gone - (dead > still ? dead - still : 0));
}

_Static_assert(sizeof(struct slot) == 128, "slot");
_Static_assert(sizeof(struct usage_page) + SLOTS * sizeof(struct slot) == USAGE_SIZE, "usage page");

#endif
