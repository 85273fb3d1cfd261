// SPDX-License-Identifier: Apache-2.0

// Package ledger is the agent's book of what it has given out: which container has which pieces
// of the node's GPUs. A piece is some memory units of a GPU, one of its replicas, a MIG instance,
// or the whole GPU (internal/piece).
//
// The kubelet asks the agent for pieces in one of two ways, and each has a front-end:
// internal/deviceplugin answers Allocate of the device-plugin API, internal/dra answers
// NodePrepareResources of dynamic resource allocation. A front-end knows what is on offer. For
// each answer it takes one [Allocation] from the [Ledger], with a [Grant] for each piece: the
// GPU, the piece, and the cap on the memory of whoever has it.
//
// # The life of an allocation
//
// An answer comes before its container starts, and often before the previous container with the
// same pieces has ended. So the front-end answers at once, and the container waits:
//
//  1. The front-end calls Take. The allocation is Reserved: no other request gets its pieces.
//  2. The agent's loop looks at the GPU and at the list of containers. It calls Looked with the
//     holders that still have the pieces. The allocation is Waiting while there are any, and
//     Taken once there are none.
//  3. When the container is to start, the kubelet calls the front-end again, and that calls
//     Prepare, which blocks. A Taken allocation is then Making. Prepare may also come before
//     step 2: the loop's look then ends in Making.
//  4. The loop makes what the container needs: a MIG instance, the page with its memory cap, the
//     CDI file. Some of this it does before Prepare. It calls SetOpen: the allocation is Open,
//     Prepare returns nil, and the container starts. If the deadline of the kubelet's call comes
//     first, Prepare returns an error with the reason, and the kubelet calls again.
//  5. The front-end calls Release when the pod has ended, by what the kubelet's PodResources API
//     and the container runtime list. An allocation may be released in any phase.
//
// There are four turns off this road:
//
//   - Renew: the kubelet gives the same devices to another container, often before the agent knows
//     that the first one has ended. The allocation keeps its ID and is Reserved for the new holder.
//   - Shut: something that an Open allocation needs is gone, such as its CDI file. It is Taken, and
//     the loop makes that anew before the next start of the container.
//   - Supersede: a claim was allocated anew while containers still have what it had. The old
//     allocation lets no container in any more, and ends with those.
//   - SetTwice: a kubelet can give one device to two pods, after it has lost its own records.
//     Then Prepare lets one container in, and the allocation is Reserved again: the other
//     container waits until the loop no longer finds the first.
//
// [Phase] describes each phase, and [Transitions] lists all steps with their triggers. The loop
// and the front-ends do not see each other's work at once, so each report to the ledger names the
// Epoch that it is about. The ledger ignores a report about an older one.
//
// # Records, and a restart
//
// The ledger is in memory. Beside it, an allocation's [Record] is written in three places: the
// agent's journal in its state directory, the annotations of the CDI file and, for a device
// plugin, the annotations of Allocate's answer, which the kubelet and the runtime keep with the
// container. A new agent reads them and calls Found for each. The allocation is then Reserved,
// and comes to be Open by the same steps as above, without harm to a container that runs. Who
// holds it, the kubelet and the runtime tell again.
//
// A record has everything that a grant depends on. So it stays exact after an operator has changed
// the partition of the GPU, the size of a unit or the number of replicas:
//
//	{"gpu":"GPU-5a2f…","kind":"units","units":"0-23","unitMiB":1024,"cap":25769803776}
//	{"gpu":"GPU-5a2f…","kind":"replica","replica":2,"of":4,"cap":20937965568}
//	{"gpu":"GPU-5a2f…","kind":"placement","profile":"3g.40gb","start":4,"size":4}
//	{"gpu":"GPU-5a2f…","kind":"whole","timeSlice":"long"}
//
// Whole GPUs and MIG instances have no cap, since hardware is their wall. If all records of a
// container are lost, the device plugin makes grants from the device IDs that the kubelet still
// lists. These do not tell the size of a unit, the number of replicas or the cap. The first two
// are zero then, and the cap is read from the page that holds the container to it.
//
// # Room
//
// A pod's init container and its app container may be given the same pieces. A [Request] can
// permit such an overlap, and so can one for the pieces of a pod that is ending. So what is taken
// of a GPU is the union of its grants, not their sum. All allocations on a GPU belong to one
// front-end at a time: Take refuses the other one.
//
// On a GPU in MIG mode, the loop tells the ledger which instances exist and which can exist side by
// side ([MIG]). From these and the grants the ledger works out which further placements there is
// [Room] for.
//
// # What it does not know
//
// The ledger knows neither device IDs nor offers, and it calls neither the kubelet nor the driver.
// Whether pieces are really free, its callers find out. It has no time limits: its clock only dates
// what happens.
//
// A Ledger may be used by several goroutines. A front-end checks its offer and takes from it under
// a mutex of its own, which it locks before the ledger's. The loop publishes a withdrawal, which
// locks that mutex, before it reads the allocations. So either the loop sees the new allocation, or
// the front-end sees the withdrawal and refuses.
package ledger
