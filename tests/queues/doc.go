// SPDX-License-Identifier: Apache-2.0

// Package queues sends Jobs through the real Kueue to nodes with GPUs, on-prem and in a cloud,
// and looks at where they run.
//
// # What is real
//
// etcd, the API server, the scheduler and the controllers of Jobs and other workloads are
// Kubernetes' own (tests/plane), Kueue, KubeRay and JobSet are their releases, and gpu-agent is the program that users
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
// Images are a stand-in, volumes are none, and a server of the test's own stands in for Prometheus
// and its adapter. No Ray runs: what counts is what its pods ask for, and what they are told.
//
// The programs of Kueue, KubeRay and JobSet are built by the stage "kueue"; without them the tests are
// skipped.
package queues
