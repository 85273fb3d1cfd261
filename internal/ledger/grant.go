// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"encoding/json"
	"fmt"
	"strings"

	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/memcap"
	"example.com/gpu-agent/pkg/mig"
)

// Kind is what a piece of a GPU is. The words stand in records.
type Kind string

// Kinds of pieces.
const (
	// Whole is a GPU for one holder alone.
	Whole Kind = "whole"
	// Units are units of a GPU's memory.
	Units Kind = "units"
	// Replica is one of n equal shares of a GPU.
	Replica Kind = "replica"
	// Placement is a MIG instance at its place, whether it stands or is to be made.
	Placement Kind = "placement"
)

// Piece is what a grant has of its GPU. Which fields count depends on Kind.
type Piece struct {
	Kind Kind
	// Units are the numbers of the memory units, and Unit is the size of one; 0 where
	// that is not known.
	Units UnitSet
	Unit  gpu.MiB
	// Replica is the share's number, and Of how many there are; 0 where that is not
	// known.
	Replica, Of int
	// Placement is where the instance stands or will stand. A Size of 0 says that nobody
	// knows yet what can stand on the GPU, or that this cannot.
	Placement mig.Placement
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

// Grant is a piece of one GPU that somebody has.
type Grant struct {
	GPU gpu.UUID
	Piece
	Cap Cap
	// NoRoom says that it takes nothing from anybody: its holder looks after the GPU,
	// beside those who have it.
	NoRoom bool
	// TimeSlice is how long a process may keep the GPU before the next one's turn, as
	// the claim asks; empty where it does not. A GPU has one.
	TimeSlice gpu.TimeSlice
}

// Fix returns the grant with the cap that its holder was given, in bytes, and with
// what follows from that of a GPU with so much usable memory: the size of a unit, or
// the number of replicas.
func (g Grant) Fix(bytes uint64, usable gpu.MiB) Grant {
	g.Cap = CapOf(bytes)
	size, n := gpu.MiB(bytes>>20), gpu.MiB(g.Units.Len())
	switch {
	case bytes == memcap.None || size == 0:
	case g.Kind == Units && g.Unit == 0 && n > 0 && size%n == 0:
		g.Unit = size / n
	case g.Kind == Replica && g.Of == 0:
		// What the driver keeps for itself can have moved by some MiB.
		g.Of = int((usable + size/2) / size)
	}
	return g
}

// record is a grant in JSON.
type record struct {
	GPU     gpu.UUID `json:"gpu"`
	Kind    Kind     `json:"kind"`
	Units   UnitSet  `json:"units,omitempty"`
	Unit    gpu.MiB  `json:"unitMiB,omitempty"`
	Replica int      `json:"replica,omitempty"`
	Of      int      `json:"of,omitempty"`
	*mig.Placement
	Cap       *uint64       `json:"cap,omitempty"`
	NoRoom    bool          `json:"noRoom,omitempty"`
	TimeSlice gpu.TimeSlice `json:"timeSlice,omitempty"`
}

// MarshalJSON writes the grant's record. Whole GPUs and MIG instances have no cap,
// which need not be said.
func (g Grant) MarshalJSON() ([]byte, error) {
	r := record{GPU: g.GPU, Kind: g.Kind, Units: g.Units, Unit: g.Unit, Replica: g.Replica, Of: g.Of, NoRoom: g.NoRoom, TimeSlice: g.TimeSlice}
	if g.Kind == Placement {
		r.Placement = &g.Placement
	} else if g.Kind != Whole && g.Cap.Known {
		r.Cap = &g.Cap.Bytes
	}
	return json.Marshal(r)
}

// UnmarshalJSON reads a record. The error wraps gpu.ErrInvalid where it is not one
// that MarshalJSON could have written.
func (g *Grant) UnmarshalJSON(data []byte) error {
	var r record
	if err := json.Unmarshal(data, &r); err != nil {
		return fmt.Errorf("%w: %w", gpu.ErrInvalid, err)
	}
	out := Grant{GPU: r.GPU, Piece: Piece{Kind: r.Kind, Units: r.Units, Unit: r.Unit, Replica: r.Replica, Of: r.Of}, NoRoom: r.NoRoom, TimeSlice: r.TimeSlice}
	bad := !strings.HasPrefix(string(r.GPU), "GPU-") || r.Replica < 0 || r.Of < 0 || r.Replica > mostReplica || r.Of > mostReplica
	switch r.TimeSlice {
	case "":
	case gpu.TimeSliceDefault, gpu.TimeSliceShort, gpu.TimeSliceMedium, gpu.TimeSliceLong:
		bad = bad || r.Kind == Placement || r.NoRoom // which have none to set
	default:
		bad = true
	}
	switch r.Kind {
	case Whole:
		out.Cap = NoCap
	case Units:
		bad = bad || len(r.Units) == 0
	case Replica:
	case Placement:
		p := r.Placement
		if p == nil || p.Profile == (mig.Name{}) || p.Start < 0 || p.Size < 0 || p.CI < 0 {
			bad = true
			break
		}
		out.Placement, out.Cap = *p, NoCap
	default:
		bad = true
	}
	if r.Cap != nil && !out.Cap.Known {
		out.Cap = CapOf(*r.Cap)
	}
	if bad {
		return fmt.Errorf("%s is not the record of a grant: %w", data, gpu.ErrInvalid)
	}
	*g = out
	return nil
}
