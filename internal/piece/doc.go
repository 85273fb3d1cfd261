// SPDX-License-Identifier: Apache-2.0

// Package piece has what somebody can have of a GPU: the [Kind]s of pieces, a closed set, and
// the [Piece]s themselves. Each kind is described once, in the file of its name: its words, its
// fields and their record, what it clashes with, the cap of its holder, and its part of a GPU.
//
//	whole       Whole{}                        a GPU for one holder alone
//	units       Units{Set: 0-23, Unit: 1024}   24 GiB of a shared GPU, held to a cap
//	replica     Replica{Number: 2, Of: 4}      a quarter of a shared GPU, held to a cap
//	placement   Placement{3g.40gb@4}           a MIG instance, which the hardware holds apart
//
// Whoever works with pieces asks them and does not look what kind they are:
//
//	if piece.Clash(a, b, card) { … }             // two promises of the same memory
//	g.Piece, g.Cap = p.In(share)                 // what its holder may have
//	if at, ok := g.Placement(); ok { … }         // an instance is to be made
//	if kind.Shared() { … }                       // a cap holds its holders apart
//
// Two tables know the kinds besides, with a row for each: that of the device plugin
// (internal/deviceplugin/kinds.go) says what it is to the kubelet, that of dynamic resource
// allocation (internal/dra/kinds.go) what it is in a ResourceSlice. So a new kind is a file
// here, a line in the list of them, a row in either table, and a picture in the status page.
//
// # Divisions
//
// A [Division] is into which devices of one kind a GPU is divided: 79 units of 1024 MiB, four
// replicas, these placements. [Divide] makes it from what a partition says, and [Infer] from
// what somebody has of a GPU when nothing else is known.
//
// # What is not known
//
// A record can be of a newer version, with a kind that this one does not know. It is read as
// an [Unknown], and written as it was. That clashes with everything, so its GPU is given to
// nobody until it has ended, and the node says so. [Kind.Check] returns the error, an
// [UnknownKind]; nothing falls into a default.
//
// The package has no clock and knows no driver, no kubelet and no device IDs.
package piece
