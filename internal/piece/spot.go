// SPDX-License-Identifier: Apache-2.0

package piece

import "strings"

// spotSuffix ends the names of the resources that spot pods ask for.
const spotSuffix = ".spot"

// HasSpot reports whether pieces of a kind can be offered to spot pods. Replicas cannot: each is a turn on
// the GPU beside the others' whatever memory they use.
func (k Kind) HasSpot() bool { return k.Known() && (!k.Shared() || k.Together()) }

// InSpot returns the name by which spot pods ask for the devices of a guaranteed resource.
func InSpot(resource string) string { return resource + spotSuffix }

// OfSpot returns the guaranteed resource of the same devices, and whether a resource is one that spot pods ask
// for. A guaranteed resource is its own.
func OfSpot(resource string) (guaranteed string, spot bool) {
	return strings.CutSuffix(resource, spotSuffix)
}
