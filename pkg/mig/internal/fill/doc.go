// SPDX-License-Identifier: Apache-2.0

// Package fill finds the best way to fill a row, a card's memory, with parts. Each part has a
// place and a value, and each free run between parts has a value too. Each [Dim] is a thing that
// the parts must have an exact number of. [Search] describes why a search from left to right is
// exact.
//
// A caller fills in a [Search], prepares it, and solves it for each combination of numbers that
// it needs: the states that these have in common are solved once. A Search can be used again,
// since its tables cost more than the search in them.
//
// The package does not know what a part is made of, what its value means, and which numbers are
// allowed together.
package fill
