// SPDX-License-Identifier: Apache-2.0

// Command kubectl-gpu is a plugin for kubectl: `kubectl gpu` shows the GPUs of a cluster, and says why
// a pod has none.
//
//	kubectl gpu            the nodes: modes, what is free and in which pieces, what is wrong
//	kubectl gpu why        why a pod, a Job or a node has no GPU
//	kubectl gpu status     the status of a node's agent
//	kubectl gpu top        what containers use of their GPU memory
//	kubectl gpu plan       what a partition file would do to nodes
//	kubectl gpu check      is a partition file right, for every node
//	kubectl gpu usage      who was granted what, and used it
//	kubectl gpu logs       the log of a node's agent
//	kubectl gpu bundle     all that a report needs about a node, in one archive
//	kubectl gpu verify     one example pod of each resource that a node offers
//	kubectl gpu version
//
// It runs where people work, on Linux and macOS, with the credentials of the person who runs it. It
// is static and holds none of the agent's packages but those that the placer has, too.
//
// This directory turns flags into options. internal/kubectlgpu does the work, and internal/command
// has what command lines have in common.
package main
