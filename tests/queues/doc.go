// SPDX-License-Identifier: Apache-2.0

// Package queues sends Jobs through the real Kueue to nodes with GPUs, on-prem and in a cloud,
// and looks at where they run.
//
// # What is real
//
// etcd, the API server, the scheduler and the controller of Jobs are Kubernetes' own
// (tests/plane), Kueue is its release (tests/kueue), and gpu-agent is the program that users
// run: an agent a node, the placer, which the scheduler asks too, and `export kueue`, which
// makes Kueue's objects and configuration from what the agents have published. The placer has
// the rights and the policy that are shipped.
//
// # What is not
//
// Nodes are hollow (tests/hollow): no kubelet and no containers, and the emulated driver's GPUs.
// A pod that is bound is admitted as a kubelet admits it, says that it is ready, and runs until
// the test ends it, or until somebody deletes it.
//
// The program of Kueue is built by the stage "queues"; without it the tests are skipped.
package queues
