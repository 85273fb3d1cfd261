// SPDX-License-Identifier: Apache-2.0

// Package topology says how near the GPUs of a node are to each other, and
// which of them fit together: over how many NVLink lanes they are joined,
// whether through an NVSwitch, what lies between them on the PCI bus, and
// whether their slots hang on the same NUMA node.
//
//	topology.Read(os.DirFS("/sys"), inv)     // NUMA nodes, PCI paths, network cards
//	g := topology.New(inv)
//	g.Between("GPU-a", "GPU-b")              // {NVLink: 18, Switch: true, MBps: 478116, NUMA: Same, Level: PXB}
//	g.Choose(topology.Request{Available: free, N: 4})
//	g.Matrix().WriteText(os.Stdout)          // as nvidia-smi topo -m
//
// # The graph
//
// The driver tells of links GPU by GPU, and what it tells is not always whole:
// one end of a link may be down, a peer may be in another virtual machine, a
// card may be too broken to be asked. A [Graph] is what remains when that is
// put in order: for each pair of GPUs one [Pair], the same from both sides. It
// is made once for an inventory and never changes. Choosing from it asks no driver,
// takes no lock, and sees one state of the node.
//
// Strange input is no error, since a node must start with a card that reports
// nonsense: a link to a GPU that is not there, or of a GPU to itself, or of less
// than one lane, says nothing and is left out.
//
// A [Level] is found by comparing the ways down from the processor to two
// devices. As far as both go over the same bridges they are near. With no bridge
// in common NUMA nodes decide, and on a machine with one node there is nothing to
// decide. The levels are those of nvidia-smi, and network cards have them too.
//
// # What is best
//
// [Graph.Choose] compares sets of n GPUs by five sums, the first that differs
// decides:
//
//  1. The number of parts that NVLink leaves the set in, fewer is better. A
//     program in one part never has to leave NVLink; GPUs without a link are
//     parts of their own.
//  2. The NVLink bandwidth of all pairs inside, more is better: MB/s in one
//     direction. If the driver keeps the speed of any link on the node to itself,
//     lanes are counted instead, and lanes that it does not count are one.
//  3. The bandwidth of all pairs that have neither GPU in the set, among those
//     that are free ([Request].Free), more is better. This is what is left for
//     later requests: one GPU alone comes from a pair that is broken already, and
//     three are a pair and such a one.
//  4. The nearness of all pairs inside, more is better. A pair has 2 for the same
//     NUMA node, 1 if nodes are not known, 0 for different ones; of sets with the
//     same sum of these, the firmware's distances between nodes decide, where it
//     tells them (nodes of one socket are nearer); then the PCI bus, with 5 for
//     PIX, 4 for PXB, 3 for PHB, 2 for NODE, 1 if nothing is known, 0 for SYS.
//  5. The nearness of all pairs that have neither GPU in the set, more is better:
//     a node of eight in two halves is used up half by half.
//
// Of sets that are equal in all of it, the one whose first GPU comes first is
// taken, and so on: the answer depends on what is free and never on the order in
// which it was listed.
//
// Nothing is traded: no amount of nearness makes up for a broken pair. A
// kubelet that aligns NUMA nodes has its own word first, for it offers only GPUs
// of the nodes that it has settled on.
//
// # How it is found
//
// All sums are over pairs, so a set grows one GPU at a time, and what each
// further GPU would add is kept beside it. The sums over pairs outside need no
// pass of their own: they are the whole, minus what each member has with all
// others, plus the inside, which was taken off twice. Parts are counted only for
// sets whose sums could win.
//
// Every set is looked at, which for 8 of 16 GPUs is 12,870, except where twins
// make it needless. Two GPUs are twins if they are equally near to each third
// one. They can stand for each other, so the second is not tried before the first
// is in. Machines as they are sold are full of twins. The worst graph takes half
// a millisecond, and the answer is exact for every graph of up to 16 GPUs. For
// more it is exact as long as 25,000 steps are enough. Beyond that, GPUs are
// added one by one, each time the best, from every start; such a set is good, but
// may not be the best.
//
// [Graph.Spare] is the same thought for GPUs that are to be shared in pieces: the
// order in which they are best broken up is that in which requests for one GPU
// would get them. Packages that place pieces use it as a rank, to decide between GPUs
// that have as much in use.
//
// # For people
//
// [Graph.Matrix] shows all of it, with the sets that NVLink connects. [Graph.Weak] is
// where a link seems to be down. How many lanes a board should have is in no table
// here; what the GPUs beside it have is the measure.
//
// # What is not known
//
// The package refuses to know how links are found, what runs on a GPU, who has
// it, which devices a kubelet offers, and how fast a program will be: a sum of
// bandwidths is an order, not a forecast. NVLink beyond the node (an NVLink
// domain) plays no part in a choice, since all GPUs of a node are in the same one.
package topology
