// SPDX-License-Identifier: Apache-2.0

// Command pause is the first process of every pod on the test node: it holds
// the pod's namespaces open, reaps what is left to it and ends when asked to.
//
// The usual one comes from a registry, and none can be reached where the tests
// run; so this one is built here, statically, and put into an image by the
// cluster program. It knows nothing of Kubernetes.
package main
