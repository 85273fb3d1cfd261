// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"maps"
	"slices"
	"strings"

	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
)

// Step is a step that is done to a GPU's hardware. Reset is true if the MIG mode takes effect only
// with a reset of the GPU.
type Step struct {
	mig.Step
	Reset bool
}

// Forecast is the final state of a node, if no pod comes or ends meanwhile and no call of the
// driver fails.
type Forecast struct {
	// Changes is the last plan, which leaves nothing to do. Inventory are the GPUs then.
	Changes   Changes
	Inventory *gpu.Inventory
	// Made are the instances that are the agent's then.
	Made map[gpu.UUID]map[mig.Placement]bool
	// Steps are the steps on each GPU until then, in order.
	Steps map[gpu.UUID][]Step
	// Waits maps the GPUs whose steps are not done to the reason.
	Waits map[gpu.UUID]status.Cause
	// Untold are the GPUs whose driver reports only in MIG mode which placements there are. The
	// forecast has them in MIG mode, and does not know what comes then.
	Untold map[gpu.UUID]bool
}

// mostPlans bounds the number of plans in one forecast. Each plan but the last changes a layout or
// the hardware, and no later plan takes that back. Only the instances that allocations wait for are
// made one by one, and a GPU has room for about ten.
const mostPlans = 64

// Foresee makes the plans that the agent would make one after the other, as if each had been
// carried out. closed is why nothing may be done to the hardware now; zero if work is allowed.
// Foresee is pure, and does not change in.
func Foresee(in Input, closed status.Cause) Forecast {
	f := Forecast{
		Made: map[gpu.UUID]map[mig.Placement]bool{}, Steps: map[gpu.UUID][]Step{},
		Waits: map[gpu.UUID]status.Cause{}, Untold: map[gpu.UUID]bool{},
	}
	inv := *in.Inventory
	inv.GPUs = slices.Clone(inv.GPUs)
	f.Inventory, in.Inventory = &inv, &inv
	for u, placements := range in.MIG.Made {
		f.Made[u] = maps.Clone(placements)
	}
	in.MIG.Made, in.MIG.Deferred = f.Made, nil // failed work is tried again
	under := in.MIG.Working
	in.MIG.Working = map[gpu.UUID]*Work{} // GPUs that stay as they are
	for _, w := range under {             // finish work in progress first
		f.do(&in, w)
	}
	for range mostPlans {
		f.Changes = Make(in)
		for u, placements := range f.Changes.Made {
			for _, p := range placements {
				f.own(u, p)
			}
		}
		done := len(in.Past) == 0 && maps.EqualFunc(in.Layouts, f.Changes.Layouts, Layout.Equal)
		in.Layouts, in.Past, in.MIG.Expired = f.Changes.Layouts, nil, nil // in time the lists have room
		for i := range f.Changes.Work {
			w := &f.Changes.Work[i]
			if closed != (status.Cause{}) {
				f.Waits[w.GPU] = closed
				continue
			}
			done = false
			f.do(&in, w)
		}
		if done {
			break
		}
	}
	return f
}

func (f *Forecast) own(u gpu.UUID, p mig.Placement) {
	if f.Made[u] == nil {
		f.Made[u] = map[mig.Placement]bool{}
	}
	f.Made[u][p] = true
}

// do carries out work on the forecast's inventory.
func (f *Forecast) do(in *Input, w *Work) {
	d := f.Inventory.ByUUID(w.GPU)
	if d == nil {
		return
	}
	d.MIG.Instances = slices.Clone(d.MIG.Instances)
	// leave makes the GPU stay as it is.
	leave := func() { in.MIG.Working[w.GPU] = &Work{GPU: w.GPU, Leaving: w.Leaving} }
	for _, s := range w.Steps {
		step := Step{Step: s}
		switch s.Op {
		case mig.Destroy:
			d.MIG.Instances = without(d.MIG.Instances, s.Placement)
			delete(f.Made[w.GPU], s.Placement)
		case mig.Create:
			// It replaces the empty GPU instance of a failed attempt.
			d.MIG.Instances = slices.DeleteFunc(d.MIG.Instances, func(in gpu.Instance) bool {
				at, err := mig.PlacementOf(&in)
				return err == nil && in.CI < 0 && at.GPUInstance() == s.Placement.GPUInstance()
			})
			at := &s.Placement
			d.MIG.Instances = append(d.MIG.Instances, gpu.Instance{
				Profile: at.Profile.String(), Placement: gpu.Placement{Start: at.Start, Size: at.Size},
				CIStart: at.CI, GI: foreseen, UUID: gpu.UUID("MIG-foreseen-" + at.String()),
			})
			f.own(w.GPU, s.Placement)
		default:
			on := s.Op == mig.Enable
			step.Reset = on != d.MIG.Enabled && resetsForMIG(d)
			if f.Steps[w.GPU] = append(f.Steps[w.GPU], step); step.Reset && in.MIG.NeverReset {
				d.MIG.Pending = &on
				f.Waits[w.GPU] = status.Why(status.ResetDue, "%s: a reset or a reboot is due for its MIG mode, "+
					"and --reset is never", d.Name())
				leave()
				return
			}
			d.MIG.Enabled, d.MIG.Pending = on, nil
			if on && in.MIG.Cards[w.GPU] != nil && !in.MIG.Cards[w.GPU].Known() {
				f.Untold[w.GPU] = true
				leave()
				return
			}
			continue
		}
		f.Steps[w.GPU] = append(f.Steps[w.GPU], step)
	}
}

// foreseen is the ID of a GPU instance in a forecast. No driver uses it.
const foreseen = 1 << 20

// without returns a list of instances without the one at a placement.
func without(at []gpu.Instance, s mig.Placement) []gpu.Instance {
	gone := mig.Find(at, s)
	out := make([]gpu.Instance, 0, len(at))
	for i := range at {
		if &at[i] != gone {
			out = append(out, at[i])
		}
	}
	return out
}

// resetsForMIG reports whether a change of a GPU's MIG mode needs a reset. On Ampere it does; on
// Hopper and later it does not (NVIDIA's MIG user guide, "Enable MIG Mode").
func resetsForMIG(d *gpu.Device) bool { return strings.HasPrefix(d.ComputeCapability, "8.") }
