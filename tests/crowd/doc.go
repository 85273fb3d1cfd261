// SPDX-License-Identifier: Apache-2.0

// Package crowd sends crowds of pods to a small cluster whose nodes are hollow, and counts
// what becomes of them.
//
// # What is real
//
// etcd, the API server, the scheduler and the controller of claims are Kubernetes' own
// (tests/plane), and the agent is the program that users run, one process a node. Each has
// GPUs of the emulated driver, and containers' GPUs are what that driver says stands.
//
// # What is not
//
// There is no kubelet and there are no containers. Each node's kubelet is played, as far as
// the agent can tell: it registers the driver, has the claims of a pod that is bound to the
// node prepared over gRPC, says that its container runs, and has them unprepared when that
// has ended, before the pod is said to have succeeded. So hundreds of pods cost what the
// scheduler and the agent do for them, and no more.
//
// # What is asserted
//
// Nobody is refused: no Prepare fails, not even once. Each GPU is in one mode at any moment,
// by the claims at the API server, and each running pod has what it was given, by the
// hardware. For a pod that is pending there is no room, by a search of its own (tests/room).
// How much of the cards is in use is held against a simulated first fit of the same
// requests, which shares nothing with the scheduler or the product.
//
// Then nodes are laid out anew while pods come and go. Whoever was placed by a layout that is
// no more may be ended then, and nobody who runs may lose anything.
//
// Groups of pods that are bound together or not at all (PodGroups) come while answers of the placer are
// late, by a scheduler that has the gates for them. None of them is bound in part.
//
// Of GPUs under MPS pods have shares. Each node then has the supervisor of the daemons, with emulated
// ones: a pod's claim is prepared only while the server of its GPU stands.
//
//	go test ./tests/crowd -short           two waves of each kind; nobody judges how full the cards are
//	go test ./tests/crowd                  one seed
//	go test ./tests/crowd -long -timeout=2h
//	go test ./tests/crowd -seed 7 -v
package crowd
