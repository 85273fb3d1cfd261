// SPDX-License-Identifier: Apache-2.0

// Package agents is an agent on a node, for tests in virtual time: it chooses devices for pods as gpu-agent does
// (pkg/mig, pkg/timeslice), and writes a GPUNode when gpu-agent would. It has no driver, no kubelet and no API server.
//
//	n := agents.New(t, "node-1", "../../tests/testdata/h100-80.json", "example.com")
//	n.GPUs = append(n.GPUs, agents.NewGPU("GPU-1", true))
//	ids, err := n.Admit("train-0", "example.com/mig-1g.10gb", 1)
//	status := n.Says()
//
// A GPU has MIG on demand, or else memory units. The kubelet names the devices of pods in their status, so the GPUNode
// names no holders.
package agents
