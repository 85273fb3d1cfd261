// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"fmt"
	"maps"
	"strings"
	"testing"
	"time"

	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/internal/plan"
	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
	"example.com/gpu-agent/pkg/timeslice"
)

var names = ResourceNames("example.com")

// machine has n GPUs of four memory units each.
func machine(n int) *gpu.Inventory {
	inv := &gpu.Inventory{Driver: "580.1"}
	for i := range n {
		inv.GPUs = append(inv.GPUs, gpu.Device{Index: i, UUID: nth(i), Memory: 4500, Reserved: 400})
	}
	return inv
}

// holds is an allocation of devices.
func holds(resource string, ids ...string) ledger.Allocation {
	r, err := RecordOf(resource, ids)
	if err != nil {
		panic(err)
	}
	return ledger.Allocation{ID: cdi.Key(resource, ids), Owner: ledger.DevicePlugin, Resource: resource, Grants: r.Grants}
}

var (
	wholeLayout  = plan.Layout{Known: true, Offers: true, Division: piece.Division{Kind: piece.KindWhole, N: 1}}
	sharedLayout = plan.Layout{Known: true, Offers: true, Division: piece.Division{Kind: piece.KindUnits, N: 4, Unit: 1024}}
)

func replicaLayout(n int) plan.Layout {
	return plan.Layout{Known: true, Offers: true, Division: piece.Division{Kind: piece.KindReplica, N: n}}
}

// listed is a resource's list, a word a device.
func listed(v *Offer, resource string) string {
	var out []string
	for _, r := range v.Resources {
		if r.Name != resource {
			continue
		}
		for _, dev := range r.Devices {
			i := 0
			fmt.Sscanf(dev.ID, "GPU-%08d", &i)
			_, n, _ := strings.Cut(dev.ID, "::")
			word := fmt.Sprint(i)
			if n != "" {
				word += "." + n
			}
			switch {
			case dev.Leaving && dev.Healthy:
				word += "~"
			case !dev.Healthy:
				word += "x"
			}
			if (dev.Reason == "") != (dev.Healthy && !dev.Leaving) {
				word += "(reason: " + dev.Reason + ")"
			}
			out = append(out, word)
		}
	}
	return strings.Join(out, " ")
}

// Build lists what a GPU has, had and has given away.
func TestBuild(t *testing.T) {
	two := []ledger.Allocation{holds(memName, timeslice.ID(nth(0), 1))}
	claim := ledger.Allocation{ID: "claim", Owner: ledger.DRA, Grants: []ledger.Grant{{GPU: nth(0), Piece: piece.Units{Set: piece.SetOf([]int{1})}}}}
	admin := ledger.Allocation{ID: "admin", Owner: ledger.DRA, Grants: []ledger.Grant{{GPU: nth(0), Piece: piece.Whole{}, NoRoom: true}}}
	for _, tt := range []struct {
		name   string
		in     Input
		blocks bool // GPU 0's change waits
		api    bool // and is one of its API
		dra    bool // it is offered through DRA
		units  string
		whole  string
		shares string
	}{
		{name: "plain", units: "0.0 0.1 0.2 0.3", whole: "1"},
		{name: "held", in: Input{Held: two}, units: "0.0 0.1 0.2 0.3", whole: "1"},
		{name: "about to be laid out anew", in: Input{Changing: []gpu.UUID{nth(0)}}, units: "0.0x 0.1x 0.2x 0.3x", whole: "1"},
		{name: "waiting, drained", in: Input{Held: two, Drain: true}, blocks: true, units: "0.0x 0.1~ 0.2x 0.3x", whole: "1"},
		{name: "somebody else's too, still offering", in: Input{Held: two, Others: map[gpu.UUID]string{nth(0): "a plugin"}}, blocks: true,
			units: "0.0x 0.1~ 0.2x 0.3x", whole: "1"},
		{name: "waiting, still offering", in: Input{Held: two}, blocks: true, units: "0.0 0.1 0.2 0.3", whole: "1"},
		{name: "nothing may be given out, held devices stay", in: Input{Held: two, Closed: "no hook program"},
			units: "0.0x 0.1 0.2x 0.3x", whole: "1x"},
		{name: "what was offered before lingers", in: Input{Past: map[gpu.UUID][]plan.Past{nth(1): {{Layout: replicaLayout(2)}, {Layout: sharedLayout}, {Layout: sharedLayout}}}},
			units: "0.0 0.1 0.2 0.3 1.0x 1.1x 1.2x 1.3x", whole: "1", shares: "1.0x 1.1x"},
		{name: "a held ID that no layout has stays for its holder", in: Input{Held: []ledger.Allocation{holds(memName, timeslice.ID(nth(1), 7))}},
			units: "0.0 0.1 0.2 0.3 1.7~", whole: "1x"},
		{name: "waiting to speak another API, whatever --when-busy says", in: Input{Held: two}, blocks: true, api: true,
			units: "0.0x 0.1~ 0.2x 0.3x", whole: "1"},
		{name: "offered through DRA", dra: true, whole: "1"},
		{name: "offered through DRA, and still held", in: Input{Held: two}, dra: true, units: "0.1~", whole: "1"},
		{name: "offered through DRA, what was offered before lingers", in: Input{Past: map[gpu.UUID][]plan.Past{nth(0): {{Layout: sharedLayout}}}}, dra: true,
			units: "0.0x 0.1x 0.2x 0.3x", whole: "1"},
		{name: "a claim has it", in: Input{Held: []ledger.Allocation{claim}}, units: "0.0x 0.1x 0.2x 0.3x", whole: "1"},
		{name: "a claim looks after it", in: Input{Held: []ledger.Allocation{admin}}, units: "0.0 0.1 0.2 0.3", whole: "1"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			in := tt.in
			in.Inventory, in.Names = machine(2), names
			in.Changes = &plan.Changes{Layouts: map[gpu.UUID]plan.Layout{nth(0): sharedLayout, nth(1): wholeLayout}}
			if tt.blocks {
				in.Changes.Blocked = []plan.Blocked{{GPU: nth(0), API: tt.api}}
			}
			if tt.dra {
				layout := sharedLayout
				layout.API = ledger.DRA
				in.Changes.Layouts[nth(0)] = layout
			}
			v := Build(in)
			for resource, want := range map[string]string{memName: tt.units, gpuName: tt.whole, repName: tt.shares} {
				if got := listed(v, resource); got != want {
					t.Errorf("%s: %s, want %s", resource, got, want)
				}
			}
		})
	}
}

// The NUMA nodes are told of all devices of a resource or of none.
func TestNUMAHints(t *testing.T) {
	placements := func(s string) plan.Layout {
		_, p, start, ci, err := mig.ParseID(on(nth(0), s)[0])
		if err != nil {
			t.Fatal(err)
		}
		return plan.Divided(piece.Instances([]mig.Placement{{Profile: p, Start: start, CI: ci}}))
	}
	const one = "example.com/mig-1g.10gb"
	for _, tt := range []struct {
		name     string
		aligned  Alignment
		layouts  [2]plan.Layout
		onDemand int // this GPU is
		unknown  int // this GPU's NUMA node is
		want     map[string]string
	}{
		{"none", AlignNone, [2]plan.Layout{wholeLayout, wholeLayout}, -1, -1, map[string]string{gpuName: "- -"}},
		{"whole", AlignFixed, [2]plan.Layout{wholeLayout, wholeLayout}, -1, -1, map[string]string{gpuName: "0 1"}},
		{"a node is not known", AlignFixed, [2]plan.Layout{wholeLayout, wholeLayout}, -1, 1, map[string]string{gpuName: "- -"}},
		{"one of each", AlignFixed, [2]plan.Layout{wholeLayout, sharedLayout}, -1, -1, map[string]string{gpuName: "0", memName: "- - - -"}},
		{"units where they are asked for", AlignAll, [2]plan.Layout{wholeLayout, sharedLayout}, -1, -1, map[string]string{gpuName: "0", memName: "1 1 1 1"}},
		{"replicas", AlignFixed, [2]plan.Layout{replicaLayout(2), wholeLayout}, -1, -1, map[string]string{repName: "- -", gpuName: "1"}},
		{"fixed MIG", AlignFixed, [2]plan.Layout{placements("1g.10gb@0"), placements("1g.10gb@3")}, -1, -1, map[string]string{one: "0 1"}},
		{"MIG on demand", AlignFixed, [2]plan.Layout{placements("1g.10gb@0"), placements("1g.10gb@3")}, 1, -1, map[string]string{one: "- -"}},
		{"MIG on demand where it is asked for", AlignAll, [2]plan.Layout{placements("1g.10gb@0"), placements("1g.10gb@3")}, 1, -1, map[string]string{one: "0 1"}},
		{"the fixed ones of another resource", AlignFixed, [2]plan.Layout{placements("1g.10gb@0"), placements("2g.20gb@0")}, 1, -1,
			map[string]string{one: "0", "example.com/mig-2g.20gb": "-"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			in := Input{Inventory: machine(2), Names: names, Aligned: tt.aligned, OnDemand: func(u gpu.UUID) bool { return u == nth(tt.onDemand) }}
			for i := range in.Inventory.GPUs {
				if n := i; n != tt.unknown {
					in.Inventory.GPUs[i].NUMA = &n
				} else {
					in.Inventory.GPUs[i].NUMA = nil
				}
			}
			in.Changes = &plan.Changes{Layouts: map[gpu.UUID]plan.Layout{nth(0): tt.layouts[0], nth(1): tt.layouts[1]}}
			got := map[string]string{}
			for _, r := range Build(in).Resources {
				var words []string
				for _, dev := range r.Devices {
					word := "-"
					if dev.NUMA.Known {
						word = fmt.Sprint(dev.NUMA.Node)
					}
					words = append(words, word)
				}
				got[r.Name] = strings.Join(words, " ")
			}
			if !maps.Equal(got, tt.want) {
				t.Errorf("NUMA nodes %v, want %v", got, tt.want)
			}
		})
	}
}

// A pod's MIG device stays Healthy when the node's resources get other names: it is
// listed under the former one for its holder's sake. It used to be listed without its
// place, so that the front-end could not tell that somebody has it.
func TestMIGDeviceUnderAFormerName(t *testing.T) {
	card := a100.card(t)
	l := ledger.New(func() {}, time.Now)
	f := New(l, time.Now)
	id := on(nth(0), "3g.40gb@0")
	a := holds("former.example/mig-3g.40gb", id...)
	if err := f.Found(a.ID, a.Record(), time.Time{}, time.Time{}); err != nil {
		t.Fatal(err)
	}
	f.Publish(func(held []ledger.Allocation) *Offer {
		return Build(Input{Inventory: machine(1), Names: names, Held: held, Cards: map[gpu.UUID]*mig.Card{nth(0): card},
			Changes: &plan.Changes{Layouts: map[gpu.UUID]plan.Layout{nth(0): plan.Divided(piece.Instances(card.Placements()))}, MIG: map[gpu.UUID]ledger.MIG{nth(0): {Card: card}}}})
	})
	devices, _ := f.List(a.Resource)
	if len(devices) != 1 || devices[0].ID != id[0] || !devices[0].Healthy || !devices[0].Leaving {
		t.Errorf("listed as %+v", devices)
	}
	if _, err := f.Allocate(a.Resource, id); err == nil {
		t.Error("the former resource is still given out")
	}
}
