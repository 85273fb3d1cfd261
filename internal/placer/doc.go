// SPDX-License-Identifier: Apache-2.0

// Package placer keeps the books of a fleet's GPUs, and answers whether a pod fits and on
// which node. It is for schedulers that add up a node's devices. Such a scheduler cannot see
// whether one GPU has enough of them, and learns of an allocation too late.
//
// On each node an agent (gpu-agent) chooses the devices of pods, and writes the node's GPUNode:
// which GPUs there are, and what is taken of them. The caller tells [Books] what the API has:
// each GPUNode, and each pod that asks for GPUs, with its node and the devices in its status.
// [Books.Place] picks a node for a pod and reserves room there. [Books.Fits] answers whether a
// node had room if some pods were gone.
//
//	books := placer.New()
//	books.SetNode("node-1", status, true)
//	books.SetPod(placer.Pod{UID: "a", Node: "node-1", Containers: …})
//	node, err := books.Place(ctx, pod, []string{"node-1", "node-2"}, now)
//
// # What is promised
//
// A pod that goes where Place put it gets its devices from the node's agent: the books never
// give one room to two pods. They promise this for any order in which news of pods and nodes
// comes. They rely on three facts: no pod gets to a node without them, each GPUNode is true,
// and no GPU breaks or is laid out anew. Otherwise the agent may refuse a pod. For two kinds
// of pods it may also refuse one if another ends in the same second (see The bound).
//
// A reservation keeps its room. Room that is held for pods to come may be lost, for example
// when a GPU breaks. The books then report it.
//
// # What is taken
//
// A device is taken if the GPUNode counts it as held, or if a pod's status names it. Either
// may come first, so the books take the union.
//
// Nothing is placed on a node while its agent or its Node is not ready. A GPU counts only
// while the agent offers it through the device plugin and its condition Available is true.
// What goes through DRA, the scheduler places by itself.
//
// # Pods that have not reported
//
// A pod has reported once its status names as many devices as it asks for. On nodes whose
// kubelet does not write them there, the GPUNode names them with the pod as their holder.
//
// Until then the books know the pod's node, and not its devices. The agent chooses these when
// the kubelet asks for them. The kubelet takes pods in any order, and a pod that has ended
// may have left room that the API does not show yet. So the books place a pod beside such
// pods only if all of them are safe: each gets its room for any choice of the agent, in any
// order. If not, the node takes no pod that competes with them until they have reported,
// which takes a second or two. Two pods compete if they ask for the same resource, or both
// for MIG devices.
//
// # The bound
//
// A bound decides whether a request is safe. It is the least that other requests must take
// in all to leave no room for it. The request is safe if all others together ask for less.
//
//   - Memory units: to keep r units from a GPU with f free ones takes f-r+1 of them, and each
//     GPU where r would fit must be spoilt so. An empty GPU counts for more: the agent turns
//     to it only with a request that fits on none of the fuller ones.
//   - Replicas: a request for n of them needs n GPUs. To keep one from a GPU takes all its
//     free replicas, and each other request takes one replica of a GPU at most.
//   - Whole GPUs: to keep n of f free ones from a request takes f-n+1.
//   - MIG devices on demand: others must take all placements that the profile could have at a
//     time, or use up what else the card allows, such as its media engines. Each of the others
//     counts for as many of them as one of its profile can take.
//
// Once all pods of a node have reported, the books do not need the bound. They ask the
// agent's own packing (pkg/timeslice, pkg/mig) for each container in turn, as the kubelet
// would. So they refuse what the agent would refuse.
//
// The bound cannot judge a pod with init containers that ask for GPUs, or one with split
// compute instances. Such a pod is placed by the packing alone, and others that compete with
// it wait until it has reported. If another pod ends in the same second, the agent may choose
// otherwise for the pod's first request than the packing, and refuse its second.
//
// Without the bound, a node would take the next pod only when the last one has reported. Then
// the last of 22 pods on three nodes would run at least a third later (internal/fleet,
// TestCrowds).
//
// # Reservations
//
// A reservation ends when the pod is bound, gone, or asked for again, when the caller ends it
// ([Books.Unreserve]), and after [ReservedFor]. A scheduler may take as long to bind a pod.
// If the scheduler may have given the pod up, [Books.Doubt] shortens that to [DoubtedFor].
//
// A pod that the API says is nominated to a node has its room there. So books that are made
// anew from the API know all pods, but for those that were placed in the last moments and are
// not bound yet.
//
// # Holds
//
// A hold is room that is set aside before pods use it. It consists of seats. A seat is on one
// node and has room for what one pod asks for. A hold lasts until [Books.Drop]. The caller
// asks for one in one of two ways:
//
//	[Books.Hold]   a seat for each pod of some groups: for all pods or for none
//	[Books.Keep]   an amount of each resource, for pods that take pieces of any size: as few
//	               seats as there is room for, each for a part of it in one place
//
// A pod with the ID of a hold ([Pod].Hold) is a member of it, and uses its room:
//
//   - In a hold for groups it takes a seat for the same requests. A seat that no pod uses is
//     open. When the pod has gone, its seat is open again for the next member.
//   - In a hold for amounts it has a part of the amount. The seats on its node shrink by what
//     it asks for. When the pod has gone, the books look for room for that part again.
//
// # Seats have no devices
//
// The books do not choose devices for an open seat, since the agent will choose them. They
// work out what would be left on the node: first the agent's packing gives devices to the
// pods that have not reported, then to the seats of groups, oldest first, and then to those
// of amounts. Amounts come last since their room may as well be on another node.
//
// A seat that finds no room in this order has lost it ([Books.Lost]). A seat that has its
// room keeps it: no pod is placed, and no seat is opened, if the seat would then lose its
// room. There is one exception, for amounts (see Room that is lost). A seat that has lost its
// room gets what becomes free on its node, before pods that compete with it. Pods whose own
// seats have their room do not wait for that.
//
// The pods of a group come at the same moment. So a new seat of a group must be safe beside
// the pods that have not reported and all seats of groups. There is one exception: a node
// with no such pods, and no seats of other holds for groups, gets as many seats as the packing
// has room for. Their pods are then placed one after the other. Otherwise four pods that just
// fill two GPUs could never be held.
//
// Amounts have no part in the bound: beside a large amount hardly any request would be safe.
//
// # Room that is lost
//
// For the lost room of an amount the books look again by themselves, after each piece of
// news and before they place a pod. For that of a group they look when the caller calls Hold
// again, since the caller has written down on which nodes the pods are to go. An open seat is
// also lost when its node takes no new pods ([Group].Closed).
//
// A member of a hold for amounts goes before pods that may still come. If there is not room
// for the rest of its own amount beside it, that rest loses its room. If need be, other
// amounts on the node lose theirs, too. Seats of groups do not.
//
// # Long searches
//
// A search for the seats of hundreds of pods looks at each node once, and again only at nodes
// that have got a seat. Between its steps the caller may answer others ([Books.Pause]).
//
// # Room that others have
//
// [Books.Open] makes a hold for groups, also where other holds still have the room. The
// caller names the holds that may end ([Guest]). Open returns those that are to end: of the
// lowest ranks, and as few as it finds. Its own seats are where these are. A seat counts as
// lost until they have gone, and gets the room then, before any pod.
//
//	a node with two GPUs of 79 units; the holds "a" and "b" have 40 and 39 of one GPU,
//	"c" has 79 of the other
//	Open for 60 units    "a" and "b" could end, or "c" alone: "c" ends, since that is fewer
//	Open again           "c" has not gone, or the GPUNode still counts its units: none ends
//	Hold                 the GPUNode shows them as free: the seat has its room
//
// Open ends no hold on a node where a pod has not reported, since that might be in vain.
//
// # Plain resources
//
// A seat of a group also has room for what its pod asks for beside GPUs: cpu, memory, storage and the
// like ([Amounts]). The caller tells how much of that a node has for pods with GPUs
// ([Books.SetPlain]). A seat loses its room if that shrinks below what the pods and the older seats
// there ask for. Pods that are to be placed get a node by its GPUs alone, since their scheduler counts
// the rest. But no pod takes the plain room of an open seat.
//
// # Packing
//
// Of the nodes with room for a pod, the best is the one where the pod spoils least. For
// memory units, that is the GPU with the fewest units left over. For MIG devices, it is the
// placement after which the most others remain. Among equals it is the node with the least
// room.
//
// # Numbers from outside
//
// Nodes write tables and totals, tenants write requests. The caller checks what a node
// writes, and has the books pass over a node that is not valid ([Books.PassOver]). The books
// refuse a request for more than a node has in all before they count anything. If a pod is
// bound with such a request, they leave it out.
//
// Each trial of a pod on a node has a number of steps that no real node uses up. A trial that
// does finds no room. So the cost of a question is bounded for each node. A question also
// ends with its context.
//
// The package is pure: it knows no API and no clock. Books are not safe for concurrent use.
package placer
