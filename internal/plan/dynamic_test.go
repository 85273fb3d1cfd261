// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"example.com/gpu-agent/internal/config"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
)

// TestDynamic has what becomes of a dynamic GPU by who has it, and the mode that it is in.
func TestDynamic(t *testing.T) {
	by := func(f ledger.FrontEnd, a ledger.Allocation) ledger.Allocation { a.Owner = f; return a }
	claim := func(name string, g ...ledger.Grant) ledger.Allocation { return by(ledger.DRA, held(name, g...)) }
	asked := func(a ledger.Allocation) ledger.Allocation { a.Asked = a.Asked.AddDate(2026, 0, 0); return a }
	open := func(a ledger.Allocation) ledger.Allocation { a.Phase = ledger.Open; return a }
	small, err := mig.Parse("1g.10gb")
	if err != nil {
		t.Fatal(err)
	}
	one := []mig.Placement{{Profile: small, Start: 1, Size: 1}}
	pending := func(on bool) func(*gpu.Device, *Input) {
		return func(d *gpu.Device, _ *Input) { d.MIG.Pending = &on }
	}
	busy := func(d *gpu.Device, _ *Input) { d.MIG.Instances[0].Busy = true }
	ampere := func(d *gpu.Device, in *Input) { d.ComputeCapability, in.MIG.NeverReset = "8.0", true }
	hopper := func(d *gpu.Device, in *Input) { d.ComputeCapability, in.MIG.NeverReset = "9.0", true }
	failed := func(d *gpu.Device, in *Input) {
		in.MIG.Stuck = map[gpu.UUID]status.Cause{d.UUID: status.Why(status.ResetDue, "clients are on it")}
	}
	with := func(layout Layout, api ledger.FrontEnd) func(*gpu.Device, *Input) {
		return func(d *gpu.Device, in *Input) { layout.API = api; in.Layouts[d.UUID] = layout }
	}
	unknown := func(d *gpu.Device, in *Input) {
		for i := range d.MIG.Profiles {
			d.MIG.Profiles[i].Placements = nil
		}
	}
	for _, c := range []struct {
		name      string
		mig       bool // the mode that it is in
		instances []mig.Placement
		held      []ledger.Allocation
		as        func(*gpu.Device, *Input)
		work      string
		of        string // the allocation that the work is for
		trouble   string // "allocation: why"
		stuck     status.Reason
		mode      string // "" is dynamic
		waits     bool
		units     int // 0 is 4
	}{
		{name: "idle"},
		{name: "idle in MIG mode", mig: true},
		{name: "an idle instance stays", mig: true, instances: one},
		{name: "one wants it whole", held: []ledger.Allocation{claim("a", whole(0))}},
		{name: "one wants it whole, in MIG mode", mig: true, held: []ledger.Allocation{claim("a", whole(0))}, work: "disable MIG mode", of: "a", trouble: "a: its GPU is being prepared: disable MIG mode"},
		{name: "one wants memory, an instance is idle", mig: true, instances: one, held: []ledger.Allocation{claim("a", units(0, 0, 1))}, work: "destroy 1g.10gb@1, disable MIG mode", of: "a",
			trouble: "a: its GPU is being prepared: destroy 1g.10gb@1, disable MIG mode"},
		{name: "shares come one after another", mig: true, held: []ledger.Allocation{claim("a", units(0, 0)), claim("b", units(0, 1))}, work: "disable MIG mode", of: "a",
			trouble: "a: its GPU is being prepared: disable MIG mode; b: its GPU is being prepared: disable MIG mode"},
		{name: "one wants an instance", held: []ledger.Allocation{asked(claim("a", placement(t, "1g.10gb", 1)...))}, work: "enable MIG mode", of: "a", trouble: "a: its GPU is being prepared: enable MIG mode"},
		{name: "an instance was promised", held: []ledger.Allocation{claim("a", placement(t, "1g.10gb", 1)...)}, work: "enable MIG mode", of: "a", trouble: "a: its GPU is being prepared: enable MIG mode"},
		{name: "one wants an instance, in MIG mode", mig: true, held: []ledger.Allocation{asked(claim("a", placement(t, "1g.10gb", 1)...))}, work: "create 1g.10gb@1", of: "a",
			trouble: "a: its instance is being made: create 1g.10gb@1"},
		{name: "an instance is held", mig: true, instances: one, held: []ledger.Allocation{open(claim("a", placement(t, "1g.10gb", 1)...))}},
		{name: "the mode was lost under a holder", held: []ledger.Allocation{claim("a", placement(t, "1g.10gb", 1)...)}, work: "enable MIG mode", of: "a", trouble: "a: its GPU is being prepared: enable MIG mode"},
		{name: "found with holders of both", mig: true, instances: one, held: []ledger.Allocation{open(claim("a", placement(t, "1g.10gb", 1)...)), claim("b", whole(0))},
			trouble: "b: GPU 0 (" + string(uuid(0)) + ") is in MIG mode, and instances of it are held"},
		{name: "found with holders of both, not in MIG mode", held: []ledger.Allocation{claim("a", placement(t, "1g.10gb", 1)...), open(claim("b", whole(0)))},
			trouble: "a: GPU 0 (" + string(uuid(0)) + ") is held, and is not in MIG mode"},
		{name: "somebody unknown is on an instance", mig: true, instances: one, as: busy, stuck: status.BusyProcess},
		{name: "one wants it whole, and somebody unknown is on an instance", mig: true, instances: one, as: busy, held: []ledger.Allocation{claim("a", whole(0))}, stuck: status.BusyProcess,
			trouble: "a: GPU 0 (" + string(uuid(0)) + ") leaves MIG mode after the end of a process that no allocation covers (1g.10gb@1)"},
		{name: "Ampere without resets", as: ampere, stuck: status.ResetDue},
		{name: "Ampere without resets, and a claim slipped through", as: ampere, held: []ledger.Allocation{asked(claim("a", placement(t, "1g.10gb", 1)...))}, stuck: status.ResetDue,
			trouble: "a: GPU 0 (" + string(uuid(0)) + ") changes its MIG mode with a reset, and --reset is never"},
		{name: "Hopper without resets", as: hopper, held: []ledger.Allocation{claim("a", placement(t, "1g.10gb", 1)...)}, work: "enable MIG mode", of: "a", trouble: "a: its GPU is being prepared: enable MIG mode"},
		{name: "the mode could not be changed", as: failed, stuck: status.ResetDue},
		{name: "the mode could not be changed, and one waits", as: failed, held: []ledger.Allocation{claim("a", placement(t, "1g.10gb", 1)...)}, stuck: status.ResetDue, work: "enable MIG mode", of: "a",
			trouble: "a: its GPU is being prepared: enable MIG mode"},
		{name: "a mode is pending that nobody wants", as: pending(true), work: "disable MIG mode"},
		{name: "the end of a mode is pending that nobody wants", mig: true, as: pending(false), work: "enable MIG mode"},
		{name: "placements are told in MIG mode alone", as: unknown, work: "enable MIG mode"},
		{name: "a GPU with a fault", as: func(d *gpu.Device, _ *Input) { d.Fault = "lost" }, held: []ledger.Allocation{claim("a", whole(0))}, mode: "whole", trouble: "a: GPU 0 (" + string(uuid(0)) + "): lost"},
		{name: "somebody else gives it out", as: func(d *gpu.Device, in *Input) { in.Others = map[gpu.UUID]string{d.UUID: "NVIDIA's plugin"} }, mode: "off"},
		{name: "a pod has it through the device plugin", as: with(wholeLayout, ledger.DevicePlugin), held: []ledger.Allocation{by(ledger.DevicePlugin, held("a", whole(0)))}, mode: "whole", waits: true},
		{name: "a claim has shares of it", as: with(Layout{Known: true, Offers: true, Division: piece.Division{Kind: piece.KindUnits, N: 2, Unit: 2 * unit}}, ledger.DRA), held: []ledger.Allocation{claim("a", units(0, 0))}, units: 2},
		{name: "other units", as: with(Layout{Known: true, Offers: true, Division: piece.Division{Kind: piece.KindUnits, N: 2, Unit: 2 * unit}}, ledger.DRA)},
	} {
		t.Run(c.name, func(t *testing.T) {
			inv := machine(1)
			d := &inv.GPUs[0]
			d.MIG = a100()
			d.MIG.Enabled = c.mig
			made := map[mig.Placement]bool{}
			for _, s := range c.instances {
				d.MIG.Instances = append(d.MIG.Instances, gpu.Instance{Profile: s.Profile.String(), Placement: gpu.Placement{Start: s.Start, Size: s.Size}})
				made[s] = true
			}
			in := Input{Inventory: inv, Allocations: c.held, Layouts: map[gpu.UUID]Layout{}, Unit: unit, Wanted: []config.Want{{GPU: d.UUID, Mode: config.Dynamic, API: ledger.DRA, OnDemand: true}},
				MIG: MIGInput{Made: map[gpu.UUID]map[mig.Placement]bool{d.UUID: made}}}
			if c.as != nil {
				c.as(d, &in)
			}
			card, err := mig.NewCard(&d.MIG)
			if err != nil {
				t.Fatal(err)
			}
			in.MIG.Cards = map[gpu.UUID]*mig.Card{d.UUID: card}

			got := Make(in)
			layout := got.Layouts[d.UUID]
			mode, n := c.mode, c.units
			if mode == "" {
				mode = "dynamic"
			}
			if layout.Mode() != mode {
				t.Errorf("it is %s, want %s", layout.Mode(), mode)
			}
			if n == 0 {
				n = 4
			}
			if layout.Dynamic && (layout.N != n || len(layout.Placements) != len(card.Placements()) || !layout.Through(ledger.DRA) || !layout.Has(piece.KindWhole) || !layout.Has(piece.KindUnits) || layout.Has(piece.KindReplica)) {
				t.Errorf("it offers %+v", layout)
			}
			work, of := "", ""
			for _, w := range got.Work {
				work, of = work+w.String(), of+w.Allocation
			}
			if work != c.work || of != c.of {
				t.Errorf("work %q for %q, want %q for %q", work, of, c.work, c.of)
			}
			var trouble []string
			for id, why := range got.Trouble {
				trouble = append(trouble, fmt.Sprintf("%s: %s", id, why.Message))
			}
			slices.Sort(trouble)
			if text := strings.Join(trouble, "; "); text != c.trouble {
				t.Errorf("trouble: %s\nwant     %s", text, c.trouble)
			}
			if why := got.Stuck[d.UUID]; why.Reason != c.stuck {
				t.Errorf("stuck: %+v, want %s", why, c.stuck)
			}
			if c.waits != got.Blocks(d.UUID) {
				t.Errorf("blocked: %+v", got.Blocked)
			}
			if got.Layouts[d.UUID].Dynamic && c.work == "" {
				in.Layouts = got.Layouts
				if again := Make(in); len(again.Changing) > 0 || !again.Layouts[d.UUID].Equal(layout) {
					t.Errorf("a second plan changes %v", again.Changing)
				}
			}
		})
	}
}

// TestDynamicGoes has what a dynamic GPU becomes when its partition is another one.
func TestDynamicGoes(t *testing.T) {
	claim := func(name string, g ...ledger.Grant) ledger.Allocation {
		a := held(name, g...)
		a.Owner = ledger.DRA
		return a
	}
	small, err := mig.Parse("1g.10gb")
	if err != nil {
		t.Fatal(err)
	}
	at := mig.Placement{Profile: small, Start: 1, Size: 1}
	for _, c := range []struct {
		name  string
		mig   bool
		held  []ledger.Allocation
		want  config.Want
		mode  string
		waits bool
	}{
		{name: "whole, idle", want: config.Want{Mode: config.Whole, API: ledger.DRA}, mode: "whole"},
		{name: "whole, idle in MIG mode", mig: true, want: config.Want{Mode: config.Whole, API: ledger.DRA}, mode: "mig"},
		{name: "whole, a share is held", held: []ledger.Allocation{claim("a", units(0, 1))}, want: config.Want{Mode: config.Whole, API: ledger.DRA}, mode: "dynamic", waits: true},
		{name: "whole, an instance is held", mig: true, held: []ledger.Allocation{claim("a", placement(t, "1g.10gb", 1)...)}, want: config.Want{Mode: config.Whole, API: ledger.DRA}, mode: "mig", waits: true},
		{name: "MIG, an instance is held", mig: true, held: []ledger.Allocation{claim("a", placement(t, "1g.10gb", 1)...)}, want: config.Want{Mode: config.MIG, OnDemand: true, API: ledger.DRA}, mode: "mig"},
		{name: "MIG, held whole", held: []ledger.Allocation{claim("a", whole(0))}, want: config.Want{Mode: config.MIG, OnDemand: true, API: ledger.DRA}, mode: "dynamic", waits: true},
		{name: "the device plugin, held whole", held: []ledger.Allocation{claim("a", whole(0))}, want: config.Want{Mode: config.Whole, API: ledger.DevicePlugin}, mode: "dynamic", waits: true},
		{name: "nothing is said", held: []ledger.Allocation{claim("a", whole(0))}, mode: "dynamic"},
		{name: "nothing is said, in MIG mode", mig: true, held: []ledger.Allocation{claim("a", placement(t, "1g.10gb", 1)...)}, mode: "dynamic"},
		{name: "nothing is said, one wants it whole in MIG mode", mig: true, held: []ledger.Allocation{claim("a", whole(0))}, mode: "dynamic"},
		{name: "off, idle", want: config.Want{Mode: config.Off}, mode: "off"},
		{name: "off, held", held: []ledger.Allocation{claim("a", whole(0))}, want: config.Want{Mode: config.Off}, mode: "dynamic", waits: true},
	} {
		t.Run(c.name, func(t *testing.T) {
			inv := machine(1)
			d := &inv.GPUs[0]
			d.MIG = a100()
			if d.MIG.Enabled = c.mig; c.mig {
				d.MIG.Instances = []gpu.Instance{{Profile: "1g.10gb", Placement: gpu.Placement{Start: 1, Size: 1}}}
			}
			card, err := mig.NewCard(&d.MIG)
			if err != nil {
				t.Fatal(err)
			}
			have := Divided(piece.Instances(card.Placements()))
			have.Dynamic, have.N, have.Unit, have.API = true, 4, unit, ledger.DRA
			c.want.GPU = d.UUID
			got := Make(Input{Inventory: inv, Allocations: c.held, Layouts: map[gpu.UUID]Layout{d.UUID: have}, Unit: unit, Wanted: []config.Want{c.want},
				MIG: MIGInput{Cards: map[gpu.UUID]*mig.Card{d.UUID: card}, Made: map[gpu.UUID]map[mig.Placement]bool{d.UUID: {at: true}}}})
			if mode := got.Layouts[d.UUID].Mode(); mode != c.mode || got.Blocks(d.UUID) != c.waits {
				t.Errorf("it is %s, want %s; blocked: %+v, want %v", mode, c.mode, got.Blocked, c.waits)
			}
			if c.name == "nothing is said, one wants it whole in MIG mode" && (len(got.Work) != 1 || got.Work[0].String() != "destroy 1g.10gb@1, disable MIG mode") {
				t.Errorf("work %+v", got.Work)
			}
		})
	}
}

// After a restart no layout says that a GPU was dynamic. A claim that was promised the mode
// that it was not in, before an edit, was never prepared then, and the edit waited for it.
func TestPromisedModeAfterARestart(t *testing.T) {
	claim := func(g ...ledger.Grant) ledger.Allocation {
		a := held("a", g...)
		a.Owner = ledger.DRA
		return a
	}
	for _, c := range []struct {
		name string
		mig  bool
		held ledger.Allocation
		want config.Mode
		work string
	}{
		{"an instance, and it is to be whole", false, claim(placement(t, "1g.10gb", 1)...), config.Whole, "enable MIG mode"},
		{"an instance, and it is to be off", false, claim(placement(t, "1g.10gb", 1)...), config.Off, "enable MIG mode"},
		{"memory, and it is to be MIG", true, claim(units(0, 0)), config.MIG, "disable MIG mode"},
		{"all of it, and it is to be off", true, claim(whole(0)), config.Off, "disable MIG mode"},
	} {
		t.Run(c.name, func(t *testing.T) {
			inv := machine(1)
			d := &inv.GPUs[0]
			d.MIG = a100()
			d.MIG.Enabled = c.mig
			card, err := mig.NewCard(&d.MIG)
			if err != nil {
				t.Fatal(err)
			}
			got := Make(Input{Inventory: inv, Allocations: []ledger.Allocation{c.held}, Layouts: map[gpu.UUID]Layout{}, Unit: unit,
				Wanted: []config.Want{{GPU: d.UUID, Mode: c.want, API: ledger.DRA, OnDemand: c.want == config.MIG}},
				MIG:    MIGInput{Cards: map[gpu.UUID]*mig.Card{d.UUID: card}}})
			var work string
			for _, w := range got.Work {
				work += w.String()
			}
			if work != c.work || len(got.Blocked) != 1 {
				t.Errorf("work %q, want %q; blocked %+v, trouble %+v", work, c.work, got.Blocked, got.Trouble)
			}
		})
	}
}
