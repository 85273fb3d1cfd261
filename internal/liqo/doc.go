// SPDX-License-Identifier: Apache-2.0

// Package liqo answers other clusters that ask for GPUs of this one through Liqo (v1.2). Such
// a cluster, a consumer, asks with a ResourceSlice (authentication.liqo.io), which Liqo copies
// into this cluster. The consumer then gets a virtual node with what the slice's status
// grants. Liqo's own class of slices grants anything. This package answers slices of the
// class "gpu-agent", and grants only what there is.
//
//	door := liqo.New(books, liqo.Options{API: api, Domain: "example.com", …})
//	door.Set(true, slice)   // and Tenants, with false
//	door.Listed(true)
//	err := door.Run(ctx)
//
// [Grants] decides. It is pure, but for the books, which it has keep room. [Door] is told of
// objects, and writes the decisions.
//
// # What is granted
//
// A first request is granted in full or denied. The message of a denial has what the consumer
// could have.
//
// A grant stays. If room for it has gone, it is reduced, and later grows again up to what the
// slice asks for. If the consumer asks for more than it has, it gets all of it or keeps what
// it has. A slice with a grant is never denied, since Liqo then would not change quota
// and virtual node. To take something back, the package accepts the slice with less. A
// resource or label that is no longer granted is written as zero or empty, since the virtual
// node would keep one that is left out.
//
// If room is missing, the package waits before it reduces the grant: what a pod has left
// looks held for a minute. If the nodes no longer have a resource at all, the grant is
// reduced at once.
//
// # No unit for two consumers
//
// The books keep what a slice's status grants. No other consumer is granted it until the
// status grants less. A process that begins reads the statuses before it grants anything. A
// process that begins to lead reads them again from the server, since a watch may be late.
//
// A status is written only if the object still has the version that was read. If another
// client has written meanwhile, the package decides again. It keeps Liqo's part of the status
// as it was.
//
// Pods that run here for a consumer use the room that is kept for it. They are known by
// Liqo's label with the slice's user ([QuotaOf]).
//
// # Who is trusted
//
// Liqo decides who a consumer is. Nothing is granted until the slice's condition
// Authentication is Accepted and there is a Tenant. Liqo denies the slices of a drained
// tenant, and may learn of the drain first. So the package reads a Tenant again before it
// writes to a slice that Liqo has denied. A cordoned tenant is granted nothing new.
//
// Consumers may write the status of their slices. For this class an admission policy forbids
// that (deployments/placer/liqo). Without the policy a consumer can claim room that happens to
// be free. The package then takes back what exceeds the slice's request, and what has no room.
//
// The package has its own types for Liqo's objects, and does not import Liqo's Go module.
package liqo
