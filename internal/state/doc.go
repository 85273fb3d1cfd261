// SPDX-License-Identifier: Apache-2.0

// Package state keeps what an agent must remember over a restart and cannot ask from others. It
// keeps it in a directory of its own.
//
// A starting agent reads nearly everything anew: GPUs from the driver, holders from the kubelet's
// checkpoint and from the container runtime. Three things it cannot get there:
//
//   - When an allocation was granted. The checkpoint does not say so, and an allocation without a
//     created container has no CDI file yet.
//   - Which GPUs are faulty. A faulty GPU looks healthy to a process that reads it only now.
//   - Which layouts were withdrawn. They stay listed for a while, although the partition file no
//     longer has them.
//
// The directory has these files:
//
//	state.json       the Document: boot, GPUs last seen, faults, withdrawn layouts,
//	                 time slices; one JSON value with its version
//	state.json.bad   a state.json that could not be read, kept for inspection
//	allocations.journal   one line an allocation, added in the round after its Allocate
//	.state.json.tmp, .allocations.journal.tmp    while one of the two is replaced
//	usage/           the usage journal of internal/usage/segments; here only Remove
//	                 looks at it
//	park/            the records of parked containers of internal/park; here only Remove
//	                 looks at them
//	hooks/           programs that containers' CDI files name, installed by pkg/gpu/nvml;
//	                 here only Remove looks at them
//
//	s, err := state.Open("/var/lib/gpu-agent", log)
//	for _, c := range s.Allocations() { … }                 // what may still be held
//	err = s.Append(state.Allocation{Key: key, Resource: r, Grants: grants, Allocated: now})
//	err = s.Keep(allocations)                               // now and then
//
// # The journal
//
// Allocate does not write. The agent's loop does so milliseconds later: it appends the
// allocations since its last round. It also appends an allocation before it removes the CDI file.
// Append is one write(2). A line has a version and a checksum:
//
//	v1 5d0f3c1e {"key":"9c1f…","resource":"example.com/gpu-mem","grants":[{…}],"allocated":"…"}
//
// A kill or a full disk may interrupt a write. The torn line is dropped, and the next line begins
// on a line of its own, so a broken line never spoils the next one. A file that was truncated
// anywhere gives the allocations of its whole lines, with no error, and no others.
//
// The journal grows until Keep replaces it by the allocations that still exist. So it may have
// allocations that have ended. It may also lack one, between its Allocate and the next round.
// The reader asks the kubelet and the runtime anyway.
//
// # Why nothing is flushed
//
// Nothing here is written with fsync. When the agent is killed, the kernel still has what it
// wrote. When the machine crashes, all containers end too, and the kubelet rejects the pods
// that held devices: the allocations that might be lost have no holder. A flush would cost a disk
// access in each round with a new allocation, and protect nothing.
//
// What a crash leaves:
//
//   - Between an Allocate and its Append, or in Append: no line, a torn one or a whole one. If the
//     kubelet has the answer, its checkpoint soon has the allocation, and the kubelet asks for it
//     again before the container starts. The next agent takes it over from either, with the
//     record in its annotation, and lacks only the time of the Allocate. If the kubelet has no
//     answer, it calls Allocate again, or the allocation has no holder and ends.
//   - Between an Append and the removal of the CDI file: both have the same facts.
//   - In Save or Keep before the rename: the old file, and a temporary one, which the next Open
//     removes. After the rename: the new file.
//   - Between Save and Keep: two files of different times. Neither refers to the other.
//   - At a power failure: either file may be empty, old or have holes. Open puts such a state.json
//     aside with a warning. From such a journal it reads the whole lines.
//
// # Versions
//
// A missing file counts as an empty one. So a directory of version 0, which has only hook
// programs, needs no migration. Open refuses a file of a newer version before it changes
// anything: an older agent would ignore what it does not know, and forget allocations.
//
// # Access
//
// Two processes never share the directory: Open locks it, and the lock ends with its process. Only
// the owner can read the files. Others may pass through the directory, but not list it: in a
// pod with a user namespace, the runtime starts the hook programs as another user. If one of the
// names above is not a regular file, or is a symbolic link, Open refuses it and does not follow.
//
// # Limits
//
// The package does not know what its contents mean: which allocation has ended, whether a fault
// still counts after a reboot, or when a withdrawn layout may be forgotten.
package state
