// SPDX-License-Identifier: Apache-2.0

// Package fill finds the best way to fill a row with parts: what a card's memory is to be made of, from left
// to right, where each part has a place and a value, each free run between them is worth
// something, and of each thing (a [Dim]) there must be an exact number. pkg/mig's essay tells
// why that is enough.
//
// A [Search] is filled in, prepared and solved, for as many numbers of each Dim as are of
// interest: the states that they have in common are solved once. It can be used again, since
// its tables cost more than the search in them.
//
// The package does not know what a part is of, what its value means, and which numbers are
// allowed together.
package fill
