// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"example.com/gpu-agent/internal/config"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
)

// TestForesee has how GPU 0, an A100, comes to what is wanted of it.
func TestForesee(t *testing.T) {
	name := func(s string) mig.Name {
		n, err := mig.Parse(s)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	small := func(at int) gpu.Instance {
		return gpu.Instance{Profile: "1g.10gb", Placement: gpu.Placement{Start: at, Size: 1}, GI: at + 1}
	}
	of := func(pod, profile string, at int) ledger.Allocation { return held(pod, placement(t, profile, at)...) }
	starts := func(a ledger.Allocation, second int) ledger.Allocation {
		a.Asked = time.Unix(int64(second)+1, 0)
		return a
	}
	halves := config.Want{Mode: config.MIG, Geometry: []mig.Count{{Profile: name("3g.40gb"), N: 2}}}
	demand := config.Want{Mode: config.MIG, OnDemand: true}
	on, off := true, false
	for _, c := range []struct {
		name  string
		want  config.Want
		in    func(*gpu.Device, *Input)
		held  []ledger.Allocation
		shut  bool
		steps string
		then  string // what stands in the end
		mode  string
		waits status.Reason
		stays bool // it waits for holders
	}{
		{name: "the mode, with a reset, and what is wanted then", want: halves, steps: "enable MIG mode!, create 3g.40gb@0, create 3g.40gb@4", then: "3g.40gb@0 3g.40gb@4", mode: "mig"},
		{name: "a Hopper needs no reset", want: halves, in: func(d *gpu.Device, _ *Input) { d.ComputeCapability = "9.0" }, steps: "enable MIG mode, create 3g.40gb@0, create 3g.40gb@4", then: "3g.40gb@0 3g.40gb@4", mode: "mig"},
		{name: "a reset that may not be", want: halves, in: func(_ *gpu.Device, in *Input) { in.MIG.NeverReset = true }, steps: "enable MIG mode!", mode: "mig", waits: status.ResetDue},
		{name: "a mode that was to come is taken back", want: config.Want{Mode: config.Whole}, in: func(d *gpu.Device, _ *Input) { d.MIG.Pending = &on }, steps: "disable MIG mode", mode: "whole"},
		{name: "placements are told in MIG mode", want: halves, in: func(d *gpu.Device, _ *Input) {
			for i := range d.MIG.Profiles {
				d.MIG.Profiles[i].Placements = nil
			}
		}, steps: "enable MIG mode!", mode: "mig"},
		{name: "nothing can be done now", want: halves, shut: true, mode: "mig", waits: status.GPUDriverHangs},
		{name: "a pod on an instance", want: halves, in: func(d *gpu.Device, _ *Input) {
			d.MIG.Enabled, d.MIG.Instances = true, []gpu.Instance{small(0), small(1)}
		},
			held: []ledger.Allocation{of("a", "1g.10gb", 1)}, then: "1g.10gb@0 1g.10gb@1", mode: "mig", stays: true},
		{name: "two containers start, one after the other", want: demand, in: func(d *gpu.Device, _ *Input) { d.MIG.Enabled, d.MIG.Instances = true, []gpu.Instance{small(0)} },
			held:  []ledger.Allocation{starts(of("a", "3g.40gb", 0), 1), starts(of("b", "1g.10gb", 5), 0)},
			steps: "create 1g.10gb@5, destroy 1g.10gb@0, create 3g.40gb@0", then: "3g.40gb@0 1g.10gb@5", mode: "mig"},
		{name: "what failed is tried again", want: demand, in: func(d *gpu.Device, in *Input) {
			d.MIG.Enabled = true
			in.MIG.Deferred = map[Want]bool{{Allocation: "a", GPU: d.UUID, Placement: mig.Placement{Profile: name("3g.40gb"), Size: 4}}: true}
		}, held: []ledger.Allocation{starts(of("a", "3g.40gb", 0), 1)}, steps: "create 3g.40gb@0", then: "3g.40gb@0", mode: "mig"},
		{name: "what is under way comes to its end first", want: config.Want{Mode: config.Whole}, in: func(d *gpu.Device, in *Input) {
			d.MIG.Enabled, d.MIG.Pending = true, &off
			in.MIG.Working = map[gpu.UUID]*Work{d.UUID: {GPU: d.UUID, Steps: []mig.Step{{Op: mig.Create, Placement: mig.Placement{Profile: name("1g.10gb"), Start: 3, Size: 1}}}}}
		}, steps: "create 1g.10gb@3, destroy 1g.10gb@3, disable MIG mode!", mode: "whole"},
		{name: "what is left of an instance", want: halves, in: func(d *gpu.Device, in *Input) {
			d.MIG.Enabled = true
			d.MIG.Instances = []gpu.Instance{{Profile: "3g.40gb", Placement: gpu.Placement{Start: 4, Size: 4}, CI: -1}}
			in.MIG.Made = map[gpu.UUID]map[mig.Placement]bool{d.UUID: {{Profile: name("3g.40gb"), Start: 4, Size: 4}: true}}
		}, steps: "create 3g.40gb@0, create 3g.40gb@4", then: "3g.40gb@0 3g.40gb@4", mode: "mig"},
		{name: "room in the lists comes with time", want: config.Want{Mode: config.Shared, Replicas: 20_000}, in: func(d *gpu.Device, in *Input) {
			in.Layouts[d.UUID] = wholeLayout
			in.Past = map[gpu.UUID][]Past{d.UUID: {{Layout: Layout{Known: true, Offers: true, Division: piece.Division{Kind: piece.KindUnits, N: 45_000}}}}}
		}, mode: "shared"},
	} {
		t.Run(c.name, func(t *testing.T) {
			inv := machine(1)
			d := &inv.GPUs[0]
			d.MIG, d.ComputeCapability, c.want.GPU = a100(), "8.0", d.UUID
			in := Input{Inventory: inv, Wanted: []config.Want{c.want}, Layouts: map[gpu.UUID]Layout{}, Allocations: c.held, Unit: unit}
			if c.in != nil {
				c.in(d, &in)
			}
			if in.MIG.Made == nil {
				in.MIG.Made = map[gpu.UUID]map[mig.Placement]bool{d.UUID: {}}
				for i := range d.MIG.Instances {
					p, _ := mig.PlacementOf(&d.MIG.Instances[i])
					in.MIG.Made[d.UUID][p] = true
				}
			}
			card, _ := mig.NewCard(&d.MIG)
			in.MIG.Cards = map[gpu.UUID]*mig.Card{d.UUID: card}
			closed := status.Cause{}
			if c.shut {
				closed = status.Why(status.GPUDriverHangs, "the driver does not answer")
			}
			before := fmt.Sprintf("%+v %+v %+v %+v", *in.Inventory, in.Layouts, in.Past, in.MIG.Made)
			got := Foresee(in, closed)
			if after := fmt.Sprintf("%+v %+v %+v %+v", *in.Inventory, in.Layouts, in.Past, in.MIG.Made); after != before {
				t.Errorf("what it was asked about has changed:\n%s\n%s", before, after)
			}
			var steps, then []string
			for _, s := range got.Steps[d.UUID] {
				text := s.String()
				if s.Reset {
					text += "!"
				}
				steps = append(steps, text)
			}
			end := got.Inventory.GPUs[0].MIG
			for i := range end.Instances {
				p, err := mig.PlacementOf(&end.Instances[i])
				if err != nil || end.Instances[i].CI < 0 {
					t.Errorf("%+v: %v", end.Instances[i], err)
				}
				then = append(then, p.String())
			}
			slices.SortFunc(then, func(a, b string) int { return strings.Compare(a[strings.Index(a, "@"):], b[strings.Index(b, "@"):]) })
			if strings.Join(steps, ", ") != c.steps || strings.Join(then, " ") != c.then {
				t.Errorf("%q, and %q stands then; want %q and %q", steps, then, c.steps, c.then)
			}
			if mode := got.Changes.Layouts[d.UUID].Mode(); mode != c.mode {
				t.Errorf("it is %s, want %s", mode, c.mode)
			}
			if why := got.Waits[d.UUID]; why.Reason != c.waits {
				t.Errorf("it waits: %+v, want %s", why, c.waits)
			}
			if untold := got.Untold[d.UUID]; untold != !card.Known() {
				t.Errorf("untold is %v", untold)
			}
			if stays := len(got.Changes.Blocked) > 0; stays != c.stays || stays && len(got.Changes.Blocked[0].In) == 0 {
				t.Errorf("blocked: %+v", got.Changes.Blocked)
			}
			if c.waits == "" && !got.Untold[d.UUID] {
				// Nothing is left to do.
				in.Inventory, in.Layouts, in.Past, in.MIG.Made, in.MIG.Working = got.Inventory, got.Changes.Layouts, nil, got.Made, nil
				if again := Foresee(in, closed); len(again.Steps) > 0 || !reflect.DeepEqual(again.Changes.Layouts, got.Changes.Layouts) {
					t.Errorf("and then: %+v, %+v", again.Steps, again.Changes.Layouts)
				}
			}
		})
	}
}
