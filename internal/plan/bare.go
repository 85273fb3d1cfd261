// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"slices"

	"example.com/gpu-agent/internal/config"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
)

// Bare plans the MIG instances of one GPU from its inventory and a partition alone,
// without allocations: whatever is busy stands in the way, whoever made it. A GPU that is
// to stay as it is, or to which nothing can be done, has no steps. The result is in
// the order of mig.ComparePlacements. odd says what the driver tells of the GPU's profiles
// that does not fit together; the plan does without them.
func Bare(d *gpu.Device, w config.Want) (p mig.Plan, odd, err error) {
	standing := mig.Stand(&d.MIG)
	to, ok := target(w)
	if !ok || d.Fault != "" || !to.MIG && !d.MIG.Capable {
		for _, s := range standing {
			if !s.Empty {
				p.Result = append(p.Result, s.Placement)
			}
		}
	} else {
		var card *mig.Card
		card, odd = mig.NewCard(&d.MIG)
		p, err = mig.Change(&d.MIG, card, standing, to)
	}
	slices.SortFunc(p.Result, mig.ComparePlacements)
	return p, odd, err
}
