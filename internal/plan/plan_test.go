// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"example.com/gpu-agent/internal/config"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/internal/workload"
	"example.com/gpu-agent/pkg/compute"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
	"example.com/gpu-agent/pkg/timeslice"
)

const unit = gpu.MiB(1024)

func uuid(i int) gpu.UUID { return gpu.UUID(fmt.Sprintf("GPU-%08d-0000-0000-0000-000000000000", i)) }

// machine has n GPUs of four memory units each.
func machine(n int) *gpu.Inventory {
	inv := &gpu.Inventory{Driver: "580.1"}
	for i := range n {
		inv.GPUs = append(inv.GPUs, gpu.Device{Index: i, Minor: n - i, UUID: uuid(i), Memory: 4500, Reserved: 400})
	}
	return inv
}

// a100 is not in MIG mode.
func a100() gpu.MIG {
	at := func(size int, starts ...int) (out []gpu.Placement) {
		for _, s := range starts {
			out = append(out, gpu.Placement{Start: s, Size: size})
		}
		return out
	}
	return gpu.MIG{Capable: true, Profiles: []gpu.Profile{
		{Name: "1g.10gb", ID: 19, Slices: 1, Max: 7, Placements: at(1, 0, 1, 2, 3, 4, 5, 6)},
		{Name: "3g.40gb", ID: 9, Slices: 3, Max: 2, Placements: at(4, 0, 4)},
		{Name: "7g.80gb", ID: 0, Slices: 7, Max: 1, Placements: at(8, 0)},
	}}
}

func held(pod string, grants ...ledger.Grant) ledger.Allocation {
	return ledger.Allocation{ID: pod, Grants: grants, Holder: ledger.Holder{Pod: workload.Pod{Namespace: "ns", Name: pod}, Container: "c"}}
}

// units are memory units of one GPU.
func units(on int, n ...int) ledger.Grant {
	return ledger.Grant{GPU: uuid(on), Piece: piece.Units{Set: piece.SetOf(n)}}
}

func replica(on, n int) ledger.Grant {
	return ledger.Grant{GPU: uuid(on), Piece: piece.Replica{Number: n}}
}

func whole(on int) ledger.Grant {
	return ledger.Grant{GPU: uuid(on), Piece: piece.Whole{}}
}

// placement is what there is of GPU 0, whose size nobody has said.
func placement(t *testing.T, profile string, start int) []ledger.Grant {
	t.Helper()
	name, err := mig.Parse(profile)
	if err != nil {
		t.Fatal(err)
	}
	return []ledger.Grant{{GPU: uuid(0), Piece: piece.Placement{At: mig.Placement{Profile: name, Start: start}}}}
}

func wants(modes ...string) []config.Want {
	var out []config.Want
	for i, m := range modes {
		w := config.Want{GPU: uuid(i), Mode: config.Mode(m)}
		m, w.Compute.MPS = strings.CutSuffix(m, "+mps")
		if w.Mode = config.Mode(m); strings.HasPrefix(m, "shared/") {
			w.Mode = config.Shared
			fmt.Sscan(strings.TrimPrefix(m, "shared/"), &w.Replicas)
		}
		out = append(out, w)
	}
	return out
}

// planText is a plan in a form that a table can hold.
func planText(c *Changes, inv *gpu.Inventory) string {
	var b strings.Builder
	for _, d := range inv.GPUs {
		layout := c.Layouts[d.UUID]
		fmt.Fprintf(&b, "%s", layout.Mode())
		if layout.Offers && layout.Kind != piece.KindWhole {
			fmt.Fprintf(&b, "%d", layout.N)
		}
		if layout.Compute.MPS {
			fmt.Fprintf(&b, " %v", layout.Compute)
		}
		for _, u := range c.Changing {
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
	wholeLayout  = Layout{Known: true, Offers: true, Division: piece.Division{Kind: piece.KindWhole, N: 1}}
	sharedLayout = Layout{Known: true, Offers: true, Division: piece.Division{Kind: piece.KindUnits, N: 4, Unit: unit}}
)

func replicaLayout(n int) Layout {
	return Layout{Known: true, Offers: true, Division: piece.Division{Kind: piece.KindReplica, N: n}}
}

// throughMPS is a layout whose containers run at the same time.
func throughMPS(c Layout, factor float64) Layout {
	c.Compute = compute.Sharing{MPS: true, Factor: factor}.Normal()
	return c
}

// ceiling is a grant with a share of the SMs, in percent.
func ceiling(g ledger.Grant, percent int) ledger.Grant {
	g.Compute.Ceiling = percent
	if r, ok := g.Piece.(piece.Replica); ok {
		r.Of = 4
		g.Piece = r
	}
	return g
}

func TestPlan(t *testing.T) {
	for _, tt := range []struct {
		name        string
		layouts     []Layout
		allocations []ledger.Allocation
		wants       []config.Want
		plan        string
	}{
		{name: "a fresh node", wants: wants("whole", "shared", "off", "shared/3"), plan: "whole!; shared4!; off!; shared3!"},
		{name: "nothing is wanted of a fresh node", plan: "unset; unset; unset; unset"},
		{name: "nothing to do", layouts: []Layout{wholeLayout, sharedLayout, {Known: true}, replicaLayout(3)},
			wants: wants("whole", "shared", "off", "shared/3"), plan: "whole; shared4; off; shared3"},
		{name: "what the file does not speak of stays", layouts: []Layout{wholeLayout, sharedLayout, sharedLayout, sharedLayout},
			wants: wants("", "whole"), plan: "whole; whole!; shared4; shared4"},
		{name: "a reading with other reserved memory is no new layout", layouts: []Layout{{Known: true, Offers: true, Division: piece.Division{Kind: piece.KindUnits, N: 5, Unit: unit}}},
			wants: wants("shared"), plan: "shared5; unset; unset; unset"},
		{name: "idle ones go ahead, a held one waits", layouts: []Layout{sharedLayout, sharedLayout, sharedLayout, sharedLayout},
			allocations: []ledger.Allocation{held("b", units(1, 0, 1)), held("a", units(1, 2)), held("", units(2, 1))},
			wants:       wants("whole", "whole", "off", "shared"),
			plan:        "whole!; shared4 waits(shared→whole: ns/a,ns/b); shared4 waits(shared→off: a pod that the kubelet has not named yet); shared4"},
		{name: "an allocation on two GPUs holds both", layouts: []Layout{replicaLayout(2), replicaLayout(2), replicaLayout(2), replicaLayout(2)},
			allocations: []ledger.Allocation{held("a", replica(0, 1), replica(2, 0))},
			wants:       wants("shared/4", "shared/4", "shared/4", "shared/2"),
			plan:        "shared2 waits(shared (2 replicas)→shared (4 replicas): ns/a); shared4!; shared2 waits(shared (2 replicas)→shared (4 replicas): ns/a); shared2"},
		{name: "after a restart the layout is read off the allocations",
			allocations: []ledger.Allocation{held("a", units(0, 1)), held("b", whole(1)), held("c", replica(2, 2)), held("d", replica(3, 2))},
			wants:       wants("shared", "shared", "shared/2", "shared/5"),
			plan:        "shared4; whole waits(whole→shared: ns/b); shared3 waits(shared (3 replicas)→shared (2 replicas): ns/c); shared5"},
		{name: "from turns to MPS and back", layouts: []Layout{sharedLayout, sharedLayout, throughMPS(sharedLayout, 0), throughMPS(replicaLayout(2), 2)},
			allocations: []ledger.Allocation{held("a", units(1, 0)), held("b", units(2, 0))},
			wants:       wants("shared+mps", "shared+mps", "shared", "shared/2"),
			plan:        "shared4 mps!; shared4 waits(shared (units of 1024 MiB)→shared (units of 1024 MiB, mps): ns/a); shared4 mps waits(shared (units of 1024 MiB, mps)→shared (units of 1024 MiB): ns/b); shared2!"},
		{name: "another factor waits as well", layouts: []Layout{throughMPS(replicaLayout(2), 2), throughMPS(sharedLayout, 1)},
			allocations: []ledger.Allocation{held("a", replica(0, 1))},
			wants:       wants("shared/2+mps", "shared+mps"),
			plan:        "shared2 mps, factor 2 waits(shared (2 replicas, mps, factor 2)→shared (2 replicas, mps): ns/a); shared4 mps; unset; unset"},
		{name: "after a restart, shares that were given keep MPS",
			allocations: []ledger.Allocation{held("a", ceiling(units(0, 0), 25)), held("b", ceiling(units(1, 0), 25)), held("c", ceiling(replica(2, 1), 50)), held("d", ceiling(replica(3, 1), 25))},
			wants:       wants("shared+mps", "shared", "shared/4+mps", "shared/4"),
			plan: "shared4 mps; shared4 mps waits(shared (units of 1024 MiB, mps)→shared (units of 1024 MiB): ns/b); " +
				"shared4 mps, factor 2 waits(shared (4 replicas, mps, factor 2)→shared (4 replicas, mps): ns/c); shared4 mps waits(shared (4 replicas, mps)→shared (4 replicas): ns/d)"},
		{name: "after a restart with another unit, no held ID is lost",
			allocations: []ledger.Allocation{held("a", units(0, 9))},
			wants:       wants("shared", "shared", "shared", "shared"),
			plan:        "shared10 waits(shared (units of memory)→shared (units of 1024 MiB): ns/a); shared4!; shared4!; shared4!"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			inv := machine(4)
			layouts := map[gpu.UUID]Layout{}
			for i, c := range tt.layouts {
				layouts[uuid(i)] = c
			}
			got := Make(Input{Inventory: inv, Allocations: tt.allocations, Wanted: tt.wants, Layouts: layouts, Unit: unit})
			if diff := cmp.Diff(tt.plan, planText(&got, inv)); diff != "" {
				t.Errorf("plan (-want +got):\n%s", diff)
			}
			// What is planned and done leaves nothing to do.
			again := Make(Input{Inventory: inv, Allocations: tt.allocations, Wanted: tt.wants, Layouts: got.Layouts, Unit: unit})
			if len(again.Changing) > 0 || !cmp.Equal(again.Layouts, got.Layouts) {
				t.Errorf("a second plan re-layouts %v", again.Changing)
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
	got := Make(Input{Inventory: inv, Wanted: wants("shared", "shared", "off", "whole"), Layouts: map[gpu.UUID]Layout{}, Unit: unit,
		MIG: MIGInput{Cards: cards}})
	if text, want := planText(&got, inv), "shared4!; off!; off!; off! waits(1x1g.10gb→whole: a process that no allocation covers (1g.10gb@2))"; text != want {
		t.Errorf("plan %s, want %s", text, want)
	}
	if len(got.Work) != 1 || got.Work[0].GPU != uuid(1) || got.Work[0].String() != "disable MIG mode" {
		t.Errorf("work %+v, want that GPU 1 leaves MIG mode", got.Work)
	}
}

// The pod that waits for an instance is told why. Whose allocation is in the way is named
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
	before := ledger.Allocation{ID: "0123456789abcdef", Grants: placement(t, "1g.10gb", 1),
		Holder: ledger.Holder{Pod: workload.Pod{Namespace: "train", Name: "job-1"}, Container: "c"}}
	for _, c := range []struct{ name, namespace, other, want string }{
		{"of the same namespace", "train", "", "3g.40gb@0 waits for the end of train/job-1 (1g.10gb@1)"},
		{"of another namespace", "research", "", "3g.40gb@0 waits for the end of allocation 0123456789abcdef (1g.10gb@1)"},
		{"of a namespace that is not known yet", "", "", "3g.40gb@0 waits for the end of allocation 0123456789abcdef (1g.10gb@1)"},
		{"on a GPU that another plugin gives out", "train", "secret/pod-7 has it as nvidia.com/gpu of another device plugin",
			d.Name() + " is left alone: another program gives it out"},
	} {
		t.Run(c.name, func(t *testing.T) {
			waits := ledger.Allocation{ID: "fedcba9876543210", Grants: placement(t, "3g.40gb", 0),
				Asked: time.Unix(1e9, 0), Holder: ledger.Holder{Pod: workload.Pod{Namespace: c.namespace}}}
			in := Input{Inventory: inv, Allocations: []ledger.Allocation{before, waits}, Wanted: wants("whole"), Layouts: map[gpu.UUID]Layout{d.UUID: Divided(piece.Instances(card.Placements()))},
				Others: map[gpu.UUID]string{}, Unit: unit, MIG: MIGInput{Cards: map[gpu.UUID]*mig.Card{d.UUID: card}}}
			if c.other != "" {
				in.Others[d.UUID] = c.other
			}
			got := Make(in)
			if why := got.Trouble[waits.ID].Message; why != c.want {
				t.Errorf("the pod is told %q, want %q", why, c.want)
			}
			known := c.other
			if known == "" {
				known = "train/job-1"
			}
			if text := fmt.Sprint(got.Conditions) + planText(&got, inv); !strings.Contains(text, known) {
				t.Errorf("the node is told %q, which does not name the holder", text)
			}
		})
	}
}

// What a GPU offers on demand is all that its driver has and this version understands. What is
// left out is said, unless the partition lists what it offers.
func TestProfilesThatAreNotUnderstood(t *testing.T) {
	inv := machine(1)
	d := &inv.GPUs[0]
	d.MIG = a100()
	d.MIG.Enabled = true
	d.MIG.Profiles = append(d.MIG.Profiles, gpu.Profile{Name: "half", Placements: []gpu.Placement{{Size: 4}}})
	card, _ := mig.NewCard(&d.MIG)
	for _, listed := range []bool{false, true} {
		want := config.Want{GPU: d.UUID, Mode: config.MIG, OnDemand: true}
		if listed {
			want.Profiles = []mig.Name{{Slices: 1, GB: 10}}
		}
		got := Make(Input{Inventory: inv, Wanted: []config.Want{want}, Layouts: map[gpu.UUID]Layout{}, Unit: unit, MIG: MIGInput{Cards: map[gpu.UUID]*mig.Card{d.UUID: card}}})
		if listed && len(got.Conditions) == 0 {
			continue
		}
		if len(got.Conditions) != 1 || got.Conditions[0].Reason != status.ProfileUnknown || got.Conditions[0].Type != status.Noted ||
			!strings.Contains(got.Conditions[0].Message, `"half"`) || listed {
			t.Errorf("with a list %v: conditions %+v", listed, got.Conditions)
		}
		if len(got.Layouts[d.UUID].Placements) == 0 {
			t.Error("the others are not offered")
		}
	}
}

// A GPU that would offer nothing, although it is to offer something, is refused and keeps
// what it has.
func TestNothingToOfferIsRefused(t *testing.T) {
	nothing := Layout{Known: true, Offers: true, Division: piece.Division{Kind: piece.KindUnits, Unit: 8 * unit}}
	inv := machine(7)
	inv.GPUs[6].MIG = a100()
	inv.GPUs[3].Fault = "GPU is lost"
	for i, on := range map[int]bool{4: false, 5: true} {
		d := &inv.GPUs[i]
		d.MIG = a100()
		d.MIG.Enabled = on
		for j := range d.MIG.Profiles {
			d.MIG.Profiles[j].Placements = []gpu.Placement{{Start: -1, Size: 1}} // which is none
		}
	}
	cards := map[gpu.UUID]*mig.Card{}
	for _, d := range inv.GPUs[4:] {
		cards[d.UUID], _ = mig.NewCard(&d.MIG)
	}
	all := wants("shared", "shared", "shared", "shared", "mig", "mig", "dynamic")
	all[4].OnDemand, all[5].OnDemand = true, true
	// GPU 2 is as a process left it that did not mind.
	have := map[gpu.UUID]Layout{uuid(0): wholeLayout, uuid(2): nothing, uuid(4): wholeLayout, uuid(6): wholeLayout}
	got := Make(Input{Inventory: inv, Wanted: all, Layouts: have, Unit: 8 * unit, MIG: MIGInput{Cards: cards}})
	if text, want := planText(&got, inv), "whole; unset; shared0; shared0!; whole; unset; whole"; text != want {
		t.Errorf("%s, want %s", text, want)
	}
	if len(got.Work) > 0 {
		t.Errorf("work on the hardware: %+v", got.Work)
	}
	said := map[string]status.Condition{}
	for _, c := range got.Conditions {
		said[c.Subject] = c
	}
	for i := range inv.GPUs {
		c, ok := said[string(uuid(i))]
		if want := i != 3; ok != want || ok && (c.Type != status.Refused || c.Reason != status.PartitionUnfit || !strings.Contains(c.Message, "would offer no")) {
			t.Errorf("of GPU %d is said %+v", i, c)
		}
	}
}

func TestBlockedSentence(t *testing.T) {
	b := Blocked{GPU: "GPU-1", Index: 3, From: "shared", To: "whole", Holders: []string{"train/a", "train/b"}}
	if got, want := b.String(), "GPU 3 (GPU-1) stays shared, not yet whole, until these end: train/a, train/b"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

// A GPU goes on speaking through a front-end for as long as anybody has something of it
// that way, and offers nothing new meanwhile; what stands on it stays.
func TestAPIWaitsForHolders(t *testing.T) {
	const dp, dra = ledger.DevicePlugin, ledger.DRA
	by := func(f ledger.FrontEnd, a ledger.Allocation) ledger.Allocation { a.Owner = f; return a }
	through := func(f ledger.FrontEnd, c Layout) *Layout { c.API = f; return &c }
	small, err := mig.Parse("1g.10gb")
	if err != nil {
		t.Fatal(err)
	}
	at := mig.Placement{Profile: small, Start: 1, Size: 1}
	inMIG := func(d *gpu.Device) {
		d.MIG = a100()
		d.MIG.Enabled, d.MIG.Instances = true, []gpu.Instance{{Profile: "1g.10gb", Placement: gpu.Placement{Start: 1, Size: 1}}}
	}
	admin := whole(0)
	admin.NoRoom = true
	fixed := config.Want{Mode: config.MIG, API: dra, Geometry: []mig.Count{{Profile: small, N: 1}}}
	throughPlugin := fixed
	throughPlugin.API = dp
	for _, c := range []struct {
		name    string
		mig     bool
		have    *Layout // nil: not known
		held    []ledger.Allocation
		want    config.Want
		through ledger.FrontEnd // afterwards
		blocked string          // the words of it
		drains  bool            // MIG devices are withdrawn
		now     bool            // it changes
	}{
		{name: "nobody has anything", have: through(dp, wholeLayout), want: config.Want{Mode: config.Whole, API: dra}, through: dra, now: true},
		{name: "it is offered so already", have: through(dra, wholeLayout), want: config.Want{Mode: config.Whole, API: dra}, through: dra},
		{name: "nothing said is the device plugin", have: through("", wholeLayout), want: config.Want{Mode: config.Whole, API: dp}, through: dp},
		{name: "a pod has it", have: through(dp, wholeLayout), held: []ledger.Allocation{by(dp, held("a", whole(0)))}, want: config.Want{Mode: config.Whole, API: dra}, through: dp,
			blocked: "stays whole (api: device-plugin), not yet whole (api: dra), until these end: ns/a"},
		{name: "a claim has it", have: through(dra, sharedLayout), held: []ledger.Allocation{by(dra, held("a", units(0, 1)))}, want: config.Want{Mode: config.Whole, API: dp}, through: dra,
			blocked: "stays shared (api: dra), not yet whole (api: device-plugin), until these end: ns/a"},
		{name: "other reserved memory", have: through(dp, Layout{Known: true, Offers: true, Division: piece.Division{Kind: piece.KindUnits, N: 5, Unit: unit}}), want: config.Want{Mode: config.Shared, API: dra}, through: dra, now: true},
		{name: "an administrator looks at it", have: through(dra, wholeLayout), held: []ledger.Allocation{by(dra, held("a", admin))}, want: config.Want{Mode: config.Whole, API: dp}, through: dp, now: true},
		{name: "found at a start", held: []ledger.Allocation{by(dp, held("a", units(0, 1)))}, want: config.Want{Mode: config.Shared, API: dra}, through: dp,
			blocked: "stays shared (api: device-plugin), not yet shared (api: dra), until these end: ns/a"},
		{name: "MIG, nobody has anything", mig: true, have: through(dp, Divided(piece.Instances([]mig.Placement{at}))), want: fixed, through: dra, now: true},
		{name: "MIG, a pod has it", mig: true, have: through(dp, Divided(piece.Instances([]mig.Placement{at}))), held: []ledger.Allocation{by(dp, held("a", placement(t, "1g.10gb", 1)...))}, want: fixed, through: dp,
			blocked: "(api: device-plugin), not yet 1x1g.10gb (api: dra), until these end: ns/a", drains: true},
		{name: "MIG, found at a start", mig: true, held: []ledger.Allocation{by(dp, held("a", placement(t, "1g.10gb", 1)...))}, want: fixed, through: dp,
			blocked: "(api: dra), until these end: ns/a", drains: true},
		{name: "MIG, found at a start with a claim", mig: true, held: []ledger.Allocation{by(dra, held("a", placement(t, "1g.10gb", 1)...))}, want: throughPlugin, through: dra,
			blocked: "(api: device-plugin), until these end: ns/a", drains: true},
		{name: "MIG, left as it is", mig: true, have: through(dra, Divided(piece.Instances([]mig.Placement{at}))), want: config.Want{}, through: dra},
	} {
		t.Run(c.name, func(t *testing.T) {
			inv := machine(1)
			in := Input{Inventory: inv, Allocations: c.held, Layouts: map[gpu.UUID]Layout{}, Unit: unit}
			if c.mig {
				inMIG(&inv.GPUs[0])
				card, err := mig.NewCard(&inv.GPUs[0].MIG)
				if err != nil {
					t.Fatal(err)
				}
				in.MIG = MIGInput{Cards: map[gpu.UUID]*mig.Card{uuid(0): card}, Made: map[gpu.UUID]map[mig.Placement]bool{uuid(0): {at: true}}}
			}
			if c.have != nil {
				in.Layouts[uuid(0)] = *c.have
			}
			c.want.GPU = uuid(0)
			in.Wanted = []config.Want{c.want}
			got := Make(in)
			if layout := got.Layouts[uuid(0)]; !layout.Through(c.through) {
				t.Errorf("the layout is %+v, want one through %s", layout, c.through)
			}
			text := ""
			for _, b := range got.Blocked {
				text += b.String()
			}
			if (c.blocked == "") != (text == "") || !strings.Contains(text, c.blocked) || len(got.Blocked) > 1 {
				t.Errorf("blocked: %q, want %q", text, c.blocked)
			}
			if drains := got.Drains(uuid(0), false); drains != (c.blocked != "") {
				t.Errorf("with --when-busy wait it drains: %v", drains)
			}
			if _, goes := got.Leaving[uuid(0)][at]; goes != c.drains {
				t.Errorf("leaving are %v", got.Leaving)
			}
			if now := len(got.Changing) > 0; now != c.now {
				t.Errorf("it changes now: %v", now)
			}
			if len(got.Work) > 0 {
				t.Errorf("work on the hardware: %+v", got.Work)
			}
			if c.now {
				in.Layouts = got.Layouts
				if again := Make(in); len(again.Changing) > 0 {
					t.Errorf("a second plan changes %v", again.Changing)
				}
			}
		})
	}
}

// A new process that has not heard of any partition blocks nothing and withdraws
// nothing.
func TestNoWishBlocksNothing(t *testing.T) {
	c := Make(Input{Inventory: machine(1), Allocations: []ledger.Allocation{held("p", units(0, 1))}, Layouts: map[gpu.UUID]Layout{}, Unit: unit})
	if len(c.Blocked) != 0 {
		t.Errorf("blocked without a wish: %v", c.Blocked)
	}
}

// TestRows: lists have room for so many devices, whatever the layouts are that make
// them.
func TestRows(t *testing.T) {
	const most = timeslice.MaxListed
	few := Layout{Known: true, Offers: true, Division: piece.Division{Kind: piece.KindUnits, N: 1, Alone: piece.SetOf([]int{7})}}
	for _, tt := range []struct {
		name string
		have []Layout // of GPU 0
		to   Layout
		of   int // to is of this GPU
		fits bool
	}{
		{"all there may be", nil, replicaLayout(most), 0, true},
		{"one more", nil, replicaLayout(most + 1), 0, false},
		{"the same devices again", []Layout{replicaLayout(most)}, replicaLayout(most), 0, true},
		{"fewer of them", []Layout{replicaLayout(most)}, replicaLayout(4), 0, true},
		{"as many of another GPU", []Layout{replicaLayout(most)}, replicaLayout(1), 1, false},
		{"units beside replicas", []Layout{replicaLayout(most - 4)}, sharedLayout, 0, true},
		{"one unit too many", []Layout{replicaLayout(most - 3)}, sharedLayout, 0, false},
		{"beside one that stands alone", []Layout{few}, replicaLayout(most), 0, false},
		{"its first devices are others than one that stands alone", []Layout{few, sharedLayout}, replicaLayout(most - 5), 0, true},
		{"and count beside it", []Layout{few, sharedLayout}, replicaLayout(most - 4), 0, false},
		{"a whole GPU", []Layout{replicaLayout(most)}, wholeLayout, 1, true},
		{"nothing", []Layout{replicaLayout(most)}, Layout{Known: true}, 1, true},
	} {
		r := NewRows()
		for _, l := range tt.have {
			r.Add(uuid(0), l)
		}
		if got := r.Fits(uuid(tt.of), tt.to); got != tt.fits {
			t.Errorf("%s: fits %v", tt.name, got)
		}
	}
}

// TestCrowdedGPUIsWithdrawn: a layout that the lists have no room for beside what still
// stands in them waits until it has left, and its GPU offers nothing meanwhile.
func TestCrowdedGPUIsWithdrawn(t *testing.T) {
	inv := machine(2)
	in := Input{Inventory: inv, Wanted: wants("whole", "shared/20000"), Unit: unit,
		Layouts: map[gpu.UUID]Layout{uuid(0): replicaLayout(30_000), uuid(1): wholeLayout},
		Past:    map[gpu.UUID][]Past{uuid(0): {{Layout: Layout{Known: true, Offers: true, Division: piece.Division{Kind: piece.KindUnits, N: timeslice.MaxListed - 49_999}}}}}}
	got := Make(in)
	if text := planText(&got, inv); text != "whole!; off!" || len(got.Conditions) != 1 || got.Conditions[0].Reason != status.ListsFull ||
		!strings.Contains(got.Conditions[0].Message, "divided into 20000 devices") {
		t.Errorf("%s, conditions %+v", text, got.Conditions)
	}
	in.Past = nil
	if got := Make(in); planText(&got, inv) != "whole!; shared20000!" || len(got.Conditions) != 0 {
		t.Errorf("with room for it: %s, conditions %+v", planText(&got, inv), got.Conditions)
	}
}

// A layout of a kind that this version does not know has devices of it, and of no other, and a
// dynamic one, whose devices the kind decides on, has none.
func TestLayoutOfAnUnknownKind(t *testing.T) {
	l := Layout{Known: true, Offers: true, Division: piece.Division{Kind: "slot", N: 3}}
	for _, k := range piece.Kinds() {
		if l.Has(k) {
			t.Errorf("it has %s", k)
		}
	}
	if l.Dynamic = true; l.Has("slot") {
		t.Error("a dynamic one has some")
	}
}

// Whatever partitions, restarts and holders come, the holders of a GPU all take turns, or all have a share
// through MPS. The shares are those of the layout that the GPU had when its first holder came, and so the
// layout lets a container have as much as each holder has.
func TestTurnsAndMPSNeverMeet(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	const gpus = 3
	inv := machine(gpus)
	for i := range inv.GPUs {
		inv.GPUs[i].Memory, inv.GPUs[i].Reserved = 81920, 600
	}
	in := Input{Inventory: inv, Layouts: map[gpu.UUID]Layout{}, Unit: unit}
	met, steps := map[string]int{}, 20_000
	if testing.Short() {
		steps = 5_000
	}
	for step := range steps {
		switch rng.IntN(6) {
		case 0: // a partition
			in.Wanted = nil
			for i := range gpus {
				w := config.Want{GPU: uuid(i), Mode: config.Shared, Replicas: []int{0, 0, 3, 7}[rng.IntN(4)]}
				if rng.IntN(2) == 0 {
					w.Compute = compute.Sharing{MPS: true, Factor: []float64{0, 0.5, 2, 3.7}[rng.IntN(4)], Max: []int{0, 60}[rng.IntN(2)]}
				}
				in.Wanted = append(in.Wanted, w)
			}
		case 1: // a restart that has lost its state
			if rng.IntN(4) == 0 {
				in.Layouts = map[gpu.UUID]Layout{}
				met["restart"]++
			}
		case 2: // the end of a holder
			in.Allocations = in.Allocations[min(len(in.Allocations), 1+rng.IntN(8)):]
		default: // a new holder, of what is on offer
			u := uuid(rng.IntN(gpus))
			c := in.Layouts[u]
			var p piece.Piece = piece.Replica{Number: rng.IntN(max(1, c.N)), Of: c.N}
			if c.Kind == piece.KindUnits {
				first := rng.IntN(c.N)
				p = piece.Units{Set: piece.Set{{First: first, Last: first + rng.IntN(c.N-first)}}, Unit: c.Unit}
			}
			if c.Offers {
				in.Allocations = append(in.Allocations, held(fmt.Sprint("p", step), ledger.Grant{GPU: u, Piece: p, Compute: c.ComputeOf(p)}))
			}
		}
		changes := Make(in)
		in.Layouts = changes.Layouts
		for i := range gpus {
			c := in.Layouts[uuid(i)]
			for _, a := range in.Allocations {
				g := a.Grants[0]
				if g.GPU != uuid(i) {
					continue
				}
				met[fmt.Sprint(c.Kind, c.Compute.MPS)]++
				if (g.Compute.Ceiling > 0) != c.Compute.MPS || g.Compute.Ceiling > c.Compute.Largest(c.Parts()).Ceiling {
					t.Fatalf("step %d: %s has %v of GPU %d, whose layout is %s", step, a.ID, g.Compute, i, c.Words())
				}
			}
		}
	}
	for _, what := range []string{"restart", "unitstrue", "unitsfalse", "replicatrue", "replicafalse"} {
		if met[what] < 100 {
			t.Errorf("%q was met %d times: this shows little", what, met[what])
		}
	}
}

// spot is a holder in the spot tier.
func spot(pod string, grants ...ledger.Grant) ledger.Allocation {
	a := held(pod, grants...)
	a.Tier = ledger.Spot
	return a
}

// gone is a spot holder that has given its room back.
func gone(a ledger.Allocation) ledger.Allocation {
	a.Yield = ledger.Yield{Layout: true, Out: true}
	return a
}

// A change waits for spot holders only until they have yielded, and asks no other holders to. Meanwhile the GPU
// offers nothing to spot pods. What a partition offers them changes at once, also on a GPU that is held.
func TestChangesAndSpot(t *testing.T) {
	inv := machine(4)
	layouts := map[gpu.UUID]Layout{}
	for i := range inv.GPUs {
		layouts[uuid(i)] = sharedLayout
	}
	wanted := wants("whole", "whole", "shared", "shared/2")
	for i := range wanted[:3] {
		wanted[i].Spot = ledger.Offering{On: true, Lend: time.Hour}
	}
	in := Input{Inventory: inv, Wanted: wanted, Layouts: layouts, Unit: unit, Allocations: []ledger.Allocation{
		spot("s", units(0, 0)), gone(spot("t", units(1, 0))), spot("u", units(2, 0)), held("v", units(2, 1)), held("w", units(3, 0)), spot("x", units(3, 1)),
	}}
	got := Make(in)
	want := "shared4 waits(shared→whole: ns/s); whole!; shared4; shared4 waits(shared (units of 1024 MiB)→shared (2 replicas): ns/w,ns/x)"
	if diff := cmp.Diff(want, planText(&got, inv)); diff != "" {
		t.Errorf("plan (-want +got):\n%s", diff)
	}
	// What is out stays so while its GPU has no such pieces.
	if diff := cmp.Diff(map[string]bool{"s": true, "t": true, "x": true}, got.Yields); diff != "" {
		t.Errorf("yields (-want +got):\n%s", diff)
	}
	for i, on := range []bool{false, true, true, false} {
		if o := got.Layouts[uuid(i)].Spot; o.On != on || (o.Lend == time.Hour) != on {
			t.Errorf("GPU %d is offered to spot pods: %v", i, o)
		}
	}
	in.Wanted, in.Layouts = wants("", "", "shared", ""), got.Layouts
	if off := Make(in); off.Layouts[uuid(2)].Spot.On || !off.Layouts[uuid(1)].Spot.On || len(off.Changing)+len(off.Blocked) > 0 {
		t.Errorf("spot taken back: %+v, changing %v, blocked %v", off.Layouts, off.Changing, off.Blocked)
	}
	// One that has yielded starts again neither before its GPU is changed, nor while other holders keep the GPU as it is.
	in.Wanted, in.Layouts = wanted, layouts
	in.Allocations[0], in.Allocations[5] = gone(in.Allocations[0]), gone(in.Allocations[5])
	got = Make(in)
	if diff := cmp.Diff(map[string]bool{"s": true, "t": true, "x": true}, got.Yields); diff != "" {
		t.Errorf("yields before the change (-want +got):\n%s", diff)
	}
	in.Layouts = got.Layouts
	got = Make(in)
	if diff := cmp.Diff(map[string]bool{"s": true, "t": true, "x": true}, got.Yields); diff != "" { // whole GPUs have no units
		t.Errorf("yields after it (-want +got):\n%s", diff)
	}
}

// A change of a MIG geometry makes those spot holders yield that are in its way. A container on demand gets the
// room of those that have.
func TestMIGAndSpot(t *testing.T) {
	inv := machine(1)
	d := &inv.GPUs[0]
	d.MIG = a100()
	d.MIG.Enabled = true
	for _, at := range []int{0, 4} {
		d.MIG.Instances = append(d.MIG.Instances, gpu.Instance{Profile: "1g.10gb", GI: 1 + at, Placement: gpu.Placement{Start: at, Size: 1}})
	}
	card, err := mig.NewCard(&d.MIG)
	if err != nil {
		t.Fatal(err)
	}
	in := Input{Inventory: inv, Unit: unit, Wanted: wants("mig"), Layouts: map[gpu.UUID]Layout{}, MIG: MIGInput{
		Cards: map[gpu.UUID]*mig.Card{uuid(0): card}, Reclaim: true,
	}}
	three, _ := mig.Parse("3g.40gb")
	one, _ := mig.Parse("1g.10gb")
	in.Wanted[0].Geometry = []mig.Count{{Profile: one, N: 3}}
	in.Allocations = []ledger.Allocation{spot("s", placement(t, "1g.10gb", 0)...), held("g", placement(t, "1g.10gb", 4)...)}
	if got := Make(in); len(got.Blocked) > 0 || got.Yields != nil {
		t.Errorf("beside both there is room: %+v", got.Blocked)
	}
	in.Wanted[0].Geometry = []mig.Count{{Profile: one, N: 1}, {Profile: three, N: 1}}
	if got := Make(in); !got.Yields["s"] || len(got.Yields) != 1 || len(got.Blocked) != 1 {
		t.Errorf("one of two has to go: %v, %+v", got.Yields, got.Blocked)
	}
	in.Wanted[0].Geometry = []mig.Count{{Profile: three, N: 2}}
	if got := Make(in); !got.Yields["s"] || len(got.Yields) != 1 || len(got.Blocked) != 1 {
		t.Errorf("in the way of a geometry: %v, %+v", got.Yields, got.Blocked)
	}

	wish := held("wish", placement(t, "3g.40gb", 0)...)
	wish.Asked = time.Unix(1e9, 0)
	in.Wanted[0].Geometry, in.Wanted[0].OnDemand = nil, true
	in.Allocations = []ledger.Allocation{spot("s", placement(t, "1g.10gb", 0)...), wish}
	if got := Make(in); len(got.Work) > 0 || got.Trouble["wish"].Reason != status.HeldByPods {
		t.Errorf("over a spot holder that runs: %v, %v", got.Work, got.Trouble)
	}
	in.Allocations[0] = gone(in.Allocations[0])
	in.Wanted[0].Geometry, in.Wanted[0].OnDemand = []mig.Count{{Profile: one, N: 1}}, false
	in.Allocations[1].Asked = time.Time{}
	d.MIG.Instances = d.MIG.Instances[1:]
	if got := Make(in); !got.Yields["s"] {
		t.Errorf("its instance is gone from a geometry, and it may start: %+v", got.Layouts)
	}
	in.Wanted[0].Geometry, in.Wanted[0].OnDemand = nil, true
	in.Allocations[1].Asked = time.Unix(1e9, 0)
	d.MIG.Instances = slices.Insert(d.MIG.Instances, 0, gpu.Instance{Profile: "1g.10gb", GI: 1, Placement: gpu.Placement{Start: 0, Size: 1}})
	if got := Make(in); len(got.Work) != 1 || got.Work[0].String() != "destroy 1g.10gb@0, create 3g.40gb@0" {
		t.Errorf("over one that has yielded: %v, %v", got.Work, got.Trouble)
	}
}
