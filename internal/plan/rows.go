// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/timeslice"
)

// Rows counts the devices in the kubelet's lists at one moment, of all resources: those of the
// layouts in force, and those of past layouts that are still listed. A partition makes at most half
// of [timeslice.MaxListed]. The sum can exceed that bound after several edits within a minute, with
// GPUs that keep their layouts for their holders, and with devices left by a process without the
// bound.
//
// Two layouts of one GPU and one kind share their first devices. Whole GPUs and MIG devices do not
// count, since the hardware limits them to some hundred. Devices of other front-ends do not count.
type Rows struct {
	of  map[row]int
	sum int
}

type row struct {
	gpu  gpu.UUID
	kind piece.Kind
}

// NewRows returns an empty count.
func NewRows() *Rows { return &Rows{of: map[row]int{}} }

// more returns how many devices a layout adds.
func (r *Rows) more(u gpu.UUID, c Layout) int {
	if !c.Through(ledger.DevicePlugin) || !c.Kind.Shared() {
		return 0
	}
	if len(c.Alone) > 0 { // it has single devices, not the first ones
		return c.N
	}
	return max(0, c.N-r.of[row{u, c.Kind}])
}

// Fits reports whether the lists have room for a layout beside the counted devices.
func (r *Rows) Fits(u gpu.UUID, c Layout) bool {
	n := r.more(u, c)
	return n == 0 || n <= timeslice.MaxListed-r.sum
}

// Add counts the devices of a layout.
func (r *Rows) Add(u gpu.UUID, c Layout) {
	n := r.more(u, c)
	if len(c.Alone) == 0 {
		r.of[row{u, c.Kind}] += n
	}
	r.sum += n
}

// listed counts the devices that are listed before the plan.
func (in *Input) listed() *Rows {
	r := NewRows()
	for i := range in.Inventory.GPUs {
		u := in.Inventory.GPUs[i].UUID
		r.Add(u, in.Layouts[u])
		for _, p := range in.Past[u] {
			r.Add(u, p.Layout)
		}
	}
	for i := range in.Allocations {
		c := &in.Allocations[i]
		if frontEndOf(c.Owner) != ledger.DevicePlugin {
			continue
		}
		for j := range c.Grants {
			// A device that no layout has is listed for its holder.
			if g := &c.Grants[j]; !g.Kind().InMIG() && r.of[row{g.GPU, g.Kind()}] == 0 {
				r.sum += piece.Count(g.Piece)
			}
		}
	}
	return r
}

// crowded returns the message for a GPU that waits for room in the lists.
func crowded(d *gpu.Device, to Layout) status.Cause {
	return status.Why(status.ListsFull, "%s is withdrawn and waits to be divided into %d devices: "+
		"together with those that are still listed, the kubelet would get more than %d; "+
		"withdrawn devices leave its list after %s, or when their holder ends",
		d.Name(), to.N, timeslice.MaxListed, Linger)
}
