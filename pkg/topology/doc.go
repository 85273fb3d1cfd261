// SPDX-License-Identifier: Apache-2.0

// Package topology finds how near the GPUs of a node are to each other, and chooses GPUs that fit
// together. It knows the NVLink lanes between GPUs, NVSwitches, the PCI bridges between them, and
// their NUMA nodes.
//
//	topology.Read(os.DirFS("/sys"), inv)     // NUMA nodes, PCI paths, network cards
//	g := topology.New(inv)
//	g.Between("GPU-a", "GPU-b")              // {NVLink: 18, Switch: true, MBps: 478116, NUMA: Same, Level: PXB}
//	g.Choose(topology.Request{Available: free, N: 4})
//	g.Matrix().WriteText(os.Stdout)          // as nvidia-smi topo -m
//
// # The graph
//
// The driver reports links GPU by GPU, and its reports may be incomplete: one end of a link may be
// down, a peer may be in another virtual machine, a card may be too broken to answer. A [Graph]
// makes one [Pair] of each two GPUs, the same from both sides. It is made once for an inventory and
// never changes. To choose from it takes no call of the driver and no lock.
//
// Strange input is no error, since a node must start with a card that reports nonsense. New leaves
// out a link to a GPU that does not exist, of a GPU to itself, or of less than one lane.
//
// A [Level] comes from comparing the ways from the processor to two devices: the more bridges both
// have in common, the nearer they are. With no common bridge, NUMA nodes decide. The levels are
// those of nvidia-smi, and network cards have them too.
//
// # What is best
//
// [Graph.Choose] compares sets of n GPUs by five sums. The first that differs decides:
//
//  1. The number of parts that NVLink connects the set into: fewer is better, since a program in
//     one part never has to leave NVLink. A GPU without a link is a part of its own.
//  2. The NVLink bandwidth of all pairs inside, in MB/s in one direction: more is better. If the
//     speed of any link on the node is unknown, lanes are counted instead; a link with an unknown
//     number of lanes counts as one.
//  3. The bandwidth of all pairs outside, of free GPUs that are not in the set ([Request].Free):
//     more is better, for later requests. So a single GPU comes from a pair that is broken
//     already, and three GPUs are a pair and such a one.
//  4. The nearness of all pairs inside: more is better. First, the NUMA nodes of each pair count: 2
//     for the same, 1 for unknown, 0 for different ones. Then the firmware's distances between
//     different nodes count, if it reports them. Last comes the PCI bus: 5 for PIX, 4 for PXB, 3
//     for PHB, 2 for NODE, 1 for unknown, 0 for SYS.
//  5. The nearness of all pairs outside: more is better. So a node of two halves is used up half by
//     half.
//
// Of sets that are equal in all five, Choose takes the one whose first GPU comes first, and so on.
// So the result depends on which GPUs are free, and not on the order of the lists. No amount of a
// later sum outweighs an earlier one. If the kubelet aligns NUMA nodes, it offers only GPUs of the
// nodes that it has chosen.
//
// The result is exact for up to 16 GPUs. Beyond that, it is exact if the search needs at most
// 25,000 steps. Otherwise Choose adds GPUs one by one, each time the best, from each start. Such
// a set is good, but may not be the best. The search is described in choose.go.
//
// [Graph.Spare] orders GPUs that are to be shared in pieces: first the one that a request for a
// single GPU would get. Packages that place pieces use the order to decide between GPUs with the
// same amount in use.
//
// # For people
//
// [Graph.Matrix] shows all of it, with the sets that NVLink connects. [Graph.Weak] lists links that
// seem to be down. It compares GPUs of a model with each other, since the package has no table of
// boards.
//
// # What is not known
//
// The package does not know how links are found, what runs on a GPU, who holds it, which devices a
// kubelet offers, or how fast a program will be: a sum of bandwidths orders sets, and predicts
// nothing. NVLink beyond the node does not count, since all GPUs of a node are in the same NVLink
// domain.
package topology
