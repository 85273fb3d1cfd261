// SPDX-License-Identifier: Apache-2.0

// Package kubectlgpu does what the commands of `kubectl gpu` say: it reads by internal/kube/pluginkube,
// and turns what it has read into tables, JSON, archives and verdicts. cmd/kubectl-gpu has the flags.
//
//	fleet, err := kubectlgpu.ReadFleet(ctx, client)
//	err = fleet.Write(os.Stdout)
//
// Each command has a type whose fields are its JSON form (`-o json`), and a Write for people. Fields
// are added and never renamed.
//
// What an agent answers is a claim of its node. The package prints it without characters that could
// move a terminal's cursor, bounds its length, and computes nothing with it but sums. A node that
// does not answer costs its own lines alone: the others are printed, and the error follows.
//
// The package does not know how a cluster is reached, nor why a pod waits: internal/diagnosis does.
package kubectlgpu
