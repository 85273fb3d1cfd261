// SPDX-License-Identifier: Apache-2.0

// Package lib is the memory cap inside a container: two small C libraries in front of the driver's,
// the pages by which the agent tells them their limits, and the reader of their counters. An
// "allocation of the agent" is what containers hold of the node's GPUs. Every other allocation here
// is one of GPU memory, by a program.
//
// # Two libraries in front of two
//
// Our libcuda.so.1 exports the driver functions that give, take or report GPU memory, and nothing
// else. The CDI file mounts it at the driver library's path. It needs the real library by its
// absolute path ([RealCUDA]), so the loader loads that one, too, and finds every other name there.
// So no dlsym is hooked, nothing is preloaded, and a process without libcuda is not changed. Our
// libnvidia-ml.so.1 does the same for the two functions that report a GPU's memory, as for
// nvidia-smi.
//
// Programs ask dlsym what the driver can do. So [Fit] hides the functions that this driver lacks. A
// linker looks for names in the library itself, so Fit also adds a table of all names that the
// driver's library has ([Link]). The libraries run no code before the first call of such a function
// (c/process.h). They have no threads and no signal or exit handlers, leave errno alone, and do not
// depend on a version of the C library (c/sys.h). Once loaded they stay loaded. A forked child
// begins with no state.
//
// # A program before the first instruction
//
// Drivers of R615 and later can limit a cgroup. So the CDI file of an allocation with a cap names the
// program hold as a hook ([Kit.HoldHook]): before the container's first instruction it sets the
// limit in the driver, reads it back, and writes what it came to ([Outcomes]). It is C, since a
// static program cannot load the driver's library, and runs with any C library since glibc 2.17
// (c/hold.c).
//
// # Two pages for each GPU
//
// The agent writes the limit page ([Pages.Write]): the limit, the estimate for a context, and the
// last reading of the driver. It changes the page in place by atomic stores.
//
// The processes that share an allocation of the agent write its usage page. It has one word, bound,
// to which all of them add, and a slot for each process with its part of bound. A GPU without a
// limit has no usage page. The agent trusts nothing in a usage page, and decides by the driver's
// figure. How these pages are made and protected is in usagefs.go.
//
//	on the host       dir/cap/limits/<key>/<GPU>                           on disk
//	                  dir/cap/usage/<key>/<GPU>                            on a tmpfs for each key
//	in a container    /usr/lib/gpu-agent/allocations/<GPU>/<key>/limit     mounted, read-only
//	                  /usr/lib/gpu-agent/allocations/<GPU>/<key>/usage     mounted, writable
//
// The key is the allocation's. So all containers and pods that share it have the same pages, at
// every start. The paths have the GPU's UUID, since CUDA_VISIBLE_DEVICES may change the order of
// GPUs. A container with several shares of a GPU may use their sum. Its processes count on the page
// with the largest limit, and borrow from the others what does not fit there (c/loan.h):
//
//	12 GiB "a", 8 GiB "b"     the container's processes have 15 GiB
//	page of a                 bound 15 GiB, 3 of them borrowed: the ceiling is 12 + 3
//	page of b                 bound 3 GiB, lent; 5 are left for containers that have b alone
//
// # Counting
//
// A process reserves memory before it asks the driver. The steps of an allocation and of a free are
// atomic additions. Wherever a process is killed, at most bound has been given to all of them
// together. bound may be too large for a while, and never too small (proof in c/count.h):
//
//	reserved += n     bound += n   [driver]   committed += n
//	committed -= n    [driver]     bound -= n   reserved -= n
//
// No process waits for another's lock. For each slot the kernel holds a lock until its process
// ends. This works across containers, where a process ID does not identify a process.
//
// What contexts, modules and tiled arrays take cannot be counted. So a [Meter] compares bound with
// the driver's figure, and moves the ceiling of bound by the difference ([Meter.End]). Near the
// ceiling a process waits for such a reading before it refuses a request, and then repeats the
// refusal until there is more room (c/count.c).
//
// # What is charged
//
//	plain memory        multiples of 2 MiB; for smaller allocations, the blocks of 2 MiB that
//	                    they lie in
//	memory by handle    its size, as long as a handle or a mapping is left (c/vmm.c)
//	pools, graphs       what the driver has reserved for them. The driver itself keeps pools
//	                    within the cap if it can (c/bound.c); otherwise the library does (c/pool.c,
//	                    c/reuse.c, c/attempt.c, c/graph.c)
//	arrays              their size by description, at least 2 MiB each. What is freed of small
//	                    ones is room only after a reading (c/array.c)
//	contexts            the estimate of the limit page, and room for code that the driver loads
//	                    later ([DefaultCode]); what their limits add (c/limit.c)
//	modules             near the cap, what the card has less after it has loaded them (c/module.c)
//	exported memory     until its owner ends, or a reading shows that it is gone (c/export.c)
//
// Imports and host memory are not charged. c/property.h decides for memory of unknown types.
//
// # A share of the SMs
//
// A limit page may have a percentage: the container's share of the GPU's multiprocessors (SMs)
// under MPS. MPS fails open, so the library stands before cuInit, too (c/mps.c). It sets MPS's two
// variables for its process, and answers MPS's own error (805) unless the daemon has answered within
// two seconds ([MPSDir], beat) and the driver says that the process is a client. A slot says how many
// SMs its process has, and since when it has been in cuInit ([Usage.Compute]). Without a percentage
// nothing of this happens.
//
// # What the agent asks
//
// A word of the limit page tells programs that they will lose the GPU soon ([ControlYield]), and holds
// newcomers ([ControlHold]): a process waits in cuInit, and before it makes a context, until the agent
// clears the bit (c/newcomer.c).
//
// # Example
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
// # Limits
//
// The cap and the share stop accidents and honest programs, not attackers. A program can open the
// real library at its other path, bring a copy of its own, or use the device nodes. It can write to the usage
// page, and so deceive those that share it. The driver's figure shows all of that, and the watchdog
// judges by this figure. [Counters] names what is counted too high or too late.
//
// If the library cannot count (no limit page, a damaged usage page), allocations fail, or pass
// uncounted if [OpenMark] exists. The package knows no pods, and does not act on processes over
// their limit.
package lib
