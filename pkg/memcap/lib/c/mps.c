/* SPDX-License-Identifier: Apache-2.0 */

/* A share of the GPU's multiprocessors (SMs), by MPS. MPS fails open: a program that does not reach
 * its daemon runs all the same, with all SMs. So where the limit page has a percentage, this file
 * stands before cuInit and before each call that makes a context:
 *
 *     before cuInit   the two variables are set for this process, whatever the environment has; the
 *                     daemon must have answered within the last FRESH seconds
 *     after it        the driver must say that the process is a client of MPS. If it does not, the
 *                     driver is without MPS until the process ends, so CUDA is refused for good
 *     a context       the same, for a program that came to the driver by another door; and the
 *                     variables once more, since the driver may read them only then
 *
 * A refusal is MPS's own error. The process's slot says since when it has been in cuInit, since a
 * server that is broken keeps it there, and how many SMs the driver gives it. Other containers pay
 * for one look at their pages. */

#include "charge.h"

extern char **__environ; /* environ, by the name that linkers bind it to */

#define PIPE CAP_ROOT "/mps"
#define PIPE_VARIABLE "CUDA_MPS_PIPE_DIRECTORY="
#define PERCENT_VARIABLE "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE="
#define BEAT_MAGIC "GPUMPS01"
enum { FRESH = 2, TEXT_ROOM = 64 + sizeof PIPE };

/* The file beat in the pipe directory, which the agent's supervisor of MPS daemons writes. */
struct beat {
    char magic[8];
    uint64_t at; /* the boot time at which the daemon last answered, in ns; 0: it is gone */
};

static uint64_t boot_ns(void)
{
    struct timespec t = {0, 0};
    SYS2(SYS_clock_gettime, CLOCK_BOOTTIME, &t);
    return (uint64_t)t.tv_sec * 1000000000 + (uint64_t)t.tv_nsec;
}

/* beats reports whether the daemon has answered lately. A time that is yet to come is none. */
static bool beats(void)
{
    int fd = open_sized(PIPE "/beat", O_RDONLY, PAGE);
    struct beat *b = fd < 0 ? NULL : sys_map(PAGE, PROT_READ, MAP_SHARED, fd);
    if (fd >= 0)
        sys_close(fd);
    uint64_t at = b && begins(b->magic, BEAT_MAGIC) ? __atomic_load_n(&b->at, __ATOMIC_RELAXED) : 0;
    sys_unmap(b, PAGE);
    return at && boot_ns() - at <= (uint64_t)FRESH * 1000000000;
}

static void percent_text(char *out, uint64_t percent)
{
    char digits[] = {(char)('0' + percent / 100 % 10), (char)('0' + percent / 10 % 10), (char)('0' + percent % 10), 0};
    text_join(out, TEXT_ROOM, PERCENT_VARIABLE, percent >= 100 ? digits : percent >= 10 ? digits + 1 : digits + 2);
}

static bool is_named(const char *text, const char *name)
{
    while (*name && *text == *name)
        text++, name++;
    return !*name;
}

/* set_variables sets the two variables unless the environment has just these. Other threads may be
 * in getenv, which takes no lock. So the old environment stays where it is, and a new one takes its
 * place at once. False: no memory. */
static bool set_variables(uint64_t percent)
{
    char text[2][TEXT_ROOM];
    char **old = __atomic_load_n(&__environ, __ATOMIC_ACQUIRE);
    size_t n = 0;
    int named = 0, right = 0;
    text_join(text[0], TEXT_ROOM, PIPE_VARIABLE, PIPE);
    percent_text(text[1], percent);
    for (; old && old[n]; n++) {
        named += is_named(old[n], PIPE_VARIABLE) || is_named(old[n], PERCENT_VARIABLE);
        right += text_equal(old[n], text[0]) || text_equal(old[n], text[1]);
    }
    if (named == 2 && right == 2)
        return true;
    char **fresh = sys_map((n + 3) * sizeof *fresh + sizeof text, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1), **to = fresh;
    if (!fresh)
        return false;
    for (size_t i = 0; i < n; i++)
        if (!is_named(old[i], PIPE_VARIABLE) && !is_named(old[i], PERCENT_VARIABLE))
            *to++ = old[i];
    char *at = (char *)(fresh + n + 3);
    for (int i = 0; i < 2; i++, at += TEXT_ROOM) {
        text_join(at, TEXT_ROOM, text[i], "");
        *to++ = at;
    }
    __atomic_store_n(&__environ, fresh, __ATOMIC_RELEASE);
    return true;
}

static uint32_t standing(const struct mps *m) { return __atomic_load_n(&m->standing, __ATOMIC_ACQUIRE); }
static void stand(struct mps *m, enum mps_standing s) { __atomic_store_n(&m->standing, s, __ATOMIC_RELEASE); }

/* look_at looks at one GPU's pages. True: they have a percentage, and the claim is theirs. It also
 * notes whether they hold newcomers, so that cuInit need not look again for that. */
static bool look_at(void *process, const char *gpu)
{
    struct process *p = process;
    bool found = claim_find(&p->mps.claim, gpu, NULL);
    if (found && p->mps.claim.held)
        __atomic_store_n(&p->held, 1, __ATOMIC_RELEASE);
    return found && p->mps.claim.percent;
}

/* is_blind reports whether this process lacks the descriptors to look at pages, of which that takes
 * three at a time. A program may have used up all of them. */
static bool is_blind(void)
{
    int fds[3];
    bool lacks = false;
    for (int i = 0; i < 3; i++)
        lacks |= (fds[i] = sys_open("/", O_PATH, 0)) < 0;
    for (int i = 0; i < 3; i++)
        if (fds[i] >= 0)
            sys_close(fds[i]);
    return lacks;
}

/* has_share reports whether the process must be a client of MPS, or cannot tell: then its standing
 * stays unknown. It opens the page's account, which
 * open_account takes over: no device is known before cuInit, and the slot is needed in it. */
static bool has_share(struct process *p)
{
    struct mps *m = &p->mps;
    if (__builtin_expect(standing(m) != MPS_UNKNOWN, 1))
        return standing(m) != MPS_NONE;
    spin_lock(&m->lock);
    if (standing(m) == MPS_UNKNOWN && each_name(CAP_ALLOCATIONS, look_at, p)) {
        struct account *a = &m->account;
        m->percent = m->claim.percent < 100 ? m->claim.percent : 100;
        if (account_find(a, m->claim.limit) == 0 && account_open(a, m->claim.usage) == 0)
            __atomic_store_n(&m->slot, a->slot, __ATOMIC_RELEASE);
        stand(m, MPS_MUST);
    } else if (standing(m) == MPS_UNKNOWN && !is_blind()) {
        stand(m, MPS_NONE);
    }
    spin_unlock(&m->lock);
    return standing(m) != MPS_NONE;
}

bool mps_account(struct process *p, struct account *a, const char *limit)
{
    struct mps *m = &p->mps;
    spin_lock(&m->lock);
    bool found = m->account.slot && text_equal(m->claim.limit, limit);
    if (found) {
        void (*relief)(struct account *, uint64_t) = a->relief;
        *a = m->account;
        a->relief = relief;
        m->account.slot = NULL;
    }
    spin_unlock(&m->lock);
    return found;
}

/* is_client asks the driver about a device, and notes how many SMs the process has there. */
static bool is_client(struct mps *m, CUdevice device)
{
    int on = 0, sms = 0;
    struct slot *s = __atomic_load_n(&m->slot, __ATOMIC_ACQUIRE);
    if (CALL(cuDeviceGetAttribute, &on, CU_DEVICE_ATTRIBUTE_MPS_ENABLED, device) != CUDA_SUCCESS || on != 1)
        return false;
    /* A context keeps the SMs that it was made with, so the most of all times counts. */
    if (s && CALL(cuDeviceGetAttribute, &sms, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device) == CUDA_SUCCESS &&
        sms > 0 && (uint64_t)sms > count_read(&s->sms))
        __atomic_store_n(&s->sms, (uint64_t)sms, __ATOMIC_RELAXED);
    return true;
}

/* in_init notes that a thread goes into cuInit, or comes out of it. */
static void in_init(struct mps *m, int threads)
{
    spin_lock(&m->lock);
    bool first = !m->inside;
    m->inside += (uint32_t)threads;
    if (m->slot && (first || !m->inside))
        __atomic_store_n(&m->slot->starting, first ? boot_ns() : 0, __ATOMIC_RELAXED);
    spin_unlock(&m->lock);
}

COLD static CUresult init(struct mps *m, unsigned int flags)
{
    if (standing(m) == MPS_CLIENT)
        return CALL(cuInit, flags);
    if (standing(m) == MPS_UNKNOWN)
        return CUDA_ERROR_OPERATING_SYSTEM;
    if (standing(m) == MPS_OUTSIDE || !set_variables(m->percent) || !beats())
        return CUDA_ERROR_MPS_CONNECTION_FAILED;
    in_init(m, 1);
    CUresult r = CALL(cuInit, flags);
    in_init(m, -1);
    int devices = 0;
    if (r == CUDA_SUCCESS)
        r = CALL(cuDeviceGetCount, &devices);
    for (CUdevice d = 0; r == CUDA_SUCCESS && d < devices; d++)
        if (!is_client(m, d))
            r = CUDA_ERROR_MPS_CONNECTION_FAILED, stand(m, MPS_OUTSIDE);
    if (r == CUDA_SUCCESS)
        stand(m, MPS_CLIENT);
    return r;
}

EXPORT CUresult cuInit(unsigned int flags)
{
    struct process *p = ENTER();
    bool share = p && has_share(p);
    if (p && __builtin_expect(__atomic_load_n(&p->held, __ATOMIC_ACQUIRE), 0))
        newcomer_waits(p);
    return share ? init(&p->mps, flags) : CALL(cuInit, flags);
}

bool mps_refuses(struct process *p, CUdevice device)
{
    struct mps *m = p ? &p->mps : NULL;
    if (!m || !has_share(p))
        return false;
    if (standing(m) == MPS_UNKNOWN || standing(m) == MPS_OUTSIDE || !set_variables(m->percent) || !is_client(m, device))
        return true;
    stand(m, MPS_CLIENT);
    return false;
}

void mps_made(struct process *p, CUdevice device)
{
    if (standing(&p->mps) == MPS_CLIENT)
        is_client(&p->mps, device);
}
