// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"fmt"
	"maps"
	"strings"
	"testing"

	"example.com/gpu-agent/internal/deviceplugin"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/plan"
	"example.com/gpu-agent/internal/workload"
	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
	"example.com/gpu-agent/pkg/timeslice"
)

const unit = gpu.MiB(1024)

var names = deviceplugin.ResourceNames("example.com")

func uuid(i int) gpu.UUID { return gpu.UUID(fmt.Sprintf("GPU-%08d-0000-0000-0000-000000000000", i)) }

// machine has n GPUs of four memory units each.
func machine(n int) *gpu.Inventory {
	inv := &gpu.Inventory{Driver: "580.1"}
	for i := range n {
		inv.GPUs = append(inv.GPUs, gpu.Device{Index: i, Minor: n - i, UUID: uuid(i), Memory: 4500, Reserved: 400})
	}
	return inv
}

// claimed makes a claim; ids are "GPU" or "GPU::unit" by index.
func claimed(resource, pod string, short ...string) ledger.Allocation {
	var ids []string
	for _, id := range short {
		var i, n int
		if at, unit, shared := strings.Cut(id, "::"); shared {
			fmt.Sscan(at, &i)
			fmt.Sscan(unit, &n)
			ids = append(ids, timeslice.ID(uuid(i), n))
		} else {
			fmt.Sscan(id, &i)
			ids = append(ids, string(uuid(i)))
		}
	}
	return ledger.Allocation{ID: cdi.Key(resource, ids), Owner: ledger.DevicePlugin, Resource: resource, Grants: grantsOf(resource, ids...),
		Holder: ledger.Holder{Pod: workload.Pod{Namespace: "ns", Name: pod}, Container: "c"}}
}

// recordFor is the record of devices, as far as their IDs say.
func recordFor(resource string, ids ...string) ledger.Record {
	return ledger.Record{Owner: ledger.DevicePlugin, Resource: resource, Grants: grantsOf(resource, ids...)}
}

// grantsOf is what devices stand for, as far as their IDs say.
func grantsOf(resource string, ids ...string) []ledger.Grant {
	r, err := deviceplugin.RecordOf(resource, ids)
	if err != nil {
		panic(err)
	}
	return r.Grants
}

var (
	wholeCut  = plan.Layout{Known: true, Offers: true, Kind: ledger.Whole, N: 1}
	sharedCut = plan.Layout{Known: true, Offers: true, Kind: ledger.Units, N: 4, Unit: unit}
)

func replicaCut(n int) plan.Layout {
	return plan.Layout{Known: true, Offers: true, Kind: ledger.Replica, N: n}
}

// listed is a resource's list, a word a device.
func listed(v *deviceplugin.Offer, resource string) string {
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

func TestView(t *testing.T) {
	two := []ledger.Allocation{claimed(names.Units, "a", "0::1")}
	for _, tt := range []struct {
		name   string
		in     deviceplugin.Input
		blocks bool // GPU 0's change waits
		units  string
		whole  string
		shares string
	}{
		{name: "plain", units: "0.0 0.1 0.2 0.3", whole: "1"},
		{name: "held", in: deviceplugin.Input{Held: two}, units: "0.0 0.1 0.2 0.3", whole: "1"},
		{name: "about to be re-cut", in: deviceplugin.Input{Recutting: []gpu.UUID{uuid(0)}}, units: "0.0x 0.1x 0.2x 0.3x", whole: "1"},
		{name: "waiting, drained", in: deviceplugin.Input{Held: two, Drain: true}, blocks: true, units: "0.0x 0.1~ 0.2x 0.3x", whole: "1"},
		{name: "somebody else's too, still offering", in: deviceplugin.Input{Held: two, Others: map[gpu.UUID]string{uuid(0): "a plugin"}}, blocks: true,
			units: "0.0x 0.1~ 0.2x 0.3x", whole: "1"},
		{name: "waiting, still offering", in: deviceplugin.Input{Held: two}, blocks: true, units: "0.0 0.1 0.2 0.3", whole: "1"},
		{name: "nothing may be given out, held devices stay", in: deviceplugin.Input{Held: two, Closed: "no hook program"},
			units: "0.0x 0.1 0.2x 0.3x", whole: "1x"},
		{name: "what was offered before lingers", in: deviceplugin.Input{Past: map[gpu.UUID][]plan.Past{uuid(1): {{Layout: replicaCut(2)}, {Layout: sharedCut}, {Layout: sharedCut}}}},
			units: "0.0 0.1 0.2 0.3 1.0x 1.1x 1.2x 1.3x", whole: "1", shares: "1.0x 1.1x"},
		{name: "a held ID that no cut has stays for its holder", in: deviceplugin.Input{Held: []ledger.Allocation{claimed(names.Units, "a", "1::7")}},
			units: "0.0 0.1 0.2 0.3 1.7~", whole: "1x"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			in := tt.in
			in.Inventory, in.Names = machine(2), names
			in.Changes = &plan.Changes{Layouts: map[gpu.UUID]plan.Layout{uuid(0): sharedCut, uuid(1): wholeCut}}
			if tt.blocks {
				in.Changes.Blocked = []plan.Blocked{{GPU: uuid(0)}}
			}
			v := deviceplugin.Build(in)
			for resource, want := range map[string]string{names.Units: tt.units, names.Whole: tt.whole, names.Replicas: tt.shares} {
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
		_, p, start, ci, err := mig.ParseID(migID(0, s))
		if err != nil {
			t.Fatal(err)
		}
		return plan.Placements([]mig.Placement{{Profile: p, Start: start, CI: ci}})
	}
	const one = "example.com/mig-1g.10gb"
	for _, tt := range []struct {
		name     string
		aligned  deviceplugin.Alignment
		cuts     [2]plan.Layout
		onDemand int // this GPU is
		unknown  int // this GPU's NUMA node is
		want     map[string]string
	}{
		{"none", deviceplugin.AlignNone, [2]plan.Layout{wholeCut, wholeCut}, -1, -1, map[string]string{names.Whole: "- -"}},
		{"whole", deviceplugin.AlignFixed, [2]plan.Layout{wholeCut, wholeCut}, -1, -1, map[string]string{names.Whole: "0 1"}},
		{"a node is not known", deviceplugin.AlignFixed, [2]plan.Layout{wholeCut, wholeCut}, -1, 1, map[string]string{names.Whole: "- -"}},
		{"one of each", deviceplugin.AlignFixed, [2]plan.Layout{wholeCut, sharedCut}, -1, -1, map[string]string{names.Whole: "0", names.Units: "- - - -"}},
		{"units where they are asked for", deviceplugin.AlignAll, [2]plan.Layout{wholeCut, sharedCut}, -1, -1, map[string]string{names.Whole: "0", names.Units: "1 1 1 1"}},
		{"replicas", deviceplugin.AlignFixed, [2]plan.Layout{replicaCut(2), wholeCut}, -1, -1, map[string]string{names.Replicas: "- -", names.Whole: "1"}},
		{"fixed MIG", deviceplugin.AlignFixed, [2]plan.Layout{placements("1g.10gb@0"), placements("1g.10gb@3")}, -1, -1, map[string]string{one: "0 1"}},
		{"MIG on demand", deviceplugin.AlignFixed, [2]plan.Layout{placements("1g.10gb@0"), placements("1g.10gb@3")}, 1, -1, map[string]string{one: "- -"}},
		{"MIG on demand where it is asked for", deviceplugin.AlignAll, [2]plan.Layout{placements("1g.10gb@0"), placements("1g.10gb@3")}, 1, -1, map[string]string{one: "0 1"}},
		{"the fixed ones of another resource", deviceplugin.AlignFixed, [2]plan.Layout{placements("1g.10gb@0"), placements("2g.20gb@0")}, 1, -1,
			map[string]string{one: "0", "example.com/mig-2g.20gb": "-"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			in := deviceplugin.Input{Inventory: machine(2), Names: names, Aligned: tt.aligned, OnDemand: func(u gpu.UUID) bool { return u == uuid(tt.onDemand) }}
			for i := range in.Inventory.GPUs {
				if n := i; n != tt.unknown {
					in.Inventory.GPUs[i].NUMA = &n
				} else {
					in.Inventory.GPUs[i].NUMA = nil
				}
			}
			in.Changes = &plan.Changes{Layouts: map[gpu.UUID]plan.Layout{uuid(0): tt.cuts[0], uuid(1): tt.cuts[1]}}
			got := map[string]string{}
			for _, r := range deviceplugin.Build(in).Resources {
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
