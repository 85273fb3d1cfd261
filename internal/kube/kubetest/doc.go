// SPDX-License-Identifier: Apache-2.0

// Package kubetest is a small API server in memory, on a real socket, for the tests of
// internal/kube, agentkube and placerkube. It also has helpers for tests that wait. It
// behaves like a real server as far as these packages rely on it: versions, lists in pages, watches
// that resume or expire, field managers, preconditions, and refusals. The tests in package
// deployments send the same requests to a real server.
//
//	s := kubetest.New(t)
//	s.Allow("", "nodes", "list", "watch")
//	s.Node("node-1", map[string]any{"zone": "a"}, nil)
//	s.Set(func() { s.Fault = … })
//
// A request that the test has not allowed fails the test. So no client package can use a permission
// that its Rules do not list. The package imports neither client package, and only tests import it.
package kubetest
