// SPDX-License-Identifier: Apache-2.0

// Package plane is a cluster's control plane without a node, for tests: the real etcd and
// kube-apiserver on loopback, and the real scheduler and controllers where a test wants
// them. The programs are those of the test node, from the cache; without them a test is
// skipped. All of it ends with the test, and dies with the test's process.
//
//	s := plane.Start(t)
//	s.Scheduler(t, "")
//	err := s.Do(t, nil, http.MethodPost, "/api/v1/nodes", plane.JSON, node, nil)
//
// [Server.Kueue], [Server.KubeRay] and [Server.JobSet] start the real ones, which are built by `cluster build --with
// kueue --with kuberay --with jobset`, and [Server.StartPlacer] starts the product's placer.
//
// Who runs on the nodes, and what is installed, is the caller's business.
package plane
