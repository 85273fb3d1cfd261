// SPDX-License-Identifier: Apache-2.0

// Package lib is the memory cap inside a container: two small C libraries in place of the
// driver's, the pages by which the agent tells them their limits, and the reader of what
// they count. Where it speaks of an allocation of the agent's, that is what a container
// holds of the node's GPUs; every other allocation is one of GPU memory, by a program.
//
// # Two libraries in front of two
//
// libcuda.so.1 of this package exports the functions that give or take GPU memory, or
// tell how much there is, and nothing else. It needs the real library by its absolute
// path ([RealCUDA]), so the loader loads that after it, in any namespace. A name that it
// does not export, even one that no header knows yet, is found in the real library: by
// dlsym, by a direct link, by RTLD_DEEPBIND or dlmopen. No dlsym is hooked, nothing is
// preloaded, and a process that loads no libcuda has none of this. The CDI file of the
// agent's allocation puts it at the driver library's path. libnvidia-ml.so.1 is the same
// for the two functions by which nvidia-smi and similar programs ask for a GPU's memory.
// Programs take what dlsym finds for what the driver can do, so dlsym must not find in our
// library what the driver lacks. The libraries are built with every name that any driver
// has; when they are installed, [Fit] hides those that this driver's library lacks. Linkers
// look for names in the library itself, so Fit adds a table for them with all that the driver's
// has ([Link]).
//
// Nothing runs before the first call of such a function; and afterwards there is no thread,
// no signal handler and no exit handler. Of the C library only the function that lists
// loaded objects is called, since any other would bind us to a version. System calls are
// made directly, so that the program's errno does not change. A forked child begins anew:
// everything that the library knows lies in memory that the kernel wipes in children. Once
// loaded it stays loaded, and the real library with it, also after dlclose.
//
// # Two pages for each GPU
//
// The limit page ([Pages.Write]) belongs to the agent: the limit in bytes, what a context
// is expected to take, and the last reading of the driver. It is mounted read-only, and
// the agent changes it in place by atomic stores.
//
// The usage page belongs to the processes that share the agent's allocation: one word,
// bound, to which all of them add, and a slot for each process, which says how much of
// bound is its own. The agent makes it, with a nonce that the limit page names. Any other
// page, even a good one that somebody has mounted over it, is refused. A GPU without a
// limit has no usage page.
//
//	on the host       dir/cap/limits/<key>/<GPU>                           on disk
//	                  dir/cap/usage/<key>/<GPU>                            on a tmpfs for each key
//	in a container    /usr/lib/gpu-agent/allocations/<GPU>/<key>/limit     mounted, read-only
//	                  /usr/lib/gpu-agent/allocations/<GPU>/<key>/usage     mounted, writable
//
// The key is the allocation's. So one page serves all containers and pods that share the
// allocation, and all starts of a container. A container can have several allocations on
// one GPU; their pairs of pages lie side by side. The names depend on the GPU's UUID, so
// they are right whatever CUDA_VISIBLE_DEVICES does to the order of GPUs. A container with
// several shares of a GPU may have their sum. Its processes count what they have on one page,
// the one with the largest limit, and borrow from the other pages what does not fit there:
//
//	12 GiB "a", 8 GiB "b"     the container's processes have 15 GiB
//	page of a                 bound 15 GiB, of which its slots have borrowed 3: the ceiling is 12 + 3
//	page of b                 bound 3 GiB, lent to these processes; 5 are left for who has b alone
//
// What is given back goes to the lenders first, and a process lends nothing beyond its death
// (c/loan.h). The agent holds each page against what those containers have that count there.
//
// Nothing that is written to a usage page is trusted. A process that may write to a file
// may also make it longer, so the tmpfs has room for its pages and no more. A process
// that cuts it short ends its own processes by SIGBUS. The agent reads it
// ([Pages.OpenUsage]) by pread, never by a mapping, and decides by the driver's figure.
// What is mounted into a container is the file, not its directory, so no link and no pipe
// can take its place. On the host only root can enter the directory, since any user of a
// container may write to the page, also in a user namespace. The mounts on the host and in
// the container are nosuid, nodev and noexec.
//
// The mounts stay when the agent ends, and containers keep the pages that they have. A
// page is removed with its allocation. It is made anew when the allocation has another
// holder, who must not see what others wrote, and when processes can no longer rely on it:
// it was spoilt, lost in a reboot, or left unfinished by a killed agent. Then all
// usage pages of the allocation are made together, on another tmpfs, since a container may
// still use the room of the old one. The nonce is written last, and the CDI file after the
// pages. So what a killed agent leaves is either whole or made anew, and no container
// starts without it.
//
// Mounting on the host takes CAP_SYS_ADMIN and a mount namespace that propagates to the
// host. Without them somebody must have mounted a limited tmpfs on dir/cap/usage, for all
// allocations. Then all room of a page is taken when the page is made: a process that
// fills the rest can keep new allocations out, and harms nobody else.
//
// A slot's lock is a kernel lock on the file, which tells across containers whether a
// process lives. A process ID does not, so the slot also has the number of its PID
// namespace.
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
// wherever it is killed. Far from the cap a process keeps up to 64 MiB of what it frees
// as idle, in a word of its own slot: a part of bound that is nobody's memory. So small
// allocations and frees, again and again, change nothing that processes share. A process
// that finds no room takes what is idle in all slots first, so the whole cap can be used,
// to the byte. Views and readings leave idle out. No process waits for another: the only
// lock is the one that the kernel holds for each living process and releases when the
// process ends. A process that needs room takes off bound what dead processes committed,
// and then repairs bound: if it is more than the sum of all that is reserved, and did not
// change while that was added up (each change gives the word a new version), it becomes
// that sum. A death can leave bound too large for a while, never too small. The proofs
// are in c/count.h; testdata/hammer.c kills a process after each of its changes.
//
// Some memory the count cannot know: a context takes memory that nobody asked for, and
// tiling pads arrays. A [Meter] compares bound with the driver's figure and moves the
// ceiling by the difference; [Meter.End] says what can be concluded from a figure that
// was read while processes allocate. Memory that turned out to be gone (of a process
// that died, or a pool that shrank) may have been gone when the driver was read, so it
// gives no new room until the next reading. Near the cap, and only there, a process waits
// for a reading before it refuses, and once for each context before it comes there: a program
// can fill its cap in the time between two readings, and what was given is not taken back.
// An exact reading answers every later request too, until something is charged by guess (a
// context, an array, a module). A reading during which processes allocated leaves several
// corrections possible: the ceiling goes by the largest that may be needed, the roof beside
// it by the smallest. For what fits below the roof the agent is asked again, for twice the
// time between two readings, and if it is late, as on a busy node, until it has answered
// twice. After that the refusal is remembered, and repeated at once as long as there is no
// more room.
//
// # What is charged
//
// Plain memory (cuMemAlloc and the like): multiples of 2 MiB. For smaller allocations, the
// blocks of 2 MiB in which they lie, as their addresses show. Memory by handle
// (cuMemCreate): as long as a handle or a mapping is left.
//
// Pools, and the memory of graphs: what the driver has reserved for them. That is settled
// after every call that may have changed it. CUDA has known a greatest size of a pool
// since 12.2. Where the driver keeps to it, pools get one that fits the cap, and the
// driver itself holds them there (c/bound.c). Without it, and where other processes
// need a part of the cap, the library holds them. A driver lets a pool grow before it
// takes what another stream has freed there. So before an allocation all that the pool may
// grow by is reserved, in pieces of 32 MiB. If there is no such room, but the pool has
// free memory, the stream waits for those that have freed something (c/reuse.c). If the
// pool grows nevertheless, that is undone, and the usage page says by how much
// ([Counters].Undone). Then the container has more than its limit for a moment. Of all
// processes that share the page one makes such an attempt at a time (c/attempt.c), so the
// excess is at most one request. Requests of more than 128 MiB are attempted last. Near
// the cap a pool that has much free gives a part of it back, so that it may grow and needs
// no attempts. A pool cannot have the last part of a limit if that is smaller than one of
// its pieces.
//
// A graph that is launched near the cap waits, for a bounded time, until graphs that run
// leave it room. If there is no room for the sum of its nodes, it is uploaded first, which
// is such an attempt (c/graph.c).
//
// Arrays by their descriptions; each array below 2 MiB a block. Nobody can see in which
// block an array lies, and one array keeps a whole block. That is too much until the next
// reading, and what is freed of it is room only after one. So a program that makes and
// destroys arrays all the time waits for a reading whenever it has freed as many blocks as
// it may have.
//
// Contexts by the estimate of the limit page. An increase of a context's limits (stack,
// heap and so on) is charged before the driver is called. A driver may take that memory
// only with the first kernel. The meter sees in the driver's figure whether it has
// (promise.go), and cuCtxSetLimit then waits for a reading. Modules when they are loaded
// near the cap, by what the card then has less; a module that exceeds the cap is unloaded
// again, and the load refused. Far from it the next reading has them (c/module.c). For code
// that the driver loads with its first kernel so much is kept free as a context of that GPU
// may take ([DefaultCode], held.go).
//
// Exported memory stays charged after its owner has freed it, until the owner exits or a
// reading shows that it is gone. Imports and host memory are not charged, because they are
// charged to another process or are no GPU memory. What an allocation's properties mean is
// decided in c/property.h alone. A type that it does not know is refused, or under the
// open policy passes and is reported ([Counters].Uncounted).
//
// # An example
//
//	kit, err := lib.Install("/var/lib/gpu-agent")    // the libraries, for the CDI file to mount
//	pages, err := lib.OpenPages("/var/lib/gpu-agent")
//	paths, err := pages.Write(key, 250*time.Millisecond, []lib.Limit{{GPU: uuid, Bytes: 24 << 30}})
//	mounts := lib.Mounts(key, paths)                 // the CDI file's other mounts
//	usage, err := pages.OpenUsage(key, uuid)
//	meter, err := pages.Meter(key, uuid, usage)
//	err = meter.Begin()
//	reading, err := meter.End(driversFigure, true, ofEach)
//
// # What it cannot do
//
// It stops accidents and honest programs, not attackers. A program can go round it: by
// opening the real library at its other path, by bringing a copy of its own, or by using
// the device nodes directly. A program that writes to the usage page deceives those that
// share its allocation. All of this shows in the driver's figure, by which the watchdog
// goes. If the library cannot count (no limit page, a damaged usage page), allocations
// fail, or pass uncounted if [OpenMark] is there. A usage page that is cut short under
// running processes ends them by SIGBUS, as any mapped file does.
//
// A process that loads a second copy of libcuda (dlmopen) counts a block twice if both
// copies have something in it. If the copy that frees its part first does so near the cap,
// the container may be one block over until the next reading.
//
// Counted too high until the process ends: memory mapped into sparse arrays, exported
// managed memory, and what a context that ended by the old cuCtxDetach had. Seen only by
// the next reading: what a green context takes beside the primary context, streams and
// events, code that is loaded when it is first used, stacks that a kernel makes larger
// than the limit, and a form of an allocating call that is newer than this library. All
// functions that are not counted are in tests/drivers/classes.txt, each with the reason. A
// driver's function that is neither counted nor there fails a test. A module that exceeds
// the cap exists for a moment, until it is unloaded. If another container frees memory at
// that moment, what the module takes may be seen only by the next reading.
//
// The package knows no allocation, no pod, and of a process only its number. It does not know
// what is done to those who exceed a limit.
package lib
