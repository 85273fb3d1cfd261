// SPDX-License-Identifier: Apache-2.0

package usage

import (
	"encoding/json"
	"errors"
	"fmt"

	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/pkg/gpu"
)

// Piece is what a grant has of one GPU: a ledger.Grant with its share and its memory.
type Piece struct {
	GPU gpu.UUID
	// Index is the driver's number of the GPU; -1 if it is not known.
	Index int
	// Of is the kind of piece and its place on the GPU. The size of a memory unit is left out.
	Of piece.Piece
	// Share is the part of the physical GPU, 0 to 1. MemoryMiB is the memory. Both are 0 for a
	// piece that takes no room.
	Share     float64
	MemoryMiB uint64
}

// In JSON, the fields of the piece's kind stand between these two. Those of a MIG instance are
// in the field placement.
type (
	pieceHead struct {
		GPU   gpu.UUID   `json:"gpu"`
		Index int        `json:"index"`
		Kind  piece.Kind `json:"kind"`
	}
	pieceTail struct {
		Share     float64 `json:"share"`
		MemoryMiB uint64  `json:"memoryMiB"`
	}
)

// MarshalJSON writes the piece as one object.
func (p Piece) MarshalJSON() ([]byte, error) {
	head, err := json.Marshal(pieceHead{p.GPU, p.Index, p.Of.Kind()})
	own, errOwn := json.Marshal(p.Of)
	tail, errTail := json.Marshal(pieceTail{p.Share, p.MemoryMiB})
	if err := errors.Join(err, errOwn, errTail); err != nil {
		return nil, err
	}
	if p.Of.Kind().InMIG() {
		own = fmt.Appendf(nil, `{"placement":%s}`, own)
	}
	return piece.Join(head, own, tail), nil
}

// UnmarshalJSON reads what MarshalJSON writes. The error wraps gpu.ErrInvalid.
func (p *Piece) UnmarshalJSON(data []byte) error { return p.read(data) }

// read reads a piece from an object that also has the fields named in more.
func (p *Piece) read(data []byte, more ...string) error {
	var r struct {
		pieceHead
		pieceTail
		Placement json.RawMessage `json:"placement"`
	}
	if err := json.Unmarshal(data, &r); err != nil {
		return fmt.Errorf("%w: %w", gpu.ErrInvalid, err)
	}
	own := data
	if r.Kind.InMIG() && r.Placement != nil {
		own = r.Placement
	}
	of, err := piece.Read(r.Kind, own, append(more, "gpu", "index", "share", "memoryMiB")...)
	if err != nil {
		return err
	}
	*p = Piece{GPU: r.GPU, Index: r.Index, Of: of, Share: r.Share, MemoryMiB: r.MemoryMiB}
	return nil
}

// PiecesOf returns the pieces of grants. Their indexes, shares and memory follow from the
// inventory; a GPU that is not in it has the index -1.
func PiecesOf(grants []ledger.Grant, inv *gpu.Inventory) []Piece {
	out := make([]Piece, len(grants))
	for i := range grants {
		out[i] = pieceOf(&grants[i], inv.ByUUID(grants[i].GPU))
	}
	return out
}

func pieceOf(g *ledger.Grant, d *gpu.Device) Piece {
	of, _ := g.In(piece.Share{}) // the piece without the size of a unit
	p := Piece{GPU: g.GPU, Index: -1, Of: of}
	if d == nil {
		d = new(gpu.Device) // the GPU is gone: only the grant's own figures are left
	} else {
		p.Index = d.Index
	}
	if !g.NoRoom {
		p.Share, p.MemoryMiB = g.Part(d, g.Cap)
	}
	return p
}

// taken returns the part of the piece, 0 to 1, that by takes from it: by was given later, and
// the two overlap.
func (p *Piece) taken(by *Piece) float64 {
	switch {
	case p.GPU != by.GPU || p.Share == 0 || by.Share == 0:
		return 0
	case p.Of.Kind() != by.Of.Kind(): // the GPU gets a new layout, and p is about to end
		return min(1, by.Share/p.Share)
	}
	return piece.Common(p.Of, by.Of)
}

// String names the piece for people.
func (p *Piece) String() string { return p.Of.String() }
