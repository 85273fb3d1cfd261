// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"fmt"
	"slices"
	"strings"

	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
)

// instancesOf returns the instances of an allocation of MIG devices. ok is false if one of them
// does not exist or is being destroyed: then the allocation's container cannot start.
func (on *fileInputs) instancesOf(c *ledger.Allocation) (out []instance, ok bool) {
	for j := range c.Grants {
		g := &c.Grants[j]
		d := on.inv.ByUUID(g.GPU)
		if d == nil || !d.MIG.Enabled {
			return nil, false
		}
		in := mig.Find(d.MIG.Instances, piece.At(g.Piece))
		if in == nil || in.CI < 0 {
			return nil, false
		}
		if placement, err := mig.PlacementOf(in); err != nil || destroys(on.working[g.GPU], placement) {
			return nil, false
		}
		out = append(out, instance{d, in})
	}
	return out, true
}

// inOtherMode reports whether an allocation of no MIG devices has a GPU that is in MIG mode or is
// changing its mode. No container can use such a GPU as a whole.
func (on *fileInputs) inOtherMode(c *ledger.Allocation) bool {
	return slices.ContainsFunc(c.Grants, func(g ledger.Grant) bool {
		if g.Kind().InMIG() || g.NoRoom {
			return false
		}
		d := on.inv.ByUUID(g.GPU)
		return d != nil && (d.MIG.Enabled || switches(on.working[g.GPU]))
	})
}

// instance is a MIG instance and its GPU.
type instance struct {
	gpu *gpu.Device
	in  *gpu.Instance
}

// fileKey returns a text of all that an allocation's CDI file depends on. If it changes, the file
// is out of date.
func fileKey(instances []instance) string {
	var b strings.Builder
	for _, i := range instances {
		fmt.Fprintf(&b, "%s %d %d %s\n", i.gpu.UUID, i.in.GI, i.in.CI, i.in.UUID)
	}
	return b.String()
}
