// SPDX-License-Identifier: Apache-2.0

// Package label computes a node's labels from its inventory, its links and the wanted layouts of
// its GPUs.
//
// Schedulers, quota systems and people choose nodes by labels. Kueue's flavors and an autoscaler's
// pools group nodes by labels, so a node whose label changes becomes another node to them. So a
// label here has few values, and it changes only when the machine or the partition changes. Labels
// follow the wanted partition, and not the instances and modes that come and go while the hardware
// is changed.
//
//	labels := label.Own("example.com", label.Node{Inventory: inv, Graph: topology.New(inv),
//		Partition: "research", Wanted: desired.GPUs})
//	labels["example.com/gpu.joined"] // "8": eight GPUs are connected by NVLink
//
// If no GPU is known, because the driver is not loaded yet or has been closed, both functions
// return nil. The caller then keeps the labels that it wrote before.
//
// # The agent's own labels
//
// [Own] returns these, below the domain:
//
//	gpu.model             the most frequent model, blanks as "-"
//	gpu.memory            MiB of one GPU of that model, all of it
//	gpu.count             GPUs that the driver lists and can describe
//	gpu.mode              whole, shared, mig, dynamic or off, or mixed
//	gpu.partition.active  the partition in force; gpu.partition.state, which
//	                      the agent writes beside these, is its state
//	gpu.joined            the most GPUs that one pod can have and that NVLink connects;
//	                      1 without NVLink
//	gpu.nvlink            the fewest NVLink lanes that work at one GPU of that set
//	gpu.nvlink-domain     cluster and clique of the NVLink fabric beyond the node
//	gpu.rdma              infiniband, efa, roce or none: the best network that is up,
//	                      or if none is up, the best that there is a card for
//	gpu.driver-version    of the kernel driver
//	gpu.cuda-version      the newest that the driver serves
//
// A label whose value is not known is absent. A GPU that the partition does not name does not count
// for gpu.mode unless it is in MIG mode.
//
// # NVIDIA's labels
//
// Many manifests select nodes by the labels that NVIDIA's GPU Feature Discovery writes. [NVIDIA]
// computes the same labels for nodes where it does not run. It follows v0.19.3, with --mig-strategy
// mixed if a GPU is divided into MIG instances and without one otherwise, and with replicas as time
// slices of nvidia.com/gpu. It differs on purpose in this:
//
//   - gfd.timestamp is left out. It is the time at which GPU Feature Discovery was
//     started, which tells nothing about the node and is new with every start.
//   - Labels about MIG and replicas follow the wanted partition. GPU Feature Discovery
//     counts the instances of the moment.
//   - Instances that are created on demand are not counted (no mig-<profile>.…): they
//     come and go with pods. mig.strategy is "mixed" for the sake of their resources.
//   - GPU Feature Discovery does not know units of GPU memory. A GPU that is
//     shared in units counts as one that is not shared: one replica, no strategy.
//   - On a node with several models, the labels are of the most frequent one. GPU Feature
//     Discovery takes any, and another after its next start. If GPUs of one model are
//     divided into different numbers of replicas, they count as not shared.
//   - A value that the API does not allow (a name of more than 63 characters, or one that
//     ends in a dot) is shortened: letters are removed from the end of a product's name,
//     never from its suffix. GPU Feature Discovery writes it as it is, and the API
//     refuses the label.
//   - A GPU that is broken is left out or described as before; GPU Feature
//     Discovery then writes nothing at all.
//   - A MIG profile that the driver has not described yet lacks memory, multiprocessors
//     and engines until then. Some drivers describe profiles only in MIG mode.
//
// The package does not know where the labels are written, nor by which program.
package label
