// SPDX-License-Identifier: Apache-2.0

// Package plan decides what becomes of each GPU of a node: whether its layout may
// change now, what is to be done to its hardware, what is withdrawn, and who is in
// the way. [Make] is a function from values to values: the same inventory, allocations,
// wanted partition and layouts give the same [Changes], whatever happened before.
// Each round of the loop asks anew, so an edit in the middle of a change, a restart
// and a call that failed need nothing of their own.
//
//	changes := plan.Make(plan.Input{
//		Inventory: inv, Allocations: allocations, Wanted: wanted, Layouts: layouts, Unit: 1024,
//	})
//	for _, b := range changes.Blocked { … }    // "GPU 0 (GPU-…) stays shared, not yet whole, until these end: …"
//	for _, w := range changes.Work { … }       // "destroy 1g.10gb@0, create 3g.40gb@0"
//
// # Layouts
//
// A GPU's [Layout] is how it is divided now; it changes only while no allocation is on
// the GPU. What the wanted partition no longer keeps is withdrawn at once (or left on
// offer, with --when-busy wait), so that a stream of new pods cannot hold a change off
// indefinitely, and the change is done by itself when the last holder ends. A GPU
// whose layout is not known and on which allocations are has the one that their grants
// speak of.
//
// A withdrawn device stays listed for [Linger]. A partition makes at most half as many
// devices as may be listed, so that those of the next one have room beside them; where
// they have none all the same (edits in a row, GPUs that many holders keep as they
// are), the GPU is withdrawn and laid out when others have left the lists ([Rows]).
//
// # MIG
//
// A GPU in MIG mode does not change at one stroke: its devices come and go one by one,
// each beside others that are in use. Its Layout lists the placements on offer. With a
// fixed geometry those are the instances that stand and are wanted; on demand they are
// all placements of the profiles that the partition allows, whether anything stands
// there or not, and the front-end withdraws those that have no room beside what is taken.
// Every plan asks pkg/mig the same question: from what stands, with that pinned which
// an allocation or a process has, to what is wanted.
//
//	geometry 7×1g.10gb → 2×3g.40gb, a pod on 1g.10gb@5:
//	  Blocked: ns/train-3 (1g.10gb@5)    no step is taken on this GPU
//	  Leaving: all that the target lacks Unhealthy, or leaving where it is held
//	  …the pod ends: destroy seven, create two, then the new devices are listed
//
//	on demand, a pod asks for 3g.40gb@0 while 1g.10gb@1 stands idle:
//	  Allocate                           1g@0…3, 2g@0, 4g@0 … turn Unhealthy at once
//	  Prepare: the wish                  Work: destroy 1g.10gb@1, create 3g.40gb@0
//	  the instance stands                CDI file with its two capability nodes, gate open
//	  the pod ends                       the instance stays, for the next pod or until its room
//	                                     is wanted (or --idle-instance-ttl is over)
//
// An allocation that was granted is made good, whatever the partition has become since: its
// pod could not end otherwise. So wishes come before what the partition wants, on a GPU
// of any geometry; only a GPU that is not in MIG mode and is not to be is blocked by
// such an allocation instead, and [Blocked] names it. A process on an instance that no allocation
// covers pins it like a holder.
//
// # Dynamic
//
// A dynamic GPU has a Layout with all placements, and is offered whole and in memory units
// besides. Its allocations say which MIG mode it needs; without any it stays as it is:
//
//	a claim of the whole GPU, idle instances in MIG mode   Work: destroy 1g.10gb@1, disable MIG mode
//	a claim of 3g.40gb@4, not in MIG mode                  Work: enable MIG mode; then: create 3g.40gb@4
//	a reset that may not be, or a process on an instance   Stuck: the devices of the other mode are withdrawn
//
// # What a partition would come to
//
// [Foresee] makes one plan after the other, as if the work of each had been done, until nothing
// is left to do:
//
//	f := plan.Foresee(in, status.Cause{})
//	f.Steps[gpu]            // enable MIG mode (with a reset), create 3g.40gb@0, create 3g.40gb@4
//	f.Changes.Blocked       // whom the rest waits for
//
// It is what `gpu-agent plan` tells, with the input that the agent's loop has.
//
// The package has no clock and does not know the driver, the kubelet's lists or device
// IDs. Why an allocation has to wait is told to its pod ([Changes].Trouble), so no other
// tenant's pod is named there; Blocked and Conditions are for operators.
package plan
