// SPDX-License-Identifier: Apache-2.0

package usage

import (
	"cmp"
	"slices"

	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/memcap"
	"example.com/gpu-agent/pkg/mig"
)

// Piece is what a grant has of one GPU: a ledger.Grant, with what it comes to.
type Piece struct {
	GPU   gpu.UUID    `json:"gpu"`
	Index int         `json:"index"`
	Kind  ledger.Kind `json:"kind"`
	// Units are the numbers of memory units; Replica is a share's number, and Of how many
	// there are.
	Units   ledger.UnitSet `json:"units,omitempty"`
	Replica int            `json:"replica,omitempty"`
	Of      int            `json:"of,omitempty"`
	// Placement is a MIG instance's; nil for all else.
	Placement *mig.Placement `json:"placement,omitempty"`
	// Share is the part of the physical GPU, and MemoryMiB the memory: both 0 of what takes
	// no room.
	Share     float64 `json:"share"`
	MemoryMiB uint64  `json:"memoryMiB"`
}

// PiecesOf says what grants come to on a node's GPUs, of which the inventory tells.
func PiecesOf(grants []ledger.Grant, inv *gpu.Inventory) []Piece {
	out := make([]Piece, len(grants))
	for i := range grants {
		out[i] = pieceOf(&grants[i], inv.ByUUID(grants[i].GPU))
	}
	return out
}

func pieceOf(g *ledger.Grant, d *gpu.Device) Piece {
	p := Piece{GPU: g.GPU, Index: -1, Kind: g.Kind, Units: g.Units, Replica: g.Replica, Of: g.Of}
	if g.Kind == ledger.Placement {
		p.Placement = &g.Placement
	}
	if d == nil {
		d = new(gpu.Device) // one that is gone: there is only what the grant says
	} else {
		p.Index = d.Index
	}
	if g.NoRoom {
		return p
	}
	capped := g.Cap.Known && g.Cap.Bytes != memcap.None
	if capped {
		p.MemoryMiB = g.Cap.Bytes >> 20
	}
	switch g.Kind {
	case ledger.Whole:
		p.Share, p.MemoryMiB = 1, uint64(d.Memory)
	case ledger.Units:
		if all := unitsOf(d, g.Unit); all > 0 {
			p.Share = min(1, float64(g.Units.Len())/float64(all))
		}
	case ledger.Replica:
		if g.Of > 0 {
			p.Share = 1 / float64(g.Of)
		}
	case ledger.Placement:
		p.Share, p.MemoryMiB = instance(&g.Placement, d)
	}
	if p.Share == 0 && capped && d.Memory > 0 {
		p.Share = min(1, float64(p.MemoryMiB)/float64(d.Memory))
	}
	return p
}

// unitsOf is how many memory units a GPU has.
func unitsOf(d *gpu.Device, unit gpu.MiB) gpu.MiB {
	if unit == 0 {
		return 0
	}
	return d.Usable() / unit
}

// instance is what a MIG instance has of its GPU: its memory slices of the GPU's, and of
// those a compute instance that shares its GPU instance the part of its compute slices.
func instance(at *mig.Placement, d *gpu.Device) (share float64, memory uint64) {
	width := 0
	for i := range d.MIG.Profiles {
		for _, p := range d.MIG.Profiles[i].Placements {
			width = max(width, p.Start+p.Size)
		}
	}
	of := at.Profile
	of.Compute = 0
	i := slices.IndexFunc(d.MIG.Profiles, func(p gpu.Profile) bool { return p.Name == of.String() })
	if i < 0 || width == 0 {
		return 0, uint64(of.GB) << 10 // nobody knows yet what the GPU can have
	}
	p := &d.MIG.Profiles[i]
	size := at.Size
	if size == 0 && len(p.Placements) > 0 {
		size = p.Placements[0].Size
	}
	share, part := float64(size)/float64(width), 1.0
	if at.Profile.Compute > 0 && at.Profile.Slices > 0 {
		part = float64(at.Profile.Compute) / float64(at.Profile.Slices)
	}
	// Compute instances of one GPU instance share its memory: each is charged its part.
	return share * part, uint64(float64(p.Memory) * part)
}

// taken is the part of a piece that is in another one too, which somebody was given later.
func (p *Piece) taken(by *Piece) float64 {
	if p.GPU != by.GPU || p.Share == 0 || by.Share == 0 {
		return 0
	}
	switch {
	case p.Kind != by.Kind: // the GPU is laid out anew, and p is about to end
		return min(1, by.Share/p.Share)
	case p.Kind == ledger.Units:
		return float64(common(p.Units, by.Units)) / float64(max(1, p.Units.Len()))
	case p.Kind == ledger.Replica:
		return truth(p.Replica == by.Replica)
	case p.Kind == ledger.Placement && (p.Placement == nil || by.Placement == nil):
		return 0
	case p.Kind == ledger.Placement:
		a, b := p.Placement, by.Placement
		if a.Profile.Compute > 0 && b.Profile.Compute > 0 && a.CI != b.CI {
			return 0 // beside each other in one GPU instance
		}
		return float64(max(0, min(a.Start+a.Size, b.Start+b.Size)-max(a.Start, b.Start))) / float64(max(1, a.Size))
	}
	return 1
}

// common is how many numbers two sets have in common.
func common(a, b ledger.UnitSet) (n int) {
	for _, x := range a {
		for _, y := range b {
			n += max(0, min(x.Last, y.Last)-max(x.First, y.First)+1)
		}
	}
	return n
}

func truth(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

// String names the piece as people do.
func (p *Piece) String() string {
	switch {
	case p.Kind == ledger.Placement && p.Placement != nil:
		return p.Placement.String()
	case p.Kind == ledger.Units:
		text, _ := p.Units.MarshalText()
		return "units " + string(text)
	case p.Kind == ledger.Replica:
		return "replica"
	}
	return cmp.Or(string(p.Kind), "?")
}
