// SPDX-License-Identifier: Apache-2.0

// Package fleet measures what many nodes cost a cluster: how often agents write to the API
// server, how much those who watch have to read, what the placer holds in memory, and how
// soon it answers kube-scheduler.
//
// TestFleet has hollow nodes (tests/hollow), each with an agent of its own as users run it,
// kubelets that tell of their devices every ten seconds, kube-scheduler with the placer's
// configuration as it is shipped, and pods that come and go: 30 an hour for each node. What
// is written is counted by a watch, as the API server tells it to everybody.
//
// TestSize has no agents. It writes GPUNodes and pods of many more nodes than a machine can
// run agents for, keeps them changing as often as agents may, and asks the placer's door as
// kube-scheduler does.
//
//	go test ./tests/fleet -v                      20 nodes for a minute; 100 nodes, 500 pods
//	go test ./tests/fleet -v -long -timeout=1h    200 nodes for ten minutes; 1,000 nodes, 5,000 pods
//	go test ./tests/fleet -v -run Size -nodes=5000
//
// Numbers of writes are asserted. Times and memory are printed.
package fleet
