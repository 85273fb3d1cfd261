// SPDX-License-Identifier: Apache-2.0

// Package cleanup takes away what agents have left on a node: CDI files, sockets, the
// features file, the state directory with the memory limits' pages, and what the caller
// adds for the Node object. It is `gpu-agent cleanup`, for a node from which the agent
// has been uninstalled.
//
//	n := cleanup.Node{KubeletDir: "/var/lib/kubelet", CDIDir: "/var/run/cdi", StateDir: "/var/lib/gpu-agent", …}
//	err := n.Run(ctx)
//
// [Node.Run] first asks who holds devices of the agent's resources: the kubelet's
// PodResources service, its checkpoint, and the container runtime. It refuses while
// anybody does, and while an agent has the state directory. Then it removes, in an order
// that can be interrupted anywhere and begun again: the state directory first, because
// its lock shows a running agent; the rest after it. [Node.Wait] tries until nothing is
// in the way.
//
// It touches nothing that operators have set (the node's partition label, the
// ConfigMap), no MIG instance, and no file of anybody else's.
package cleanup
