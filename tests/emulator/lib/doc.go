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
// # Streams and pools
//
// No work is done, but it takes its time: a kernel that is named busy_17us takes 17
// microseconds of its stream, any other as many as a switch says, none by default.
// Until then stream and event queries answer CUDA_ERROR_NOT_READY, what synchronises
// sleeps, and what was freed in that stream serves a memory pool only as NVIDIA's
// documentation allows; the rules stand beside the code, in its words. Where that is
// silent, or drivers may differ, there is a switch for each behaviour. The environment
// variable GPU_EMULATOR_CUDA has them, as name=value,name=value; of several of one
// name the last holds, and what is not known ends cuInit with
// CUDA_ERROR_INVALID_VALUE and a line on standard error.
//
//	version=N                        what cuDriverGetVersion tells (default: the world's; 13000); names that came later are found
//	                                 neither by cuGetProcAddress nor by dlsym (default: as the file is, see OfVersion)
//	kernel-us=N                      microseconds that a kernel takes (0)
//	map-us=N                         microseconds that each MiB takes which a process gets of the card (0)
//	piece-mib=N                      by what pools grow, an even number (32 *)
//	holes=fit*|remap                 a request needs one hole that is large enough, or free blocks of 2 MiB are put together
//	large=pieces*|blocks             what is larger than a piece takes whole pieces, or blocks of 2 MiB
//	reuse=documented*|eager          a pool grows before a stream is made to wait for another, or after
//	opportunistic=documented*|lazy   a free that has passed is noticed by the next request, or by synchronising alone
//	follow=all*|direct               a dependency by events reaches through streams between, or not
//	trim=observed*|passed            trimming releases what the host has waited for, or what has passed
//	shrink=synchronize*|never        synchronising releases what is beyond the threshold, or nothing
//	query=nothing*|observes          a query that finds a stream done does nothing more, or as much as synchronising
//	used=live*|pending               the memory in use is without or with what only one stream may reuse
//	ipc-pools=shrink*|kept           pools for other processes give memory back like others, or nothing before their end
//	pool-max=piece*|exact|…          a pool's greatest size is rounded up to pieces, or kept to 2 MiB; refuses: a pool that has come to it
//	                                 makes no stream wait for another; ignored: it may have more
//	pool-memory=device*|context      what pools gave lives as long as the device is used, or as the context of the stream
//	graphs=distinct*|ordered         graphs that may run at the same time have memory of their own as long as there is some, or the later one waits
//	domains=N                        locality domains of a device, from version 13040 on (2; 580.159.04 knows none)
//	green-mib=N                      what a green context takes by itself (6 *)
//	loading=environment|lazy*|eager  when a module's code is loaded: as CUDA_MODULE_LOADING says (see cuda_module.c for where it says
//	                                 nothing), with its first kernel, or before that
//	heap=use*|launch|set             the memory of heap and printf FIFO is taken by the first kernel that uses it, by the next kernel, or by
//	                                 cuCtxSetLimit at once (the H200 was asked about the heap alone)
//	managed-create=refused*|made     cuMemCreate does not take managed memory, or does
//	strict                           all that is hardest for who holds a program to an amount; see cuda_switch.c
//
// With a star is what an NVIDIA H200 with driver 580.159.04 showed on 2026-11-27
// (TestSwitchesOfHardware in tests/hardware). These are the defaults, but for loading: what is
// loaded eagerly is seen to be refused.
//
// # What else takes memory
//
// A green context takes a little by itself, and its allocations are the primary one's,
// which it retains (cuda_green.c).
//
// What an allocation type and a location mean together is in cuda_property.c: pinned
// memory of a device or one of its locality domains is the card's, all other counts
// nowhere. Limits of a context take what they have beyond their defaults
// (cuda_limit.c); a kernel named stack_4096 needs frames of so many bytes and has the
// driver raise the limit, one named malloc_… or printf_… uses what it is named for.
// Modules take what their image says, when CUDA_MODULE_LOADING or a switch says
// (cuda_module.c). Memory that was exported is there until the last descriptor is
// closed, in whatever process, and memory of a sparse array until it is unmapped. A pool
// that is for other processes can be opened by them, and its allocations, each of which
// then holds the piece that it is part of (cuda_pool_ipc.c).
//
// A build is named by the hash of all that goes into it, so that it costs
// nothing when nothing has changed.
package lib
