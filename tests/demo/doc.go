// SPDX-License-Identifier: Apache-2.0

// Command demo is what `make demo` and `make demo-down` run: a real one-node
// Kubernetes with an emulated NVIDIA driver, the agent deployed on it as its
// DaemonSet, and pods that ask for slices of GPUs. The screen shows each step,
// what came of it and the seconds it took:
//
//	demo up      everything from the first build to the last pod; the node stays
//	demo down    end that node; nothing of it is left but files in the cache
//
// `make burst` shows two nodes side by side, on-prem and a cloud, and where Kueue and the
// placer have Jobs run, and draws that (docs/burst.svg is one of these pictures):
//
//	demo burst       everything from the first build to the last Job; the nodes stay
//	demo burst-down  end those
//
// What it shows it also checks, from inside the containers where that can be:
// the first thing that is not as it says ends the demo with the reason and exit
// status 1. The node then stays, to be looked at; `demo down` ends it, and so
// does the next `demo up`.
//
// The work is done by packages lab and burst, as for the end-to-end tests. This program
// knows the story to be told, and neither how a node is run nor what the agent
// does inside.
package main
