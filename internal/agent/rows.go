// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"fmt"

	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/timeslice"
)

// rows counts the devices that the kubelet's lists name at one moment, of all
// resources: those of cuts in force, and those of cuts that are past and still listed.
// A partition makes at most half of [timeslice.MaxListed]; but edits that follow each
// other within a minute, GPUs that keep their cuts for their holders, and what a
// process left that knew no bound add up to more.
//
// Two cuts of one GPU that are of one kind share their first devices. Whole GPUs and
// MIG devices are not counted: the hardware bounds them to some hundred.
type rows struct {
	of  map[row]int
	sum int
}

type row struct {
	gpu  gpu.UUID
	kind ledger.Kind
}

// more is how many devices a cut adds.
func (r *rows) more(u gpu.UUID, c Cut) int {
	if !c.Offers || c.Kind == ledger.Whole || c.Kind == ledger.Placement {
		return 0
	}
	if len(c.Alone) > 0 { // some of a GPU's devices, not its first ones
		return c.N
	}
	return max(0, c.N-r.of[row{u, c.Kind}])
}

// fits reports whether there is room for a cut beside what is counted.
func (r *rows) fits(u gpu.UUID, c Cut) bool {
	n := r.more(u, c)
	return n == 0 || n <= timeslice.MaxListed-r.sum
}

func (r *rows) add(u gpu.UUID, c Cut) {
	n := r.more(u, c)
	if len(c.Alone) == 0 {
		r.of[row{u, c.Kind}] += n
	}
	r.sum += n
}

// Listed is how many devices the kubelet's lists name now.
func (a *Agent) Listed() (n int) {
	for _, r := range a.desk.View().Resources {
		n += len(r.Devices)
	}
	return n
}

// listed counts what the lists name before a plan.
func (in *PlanInput) listed() *rows {
	r := &rows{of: map[row]int{}}
	for i := range in.Inventory.GPUs {
		u := in.Inventory.GPUs[i].UUID
		r.add(u, in.Cuts[u])
		for _, p := range in.past[u] {
			r.add(u, p.cut)
		}
	}
	for i := range in.Claims {
		c := &in.Claims[i]
		for j := range c.Grants {
			// What no cut has is listed for its holder's sake.
			if g := &c.Grants[j]; g.Kind != ledger.Placement && r.of[row{g.GPU, g.Kind}] == 0 {
				r.sum += max(1, g.Units.Len())
			}
		}
	}
	return r
}

// crowded is a remark for people on a GPU that waits for room in the lists.
func crowded(d *gpu.Device, to Cut) string {
	return fmt.Sprintf("%s is withdrawn and waits to be cut into %d devices: with those that are still listed the kubelet would be told of more than %d; "+
		"withdrawn ones leave its list after %s, or with their holder", describe(d), to.N, timeslice.MaxListed, Linger)
}
