// SPDX-License-Identifier: Apache-2.0

// Package cleanup removes what agents have left on a node: CDI files, sockets, the features file,
// and the state directory with the pages of the memory limits. The caller may add a function that
// cleans the Node object. `gpu-agent cleanup` runs it on a node from which the agent has been
// uninstalled.
//
//	n := cleanup.Node{KubeletDir: "/var/lib/kubelet", CDIDir: "/var/run/cdi", StateDir: "/var/lib/gpu-agent", …}
//	err := n.Run(ctx)
//
// [Node.Run] first asks which pods hold devices of the agent's resources: the kubelet's
// PodResources service, its checkpoint, and the container runtime. It fails while a pod holds one,
// or while an agent uses the state directory. It removes the state directory first, since the lock
// in it shows a running agent, and then the rest. It may be interrupted at any point and run
// again. [Node.Wait] calls Run until it succeeds.
//
// The package leaves alone what operators have set (the node's partition label, the ConfigMap),
// MIG instances, and files of other programs.
package cleanup
