// SPDX-License-Identifier: Apache-2.0

// Package ledger is the agent's book of what it has given out: which containers have which pieces
// of the node's GPUs. A piece is some memory units of a GPU, one of its replicas, a MIG placement
// (a profile and where it begins, whether or not the instance exists yet), or the whole GPU
// (internal/piece).
//
// The kubelet asks the agent for pieces in one of two ways, and each has a front-end, which knows
// what is on offer and answers. It takes one [Allocation] from the [Ledger] for each Allocate of
// the device-plugin API (internal/deviceplugin), which is for one container, and one for each
// device of a claim of dynamic resource allocation (internal/dra), which several pods may share.
// An allocation has a [Grant] for each piece: the GPU, the piece, and the cap on the memory of its
// containers. Its [Holder] is the container that has it, with the pod. Allocate does not name them:
// the front-end learns them from the kubelet and the container runtime afterwards. Of a claim's pods
// the first is the Holder and the others are Beside it, which changes nothing else.
//
// # The life of an allocation
//
// The kubelet gives pieces away when, by its own books, the previous holder has ended. That holder's
// container may still run. So an allocation can be taken early, and the new container waits:
//
//  1. The front-end calls Take with a [Request]. The allocation is Reserved. Take refuses pieces that
//     another allocation has, unless the request permits that (see Room).
//  2. The agent's loop, which works out round by round what has to change on the node, looks whether
//     containers of other holders still run that have the pieces. It calls Looked with their names.
//     The allocation is Waiting while there are any, and Taken once there are none.
//  3. When the container is to start, the front-end calls Prepare, which blocks and wakes the loop.
//     For a device plugin that is the kubelet's PreStartContainer, some time after Allocate. For a
//     claim it is the same NodePrepareResources that called Take. A Taken allocation is Making from
//     then on. One that becomes free later is Making at once.
//  4. The loop makes what the container needs: a MIG instance, the limit page (the file from which
//     the library in the container reads its memory cap), the CDI file. It calls SetOpen. The
//     allocation is Open, Prepare returns nil, and the kubelet starts the container. If the time of
//     the kubelet's call ends first, Prepare returns the reason, and the kubelet calls again. So it
//     does if the allocation is renewed, superseded or released first. Where all that is needed is
//     there already, the loop opens a Taken allocation before any Prepare.
//  5. When kubelet and runtime agree that its containers have ended, or the kubelet unprepares the
//     claim, the front-end calls Release, in any phase. The ledger forgets the allocation. The loop
//     removes the files and instances that no allocation has any longer.
//
// There are six turns off this road:
//
//   - Renew: the kubelet gives exactly the devices of an allocation to the next container before
//     the front-end knows that the first one has ended. The ID stays, and the allocation is
//     Reserved. (For some of these devices, or more, the front-end calls Take.)
//   - Shut: the loop finds that something is gone which an Open allocation needs, such as its CDI
//     file. It is Taken, and the loop makes that anew before the next start of the container.
//   - Supersede: a claim was deallocated by force and allocated anew, and containers still run with
//     the devices that it had. The old allocation is Waiting and lets no container in. When these
//     containers have ended, the front-end releases it, and takes one for what the claim has now.
//   - SetTwice: the front-end sees that the kubelet, after the loss of its own records, has given
//     the devices to two pods. Both share the one allocation. Prepare lets one container in, and the
//     allocation is Reserved again. The other pod's container then waits until that one has ended.
//   - A guaranteed allocation is made over a spot one ([Tier]), or the layout of the GPU is to change. The
//     spot allocation is Waiting from that moment and yields ([Yield]): no container starts with it until the
//     guaranteed one has ended. When no container of it runs any longer, the front-end calls SetOut, and what
//     changes the hardware counts its room as free.
//   - SetLending: no process of a guaranteed allocation is on the GPU, and none can come to it unnoticed. Spot
//     allocations may then have its room, too. When it wants the room back, SetLending ends that, and they yield.
//
// [Phase] describes each phase, and [Transitions] lists all steps with their triggers. Between the
// loop's look at an allocation and its report the allocation may be renewed. So each allocation has
// an Epoch, which each new holder changes, and Looked and SetOpen do nothing if theirs is an older one.
//
// # Records, and a restart
//
// The ledger is in memory. An allocation's [Record] is also in the agent's journal and in the
// annotations of the CDI file, which the loop writes, and in the annotations of Allocate's answer,
// which kubelet and runtime keep with the container. A new agent reads them all and calls Found for
// each. The latest one counts. The allocation is Reserved, then Taken, and Open without a Prepare,
// since its files are there. A container that runs notices nothing. A record has everything that a
// grant depends on, so it stays exact after the GPU's partition or the size of a unit has changed:
//
//	{"gpu":"GPU-5a2f…","kind":"units","units":"0-23","unitMiB":1024,"cap":25769803776}
//	{"gpu":"GPU-5a2f…","kind":"replica","replica":2,"of":4,"cap":20937965568}
//	{"gpu":"GPU-5a2f…","kind":"placement","profile":"3g.40gb","start":4,"size":4}
//	{"gpu":"GPU-5a2f…","kind":"whole","timeSlice":"long"}
//
// Whole GPUs and MIG instances have no cap, since hardware is their wall. If all records are lost,
// a device plugin makes grants from the device IDs that the kubelet still lists, with zero for what
// these do not tell, and the cap from the limit page. For a claim the API server knows the devices.
//
// # Room
//
// No two guaranteed allocations have the same room, lent or not, but for this. A request may permit an overlap with other
// allocations. Device plugins always do, since there the
// kubelet decides: it gives the devices of an init container to the app containers of the same pod,
// too, and those of a pod that is ending to the next. Claims never do: their front-end calls Take when
// the pieces are free. So what is taken of a GPU is the union of its grants, not their sum. All
// allocations on a GPU belong to one front-end at a time: Take refuses the other. On a GPU in MIG mode
// the loop tells the ledger which instances exist and which can exist side by side ([MIG]), and the
// ledger works out which placements there is [Room] for.
//
// # What it does not know
//
// The ledger knows neither device IDs nor offers, and calls neither the kubelet nor the driver. It
// has no time limits: its clock only dates what happens. Whether pieces are free, its callers find out.
//
// A Ledger may be used by several goroutines. Before the loop changes a GPU, it takes its devices
// off the offer and then reads the allocations. A front-end checks its offer and calls Take under
// one mutex, which the loop needs to change the offer. So either the loop sees the new allocation and
// leaves the GPU alone, or the front-end sees that the device is off the offer, and refuses.
package ledger
