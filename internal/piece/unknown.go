// SPDX-License-Identifier: Apache-2.0

package piece

import (
	"encoding/json"
	"fmt"

	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
)

// Unknown is a piece of a kind that this version does not know. A newer version gave it out before
// this older one was installed again. Its record is kept as it was. It clashes with every other
// piece of its GPU, so the GPU is given to no other holder until it has ended.
type Unknown struct {
	word   Kind
	fields []byte
}

// unknown reads such a piece from a record. own are the names of the record's other fields.
func unknown(k Kind, record []byte, own []string) (Piece, error) {
	var all map[string]json.RawMessage
	if err := json.Unmarshal(record, &all); err != nil || k == "" {
		return nil, fmt.Errorf("read a piece of kind %q: %w", string(k), gpu.ErrInvalid)
	}
	delete(all, "kind")
	for _, name := range own {
		delete(all, name)
	}
	left, err := json.Marshal(all)
	return Unknown{k, left}, err
}

// Kind is the kind in its record.
func (u Unknown) Kind() Kind { return u.word }

// String is its kind.
func (u Unknown) String() string { return string(u.word) }

// MarshalJSON writes its fields as they were.
func (u Unknown) MarshalJSON() ([]byte, error) { return u.fields, nil }

// Numbers is empty: this version cannot read them.
func (Unknown) Numbers() Set { return nil }

// Size is 0.
func (Unknown) Size() gpu.MiB { return 0 }

// Placement returns false: this version cannot read it.
func (Unknown) Placement() (mig.Placement, bool) { return mig.Placement{}, false }

// In returns an unknown cap.
func (u Unknown) In(Share) (Piece, Cap) { return u, Cap{} }

// Fix changes nothing.
func (u Unknown) Fix(uint64, gpu.MiB) Piece { return u }

// Part is the cap, if a record tells it.
func (Unknown) Part(d *gpu.Device, cap Cap) (float64, uint64) { return capped(0, d, cap) }

func (Unknown) clashes(Piece, *mig.Card) bool { return true }

func (u Unknown) same(as Piece) bool { return string(u.fields) == string(as.(Unknown).fields) }

func (Unknown) common(Piece) float64 { return 1 }

func (Unknown) lacks(Division) (Division, bool) { return Division{}, false }
