/* SPDX-License-Identifier: Apache-2.0 */

/* What the files of nvidia-smi share. */
#ifndef GPU_EMULATOR_SMI_H
#define GPU_EMULATOR_SMI_H

#include <stddef.h>

#include "nvml.h"

/* smi_find is a name of the loaded libnvidia-ml.so.1; without it the program ends,
 * as a link error would end it. */
void *smi_find(const char *name);

#define CALL(name, ...) (((__typeof__(&name))smi_find(#name))(__VA_ARGS__))

/* must ends the program with NVML's own error number. */
void must(nvmlReturn_t r, const char *what);

/* say is a line of an error, to where the real one writes: its standard output. */
void say(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* value is an option's value, after = or in the next argument; NULL for another
 * option. */
const char *value(char **argv, int *i, const char *brief, const char *full);

/* The GPUs that -i named, or all. */
enum { MAX_GPUS = 64 };
extern nvmlDevice_t gpus[MAX_GPUS];
extern unsigned int gpu_count;

unsigned int index_of(nvmlDevice_t d);
const char *address_of(nvmlDevice_t d); /* until the next call */

/* --- smi_mig.c */

/* mig is nvidia-smi mig, with the arguments after that word. */
int mig(char **argv, int argc);
int mig_mode(const char *wish);
void list_mig_devices(nvmlDevice_t gpu);

#endif
