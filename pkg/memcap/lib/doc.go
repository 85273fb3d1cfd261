// SPDX-License-Identifier: Apache-2.0

// Package lib is the memory cap inside a container: two small C libraries in
// the place of the driver's, the pages by which the agent tells
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
// # Two pages for a claim's GPU
//
// The limit page ([Pages.Write]) belongs to the agent: the limit in bytes, what
// a context is expected to take, and the last reading of the driver. It is
// mounted read-only, and changed in place by atomic stores.
//
// The usage page belongs to the processes that share the claim: one word, bound,
// that all of them add to and take from, and a slot for each process, which says
// how much of it is its own. The agent makes it, with a nonce that the limit page
// names; another page, also a good one that somebody has mounted over it, is
// refused. There is none for a GPU without a limit.
//
//	on the host       dir/cap/limits/<claim>/<GPU>                      on disk
//	                  dir/cap/usage/<claim>/<GPU>                       on a tmpfs for each claim
//	in a container    /usr/lib/gpu-agent/claims/<GPU>/<claim>/limit     bound, read-only
//	                  /usr/lib/gpu-agent/claims/<GPU>/<claim>/usage     bound, to be written
//
// So one page serves any number of containers and pods that have the claim, and
// all starts of a container; and a container can have several claims on a GPU,
// whose pairs of pages lie side by side. The names follow from the GPU, which is the
// right one whatever CUDA_VISIBLE_DEVICES does to the order, and from the claim.
// Of several limits on a GPU the largest counts, as with the watchdog; to add them
// up, a process would have a slot in each page, and no format would change.
//
// Nothing that is written to a usage page is believed. Who may write to a file may
// make it longer: the tmpfs of a claim has room for its pages and no more. Who cuts
// it short ends its own processes by SIGBUS; the agent reads it ([Pages.OpenUsage])
// by pread, never by a mapping, and what it decides on is the driver's figure. What
// is bound into a container is the file, not its directory, so no link and no pipe
// can take its place. On the host the directory is root's alone, since the page is
// there to be written by whatever user a container has, also in a user namespace.
// nosuid, nodev and noexec hold on the host and in the container.
//
// The mounts stay when the agent ends, and containers keep the pages that they
// have. A page goes with its claim. It is made anew when the claim is given to
// somebody else, who must not see what others wrote, and when processes can no longer
// rely on it: it was spoilt, a reboot has taken it, or an agent that was
// killed had not finished it. All of a claim's pages are then made together, on
// another tmpfs, since a container may have the old one's room yet. The nonce is
// written last, and the CDI file after the pages, so whatever a killed agent leaves
// is either whole or made anew, and no container starts without.
//
// To mount on the host takes CAP_SYS_ADMIN and a mount namespace that propagates to
// it. Without, somebody has to have mounted a limited tmpfs on dir/cap/usage, for all
// claims; then all room of a page is taken when it is made, so that who fills the
// rest can keep new claims out and harm nobody else.
//
// The lock of a slot is the kernel's, by the file: it tells the living from the dead
// across containers. A process's number does not, so the slot has its PID namespace's
// beside it.
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
// wherever it is killed. Far from the cap a process keeps up to 64 MiB of what it gives
// back in a word of its own slot, idle, as a part of its share that is nobody's memory:
// to allocate and free a little, again and again, touches nothing that processes share.
// Who finds no room takes what is idle, whoever keeps it, before anything else, so all
// of a cap is to be had to the byte. Views and readings leave it out. Nobody waits for anybody: there is a lock in it only in
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
// guess (a context, an array, a module). One that fell among allocations leaves several
// corrections possible: the ceiling goes by the largest of them that may be needed, the
// roof beside it by the smallest. What fits below the roof is asked for again, for twice
// the time between two readings; then what was refused is remembered, and refused at
// once as long as there is no more room.
//
// # What is charged
//
// cuMemAlloc and its kin: multiples of 2 MiB, and for smaller ones the blocks of
// 2 MiB that they lie in, which their addresses show. Memory by hand (cuMemCreate):
// as long as a handle or a mapping is left. Pools, and the memory of graphs: what
// the driver has reserved for them, which is settled after every call that may
// have changed it. Before an allocation all that the pool may grow by is reserved, in
// pieces of 32 MiB, since a driver lets a pool grow before it takes what another
// stream has freed there. Where only the pool has room, the stream is made to wait for
// those that have freed something (c/reuse.c); if the pool grows nevertheless, that
// is undone, and the usage page says by how much ([Counters].Undone): the one case in
// which a container has more than its limit, for a moment. Of all processes that share
// the page one makes such an attempt at a time (c/attempt.h), so that is one request;
// one of more than 128 MiB is made last. A pool that has much free near the cap gives a
// part of it back, so that it may grow and needs no attempts. The last part of a limit that is
// smaller than a pool's piece is not to be had from a pool. A graph that is launched near
// the cap waits, for a bounded time, until others that run leave it room; where the sum of
// its nodes is not to be had it is uploaded first, as such an attempt (c/graph.c). Arrays by their descriptions, those below 2 MiB with a block each: nobody
// sees in which they lie, and one keeps a block of which all else is gone. That is
// too much until the next reading, and what is freed of it is room only after one:
// a program that makes and ends them all the time waits for a reading whenever it
// has freed as many blocks as it may have.
// Contexts by the limit page, and the increase of a context's limits (stack, heap, and
// so on) before it is asked for. A driver may take that with the first kernel only; the
// meter tells by the figure whether it has (promise.go), and cuCtxSetLimit waits for a
// reading then. Modules when they are loaded, by what the card has
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
//	mounts := lib.Mounts(key, paths)                 // what the CDI file mounts besides
//	usage, err := pages.OpenUsage(key, uuid)
//	meter, err := pages.Meter(key, uuid, usage)
//	err = meter.Begin()
//	reading, err := meter.End(driversFigure, true)
//
// # What it cannot do
//
// It holds accidents and honest tenants. A program that opens the real library
// at its other path, brings a copy of its own, or speaks to the device nodes by
// itself goes round it, and one that writes to the usage page lies to who
// shares its claim; all of these show in the driver's figure, which is the watchdog's.
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
// Known to be seen only by the next reading: what a green context takes beside the
// primary one, streams and events, code that is loaded when it is first used, stacks that a
// kernel makes larger than the limit, and a form of an allocating call that is newer
// than this library. The list of all functions that are not counted, each with the
// reason, is tests/drivers/classes.txt; a function of a driver that is neither counted
// nor there fails a test. A module that is over is there for
// the moment before it is unloaded, and where another container frees memory at that
// moment what it takes may be seen only by the next reading. The package knows no claim,
// no pod and no process beyond its number; it does not know what is done to
// those who exceed a limit.
package lib
