/* SPDX-License-Identifier: Apache-2.0 */

/* What a hook came to, for the agent (outcome.go has the form), and for the hook of another
 * allocation of the same container: the driver's limit is for all of a container's allocations on a
 * GPU. Only root can write here. */

#include "hold.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { RECORD_MOST = 64 << 10 };

static bool is_key(const char *key)
{
    size_t n = strspn(key, "0123456789abcdef");
    return n > 0 && n <= 64 && key[n] == 0;
}

bool open_record(struct record *r, const char *dir, const char *id)
{
    if (!is_key(r->key))
        return failed("\"%s\" is no key of an allocation", r->key);
    if (mkdir(dir, 0700) && errno != EEXIST)
        return failed("make %s: %s", dir, strerror(errno));
    int top = open(dir, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (top < 0)
        return failed("open %s: %s", dir, strerror(errno));
    if (mkdirat(top, id, 0700) == 0 || errno == EEXIST)
        r->dir = openat(top, id, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    int kept = errno;
    close(top);
    return r->dir >= 0 || failed("make %s/%s: %s", dir, id, strerror(kept));
}

bool write_record(const struct record *r, const char *sentence)
{
    char half[80];
    snprintf(half, sizeof half, ".%s.tmp", r->key);
    int fd = openat(r->dir, half, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (fd < 0)
        return failed("write the outcome: %s", strerror(errno));
    bool ok = dprintf(fd, "limit v1\ncgroup %s\n", r->cgroup) > 0;
    for (int i = 0; i < r->count; i++) {
        const struct gpu_limit *l = &r->limits[i];
        ok = ok && dprintf(fd, "gpu %s %llu %llu %llu\n", l->gpu, (unsigned long long)l->own, (unsigned long long)l->sum,
                           (unsigned long long)l->got) > 0;
    }
    ok = ok && (*sentence ? dprintf(fd, "failed %s\n", sentence) : dprintf(fd, "done\n")) > 0;
    int kept = errno;
    if (close(fd) && ok) {
        ok = false;
        kept = errno;
    }
    if (ok && renameat(r->dir, half, r->dir, r->key)) {
        ok = false;
        kept = errno;
    }
    return ok || failed("write the outcome: %s", strerror(kept));
}

/* word returns the end of a word, and false if the line has no further one. */
static bool word(char **from, char **end)
{
    if (**from != ' ')
        return false;
    ++*from;
    *end = *from + strcspn(*from, " \n");
    return *end > *from;
}

/* add adds the amounts of one record. */
static void add(struct record *r, char *all)
{
    for (char *line = all; line && *line; line = strchr(line, '\n'), line = line ? line + 1 : NULL) {
        char *gpu = line + 3, *end, *amount;
        uint64_t bytes;
        if (strncmp(line, "gpu ", 4) || !word(&gpu, &end))
            continue;
        amount = end;
        size_t length = (size_t)(end - gpu);
        if (!word(&amount, &end) || !number(amount, end, &bytes))
            continue;
        for (int i = 0; i < r->count; i++) {
            struct gpu_limit *l = &r->limits[i];
            if (strlen(l->gpu) == length && !memcmp(l->gpu, gpu, length) && __builtin_add_overflow(l->sum, bytes, &l->sum))
                l->sum = UINT64_MAX;
        }
    }
}

bool add_others(struct record *r)
{
    int fd = openat(r->dir, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *list = fd < 0 ? NULL : fdopendir(fd);
    if (!list) {
        if (fd >= 0)
            close(fd);
        return failed("list the outcomes: %s", strerror(errno));
    }
    int count = 0;
    bool ok = true;
    for (struct dirent *e; ok && (e = readdir(list));) {
        if (!is_key(e->d_name) || !strcmp(e->d_name, r->key))
            continue;
        size_t length;
        int file = openat(r->dir, e->d_name, O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
        char *all = file < 0 ? NULL : read_all(file, RECORD_MOST, &length);
        ok = all && ++count <= RECORDS_MOST;
        if (!all)
            failed("read the outcome of allocation %s: %s", e->d_name, strerror(errno));
        else if (!ok)
            failed("the container has more than %d allocations", RECORDS_MOST);
        else
            add(r, all);
        free(all);
        if (file >= 0)
            close(file);
    }
    closedir(list);
    return ok;
}
