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

// Piece is what somebody has of one GPU: a [Whole], [Units], a [Replica] or a [Placement];
// or an [Unknown], which another version of this program has given out. Nobody else can
// implement it. A Piece is a value and is not changed. A nil Piece is nothing at all.
type Piece interface {
	Kind() Kind
	// String names the piece for people: "units 0-23", "3g.40gb@4".
	String() string
	// Numbers are those of its devices, of the N into which its GPU is divided; empty where
	// they have none.
	Numbers() Set
	// Size is that of each of its devices, in MiB, where it says so; else 0.
	Size() gpu.MiB
	// Placement is where its MIG instance stands or will stand; ok is false where it is of
	// none. A placement's Size of 0 says that nobody knows yet what can stand on the GPU, or
	// that this cannot.
	Placement() (at mig.Placement, ok bool)
	// In returns the piece as one of a GPU that is divided so, with what its holder may
	// have of the GPU's memory. The cap is not known where the division does not say.
	In(of Share) (Piece, Cap)
	// Fix returns the piece with what follows from the cap that its holder was given, in
	// bytes, on a GPU with so much usable memory.
	Fix(cap uint64, usable gpu.MiB) Piece
	// Part is what it has of a GPU for accounts: a part of it, from 0 to 1, and memory in
	// MiB. cap is what its holder may have.
	Part(d *gpu.Device, cap Cap) (share float64, memory uint64)

	// clashes reports whether the two, of one kind and one GPU, cannot both be had. card is
	// nil where it is not known what can stand on the GPU.
	clashes(with Piece, card *mig.Card) bool
	// same reports whether both, of one kind and one GPU, are of the same devices.
	same(as Piece) bool
	// common is the part of it, from 0 to 1, that is in another of one kind and one GPU, too.
	common(with Piece) float64
	// lacks is what a division of its kind does not have of it. ok is false where it has all.
	lacks(of Division) (rest Division, ok bool)
}

// Clash reports whether two pieces of one GPU cannot both be had. card is nil where it is
// not known what can stand on the GPU.
func Clash(a, b Piece, card *mig.Card) bool {
	// Two kinds are two promises of the same memory.
	return a.Kind() != b.Kind() || a.clashes(b, card)
}

// Same reports whether two pieces of one GPU are of the same devices, as far as that is
// known without the driver.
func Same(a, b Piece) bool { return a.Kind() == b.Kind() && a.same(b) }

// Common is the part of a piece, from 0 to 1, that is in another one of its kind and GPU, too;
// 0 where they are of two kinds.
func Common(a, b Piece) float64 {
	if a.Kind() != b.Kind() {
		return 0
	}
	return a.common(b)
}

// Count is how many devices a piece is.
func Count(p Piece) int { return max(1, p.Numbers().Len()) }

// At is the placement of a piece, the zero placement where it is of none.
func At(p Piece) mig.Placement {
	at, _ := p.Placement()
	return at
}

// Sized returns a piece with the size of its placement, where it lacks it and the card knows
// it. ok is false where there is nothing to add.
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

// Cap is how much of a GPU's memory its holder may have.
type Cap struct {
	// Known is false where no record says.
	Known bool
	// Bytes is memcap.None for no bound.
	Bytes uint64
}

// CapOf returns a cap that is known, in bytes.
func CapOf(bytes uint64) Cap { return Cap{Known: true, Bytes: bytes} }

// NoCap is the cap of those who may have all of a GPU, or whom the hardware holds to
// their instance's memory.
var NoCap = CapOf(memcap.None)

// Read reads a piece of a kind from a JSON object with the fields that json.Marshal writes of it;
// own are the names of those that the record has for itself. The error wraps gpu.ErrInvalid. A
// kind that this version does not know is no error, but an [Unknown].
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

// fields reads the fields of a piece.
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
