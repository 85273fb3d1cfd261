// SPDX-License-Identifier: Apache-2.0

// Package park takes containers' processes off their GPUs and puts them back, while they stay where they
// are: the driver's cuCheckpointProcess calls (R570 and later, x86-64) move what they have on the cards
// to the host's memory. A parked process waits in its next call of CUDA.
//
// # Steps
//
// A [Set] is the processes that are parked together. Each step is recorded in a file before it begins:
//
//	            record       step                         if it fails
//	Park        locking      lock all, at most 5 s        unlock all, forget; nothing has changed
//	            saving       checkpoint all               broken
//	            parked
//	Restore     restoring    restore all                  no room: checkpoint again, parked; else broken
//	                         unlock all, forget           broken
//
// Processes that have died meanwhile are left out. A process is known by its PID and its start time, so that
// no other process with its PID is touched.
//
// A checkpoint or a restore that fails may have broken its process. Such a set is broken: nothing unlocks
// it, and the caller ends its container ([ErrBroken]). The record stays until its processes are gone.
//
// # After a kill
//
// After a kill between any two steps, [Keeper.Settle] asks the driver for the state of each process and
// goes on: it unlocks what was only locked, completes a checkpoint that had begun, and forgets what has
// died, also all sets of an earlier boot. A set whose restore had begun stays in restoring. Only the caller
// knows whether its room is still there, and calls Restore again, or Park.
//
// # Host memory
//
// What a set has on its GPUs must fit into the container's cgroup and each of its ancestors, into the node's
// available memory less what is spared for the kubelet's eviction threshold, and together with the other
// sets into [Options].Most. Otherwise Park returns [ErrNoRoom], and has changed nothing.
//
// # A process for each step
//
// The driver's library is loaded by a child of the caller alone ([Serve]), a new one for each step. A call
// that hangs, or a library that crashes, ends the child and not the agent.
//
//	k, err := park.Open(park.Options{Dir: dir, Most: 64 << 30, Command: command})
//	err = k.Settle(ctx)
//	err = k.Park(ctx, park.Set{Key: id, Processes: processes, Bytes: bytes, Cgroup: dir})
//	err = k.Restore(ctx, id)
//
// # Limits
//
// The driver refuses MIG devices, clients of MPS, and memory that processes share; Park then returns its
// error. It does not say what it does with managed memory. The package knows no pods and no ledger: the
// caller says which processes a set has, keeps new ones from the GPU meanwhile, and says when the room is
// free again. The calls have been made on an emulated driver only.
package park
