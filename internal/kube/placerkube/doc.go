// SPDX-License-Identifier: Apache-2.0

// Package placerkube connects the placer to the Kubernetes API server. A placer is one process
// for a whole cluster. internal/kube has the connection and the watches.
//
//	cluster, err := placerkube.New(kube.Options{Domain: "example.com", UserAgent: "gpu-placer", Logger: log})
//	…
//	err = cluster.Watch(ctx, books)
//
// [Cluster.Watch] follows the cluster's Nodes, pods and GPUNodes, and lists them in pages.
// [Cluster.Wake] writes an annotation of a Node, so that the scheduler looks at this Node
// again. A [Lease] elects the leader of several placers. [Rules] lists the permissions for all
// this.
//
// [Cluster.Follow], [Cluster.Read], [Cluster.WriteStatus] and [Cluster.Annotate] work on
// objects of other projects (Liqo and Kueue), whose content this package does not know.
// [LiqoRules] and [KueueRules] list the permissions for these.
//
// The package does not know which pod fits where, nor what an answer of the placer means.
package placerkube
