/* SPDX-License-Identifier: Apache-2.0 */

/* A driver library that is only there: a real install has dozens, and what
 * mounts a driver into a container must find more than two. */
const char gpuEmulatorFiller[] = "a library of the emulated driver";
