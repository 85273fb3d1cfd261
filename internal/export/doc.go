// SPDX-License-Identifier: Apache-2.0

// Package export tells other programs what a cluster's GPUs are, in the formats that they
// read: Kueue's quotas, Karpenter's NodeOverlays, and Cluster Autoscaler's templates of nodes
// that are not there yet. It computes values and writes them as YAML with comments; it reads
// nothing and sends nothing.
//
//	nodes := []export.Node{node} // from FromStatus, or from FromInventory
//	q := export.Kueue{Domain: "example.com", ResourceDomain: "example.com", Nodes: nodes,
//		Clouds: []export.Cloud{{Site: "cloud", Limit: 640 * 1024}},
//		Teams: []export.Team{{Name: "research", Share: 1}}, Topology: true}
//	text, err := q.Objects()
//
// Equal input gives equal text, in whatever order the nodes come, so that an export can be
// kept in a repository and a change is seen as one.
//
// # One currency
//
// Quotas of whole GPUs, of memory units and of MIG instances cannot be compared, and a team
// would need one of each. So everything also counts as GPU memory (gpu-memory, in bytes): a
// whole GPU its memory in GiB, rounded up, since cards of one size differ by some MiB from
// driver to driver; a MIG instance the part of that which its memory slices are; a unit of
// gpu-mem its size. Each resource keeps a quota of its own beside it: memory alone would
// admit a MIG instance to GPUs that are offered whole, where no pod that asks for it runs.
//
// Kueue turns requests into that currency by name and for the whole cluster. So one name has
// one size, and what has two is refused. MIG instances are the exception: their names say
// their size, cards differ by a few MiB, and the smallest counts.
//
// # What it refuses
//
// What a format cannot say is an error that names the nodes and what to do, and then nothing
// is written. An export that leaves something out would give it away, or lock it up, in
// silence. The package does not know what is free or held: an export says what there is.
package export
