/* SPDX-License-Identifier: Apache-2.0 */

/* The parts of the program hold (hold.c). It calls only functions of the C library that every
 * version since 2.17 has, by the names that they had then. */
#ifndef CAP_HOLD_H
#define CAP_HOLD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
    ID_BYTES = 256,     /* a container's ID, with its NUL */
    PATH_BYTES = 4096,  /* any path */
    WHY_BYTES = 1024,   /* a sentence */
    LEVELS_MOST = 8,    /* cgroups that are limited, from a container's process upward */
    GPUS_MOST = 64,     /* of one allocation */
    RECORDS_MOST = 256, /* of one container */
};

/* why is the sentence of the last failure. failed writes it, without line breaks, and returns
 * false. */
extern char why[WHY_BYTES];
bool failed(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* read_all reads a file to its end and adds a NUL. The caller frees the result. It returns NULL if
 * the file has more than most bytes, or cannot be read. */
char *read_all(int fd, size_t most, size_t *length);

/* number reads an unsigned decimal number up to the byte end, and nothing else. */
bool number(const char *text, const char *end, uint64_t *value);

/* read_state reads the OCI state of a container: its ID and the PID of its first process. Nothing
 * that a pod's author can write has an effect on it. */
bool read_state(int fd, char id[ID_BYTES], uint64_t *pid);

/* The cgroups of a container, by absolute path: that of its first process, then each above it up to
 * the one that the runtime has named after the container. relative is the last one's path below the
 * hierarchy's root. */
struct cgroups {
    int count;
    char path[LEVELS_MOST][PATH_BYTES];
    char relative[PATH_BYTES];
};

/* find_cgroups finds them in the unified hierarchy (cgroup v2). It fails if the runtime has made no
 * cgroup for the container there. */
bool find_cgroups(const char *id, uint64_t pid, struct cgroups *found);

/* The limit of an allocation on one GPU, in bytes. */
struct gpu_limit {
    const char *gpu;
    uint64_t own; /* of this allocation */
    uint64_t sum; /* with the container's other allocations on this GPU: what the driver is told */
    uint64_t got; /* the driver's answer; 0 before it */
};

/* The record of what the hook came to, which the agent reads (outcome.go). It is at
 * dir/<container>/<key>. */
struct record {
    int dir; /* descriptor of dir/<container> */
    const char *key;
    const char *cgroup; /* relative; empty if it was not found */
    struct gpu_limit *limits;
    int count;
};

/* open_record makes the directory of the container's records. write_record replaces the record; an
 * empty sentence is success. add_others adds to each sum what other allocations of the container have
 * recorded. */
bool open_record(struct record *r, const char *dir, const char *id);
bool write_record(const struct record *r, const char *sentence);
bool add_others(struct record *r);

#endif
