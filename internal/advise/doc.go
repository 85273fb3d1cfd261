// SPDX-License-Identifier: Apache-2.0

// Package advise says which partition would have served a node's past demand best. It replays
// what was asked for on partitions that the node could have, and compares what comes of it.
//
// # Demand
//
// A [Demand] is a list of requests, each with its time and how long it holds what it gets. It
// comes from the usage journal ([Journal]), which has what the node has served and refused, and
// from a [Trace] of the cluster's pods, which has when they were made and those that have never
// come to the node. Neither says how long a refused pod would have run: that is estimated from
// requests that ask for the same, and a note says so.
//
// # Replay
//
// [Replay] lays a node out with internal/plan, offers its devices through the agent's own
// front-end and ledger (internal/deviceplugin), and lets pods come and go on it. So what is
// chosen, and what is refused, is what the agent would choose and refuse: pkg/timeslice,
// pkg/mig and pkg/topology are asked as on a node, with the MIG instances that would stand. The
// replay has no hardware and no clock, and of the rest of the cluster only this: the scheduler
// counts devices and hears a moment later that there are less ([Rules].Lag), the kubelet gives
// out those that the agent prefers, and Allocate may refuse them. With [Rules].Placer the
// scheduler asks the agent's packing as well.
//
// A pod asks for a resource by name. On a node that does not offer that name it would have to
// ask for another: for the resource with the least memory that has enough of it, of MIG
// instances with as many compute slices too. Which one is found on the empty node, for all
// requests of a kind, since pods are written before anybody knows what will be free.
//
// # Search
//
// [Search] tries all that a GPU can be (whole, shared by memory, MIG on demand, and every set
// of instances of the profiles that matter) on all GPUs alike, and then every mixture. Where
// these are too many it goes from the best to its neighbours, in which some GPUs are something
// else, and says that it has not tried all. [Better] is what best means: the most requests served, then the
// fewest refused or never to be served, then the shortest wait, then the fewest pods that would have to be written
// anew, then no change, then the most GPUs left idle.
//
//	advice, err := advise.Search(node, present, demand, rules, advise.Limits{Tries: 500})
//	text, err := advise.File("default", &advice.Tried[0], advise.Assumed(…), node)
//
// # What it does not know
//
// Other nodes, what GPUs cost, how fast a program runs on another piece, and the future. What
// goes through DRA the scheduler packs, by rules of its own: the replay packs it as the agent
// would. A dynamic GPU ([Limits].Dynamic) is one of the node's layouts at a time, whichever is
// asked for while it is idle.
package advise
