// SPDX-License-Identifier: Apache-2.0

// Package placer keeps the books of a fleet's GPUs, and answers whether a pod fits and on
// which node. It is for schedulers that add up a node's devices and so cannot see whether
// one GPU has enough of them, or hear of an allocation too late.
//
// [Books] are told what the API says: each node's GPUNode, and each pod that asks for GPUs
// with where it is and which devices its status names. [Books.Place] picks a node and
// reserves there. [Books.Fits] says whether a node would have room without some pods.
//
//	books := placer.New()
//	books.SetNode("node-1", status, true)
//	books.SetPod(placer.Pod{UID: "a", Node: "node-1", Containers: …})
//	node, err := books.Place(pod, []string{"node-1", "node-2"}, now)
//
// # What is taken
//
// A device is taken where the GPUNode says that it is held, or a pod's status names it.
// Either may come late, and in any order: the books take the union. Nothing is placed
// where the agent or the Node is not ready, and a GPU counts only while it is offered
// through the device plugin and is Available; what goes through DRA the scheduler places.
//
// # What is not known yet
//
// Of a pod that has a reservation, or is bound and has not reported its devices, nobody
// knows which ones it will have. The node's agent chooses them when the kubelet asks, in
// the order in which the kubelet happens to take the pods, and perhaps with room that an
// ended pod has left and of which the API says nothing yet. So the books do not guess. A pod
// is placed beside such pods only where each of them, and the new one, gets its room
// whatever the agent chooses for the others, in whatever order. Otherwise the node is passed
// over until the others have reported, which takes a second or two.
//
// That is decided with a bound: for every request, how much the other requests would have
// to take to leave no room for it. Memory units: to keep r units from a GPU with f free
// ones takes f-r+1 of them. GPUs of which nothing is held are worth more, since the
// agent turns to one only for what fits on none of the fuller ones. Replicas: others
// must use up GPUs, on which each request takes one replica. MIG devices have none: those of one
// profile are counted, since each leaves room for as many others wherever it is, and one of another
// profile waits until they have reported.
//
// Where all have reported, the books ask the agent's own packing (pkg/timeslice, pkg/mig)
// for each of the pod's containers in turn, as the kubelet would. So what is refused then
// is what the agent would refuse. A pod with init containers that ask for GPUs, or with
// split compute instances, is placed only in this way, and holds the node for itself until
// it has reported. Between requests of one such pod the packing can choose otherwise than
// the books if another pod ends in the same second; a pod with one request is not concerned.
//
// # Reservations
//
// A reservation ends when the pod is bound, gone, or asked for again, and after
// [ReservedFor]. While the API says that a pod is nominated to a node, it has its room
// there. So books that are made anew from the API's pods know the same as before, but for
// pods that were placed in the last moments and whose binding the API does not know.
//
// # Holds
//
// A hold is room that somebody has before pods use it: seats, each for what one pod asks for and on
// one node, until [Books.Drop]. There is one form of it, for two askers:
//
//	[Books.Hold]   a seat for each pod of some groups, for all pods or for none
//	[Books.Keep]   so much of each resource, for pods in whatever pieces they come: a seat for each
//	               part of it that is in one place, as few as there is room for
//
// A pod uses what the hold of its name has ([Pod].Hold). One of a group takes the seat of one that asks
// for the same, and when it has gone, that waits for the next one. One that takes some of an amount has
// the seats of its node cut to what is left.
//
// A seat is kept by expectation. Once pods that have not reported have the devices that the agent's
// packing would give them, seats get theirs in the order in which they came; those that find none then
// have lost their room ([Books.Lost]). Nobody is placed or held where a seat that has its room would
// lose it. Where one waits for room, what becomes free is for it. So a pod comes to its seat as it
// would to a free node, and agents that choose otherwise than their packing cost a seat, not a pod.
//
// Room that goes is looked for again: of an amount with each piece of news, before anybody else is
// placed, and for groups when Hold is called again, since somebody else has written down where their
// pods are to go. A pod that has come and takes some of an amount has its room before pods that may:
// the rest of the amount loses what it needs, and in the end what others hold there does.
//
// A search for hundreds of pods looks at each node once, and then at those alone that have got a seat.
// Between its steps others may ask ([Books.Pause]).
//
// # Room that others have
//
// [Books.Open] holds room where others have it yet: holds that may end ([Guest]). It says which of them
// are to, the fewest of the lowest ranks, and puts its own seats where they are. Such a seat has no room
// until they have gone, so it is lost ([Books.Lost]) as long, and nobody is placed beside it.
//
//	a node with two GPUs of 79, "a" (40) and "b" (39) on one, "c" (79) on the other
//	Open for 60 units    "a" and "b" end, or "c" alone: that is fewer
//	Open again           "c" is going, or has gone and its units are counted yet: nobody else ends
//	Hold                 the GPUNode says that they are free: there is room
//
// Nobody ends on a node where a pod has not reported its devices, since it might be in vain.
//
// # Packing
//
// Of nodes that can take a pod, the one is best on which least is spoilt: the GPU with
// the fewest units left over; the placement after which the most can still be made; and
// then the node with the least room.
//
// # Numbers from outside
//
// Nodes write tables and totals, tenants requests. Whoever tells the books of a node has found
// plausible what it says, and passes over the others ([Books.PassOver]). A request beyond what a
// node has in all is refused before anything is counted, and a pod that is bound with one is none
// to the books. Each trial of a pod on a node has a number of steps, which a real node does not
// use up; where it does, there is no room. So a question costs so much for each node, whatever
// anybody has written, and ends with its context.
//
// The package is pure. It knows no API and no clock, and Books are not safe for
// concurrent use.
package placer
