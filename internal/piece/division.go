// SPDX-License-Identifier: Apache-2.0

package piece

import (
	"slices"

	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
)

// Division is how a GPU is divided into devices of one kind. The zero Division has no devices.
type Division struct {
	Kind Kind `json:"kind"`
	// N is the number of devices; 1 for a whole GPU.
	N int `json:"n"`
	// Unit is the size of a device, in MiB; 0 if the kind has no such size, or it is not known.
	Unit gpu.MiB `json:"unitMiB,omitempty"`
	// Placements are the MIG devices, in place order; N counts them.
	Placements []mig.Placement `json:"placements,omitempty"`
	// Alone are the numbers of the devices, if only these are left of a former division; empty if
	// the devices are 0 to N-1.
	Alone Set `json:"alone,omitempty"`
}

// Wish is how a partition wants a GPU to be divided.
type Wish struct {
	// Mode is the partition's mode of the GPU.
	Mode string
	// Replicas is the number of replicas of a shared GPU; 0 if it is shared in units of memory.
	Replicas int
	// Unit is the size of a memory unit on the node, in MiB.
	Unit gpu.MiB
}

// Divide returns the division of a GPU that a wish means. ok is false if it means none, and for
// MIG, which depends on the card.
func Divide(w Wish, d *gpu.Device) (of Division, ok bool) {
	for _, k := range all {
		if of, ok = k.divide(w, d); ok {
			return of, true
		}
	}
	return Division{}, false
}

// Wish returns the wish that means the division, without the size of memory units.
func (d Division) Wish() Wish {
	w := Wish{Mode: d.Kind.Mode()}
	if wish := d.Kind.about().wish; wish != nil {
		wish(d, &w)
	}
	return w
}

// Infer returns how a GPU must be divided so that these pieces, all of one kind, exist. wish is the
// division that the partition wants, and unit the size of a memory unit on the node.
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

// SameSize reports whether both follow from the same wish, and d has devices. It does not compare
// the number of memory units, or the size of a replica: these follow from what the GPU's driver
// keeps for itself, which can change by some MiB from one reading to the next.
func (d Division) SameSize(o Division) bool {
	return d.Kind == o.Kind && d.N > 0 && d.Wish() == o.Wish() && (d.Unit == o.Unit || !d.Kind.Together())
}

// String returns the division for people: "4 replicas"; empty if the kind says it all.
func (d Division) String() string {
	if words := d.Kind.about().words; words != nil {
		return words(d)
	}
	return ""
}

// Rest returns the part of a piece that a division lacks, as a division of its own. ok is false if
// the division has the whole piece. A division of another kind has nothing of it.
func (d Division) Rest(p Piece) (rest Division, ok bool) {
	if d.Kind != p.Kind() {
		d = Division{Kind: p.Kind()}
	}
	return p.lacks(d)
}

// beyond returns the devices with these numbers that a numbered division lacks.
func beyond(of Division, numbers Set) (Division, bool) {
	numbers = numbers.From(of.N)
	return Division{Kind: of.Kind, N: numbers.Len(), Alone: numbers}, len(numbers) > 0
}

// Parts returns how many equal parts of its GPU there are, of which a holder has one; 0 if a holder may have
// any part of it.
func (d Division) Parts() int {
	if d.Kind.Shared() && !d.Kind.Together() {
		return d.N
	}
	return 0
}

// Part returns the part of all devices that a piece has, from 0 to 1. It is 0 if it is not known, or if the
// division is of another kind.
func (d Division) Part(p Piece) float64 {
	if d.Kind != p.Kind() || d.N <= 0 {
		return 0
	}
	return min(1, float64(Count(p))/float64(d.N))
}

// Share is a division of a GPU, and Usable the memory that programs can have of that GPU, in MiB.
type Share struct {
	Division
	Usable gpu.MiB
}
