// SPDX-License-Identifier: Apache-2.0

package piece

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/memcap"
	"example.com/gpu-agent/pkg/mig"
	"example.com/gpu-agent/pkg/timeslice"
)

// Units are units of a GPU's memory.
type Units struct {
	// Set are the numbers of the units.
	Set Set `json:"units,omitempty"`
	// Unit is the size of one unit, in MiB; 0 if not known.
	Unit gpu.MiB `json:"unitMiB,omitempty"`
}

var units = kind{
	kind: KindUnits, mode: "shared", short: "gpu-mem", class: "gpu-memory", several: "memory units",
	shared: true, together: true, dynamic: true,
	read: func(record []byte) (Piece, error) {
		p, err := fields[Units](record)
		if err == nil && len(p.Set) == 0 {
			err = errors.New("it has no units")
		}
		return p, err
	},
	divide: func(w Wish, d *gpu.Device) (Division, bool) {
		shared := Division{Kind: KindUnits, N: timeslice.Units(d, w.Unit), Unit: w.Unit}
		return shared, w.Mode == "shared" && w.Replicas == 0
	},
	infer: func(pieces []Piece, d *gpu.Device, _ Division, unit gpu.MiB) Division {
		of := Division{Kind: KindUnits}
		for _, p := range pieces {
			of.N, of.Unit = max(of.N, p.Numbers().Most()+1), max(of.Unit, p.Size())
		}
		size := cmp.Or(of.Unit, unit)
		if n := timeslice.Units(d, size); n >= of.N {
			of.N, of.Unit = n, size // the pieces fit into units of this size
		}
		return of
	},
	words: func(of Division) string {
		if of.Unit == 0 {
			return "units of memory"
		}
		return fmt.Sprintf("units of %d MiB", of.Unit)
	},
}

func (Units) Kind() Kind { return KindUnits }

// String is "units 0-23,40".
func (p Units) String() string { return "units " + p.Set.String() }

// Numbers are the numbers of the units.
func (p Units) Numbers() Set { return p.Set }

// Size is the size of a unit.
func (p Units) Size() gpu.MiB { return p.Unit }

// Placement returns false.
func (Units) Placement() (mig.Placement, bool) { return mig.Placement{}, false }

// In returns units of the division's size. Their cap is their memory.
func (p Units) In(of Share) (Piece, Cap) {
	if p.Unit = of.Unit; p.Unit == 0 {
		return p, Cap{}
	}
	return p, CapOf(memcap.Units(p.Set.Len(), p.Unit))
}

// Fix works out the size of a unit.
func (p Units) Fix(cap uint64, _ gpu.MiB) Piece {
	size, n := gpu.MiB(cap>>20), gpu.MiB(p.Set.Len())
	if cap != memcap.None && p.Unit == 0 && n > 0 && size%n == 0 {
		p.Unit = size / n
	}
	return p
}

// Part is the units' part of all units of the GPU, and the cap.
func (p Units) Part(d *gpu.Device, cap Cap) (share float64, memory uint64) {
	if all := timeslice.Units(d, p.Unit); all > 0 {
		share = min(1, float64(p.Set.Len())/float64(all))
	}
	return capped(share, d, cap)
}

// capped returns what accounts charge a holder with a cap: its share of the GPU, and the cap in
// MiB, 0 if there is no known limit. If the share is 0, it is not known, and the cap's part of the
// GPU's memory is taken.
func capped(share float64, d *gpu.Device, cap Cap) (float64, uint64) {
	if !cap.Known || cap.Bytes == memcap.None {
		return share, 0
	}
	memory := cap.Bytes >> 20
	if share == 0 && d.Memory > 0 {
		share = min(1, float64(memory)/float64(d.Memory))
	}
	return share, memory
}

func (p Units) clashes(with Piece, _ *mig.Card) bool {
	o := with.(Units)
	return p.Unit != 0 && o.Unit != 0 && p.Unit != o.Unit || p.Set.Meets(o.Set)
}

func (p Units) same(as Piece) bool { return slices.Equal(p.Set, as.(Units).Set) }

func (p Units) common(with Piece) float64 {
	n := 0
	for _, x := range p.Set {
		for _, y := range with.(Units).Set {
			n += max(0, min(x.Last, y.Last)-max(x.First, y.First)+1)
		}
	}
	return float64(n) / float64(max(1, p.Set.Len()))
}

func (p Units) lacks(of Division) (Division, bool) { return beyond(of, p.Set) }
