// SPDX-License-Identifier: Apache-2.0

package piece

import (
	"errors"
	"fmt"

	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/memcap"
	"example.com/gpu-agent/pkg/mig"
)

// Replica is one of several equal shares of a GPU.
type Replica struct {
	// Number is the share's number, from 0. Of is how many shares the GPU has; 0 if not known.
	Number int `json:"replica,omitempty"`
	Of     int `json:"of,omitempty"`
}

// mostReplica is the largest number in a record. It is above what the kubelet lists of a resource,
// at most 60,000.
const mostReplica = 1 << 16

var replica = kind{
	kind: KindReplica, mode: "shared", short: "gpu.shared", several: "replicas", shared: true,
	read: func(record []byte) (Piece, error) {
		p, err := fields[Replica](record)
		if err == nil && (p.Number < 0 || p.Of < 0 || p.Number > mostReplica || p.Of > mostReplica) {
			err = errors.New("it has no valid replica number")
		}
		return p, err
	},
	divide: func(w Wish, _ *gpu.Device) (Division, bool) {
		return Division{Kind: KindReplica, N: w.Replicas}, w.Mode == "shared" && w.Replicas > 0
	},
	wish: func(of Division, w *Wish) { w.Replicas = of.N },
	infer: func(pieces []Piece, _ *gpu.Device, wish Division, _ gpu.MiB) Division {
		n, of := 0, 0
		for _, p := range pieces {
			r := p.(Replica)
			n, of = max(n, r.Number+1), max(of, r.Of)
		}
		// Single pieces do not show how many replicas there are, but what their holders may have
		// does (Of). If Of is not known, the wish counts: it agrees with the pieces, so it was
		// probably the former wish, too.
		switch {
		case of > 0:
			n = max(n, of)
		case wish.Kind == KindReplica:
			n = max(n, wish.N)
		}
		return Division{Kind: KindReplica, N: n}
	},
	words: func(of Division) string { return fmt.Sprintf("%d replicas", of.N) },
}

func (Replica) Kind() Kind { return KindReplica }

// String is "replica".
func (Replica) String() string { return string(KindReplica) }

// Numbers is the replica's number.
func (p Replica) Numbers() Set { return Set{{p.Number, p.Number}} }

// Size is 0: it follows from the number of replicas.
func (Replica) Size() gpu.MiB { return 0 }

// Placement returns false.
func (Replica) Placement() (mig.Placement, bool) { return mig.Placement{}, false }

// In returns one of as many replicas as the division has. Its cap is an equal part of the memory.
func (p Replica) In(of Share) (Piece, Cap) {
	if of.N == 0 {
		return p, Cap{}
	}
	p.Of = of.N
	return p, CapOf(memcap.Replica(of.Usable, of.N))
}

// Fix works out the number of replicas.
func (p Replica) Fix(cap uint64, usable gpu.MiB) Piece {
	if size := gpu.MiB(cap >> 20); cap != memcap.None && size > 0 && p.Of == 0 {
		// Rounded, since what the driver keeps for itself can have changed by some MiB.
		p.Of = int((usable + size/2) / size)
	}
	return p
}

// Part is an equal share of the GPU, and the cap.
func (p Replica) Part(d *gpu.Device, cap Cap) (share float64, memory uint64) {
	if p.Of > 0 {
		share = 1 / float64(p.Of)
	}
	return capped(share, d, cap)
}

func (p Replica) clashes(with Piece, _ *mig.Card) bool {
	o := with.(Replica)
	return p.Of != 0 && o.Of != 0 && p.Of != o.Of || p.Number == o.Number
}

func (p Replica) same(as Piece) bool { return p.Number == as.(Replica).Number }

func (p Replica) common(with Piece) float64 {
	if p.same(with) {
		return 1
	}
	return 0
}

func (p Replica) lacks(of Division) (Division, bool) { return beyond(of, p.Numbers()) }
