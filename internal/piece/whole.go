// SPDX-License-Identifier: Apache-2.0

package piece

import (
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
)

// Whole is a GPU for one holder alone.
type Whole struct{}

var whole = kind{
	kind: KindWhole, mode: "whole", short: "gpu", several: "GPUs", alone: true, dynamic: true,
	read: func([]byte) (Piece, error) { return Whole{}, nil },
	divide: func(w Wish, _ *gpu.Device) (Division, bool) {
		return Division{Kind: KindWhole, N: 1}, w.Mode == "whole"
	},
	infer: func([]Piece, *gpu.Device, Division, gpu.MiB) Division { return Division{Kind: KindWhole, N: 1} },
}

func (Whole) Kind() Kind { return KindWhole }

// String is "whole".
func (Whole) String() string { return string(KindWhole) }

// Numbers is 0, the only device that the GPU has.
func (Whole) Numbers() Set { return Set{{}} }

// Size is 0.
func (Whole) Size() gpu.MiB { return 0 }

// Placement returns false.
func (Whole) Placement() (mig.Placement, bool) { return mig.Placement{}, false }

// In returns no cap.
func (w Whole) In(Share) (Piece, Cap) { return w, NoCap }

// Fix changes nothing.
func (w Whole) Fix(uint64, gpu.MiB) Piece { return w }

// Part is all of the GPU.
func (Whole) Part(d *gpu.Device, _ Cap) (float64, uint64) { return 1, uint64(d.Memory) }

func (Whole) clashes(Piece, *mig.Card) bool { return true }

func (Whole) same(Piece) bool { return true }

func (Whole) common(Piece) float64 { return 1 }

func (Whole) lacks(of Division) (Division, bool) { return Division{Kind: KindWhole, N: 1}, of.N == 0 }
