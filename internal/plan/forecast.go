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

// Step is something that is done to a GPU's hardware. Reset says that the MIG mode comes into
// force with a reset of the GPU.
type Step struct {
	mig.Step
	Reset bool
}

// Forecast is what becomes of a node in the end, if nobody comes or ends meanwhile and the
// driver does as it is told.
type Forecast struct {
	// Changes is the last plan, after which nothing is left to do, and Inventory the GPUs then.
	Changes   Changes
	Inventory *gpu.Inventory
	// Made are the instances that are the agent's then.
	Made map[gpu.UUID]map[mig.Placement]bool
	// Steps are what is done to each GPU until then, in order.
	Steps map[gpu.UUID][]Step
	// Waits is why the hardware of a GPU stays as it is although something is to be done to it.
	Waits map[gpu.UUID]status.Cause
	// Untold are the GPUs of which only in MIG mode the driver tells what can stand there:
	// they are in it, and what comes then is not known.
	Untold map[gpu.UUID]bool
}

// mostPlans bounds the plans of one forecast. Each but the last does something to a layout or
// to the hardware that no later one takes back; what is done one by one are the instances
// that allocations wait for, and a GPU has room for some ten.
const mostPlans = 64

// Foresee makes the plans that the agent would make one after the other, as if what each of
// them wants had been done. closed is why nothing can be done to the hardware now; zero where
// it can. It is pure, and changes nothing that in has.
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
	in.MIG.Made, in.MIG.Deferred = f.Made, nil // what failed is tried again
	under := in.MIG.Working
	in.MIG.Working = map[gpu.UUID]*Work{} // of GPUs that are to be left as they are
	for _, w := range under {             // comes to its end first
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
		in.Layouts, in.Past, in.MIG.Expired = f.Changes.Layouts, nil, nil // the lists have room after a while
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

// do does work on paper.
func (f *Forecast) do(in *Input, w *Work) {
	d := f.Inventory.ByUUID(w.GPU)
	if d == nil {
		return
	}
	d.MIG.Instances = slices.Clone(d.MIG.Instances)
	// leave has the GPU stay as it is.
	leave := func() { in.MIG.Working[w.GPU] = &Work{GPU: w.GPU, Leaving: w.Leaving} }
	for _, s := range w.Steps {
		step := Step{Step: s}
		switch s.Op {
		case mig.Destroy:
			d.MIG.Instances = without(d.MIG.Instances, s.Placement)
			delete(f.Made[w.GPU], s.Placement)
		case mig.Create:
			// It takes the place of what may be left of one.
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

// foreseen is the number of a GPU instance that no driver gives.
const foreseen = 1 << 20

// without is a list of instances without the one at a placement.
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

// resetsForMIG reports whether a GPU's MIG mode changes with a reset: on Ampere it does, on
// Hopper and later GPUs it does not (NVIDIA's MIG user guide, "Enable MIG Mode").
func resetsForMIG(d *gpu.Device) bool { return strings.HasPrefix(d.ComputeCapability, "8.") }
