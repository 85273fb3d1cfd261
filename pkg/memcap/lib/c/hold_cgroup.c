/* SPDX-License-Identifier: Apache-2.0 */

/* The cgroups of a container. On a host that has both versions the unified hierarchy is mounted
 * beside those of version 1. */

#include "hold.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/vfs.h>
#include <unistd.h>

enum { CGROUP2 = 0x63677270, LIST_MOST = 1 << 20 };

static const char *hierarchy(void)
{
    static const char *const mounts[] = {"/sys/fs/cgroup", "/sys/fs/cgroup/unified"};
    for (size_t i = 0; i < sizeof mounts / sizeof *mounts; i++) {
        struct statfs on;
        if (!statfs(mounts[i], &on) && on.f_type == CGROUP2)
            return mounts[i];
    }
    return NULL;
}

static char *read_file(const char *path, size_t *length)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return NULL;
    char *all = read_all(fd, LIST_MOST, length);
    int kept = errno;
    close(fd);
    errno = kept;
    return all;
}

/* own_path finds a process's path in the unified hierarchy: "0::/path". */
static bool own_path(uint64_t pid, char out[PATH_BYTES])
{
    char file[64];
    size_t length;
    snprintf(file, sizeof file, "/proc/%llu/cgroup", (unsigned long long)pid);
    char *all = read_file(file, &length);
    if (!all)
        return failed("read %s: %s", file, strerror(errno));
    bool found = false;
    for (char *line = all, *end; (end = strchr(line, '\n')); line = end + 1) {
        size_t n = (size_t)(end - line);
        if (n < 4 || memcmp(line, "0::/", 4) || n - 3 >= PATH_BYTES)
            continue;
        memcpy(out, line + 3, n - 3);
        out[n - 3] = 0;
        found = true;
    }
    free(all);
    return found || failed("the container has no cgroup in the unified hierarchy (cgroup v2), which the driver needs");
}

/* names reports whether a directory is called after a container: <id>, <prefix>-<id>.scope, or
 * <slice>:<prefix>:<id>. */
static bool names(const char *name, size_t length, const char *id)
{
    static const char scope[] = ".scope";
    size_t n = strlen(id), tail = sizeof scope - 1;
    if (length > n + tail && !memcmp(name + length - tail, scope, tail))
        length -= tail;
    if (length < n || memcmp(name + length - n, id, n))
        return false;
    return length == n || name[length - n - 1] == '-' || name[length - n - 1] == ':';
}

static bool has_process(const char *dir, uint64_t pid)
{
    char file[PATH_BYTES + 16];
    size_t length;
    snprintf(file, sizeof file, "%s/cgroup.procs", dir);
    char *all = read_file(file, &length);
    if (!all)
        return failed("read %s: %s", file, strerror(errno));
    bool found = false;
    for (char *line = all, *end; (end = strchr(line, '\n')); line = end + 1) {
        uint64_t is = 0;
        found = found || (number(line, end, &is) && is == pid);
    }
    free(all);
    return found || failed("process %llu of the container is not in %s", (unsigned long long)pid, dir);
}

bool find_cgroups(const char *id, uint64_t pid, struct cgroups *found)
{
    static char path[PATH_BYTES];
    const char *root = hierarchy();
    if (!root)
        return failed("the host has no unified hierarchy (cgroup v2) at /sys/fs/cgroup, which the driver needs");
    if (!own_path(pid, path))
        return false;
    if (!strcmp(path, "/..") || !strncmp(path, "/../", 4))
        return failed("cgroup %s of the container is outside of this cgroup namespace", path);
    for (found->count = 0; found->count < LEVELS_MOST; found->count++) {
        char *name = strrchr(path, '/');
        if (!name || !name[1])
            break; /* the root */
        int n = snprintf(found->path[found->count], PATH_BYTES, "%s%s", root, path);
        if (n < 0 || n >= PATH_BYTES)
            break;
        if (names(name + 1, strlen(name + 1), id)) {
            found->count++;
            memcpy(found->relative, path, sizeof path);
            return has_process(found->path[0], pid);
        }
        *name = 0;
    }
    return failed("no cgroup of the container in the unified hierarchy (cgroup v2) is called after container %s; "
                  "the driver can limit no other",
                  id);
}
