// SPDX-License-Identifier: Apache-2.0

// Package plan decides what happens to each GPU of a node: whether its layout may change now,
// what has to be done to its hardware, which devices are withdrawn, and which holders are in the
// way. [Make] is a pure function: the same inventory, allocations, wanted partition and layouts
// always give the same [Changes]. Each round of the loop makes a new plan. So an edit in the
// middle of a change, a restart and a failed call need no special treatment.
//
//	changes := plan.Make(plan.Input{
//		Inventory: inv, Allocations: allocations, Wanted: wanted, Layouts: layouts, Unit: 1024,
//	})
//	for _, b := range changes.Blocked { … }    // "GPU 0 (GPU-…) stays shared, not yet whole, until these end: …"
//	for _, w := range changes.Work { … }       // "destroy 1g.10gb@0, create 3g.40gb@0"
//
// # Layouts
//
// A GPU's [Layout] is how it is divided now. It changes only while no allocation is on the GPU.
// Devices that the wanted partition does not keep are withdrawn at once, so that new pods cannot
// delay a change without end. With --when-busy wait they stay on offer. The change is made when
// the last holder ends. If a GPU has allocations and no known layout, its layout follows from
// their grants. How the containers of a shared GPU share its SMs belongs to the layout, so containers
// that take turns and containers with a share through MPS never meet on one GPU.
//
// A withdrawn device stays listed for [Linger]. A partition makes at most half as many devices as
// may be listed, so that the next partition's devices fit beside them. They may still not fit,
// after several edits in a row or with GPUs that many holders keep as they are. The GPU is then
// withdrawn, and gets its new layout when other devices have left the lists ([Rows]).
//
// # MIG
//
// A GPU in MIG mode changes step by step: its devices come and go one by one, beside others that
// are in use. Its Layout lists the placements on offer. With a fixed geometry these are the
// wanted instances that exist. On demand they are all placements of the allowed profiles; the
// front-end withdraws those that have no room beside the taken ones. Every plan asks pkg/mig for
// the steps from the instances that exist to those that are wanted. Instances of an allocation or
// a process are pinned.
//
//	geometry 7×1g.10gb → 2×3g.40gb, a pod on 1g.10gb@5:
//	  Blocked: ns/train-3 (1g.10gb@5)    no step is taken on this GPU
//	  Leaving: all that the target lacks Unhealthy, or leaving if it is held
//	  …the pod ends: destroy seven, create two, then the new devices are listed
//
//	on demand, a pod asks for 3g.40gb@0 while 1g.10gb@1 exists and is idle:
//	  Allocate                           1g@0…3, 2g@0, 4g@0 … turn Unhealthy at once
//	  Prepare: the pod waits             Work: destroy 1g.10gb@1, create 3g.40gb@0
//	  the instance exists                CDI file with its two capability nodes, the pod starts
//	  the pod ends                       the instance stays, for the next pod or until its room
//	                                     is wanted (or --idle-instance-ttl is over)
//
// An allocation gets its instance even if the partition has changed since, because its pod could
// not end otherwise. So the instances that allocations wait for come before what the partition
// wants, on a GPU of any geometry. There is one exception: a GPU that is not in MIG mode, and is
// not to be, stays so. Such an allocation is then in the way, and [Blocked] names it. A process on
// an instance without an allocation pins the instance like a holder.
//
// # Dynamic
//
// A dynamic GPU has a Layout with all placements, and is also offered whole and in memory units.
// Its allocations decide which MIG mode it needs. Without any, it stays as it is:
//
//	a claim of the whole GPU, idle instances in MIG mode     Work: destroy 1g.10gb@1, disable MIG mode
//	a claim of 3g.40gb@4, not in MIG mode                    Work: enable MIG mode; then: create 3g.40gb@4
//	a reset that is not allowed, a process on an instance    Stuck: the devices of the other mode are withdrawn
//
// # Forecast
//
// [Foresee] makes one plan after the other, as if the work of each had been done, until nothing
// is left to do. `gpu-agent plan` prints the result, from the same input as the agent's loop:
//
//	f := plan.Foresee(in, status.Cause{})
//	f.Steps[gpu]            // enable MIG mode (with a reset), create 3g.40gb@0, create 3g.40gb@4
//	f.Changes.Blocked       // the holders that the rest waits for
//
// # Limits
//
// The package has no clock. It does not know the driver, the kubelet's lists or device IDs.
// A pod reads why its allocation has to wait ([Changes].Trouble), so these texts name no other
// tenant's pod. Blocked and Conditions are for operators.
package plan
