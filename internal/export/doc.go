// SPDX-License-Identifier: Apache-2.0

// Package export describes a cluster's GPUs to other programs, in their own formats: Kueue's
// quotas, Karpenter's NodeOverlays, and Cluster Autoscaler's templates of nodes that do not exist
// yet. It computes values and returns them as YAML with comments. It reads nothing and sends
// nothing.
//
//	nodes := []export.Node{node} // from FromStatus, or from FromInventory
//	q := export.Kueue{Domain: "example.com", ResourceDomain: "example.com", Nodes: nodes,
//		Clouds: []export.Cloud{{Site: "cloud", Limit: 640 * 1024}},
//		Teams: []export.Team{{Name: "research", Share: 1}}, Topology: true}
//	text, err := q.Objects()
//
// Equal input gives equal text, and the order of the nodes does not matter. So an export can be
// kept in a repository, where a change shows as a change.
//
// # GPU memory as the common unit
//
// Quotas of whole GPUs, of memory units and of MIG instances cannot be compared, and a team would
// need one of each. So each device also counts as GPU memory (gpu-memory, in bytes):
//
//   - A whole GPU counts as its memory in GiB, rounded up, since cards of one size differ by some
//     MiB from driver to driver.
//   - A MIG instance counts as a part of that, in proportion to its memory slices.
//   - A unit of gpu-mem counts as its size.
//
// Each resource has a quota of its own, too. With memory alone, Kueue would admit a MIG instance to
// GPUs that are offered whole, and no pod that asks for an instance runs there.
//
// Kueue converts requests to GPU memory by name, for the whole cluster. So one name must have one
// size, and a name with two sizes is refused. MIG instances are the exception: their names have
// their size, cards differ by a few MiB, and the smallest counts.
//
// # Limits
//
// If a format cannot express something, the export fails with an error that names the nodes and
// what to do. It writes nothing then: any team could use what an incomplete export leaves out, or
// no team, without notice. The package does not know what is free or held. It exports all devices
// that the GPUs offer.
package export
