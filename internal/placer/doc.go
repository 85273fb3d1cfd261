// SPDX-License-Identifier: Apache-2.0

// Package placer decides which node of a cluster has room for a pod that asks for GPUs. It also
// holds room for pods that do not exist yet. It works on plain values: it makes no API request and
// reads no clock, and its types are not safe for concurrent use.
//
// A scheduler by itself adds up the free devices of a node. It does not see whether one GPU has
// enough of them, and learns too late which ones a pod got. A device is a unit of a GPU's memory, a
// replica (one of several equal shares of a GPU whose pods take turns), a whole GPU, or a MIG
// device (a part that NVIDIA's Multi-Instance GPU splits off).
//
// # Who does what
//
//  1. On each node an agent (gpu-agent) offers devices to the kubelet. It writes the node's GPUNode,
//     an API object with the GPUs and with what is taken of them.
//  2. The caller tells [Books], the record of the cluster, each GPUNode and each pod that asks for
//     devices.
//  3. A scheduler asks the caller for a node. [Books.Place] picks one and reserves room there.
//  4. The scheduler binds the pod to that node. For each container the kubelet asks the agent, and
//     the agent chooses the devices.
//  5. The pod has reported once its status names its devices. If the node's kubelet does not write
//     them there, the GPUNode names them, with the pod as their holder.
//
// If no node has room, the error is a [*Refusal] with each node's reason:
//
//	books := placer.New()
//	books.SetNode("node-1", status, true) // the GPUNode's status; the Node is ready
//	books.SetPod(placer.Pod{UID: "a", Node: "node-1", Containers: …})
//	node, err := books.Place(ctx, pod, []string{"node-1", "node-2"}, now)
//	err = books.Fits(pod, "node-1", []string{"a"}, now) // is there room once pod a is gone?
//
// # What is promised
//
// A pod that goes where Place put it gets its devices: the books never give one room to two pods,
// for any order of the news about pods and nodes. This takes four facts: each pod gets its node
// from the books, it is bound while its reservation lasts, each GPUNode is true, and no GPU breaks
// or is partitioned anew. Otherwise the agent may refuse the pod. There are two exceptions, and
// only if another pod ends in the same second: pods with init containers that ask for GPUs, and
// with parts of one MIG instance.
//
// # Whether a node has room
//
// A device is taken if the GPUNode or a pod's status names it: either may come first. A node has
// nothing free while its agent or its Node is not ready. A GPU counts while the agent offers it
// through the device plugin and its condition Available is true.
//
// A pod that is placed or bound and has not reported is called pending here: the books do not know
// which devices it gets. So Place tests a node in two ways:
//
//   - The bound is arithmetic. It holds if the new pod and all pending ones that compete with it
//     get their devices in any order and for any choice of the agent. Then the node has room. Pods
//     compete if they ask for the same resource, or both for MIG devices.
//   - Otherwise, if no pending pod competes, the agent's own packing (pkg/timeslice, pkg/mig)
//     chooses devices for each container in turn. The books refuse what the agent would refuse.
//
// If the bound does not hold beside pending pods, Place refuses the node until they have reported.
// A pod that is bound reports within a second or two. Of the nodes with room it takes the one where the pod spoils the
// least room for others, and among equals the fullest.
//
// After [Books.KeepApart], pods of different namespaces are kept apart on MPS GPUs, by node, where that costs no place
// for any pod of a size that pods ask for.
//
// A placed pod has a reservation until SetPod shows it bound; then it is a pending pod of that node,
// with the same room. If the scheduler gives it up, the caller calls [Books.Unreserve], or
// [Books.Doubt] where it cannot be sure. The next call with a later now ends a reservation that is
// older than [ReservedFor], or than [DoubtedFor] since the doubt. A pod that a preemption has
// nominated to a node is pending there, too, without a time limit.
//
// The books are in memory. After a restart the caller tells them all nodes and pods again, and makes
// its holds again, before it answers. Only reservations of pods that are not bound yet are lost then.
//
// # Holds
//
// A hold is room that is set aside before pods use it. It has seats: a seat is on one node, and has
// room for what one pod asks for. The caller makes a hold under an ID, in one of three ways:
//
//	[Books.Hold]   a seat for each pod of some groups: for all of them or for none
//	[Books.Open]   the same, also where members of other holds have the room. It returns whom the
//	               caller has to end. The seats have no room until these pods have gone.
//	[Books.Keep]   an amount of each resource, for pods of any size: as few seats as have room
//
// A pod with that ID (Pod.Hold) is a member. In a hold for groups it uses a seat for the same
// requests. The seat is open before and after that. In a hold for amounts, the seats on its node
// shrink by what it asks for. Once it has gone, the books look for room for that much again. A
// member for which there is no open seat is placed like any other pod. A hold lasts until
// [Books.Drop].
//
// The agent will choose the devices, so an open seat has none. The books try what would be left:
// the packing gives devices to pending pods first, then to seats of groups, oldest first, and then
// to amounts, whose room may as well be on another node. A seat that finds nothing in this
// order has lost its room, for example when a GPU breaks ([Books.Lost], [Books.Kept]).
//
//   - No pod and no new seat takes the room of a seat, which the bound counts like a pending pod.
//     There is one exception: a member of a hold for amounts may take that of any amounts, and the
//     books look for these elsewhere ([Books.Keep]).
//   - A seat that has lost its room gets what becomes free on its node, before other pods that
//     compete with it.
//   - The books look for another place for a lost amount by themselves, and for a lost seat of a
//     group when the caller calls Hold again.
//
// Seats of groups also have the cpu, memory and the like that pods ask for ([Books.SetPlain]).
//
// # Limits
//
// Nodes and tenants write numbers. The caller checks a GPUNode and has the books pass over one that
// is not valid ([Books.PassOver]). The books bound the steps for each pod and node, and the seats
// of a hold ([MaxSeats]). What goes through DRA (dynamic resource allocation), the scheduler places.
package placer
