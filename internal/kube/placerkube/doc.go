// SPDX-License-Identifier: Apache-2.0

// Package placerkube is the placer's half of what speaks to the Kubernetes API server;
// internal/kube has the connection and the watches. A placer is one process for a cluster.
//
//	cluster, err := placerkube.New(kube.Options{Domain: "example.com", UserAgent: "gpu-placer", Logger: log})
//	…
//	err = cluster.Watch(ctx, books)
//
// [Cluster.Watch] follows the cluster's nodes, pods and GPUNodes, and lists them in pages.
// [Cluster.Wake] writes an annotation of a Node, so that schedulers look at it again. By a
// [Lease] one of several such processes leads. [Rules] lists what all this takes.
// [Cluster.Follow], [Cluster.Read], [Cluster.WriteStatus] and [Cluster.Annotate] are for objects
// of other projects, of which this package knows nothing; [LiqoRules] and [KueueRules] list what
// these take.
//
// The package does not know what fits where, nor what an answer of the placer means.
package placerkube
