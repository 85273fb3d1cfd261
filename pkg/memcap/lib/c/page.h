/* SPDX-License-Identifier: Apache-2.0 */

/* The two pages that the cap is made of, byte for byte. The Go side, which is
 * the agent, has the same numbers in page.go; a test holds the two together.
 *
 * The agent makes both. The limit page is written by it alone and mounted
 * read-only. The usage page is mounted to be written by the processes that share
 * the claim: whatever stands there may be nonsense, and whoever wrote that has
 * hurt nobody but itself. */
#ifndef CAP_PAGE_H
#define CAP_PAGE_H

#include "sys.h"

#ifndef CAP_ROOT
#define CAP_ROOT "/usr/lib/gpu-agent"
#endif
#define CAP_REAL_CUDA CAP_ROOT "/driver/libcuda.so.1"
#define CAP_REAL_NVML CAP_ROOT "/driver/libnvidia-ml.so.1"
#define CAP_CLAIMS CAP_ROOT "/claims/" /* GPU/KEY/limit and GPU/KEY/usage; see claim.h */
#define CAP_OPEN_MARK CAP_ROOT "/open"

#define LIMIT_MAGIC "GPUCAP02"
#define USAGE_MAGIC "GPUUSE04"

#define NO_LIMIT (~(uint64_t)0)
/* MOST is more than any GPU has: 2^48 bytes. A greater figure is nonsense. */
#define MOST ((uint64_t)1 << 48)
#define UNIT ((uint64_t)512)
#define WRITING (~(uint64_t)0)
#define SLOTS 16384
#define PAGE 4096
#define USAGE_SIZE (PAGE + SLOTS * 128)

struct limit_page {
    char magic[8];
    uint64_t limit;    /* bytes; NO_LIMIT: none */
    uint64_t context;  /* bytes to expect of one context */
    uint64_t every_ms; /* how often somebody reads; 0: nobody does */
    char uuid[64];
    uint64_t usage; /* the nonce of the usage page that belongs to this one */
    uint64_t since; /* of whose claim that is, for the agent: when it was given, in ns */
    uint64_t gap[2];
    /* A reading of the driver by the agent, for the usage page of that nonce.
     * One cache line. While the agent writes it, nonce is WRITING; 0 is none. */
    uint64_t nonce;
    uint64_t ceiling; /* bytes that bound may reach: limit - correction */
    uint64_t stamp;   /* 1 + the usage page's guesses at an exact reading, else 0 */
    uint64_t begun;   /* readings begun, and finished */
    uint64_t done;    /* its low half is a futex, on which processes wait for a reading */
    uint64_t settled; /* the usage page's, before the reading */
    /* For those who only look: what counted at the reading, less what was bound
     * then, and the usage page's settled then. The ceiling errs to refuse where
     * it is not known whether the driver has a dead process's memory back yet;
     * what people are shown need not. */
    int64_t shown;
    uint64_t shown_settled;
    uint64_t shown_dead; /* of what was bound then, dead processes' */
    /* What bound cannot reach for sure: the ceiling errs to refuse, and may be too low
     * where a reading fell among allocations; the roof is not, as long as nothing was
     * charged or given back by guess. */
    uint64_t roof;
    uint64_t roof_stamp; /* 1 + the usage page's guesses at that reading, 0: none */
};

/* bound = [version:24 | units of 512 bytes:40]: what the container's processes
 * may have, of this GPU. Every change adds one to the version, so that a word
 * seen twice is a time in which nothing changed. 40 bits are 512 TiB: room for
 * thousands of reservations in flight, each as large as a GPU. */
#define AMOUNT_BITS 40
#define STEP ((uint64_t)1 << AMOUNT_BITS)
#define AMOUNT(word) (((word) & (STEP - 1)) * UNIT)

/* A slot is one loaded copy of this library: mostly a process, two where a
 * program has a second one by dlmopen. Bytes, multiples of 512, but for contexts
 * and what is known of its process.
 *
 * Reserved and committed are sums of two words each. One is changed by one thread
 * alone, the first of the process, which needs no locked instruction for that; the
 * other, in a cache line of its own, by all others. What one thread has added the
 * other may take, so a word by itself may be below zero; see slot_add.
 *
 * Idle is a word like bound: a version, which each change adds one to, and units. */
struct slot {
    uint64_t reserved;  /* with what is idle, at least what bound has of this slot */
    uint64_t committed; /* at most that, and at most what the driver gave */
    uint64_t managed;   /* of it, memory that the driver's figures lack */
    uint64_t expected;  /* of it, what contexts were charged with */
    uint64_t contexts;
    uint64_t pid;       /* as its owner calls itself */
    uint64_t pids;      /* among whom: a number of its PID namespace, 0 if unknown */
    uint64_t exported;  /* of committed, what was let go of and may live on elsewhere */
    uint64_t others_reserved;
    uint64_t others_committed;
    uint64_t promised; /* of it, what the driver takes later than it was asked to, or has by now */
    uint64_t idle;     /* what bound has of this slot besides, for whoever takes it first */
    uint64_t gap[4];
};

struct usage_page {
    char magic[8];
    uint64_t nonce; /* random, not 0: another page, another nonce */
    uint64_t gap0[6];
    uint64_t bound; /* in a cache line of its own */
    uint64_t gap1[7];
    uint64_t asks; /* somebody near the cap waits for a reading */
    uint64_t refusals;
    uint64_t peak;   /* bytes of bound */
    uint32_t high;   /* slots ever used; those above are blank */
    uint32_t gap2;
    uint64_t settled;   /* bytes taken off bound that were gone before, ever */
    uint64_t undone;    /* bytes: the most that the driver gave beyond bound and was at once given back */
    uint64_t uncounted; /* allocations that passed under the open policy, of a type that nobody knows */
    /* Times that something was charged, or is no more, of which the driver may have
     * more or less than that: until a reading the ceiling may be too low by it. */
    uint64_t guesses;
    uint64_t attempt; /* whose turn it is to allocate without a reservation; see attempt.h */
    uint64_t gap3[PAGE / 8 - 25];
    struct slot slots[]; /* SLOTS of them */
};

/* slot_free says whether nobody has the lock of a slot; fd is any open
 * description of the usage page but the one that has it. */
static inline bool slot_free(int fd, uint64_t index)
{
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = (off_t)index, .l_len = 1};
    return SYS3(SYS_fcntl, fd, OFD_GETLK, &lock) == 0 && lock.l_type == F_UNLCK;
}

/* slot_sum is the sum of such a pair of words. What is not stable between two looks
 * at the first may be neither what it was before nor after. */
static inline uint64_t slot_sum(const uint64_t *first, const uint64_t *others)
{
    uint64_t a = __atomic_load_n(first, __ATOMIC_SEQ_CST), b, again;
    for (int tries = 0; tries < 100; tries++, a = again) {
        b = __atomic_load_n(others, __ATOMIC_SEQ_CST);
        again = __atomic_load_n(first, __ATOMIC_SEQ_CST);
        if (a == again)
            break;
    }
    return a + b;
}
static inline uint64_t slot_reserved(const struct slot *s) { return slot_sum(&s->reserved, &s->others_reserved); }
static inline uint64_t slot_committed(const struct slot *s) { return slot_sum(&s->committed, &s->others_committed); }

/* idle_in is what is idle in n slots, in bytes. */
static inline uint64_t idle_in(const struct slot *s, uint64_t n)
{
    uint64_t sum = 0;
    for (uint64_t i = 0; i < n; i++)
        sum += AMOUNT(__atomic_load_n(&s[i].idle, __ATOMIC_SEQ_CST));
    return sum;
}

/* shown_used is what views say is used, in bytes, by a reading of the same nonce:
 * bound without what is idle; who has died since was in its figure; who was dead was not, and is in what was
 * bound, until it is taken off there. */
static inline int64_t shown_used(int64_t shown, uint64_t shown_settled, uint64_t shown_dead, uint64_t bound, uint64_t settled, uint64_t dead)
{
    uint64_t lost = settled - shown_settled, gone = lost < shown_dead ? lost : shown_dead;
    uint64_t still = shown_dead - gone;
    return (int64_t)(bound + (uint64_t)shown + gone - (dead > still ? dead - still : 0));
}

#define AT(type, field, where) _Static_assert(offsetof(struct type, field) == (where), #field)
AT(limit_page, limit, 8);
AT(limit_page, context, 16);
AT(limit_page, every_ms, 24);
AT(limit_page, uuid, 32);
AT(limit_page, usage, 96);
AT(limit_page, since, 104);
AT(limit_page, nonce, 128);
AT(limit_page, ceiling, 136);
AT(limit_page, stamp, 144);
AT(limit_page, begun, 152);
AT(limit_page, done, 160);
AT(limit_page, settled, 168);
AT(limit_page, shown, 176);
AT(limit_page, shown_settled, 184);
AT(limit_page, shown_dead, 192);
AT(limit_page, roof, 200);
AT(limit_page, roof_stamp, 208);
AT(usage_page, nonce, 8);
AT(usage_page, bound, 64);
AT(usage_page, asks, 128);
AT(usage_page, refusals, 136);
AT(usage_page, peak, 144);
AT(usage_page, high, 152);
AT(usage_page, settled, 160);
AT(usage_page, undone, 168);
AT(usage_page, uncounted, 176);
AT(usage_page, guesses, 184);
AT(usage_page, attempt, 192);
AT(usage_page, slots, PAGE);
AT(slot, others_reserved, 64);
AT(slot, promised, 80);
AT(slot, idle, 88);
_Static_assert(sizeof(struct slot) == 128, "slot");
_Static_assert(sizeof(struct usage_page) + SLOTS * sizeof(struct slot) == USAGE_SIZE, "usage page");
#undef AT

#endif
