/* SPDX-License-Identifier: Apache-2.0 */

/* libnvidia-ml.so.1: what nvidia-smi and its kin are told of a GPU's memory.
 * Everything but two functions is the real library's. It keeps nothing between
 * two calls, so threads and forked children need no thought: a call opens the
 * limit of the GPU by the UUID that the real library gives, and reads. */

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

/* left_dead returns what slots without a living owner have in bound, and what is idle
 * in all. */
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
            if (c && c < MOST && slot_free(fd, i + k))
                sum += c;
        }
    }
    return sum;
}

static bool is_open(void)
{
    int fd = sys_open(CAP_OPEN_MARK, O_PATH | O_NOFOLLOW, 0);
    if (fd < 0)
        return false;
    sys_close(fd);
    return true;
}

struct view {
    uint64_t limit, used;
};

/* look returns false where the real figures are to stand. */
static bool look(nvmlDevice_t device, struct view *v)
{
    char uuid[96];
    struct claim claim;
    struct limit_page page;
    struct usage_page head;
    if (!real.uuid || real.uuid(device, uuid, sizeof uuid) != NVML_SUCCESS)
        return false;
    for (const char *p = uuid; *p; p++)
        if (*p == '/')
            return false; /* an old MIG name: no file is called that */
    if (!claim_find(&claim, uuid))
        return false;
    int fd = open_page(claim.limit, PAGE, &page, sizeof page);
    if (fd < 0)
        return false;
    sys_close(fd);
    if (page.limit >= MOST)
        return false;
    *v = (struct view){.limit = page.limit};
    fd = open_page(claim.usage, USAGE_SIZE, &head, sizeof head);
    if (fd < 0 || !begins(head.magic, USAGE_MAGIC) || head.nonce != page.usage || head.high > SLOTS) {
        if (fd >= 0)
            sys_close(fd);
        v->used = v->limit; /* nobody can allocate, or it is not counted */
        return !is_open();
    }
    uint64_t idle = 0, dead = left_dead(fd, head.high, &idle), bound = AMOUNT(head.bound);
    sys_close(fd);
    bound -= idle < bound ? idle : bound;
    int64_t used = (int64_t)(bound - dead);
    if (page.nonce == head.nonce)
        used = shown_used(page.shown, page.shown_settled, page.shown_dead, bound, head.settled, dead);
    v->used = used < 0 ? 0 : (uint64_t)used < v->limit ? (uint64_t)used : v->limit;
    return true;
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *m)
{
    struct view v;
    find();
    nvmlReturn_t r = real.info ? real.info(device, m) : NVML_ERROR_FUNCTION_NOT_FOUND;
    if (r != NVML_SUCCESS || !m || !look(device, &v))
        return r;
    uint64_t left = v.limit - v.used;
    m->total = v.limit < m->total ? v.limit : m->total;
    m->free = left < m->free ? left : m->free;
    m->used = v.used < m->total ? v.used : m->total;
    return r;
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *m)
{
    struct view v;
    find();
    nvmlReturn_t r = real.info_v2 ? real.info_v2(device, m) : NVML_ERROR_FUNCTION_NOT_FOUND;
    if (r != NVML_SUCCESS || !m || m->version != MEMORY_V2 || !look(device, &v))
        return r;
    uint64_t left = v.limit - v.used;
    m->total = v.limit < m->total ? v.limit : m->total;
    m->free = left < m->free ? left : m->free;
    m->used = v.used < m->total ? v.used : m->total;
    m->reserved = 0; /* the driver's own is outside of every cap */
    return r;
}
