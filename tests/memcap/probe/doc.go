// SPDX-License-Identifier: Apache-2.0

// Package probe builds the probe, a C program that takes GPU memory by every
// call of CUDA's driver API that gives some, and says what it was granted.
//
// A cap that stands in the driver library's place holds only if no program can
// come by that library in a way that misses it, or by a call that it does not
// count. So the probe has two lists, of doors and of calls, and each call can
// be made through each door: libcuda.so.1 by its SONAME, by its absolute path,
// in a link-map of its own (dlmopen), with RTLD_DEEPBIND, by a plugin that was
// linked against it, by a program that was, by cuGetProcAddress of either
// version with and without the per-thread flag, by the _ptsz names. It works
// alone, or as a team of threads and processes that all take until each has
// been refused; it then reports how much they were given, and whether one was
// refused while the room was there.
//
//	$ probe -door query2 -threads 8 -processes 1
//	ready workers=8
//	> fill cuMemAllocAsync 33554432 1073741824 0
//	row call=cuMemAllocAsync unit=33554432 first=1073741824 kept=536870912 second=1073741824 left=0 … early=0 failure=
//
// Its scenarios are programs of a few lines, each with a name, that do what once
// went wrong (c/scenario.h).
//
// What a command and its answer look like stands at the top of c/main.c. The
// program knows nothing of caps, of the emulated driver or of containers: how
// much it may have is told to it, and it runs on a real GPU as it is, with the
// amounts that fit there. Its declarations of CUDA's functions are its own,
// so that an error in them cannot be one that it shares with what it tests.
//
// Three files are built, and belong into one folder: probe, probe-linked (the
// same with libcuda.so.1 among the libraries it needs) and plugin.so.
package probe
