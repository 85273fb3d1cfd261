// SPDX-License-Identifier: Apache-2.0

// Package liqo answers other clusters that ask for GPUs of this one through Liqo (v1.2). A
// consumer asks with a ResourceSlice (authentication.liqo.io), which Liqo copies here, and gets
// a virtual node with what the slice's status grants. Liqo's own class grants anything. The
// class "gpu-agent" is answered by this package, which grants what there is.
//
//	door := liqo.New(books, liqo.Options{API: api, Domain: "example.com", …})
//	door.Set(true, slice)   // and Tenants, with false
//	door.Listed(true)
//	err := door.Run(ctx)
//
// [Grants] decides, and is pure but for the books, which it asks to keep room; [Door] hears of
// objects, and writes.
//
// # What is granted
//
// A first request is granted in full or denied, with what could be had in the message. What
// has been granted stays: it is reduced where the room has gone, and then grows again up to
// what is asked for. Who asks for more than it has gets all of it or keeps what it has. A slice
// that was granted something is never denied, since Liqo then leaves quota and virtual node as
// they are: to take something back is to accept less. What is not granted any more is zero,
// since the virtual node would keep a name, or a label, that is left out.
//
// Room that is missing is waited for, since what a pod has left looks held for a minute. What
// the nodes do not have at all any more goes at once.
//
// # No unit for two
//
// What a slice's status grants is kept in the books, and nobody else is granted it until
// the status says less. A process that begins reads the statuses before anything is given out,
// and one that begins to lead reads them anew at the server, not from a watch that may be late.
// A status is written in the version that was read; where somebody else has written, it is
// decided again. The rest of the status is Liqo's, and is written back as it was.
//
// Pods that run here for a consumer use what is kept for it. They are known by Liqo's label
// with the slice's user ([QuotaOf]).
//
// # Whose word counts
//
// Liqo's, on who a consumer is: nothing is decided until the condition Authentication is
// Accepted and there is a Tenant. A drained tenant's slices are left to Liqo, which denies them;
// where it has done so, the Tenant is read anew before anything is written, because Liqo may
// have heard of it first. A cordoned tenant is granted nothing new.
//
// Consumers have the right to write the status of their slices. An admission policy keeps them
// from it for this class (deployments/placer/liqo); without it a consumer can claim what
// happens to be free, and would be found out: what a status grants beyond what is asked for is
// taken back, and so is what there is no room for.
//
// The package knows Liqo's objects as plain values: its Go module is not needed.
package liqo
