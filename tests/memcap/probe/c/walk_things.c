/* SPDX-License-Identifier: Apache-2.0 */

/* The memory of a walk: what it asks for, how it gives it back, and how it passes it on
 * to other processes. */
#define _GNU_SOURCE
#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "walk.h"

enum { DESCRIPTOR = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR };

/* --- calls of the walk's own ------------------------------------------------ */

static uint64_t grains(uint64_t n) { return (n + 2 * MiB - 1) / (2 * MiB) * (2 * MiB); }

static CUmemAllocationProp property(int type, CUmemLocation location) { return (CUmemAllocationProp){.type = type, .location = location}; }

static CUmemLocation here(void) { return (CUmemLocation){CU_MEM_LOCATION_TYPE_DEVICE, w.device}; }

/* The device's second locality domain: `id` is a byte for each of both. */
static CUmemLocation domain(void) { return (CUmemLocation){CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN, w.device | 1 << 8}; }

static CUresult take_domain(struct seat *s, struct item *i, uint64_t n)
{
    CUmemAllocationProp prop = property(CU_MEM_ALLOCATION_TYPE_PINNED, domain());
    return s->cu->cuMemCreate(&i->a, grains(n), &prop, 0);
}

static CUresult take_by_hand(struct seat *s, struct item *i, uint64_t n)
{
    CUmemAllocationProp prop = property(CU_MEM_ALLOCATION_TYPE_MANAGED, here());
    return s->cu->cuMemCreate(&i->a, grains(n), &prop, 0);
}

static CUresult give_handle(struct seat *s, struct item *i) { return s->cu->cuMemRelease(i->a); }

/* Of exported memory an item has the handle, a handle that came of opening the
 * descriptor, and 1 plus the descriptor; each holds the memory, and each may be 0. */
static CUresult take_exported(struct seat *s, struct item *i, uint64_t n)
{
    int fd;
    CUmemAllocationProp prop = property(CU_MEM_ALLOCATION_TYPE_PINNED, here());
    prop.requestedHandleTypes = DESCRIPTOR;
    CUresult r = s->cu->cuMemCreate(&i->a, grains(n), &prop, 0);
    if (r != CUDA_SUCCESS)
        return r;
    r = s->cu->cuMemExportToShareableHandle(&fd, i->a, DESCRIPTOR, 0);
    if (r == CUDA_SUCCESS)
        i->c = (uint64_t)fd + 1;
    return r;
}

static CUresult let_go(struct seat *s, uint64_t *handle)
{
    CUresult r = *handle ? s->cu->cuMemRelease(*handle) : CUDA_SUCCESS;
    *handle = 0;
    return r;
}

static CUresult give_exported(struct seat *s, struct item *i)
{
    int own_first = (int)dice(&w.seed, 2);
    if (i->c && dice(&w.seed, 2)) {
        close((int)i->c - 1);
        i->c = 0;
    }
    CUresult r = let_go(s, own_first ? &i->a : &i->b), after = let_go(s, own_first ? &i->b : &i->a);
    if (i->c)
        close((int)i->c - 1);
    i->c = 0;
    return r != CUDA_SUCCESS ? r : after;
}

static CUresult give_opened(struct seat *s, struct item *i)
{
    CUresult r = s->cu->cuIpcCloseMemHandle(i->a);
    w.common->letters[i->b].open = 0;
    return r;
}

static CUresult give_pointer(struct seat *s, struct item *i)
{
    CUresult r = dice(&w.seed, 2) ? s->cu->cuMemFree_v2(i->a) : s->cu->cuMemFreeAsync(i->a, s->stream);
    w.common->letters[i->b].open = 0;
    return r;
}

static const struct call domain_call = {"cuMemCreate/domain", take_domain, give_handle, grains, {-1}};
static const struct call by_hand_call = {"cuMemCreate/managed", take_by_hand, give_handle, grains, {-1}};
static const struct call exported_call = {"cuMemCreate/exported", take_exported, give_exported, grains, {-1}};
/* What the other process has taken. */
static const struct call imported_call = {"cuMemImportFromShareableHandle", NULL, give_exported, grains, {-1}};
static const struct call pointer_call = {"cuMemPoolImportPointer", NULL, give_pointer, grains, {-1}};
static const struct call opened_call = {"cuIpcOpenMemHandle", NULL, give_opened, grains, {-1}};

/* --- asking ----------------------------------------------------------------- */

uint64_t size_of(uint64_t *seed)
{
    switch (dice(seed, 10)) {
    case 0: case 1: case 2: return 1 + dice(seed, 64 << 10);
    case 3: case 4: return (64 << 10) + dice(seed, 2 * MiB);
    case 5: return 2 * MiB * (8 + dice(seed, 40));
    default: return 2 * MiB + dice(seed, 14 * MiB);
    }
}

struct request wish(struct thread *t)
{
    static const char *const others[] = {
        "cuMemAllocPitch_v2", "cuMemAllocManaged", "cuMemCreate", "cuMemCreate/mapped", "cuMemCreate/retained", "cuArrayCreate_v2",
        "cuArray3DCreate_v2", "cuMipmappedArrayCreate", "cuGraphAddMemAllocNode", "cuMemAllocAsync/captured", "cuModuleLoadData", "cuMemHostAlloc",
    };
    enum { OTHERS = sizeof others / sizeof *others };
    struct request q = {.stream = any_stream(t), .bytes = size_of(&t->seed)};
    uint64_t i = dice(&t->seed, 10);
    if (i < 3) {
        q.call = find_call("cuMemAlloc_v2");
    } else if (i < 7) {
        q.pool = dice(&t->seed, 2) ? NULL : w.pools[dice(&t->seed, POOLS)].pool;
    } else {
        uint64_t which = dice(&t->seed, OTHERS + 5);
        q.call = which < OTHERS               ? find_call(others[which])
                 : which == OTHERS            ? (w.domains ? &domain_call : &exported_call)
                 : which == OTHERS + 1        ? (w.managed ? &by_hand_call : &exported_call)
                                              : &exported_call;
        q.bytes = grains(q.bytes); /* of arrays and the like, whole rows and planes */
        if (!q.stream || q.stream == CU_STREAM_PER_THREAD)
            q.stream = w.streams[0].stream; /* the default stream cannot be captured */
    }
    return q;
}

CUresult ask(const struct request *q, struct thread *t, struct item *i)
{
    struct seat seat = {.cu = w.cu, .device = w.device, .context = w.contexts[t->ctx].ctx, .stream = q->stream};
    if (q->call)
        return q->call->take(&seat, i, q->bytes);
    return q->pool ? w.cu->cuMemAllocFromPoolAsync(&i->a, q->bytes, q->pool, q->stream) : w.cu->cuMemAllocAsync(&i->a, q->bytes, q->stream);
}

const char *name_of(const struct request *q) { return q->call ? q->call->name : q->pool ? "cuMemAllocFromPoolAsync" : "cuMemAllocAsync"; }

int is(const struct request *q, const char *name) { return q->call && !strcmp(q->call->name, name); }

struct thing *room_for_one(void)
{
    for (int i = 0; i < THINGS; i++)
        if (!w.things[i].used)
            return &w.things[i];
    return NULL;
}

void keep(struct thing *to, const struct thread *t, const struct request *q, struct item i)
{
    *to = (struct thing){
        .call = q->call, .pool = q->pool, .item = i, .bytes = q->bytes, .ctx = q->call ? t->ctx : context_of(t, q->stream), .used = 1,
        .managed = is(q, "cuMemAllocManaged") || is(q, "cuMemCreate/managed"),
    };
    w.book->live += to->bytes;
    w.book->managed += to->managed ? to->bytes : 0;
}

/* --- giving back ------------------------------------------------------------ */

void forget(struct thing *o)
{
    w.book->live -= o->bytes;
    w.book->managed -= o->managed ? o->bytes : 0;
    o->used = 0;
}

int survives(const struct thing *o)
{
    static const char *const lasting[] = {
        "cuMemCreate", "cuMemCreate/mapped", "cuMemCreate/retained", "cuMemCreate/domain", "cuMemCreate/managed", "cuMemCreate/exported",
        "cuMemImportFromShareableHandle", "cuMemPoolImportPointer", "cuGraphAddMemAllocNode", "cuMemAllocAsync/captured",
    };
    for (size_t i = 0; o->call && i < sizeof lasting / sizeof *lasting; i++)
        if (!strcmp(o->call->name, lasting[i]))
            return 1;
    return 0;
}

/* recall takes back what was offered; it answers 0 if the other process has it open. */
static int recall(struct thing *o)
{
    struct letter *l = o->letter ? &w.common->letters[o->letter - 1] : NULL;
    if (l && l->open)
        return 0;
    if (l)
        *l = (struct letter){0};
    o->letter = 0;
    return 1;
}

void give(struct thread *t, struct thing *o)
{
    struct seat seat = {.cu = w.cu, .device = w.device, .context = w.contexts[t->ctx].ctx, .stream = any_stream(t)};
    if (!recall(o))
        return;
    if (o->call)
        right(o->call->name, o->call->give(&seat, &o->item));
    else if (dice(&t->seed, 8))
        RIGHT(cuMemFreeAsync(o->item.a, seat.stream));
    else
        RIGHT(cuMemFree_v2(o->item.a));
    forget(o);
}

void give_any(struct thread *t, int count)
{
    for (int tries = 0; count > 0 && tries < 4 * THINGS; tries++) {
        struct thing *o = &w.things[dice(&t->seed, THINGS)];
        if (o->used) {
            give(t, o);
            count--;
        }
    }
}

/* --- passing on ------------------------------------------------------------- */

/* A parcel is memory that is on its way to the other process, which a descriptor
 * holds. */
union control {
    struct cmsghdr header;
    char room[CMSG_SPACE(sizeof(int))];
};

/* post sends a descriptor, and the number of the pool that it stands for, or 0 for memory.
 * It answers 0 where there is no room on the way. */
static int post(int fd, uint64_t pool)
{
    struct iovec part = {&pool, sizeof pool};
    union control c = {0};
    struct msghdr m = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &c, .msg_controllen = sizeof c};
    struct cmsghdr *h = CMSG_FIRSTHDR(&m);
    h->cmsg_level = SOL_SOCKET;
    h->cmsg_type = SCM_RIGHTS;
    h->cmsg_len = CMSG_LEN(sizeof fd);
    memcpy(CMSG_DATA(h), &fd, sizeof fd);
    if (sendmsg(w.post, &m, MSG_DONTWAIT | MSG_NOSIGNAL) == sizeof pool) {
        w.book->passed++;
        return 1;
    }
    if (errno != EAGAIN && errno != EWOULDBLOCK && errno != ETOOMANYREFS)
        say(w.book->failure, "to send a descriptor: %s", strerror(errno));
    return 0;
}

/* received is the descriptor of the next parcel, or -1, and the number of a pool, or 0. */
static int received(uint64_t *pool)
{
    int fd = -1;
    struct iovec part = {pool, sizeof *pool};
    union control c = {0};
    struct msghdr m = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &c, .msg_controllen = sizeof c};
    if (recvmsg(w.post, &m, MSG_DONTWAIT | MSG_CMSG_CLOEXEC) == sizeof *pool && CMSG_FIRSTHDR(&m))
        memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&m)), sizeof fd);
    return fd;
}

static struct thing *any_of(struct thread *t, const struct call *c, const struct call *or)
{
    uint64_t first = dice(&t->seed, THINGS);
    for (int i = 0; i < THINGS; i++) {
        struct thing *o = &w.things[(first + (uint64_t)i) % THINGS];
        if (o->used && o->call && (o->call == c || o->call == or))
            return o;
    }
    return NULL;
}

/* --- letters ---------------------------------------------------------------- */

static struct letter *free_letter(void)
{
    for (int i = 0; i < LETTERS; i++)
        if (!w.common->letters[i].from)
            return &w.common->letters[i];
    return NULL;
}

static void offer(struct letter *l, struct thing *o)
{
    l->from = 1 + w.process;
    l->offered = 1;
    o->letter = 1 + (int)(l - w.common->letters);
}

/* offer_plain writes a letter about ordinary memory of the primary context, which stays. */
static void offer_plain(struct thread *t)
{
    struct letter *l = free_letter();
    struct thing *o = any_of(t, find_call("cuMemAlloc_v2"), NULL);
    if (l && o && !o->ctx && !o->letter && !t->ctx && RIGHT(cuIpcGetMemHandle(&l->handle, o->item.a)))
        offer(l, o);
}

/* offer_pooled writes one about memory of a pool, which it sends first. */
static void offer_pooled(struct thread *t)
{
    static uint64_t numbers;
    struct letter *l = free_letter();
    struct pool_of *p = &w.pools[dice(&t->seed, POOLS)];
    int fd;
    if (!l || !p->pool || !p->shared)
        return;
    if (!p->number) {
        if (!RIGHT(cuMemPoolExportToShareableHandle(&fd, p->pool, DESCRIPTOR, 0)))
            return;
        if (post(fd, numbers + 1))
            p->number = ++numbers;
        close(fd);
    }
    uint64_t first = dice(&t->seed, THINGS);
    for (uint64_t i = 0; p->number && i < THINGS; i++) {
        struct thing *o = &w.things[(first + i) % THINGS];
        if (!o->used || o->call || o->ctx || o->pool != p->pool || o->letter)
            continue;
        l->pool = p->number;
        if (RIGHT(cuMemPoolExportPointer(&l->data, o->item.a)))
            offer(l, o);
        return;
    }
}

int pool_in_use(const struct pool_of *p)
{
    for (int i = 0; i < THINGS; i++)
        if (w.things[i].used && w.things[i].letter && p->number && w.common->letters[w.things[i].letter - 1].pool == p->number)
            return 1;
    return 0;
}

/* open_pool keeps a pool of the other process, in the place of another. */
static void open_pool(struct thread *t, int fd, uint64_t number)
{
    struct pool_of *p = &w.theirs[dice(&t->seed, POOLS)];
    if (p->pool)
        RIGHT(cuMemPoolDestroy(p->pool));
    *p = (struct pool_of){.number = number};
    RIGHT(cuMemPoolImportFromShareableHandle(&p->pool, (void *)(intptr_t)fd, DESCRIPTOR, 0));
    close(fd);
}

void pass_on(struct thread *t)
{
    switch (dice(&t->seed, 6)) {
    case 0: offer_plain(t); return;
    case 1: offer_pooled(t); return;
    default: break;
    }
    struct seat seat = {.cu = w.cu};
    struct thing *o = any_of(t, &exported_call, &imported_call);
    int fd;
    if (!o)
        return;
    uint64_t *one = dice(&t->seed, 2) ? &o->item.a : &o->item.b;
    switch (dice(&t->seed, 5)) {
    case 0: case 1:
        if (o->item.c)
            post((int)o->item.c - 1, 0);
        break;
    case 2: /* a handle more */
        if (!*one && o->item.c)
            RIGHT(cuMemImportFromShareableHandle(one, (void *)(intptr_t)(o->item.c - 1), DESCRIPTOR));
        break;
    case 3: /* a handle less, of what has another hold */
        if (*one && (o->item.c || (o->item.a && o->item.b)))
            right("cuMemRelease", let_go(&seat, one));
        break;
    default: /* a descriptor less, or a new one */
        if (o->item.c && (o->item.a || o->item.b)) {
            close((int)o->item.c - 1);
            o->item.c = 0;
        } else if (!o->item.c && o->call == &exported_call && o->item.a && RIGHT(cuMemExportToShareableHandle(&fd, o->item.a, DESCRIPTOR, 0))) {
            o->item.c = (uint64_t)fd + 1;
        }
    }
}

static void open_letter(struct thread *t)
{
    struct thing *to = room_for_one();
    struct request plain = {.call = &opened_call}, pooled = {.call = &pointer_call};
    struct item i = {0};
    for (int n = 0; n < LETTERS && to; n++) {
        struct letter *l = &w.common->letters[n];
        struct pool_of *p = NULL;
        if (!l->offered || l->from == 1 + w.process)
            continue;
        for (int k = 0; l->pool && k < POOLS; k++)
            if (w.theirs[k].number == l->pool)
                p = &w.theirs[k];
        if (l->pool ? !p : t->ctx != 0)
            continue; /* the pool has not come, or has gone */
        if (!(p ? RIGHT(cuMemPoolImportPointer(&i.a, p->pool, &l->data)) : RIGHT(cuIpcOpenMemHandle_v2(&i.a, l->handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS))))
            return;
        i.b = (uint64_t)n;
        l->open = 1;
        l->offered = 0;
        keep(to, t, p ? &pooled : &plain, i);
        w.book->passed++;
        return;
    }
}

void collect(struct thread *t)
{
    uint64_t pool = 0;
    struct item i = {0};
    if (dice(&t->seed, 2))
        open_letter(t);
    struct thing *to = room_for_one();
    int fd = to ? received(&pool) : -1;
    if (fd < 0)
        return;
    if (pool) {
        open_pool(t, fd, pool);
        return;
    }
    struct request q = {.call = &imported_call};
    if (!RIGHT(cuMemImportFromShareableHandle(&i.a, (void *)(intptr_t)fd, DESCRIPTOR)) || dice(&t->seed, 2))
        close(fd);
    else
        i.c = (uint64_t)fd + 1;
    if (i.a)
        keep(to, t, &q, i);
}
