/* SPDX-License-Identifier: Apache-2.0 */

#define _GNU_SOURCE
#include "transport.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

enum {
    PROTOCOL = 2,
    PAGE_WORDS = 2048,
    PAGE_BYTES = 64 << 10, /* what is mapped: whole pages, however large they are here */
    REPLY_HEAD = 16,
    REPLY_STATIC = 1,
    IDLE_MAX = 64,
    KEPT = 4096, /* answers kept, a power of two */
};

/* A connection serves one call at a time; idle ones wait here for the next. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int idle[IDLE_MAX]; /* guarded by lock, like all below */
static int idle_count;
static unsigned epoch; /* connections of an earlier one are not kept */
static int refs;
static uint64_t boot; /* the driver load that was opened */
static _Atomic(uint64_t) *page;

static char socket_path[PATH_MAX];

static char version[256]; /* that this library was installed as, or empty */

/* An answer that holds while page[0] is generation. */
struct kept {
    uint64_t generation;
    uint16_t slot, asked, got;
    unsigned char bytes[]; /* the request, then the results */
};
static pthread_rwlock_t kept_lock = PTHREAD_RWLOCK_INITIALIZER;
static struct kept *kept[KEPT]; /* guarded by kept_lock */

/* --- where the daemon is -------------------------------------------------- */

/* The socket stands at a fixed place of the driver root that this library was
 * loaded from. The path is taken as it was given to the loader: resolving its
 * links could lead out of that root. */
static const char below_root[] = "run/nvidia-persistenced/socket";

static void find_socket(void)
{
    static const char *const dirs[] = {
        "/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/lib/x86_64-linux-gnu", "/lib/aarch64-linux-gnu", "/usr/lib64", "/lib64", "/usr/lib", "/lib",
    };
    const char *over = secure_getenv("GPU_EMULATOR_SOCKET");
    if (over && *over) {
        snprintf(socket_path, sizeof socket_path, "%s", over);
        return;
    }
    Dl_info info;
    char path[PATH_MAX] = "", here[PATH_MAX];
    if (dladdr(socket_path, &info) && info.dli_fname) {
        if (info.dli_fname[0] == '/')
            snprintf(path, sizeof path, "%s", info.dli_fname);
        else if (getcwd(here, sizeof here) && (size_t)snprintf(path, sizeof path, "%s/%s", here, info.dli_fname) >= sizeof path)
            path[0] = 0;
    }
    char *end = strrchr(path, '/');
    if (end)
        *end = 0;
    size_t len = strlen(path);
    for (size_t i = 0; i < sizeof dirs / sizeof *dirs; i++) {
        size_t n = strlen(dirs[i]);
        if (len >= n && strcmp(path + len - n, dirs[i]) == 0) {
            path[len - n] = 0;
            break;
        }
    }
    if ((size_t)snprintf(socket_path, sizeof socket_path, "%s/%s", path, below_root) >= sizeof socket_path)
        socket_path[0] = 0;
}

/* A library that stands elsewhere, mounted at a place of its own, belongs to the
 * nearest root above it that has a socket. */
static void climb(void)
{
    char path[PATH_MAX];
    size_t len = strlen(socket_path);
    if (len <= sizeof below_root || strcmp(socket_path + len - (sizeof below_root - 1), below_root) != 0 || access(socket_path, F_OK) == 0)
        return;
    strcpy(path, socket_path);
    path[len - sizeof below_root] = 0;
    for (char *slash; (slash = strrchr(path, '/'));) {
        strcpy(slash + 1, below_root);
        if (access(path, F_OK) == 0) {
            strcpy(socket_path, path);
            return;
        }
        *slash = 0;
    }
}

/* The version stands in the name of the file that was loaded, now: the file may
 * be replaced while it is in use. */
static void find_version(void)
{
    static const char mark[] = ".so.";
    Dl_info info;
    char path[PATH_MAX];
    if (!dladdr(socket_path, &info) || !info.dli_fname || !realpath(info.dli_fname, path))
        return;
    const char *name = strstr(strrchr(path, '/'), mark);
    if (name && strchr(name + sizeof mark - 1, '.'))
        snprintf(version, sizeof version, "%s", name + sizeof mark - 1);
}

static int dial(void)
{
    struct sockaddr_un to = {.sun_family = AF_UNIX};
    int dir = -1;
    climb();
    if (strlen(socket_path) < sizeof to.sun_path) {
        strcpy(to.sun_path, socket_path);
    } else { /* too long for an address: go by its directory */
        char path[PATH_MAX];
        strcpy(path, socket_path);
        char *name = strrchr(path, '/');
        *name++ = 0;
        dir = open(path, O_PATH | O_DIRECTORY | O_CLOEXEC);
        if (dir < 0 || (size_t)snprintf(to.sun_path, sizeof to.sun_path, "/proc/self/fd/%d/%s", dir, name) >= sizeof to.sun_path) {
            if (dir >= 0)
                close(dir);
            return -1;
        }
    }
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (fd >= 0) {
        int r;
        while ((r = connect(fd, (struct sockaddr *)&to, sizeof to)) < 0 && errno == EINTR)
            ;
        if (r < 0) {
            close(fd);
            fd = -1;
        }
    }
    if (dir >= 0)
        close(dir);
    return fd;
}

static int send_all(int fd, const void *data, size_t n)
{
    ssize_t w;
    while ((w = send(fd, data, n, MSG_NOSIGNAL)) < 0 && errno == EINTR)
        ;
    return w == (ssize_t)n ? 0 : -1;
}

/* image is a number that the kernel drew for this program at its exec, the same
 * for all libraries of the process. */
static uint64_t image(void)
{
    uint64_t n = 0;
    const void *random = (const void *)getauxval(AT_RANDOM);
    if (random)
        memcpy(&n, (const char *)random + 8, sizeof n);
    return n;
}

/* hello greets the daemon on a new connection and takes the page that it
 * hands out. lock is held. */
static int hello_locked(int fd, uint64_t *load)
{
    struct call c;
    begin(&c, "hello", NO_HANDLE);
    put_u32(&c, PROTOCOL);
    put_u32(&c, (uint32_t)refs);
    put_u64(&c, image());
    if (send_all(fd, c.request, c.asked))
        return -1;

    union {
        struct cmsghdr h;
        char space[CMSG_SPACE(sizeof(int))];
    } control;
    struct iovec io = {c.own, sizeof c.own};
    struct msghdr m = {.msg_iov = &io, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    ssize_t n;
    while ((n = recvmsg(fd, &m, MSG_CMSG_CLOEXEC)) < 0 && errno == EINTR)
        ;
    struct cmsghdr *h = n > 0 ? CMSG_FIRSTHDR(&m) : NULL;
    if (!h || h->cmsg_type != SCM_RIGHTS || h->cmsg_len != CMSG_LEN(sizeof(int)))
        return -1;
    int shared;
    memcpy(&shared, CMSG_DATA(h), sizeof shared);
    int r = -1;
    if (n == REPLY_HEAD + 8) {
        memcpy(load, c.own + REPLY_HEAD, 8);
        r = 0;
    }
    if (r == 0) {
        /* In place, since a thread may be reading the page of before. */
        void *at = mmap((void *)page, PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED | (page ? MAP_FIXED : 0), shared, 0);
        if (at == MAP_FAILED)
            r = -1;
        else
            page = at;
    }
    close(shared);
    return r;
}

/* take finds a connection for one call: RET_SUCCESS, or why there is none. */
static int take(int *fd, unsigned *of, int opening)
{
    pthread_mutex_lock(&lock);
    int r = RET_SUCCESS;
    *of = epoch;
    if (!opening && refs == 0) {
        r = RET_UNINITIALIZED;
    } else if (idle_count > 0) {
        *fd = idle[--idle_count];
    } else {
        uint64_t load = 0;
        *fd = dial();
        if (*fd >= 0 && hello_locked(*fd, &load)) {
            close(*fd);
            *fd = -1;
        }
        if (*fd < 0)
            r = opening ? RET_DRIVER_NOT_LOADED : RET_UNKNOWN;
        else if (refs == 0)
            boot = load;
        else if (boot != load) { /* handles do not outlive the driver */
            close(*fd);
            r = RET_UNKNOWN;
        }
    }
    pthread_mutex_unlock(&lock);
    return r;
}

static void give(int fd, unsigned of)
{
    pthread_mutex_lock(&lock);
    if (of == epoch && idle_count < IDLE_MAX)
        idle[idle_count++] = fd;
    else
        close(fd);
    pthread_mutex_unlock(&lock);
}

static void forget_answers(void)
{
    pthread_rwlock_wrlock(&kept_lock);
    for (int i = 0; i < KEPT; i++) {
        free(kept[i]);
        kept[i] = NULL;
    }
    pthread_rwlock_unlock(&kept_lock);
}

/* hang_up_locked closes the idle connections, and those in use as they come
 * back. */
static void hang_up_locked(void)
{
    while (idle_count > 0)
        close(idle[--idle_count]);
    epoch++;
}

/* --- calls ---------------------------------------------------------------- */

void begin(struct call *c, const char *name, uint32_t handle)
{
    size_t n = strlen(name);
    memcpy(c->request, &handle, 4);
    c->request[4] = (unsigned char)n;
    memcpy(c->request + 5, name, n);
    c->asked = 5 + n;
    c->got = c->at = 0;
    c->reply = c->own;
    c->room = sizeof c->own;
    c->fd = -1;
}

static void put(struct call *c, const void *data, size_t n)
{
    if (c->asked + n > sizeof c->request)
        abort(); /* no call has so many arguments */
    memcpy(c->request + c->asked, data, n);
    c->asked += n;
}

void put_u32(struct call *c, uint32_t v) { put(c, &v, 4); }
void put_u64(struct call *c, uint64_t v) { put(c, &v, 8); }

void put_str(struct call *c, const char *s)
{
    size_t n = strnlen(s, 256); /* longer than anything that the driver knows by name */
    uint16_t len = (uint16_t)n;
    put(c, &len, 2);
    put(c, s, n);
}

static const unsigned char *get(struct call *c, size_t n)
{
    static const unsigned char none[8];
    if (c->got - c->at < n)
        return none;
    c->at += n;
    return c->reply + c->at - n;
}

uint32_t get_u32(struct call *c)
{
    uint32_t v;
    memcpy(&v, get(c, 4), 4);
    return v;
}

uint64_t get_u64(struct call *c)
{
    uint64_t v;
    memcpy(&v, get(c, 8), 8);
    return v;
}

int get_str(struct call *c, char *out, size_t room)
{
    uint16_t n;
    memcpy(&n, get(c, 2), 2);
    if (n >= room)
        return RET_INSUFFICIENT_SIZE;
    if (c->got - c->at < n)
        return RET_UNKNOWN;
    memcpy(out, get(c, n), n);
    out[n] = 0;
    return RET_SUCCESS;
}

static uint32_t place(const struct call *c)
{
    uint32_t h = 2166136261u; /* FNV-1a */
    for (size_t i = 0; i < c->asked; i++)
        h = (h ^ c->request[i]) * 16777619u;
    return h % KEPT;
}

/* recall answers from what is kept, and counts the call for the daemon. */
static int recall(struct call *c, uint32_t at)
{
    int found = 0;
    pthread_rwlock_rdlock(&kept_lock);
    struct kept *k = kept[at];
    if (k && page && k->asked == c->asked && k->generation == atomic_load(&page[0]) && memcmp(k->bytes, c->request, k->asked) == 0) {
        memcpy(c->own, k->bytes + k->asked, k->got);
        c->reply = c->own;
        c->got = k->got;
        c->at = 0;
        atomic_fetch_add(&page[k->slot], 1);
        found = 1;
    }
    pthread_rwlock_unlock(&kept_lock);
    return found;
}

static void keep(const struct call *c, uint32_t at, uint64_t generation, uint16_t slot)
{
    size_t n = c->got - c->at;
    struct kept *k = slot < PAGE_WORDS && n <= MAX_REPLY ? malloc(sizeof *k + c->asked + n) : NULL;
    if (!k)
        return;
    k->generation = generation;
    k->slot = slot;
    k->asked = (uint16_t)c->asked;
    k->got = (uint16_t)n;
    memcpy(k->bytes, c->request, c->asked);
    memcpy(k->bytes + c->asked, c->reply + c->at, n);
    pthread_rwlock_wrlock(&kept_lock);
    free(kept[at]);
    kept[at] = k;
    pthread_rwlock_unlock(&kept_lock);
}

/* receive reads a reply, and the descriptor that may come with it. */
static ssize_t receive(int fd, struct call *c)
{
    union {
        struct cmsghdr h;
        char space[CMSG_SPACE(sizeof(int))];
    } control;
    struct iovec io = {c->reply, c->room};
    struct msghdr m = {.msg_iov = &io, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    ssize_t n;
    while ((n = recvmsg(fd, &m, MSG_CMSG_CLOEXEC | MSG_TRUNC)) < 0 && errno == EINTR)
        ;
    struct cmsghdr *h = n > 0 ? CMSG_FIRSTHDR(&m) : NULL;
    if (h && h->cmsg_type == SCM_RIGHTS && h->cmsg_len == CMSG_LEN(sizeof(int)))
        memcpy(&c->fd, CMSG_DATA(h), sizeof c->fd);
    return n;
}

static int exchange(struct call *c, int opening)
{
    /* A kept connection may be dead, its daemon gone; a new one tells. */
    for (int left = IDLE_MAX + 1; left > 0; left--) {
        int fd;
        unsigned of;
        int r = take(&fd, &of, opening);
        if (r != RET_SUCCESS)
            return r;
        ssize_t n = -1;
        if (send_all(fd, c->request, c->asked) == 0)
            n = receive(fd, c);
        if (n <= 0) {
            close(fd);
            continue;
        }
        if (n < REPLY_HEAD || (size_t)n > c->room) {
            close(fd);
            return RET_UNKNOWN;
        }
        give(fd, of);
        c->got = (size_t)n;
        int32_t ret;
        memcpy(&ret, c->reply, 4);
        c->at = REPLY_HEAD;
        return ret;
    }
    return RET_UNKNOWN;
}

int is_locked(void)
{
    return page && atomic_load(&page[PAGE_WORDS]) != 0;
}

int is_open(void)
{
    pthread_mutex_lock(&lock);
    int open = refs > 0;
    pthread_mutex_unlock(&lock);
    return open;
}

int send_call(struct call *c)
{
    if (!is_open())
        return RET_UNINITIALIZED;
    uint32_t at = place(c);
    if (recall(c, at))
        return RET_SUCCESS;
    int r = exchange(c, 0);
    if (r == RET_SUCCESS) {
        uint16_t flags, slot;
        uint64_t generation;
        memcpy(&flags, c->reply + 4, 2);
        memcpy(&slot, c->reply + 6, 2);
        memcpy(&generation, c->reply + 8, 8);
        if (flags & REPLY_STATIC)
            keep(c, at, generation, slot);
    }
    return r;
}

int driver_open(const char *name)
{
    struct call c;
    begin(&c, name, NO_HANDLE);
    put_str(&c, version);
    int r = exchange(&c, 1);
    if (r == RET_SUCCESS) {
        pthread_mutex_lock(&lock);
        refs++;
        pthread_mutex_unlock(&lock);
    }
    return r;
}

int driver_close(const char *name)
{
    if (!is_open())
        return RET_UNINITIALIZED;
    struct call c;
    begin(&c, name, NO_HANDLE);
    int r = exchange(&c, 0);
    /* Without its daemon a program can still let go. A daemon that answers an error
     * counts the program as before. */
    if (r != RET_SUCCESS && r != RET_UNINITIALIZED && c.got > 0)
        return r;
    pthread_mutex_lock(&lock);
    if (refs > 0)
        refs--;
    pthread_mutex_unlock(&lock);
    return RET_SUCCESS; /* connections and answers wait for the next time */
}

/* --- life of the library -------------------------------------------------- */

static void before_fork(void)
{
    pthread_mutex_lock(&lock);
    pthread_rwlock_wrlock(&kept_lock);
}

static void after_fork(void)
{
    pthread_rwlock_unlock(&kept_lock);
    pthread_mutex_unlock(&lock);
}

/* A forked child is another process to the daemon: it connects anew. What was
 * open stays open, and handles stay valid. */
static void in_child(void)
{
    pthread_rwlock_init(&kept_lock, NULL);
    pthread_mutex_init(&lock, NULL);
    hang_up_locked();
    if (page)
        munmap((void *)page, PAGE_BYTES);
    page = NULL;
}

__attribute__((constructor)) static void load(void)
{
    find_socket();
    find_version();
    pthread_atfork(before_fork, after_fork, in_child);
}

__attribute__((destructor)) static void unload(void)
{
    hang_up_locked();
    forget_answers();
    /* At the end of a program a thread may be in a call still, and read the page. So it becomes an empty one. */
    if (page)
        mmap((void *)page, PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
}
