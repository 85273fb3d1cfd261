// SPDX-License-Identifier: Apache-2.0

// Package advise finds the partition that would have served a node's past demand best. It replays
// the recorded requests on partitions that the node could have, and compares the results.
//
// # Demand
//
// A [Demand] is a list of requests, each with its time and how long it holds its devices. It comes
// from two sources. The usage journal ([Journal]) has what the node has served and refused. A
// [Trace] of the cluster's pods has when they were created, and also those that never came to the
// node. Neither knows how long a refused pod would have run. That is estimated from requests that
// ask for the same, and a note says so.
//
// # Replay
//
// [Replay] lays a node out with internal/plan, offers its devices through the agent's own front-end
// and ledger (internal/deviceplugin), and lets pods come and go. So it chooses and refuses what the
// agent would: pkg/timeslice, pkg/mig and pkg/topology decide as on a node, with the MIG instances
// that would exist. The replay has no hardware and no clock. Of the rest of the cluster it has only
// this:
//
//   - The scheduler counts devices. It learns a moment later that there are fewer ([Rules].Lag).
//     With [Rules].Placer it asks the agent's packing instead.
//   - The kubelet gives out the devices that the agent prefers. Allocate may refuse them.
//
// A pod asks for a resource by name. If a node does not offer that name, the pod would have to be
// written anew for another resource: the one with the least memory that is still enough. An ask for
// MIG instances also needs as many compute slices. The replay chooses that resource on the empty
// node, once for all requests of a kind, since authors of pods do not know what will be free.
//
// # Search
//
// [Search] tries each layout that a GPU can have on all GPUs alike: whole, shared by memory, MIG on
// demand, and every set of instances of the profiles that matter. Then it tries every mixture. If
// there are too many, it starts from the best and changes some GPUs at a time, and reports that it
// has not tried all. [Better] defines the best: the most requests served, then the fewest refused
// or never served, then the shortest wait, then the fewest pods to write anew, then no change, then
// the most GPUs left idle.
//
//	advice, err := advise.Search(node, present, demand, rules, advise.Limits{Tries: 500})
//	text, err := advise.File("default", &advice.Tried[0], advise.Assumed(…), node)
//
// # A spot tier
//
// A [Recovery] adds up what the replay does not show: room that no pod was granted, and room that pods held without a
// process on it. A spot tier offers the first, and lends the second. It is a bound: whether other work would have come
// for it, and fitted, the journal does not tell.
//
// # Limits
//
// The package does not know other nodes, the price of GPUs, how fast a program runs on another
// piece, or the future. The scheduler packs DRA devices by rules of its own, but the replay packs
// them as the agent would. A dynamic GPU ([Limits].Dynamic) has one layout at a time: the one that
// is asked for while the GPU is idle.
package advise
