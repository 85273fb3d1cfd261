// SPDX-License-Identifier: Apache-2.0

// Package deviceplugin connects the ledger to the kubelet's device-plugin API. It turns device
// IDs into grants and allocations into lists of devices. From what the kubelet and the container
// runtime report, it finds out which pod holds which allocation.
//
// # The offer
//
// The loop publishes an [Offer]: an immutable list of resources and their devices. Each device is
// healthy, unhealthy or leaving. The kubelet's streams read the offer. Allocate checks a request
// against it and takes an allocation. Publish and Allocate hold the same mutex, and the loop reads
// the allocations again after it has withdrawn a device. So the race between the two has two
// outcomes:
//
//   - Allocate comes first: the loop sees the allocation and leaves the GPU alone.
//   - The withdrawal comes first: Allocate refuses.
//
// The kubelet decides which pod holds a device. So Allocate never refuses an ID because another
// allocation has it: within one pod, the kubelet gives an init container's devices to the app
// container. Allocate refuses what can never work, and gives the reason:
//
//   - units of two GPUs
//   - two replicas of one GPU
//   - a MIG placement that has no room beside another allocation's
//   - a device that the present offer does not have
//
// Such a refusal is final for the pod.
//
// Where the kubelet lets the front-end choose, Prefer leaves out what Allocate would refuse. It
// takes the devices of other allocations last. The kubelet offers such devices after a pod was
// deleted by force. The next container waits until the deleted pod's container has ended.
//
// # MIG on demand
//
// A GPU with MIG on demand is offered several times over: each placement that its card allows is
// a device. The loop lists the placements as if the GPU were empty ([ledger.MIG]). The front-end
// then marks those that have no room beside the taken ones. A placement is taken if an allocation
// has it, or if an instance is there that no allocation covers. A device is Healthy if an
// allocation has it, or if it fits beside all taken placements. All others are Unhealthy.
//
// The marks change within the Allocate that takes a placement, and when its allocation ends. So a
// placement and those that it excludes are never on offer together after the Allocate:
//
//	                 1g@0  1g@1  …  2g@0  2g@2  …  3g@0  3g@4  4g@0  7g@0
//	nothing taken     x     x        x     x        x     x     x     x
//	2g@2 taken        x     x        x     x              x
//	1g@1 beside it    x     x              x              x
//
// Faults are not part of the offer. [FrontEnd.SetFaults] marks devices Unhealthy at once, even in
// the middle of a round: all devices of a GPU, or the MIG placement of one instance.
//
// # The spot tier
//
// Where a partition offers a GPU's room a second time, its devices are listed under two resources, with the same
// IDs: gpu-mem and gpu-mem.spot. The list of the guaranteed one is as if there were no spot pods. That of the spot
// one has what no guaranteed allocation has, and changes with each. Prefer packs the units of guaranteed pods as if
// there were no spot pods. On that GPU, and among equal GPUs, it takes free room first, and then the room of the fewest
// spot pods. The ledger has a spot allocation yield to the guaranteed one that
// was made over it; the guaranteed container waits at its gate until no container of the spot allocation runs.
//
// # Evidence
//
// The API has no call for "freed". So the front-end compares two sources. The kubelet's checkpoint
// names every holder, but may be stale. The container runtime knows what runs. An [Observation] is
// what both report at one moment, and [FrontEnd.Reconcile] applies it to the allocations:
//
//   - An allocation ends only if both agree that no container has it. What they reported before
//     its last Allocate does not count.
//   - An allocation that neither has named yet is kept for [Grace].
//   - A container may belong to the present holder's pod or to an earlier one. Reconcile decides
//     by what was known at the Allocate, then by the checkpoint, then by whether the allocation
//     was open. It does not compare times, since a clock can be set back.
//
// Evidence is no part of an allocation's [ledger.Phase]. Only Reconcile turns it into changes.
//
// # The witnesses
//
// [Witnesses] asks the kubelet and the runtime. The kubelet's PodResources service names the
// holders. A call of it also makes the kubelet free the devices of ended pods. The kubelet writes
// its checkpoint when it gives devices to a container, and when it receives a device list. If the
// checkpoint names a holder that no other source knows, Witnesses sends the list again, and the
// kubelet writes the file anew.
//
// The runtime reports the end of a container at once. Witnesses then asks the kubelet every 50 ms
// at first, for a few seconds. So devices are free a moment after the kubelet has freed them. If
// the runtime has no events, Witnesses asks it and the kubelet every 8 s while any device is held.
//
// # Limits
//
// The package does not know the driver, how GPUs come to be divided, or files. The loop passes
// complete offers. pkg/mig decides which placements fit beside each other on a GPU.
package deviceplugin
