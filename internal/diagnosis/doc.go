// SPDX-License-Identifier: Apache-2.0

// Package diagnosis explains why a pod, a Job or a node has no GPU. It turns objects of the API
// server into one cause, the next step, and what the answer follows from. `kubectl gpu why` prints
// it.
//
//	d := diagnosis.Facts{Domain: "example.com", Resources: "example.com", Pod: pod, Events: events,
//		GPUNodes: nodes}.Explain()
//	fmt.Println(d.Cause) // no GPU has 50 of example.com/gpu-mem in one piece: …
//
// The caller reads the objects and fills in [Facts]. What it may not read it names in
// [Facts.Unseen], and the answer follows from the rest: the author of a pod sees the pod, its
// Events, and often the GPUNodes, but neither Nodes nor the agents' pods. An answer never depends on
// one object alone if another one says the same. So a cordoned node is known from the Node, or from
// the scheduler's message and the room in the GPUNode.
//
// # How the cause is found
//
// The rules for a pod follow its life: first what ended its containers, then what the kubelet
// refused, then what its containers wait for, and for a pod without a node what each node answers to
// its requests. The first finding is the cause, and the others follow it in the answer. The texts
// that the rules look for are those of the agent, the kubelet, the scheduler, Kueue and the
// container's runtime. The tests take the agent's texts from the code that writes them.
//
// If a pod has no node, each node answers for itself: it does not offer the resource, no GPU is
// large enough, the free part is in pieces, it is cordoned, and so on. The cause is the answer of the
// nodes that come nearest to having room, since that is the least that has to change.
//
// # Trust
//
// Tenants write pods, their logs and their names, and nodes write GPUNodes. The package computes
// with numbers of a GPUNode only if [gpunode.Status.Check] accepts it. It replaces characters that
// could move a terminal's cursor, and cuts long texts. It has no clock, reads nothing and sends
// nothing.
package diagnosis
