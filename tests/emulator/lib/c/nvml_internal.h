/* SPDX-License-Identifier: Apache-2.0 */

/* What the parts of libnvidia-ml.so.1 share. */
#ifndef GPU_EMULATOR_NVML_INTERNAL_H
#define GPU_EMULATOR_NVML_INTERNAL_H

#include "nvml.h"
#include "transport.h"

/* A device is a place in an array, so that a handle which was never given out
 * is known for what it is. The handle number is the daemon's. */
enum { HANDLES = 1 << 16 };
extern char devices[HANDLES], sets[HANDLES];

uint32_t number(const void *handle, const char *space);

/* go-nvml's header wraps each handle in a struct, which is passed alike. */
static inline uint32_t device_number(nvmlDevice_t d) { return number(d.handle, devices); }
static inline nvmlDevice_t to_device(uint32_t n) { return (nvmlDevice_t){n < HANDLES ? (void *)(devices + n) : NULL}; }

/* refuse is r, of a library that is open. */
nvmlReturn_t refuse(nvmlReturn_t r);

#define NEED(condition)                                    \
    do {                                                   \
        if (!(condition))                                  \
            return refuse(NVML_ERROR_INVALID_ARGUMENT);    \
    } while (0)

#define NEED_VERSION(given, ...)                                       \
    do {                                                               \
        const unsigned int known[] = {__VA_ARGS__};                    \
        int ok_ = 0;                                                   \
        for (size_t i_ = 0; i_ < sizeof known / sizeof *known; i_++)   \
            ok_ |= (given) == known[i_];                               \
        if (!ok_)                                                      \
            return refuse(NVML_ERROR_ARGUMENT_VERSION_MISMATCH);       \
    } while (0)

/* Shapes that many calls share: no argument or one number, one or two numbers
 * for an answer, or a device. */
nvmlReturn_t ask_u32(const char *name, uint32_t handle, unsigned int *out);
nvmlReturn_t ask_u32_arg(const char *name, uint32_t handle, uint32_t arg, unsigned int *out);
nvmlReturn_t ask_two(const char *name, uint32_t handle, unsigned int *a, unsigned int *b);
nvmlReturn_t find(struct call *c, nvmlDevice_t *device);

#endif
