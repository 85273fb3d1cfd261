// SPDX-License-Identifier: Apache-2.0

// Package placer keeps the books of a fleet's GPUs, and answers whether a pod fits and on
// which node. It is for schedulers that add up a node's devices and so cannot see whether
// one GPU has enough of them, or hear of an allocation too late.
//
// The caller tells [Books] what the API has: each node's GPUNode, and each pod that asks for GPUs with
// its node and the devices in its status. [Books.Place] picks a node and reserves there. [Books.Fits]
// answers whether a node had room if some pods were gone.
//
//	books := placer.New()
//	books.SetNode("node-1", status, true)
//	books.SetPod(placer.Pod{UID: "a", Node: "node-1", Containers: …})
//	node, err := books.Place(pod, []string{"node-1", "node-2"}, now)
//
// # What is taken
//
// A device is taken if the GPUNode counts it as held, or a pod's status names it. Either may come late,
// and in any order: the books take the union. Nothing is placed where the agent or the Node is not
// ready. A GPU counts only while it is offered through the device plugin and is Available; the scheduler
// places what goes through DRA.
//
// # What is not known yet
//
// A pod that has a reservation, or is bound, and has not reported its devices, will get devices that the
// books cannot foresee. The node's agent chooses them when the kubelet asks. The kubelet takes pods in
// any order, and an ended pod may have left room that the API does not show yet. So a pod is placed
// beside such pods only if each of them, and the new one, gets its room for any choice of the agent, in
// any order. Otherwise the node waits until the others have reported, which takes a second or two.
//
// A bound decides that: for every request, how much the other requests would have to take to leave no
// room for it. To keep r memory units from a GPU with f free ones takes f-r+1 of them. An empty GPU
// counts for more, since the agent turns to it only for what fits on none of the fuller ones. To keep a
// replica from a GPU others must use it up, and each request takes one replica. To keep a MIG device on
// demand from a card others must cover each of its profile's free placements, or use up what the card
// allows of its kind.
//
// Where all pods have reported, the books ask the agent's own packing (pkg/timeslice, pkg/mig) for each
// of the pod's containers in turn, as the kubelet would. So they refuse what the agent would refuse. A
// pod with init containers that ask for GPUs, or with split compute instances, is placed in this way
// alone, and keeps others off its node until it has reported. If another pod ends in the same second,
// the packing may choose otherwise between two requests of one such pod. A pod with one request is safe
// from that.
//
// A waiting node costs seconds. With one pod at a time on each node, instead of the bound, the last of 22
// pods on three nodes runs a third to three times later (internal/fleet, TestCrowds).
//
// # Reservations
//
// A reservation ends when the pod is bound, gone, or asked for again, by [Books.Unreserve], and after
// [ReservedFor]. That is as long as a scheduler may take to bind a pod. [Books.Doubt] shortens it, where
// the scheduler may have given the pod up. While the API says that a pod is nominated to a node, it has
// its room there. So books that are made anew from the API's pods know the same as before, but for
// pods that were placed in the last moments and whose binding the API does not know.
//
// # Holds
//
// A hold is room that is set aside before pods use it: seats, each on one node and for what one pod asks
// for, until [Books.Drop]. There is one form of it, for two askers:
//
//	[Books.Hold]   a seat for each pod of some groups, for all pods or for none
//	[Books.Keep]   so much of each resource, for pods that take pieces of any size: a seat for each
//	               part of it that is in one place, as few as there is room for
//
// A pod uses what the hold of its name has ([Pod].Hold). One of a group takes the seat of one that asks
// for the same, and when it has gone, that waits for the next one. One that takes some of an amount has
// the seats of its node cut to what is left.
//
// A seat is kept by expectation. First the agent's packing gives the pods that have not reported their
// devices. Then it serves the seats of groups, oldest first, and then those of amounts, which may as well
// be elsewhere. A seat that finds no room then has lost it ([Books.Lost]). No pod is placed, and no seat
// added, where a seat that has its room would lose it. Where a seat waits for room, it gets what becomes
// free.
//
// The pods of a group come at the same moment. So its seats are where the bound holds for all pods and
// seats of groups; or, with no others on the node, as many as the packing has room for, and then their
// pods come one after the other. Otherwise four pods could never be held that just fill two GPUs. An
// amount has no part in the bound: little would ever be safe beside it.
//
// The books look again for the lost room of an amount after each piece of news, before they place a pod.
// For the lost room of a group they look when the caller calls Hold again: the caller has written down
// where its pods are to go. A node that takes no new pods ([Group].Closed) has no room for open seats. A pod that takes some of an amount goes before pods that may still come. If
// the two do not fit, the rest of the amount loses its room, and at last so do others' amounts there.
//
// A search for hundreds of pods looks at each node once, and then only at nodes that have got a seat.
// Between its steps others may ask ([Books.Pause]).
//
// # Room that others have
//
// [Books.Open] holds room where others still have it: holds that may end ([Guest]). It returns the ones
// that are to end, the fewest of the lowest ranks, and puts its own seats where they are. Such a seat
// has no room until they have gone. It counts as lost until then, and no pod is placed beside it.
//
//	a node with two GPUs of 79, "a" (40) and "b" (39) on one, "c" (79) on the other
//	Open for 60 units    "a" and "b" end, or "c" alone: that is fewer
//	Open again           "c" is going, or has gone and its units still count: no other hold ends
//	Hold                 the GPUNode says that they are free: there is room
//
// Open ends no hold on a node where a pod has not reported its devices: that might be in vain.
//
// # Packing
//
// Of the nodes with room for a pod, the best is the one where the pod spoils least: the GPU with the
// fewest units left over, or the placement after which the most can still be made. Among equals it is
// the node with the least room.
//
// # Numbers from outside
//
// Nodes write tables and totals, tenants write requests. The caller checks what a node writes, and has
// the books pass over a node that cannot be right ([Books.PassOver]). The books refuse a request beyond
// what a node has in all before they count anything, and leave out a pod that is bound with one. Each
// trial of a pod on a node has a number of steps that a real node does not use up; a trial that does
// finds no room. So a question has a bounded cost for each node, and ends with its context.
//
// The package is pure. It knows no API and no clock, and Books are not safe for concurrent use.
package placer
