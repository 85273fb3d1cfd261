// SPDX-License-Identifier: Apache-2.0

// Package piece defines the pieces that a GPU can be given out in: the [Kind]s, a closed set,
// and the [Piece]s themselves. One file describes each kind: its words, its fields and their
// record, what it clashes with, the cap of its holder, and its part of a GPU.
//
//	whole       Whole{}                        a GPU for one holder alone
//	units       Units{Set: 0-23, Unit: 1024}   24 GiB of a shared GPU, with a cap
//	replica     Replica{Number: 2, Of: 4}      a quarter of a shared GPU, with a cap
//	placement   Placement{3g.40gb@4}           a MIG instance, which the hardware isolates
//
// Code that works with pieces calls their methods, and does not look at their kind:
//
//	if piece.Clash(a, b, card) { … }             // both cannot be given out at once
//	g.Piece, g.Cap = p.In(share)                 // what its holder may have
//	if at, ok := g.Placement(); ok { … }         // a MIG instance has to be made
//	if kind.Shared() { … }                       // a cap separates its holders
//
// Two other tables have a row for each kind. That of the device plugin
// (internal/deviceplugin/kinds.go) presents it to the kubelet, that of dynamic resource
// allocation (internal/dra/kinds.go) in a ResourceSlice. So a new kind needs a file here, a line
// in the list of kinds, a row in either table, and a picture in the status page.
//
// # Divisions
//
// A [Division] is how a GPU is divided into devices of one kind: 79 units of 1024 MiB, four
// replicas, these placements. [Divide] makes it from what a partition says. [Infer] makes it
// from the pieces that are held, if nothing else is known.
//
// # Unknown kinds
//
// A newer version may have written a record with a kind that this version does not know. Such a
// piece becomes an [Unknown], and is written back unchanged. It clashes with every piece, so its
// GPU is given to no other holder until it has ended, and the node reports it. [Kind.Check]
// returns an [UnknownKind] error. No code treats an unknown kind like a known one.
//
// # Limits
//
// The package has no clock and knows no driver, no kubelet and no device IDs.
package piece
