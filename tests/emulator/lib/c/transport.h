/* SPDX-License-Identifier: Apache-2.0 */

/* How the libraries reach the emulator's daemon. The protocol is described in
 * wire.go; a call is built, sent and read like this:
 *
 *     struct call c;
 *     begin(&c, __func__, device);
 *     put_u32(&c, index);
 *     nvmlReturn_t r = send_call(&c);
 *     if (r == NVML_SUCCESS)
 *         *out = get_u32(&c);
 */
#ifndef GPU_EMULATOR_TRANSPORT_H
#define GPU_EMULATOR_TRANSPORT_H

#include <stddef.h>
#include <stdint.h>

#define NO_HANDLE 0xFFFFFFFFu

enum { /* the numbers of nvmlReturn_t that the transport itself gives */
    RET_SUCCESS = 0,
    RET_UNINITIALIZED = 1,
    RET_INVALID_ARGUMENT = 2,
    RET_INSUFFICIENT_SIZE = 7,
    RET_DRIVER_NOT_LOADED = 9,
    RET_UNKNOWN = 999,
};

enum { MAX_REQUEST = 1024, MAX_REPLY = 4096, MAX_LIST = 200 << 10 };

struct call {
    size_t asked;         /* bytes of request */
    size_t got, at;       /* bytes of reply, and how many are read */
    unsigned char *reply; /* own, or a longer one that the caller gave */
    size_t room;
    int fd;               /* that came with the reply, or -1 */
    unsigned char request[MAX_REQUEST];
    unsigned char own[MAX_REPLY];
};

void begin(struct call *c, const char *name, uint32_t handle);
void put_u32(struct call *c, uint32_t v);
void put_u64(struct call *c, uint64_t v);
void put_str(struct call *c, const char *s);

/* send_call asks the daemon, or answers from what it knows already; it fails
 * with RET_UNINITIALIZED unless the driver is open. */
int send_call(struct call *c);

uint32_t get_u32(struct call *c);
uint64_t get_u64(struct call *c);
/* get_str copies a string with its end; RET_INSUFFICIENT_SIZE if it does not
 * fit. */
int get_str(struct call *c, char *out, size_t room);

/* driver_open and driver_close count nvmlInit and nvmlShutdown. */
int driver_open(const char *name);
int driver_close(const char *name);
/* is_open says whether driver_open is ahead of driver_close. */
int is_open(void);
/* is_locked says whether another process has locked this one. */
int is_locked(void);

#endif
