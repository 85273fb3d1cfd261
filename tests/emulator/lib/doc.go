// SPDX-License-Identifier: Apache-2.0

// Package lib builds the loadable half of the emulated driver: the C libraries
// libnvidia-ml and libcuda and the program nvidia-smi, from the sources beside
// it and gcc.
//
// They are C because they are loaded into Go programs, which cannot hold a
// second Go run time. NVIDIA's nvml.h is not part of this project: it is taken
// from the go-nvml module that the project depends on, for the types, and for
// the list of all names that the library must export. A program bound to
// go-nvml ends when it calls a name that is missing; so each name that nvml.c
// does not define gets a generated stub, which asks the daemon all the same:
// calls without an answer are counted and meet faults like any other.
//
// libcuda is made from declarations of its own (cuda_abi.h), since nobody may
// pass NVIDIA's cuda.h on. It exports the calls that have to do with memory and
// what they need around them (cuda_names.h is the list), not the hundreds of
// others of the real one.
//
// Of a GPU in MIG mode a program has one instance as its only device, whose
// capability nodes it has: the first of several, or the one that
// CUDA_VISIBLE_DEVICES names; none without nodes. A program that may change MIG, as
// on the host, reaches all of them.
//
// A build is named by the hash of all that goes into it, so that it costs
// nothing when nothing has changed.
package lib
