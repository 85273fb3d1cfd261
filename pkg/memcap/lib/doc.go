// SPDX-License-Identifier: Apache-2.0

// Package lib is the memory cap inside a container: two small C libraries that
// stand where programs expect the driver's, the pages by which the agent tells
// them their limits, and the reader of what they count.
//
// # Two libraries in front of two
//
// libcuda.so.1 of this package exports the functions that give or take GPU
// memory, or tell how much there is, and nothing else. It needs the real
// library by its absolute path ([RealCUDA]), so that the loader brings that in
// behind it, in whatever namespace: a name that it does not export, also one
// that no header knows yet, is found in the real one, by dlsym, by a direct
// link, by RTLD_DEEPBIND or dlmopen alike. No dlsym is hooked, nothing is
// preloaded, and a process that loads no libcuda has none of it. A claim's CDI
// file puts it at the driver library's path. libnvidia-ml.so.1 is the same for
// the two functions that nvidia-smi and its kin ask for a GPU's memory.
// What a driver does not have, dlsym does not find in ours either: programs take
// what it finds for what the driver can do. The libraries are built with every name
// that any driver has, and where they are installed [Fit] hides those of their
// symbol table that this driver's lacks.
//
// Until the first call of such a function nothing runs; afterwards no thread, no
// handler, no exit. Of the C library it calls the one function that lists loaded
// objects, as all others would bind it to a version; its system calls are its
// own, so that errno stays the program's. A forked child begins anew: all that
// the library knows lies in memory that the kernel wipes in children. Once loaded
// it stays, and the real one with it, also after dlclose.
//
// # Two pages for a GPU
//
// The limit page ([Pages.Write]) belongs to the agent: the limit in bytes, what
// a context is expected to take, and the last reading of the driver. It is
// mounted read-only, and changed in place by atomic stores. It is named for the
// GPU's UUID, so it is the right one whatever CUDA_VISIBLE_DEVICES does to the
// order.
//
// The usage page belongs to the container's processes: one word, bound, that all
// of them add to and take from, and a slot for each process, which says how much
// of it is its own. It lies on a tmpfs of the container's own: a container
// starts from nothing, and whoever spoils the page has spoilt it for itself. The
// agent reads it ([OpenUsage]) and believes none of it: what it decides on is
// the driver's figure.
//
// # Counting
//
// Memory is reserved before the driver is asked for it. The steps of an
// allocation and a free, each one atomic addition, are
//
//	reserved += n   bound += n   [driver]   committed += n
//	committed -= n   [driver]   bound -= n   reserved -= n
//
// and so at every instant, for each process,
//
//	committed <= what the driver gave it <= its share of bound <= reserved
//
// wherever it is killed. Nobody waits for anybody: there is a lock in it only in
// that the kernel holds one for each living process, and lets go of it when the
// process ends. Who needs room takes what dead processes committed off bound,
// and then repairs: if bound is more than all that is reserved, and did not
// change while that was summed (each change gives the word a version), it
// becomes that sum. A death can leave bound too large for a while, never too
// small. The proofs stand where the code is, in c/count.h; testdata/hammer.c
// kills a process after each single instruction of it.
//
// What the count cannot know it is told: a context takes memory that nobody
// asked for, tiling pads arrays. A [Meter] holds bound against the driver's
// figure and moves the ceiling by the difference; what may be concluded from a
// figure that was taken while processes allocate is in [Meter.End]. Memory that
// turned out to be gone (a process that died, a pool that shrank) may have been
// gone when the driver was read: until the next reading it gives no new room.
// Near the cap, and only there, a process waits for a reading before it refuses. An
// exact reading answers for every later request too, until something is charged by
// guess (a context, an array, a module); where none could be exact, what was refused
// is remembered and refused at once as long as there is no more room.
//
// # What is charged
//
// cuMemAlloc and its kin: multiples of 2 MiB, and for smaller ones the blocks of
// 2 MiB that they lie in, which their addresses show. Memory by hand (cuMemCreate):
// as long as a handle or a mapping is left. Pools, and the memory of graphs: what
// the driver has reserved for them, which is settled after every call that may
// have changed it; room for a pool's growth is reserved in 32 MiB, by which it
// grows. Arrays by their descriptions, those below 2 MiB with a block each: nobody
// sees in which they lie, and one keeps a block of which all else is gone. That is
// too much until the next reading, and what is freed of it is room only after one:
// a program that makes and ends them all the time waits for a reading whenever it
// has freed as many blocks as it may have.
// Contexts by the limit page, and the increase of a context's limits (stack, heap, and
// so on) before it is asked for. Modules when they are loaded, by what the card has
// less then; what is over is unloaded again and was out of memory. What was exported
// stays charged after its process has let go of it, until a reading shows that it is
// gone. Imports and host memory: nothing, since they are somebody else's. What an
// allocation's properties mean is decided in c/property.h alone; a type that it does
// not know is refused, or passes and is reported ([Counters].Uncounted) under the open
// policy.
//
// # An example
//
//	kit, err := lib.Install("/var/lib/gpu-agent")    // what the CDI file mounts
//	pages, err := lib.OpenPages("/var/lib/gpu-agent")
//	paths, err := pages.Write(key, 250*time.Millisecond, []lib.Limit{{GPU: uuid, Bytes: 24 << 30}})
//	usage, err := lib.OpenUsage("/proc", pid, uuid)  // of any process of the container
//	meter, err := pages.Meter(key, uuid, usage)
//	err = meter.Begin()
//	reading, err := meter.End(driversFigure, true)
//
// # What it cannot do
//
// It holds accidents and honest tenants. A program that opens the real library
// at its other path, brings a copy of its own, or speaks to the device nodes by
// itself goes round it, and one that writes to the usage page lies to its
// container; all of these show in the driver's figure, which is the watchdog's.
// Where it cannot do its work (no limit page, a spoilt usage page) allocations
// fail, or pass uncounted where [OpenMark] is. A usage page that is cut short
// under running processes ends them by SIGBUS, as any mapped file does.
//
// A process that loads a second copy of libcuda (dlmopen) counts a block that both
// lie in twice; where the first to leave it does so near the cap, the container can
// be one block over until the next reading.
//
// Known to be counted too high until a process ends: memory mapped into sparse
// arrays, exported managed memory, and what a context of the old cuCtxDetach had.
// Known to be seen only by the next reading: green contexts, code that is loaded when
// it is first used, stacks that a kernel makes larger than the limit, and a form of an
// allocating call that is newer than this library. A module that is over is there for
// the moment before it is unloaded, and where another container frees memory at that
// moment what it takes may be seen only by the next reading. The package knows no claim,
// no pod and no process beyond its number; it does not know what is done to
// those who exceed a limit.
package lib
