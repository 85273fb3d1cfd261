// SPDX-License-Identifier: Apache-2.0

// Package kueue starts the real Kueue beside an API server, for tests: the manager's program as
// a process, and its definitions and webhooks as its release installs them. The program is
// built by `cluster build --with kueue`, the manifests come from its module.
//
//	err := kueue.Start(ctx, cluster, kueue.Options{Bin: bin, Dir: dir, Kubeconfig: path,
//		Webhooks: port, Health: otherPort, Configuration: exported, Gates: map[string]bool{"ConcurrentAdmission": true}})
//
// [Cluster] says how to ask that API server and how to run a process beside it: the control plane
// without nodes has one (tests/plane, Server.Kueue), and so has the real node (tests/lab,
// Node.StartKueue).
//
// # What is as its users have it
//
// The configuration is the one that its manifests carry, with what a test merges into it, as a
// user would: what `gpu-agent export kueue --configuration` prints, and feature gates. Job, Pod
// and all other integrations are on, with their webhooks. It makes its webhooks' certificates
// itself.
//
// # What is not
//
// It runs with an administrator's rights, as one process, so without leader election, and without
// the API for looking at pending workloads, which would be one more server. A cluster without a
// proxy for Services reaches its webhooks as a Service that is another name for the machine
// itself. The certificates are in a Secret; where a kubelet would mount that, [Start] writes
// files.
package kueue
