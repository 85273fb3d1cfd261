// SPDX-License-Identifier: Apache-2.0

// Package kubetest is a small API server for the tests of internal/kube and of its two halves,
// in memory and on a real socket, and what those tests wait with. It does as a real server
// does in what the halves rely on: versions, lists in pages, watches that are resumed or have
// expired, who manages which field, preconditions, and refusals. What a real server makes of
// the same requests is tried in package deployments.
//
//	s := kubetest.New(t)
//	s.Allow("", "nodes", "list", "watch")
//	s.Node("node-1", map[string]any{"zone": "a"}, nil)
//	s.Set(func() { s.Fault = … })
//
// A request that no test has allowed fails the test, so a half cannot come to need a right
// that its Rules do not list. The package knows neither half, and no product imports it.
package kubetest
