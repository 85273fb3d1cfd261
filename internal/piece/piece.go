// SPDX-License-Identifier: Apache-2.0

package piece

import (
	"bytes"
	"encoding/json"
	"fmt"

	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/memcap"
	"example.com/gpu-agent/pkg/mig"
)

// Piece is a piece of one GPU: a [Whole], [Units], a [Replica] or a [Placement], or an [Unknown],
// which another version of this program has given out. Other packages cannot implement it. A Piece
// is a value that never changes. A nil Piece is no piece.
type Piece interface {
	Kind() Kind
	// String names the piece for people: "units 0-23", "3g.40gb@4".
	String() string
	// Numbers returns the numbers of its devices among the N of its GPU's division; empty if
	// devices of the kind have none.
	Numbers() Set
	// Size returns the size of each of its devices, in MiB; 0 if the kind has none, or it is not
	// known.
	Size() gpu.MiB
	// Placement returns where its MIG instance is or will be made; ok is false for other kinds. A
	// placement's Size is 0 if its card is not known, or has no such placement.
	Placement() (at mig.Placement, ok bool)
	// In returns the piece as one of a GPU with this division, and how much of the GPU's memory its
	// holder may have. The cap is not known if the division does not tell.
	In(of Share) (Piece, Cap)
	// Fix returns the piece with what follows from its holder's cap, in bytes, on a GPU with so
	// much usable memory.
	Fix(cap uint64, usable gpu.MiB) Piece
	// Part returns what accounts charge for it: its share of the GPU, from 0 to 1, and memory in
	// MiB. cap is that of its holder.
	Part(d *gpu.Device, cap Cap) (share float64, memory uint64)

	// clashes reports whether the two, of one kind and one GPU, exclude each other. card is nil if
	// it is not known what can exist on the GPU.
	clashes(with Piece, card *mig.Card) bool
	// same reports whether both, of one kind and one GPU, have the same devices.
	same(as Piece) bool
	// common returns the share of the piece, from 0 to 1, that another piece of the same kind and
	// GPU covers.
	common(with Piece) float64
	// lacks is Division.Rest for a division of the piece's kind.
	lacks(of Division) (rest Division, ok bool)
}

// Clash reports whether two pieces of one GPU exclude each other. card is nil if it is not known
// what can exist on the GPU.
func Clash(a, b Piece, card *mig.Card) bool {
	// Pieces of two kinds would give out the same memory twice.
	return a.Kind() != b.Kind() || a.clashes(b, card)
}

// Same reports whether two pieces of one GPU have the same devices, as far as that is known without
// the driver.
func Same(a, b Piece) bool { return a.Kind() == b.Kind() && a.same(b) }

// Common returns the share of piece a, from 0 to 1, that b covers, on the same GPU; 0 if they are
// of two kinds.
func Common(a, b Piece) float64 {
	if a.Kind() != b.Kind() {
		return 0
	}
	return a.common(b)
}

// Count returns the number of devices of a piece, at least 1.
func Count(p Piece) int { return max(1, p.Numbers().Len()) }

// At returns the placement of a piece; zero if it is not a placement.
func At(p Piece) mig.Placement {
	at, _ := p.Placement()
	return at
}

// Sized adds to a placement its size, if the card knows it. ok is false if there is nothing to add.
func Sized(p Piece, card *mig.Card) (out Piece, ok bool) {
	at, ok := p.Placement()
	if !ok || at.Size > 0 || card == nil {
		return p, false
	}
	if at, ok = card.Placement(at.Profile, at.Start, at.CI); !ok {
		return p, false
	}
	return Instance(at), true
}

// Cap is how much of a GPU's memory a holder may have.
type Cap struct {
	// Known is false if no record tells the cap.
	Known bool
	// Bytes is the cap in bytes; memcap.None if there is no limit.
	Bytes uint64
}

// CapOf returns a known cap, in bytes.
func CapOf(bytes uint64) Cap { return Cap{Known: true, Bytes: bytes} }

// NoCap is the cap of a holder that may have all of a GPU, or that the hardware limits to the
// memory of its instance.
var NoCap = CapOf(memcap.None)

// Read reads a piece of a kind from a JSON object with the fields that json.Marshal writes for it.
// own are the names of the other fields of that object. The error wraps gpu.ErrInvalid. A piece of
// a kind that this version does not know is no error, but becomes an [Unknown].
func Read(k Kind, record []byte, own ...string) (Piece, error) {
	if !k.Known() {
		return unknown(k, record, own)
	}
	p, err := kinds[k].read(record)
	if err != nil {
		return nil, fmt.Errorf("read a piece of kind %s: %w: %w", k, gpu.ErrInvalid, err)
	}
	return p, nil
}

// fields reads the fields of a piece from JSON.
func fields[P any](record []byte) (p P, err error) {
	err = json.Unmarshal(record, &p)
	return p, err
}

// Join returns one JSON object with the fields of several, in their order.
func Join(objects ...[]byte) []byte {
	out := []byte{'{'}
	for _, o := range objects {
		o = bytes.TrimSpace(o)
		if o = o[1 : len(o)-1]; len(o) == 0 {
			continue
		}
		if len(out) > 1 {
			out = append(out, ',')
		}
		out = append(out, o...)
	}
	return append(out, '}')
}
