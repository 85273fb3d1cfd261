/* SPDX-License-Identifier: Apache-2.0 */

/* The OCI state, which is one JSON object. Its annotations are a pod author's words, and may have
 * the names that hold looks for: so names count at the first level alone. */

#include "hold.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { STATE_MOST = 1 << 20, DEPTH_MOST = 32 };

struct json {
    const char *at, *end;
};

static void space(struct json *j)
{
    while (j->at < j->end && (*j->at == ' ' || *j->at == '\t' || *j->at == '\n' || *j->at == '\r'))
        j->at++;
}

static bool next(struct json *j, char c)
{
    space(j);
    if (j->at == j->end || *j->at != c)
        return false;
    j->at++;
    return true;
}

/* string reads a string without decoding it: none that hold needs has an escape. */
static bool string(struct json *j, const char **from, size_t *length)
{
    if (!next(j, '"'))
        return false;
    *from = j->at;
    for (; j->at < j->end; j->at++) {
        if (*j->at == '"') {
            *length = (size_t)(j->at++ - *from);
            return true;
        }
        if ((unsigned char)*j->at < ' ' || (*j->at == '\\' && ++j->at == j->end))
            return false;
    }
    return false;
}

static bool skip(struct json *j, int depth)
{
    const char *from;
    size_t length;
    space(j);
    if (j->at == j->end || depth > DEPTH_MOST)
        return false;
    char open = *j->at, close = open == '{' ? '}' : ']';
    if (open == '"')
        return string(j, &from, &length);
    if (open != '{' && open != '[') { /* a number, true, false or null */
        from = j->at;
        while (j->at < j->end && !strchr(",]} \t\r\n", *j->at))
            j->at++;
        return j->at > from;
    }
    j->at++;
    if (next(j, close))
        return true;
    do {
        if (open == '{' && (!string(j, &from, &length) || !next(j, ':')))
            return false;
        if (!skip(j, depth + 1))
            return false;
    } while (next(j, ','));
    return next(j, close);
}

/* is_id reports whether a container's ID can be the name of a directory. */
static bool is_id(const char *id, size_t length)
{
    if (length == 0 || length >= ID_BYTES || *id == '.')
        return false;
    for (size_t i = 0; i < length; i++) {
        char c = id[i];
        if (!((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || (c && strchr("._-+", c))))
            return false;
    }
    return true;
}

static bool parse(const char *all, size_t length, char id[ID_BYTES], uint64_t *pid)
{
    struct json j = {all, all + length};
    *id = 0;
    *pid = 0;
    if (!next(&j, '{'))
        return false;
    do {
        const char *name, *value;
        size_t n, m;
        if (!string(&j, &name, &n) || !next(&j, ':'))
            return false;
        space(&j);
        value = j.at;
        if (!skip(&j, 0))
            return false;
        m = (size_t)(j.at - value);
        if (n == 2 && !memcmp(name, "id", 2)) {
            if (m < 2 || *value != '"' || !is_id(value + 1, m - 2))
                return false;
            memcpy(id, value + 1, m - 2);
            id[m - 2] = 0;
        } else if (n == 3 && !memcmp(name, "pid", 3) && !number(value, value + m, pid)) {
            return false;
        }
    } while (next(&j, ','));
    return next(&j, '}') && *id && *pid;
}

bool read_state(int fd, char id[ID_BYTES], uint64_t *pid)
{
    size_t length;
    char *all = read_all(fd, STATE_MOST, &length);
    if (!all)
        return failed("read the container's state: %s", strerror(errno));
    bool ok = parse(all, length, id, pid);
    free(all);
    return ok || failed("read the container's state: it is not an OCI state with an id and a pid");
}
