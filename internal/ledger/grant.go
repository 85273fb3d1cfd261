// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/pkg/compute"
	"example.com/gpu-agent/pkg/gpu"
)

// Grant is a piece of one GPU that was given out.
type Grant struct {
	GPU gpu.UUID
	piece.Piece
	Cap piece.Cap
	// NoRoom is true if the grant takes no room: its holder watches the GPU beside those who use it
	// (admin access).
	NoRoom bool
	// TimeSlice is how long a process may keep the GPU before the next one's turn, as the claim
	// asks; empty if it does not ask. A GPU has one time slice.
	TimeSlice gpu.TimeSlice
	// Compute is the holder's share of the GPU's SMs. It is fixed when the grant is taken.
	Compute compute.Share
}

// Fix returns the grant with a cap in bytes, and with what follows from that cap on a GPU with so
// much usable memory: the size of a unit, or the number of replicas.
func (g Grant) Fix(bytes uint64, usable gpu.MiB) Grant {
	g.Cap, g.Piece = piece.CapOf(bytes), g.Piece.Fix(bytes, usable)
	return g
}

// turns reports whether the holder has no share of the SMs of its own, and takes turns with the others of
// its GPU.
func (g *Grant) turns() bool { return g.Compute == (compute.Share{}) }

// String returns the grant's record.
func (g Grant) String() string {
	text, err := json.Marshal(g)
	if err != nil {
		return string(g.GPU) + ": " + err.Error()
	}
	return string(text)
}

// The record of a grant is one JSON object: recordHead, the fields of the piece, recordTail.
type (
	recordHead struct {
		GPU  gpu.UUID   `json:"gpu"`
		Kind piece.Kind `json:"kind"`
	}
	recordTail struct {
		Cap       *uint64       `json:"cap,omitempty"`
		NoRoom    bool          `json:"noRoom,omitempty"`
		TimeSlice gpu.TimeSlice `json:"timeSlice,omitempty"`
		Compute   compute.Share `json:"compute,omitzero"`
	}
)

// MarshalJSON writes the grant's record. It writes no cap for whole GPUs and MIG instances, since
// these have none.
func (g Grant) MarshalJSON() ([]byte, error) {
	tail := recordTail{NoRoom: g.NoRoom, TimeSlice: g.TimeSlice, Compute: g.Compute}
	if g.Cap.Known && !uncapped(g.Kind()) {
		tail.Cap = &g.Cap.Bytes
	}
	head, err := json.Marshal(recordHead{g.GPU, g.Kind()})
	own, errOwn := json.Marshal(g.Piece)
	rest, errRest := json.Marshal(tail)
	if err := errors.Join(err, errOwn, errRest); err != nil {
		return nil, err
	}
	return piece.Join(head, own, rest), nil
}

// uncapped reports whether pieces of this kind have no cap.
func uncapped(k piece.Kind) bool { return k.Alone() || k.InMIG() }

// UnmarshalJSON reads a record. The error wraps gpu.ErrInvalid if MarshalJSON could not have
// written it. A piece of a kind that this version does not know becomes a [piece.Unknown].
func (g *Grant) UnmarshalJSON(data []byte) error {
	var r struct {
		recordHead
		recordTail
	}
	err := json.Unmarshal(data, &r)
	if err != nil {
		return fmt.Errorf("%w: %w", gpu.ErrInvalid, err)
	}
	out := Grant{GPU: r.GPU, NoRoom: r.NoRoom, TimeSlice: r.TimeSlice, Compute: r.Compute}
	if out.Piece, err = piece.Read(r.Kind, data, "gpu", "cap", "noRoom", "timeSlice", "compute"); err != nil {
		return fmt.Errorf("%s is not the record of a grant: %w", data, err)
	}
	bad := !strings.HasPrefix(string(out.GPU), "GPU-")
	switch out.TimeSlice {
	case "":
	case gpu.TimeSliceDefault, gpu.TimeSliceShort, gpu.TimeSliceMedium, gpu.TimeSliceLong:
		bad = bad || r.Kind.InMIG() || out.NoRoom // these have no time slice
	default:
		bad = true
	}
	if r.Compute.Check() != nil || r.Compute != (compute.Share{}) && (!r.Kind.Shared() || out.NoRoom) {
		bad = true // whole GPUs and MIG instances have all SMs that are theirs
	}
	if bad {
		return fmt.Errorf("%s is not the record of a grant: %w", data, gpu.ErrInvalid)
	}
	switch {
	case uncapped(r.Kind):
		out.Cap = piece.NoCap
	case r.Cap != nil:
		out.Cap = piece.CapOf(*r.Cap)
	}
	*g = out
	return nil
}
