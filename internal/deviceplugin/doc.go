// SPDX-License-Identifier: Apache-2.0

// Package deviceplugin is the front-end of the ledger for the kubelet's device-plugin
// API: device IDs become grants, allocations become lists of devices, and what the
// kubelet and the container runtime say tells who has what.
//
// # The offer
//
// The loop publishes an [Offer]: an immutable list of resources and their devices,
// each healthy, unhealthy, or leaving. The kubelet's streams read it, Allocate
// checks against it and takes an allocation. Because both happen under one mutex, the
// race that matters has only two outcomes: either Allocate came first, and the loop,
// which looks at the allocations again after it has withdrawn a device, sees this one
// and leaves the GPU alone; or the withdrawal came first, and Allocate refuses.
//
// The kubelet decides who holds a device. So Allocate never refuses an ID
// because another allocation names it: for one pod the kubelet hands an init
// container's devices to the app container. It refuses what can never work
// (units of two GPUs, two replicas of one GPU, a MIG placement that has no room beside
// another one's, a device that the present offer does not have), with the reason,
// and that refusal is final for the pod.
//
// Where the kubelet lets the front-end choose, Prefer leaves out what Allocate would
// refuse, and takes what an allocation covers last: the pod that had it was deleted by
// force, and the next container on it waits until that one's has ended.
//
// A GPU with MIG on demand is offered several times over: every placement that could
// stand on it is a device. An offer lists them as if the GPU were empty, with what
// the driver says can stand together ([ledger.MIG]), and the front-end lays over that
// what is taken: by allocations, by placements that somebody unknown uses. A device is Healthy
// if an allocation has it, whatever else is there, or if it can stand beside all that is
// taken; all others are Unhealthy. That is done in the Allocate that takes a placement
// and when its allocation ends, so between an allocation and what it covers there is no
// moment at which both are on offer:
//
//	                 1g@0  1g@1  …  2g@0  2g@2  …  3g@0  3g@4  4g@0  7g@0
//	nothing taken     x     x        x     x        x     x     x     x
//	2g@2 taken        x     x        x     x              x
//	1g@1 beside it    x     x              x              x
//
// Faults are apart from the offer: [FrontEnd.SetFaults] marks all devices of a GPU, or
// the MIG placement that one instance has, Unhealthy at once, whatever the loop is doing.
//
// # Evidence
//
// The API has no word for "freed". Who has an allocation, and whether anybody does, is
// found out from what the kubelet's checkpoint says, which is never short of a holder
// but may be stale, and the container runtime, which knows what runs. An [Observation]
// is both at one moment; [FrontEnd.Reconcile] moves the allocations along by it. One
// ends only when both agree; what was said before its last Allocate does not count, and
// one that nobody has named yet is kept for [Grace]. A container may be of the pod that
// has an allocation now or of the one before. What was known at the Allocate tells, then
// the checkpoint, then the gate; times do not, since a clock can be put back in between.
// Evidence decides nothing by itself and is in no [ledger.Phase].
//
// [Witnesses] asks both. PodResources gives names, and asking it makes the kubelet let go of
// what ended pods have. The checkpoint is written when a container is given
// devices and when a list arrives; where it names somebody whom nobody else
// knows, the list is sent again. The runtime tells of a container's end at once,
// and then the kubelet is asked every 50 ms for a while, so that devices are free
// a moment after it has let go. A runtime that has no events, or whose events the
// kubelet would lose to us, is asked with the others every 8 s.
//
// # What it does not know
//
// The driver, how GPUs come to be laid out, and files. An offer arrives ready-made, and
// what can stand beside what on a GPU is pkg/mig's to say.
package deviceplugin
