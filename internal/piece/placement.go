// SPDX-License-Identifier: Apache-2.0

package piece

import (
	"encoding/json"
	"errors"
	"slices"

	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
)

// Placement is a MIG instance at its place. The instance exists, or is to be made.
type Placement struct{ At mig.Placement }

var placement = kind{
	kind: KindPlacement, mode: "mig", several: "MIG instances", inMIG: true, dynamic: true,
	read: func(record []byte) (Piece, error) {
		at, err := fields[mig.Placement](record)
		if err == nil && (at.Profile == (mig.Name{}) || at.Start < 0 || at.Size < 0 || at.CI < 0) {
			err = errors.New("it has no valid placement")
		}
		return Placement{at}, err
	},
	// The devices of a GPU in MIG mode follow from its card and its instances, not from a wish or
	// from pieces alone.
	divide: func(Wish, *gpu.Device) (Division, bool) { return Division{}, false },
	infer:  func([]Piece, *gpu.Device, Division, gpu.MiB) Division { return Division{Kind: KindPlacement} },
}

// Instance returns the piece for a MIG instance.
func Instance(at mig.Placement) Piece { return Placement{at} }

// Instances returns the division of a GPU in MIG mode that has these instances. Their order does
// not matter.
func Instances(at []mig.Placement) Division {
	sorted := slices.Clone(at)
	slices.SortFunc(sorted, mig.ComparePlacements)
	return Division{Kind: KindPlacement, N: len(sorted), Placements: sorted}
}

func (Placement) Kind() Kind { return KindPlacement }

// String is "3g.40gb@4".
func (p Placement) String() string { return p.At.String() }

// MarshalJSON writes its fields.
func (p Placement) MarshalJSON() ([]byte, error) { return json.Marshal(p.At) }

// Numbers is empty.
func (Placement) Numbers() Set { return nil }

// Size is 0: the profile tells the size.
func (Placement) Size() gpu.MiB { return 0 }

// Placement returns its place.
func (p Placement) Placement() (mig.Placement, bool) { return p.At, true }

// In returns no cap: the hardware limits the holder to its instance.
func (p Placement) In(Share) (Piece, Cap) { return p, NoCap }

// Fix changes nothing.
func (p Placement) Fix(uint64, gpu.MiB) Piece { return p }

// Part is the part of the GPU's memory slices that its GPU instance has. A compute instance that
// shares its GPU instance is charged by its part of the compute slices.
func (p Placement) Part(d *gpu.Device, _ Cap) (share float64, memory uint64) {
	width, of := d.MIG.MemorySlices(), p.At.Profile.GPUInstance()
	i := slices.IndexFunc(d.MIG.Profiles, func(p gpu.Profile) bool { return p.Name == of.String() })
	if i < 0 || width == 0 {
		return 0, uint64(of.GB) << 10 // it is not known yet what the GPU can have
	}
	profile := &d.MIG.Profiles[i]
	size := p.At.Size
	if size == 0 && len(profile.Placements) > 0 {
		size = profile.Placements[0].Size
	}
	part := 1.0
	if p.At.Profile.Compute > 0 && p.At.Profile.Slices > 0 {
		part = float64(p.At.Profile.Compute) / float64(p.At.Profile.Slices)
	}
	// Compute instances of one GPU instance share its memory, and each is charged its part.
	return float64(size) / float64(width) * part, uint64(float64(profile.Memory) * part)
}

func (p Placement) clashes(with Piece, card *mig.Card) bool {
	o := with.(Placement)
	return p.same(o) ||
		// If it is known what can exist on the GPU.
		card != nil && p.At.Size > 0 && o.At.Size > 0 && !card.Fits([]mig.Placement{p.At}, o.At)
}

func (p Placement) same(as Piece) bool { return SamePlace(p.At, as.(Placement).At) }

// SamePlace reports whether two placements are the same; either size may be unknown.
func SamePlace(a, b mig.Placement) bool {
	return a.Profile == b.Profile && a.Start == b.Start && a.CI == b.CI
}

func (p Placement) common(with Piece) float64 {
	a, b := p.At, with.(Placement).At
	if a.Profile.Compute > 0 && b.Profile.Compute > 0 && a.CI != b.CI {
		return 0 // they are side by side in one GPU instance
	}
	return float64(max(0, min(a.Start+a.Size, b.Start+b.Size)-max(a.Start, b.Start))) / float64(max(1, a.Size))
}

func (p Placement) lacks(of Division) (Division, bool) {
	return Instances([]mig.Placement{p.At}), !slices.Contains(of.Placements, p.At)
}
