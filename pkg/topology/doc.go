// SPDX-License-Identifier: Apache-2.0

// Package topology says how near the GPUs of a node are to each other: over
// how many NVLink lanes, whether through an NVSwitch, and whether their PCI
// slots hang on the same NUMA node.
//
// The driver tells of links GPU by GPU, and what it tells is not always whole:
// one end of a link may be down, a peer may be in another virtual machine, a
// card may be too broken to be asked. A [Graph] is what remains when that is
// put in order: for each pair of GPUs one [Pair], the same from both sides.
//
//	g := topology.New(inv)
//	g.Between("GPU-a", "GPU-b")   // {NVLink: 18, Switch: true, NUMA: Same}
//	g.Between("GPU-a", "GPU-x")   // {}: nothing is known
//
// [Graph.Choose] chooses GPUs for one container by that.
//
// Strange input is no error, since a node must start with a card that reports
// nonsense: a link to a GPU that is not there, or of a GPU to itself, or of less
// than one lane, says nothing and is left out.
//
// The package refuses to know how links are found, what runs on a GPU and which
// devices a kubelet has free.
package topology
