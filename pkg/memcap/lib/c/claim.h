/* SPDX-License-Identifier: Apache-2.0 */

/* Finds the pages of a container's GPU. The agent mounts a pair of pages for each allocation that
 * the container has on the GPU: a directory in CAP_ALLOCATIONS/GPU with the files limit and
 * usage. */
#ifndef CAP_CLAIM_H
#define CAP_CLAIM_H

#include <sys/vfs.h>

#include "page.h"

enum { PATH_ROOM = 256 };
enum { SPOILT = -22 }; /* EINVAL */

struct claim {
    char limit[PATH_ROOM], usage[PATH_ROOM]; /* paths */
    uint64_t bytes, percent, control;        /* of the limit page */
    bool others;                             /* true: the container has more pairs on the GPU */
    bool held;                               /* true: one of the GPU's limit pages holds newcomers */
};

/* open_sized opens a file of exactly that size. It follows no link and does not wait for a pipe,
 * since something else may be mounted there. A negative result is an error number. */
static inline int open_sized(const char *path, int flags, size_t size)
{
    int fd = sys_open(path, flags | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY, 0);
    if (fd < 0 || SYS3(SYS_lseek, fd, 0, SEEK_END) == (long)size)
        return fd;
    sys_close(fd);
    return SPOILT;
}

/* open_page does the same, and reads the first n bytes. */
static inline int open_page(const char *path, size_t size, void *out, size_t n)
{
    int fd = open_sized(path, O_RDONLY, size);
    if (fd < 0 || SYS4(SYS_pread64, fd, out, n, 0) == (long)n)
        return fd;
    sys_close(fd);
    return SPOILT;
}

/* is_open reports whether the open policy holds. Under it, memory that cannot be counted passes;
 * otherwise such memory is refused. */
static inline bool is_open(void)
{
    int fd = sys_open(CAP_OPEN_MARK, O_PATH | O_NOFOLLOW, 0);
    if (fd < 0)
        return false;
    sys_close(fd);
    return true;
}

static inline bool begins(const char *at, const char *magic)
{
    for (int i = 0; i < 8; i++)
        if (at[i] != magic[i])
            return false;
    return true;
}

/* claim_read reads a limit page. False: it is not the agent's. The agent's pages are on read-only
 * mounts; a program in the container may have put a file of its own beside them. */
static inline bool claim_read(struct claim *c)
{
    struct limit_page page;
    struct statfs fs;
    int fd = open_page(c->limit, PAGE, &page, sizeof page);
    if (fd < 0)
        return false;
    bool ours = SYS2(SYS_fstatfs, fd, &fs) == 0 && fs.f_flags & 1 /* ST_RDONLY */ && begins(page.magic, LIMIT_MAGIC) &&
                (page.limit < MOST || page.limit == NO_LIMIT);
    sys_close(fd);
    c->bytes = page.limit;
    c->percent = page.percent;
    c->control = page.control;
    return ours;
}

/* claim_before reports whether a comes before b. The larger limit comes first. Equal limits are
 * ordered by name. So all processes of a container have its pages in the same order, and the
 * watchdog has the same. */
static inline bool claim_before(const struct claim *a, const struct claim *b)
{
    return a->bytes > b->bytes || (a->bytes == b->bytes && text_before(a->limit, b->limit));
}

/* each_name calls use with each name in a directory, until use returns true. It returns whether use
 * has. False also if there is no such directory. */
static inline bool each_name(const char *dir, bool (*use)(void *, const char *), void *arg)
{
    struct entry {
        uint64_t ino, off;
        unsigned short length;
        unsigned char type;
        char name[];
    };
    char list[2048] __attribute__((aligned(8)));
    bool done = false;
    int fd = sys_open(dir, O_RDONLY | O_DIRECTORY | O_NOFOLLOW, 0);
    if (fd < 0)
        return false;
    for (long n; !done && (n = SYS3(SYS_getdents64, fd, list, sizeof list)) > 0;)
        for (long at = 0; !done && at < n;) {
            const struct entry *e = (const struct entry *)(list + at);
            at += e->length;
            done = e->name[0] != '.' && use(arg, e->name);
        }
    sys_close(fd);
    return done;
}

struct claims {
    char dir[PATH_ROOM];
    struct claim *best;
    const struct claim *after;
    int all;
    bool found;
};

static inline bool claim_offer(void *arg, const char *name)
{
    struct claims *s = arg;
    struct claim c;
    if (!text_join(c.limit, sizeof c.limit, s->dir, name) || !text_join(c.usage, sizeof c.usage, c.limit, "/usage") ||
        !text_join(c.limit, sizeof c.limit, c.limit, "/limit") || !claim_read(&c))
        return false;
    c.others = s->best->others = ++s->all > 1;
    c.held = s->best->held |= (c.control & CONTROL_HOLD) != 0;
    if ((s->after && !claim_before(s->after, &c)) || (s->found && claim_before(s->best, &c)))
        return false;
    *s->best = c;
    s->found = true;
    return false;
}

/* claim_find finds the container's first pair of pages of a GPU. If after is not NULL, it finds the
 * first pair after that one. False: there is none. */
static inline bool claim_find(struct claim *best, const char *gpu, const struct claim *after)
{
    struct claims s = {.best = best, .after = after};
    best->held = false;
    if (text_join(s.dir, sizeof s.dir, CAP_ALLOCATIONS, gpu) && text_join(s.dir, sizeof s.dir, s.dir, "/"))
        each_name(s.dir, claim_offer, &s);
    return s.found;
}

#endif
