/* SPDX-License-Identifier: Apache-2.0 */

/* libnvidia-ml.so.1: what nvidia-smi and other programs see of a GPU's memory. All functions but
 * two are the real library's. Each call gets the GPU's UUID from the real library, opens and reads
 * the limit page of that GPU, and keeps nothing. So threads and forked children need no care. */

#include "claim.h"
#include "real.h"

typedef int nvmlReturn_t;
typedef void *nvmlDevice_t;
enum { NVML_SUCCESS = 0, NVML_ERROR_FUNCTION_NOT_FOUND = 13 };

typedef struct {
    unsigned long long total, free, used;
} nvmlMemory_t;

typedef struct {
    unsigned int version;
    unsigned long long total, reserved, free, used;
} nvmlMemory_v2_t;
#define MEMORY_V2 ((unsigned int)(sizeof(nvmlMemory_v2_t) | 2u << 24))
_Static_assert(sizeof(nvmlMemory_v2_t) == 40, "nvmlMemory_v2_t");

#define EXPORT __attribute__((visibility("default")))
EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t, nvmlMemory_t *);
EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t, nvmlMemory_v2_t *);

static struct {
    nvmlReturn_t (*info)(nvmlDevice_t, nvmlMemory_t *);
    nvmlReturn_t (*info_v2)(nvmlDevice_t, nvmlMemory_v2_t *);
    nvmlReturn_t (*uuid)(nvmlDevice_t, char *, unsigned int);
    uint32_t ready;
} real;

static void find(void)
{
    struct real_library lib = {0};
    if (__atomic_load_n(&real.ready, __ATOMIC_ACQUIRE))
        return;
    if (real_find(&lib, CAP_REAL_NVML, "nvmlDeviceGetUUID")) {
        real.info = (nvmlReturn_t(*)(nvmlDevice_t, nvmlMemory_t *))real_symbol(&lib, "nvmlDeviceGetMemoryInfo");
        real.info_v2 = (nvmlReturn_t(*)(nvmlDevice_t, nvmlMemory_v2_t *))real_symbol(&lib, "nvmlDeviceGetMemoryInfo_v2");
        real.uuid = (nvmlReturn_t(*)(nvmlDevice_t, char *, unsigned int))real_symbol(&lib, "nvmlDeviceGetUUID");
    }
    __atomic_store_n(&real.ready, 1, __ATOMIC_RELEASE);
}

/* left_dead returns how many bytes of bound belong to slots without a living owner. It
 * adds to *idle what is idle in all slots, and what living processes have borrowed. */
static uint64_t left_dead(int fd, uint64_t high, uint64_t *idle)
{
    struct slot slots[16];
    uint64_t sum = 0;
    for (uint64_t i = 0; i < high; i += 16) {
        if (SYS4(SYS_pread64, fd, slots, sizeof slots, PAGE + i * sizeof *slots) != sizeof slots)
            break;
        *idle += idle_in(slots, high - i < 16 ? high - i : 16);
        for (uint64_t k = 0; k < 16 && i + k < high; k++) {
            uint64_t c = slot_committed(&slots[k]);
            if (!c || c >= MOST)
                continue;
            if (slot_free(fd, i + k))
                sum += c;
            else
                *idle += borrowed_for(&slots[k]);
        }
    }
    return sum;
}

struct view {
    uint64_t limit, used;
};

/* look_at adds a pair of pages to a view. False: the program is to see the real figures. */
static bool look_at(const struct claim *claim, struct view *sum)
{
    struct limit_page page;
    struct usage_page head;
    int fd = open_page(claim->limit, PAGE, &page, sizeof page);
    if (fd < 0)
        return false;
    sys_close(fd);
    if (page.limit >= MOST)
        return false;
    fd = open_page(claim->usage, USAGE_SIZE, &head, sizeof head);
    if (fd < 0 || !begins(head.magic, USAGE_MAGIC) || head.nonce != page.usage || head.high > SLOTS) {
        if (fd >= 0)
            sys_close(fd);
        sum->limit += page.limit;
        sum->used += page.limit; /* allocations are refused, or not counted */
        return !is_open();
    }
    uint64_t idle = 0, dead = left_dead(fd, head.high, &idle), bound = AMOUNT(head.bound);
    sys_close(fd);
    bound -= idle < bound ? idle : bound;
    int64_t used = (int64_t)(bound - dead);
    if (page.nonce == head.nonce)
        used = shown_used(page.shown, page.shown_settled, page.shown_dead, bound, head.settled, dead);
    sum->limit += page.limit;
    sum->used += used < 0 ? 0 : (uint64_t)used < page.limit ? (uint64_t)used : page.limit;
    return true;
}

/* look makes the view of a GPU: the sum of its shares. False: the program is to see the real
 * figures. */
static bool look(nvmlDevice_t device, struct view *v)
{
    char uuid[96];
    struct claim claim, last;
    *v = (struct view){0};
    if (!real.uuid || real.uuid(device, uuid, sizeof uuid) != NVML_SUCCESS)
        return false;
    for (const char *p = uuid; *p; p++)
        if (*p == '/')
            return false; /* the old form of a MIG instance's name; no page has such a name */
    bool any = false;
    for (; claim_find(&claim, uuid, any ? &last : NULL); last = claim, any = true)
        if (!look_at(&claim, v))
            return false;
    return any;
}

/* INFO is the body of both functions. What the driver reserves for itself is not part of a cap. */
#define INFO(name, valid, also)                                                   \
    struct view v;                                                                \
    find();                                                                       \
    nvmlReturn_t r = real.name ? real.name(device, m) : NVML_ERROR_FUNCTION_NOT_FOUND; \
    if (r != NVML_SUCCESS || !m || !(valid) || !look(device, &v))                 \
        return r;                                                                 \
    uint64_t left = v.limit - v.used;                                             \
    m->total = v.limit < m->total ? v.limit : m->total;                           \
    m->free = left < m->free ? left : m->free;                                    \
    m->used = v.used < m->total ? v.used : m->total;                              \
    also;                                                                         \
    return r;

EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *m) { INFO(info, true, ) }
EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *m) { INFO(info_v2, m->version == MEMORY_V2, m->reserved = 0) }
