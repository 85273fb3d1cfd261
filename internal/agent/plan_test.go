// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"fmt"
	"maps"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"example.com/gpu-agent/internal/config"
	"example.com/gpu-agent/internal/deviceplugin"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/plan"
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
		Holder: ledger.Holder{Namespace: "ns", Pod: pod, Container: "c"}}
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

func wants(modes ...string) []config.Want {
	var out []config.Want
	for i, m := range modes {
		w := config.Want{GPU: uuid(i), Mode: config.Mode(m)}
		if n, ok := strings.CutPrefix(m, "shared/"); ok {
			w.Mode = config.Shared
			fmt.Sscan(n, &w.Replicas)
		}
		out = append(out, w)
	}
	return out
}

// text is a plan in a form that a table can hold.
func planText(c *plan.Changes, inv *gpu.Inventory) string {
	var b strings.Builder
	for _, d := range inv.GPUs {
		cut := c.Layouts[d.UUID]
		fmt.Fprintf(&b, "%s", cut.Mode())
		if cut.Offers && cut.Kind != ledger.Whole {
			fmt.Fprintf(&b, "%d", cut.N)
		}
		for _, u := range c.Recut {
			if u == d.UUID {
				b.WriteString("!")
			}
		}
		for _, bl := range c.Blocked {
			if bl.GPU == d.UUID {
				fmt.Fprintf(&b, " waits(%s→%s: %s)", bl.From, bl.To, strings.Join(bl.Holders, ","))
			}
		}
		b.WriteString("; ")
	}
	return strings.TrimSuffix(b.String(), "; ")
}

var (
	wholeCut  = plan.Layout{Known: true, Offers: true, Kind: ledger.Whole, N: 1}
	sharedCut = plan.Layout{Known: true, Offers: true, Kind: ledger.Units, N: 4, Unit: unit}
)

func replicaCut(n int) plan.Layout {
	return plan.Layout{Known: true, Offers: true, Kind: ledger.Replica, N: n}
}

func TestPlan(t *testing.T) {
	for _, tt := range []struct {
		name   string
		cuts   []plan.Layout
		claims []ledger.Allocation
		wants  []config.Want
		plan   string
	}{
		{name: "a fresh node", wants: wants("whole", "shared", "off", "shared/3"), plan: "whole!; shared4!; off!; shared3!"},
		{name: "nothing is wanted of a fresh node", plan: "unset; unset; unset; unset"},
		{name: "nothing to do", cuts: []plan.Layout{wholeCut, sharedCut, {Known: true}, replicaCut(3)},
			wants: wants("whole", "shared", "off", "shared/3"), plan: "whole; shared4; off; shared3"},
		{name: "what the file does not speak of stays", cuts: []plan.Layout{wholeCut, sharedCut, sharedCut, sharedCut},
			wants: wants("", "whole"), plan: "whole; whole!; shared4; shared4"},
		{name: "a reading with other reserved memory is no new cut", cuts: []plan.Layout{{Known: true, Offers: true, Kind: ledger.Units, N: 5, Unit: unit}},
			wants: wants("shared"), plan: "shared5; unset; unset; unset"},
		{name: "idle ones go ahead, a held one waits", cuts: []plan.Layout{sharedCut, sharedCut, sharedCut, sharedCut},
			claims: []ledger.Allocation{claimed(names.Units, "b", "1::0", "1::1"), claimed(names.Units, "a", "1::2"), claimed(names.Units, "", "2::1")},
			wants:  wants("whole", "whole", "off", "shared"),
			plan:   "whole!; shared4 waits(shared→whole: ns/a,ns/b); shared4 waits(shared→off: a pod that the kubelet has not named yet); shared4"},
		{name: "a claim on two GPUs holds both", cuts: []plan.Layout{replicaCut(2), replicaCut(2), replicaCut(2), replicaCut(2)},
			claims: []ledger.Allocation{claimed(names.Replicas, "a", "0::1", "2::0")},
			wants:  wants("shared/4", "shared/4", "shared/4", "shared/2"),
			plan:   "shared2 waits(shared→shared: ns/a); shared4!; shared2 waits(shared→shared: ns/a); shared2"},
		{name: "after a restart the cut is read off the claims",
			claims: []ledger.Allocation{claimed(names.Units, "a", "0::1"), claimed(names.Whole, "b", "1"), claimed(names.Replicas, "c", "2::2"), claimed(names.Replicas, "d", "3::2")},
			wants:  wants("shared", "shared", "shared/2", "shared/5"),
			plan:   "shared4; whole waits(whole→shared: ns/b); shared3 waits(shared→shared: ns/c); shared5"},
		{name: "after a restart with another unit, no held ID is lost",
			claims: []ledger.Allocation{claimed(names.Units, "a", "0::9")},
			wants:  wants("shared", "shared", "shared", "shared"),
			plan:   "shared10 waits(shared→shared: ns/a); shared4!; shared4!; shared4!"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			inv := machine(4)
			cuts := map[gpu.UUID]plan.Layout{}
			for i, c := range tt.cuts {
				cuts[uuid(i)] = c
			}
			got := plan.Make(plan.Input{Inventory: inv, Claims: tt.claims, Wanted: tt.wants, Layouts: cuts, Unit: unit})
			if diff := cmp.Diff(tt.plan, planText(&got, inv)); diff != "" {
				t.Errorf("plan (-want +got):\n%s", diff)
			}
			// What is planned and done leaves nothing to do.
			again := plan.Make(plan.Input{Inventory: inv, Claims: tt.claims, Wanted: tt.wants, Layouts: got.Layouts, Unit: unit})
			if len(again.Recut) > 0 || !cmp.Equal(again.Layouts, got.Layouts) {
				t.Errorf("a second plan re-cuts %v", again.Recut)
			}
		})
	}
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
		in     viewInput
		blocks bool // GPU 0's change waits
		units  string
		whole  string
		shares string
	}{
		{name: "plain", units: "0.0 0.1 0.2 0.3", whole: "1"},
		{name: "held", in: viewInput{claims: two}, units: "0.0 0.1 0.2 0.3", whole: "1"},
		{name: "about to be re-cut", in: viewInput{recutting: []gpu.UUID{uuid(0)}}, units: "0.0x 0.1x 0.2x 0.3x", whole: "1"},
		{name: "waiting, drained", in: viewInput{claims: two, drain: true}, blocks: true, units: "0.0x 0.1~ 0.2x 0.3x", whole: "1"},
		{name: "somebody else's too, still offering", in: viewInput{claims: two, others: map[gpu.UUID]string{uuid(0): "a plugin"}}, blocks: true,
			units: "0.0x 0.1~ 0.2x 0.3x", whole: "1"},
		{name: "waiting, still offering", in: viewInput{claims: two}, blocks: true, units: "0.0 0.1 0.2 0.3", whole: "1"},
		{name: "nothing may be given out, held devices stay", in: viewInput{claims: two, closed: "no hook program"},
			units: "0.0x 0.1 0.2x 0.3x", whole: "1x"},
		{name: "what was offered before lingers", in: viewInput{past: map[gpu.UUID][]plan.Past{uuid(1): {{Layout: replicaCut(2)}, {Layout: sharedCut}, {Layout: sharedCut}}}},
			units: "0.0 0.1 0.2 0.3 1.0x 1.1x 1.2x 1.3x", whole: "1", shares: "1.0x 1.1x"},
		{name: "a held ID that no cut has stays for its holder", in: viewInput{claims: []ledger.Allocation{claimed(names.Units, "a", "1::7")}},
			units: "0.0 0.1 0.2 0.3 1.7~", whole: "1x"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			in := tt.in
			in.inv, in.names = machine(2), names
			in.changes = &plan.Changes{Layouts: map[gpu.UUID]plan.Layout{uuid(0): sharedCut, uuid(1): wholeCut}}
			if tt.blocks {
				in.changes.Blocked = []plan.Blocked{{GPU: uuid(0)}}
			}
			v := buildView(in)
			for resource, want := range map[string]string{names.Units: tt.units, names.Whole: tt.whole, names.Replicas: tt.shares} {
				if got := listed(v, resource); got != want {
					t.Errorf("%s: %s, want %s", resource, got, want)
				}
			}
		})
	}
}

// A GPU in MIG mode that shall be whole or shared leaves that mode first, where it
// is idle, and offers nothing until then.
func TestPlanLeavesMIGMode(t *testing.T) {
	inv := machine(4)
	cards := map[gpu.UUID]*mig.Card{}
	for i := range inv.GPUs {
		d := &inv.GPUs[i]
		d.MIG = a100()
		d.MIG.Enabled = i > 0
		c, err := mig.NewCard(&d.MIG)
		if err != nil {
			t.Fatal(err)
		}
		cards[d.UUID] = c
	}
	inv.GPUs[3].MIG.Instances = []gpu.Instance{{Profile: "1g.10gb", Placement: gpu.Placement{Start: 2, Size: 1}, Busy: true}}
	got := plan.Make(plan.Input{Inventory: inv, Wanted: wants("shared", "shared", "off", "whole"), Layouts: map[gpu.UUID]plan.Layout{}, Unit: unit,
		MIG: plan.MIGInput{Cards: cards}})
	if text, want := planText(&got, inv), "shared4!; off!; off!; off! waits(1x1g.10gb→whole: a process that no claim covers (1g.10gb@2))"; text != want {
		t.Errorf("plan %s, want %s", text, want)
	}
	if len(got.Work) != 1 || got.Work[0].GPU != uuid(1) || got.Work[0].String() != "disable MIG mode" {
		t.Errorf("work %+v, want that GPU 1 leaves MIG mode", got.Work)
	}
}

// The pod that waits for an instance is told why. Whose claim is in the way is named
// to a pod of the same namespace, and by its key to all others; and who has a GPU by
// way of another device plugin to nobody. The node's own words have all names.
func TestTroubleNamesNoOtherTenantsPod(t *testing.T) {
	inv := machine(1)
	d := &inv.GPUs[0]
	d.MIG = a100()
	d.MIG.Enabled = true
	d.MIG.Instances = []gpu.Instance{{Profile: "1g.10gb", Placement: gpu.Placement{Start: 1, Size: 1}}}
	card, err := mig.NewCard(&d.MIG)
	if err != nil {
		t.Fatal(err)
	}
	before := ledger.Allocation{ID: "0123456789abcdef", Resource: small, Grants: grantsOf(small, migID(0, "1g.10gb@1")),
		Holder: ledger.Holder{Namespace: "train", Pod: "job-1", Container: "c"}}
	for _, c := range []struct{ name, namespace, other, want string }{
		{"of the same namespace", "train", "", "3g.40gb@0 waits for the end of train/job-1 (1g.10gb@1)"},
		{"of another namespace", "research", "", "3g.40gb@0 waits for the end of claim 0123456789abcdef (1g.10gb@1)"},
		{"of a namespace that is not known yet", "", "", "3g.40gb@0 waits for the end of claim 0123456789abcdef (1g.10gb@1)"},
		{"on a GPU that another plugin gives out", "train", "secret/pod-7 has it as nvidia.com/gpu of another device plugin",
			d.Name() + " is left alone: somebody else gives it out"},
	} {
		t.Run(c.name, func(t *testing.T) {
			waits := ledger.Allocation{ID: "fedcba9876543210", Resource: large, Grants: grantsOf(large, migID(0, "3g.40gb@0")),
				Asked: time.Unix(1e9, 0), Holder: ledger.Holder{Namespace: c.namespace}}
			in := plan.Input{Inventory: inv, Claims: []ledger.Allocation{before, waits}, Wanted: wants("whole"), Layouts: map[gpu.UUID]plan.Layout{d.UUID: plan.Placements(card.Slots())},
				Others: map[gpu.UUID]string{}, Unit: unit, MIG: plan.MIGInput{Cards: map[gpu.UUID]*mig.Card{d.UUID: card}}}
			if c.other != "" {
				in.Others[d.UUID] = c.other
			}
			got := plan.Make(in)
			if why := got.Trouble[waits.ID]; why != c.want {
				t.Errorf("the pod is told %q, want %q", why, c.want)
			}
			known := c.other
			if known == "" {
				known = "train/job-1"
			}
			if text := strings.Join(got.Refused, " ") + planText(&got, inv); !strings.Contains(text, known) {
				t.Errorf("the node is told %q, which does not name the holder", text)
			}
		})
	}
}

func TestBlockedSentence(t *testing.T) {
	b := plan.Blocked{GPU: "GPU-1", Index: 3, From: "shared", To: "whole", Holders: []string{"train/a", "train/b"}}
	if got, want := b.String(), "GPU 3 (GPU-1) stays shared, not yet whole, until these end: train/a, train/b"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

// The NUMA nodes are told of all devices of a resource or of none.
func TestNUMAHints(t *testing.T) {
	slots := func(s string) plan.Layout {
		_, p, start, ci, err := mig.ParseID(migID(0, s))
		if err != nil {
			t.Fatal(err)
		}
		return plan.Placements([]mig.Slot{{Profile: p, Start: start, CI: ci}})
	}
	const one = "example.com/mig-1g.10gb"
	for _, tt := range []struct {
		name     string
		aligned  Alignment
		cuts     [2]plan.Layout
		onDemand int // this GPU is
		unknown  int // this GPU's NUMA node is
		want     map[string]string
	}{
		{"none", AlignNone, [2]plan.Layout{wholeCut, wholeCut}, -1, -1, map[string]string{names.Whole: "- -"}},
		{"whole", AlignFixed, [2]plan.Layout{wholeCut, wholeCut}, -1, -1, map[string]string{names.Whole: "0 1"}},
		{"a node is not known", AlignFixed, [2]plan.Layout{wholeCut, wholeCut}, -1, 1, map[string]string{names.Whole: "- -"}},
		{"one of each", AlignFixed, [2]plan.Layout{wholeCut, sharedCut}, -1, -1, map[string]string{names.Whole: "0", names.Units: "- - - -"}},
		{"units where they are asked for", AlignAll, [2]plan.Layout{wholeCut, sharedCut}, -1, -1, map[string]string{names.Whole: "0", names.Units: "1 1 1 1"}},
		{"replicas", AlignFixed, [2]plan.Layout{replicaCut(2), wholeCut}, -1, -1, map[string]string{names.Replicas: "- -", names.Whole: "1"}},
		{"fixed MIG", AlignFixed, [2]plan.Layout{slots("1g.10gb@0"), slots("1g.10gb@3")}, -1, -1, map[string]string{one: "0 1"}},
		{"MIG on demand", AlignFixed, [2]plan.Layout{slots("1g.10gb@0"), slots("1g.10gb@3")}, 1, -1, map[string]string{one: "- -"}},
		{"MIG on demand where it is asked for", AlignAll, [2]plan.Layout{slots("1g.10gb@0"), slots("1g.10gb@3")}, 1, -1, map[string]string{one: "0 1"}},
		{"the fixed ones of another resource", AlignFixed, [2]plan.Layout{slots("1g.10gb@0"), slots("2g.20gb@0")}, 1, -1,
			map[string]string{one: "0", "example.com/mig-2g.20gb": "-"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			in := viewInput{inv: machine(2), names: names, aligned: tt.aligned, onDemand: func(u gpu.UUID) bool { return u == uuid(tt.onDemand) }}
			for i := range in.inv.GPUs {
				if n := i; n != tt.unknown {
					in.inv.GPUs[i].NUMA = &n
				} else {
					in.inv.GPUs[i].NUMA = nil
				}
			}
			in.changes = &plan.Changes{Layouts: map[gpu.UUID]plan.Layout{uuid(0): tt.cuts[0], uuid(1): tt.cuts[1]}}
			got := map[string]string{}
			for _, r := range buildView(in).Resources {
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
