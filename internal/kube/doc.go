// SPDX-License-Identifier: Apache-2.0

// Package kube is the connection to the Kubernetes API server, with watches and lists. It has two
// client packages: internal/kube/agentkube for the agent, and internal/kube/placerkube for the
// placer. These read and write the objects; neither imports the other. No other package speaks to
// the API server.
//
//	server, err := kube.Connect(kube.Options{Domain: "example.com", Logger: log}, 20)
//	…
//	err = server.Follow(ctx, kube.Target{Resource: kube.Nodes, Name: "node-1"}, func(o *unstructured.Unstructured) {
//		// o is nil if there is no such Node
//	})
//
// # Following
//
// [Server.Follow] lists one object by its name, watches it from there, and reports it after every
// list and event. A watch that ends is resumed at its version. After any failure, an expired
// resource version included, Follow starts over with a list, which costs one object. It also
// repeats the list every [Options].Relist, so that a lost event does no lasting harm.
//
// Follow treats several objects that a field selector chooses in the same way. It lists a whole
// resource in pages and reports each object to a [Census], which knows which objects are gone.
//
// While the API server is unreachable, Follow reports nothing, and the caller keeps what it saw
// last. The log has one line when the outage begins, and one when it is over ([Server.Note]). Only
// the end of the context ends a watch.
//
// # Memory
//
// An agent runs on every node and must stay small. So there is no typed client (tens of megabytes
// of generated code), no informer and no cache, but only the dynamic client. [Decode] turns its
// objects into values of k8s.io/api, which costs one megabyte. Of objects that are large and many, such as pods, a
// [Target] can ask for the metadata alone.
//
// # Permissions
//
// Each client package lists every verb that it uses on every resource as a [Rule]. Tests compare
// the manifests with that list.
//
// The package does not know what a partition, a pod's device or a label means.
package kube
