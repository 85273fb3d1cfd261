// SPDX-License-Identifier: Apache-2.0

// Package state is the agent's memory between two of its processes: what it
// knew that cannot be asked of anybody else, in a directory of its own.
//
// Nearly all that the agent needs it reads anew when it starts: GPUs from the
// driver, holders from the kubelet's checkpoint and from the container runtime.
// Three things nobody else remembers. No checkpoint says when an allocation was granted, and
// one whose container has not been created has no CDI file yet. A faulty GPU looks
// healthy to a process that reads it only now. A layout that was withdrawn has to stay
// listed for a while, although the partition file no longer has it. These are kept here:
//
//	state.json       the Document: boot, GPUs last seen, faults, withdrawn layouts,
//	                 time slices; one JSON value with its version
//	state.json.bad   a state.json that could not be read, kept for inspection
//	allocations.journal   one line an allocation, added in the round after its Allocate
//	.state.json.tmp, .allocations.journal.tmp    while one of the two is replaced
//	usage/           the usage journal; internal/usage/segments writes it, and only Remove
//	                 looks at it here
//	hooks/           programs that containers' CDI files name; pkg/gpu/nvml
//	                 installs them, and only Remove looks at them here
//
// # The journal
//
// Allocate does not write. The agent's loop appends what was granted since its last
// round, milliseconds later, and an allocation whose CDI file it is about to remove.
// Append is one write(2). A line says its version and carries a checksum:
//
//	v1 5d0f3c1e {"key":"9c1f…","resource":"example.com/gpu-mem","grants":[{…}],"allocated":"…"}
//
// A write that is interrupted, by a kill or a full disk, leaves a line that is not
// whole. It is dropped, and the next line starts on a line of its own, so that
// a broken line never spoils the next one. However short the file is truncated, reading
// it gives the allocations whose lines are whole: no error, and no allocation that was not there.
// The journal only grows until Keep replaces it by the allocations that still exist. It may
// have too many (allocations that have ended since), and too few in the moment between an
// Allocate and the next round; its reader asks the kubelet and the runtime anyway.
//
// # Why nothing is flushed
//
// Nothing here is written with fsync. When the agent is killed, what it wrote
// is in the kernel and stays. When the machine crashes, so does every
// container, and the kubelet rejects the pods that held devices: the allocations that
// might be lost have no holder left. A flush would cost every round that has a new
// allocation a disk access, and protect nothing.
//
// What each crash leaves:
//
//   - between an Allocate and its Append, or in Append: no line, a torn one or a
//     whole one. The kubelet has its answer, or had none. With its answer it has
//     the allocation in its checkpoint a moment later, and asks for the allocation again
//     before the container starts: a successor takes it over from either, with
//     the record that its annotation has, and lacks no more than the time of the
//     Allocate. Without one, the kubelet asks
//     for an Allocate again, or the allocation has no holder and ends by itself.
//   - between an Append and the removal of the CDI file that it stands for: both say
//     the same.
//   - in Save or Keep before the rename: the old file, and a temporary one that
//     the next Open removes. After it: the new file.
//   - between Save and Keep: two files of different moments. Nothing in one
//     refers to the other.
//   - a power cut: either file empty, old or with holes. Open puts such a
//     state.json aside and says so; such a journal gives the lines that are whole.
//
// # Versions
//
// A missing file is an empty one, so that a directory in which an agent of
// version 0 has left only its hook programs needs no migration. A
// file of a newer version is refused before anything is touched: an older agent
// that ignored what it does not know would forget allocations.
//
// Two processes never share the directory: Open locks it, with a lock that dies
// with its process. Files are for their owner alone. The directory lets others
// pass but not look: in a pod with a user namespace the runtime starts the hook
// programs as a user who is nobody here. A symbolic link or anything but a plain
// file at one of the names above is refused, not followed.
//
//	s, err := state.Open("/var/lib/gpu-agent", log)
//	for _, c := range s.Allocations() { … }                 // what may still be held
//	err = s.Append(state.Allocation{Key: key, Resource: r, Grants: grants, Allocated: now})
//	err = s.Keep(allocations)                               // now and then
//
// The package does not know what its contents mean: which allocation has ended,
// whether a fault still counts after a reboot, when a withdrawn layout may be forgotten.
package state
