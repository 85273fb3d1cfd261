// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"example.com/gpu-agent/internal/config"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/internal/plan"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
	"example.com/gpu-agent/pkg/timeslice"
)

const spotName = memName + ".spot"

// spotted publishes a node whose room is offered twice, and returns its desk. Each GPU has eight units.
func spotted(t *testing.T, gpus, most int) (*desk, *clock, func()) {
	t.Helper()
	d, c := newDesk()
	inv := machine(gpus)
	for i := range inv.GPUs {
		inv.GPUs[i].Memory, inv.GPUs[i].Reserved = 8192, 0
	}
	var wanted []config.Want
	for i := range inv.GPUs {
		wanted = append(wanted, config.Want{GPU: inv.GPUs[i].UUID, Mode: config.Shared, API: ledger.DevicePlugin,
			Spot: ledger.Offering{On: true, Most: most}})
	}
	publish := func() {
		d.Publish(func(held []ledger.Allocation) *Offer {
			changes := plan.Make(plan.Input{Inventory: inv, Wanted: wanted, Layouts: map[gpu.UUID]plan.Layout{}, Unit: 1024, Allocations: held})
			return Build(Input{Inventory: inv, Changes: &changes, Held: held, Names: names})
		})
	}
	publish()
	return d, c, publish
}

// free returns the numbers of a GPU's devices that the kubelet may give out.
func free(d *desk, resource string, u gpu.UUID) (out []int) {
	for _, dev := range d.Offer().resource(resource).Devices {
		if dev.GPU == u && dev.Healthy && !dev.Leaving {
			_, n, _ := timeslice.ParseID(dev.ID)
			out = append(out, n)
		}
	}
	return out
}

// The guaranteed list never changes for spot's sake. The spot list has what no guaranteed allocation has, from the
// Allocate on, and has it again when that one ends.
func TestSpotListFallsAndRises(t *testing.T) {
	d, _, publish := spotted(t, 1, 0)
	u := nth(0)
	if _, err := d.Allocate(spotName, ids(u, 6, 7)); err != nil {
		t.Fatal(err)
	}
	told := told(d, spotName)
	g, err := d.Allocate(memName, ids(u, 0, 1))
	if err != nil {
		t.Fatal(err)
	}
	if !told() {
		t.Error("the kubelet is not told of the spot list")
	}
	for range 2 {
		if got := free(d, spotName, u); !slices.Equal(got, []int{2, 3, 4, 5, 6, 7}) {
			t.Errorf("spot pods may have %v", got)
		}
		if got := free(d, memName, u); len(got) != 8 {
			t.Errorf("guaranteed pods may have %v", got)
		}
		publish()
	}
	_, err = d.Allocate(spotName, ids(u, 1, 2))
	_, unfit := d.Prefer(spotName, ids(u, 0, 1, 2), nil, 2)
	for what, err := range map[string]error{"the list": err, "the ledger": spotHeld(&Resource{Tier: ledger.Spot}, ledger.ErrHeld), "too few are left": unfit} {
		if err == nil || !strings.Contains(err.Error(), guaranteedHas) || status.CauseOf(withReason(err), status.NotOffered).Reason != status.SpotRefused {
			t.Errorf("spot over guaranteed, by %s: %v", what, err)
		}
	}
	if _, err := d.Allocate(memName, ids(u, 99)); status.CauseOf(withReason(err), status.NotOffered).Reason != status.NotOffered {
		t.Errorf("a guaranteed request for what does not exist: %v", err)
	}
	if err := spotHeld(&Resource{}, ledger.ErrHeld); status.CauseOf(err, status.NotOffered).Reason != status.NotOffered {
		t.Errorf("a guaranteed request: %v", err)
	}
	d.FrontEnd.Release(g.ID)
	if got := free(d, spotName, u); len(got) != 8 {
		t.Errorf("after its end spot pods may have %v", got)
	}
}

// Where a partition bounds spot, spot pods keep what they have, and may have as much more as is left, from the far
// end of the GPU.
func TestMostOfSpot(t *testing.T) {
	d, _, _ := spotted(t, 1, 3)
	u := nth(0)
	if got := free(d, spotName, u); !slices.Equal(got, []int{5, 6, 7}) {
		t.Errorf("at first: %v", got)
	}
	a, err := d.Allocate(spotName, ids(u, 5, 6))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := d.Allocate(memName, ids(u, 7)); err != nil {
		t.Fatal(err)
	}
	if got := free(d, spotName, u); !slices.Equal(got, []int{4, 5, 6}) {
		t.Errorf("with two held, and the last one guaranteed: %v", got)
	}
	if _, err := d.Allocate(memName, ids(u, 5)); err != nil {
		t.Fatal(err)
	}
	if b, _ := d.Get(a.ID); !b.Yielding() {
		t.Fatal("it does not yield")
	}
	if got := free(d, spotName, u); !slices.Equal(got, []int{3, 4, 6}) {
		t.Errorf("what yields does not count: %v", got)
	}
}

// A guaranteed request gets the GPU that it would get without spot holders, of equal ones that with free room. There it
// gets free room first, then room over the fewest spot holders, among equals the youngest, and devices of other guaranteed
// allocations last.
func TestPreferOverSpot(t *testing.T) {
	type held struct {
		resource string
		ids      []string
	}
	a, b := nth(0), nth(1)
	for name, c := range map[string]struct {
		held []held
		n    int
		want []string
	}{
		"free room":             {[]held{{spotName, ids(a, 0, 1, 2, 3, 4)}}, 4, ids(b, 0, 1, 2, 3)},
		"free room beside it":   {[]held{{spotName, ids(a, 0, 1, 2, 3)}}, 4, ids(a, 4, 5, 6, 7)},
		"one holder, not two":   {[]held{{spotName, ids(a, 0, 1, 2)}, {spotName, ids(a, 3, 4, 5)}, {spotName, ids(b, 0, 1, 2, 3, 4, 5)}}, 8, ids(b, 0, 1, 2, 3, 4, 5, 6, 7)},
		"the youngest":          {[]held{{spotName, ids(a, 0, 1, 2, 3, 4, 5)}, {spotName, ids(b, 0, 1, 2, 3, 4, 5)}}, 5, ids(b, 0, 1, 2, 6, 7)},
		"the one that is large": {[]held{{spotName, ids(a, 0, 1, 2)}, {spotName, ids(a, 3)}, {memName, ids(a, 4, 5, 6, 7)}, {memName, ids(b, 0, 1, 2, 3, 4, 5, 6)}}, 3, ids(a, 0, 1, 2)},
		// As without spot pods: then a GPU is left for a pod that needs all of it.
		"the fullest GPU":     {[]held{{memName, ids(a, 0, 1, 2, 3)}, {spotName, ids(a, 4, 5, 6, 7)}}, 4, ids(a, 4, 5, 6, 7)},
		"not over guaranteed": {[]held{{memName, ids(a, 0, 1, 2, 3, 4)}, {spotName, ids(b, 0, 1, 2, 3, 4)}}, 6, ids(b, 0, 1, 2, 5, 6, 7)},
		// The kubelet gives the devices of pods that were deleted by force again, while their containers run.
		"room of one that is ending, beside spot": {[]held{{spotName, ids(a, 0, 1, 2)}, {"forced", ids(a, 3, 4, 5)}, {memName, ids(b, 0, 1, 2, 3)}}, 7, ids(a, 0, 1, 2, 3, 4, 6, 7)},
	} {
		t.Run(name, func(t *testing.T) {
			d, clock, _ := spotted(t, 2, 0)
			var available []string
			taken := map[string]bool{}
			for _, h := range c.held {
				clock.pass(time.Second)
				resource := h.resource
				if resource == "forced" {
					resource = memName
				}
				if _, err := d.Allocate(resource, h.ids); err != nil {
					t.Fatal(err)
				}
				for _, id := range h.ids {
					taken[id] = taken[id] || h.resource == memName
				}
			}
			for _, id := range slices.Concat(ids(a, 0, 1, 2, 3, 4, 5, 6, 7), ids(b, 0, 1, 2, 3, 4, 5, 6, 7)) {
				if !taken[id] {
					available = append(available, id)
				}
			}
			got, err := d.Prefer(memName, available, nil, c.n)
			slices.Sort(got)
			if err != nil || !slices.Equal(got, c.want) {
				t.Errorf("%v, %v; want %v", got, err, c.want)
			}
		})
	}
}

// A spot holder that waits until its GPU has its pieces again is in the way of no choice among what the GPU has now.
func TestPreferBesideAFormerLayout(t *testing.T) {
	d, _, _ := spotted(t, 1, 0)
	u := nth(0)
	a, err := d.Allocate(spotName, ids(u, 5))
	if err != nil {
		t.Fatal(err)
	}
	d.ledger.SetLayoutYields(map[string]bool{a.ID: true})
	d.ledger.SetOut(a.ID, a.Epoch)
	inv := machine(1)
	d.Publish(func(held []ledger.Allocation) *Offer {
		changes := plan.Make(plan.Input{Inventory: inv, Layouts: map[gpu.UUID]plan.Layout{}, Unit: 1024, Allocations: held,
			Wanted: []config.Want{{GPU: u, Mode: config.Shared, Replicas: 3, API: ledger.DevicePlugin}}})
		return Build(Input{Inventory: inv, Changes: &changes, Held: held, Names: names})
	})
	if _, err := d.Allocate("example.com/gpu.shared", ids(u, 0)); err != nil {
		t.Fatal(err)
	}
	// The pod was deleted by force, and its container has not ended.
	if got, err := d.Prefer("example.com/gpu.shared", ids(u, 0, 1, 2), nil, 1); err != nil || slices.Equal(got, ids(u, 0)) {
		t.Errorf("%v, %v: what another pod has is chosen before what is free", got, err)
	}
}

// Of placements on demand, too: room that nobody has, then that of the youngest spot holder.
func TestPreferPlacementsOverSpot(t *testing.T) {
	card := a100.card(t)
	d, clock := newDesk()
	o := onDemand(map[gpu.UUID]*mig.Card{gpuA: card}, nil)
	for i := range len(o.Resources) {
		r := o.Resources[i]
		r.Name, r.Tier, r.Devices = InTier(r.Name, ledger.Spot), ledger.Spot, slices.Clone(r.Devices)
		o.Resources = append(o.Resources, r)
	}
	slices.SortFunc(o.Resources, func(a, b Resource) int { return cmp.Compare(a.Name, b.Name) })
	d.set(o)
	three := "example.com/mig-3g.40gb"
	take := func(resource string, at string) {
		t.Helper()
		clock.pass(time.Second)
		if _, err := d.Allocate(resource, on(gpuA, at)); err != nil {
			t.Fatal(err)
		}
	}
	prefer := func(n int) []string {
		t.Helper()
		got, err := d.Prefer(three, on(gpuA, "3g.40gb@0", "3g.40gb@4"), nil, n)
		if err != nil {
			t.Fatal(err)
		}
		slices.Sort(got)
		return got
	}
	take("example.com/mig-1g.10gb.spot", "1g.10gb@0")
	if got := prefer(1); !slices.Equal(got, on(gpuA, "3g.40gb@4")) {
		t.Errorf("beside a spot holder: %v", got)
	}
	take("example.com/mig-1g.10gb.spot", "1g.10gb@4")
	if got := prefer(1); !slices.Equal(got, on(gpuA, "3g.40gb@4")) {
		t.Errorf("over the younger one: %v", got)
	}
	take("example.com/mig-1g.10gb.spot", "1g.10gb@5")
	if got := prefer(1); !slices.Equal(got, on(gpuA, "3g.40gb@0")) {
		t.Errorf("over one, not two: %v", got)
	}
	if got := prefer(2); len(got) != 2 {
		t.Errorf("both: %v", got)
	}
	take(three, "3g.40gb@0")
	if a, _ := d.Get(cdi.Key("example.com/mig-1g.10gb.spot", on(gpuA, "1g.10gb@0"))); !a.Yielding() {
		t.Error("the spot holder there does not yield")
	}
	for _, id := range on(gpuA, "3g.40gb@4", "7g.80gb@0") {
		healthy := device1(t, d, id).Healthy
		if want := strings.Contains(id, "3g"); healthy != want {
			t.Errorf("%s is healthy for guaranteed pods: %v", id, healthy)
		}
	}
	for _, dev := range d.Offer().resource(three + ".spot").Devices {
		if dev.Healthy {
			t.Errorf("%s is offered to spot pods", dev.ID)
		}
	}
}

// Spot pods do not spread guaranteed ones over the GPUs: each goes to the GPU that it would get without them.
func TestPlacementsArePackedAsWithoutSpot(t *testing.T) {
	card := a100.card(t)
	for _, spot := range []bool{false, true} {
		d, clock := newDesk()
		o := onDemand(map[gpu.UUID]*mig.Card{gpuA: card, gpuB: card}, nil)
		for i := range len(o.Resources) {
			r := o.Resources[i]
			r.Name, r.Tier, r.Devices = InTier(r.Name, ledger.Spot), ledger.Spot, slices.Clone(r.Devices)
			o.Resources = append(o.Resources, r)
		}
		slices.SortFunc(o.Resources, func(a, b Resource) int { return cmp.Compare(a.Name, b.Name) })
		d.set(o)
		take := func(resource string, ids ...string) {
			t.Helper()
			clock.pass(time.Second)
			if _, err := d.Allocate(resource, ids); err != nil {
				t.Fatal(err)
			}
		}
		take("example.com/mig-1g.10gb", on(gpuA, "1g.10gb@6")...)
		if spot {
			take("example.com/mig-3g.40gb.spot", on(gpuA, "3g.40gb@0")...)
			take("example.com/mig-2g.20gb.spot", on(gpuA, "2g.20gb@4")...)
		}
		var available []string
		for _, u := range []gpu.UUID{gpuA, gpuB} {
			available = append(available, on(u, "2g.20gb@0", "2g.20gb@2", "2g.20gb@4")...)
		}
		got, err := d.Prefer("example.com/mig-2g.20gb", available, nil, 1)
		if err != nil || !strings.HasPrefix(got[0], string(gpuA)) {
			t.Errorf("spot %v: %v, %v; the other GPU would lose its room for a 7g.80gb", spot, got, err)
		}
	}
}

// A guaranteed container waits until the spot container in its room has ended, also for one that is only about to
// be created. The spot container's next start waits until the guaranteed one has ended.
func TestGuaranteedWaitsForSpot(t *testing.T) {
	d, clock, _ := spotted(t, 1, 0)
	u := nth(0)
	s, err := d.Allocate(spotName, ids(u, 0, 1, 2, 3))
	if err != nil {
		t.Fatal(err)
	}
	clock.pass(time.Second)
	running := Use{ID: "c1", Key: s.ID, Holder: holder("batch", "job", "c", "uid-job")}
	look := func(uses ...Use) {
		clock.pass(time.Second)
		d.Reconcile(Observation{Asked: clock.now(), Uses: uses, Runtime: true})
	}
	look()
	if !ready(d, s.ID) || d.Prepare(t.Context(), spotName, ids(u, 0, 1, 2, 3)) != nil {
		t.Fatal("the spot container does not start")
	}
	g, err := d.Allocate(memName, ids(u, 3, 4))
	if err != nil {
		t.Fatal(err)
	}
	phase := func(id string) ledger.Phase { return allocationOf(t, d, id).Phase }
	look() // the runtime has not shown the container that was let in
	if phase(g.ID) != ledger.Waiting || isOut(d, s.ID) {
		t.Fatalf("while it is about to be created: %s, %+v", phase(g.ID), allocationOf(t, d, s.ID).Yield)
	}
	running.Created = clock.now()
	look(running)
	if a := allocationOf(t, d, g.ID); a.Phase != ledger.Waiting || a.After != "batch/job" {
		t.Fatalf("while it runs: %s after %q", a.Phase, a.After)
	}
	look()
	if phase(g.ID) != ledger.Taken || !isOut(d, s.ID) {
		t.Fatalf("after its end: %s, %+v", phase(g.ID), allocationOf(t, d, s.ID).Yield)
	}
	if !ready(d, g.ID) {
		t.Fatal("the guaranteed container does not start")
	}
	look()
	if phase(s.ID) != ledger.Waiting {
		t.Fatalf("beside the guaranteed one: %s", phase(s.ID))
	}
	d.FrontEnd.Release(g.ID)
	look()
	if phase(s.ID) != ledger.Taken {
		t.Fatalf("after the guaranteed one: %s", phase(s.ID))
	}
}

// A spot container that was let in, and whose creation failed as its room was wanted by then, keeps a guaranteed one
// waiting no longer than until the kubelet tries it again. That another pod comes with the same devices says nothing.
func TestSpotContainerThatWasNotCreated(t *testing.T) {
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	for _, another := range []bool{false, true} {
		d, clock, _ := spotted(t, 1, 0)
		u := nth(0)
		of := ids(u, 0, 1, 2, 3)
		s, err := d.Allocate(spotName, of)
		if err != nil {
			t.Fatal(err)
		}
		look := func() {
			clock.pass(time.Second)
			d.Reconcile(Observation{Asked: clock.now(), Runtime: true})
		}
		look()
		if !ready(d, s.ID) || d.Prepare(t.Context(), spotName, of) != nil {
			t.Fatal("the spot container does not start")
		}
		if another {
			if _, err := d.Allocate(spotName, of); err != nil {
				t.Fatal(err)
			}
		}
		g, err := d.Allocate(memName, ids(u, 3, 4))
		if err != nil {
			t.Fatal(err)
		}
		phase := func() ledger.Phase { return allocationOf(t, d, g.ID).Phase }
		clock.pass(time.Second)
		early := clock.now()
		clock.pass(time.Second)
		if err := d.Prepare(canceled, spotName, of); !errors.Is(err, ledger.ErrNotOpen) {
			t.Fatalf("the kubelet tries the spot container again: %v", err)
		}
		d.Reconcile(Observation{Asked: early, Runtime: true})
		if phase() != ledger.Waiting || isOut(d, s.ID) {
			t.Errorf("by a list from before that: %s", phase())
		}
		look()
		if waits := phase() == ledger.Waiting; waits != another || isOut(d, s.ID) == another {
			t.Errorf("with another pod %v: %s, out %v", another, phase(), isOut(d, s.ID))
		}
		clock.pass(Grace)
		look()
		if phase() != ledger.Taken || !isOut(d, s.ID) {
			t.Errorf("after %v: %s", Grace, phase())
		}
	}
}

// lend has an allocation lend its room, or no longer.
func lend(t *testing.T, d *desk, id string, on bool) {
	t.Helper()
	if a := allocationOf(t, d, id); !d.FrontEnd.SetLending(id, a.Epoch, on) {
		t.Fatalf("lending is not set to %v: %+v", on, a)
	}
}

// The spot list has the room of a guaranteed allocation from the moment from which it lends until that ends, and
// the kubelet is told each time. A request of a kubelet that has not heard of the end is refused.
func TestSpotListHasWhatIsLent(t *testing.T) {
	d, _, publish := spotted(t, 1, 0)
	u := nth(0)
	g, err := d.Allocate(memName, ids(u, 0, 1, 2))
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		heard := told(d, spotName)
		lend(t, d, g.ID, true)
		if got := free(d, spotName, u); len(got) != 8 || !heard() {
			t.Errorf("while it lends, spot pods may have %v, and the kubelet is told: %v", got, heard())
		}
		publish()
		if got := free(d, spotName, u); len(got) != 8 {
			t.Errorf("by the next offer, spot pods may have %v", got)
		}
		heard = told(d, spotName)
		lend(t, d, g.ID, false)
		if got := free(d, spotName, u); !slices.Equal(got, []int{3, 4, 5, 6, 7}) || !heard() {
			t.Errorf("at the end, spot pods may have %v, and the kubelet is told: %v", got, heard())
		}
	}
	if _, err := d.Allocate(spotName, ids(u, 2, 3)); err == nil || !strings.Contains(err.Error(), guaranteedHas) {
		t.Errorf("over what is no longer lent: %v", err)
	}
	if d.FrontEnd.SetLending(g.ID, g.Epoch+1, true) || d.FrontEnd.SetLending("nobody", 0, true) {
		t.Error("another epoch lends, or an allocation that there is not")
	}
}

// A spot request is given free room before lent room, and with lent room as much free room as there is. A guaranteed
// one is given no room that others lend.
func TestPreferFreeBeforeLent(t *testing.T) {
	d, _, _ := spotted(t, 2, 0)
	for _, u := range []gpu.UUID{nth(0), nth(1)} {
		g, err := d.Allocate(memName, ids(u, 0, 1, 2, 3, 4))
		if err != nil {
			t.Fatal(err)
		}
		lend(t, d, g.ID, true)
	}
	if _, err := d.Allocate(memName, ids(nth(0), 5)); err != nil { // it lends nothing
		t.Fatal(err)
	}
	all := func(resource string) (out []string) {
		for _, dev := range d.Offer().resource(resource).Devices {
			if dev.Healthy {
				out = append(out, dev.ID)
			}
		}
		return out
	}
	for n, want := range map[int][]string{
		2: ids(nth(0), 6, 7), // the fuller GPU, by its free room
		3: ids(nth(1), 5, 6, 7),
		5: ids(nth(1), 0, 1, 5, 6, 7),
	} {
		got, err := d.Prefer(spotName, all(spotName), nil, n)
		slices.Sort(got)
		if err != nil || !slices.Equal(got, want) {
			t.Errorf("%d units for a spot pod: %v (%v), want %v", n, got, err, want)
		}
	}
	if got, err := d.Prefer(memName, ids(nth(1), 5, 6, 7), nil, 4); err == nil {
		t.Errorf("four units for a guaranteed pod: %v", got)
	}

	// What is lent comes before what the container of a pod that was deleted by force still has.
	d, _, _ = spotted(t, 1, 0)
	g, err := d.Allocate(memName, ids(nth(0), 4, 5, 6, 7))
	if err != nil {
		t.Fatal(err)
	}
	lend(t, d, g.ID, true)
	if _, err := d.Allocate(spotName, ids(nth(0), 0, 1)); err != nil {
		t.Fatal(err)
	}
	for n, want := range map[int][]string{4: ids(nth(0), 2, 3, 4, 5), 7: ids(nth(0), 0, 2, 3, 4, 5, 6, 7)} {
		got, err := d.Prefer(spotName, all(spotName), nil, n)
		slices.Sort(got)
		if err != nil || !slices.Equal(got, want) {
			t.Errorf("%d units beside a container that ends: %v (%v), want %v", n, got, err, want)
		}
	}
}

// A spot container starts in the room of a holder that lends, whose container runs on, and the holder's own container
// may start again meanwhile. When lending ends, no spot container starts there, and the room is back when the last
// has ended.
func TestSpotStartsInLentRoom(t *testing.T) {
	d, clock, _ := spotted(t, 1, 0)
	u := nth(0)
	units := ids(u, 0, 1, 2, 3)
	g, err := d.Allocate(memName, units)
	if err != nil {
		t.Fatal(err)
	}
	notebook := Use{ID: "c1", Key: g.ID, Holder: holder("team", "notebook", "c", "uid-g")}
	look := func(uses ...Use) {
		clock.pass(time.Second)
		entries := []node.Entry{{PodUID: "uid-g", Container: "c", Resource: memName, IDs: units}}
		if len(d.Allocations()) > 1 {
			entries = append(entries, node.Entry{PodUID: "uid-s", Container: "c", Resource: spotName, IDs: units})
		}
		d.Reconcile(Observation{Asked: clock.now(), Entries: entries, Checkpoint: true, Uses: uses, Runtime: true})
	}
	clock.pass(time.Second)
	look()
	if !ready(d, g.ID) || d.Prepare(t.Context(), memName, units) != nil {
		t.Fatal("the guaranteed container does not start")
	}
	notebook.Created = clock.now()
	look(notebook)
	lend(t, d, g.ID, true)
	s, err := d.Allocate(spotName, units)
	if err != nil {
		t.Fatal(err)
	}
	look(notebook)
	if a := allocationOf(t, d, s.ID); a.Phase != ledger.Taken || a.After != "" {
		t.Fatalf("over a container that lends: %s after %q", a.Phase, a.After)
	}
	if !ready(d, s.ID) || d.Prepare(t.Context(), spotName, units) != nil {
		t.Fatal("the spot container does not start")
	}
	job := Use{ID: "c2", Key: s.ID, Holder: holder("batch", "job", "c", "uid-s"), Created: clock.now()}
	d.Shut(g.ID) // the driver was loaded anew
	look(notebook, job)
	if a := allocationOf(t, d, g.ID); a.Phase != ledger.Taken || a.After != "" {
		t.Fatalf("the holder that lends waits: %s after %q", a.Phase, a.After)
	}
	if !ready(d, g.ID) {
		t.Fatal("the holder that lends does not open again")
	}

	lend(t, d, g.ID, false)
	look(notebook, job)
	if a := allocationOf(t, d, s.ID); a.Phase != ledger.Waiting || a.Out() || !d.Borrowed(g.ID) {
		t.Fatalf("at the end, with its container: %+v", a)
	}
	look(notebook)
	if a := allocationOf(t, d, s.ID); !a.Out() || d.Borrowed(g.ID) {
		t.Fatalf("at the end, without its container: %+v", a)
	}
}

func isOut(d *desk, id string) bool {
	a, _ := d.Get(id)
	return a.Out()
}

// Names of the spot tier: which there are, and what they say.
func TestSpotNames(t *testing.T) {
	for resource, ours := range map[string]bool{
		memName + ".spot": true, gpuName + ".spot": true, "example.com/mig-3g.40gb.spot": true,
		"example.com/mig-1c.3g.40gb.spot": true, repName + ".spot": false, "example.com/spot": false,
		"example.com/gpu-mem.spot.spot": false, "example.com/.spot": false,
	} {
		if names.Ours(resource) != ours {
			t.Errorf("%s is ours: %v", resource, !ours)
		}
	}
	r, err := RecordOf(spotName, ids(nth(0), 1))
	if err != nil || r.Tier != ledger.Spot {
		t.Errorf("%+v, %v", r, err)
	}
	if r, err = RecordOf(memName, ids(nth(0), 1)); err != nil || r.Tier != ledger.Guaranteed {
		t.Errorf("%+v, %v", r, err)
	}
	if _, err := RecordOf(repName+".spot", ids(nth(0), 1)); !errors.Is(err, gpu.ErrInvalid) {
		t.Errorf("replicas: %v", err)
	}
	for _, want := range []string{memName + ".spot", gpuName + ".spot"} {
		if !slices.Contains(names.Fixed(), want) {
			t.Errorf("%s is not among %v", want, names.Fixed())
		}
	}
}

// A GPU that was laid out anew over a spot pod offers all it has: what the pod has given back is listed for it alone.
func TestNewLayoutOverSpot(t *testing.T) {
	inv := machine(1)
	changes := plan.Make(plan.Input{Inventory: inv, Unit: 1024, Wanted: []config.Want{{GPU: nth(0), Mode: config.Whole, API: ledger.DevicePlugin}}})
	a := holds(spotName, ids(nth(0), 0)...)
	a.Tier = ledger.Spot
	for _, out := range []bool{false, true} {
		a.Yield = ledger.Yield{Layout: true, Out: out}
		v := Build(Input{Inventory: inv, Changes: &changes, Held: []ledger.Allocation{a}, Names: names})
		if dev := v.resource(gpuName).Devices[0]; dev.Healthy != out {
			t.Errorf("the GPU is offered: %v, and the spot pod is out: %v (%s)", dev.Healthy, out, dev.Reason)
		}
		if r := v.resource(spotName); r == nil || len(r.Devices) != 1 || !r.Devices[0].Leaving {
			t.Errorf("the pod's device is not listed for it: %+v", r)
		}
	}
}

// Of whole GPUs and of MIG instances, too, a spot request is given free ones before those that are lent.
func TestPreferFreeBeforeLentOfEachKind(t *testing.T) {
	d, _ := newDesk()
	inv := machine(3)
	var wanted []config.Want
	for i := range inv.GPUs {
		wanted = append(wanted, config.Want{GPU: inv.GPUs[i].UUID, Mode: config.Whole, API: ledger.DevicePlugin, Spot: ledger.Offering{On: true}})
	}
	d.Publish(func(held []ledger.Allocation) *Offer {
		changes := plan.Make(plan.Input{Inventory: inv, Wanted: wanted, Layouts: map[gpu.UUID]plan.Layout{}, Unit: 1024, Allocations: held})
		return Build(Input{Inventory: inv, Changes: &changes, Held: held, Names: names})
	})
	const whole = "example.com/gpu"
	all := []string{string(nth(0)), string(nth(1)), string(nth(2))}
	for _, id := range all[:2] {
		g, err := d.Allocate(whole, []string{id})
		if err != nil {
			t.Fatal(err)
		}
		lend(t, d, g.ID, true)
	}
	for n := 1; n <= 3; n++ {
		got, err := d.Prefer(whole+".spot", all, nil, n)
		if err != nil || len(got) != n || !slices.Contains(got, all[2]) {
			t.Errorf("%d whole GPUs: %v (%v), and %s alone is free", n, got, err, all[2])
		}
	}

	d, _ = newDesk()
	o := onDemand(map[gpu.UUID]*mig.Card{gpuA: a100.card(t)}, nil)
	for i := range len(o.Resources) {
		r := o.Resources[i]
		r.Name, r.Tier, r.Devices = InTier(r.Name, ledger.Spot), ledger.Spot, slices.Clone(r.Devices)
		o.Resources = append(o.Resources, r)
	}
	slices.SortFunc(o.Resources, func(a, b Resource) int { return cmp.Compare(a.Name, b.Name) })
	d.set(o)
	const three = "example.com/mig-3g.40gb"
	for _, at := range []string{"3g.40gb@0", "3g.40gb@4"} {
		d.set(o)
		g, err := d.Allocate(three, on(gpuA, at))
		if err != nil {
			t.Fatal(err)
		}
		lend(t, d, g.ID, true)
		for n := range 2 {
			got, err := d.Prefer(three+".spot", on(gpuA, "3g.40gb@0", "3g.40gb@4"), nil, n+1)
			if err != nil || len(got) != n+1 || n == 0 && !slices.Equal(got, on(gpuA, map[string]string{"3g.40gb@0": "3g.40gb@4", "3g.40gb@4": "3g.40gb@0"}[at])) {
				t.Errorf("%d instances beside %s, which is lent: %v (%v)", n+1, at, got, err)
			}
		}
		if _, err := d.Prefer("example.com/mig-1g.10gb.spot", on(gpuA, map[string]string{"3g.40gb@0": "1g.10gb@0", "3g.40gb@4": "1g.10gb@4"}[at]), nil, 1); err == nil {
			t.Errorf("a placement in the room of %s, which is lent, is chosen", at)
		}
		d.FrontEnd.Release(g.ID)
	}
}
