// SPDX-License-Identifier: Apache-2.0

// Package kube is how the product talks to the Kubernetes API server: the connection, watches
// and lists. What is asked for and written is in its two halves, internal/kube/agentkube and
// internal/kube/placerkube, which are of two programs and do not know each other. No package
// beside these three knows the API server.
//
//	server, err := kube.Connect(kube.Options{Domain: "example.com", Logger: log}, 20)
//	…
//	err = server.Follow(ctx, kube.Target{Resource: kube.Nodes, Name: "node-1"}, func(o *unstructured.Unstructured) {
//		// o is nil where there is no such Node
//	})
//
// # Following
//
// [Server.Follow] lists one object by its name, watches it from there, and tells of it at every
// list and event. A watch that ends is resumed at its version; any failure, an
// expired resource version included, starts over with a list, which costs one
// object. The list is also repeated every [Options].Relist, so that a lost
// event does no lasting harm. Several objects that fields select are followed in the same way;
// those of a whole resource are listed in pages and told to a [Census], which knows which are
// gone.
//
// While the API server is unreachable nothing is told: what was seen last
// stays in force, and the log has one line when the outage begins and one when it is
// over ([Server.Note]). Only the end of the context ends a watch.
//
// # Memory
//
// An agent runs on every node and must stay small, so there is no typed client (tens of
// megabytes of generated code), no informer and no cache: only the dynamic client. What it
// brings is made a value of k8s.io/api by [Decode], which costs one megabyte.
//
// # Rights
//
// A half lists every verb that it uses on every resource as a [Rule], and the manifests are
// tested against that list.
//
// The package does not know what a partition, a pod's device or a label means.
package kube
