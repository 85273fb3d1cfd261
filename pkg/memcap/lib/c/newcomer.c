/* SPDX-License-Identifier: Apache-2.0 */

/* Newcomers. The agent may have given a container's room to others for a while. Then it sets HOLD in
 * the container's limit pages, and a process that comes to the GPU waits here until the agent clears
 * the bit:
 *
 *     in cuInit       before the driver begins
 *     at a context    before it is made, for a process that called cuInit earlier
 *
 * The program sees a slow start, not an error. A container without limit pages is never held. A page
 * that the agent has removed or replaced holds nothing, since the agent can no longer clear it.
 *
 * Other processes pay for one load: before cuInit the pages are read anyway (mps.c), and a context's
 * page is mapped. */

#include <sys/stat.h>

#include "process.h"

/* How long a wait lasts before the next look, if nothing wakes us. The agent's wake does not reach a
 * process with a kernel of its own, as in a sandbox. */
enum { LOOK_US = 200000 };

/* stands reports whether the agent still has the page that is mounted at a path. A page that it has
 * removed or replaced stays mounted here, but has no name on the host any more. */
static bool stands(const char *path)
{
    struct stat st;
    return SYS4(SYS_newfstatat, AT_FDCWD, path, &st, AT_SYMLINK_NOFOLLOW) == 0 && st.st_nlink > 0;
}

/* A look goes through limit pages until one holds newcomers. */
struct look {
    char dir[PATH_ROOM];
    struct claim found;
};

static bool holds(void *arg, const char *key)
{
    struct look *l = arg;
    struct claim *c = &l->found;
    return text_join(c->limit, sizeof c->limit, l->dir, key) && text_join(c->usage, sizeof c->usage, c->limit, "/usage") &&
           text_join(c->limit, sizeof c->limit, c->limit, "/limit") && claim_read(c) && c->control & CONTROL_HOLD && stands(c->limit);
}

static bool holds_on(void *arg, const char *gpu)
{
    struct look *l = arg;
    return text_join(l->dir, sizeof l->dir, CAP_ALLOCATIONS, gpu) && text_join(l->dir, sizeof l->dir, l->dir, "/") &&
           each_name(l->dir, holds, l);
}

/* map maps the first page of a file of that size. */
static void *map(const char *path, size_t size, int flags, int prot)
{
    int fd = open_sized(path, flags, size);
    void *at = fd < 0 ? NULL : sys_map(PAGE, prot, MAP_SHARED, fd);
    if (fd >= 0)
        sys_close(fd);
    return at;
}

/* note_wait tells the agent that a process waits. A GPU without a limit has no usage page. */
static void note_wait(const struct limit_page *page, const char *path)
{
    struct usage_page *u = map(path, USAGE_SIZE, O_RDWR, PROT_READ | PROT_WRITE);
    if (u && begins(u->magic, USAGE_MAGIC) && u->nonce == __atomic_load_n(&page->usage, __ATOMIC_ACQUIRE))
        __atomic_add_fetch(&u->waits, 1, __ATOMIC_RELAXED);
    sys_unmap(u, PAGE);
}

/* wait_on waits until a page no longer holds newcomers. */
static void wait_on(const struct claim *c, bool *noted)
{
    struct limit_page *page = map(c->limit, PAGE, O_RDONLY, PROT_READ);
    if (!page) {
        nap_us(LOOK_US);
        return;
    }
    if (!*noted)
        note_wait(page, c->usage);
    *noted = true;
    while (is_held(page) && stands(c->limit)) {
        const uint32_t *word = (const uint32_t *)&page->control; /* the low half */
        uint32_t now = __atomic_load_n(word, __ATOMIC_ACQUIRE);
        struct timespec t = {0, LOOK_US * 1000};
        long r = now & CONTROL_HOLD ? SYS4(SYS_futex, word, 0 /* FUTEX_WAIT */, now, &t) : 0;
        if (r != 0 && r != AGAIN && r != -4 /* EINTR */ && r != -110 /* ETIMEDOUT */)
            nap_us(LOOK_US);
    }
    sys_unmap(page, PAGE);
}

void newcomer_waits(struct process *p)
{
    struct look l;
    bool noted = false;
    while (each_name(CAP_ALLOCATIONS, holds_on, &l))
        wait_on(&l.found, &noted);
    __atomic_store_n(&p->held, 0, __ATOMIC_RELEASE);
}

void newcomer_waits_on(const char *gpu)
{
    struct look l;
    bool noted = false;
    while (holds_on(&l, gpu))
        wait_on(&l.found, &noted);
}
