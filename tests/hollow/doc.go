// SPDX-License-Identifier: Apache-2.0

// Package hollow is a node without a kubelet and without containers, as far as the agent and
// the cluster can tell: hundreds of pods cost what the agent does for them, and no more.
//
// The agent is the program that users run, one process a node. Its GPUs are the emulated
// driver's, served by this process, and a container's devices are what that driver says
// stands. The kubelet and the runtime are the fakes of tests/fakes.
//
//	n := hollow.Start(t, server, hollow.Options{Name: "node-1", Model: "A100-SXM4-80GB", GPUs: 2, Entries: …, Agent: …})
//	err := n.Admit(ctx, pod, map[string]int{"example.com/gpu-mem": 8}) // as a kubelet admits a pod
//	status := n.Status(pod)                                            // what it says of it
//	wrote, err := n.Sync(t)                                            // and, each period, of the node
//	err = n.End(ctx, pod, nil)
//
// The API server is real (tests/plane), and all that the agent, or this package in the
// kubelet's place, writes there is counted by whoever watches.
package hollow
