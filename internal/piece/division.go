// SPDX-License-Identifier: Apache-2.0

package piece

import (
	"slices"

	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
)

// Division is into which devices of one kind a GPU is divided. The zero Division has none.
type Division struct {
	Kind Kind `json:"kind"`
	// N is the number of devices: 1 of a whole GPU.
	N int `json:"n"`
	// Unit is the size of a device, in MiB, 0 where the kind has no such size or it is not known.
	Unit gpu.MiB `json:"unitMiB,omitempty"`
	// Placements are the MIG devices, in the order of the list; N counts them.
	Placements []mig.Placement `json:"placements,omitempty"`
	// Alone are the numbers of the only devices, where they linger without the others; empty
	// where the first N are meant.
	Alone Set `json:"alone,omitempty"`
}

// Wish is how a partition wants a GPU to be divided.
type Wish struct {
	// Mode is the partition's word.
	Mode string
	// Replicas are how many a shared GPU has; 0 where it is shared in units of memory.
	Replicas int
	// Unit is the size of a memory unit on the node, in MiB.
	Unit gpu.MiB
}

// Divide is the division of a GPU that a wish means. ok is false where it means none, and
// where the card decides, as of MIG.
func Divide(w Wish, d *gpu.Device) (of Division, ok bool) {
	for _, k := range all {
		if of, ok = k.divide(w, d); ok {
			return of, true
		}
	}
	return Division{}, false
}

// Wish is what a partition says that means the division, but for the size of memory units.
func (d Division) Wish() Wish {
	w := Wish{Mode: d.Kind.Mode()}
	if wish := d.Kind.about().wish; wish != nil {
		wish(d, &w)
	}
	return w
}

// Infer is how a GPU must be divided for pieces of one kind to be there: wish is how it is to
// be divided, and unit the size of a memory unit on the node.
func Infer(pieces []Piece, d *gpu.Device, wish Division, unit gpu.MiB) Division {
	k := kinds[pieces[0].Kind()]
	if k == nil {
		return Division{}
	}
	return k.infer(pieces, d, wish, unit)
}

// Equal reports whether both have the same devices.
func (d Division) Equal(o Division) bool {
	return d.Kind == o.Kind && d.N == o.N && d.Unit == o.Unit && slices.Equal(d.Placements, o.Placements) &&
		slices.Equal(d.Alone, o.Alone)
}

// SameSize reports whether both are by one wish, and d has some devices. How many memory units a
// GPU has, and how large an equal part of it is, follows from what its driver keeps for itself,
// which can move by some MiB from one reading to the next.
func (d Division) SameSize(o Division) bool {
	return d.Kind == o.Kind && d.N > 0 && d.Wish() == o.Wish() && (d.Unit == o.Unit || !d.Kind.Together())
}

// String is into what the GPU is divided, for people: "4 replicas"; empty where the kind says
// it all.
func (d Division) String() string {
	if words := d.Kind.about().words; words != nil {
		return words(d)
	}
	return ""
}

// Rest is what a division does not have of a piece, as a division of it alone. ok is false
// where it has all of it. A division of another kind has nothing of it.
func (d Division) Rest(p Piece) (rest Division, ok bool) {
	if d.Kind != p.Kind() {
		d = Division{Kind: p.Kind()}
	}
	return p.lacks(d)
}

// beyond is what a division into numbered devices does not have of some.
func beyond(of Division, numbers Set) (Division, bool) {
	numbers = numbers.From(of.N)
	return Division{Kind: of.Kind, N: numbers.Len(), Alone: numbers}, len(numbers) > 0
}

// Share is a division of one GPU, and the memory that programs can have of that, in MiB.
type Share struct {
	Division
	Usable gpu.MiB
}
