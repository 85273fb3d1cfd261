// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/cdi"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
)

// family is what the driver of a kind of GPU says can stand on it: placements by
// profile, as "name memory-slices most start,start…".
type family []string

var (
	// A100-SXM4-80GB; H100 and later differ in names alone.
	a100 = family{"1g.10gb 1 7 0,1,2,3,4,5,6", "1g.10gb+me 1 1 0,1,2,3,4,5,6", "1g.20gb 2 4 0,2,4,6", "2g.20gb 2 3 0,2,4",
		"3g.40gb 4 2 0,4", "4g.40gb 4 1 0", "7g.80gb 8 1 0"}
	a30 = family{"1g.6gb 1 4 0,1,2,3", "1g.6gb+me 1 1 0,1,2,3", "2g.12gb 2 2 0,2", "2g.12gb+me 2 1 0,2", "4g.24gb 4 1 0"}
)

func (f family) mig() *gpu.MIG {
	m := &gpu.MIG{Capable: true, Enabled: true}
	for i, line := range f {
		w := strings.Fields(line)
		p := gpu.Profile{Name: w[0], ID: 20 - i}
		var size int
		if _, err := fmt.Sscan(w[1], &size); err != nil {
			panic(err)
		}
		if _, err := fmt.Sscan(w[2], &p.Max); err != nil {
			panic(err)
		}
		if _, err := fmt.Sscanf(w[0], "%dg", &p.Slices); err != nil {
			panic(err)
		}
		for s := range strings.SplitSeq(w[3], ",") {
			at := gpu.Placement{Size: size}
			if _, err := fmt.Sscan(s, &at.Start); err != nil {
				panic(err)
			}
			p.Placements = append(p.Placements, at)
		}
		m.Profiles = append(m.Profiles, p)
	}
	return m
}

// legal is what FIELD.md's tables come to, said again: no two overlap in memory
// placements, of no profile are there too many, and one at most has media engines.
func (f family) legal(placements []mig.Placement) bool {
	used, media, count := map[int]bool{}, 0, map[string]int{}
	for _, s := range placements {
		for i := range s.Size {
			if used[s.Start+i] {
				return false
			}
			used[s.Start+i] = true
		}
		if s.Profile.Attr == "+me" {
			media++
		}
		count[s.Profile.String()]++
	}
	for _, line := range f {
		w := strings.Fields(line)
		if most := int(w[2][0] - '0'); count[w[0]] > most {
			return false
		}
	}
	return media <= 1
}

func (f family) card(t testing.TB) *mig.Card {
	t.Helper()
	c, err := mig.NewCard(f.mig())
	if err != nil {
		t.Fatal(err)
	}
	if n := len(c.Placements()); f[0] == a100[0] && n != 25 || f[0] == a30[0] && n != 13 {
		t.Fatalf("the card has %d placements: %v", n, c.Placements())
	}
	return c
}

// placement reads "3g.40gb@4".
func placement(t testing.TB, c *mig.Card, text string) mig.Placement {
	t.Helper()
	_, p, start, ci, err := mig.ParseID("GPU-x::" + text)
	if err != nil {
		t.Fatal(err)
	}
	s, ok := c.Placement(p, start, ci)
	if !ok {
		t.Fatalf("the card has no placement %s", text)
	}
	return s
}

func placementsOf(t testing.TB, c *mig.Card, texts ...string) (out []mig.Placement) {
	t.Helper()
	for _, text := range texts {
		out = append(out, placement(t, c, text))
	}
	return out
}

// on are the device IDs of placements of a GPU.
func on(u gpu.UUID, placements ...string) []string {
	out := make([]string, len(placements))
	for i, s := range placements {
		out[i] = string(u) + "::" + s
	}
	return out
}

func resourceOf(id string) string {
	_, p, _, _, err := mig.ParseID(id)
	if err != nil {
		panic(err)
	}
	return "example.com/" + p.Resource()
}

// onDemand is an offer of GPUs on which every placement is on offer.
func onDemand(cards map[gpu.UUID]*mig.Card, change func(*Device)) *Offer {
	v := &Offer{Rank: map[gpu.UUID]int{}, MIG: map[gpu.UUID]ledger.MIG{}}
	byName := map[string]*Resource{}
	for i, u := range slices.Sorted(maps.Keys(cards)) {
		v.Rank[u], v.MIG[u] = i, ledger.MIG{Card: cards[u]}
		for _, s := range cards[u].Placements() {
			dev := Device{ID: mig.ID(u, s), GPU: u, Placement: s, Healthy: true}
			if change != nil {
				change(&dev)
			}
			name := "example.com/" + s.Profile.Resource()
			if byName[name] == nil {
				byName[name] = &Resource{Name: name, Kind: piece.KindPlacement}
			}
			byName[name].Devices = append(byName[name].Devices, dev)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(byName)) {
		v.Resources = append(v.Resources, *byName[name])
	}
	return v
}

// offered are the placements of a GPU that are Healthy, by start.
func offered(d *desk, u gpu.UUID) string {
	var out []mig.Placement
	v := d.Offer()
	for i := range v.Resources {
		for _, dev := range v.Resources[i].Devices {
			if dev.GPU == u && dev.Healthy && dev.Placement.Size > 0 {
				out = append(out, dev.Placement)
			}
		}
	}
	slices.SortFunc(out, mig.ComparePlacements)
	var words []string
	for _, s := range out {
		words = append(words, s.String())
	}
	return strings.Join(words, " ")
}

func device1(t *testing.T, d *desk, id string) Device {
	t.Helper()
	v := d.Offer()
	for i := range v.Resources {
		for _, dev := range v.Resources[i].Devices {
			if dev.ID == id {
				return dev
			}
		}
	}
	t.Fatalf("%s is not listed", id)
	return Device{}
}

// told reports, once, whether a stream would have been told since the call.
func told(d *desk, resource string) func() bool {
	_, ch := d.List(resource)
	return func() bool {
		select {
		case <-ch:
			return true
		default:
			return false
		}
	}
}

func allocate(t *testing.T, d *desk, ids ...string) string {
	t.Helper()
	key, err := keyOf(d.Allocate(resourceOf(ids[0]), ids))
	if err != nil {
		t.Fatalf("allocate %v: %v", ids, err)
	}
	return key
}

func allocationOf(t *testing.T, d *desk, key string) allocation {
	t.Helper()
	for _, c := range d.Allocations() {
		if c.ID == key {
			return c
		}
	}
	t.Fatalf("there is no allocation %s", key)
	return allocation{}
}

// An allocation covers in the same moment what has no room beside it; at its end that is
// back. Nobody else hears of it.
func TestAnAllocationCoversWhatHasNoRoomBesideIt(t *testing.T) {
	d, clock := newDesk()
	card := a100.card(t)
	v := onDemand(map[gpu.UUID]*mig.Card{gpuA: card, gpuB: a30.card(t)}, nil)
	v.Resources = append(v.Resources, units(nil).Resources...)
	d.set(v)
	all, other := offered(d, gpuA), offered(d, gpuB)

	of := map[string]func() bool{}
	for _, r := range d.Offer().Resources {
		of[r.Name] = told(d, r.Name)
	}
	key := allocate(t, d, on(gpuA, "2g.20gb@2")...)
	const beside = "1g.10gb@0 1g.10gb+me@0 1g.20gb@0 2g.20gb@0 1g.10gb@1 1g.10gb+me@1 2g.20gb@2 " +
		"1g.10gb@4 1g.10gb+me@4 1g.20gb@4 2g.20gb@4 3g.40gb@4 1g.10gb@5 1g.10gb+me@5 1g.10gb@6 1g.10gb+me@6 1g.20gb@6"
	if got := offered(d, gpuA); got != beside {
		t.Errorf("beside 2g.20gb@2 on offer are\n%s, want\n%s", got, beside)
	}
	if got := offered(d, gpuB); got != other {
		t.Errorf("on another GPU on offer are\n%s, want\n%s", got, other)
	}
	for name, told := range of {
		// 2g.20gb keeps its three: 0, 2 itself, 4.
		want := strings.Contains(name, "/mig-") && !strings.Contains(name, "2g.20gb") && !strings.HasSuffix(name, "6gb") &&
			!strings.HasSuffix(name, "6gb.me") && !strings.Contains(name, "2g.12gb") && !strings.Contains(name, "4g.24gb")
		if told() != want {
			t.Errorf("%s: told %v, want %v", name, !want, want)
		}
	}
	if dev := device1(t, d, on(gpuA, "3g.40gb@0")[0]); dev.Reason != "its room is taken by 2g.20gb@2" {
		t.Errorf("3g.40gb@0: %q", dev.Reason)
	}
	_, err := d.Allocate("example.com/mig-3g.40gb", on(gpuA, "3g.40gb@0"))
	wantErr(t, err, "its room is taken by 2g.20gb@2 (held by allocation "+key+")")
	before := d.Offer()
	if allocate(t, d, on(gpuA, "2g.20gb@2")...) != key || d.Offer() != before {
		t.Error("the same placement again is another allocation, or changes what is on offer")
	}

	clock.pass(Grace)
	told := told(d, "example.com/mig-7g.80gb")
	if ended := d.Reconcile(new(world).say(clock.now())); len(ended) != 1 {
		t.Fatalf("%d allocations ended", len(ended))
	}
	if got := offered(d, gpuA); got != all || !told() {
		t.Errorf("after its end on offer are\n%s, want\n%s", got, all)
	}
}

func TestPlacementsOfOneRequest(t *testing.T) {
	card := a100.card(t)
	for _, c := range []struct {
		name    string
		before  []string
		request []string
		err     string
	}{
		{name: "that stand beside each other", request: on(gpuA, "3g.40gb@0", "3g.40gb@4")},
		{name: "of two GPUs", request: append(on(gpuA, "3g.40gb@0"), on(gpuB, "3g.40gb@0")...)},
		{name: "of which one alone may stand", request: on(gpuA, "1g.10gb+me@0", "1g.10gb+me@3"), err: "does not fit beside the others of this request"},
		{name: "the same twice", request: on(gpuA, "3g.40gb@0", "3g.40gb@0"), err: "does not fit beside the others"},
		{name: "one of which is held already", before: on(gpuA, "1g.10gb@0"), request: on(gpuA, "1g.10gb@1", "1g.10gb@0")},
		{name: "one of which has no room", before: on(gpuA, "2g.20gb@0"), request: on(gpuA, "1g.10gb@2", "1g.10gb@1"), err: "its room is taken by 2g.20gb@0"},
		{name: "with media engines, beside one that has them", before: on(gpuA, "1g.10gb+me@6"), request: on(gpuA, "1g.10gb+me@0"), err: "its room is taken by 1g.10gb+me@6"},
		{name: "one that the GPU does not have", request: on(gpuA, "4g.40gb@4"), err: "not on offer"},
	} {
		t.Run(c.name, func(t *testing.T) {
			d, _ := newDesk()
			d.set(onDemand(map[gpu.UUID]*mig.Card{gpuA: card, gpuB: card}, nil))
			if c.before != nil {
				allocate(t, d, c.before...)
			}
			allocations := len(d.Allocations())
			key, err := keyOf(d.Allocate(resourceOf(c.request[0]), c.request))
			if c.err != "" {
				wantErr(t, err, c.err)
				if len(d.Allocations()) != allocations {
					t.Error("what was refused is taken")
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			allocation := allocationOf(t, d, key)
			if len(allocation.Grants) != len(c.request) {
				t.Fatalf("grants %v of %v", allocation.Grants, c.request)
			}
			for i, id := range allocation.IDs {
				if p := allocation.Grants[i]; mig.ID(p.GPU, piece.At(p.Piece)) != id || piece.At(p.Piece).Size == 0 || !allocation.On(p.GPU) {
					t.Errorf("placement %d of %v is %v on %v", i, allocation.IDs, p, allocation.GPUs())
				}
			}
			for _, id := range c.request {
				if !device1(t, d, id).Healthy {
					t.Errorf("%s is held and not Healthy", id)
				}
			}
		})
	}
}

// The kubelet hands an init container's placements to the app container, with more
// beside them or not.
func TestInitContainersPlacements(t *testing.T) {
	d, clock := newDesk()
	d.set(onDemand(map[gpu.UUID]*mig.Card{gpuA: a100.card(t)}, nil))
	allocate(t, d, on(gpuA, "1g.20gb@0")...)
	app := allocate(t, d, on(gpuA, "1g.20gb@0", "1g.20gb@2")...)
	if got, want := offered(d, gpuA), "1g.20gb@0 1g.20gb@2 "; !strings.HasPrefix(got, want) || strings.Contains(got, "3g.40gb@0") {
		t.Errorf("on offer: %s", got)
	}
	clock.pass(Grace)
	w := &world{entries: []node.Entry{{PodUID: "p", Container: "c", Resource: "example.com/mig-1g.20gb", IDs: on(gpuA, "1g.20gb@0", "1g.20gb@2")}}}
	if ended := d.Reconcile(w.say(clock.now())); len(ended) != 1 || ended[0].ID == app {
		t.Fatalf("ended: %+v", ended)
	}
	if dev := device1(t, d, on(gpuA, "2g.20gb@0")[0]); dev.Healthy {
		t.Error("the end of the init container's allocation gave room back that the app container has")
	}
}

// A force-deleted pod frees its placement at the kubelet before its container is dead.
// The allocation lives until both witnesses agree, and covers till then; whoever gets
// the same placement waits.
func TestPlacementOfAHolderThatIsEnding(t *testing.T) {
	d, clock := newDesk()
	d.set(onDemand(map[gpu.UUID]*mig.Card{gpuA: a100.card(t)}, nil))
	const resource = "example.com/mig-3g.40gb"
	old, two := on(gpuA, "3g.40gb@0"), on(gpuA, "3g.40gb@0", "3g.40gb@4")
	start := clock.now()
	key := allocate(t, d, old...)
	use := func(pod string, ids []string, at time.Time) Use {
		return Use{Key: cdi.Key(resource, ids), Holder: holder("ns", pod, "c", "uid-"+pod), Created: at}
	}
	clock.pass(time.Minute)
	w := &world{uses: []Use{use("old", old, start.Add(time.Second))}}
	if ended := d.Reconcile(w.say(clock.now())); len(ended) != 0 {
		t.Fatal("an allocation ended while its container runs")
	}
	_, err := d.Allocate("example.com/mig-4g.40gb", on(gpuA, "4g.40gb@0"))
	wantErr(t, err, "its room is taken by 3g.40gb@0 (held by allocation "+key+")")
	prepare := func(ids []string) error {
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		return d.Prepare(ctx, resource, ids)
	}
	// The next pod gets the same placement, or the same and another.
	for _, ids := range [][]string{old, two} {
		next := allocate(t, d, ids...)
		clock.pass(time.Second)
		w.entries = append(w.entries, node.Entry{PodUID: "uid-new", Container: "c", Resource: resource, IDs: ids})
		d.Reconcile(w.say(clock.now()))
		wantErr(t, prepare(ids), "previous holder still ending: allocation "+key)
		if c := allocationOf(t, d, next); c.Asked.IsZero() || c.After == "" {
			t.Errorf("wished %v, waits for %q", c.Asked, c.After)
		}
	}
	// One that stands beside it does not wait.
	beside := allocate(t, d, on(gpuA, "3g.40gb@4")...)
	clock.pass(time.Second)
	d.Reconcile(w.say(clock.now()))
	if c := allocationOf(t, d, beside); c.After != "" || c.Phase == ledger.Reserved {
		t.Errorf("a placement beside it waits for %q", c.After)
	}
	w.uses = nil
	clock.pass(time.Second)
	d.Reconcile(w.say(clock.now()))
	if c := allocationOf(t, d, key); c.After != "" {
		t.Errorf("its container is gone and the next still waits for %s", c.After)
	}
	if err := prepare(old); err == nil || strings.Contains(err.Error(), "previous holder") {
		t.Errorf("prepare: %v", err)
	}
}

// After the agent's restart the kubelet may hold what overlaps a container that
// still runs: found by places once the cards are known, by IDs before.
func TestAdoptedPlacementsWaitForThoseInTheirPlace(t *testing.T) {
	card := a100.card(t)
	for _, c := range []struct {
		name        string
		offer       bool
		before, now []string
		waits       bool
	}{
		{"the same placement", true, on(gpuA, "3g.40gb@0"), on(gpuA, "3g.40gb@0"), true},
		{"the same placement, no offer yet", false, on(gpuA, "3g.40gb@0"), on(gpuA, "3g.40gb@0"), true},
		{"one that has it among others, no offer yet", false, on(gpuA, "3g.40gb@0", "3g.40gb@4"), on(gpuA, "3g.40gb@0"), true},
		{"a placement in its place, no offer yet", false, on(gpuA, "1g.10gb@2"), on(gpuA, "3g.40gb@0"), false}, // that is found later
		{"a placement in its place", true, on(gpuA, "1g.10gb@2"), on(gpuA, "3g.40gb@0"), true},
		{"a placement beside it", true, on(gpuA, "1g.10gb@4"), on(gpuA, "3g.40gb@0"), false},
		{"the media engines of another place", true, on(gpuA, "1g.10gb+me@6"), on(gpuA, "1g.10gb+me@0"), true},
		{"the same place of another GPU", true, on(gpuB, "3g.40gb@0"), on(gpuA, "3g.40gb@0"), false},
		{"units of the GPU", true, ids(gpuA, 3), on(gpuA, "3g.40gb@0"), true},
	} {
		t.Run(c.name, func(t *testing.T) {
			d, clock := newDesk()
			resource := func(ids []string) string {
				if strings.Contains(ids[0], "@") {
					return resourceOf(ids[0])
				}
				return memName
			}
			for _, ids := range [][]string{c.before, c.now} {
				if err := d.restore(recordOf(t, resource(ids), ids), time.Time{}, time.Time{}); err != nil {
					t.Fatal(err)
				}
			}
			if c.offer {
				d.set(onDemand(map[gpu.UUID]*mig.Card{gpuA: card, gpuB: card}, nil))
			}
			clock.pass(time.Second)
			d.Reconcile((&world{
				entries: []node.Entry{{PodUID: "uid-p", Container: "c", Resource: resource(c.now), IDs: c.now}},
				uses: []Use{{Key: cdi.Key(resource(c.before), c.before), Holder: holder("ns", "before", "c", "uid-before"),
					Created: clock.now().Add(-time.Hour)}},
			}).say(clock.now()))
			allocation := allocationOf(t, d, cdi.Key(resource(c.now), c.now))
			if got := allocation.After == "ns/before"; got != c.waits {
				t.Errorf("waits for %q", allocation.After)
			}
		})
	}
}

// What is known of an allocation after a restart is its IDs; what it covers is known
// with the first offer.
func TestPlacementsAdoptedBeforeTheFirstOffer(t *testing.T) {
	d, clock := newDesk()
	const resource = "example.com/mig-2g.20gb"
	if err := d.restore(recordOf(t, resource, on(gpuA, "2g.20gb@4")), time.Time{}, time.Time{}); err != nil {
		t.Fatal(err)
	}
	if err := d.restore(recordOf(t, resource, on(gpuA, "2g.20gb@0")), clock.now().Add(-time.Minute), time.Time{}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := d.Prepare(ctx, resource, on(gpuA, "2g.20gb@2")); !errors.Is(err, ledger.ErrNotOpen) {
		t.Fatal(err)
	}
	early := d.Allocations()
	for _, c := range early {
		if len(c.Grants) != 1 || c.Grants[0].GPU != gpuA || piece.At(c.Grants[0].Piece).Profile.String() != "2g.20gb" || piece.At(c.Grants[0].Piece).Size != 0 {
			t.Errorf("allocation of %v: placements %v", c.IDs, c.Grants)
		}
	}
	d.set(onDemand(map[gpu.UUID]*mig.Card{gpuA: a100.card(t)}, nil))
	if got, want := offered(d, gpuA), "2g.20gb@0 2g.20gb@2 2g.20gb@4 1g.10gb@6 1g.10gb+me@6 1g.20gb@6"; got != want {
		t.Errorf("on offer: %s, want %s", got, want)
	}
	for i, c := range d.Allocations() {
		if piece.At(c.Grants[0].Piece).Size != 2 {
			t.Errorf("allocation of %v: placements %v", c.IDs, c.Grants)
		}
		if piece.At(early[i].Grants[0].Piece).Size != 0 {
			t.Error("what was handed out before has changed")
		}
	}
	// With an offer there, at once.
	told := told(d, "example.com/mig-1g.10gb")
	if err := d.restore(recordOf(t, "example.com/mig-1g.20gb", on(gpuA, "1g.20gb@6")), time.Time{}, time.Time{}); err != nil {
		t.Fatal(err)
	}
	if got, want := offered(d, gpuA), "2g.20gb@0 2g.20gb@2 2g.20gb@4 1g.20gb@6"; got != want || !told() {
		t.Errorf("on offer: %s, want %s", got, want)
	}
	for _, bad := range [][]string{on(gpuA, "2g.20gb@x"), on(gpuA, "2g@0"), {string(gpuA) + "::0", string(gpuA) + "::1g.10gb@6"}} {
		if r, err := RecordOf(resource, bad); err == nil {
			t.Errorf("%v are %+v", bad, r)
		}
	}
	// One that the GPU cannot have takes no room from those it can.
	if err := d.restore(recordOf(t, "example.com/mig-9g.99gb", on(gpuA, "9g.99gb@0")), time.Time{}, time.Time{}); err != nil {
		t.Fatal(err)
	}
	if got, want := offered(d, gpuA), "2g.20gb@0 2g.20gb@2 2g.20gb@4 1g.20gb@6"; got != want {
		t.Errorf("on offer: %s, want %s", got, want)
	}
}

// What stands and may not go covers too, but for itself where it may be given out.
func TestWhatStandsAndMayNotGo(t *testing.T) {
	d, clock := newDesk()
	card := a100.card(t)
	offer := func() *Offer {
		v := onDemand(map[gpu.UUID]*mig.Card{gpuA: card}, nil)
		v.MIG[gpuA] = ledger.MIG{Card: card, Occupied: placementsOf(t, card, "2g.20gb@0"), Kept: placementsOf(t, card, "3g.40gb@4"),
			Warm: placementsOf(t, card, "1g.10gb@2")}
		return v
	}
	d.set(offer())
	const free = "1g.10gb@2 1g.10gb+me@2 1g.20gb@2 2g.20gb@2 1g.10gb@3 1g.10gb+me@3 3g.40gb@4"
	if got := offered(d, gpuA); got != free {
		t.Errorf("on offer: %s, want %s", got, free)
	}
	_, err := d.Allocate("example.com/mig-2g.20gb", on(gpuA, "2g.20gb@0"))
	wantErr(t, err, "its room is taken by 2g.20gb@0")
	if strings.Contains(err.Error(), "held by") {
		t.Errorf("nobody holds it: %v", err)
	}
	allocate(t, d, on(gpuA, "3g.40gb@4")...)
	if got := offered(d, gpuA); got != free {
		t.Errorf("after the kept one was given out on offer are %s, want %s", got, free)
	}
	d.set(offer())
	if got := offered(d, gpuA); got != free {
		t.Errorf("the next offer has %s, want %s", got, free)
	}
	// Under another name it cannot be had twice.
	v := offer()
	v.Resources = append(v.Resources, Resource{Name: "other.example/mig-3g.40gb", Kind: piece.KindPlacement, Devices: []Device{
		{ID: on(gpuA, "3g.40gb@4")[0], GPU: gpuA, Placement: placement(t, card, "3g.40gb@4"), Healthy: true}}})
	d.set(v)
	_, err = d.Allocate("other.example/mig-3g.40gb", on(gpuA, "3g.40gb@4"))
	wantErr(t, err, "its room is taken by 3g.40gb@4")
	clock.pass(Grace)
	d.Reconcile(new(world).say(clock.now()))
	if _, err := d.Allocate("other.example/mig-3g.40gb", on(gpuA, "3g.40gb@4")); err != nil {
		t.Errorf("after its allocation has ended: %v", err)
	}
	// A foreign one that came where an allocation's was to be made.
	v = offer()
	v.MIG[gpuA] = ledger.MIG{Card: card, Kept: placementsOf(t, card, "1g.10gb@4")}
	d.set(v)
	_, err = d.Allocate("example.com/mig-1g.10gb", on(gpuA, "1g.10gb@4"))
	wantErr(t, err, "its room is taken by 3g.40gb@4")
	if dev := device1(t, d, on(gpuA, "3g.40gb@0")[0]); !dev.Healthy {
		t.Errorf("3g.40gb@0: %s", dev.Reason)
	}
	// Where nothing is known of the GPU only what is held stays.
	v = onDemand(map[gpu.UUID]*mig.Card{gpuA: card}, nil)
	v.MIG = nil
	d.set(v)
	if got := offered(d, gpuA); got != "" {
		t.Errorf("without a card on offer are %s", got)
	}
}

// A device that leaves is listed Healthy for its holder's sake, and no longer.
func TestPlacementsThatLeave(t *testing.T) {
	d, clock := newDesk()
	card := a100.card(t)
	d.set(onDemand(map[gpu.UUID]*mig.Card{gpuA: card}, nil))
	allocate(t, d, on(gpuA, "3g.40gb@0")...)
	d.set(onDemand(map[gpu.UUID]*mig.Card{gpuA: card}, func(dev *Device) {
		switch {
		case dev.Placement == placement(t, card, "3g.40gb@0"):
			dev.Leaving, dev.Reason = true, "the partition changes"
		case dev.Placement.Start < 4:
			dev.Healthy, dev.Reason = false, "the partition changes"
		}
	}))
	const rest = "1g.10gb@4 1g.10gb+me@4 1g.20gb@4 2g.20gb@4 3g.40gb@4 1g.10gb@5 1g.10gb+me@5 1g.10gb@6 1g.10gb+me@6 1g.20gb@6"
	if got := offered(d, gpuA); got != "3g.40gb@0 "+rest {
		t.Errorf("on offer: %s", got)
	}
	if _, err := d.Allocate("example.com/mig-3g.40gb", on(gpuA, "3g.40gb@0")); err != nil {
		t.Errorf("the same pod's app container: %v", err)
	}
	clock.pass(Grace)
	_, err := d.Allocate("example.com/mig-3g.40gb", on(gpuA, "3g.40gb@0"))
	wantErr(t, err, "leaving: the partition changes")
	told := told(d, "example.com/mig-3g.40gb")
	d.Reconcile(new(world).say(clock.now()))
	if got := offered(d, gpuA); got != rest || !told() {
		t.Errorf("after its holder's end on offer are %s, want %s", got, rest)
	}
	_, err = d.Allocate("example.com/mig-3g.40gb", on(gpuA, "3g.40gb@0"))
	wantErr(t, err, "was withdrawn: the partition changes")
}

// A fault comes over everything, and what it leaves is as it would have been.
func TestFaultsOfMIGGPUs(t *testing.T) {
	d, clock := newDesk()
	card := a100.card(t)
	d.set(onDemand(map[gpu.UUID]*mig.Card{gpuA: card, gpuB: card}, nil))
	allocate(t, d, on(gpuA, "3g.40gb@0")...)
	held, other := offered(d, gpuA), offered(d, gpuB)
	d.SetFaults(map[gpu.UUID]string{gpuA: "Xid 79"}, nil)
	if a, b := offered(d, gpuA), offered(d, gpuB); a != "" || b != other {
		t.Errorf("on the broken GPU on offer are %s, on the other %s", a, b)
	}
	if dev := device1(t, d, on(gpuA, "1g.10gb@0")[0]); dev.Reason != "Xid 79" {
		t.Errorf("a covered placement of a broken GPU: %q", dev.Reason)
	}
	// Allocations come and go meanwhile.
	if err := d.restore(recordOf(t, "example.com/mig-1g.10gb", on(gpuA, "1g.10gb@6")), time.Time{}, time.Time{}); err != nil {
		t.Fatal(err)
	}
	clock.pass(Grace)
	told := told(d, "example.com/mig-3g.40gb")
	if ended := d.Reconcile(new(world).say(clock.now())); len(ended) != 2 || told() || offered(d, gpuA) != "" {
		t.Errorf("%d allocations ended; on the broken GPU on offer are %s", len(ended), offered(d, gpuA))
	}
	d.SetFaults(nil, nil)
	if got := offered(d, gpuA); got != other {
		t.Errorf("after it has recovered on offer are %s, want %s (while it was held %s)", got, other, held)
	}
}

// The allocation that comes while an offer is built covers in that offer, too.
func TestPlacementTakenWhileAViewIsBuilt(t *testing.T) {
	d, _ := newDesk()
	cards := map[gpu.UUID]*mig.Card{gpuA: a100.card(t)}
	d.set(onDemand(cards, nil))
	n := 0
	d.Publish(func([]ledger.Allocation) *Offer {
		if n++; n <= publishTries {
			allocate(t, d, on(gpuA, fmt.Sprintf("1g.10gb@%d", n-1))...)
		}
		return onDemand(cards, nil)
	})
	if got := offered(d, gpuA); strings.Contains(got, "3g.40gb@0") || strings.Contains(got, "4g.40gb") || !strings.Contains(got, "3g.40gb@4") {
		t.Errorf("after %d allocations on offer are %s", n, got)
	}
}

// Of those that want one room at once, one gets it.
func TestOneOfManyGetsTheRoom(t *testing.T) {
	cards := map[gpu.UUID]*mig.Card{gpuA: a100.card(t)}
	want := []string{"7g.80gb@0", "4g.40gb@0", "3g.40gb@0", "2g.20gb@0", "1g.20gb@0", "1g.10gb@0", "1g.10gb+me@0"}
	winners := map[string]bool{}
	for i := range 300 {
		d, _ := newDesk()
		d.set(onDemand(cards, nil))
		var all sync.WaitGroup
		granted := make([]bool, len(want))
		for at := range want {
			all.Go(func() {
				n := (at + i) % len(want)
				_, err := d.Allocate(resourceOf(on(gpuA, want[n])[0]), on(gpuA, want[n]))
				granted[n] = err == nil
			})
		}
		all.Go(func() { d.set(onDemand(cards, nil)) })
		all.Wait()
		var got []string
		for n, g := range granted {
			if g {
				got = append(got, want[n])
				winners[want[n]] = true
			}
		}
		if len(got) != 1 || len(d.Allocations()) != 1 {
			t.Fatalf("round %d: %v got the room, and there are %d allocations", i, got, len(d.Allocations()))
		}
	}
	if len(winners) < 2 {
		t.Errorf("always %v: nobody raced", winners)
	}
}

// Prepare is the wish; what keeps it from being granted is in its error.
func TestWishAndTrouble(t *testing.T) {
	d, clock := newDesk()
	d.set(onDemand(map[gpu.UUID]*mig.Card{gpuA: a100.card(t)}, nil))
	placement := on(gpuA, "1g.10gb@3")
	key := allocate(t, d, placement...)
	if c := allocationOf(t, d, key); !c.Asked.IsZero() {
		t.Error("wished before anybody has asked")
	}
	prepare := func() error {
		ctx, cancel := context.WithCancel(context.Background())
		cancel()
		return d.Prepare(ctx, "example.com/mig-1g.10gb", placement)
	}
	wantErr(t, prepare(), "is not written yet")
	first := clock.now()
	clock.pass(time.Second)
	d.SetCause(key, status.Why(status.GPUInstanceFailed, "create 1g.10gb@3: driver error (attempt 2 of 3)"))
	wantErr(t, prepare(), "attempt 2 of 3")
	if c := allocationOf(t, d, key); !c.Asked.Equal(first) {
		t.Errorf("wished at %s, want the first time, %s", c.Asked, first)
	}
	if !ready(d, key) || prepare() != nil {
		t.Error("not ready")
	}
	if c := allocationOf(t, d, key); c.Cause != (status.Cause{}) || !c.Asked.Equal(first) {
		t.Errorf("ready, and trouble is %q, the wish of %s", c.Cause, c.Asked)
	}
	// Shut, it is nobody's wish until somebody asks again.
	d.Shut(key)
	if c := allocationOf(t, d, key); !c.Asked.IsZero() {
		t.Error("still wished after its gate was shut")
	}
	_ = prepare()
	d.SetCause(key, status.Why(status.NoRoom, "x"))
	clock.pass(time.Second)
	allocate(t, d, placement...)
	if c := allocationOf(t, d, key); !c.Asked.IsZero() || c.Cause != (status.Cause{}) {
		t.Errorf("allocated anew, it is wished since %s and has trouble %q", c.Asked, c.Cause)
	}
	d.SetCause("0123456789abcdef", status.Why(status.NoRoom, "of nobody"))
}

func TestPreferPlacements(t *testing.T) {
	card := a100.card(t)
	for _, c := range []struct {
		name   string
		before []string
		offer  func(*Offer)
		// available are all that are listed Healthy and not held, unless said.
		available, must []string
		resource        string
		n               int
		want            []string
		err             bool
	}{
		{name: "what stands idle, where it loses no more than another", resource: "example.com/mig-3g.40gb", n: 1,
			offer: func(v *Offer) {
				v.MIG[gpuB] = ledger.MIG{Card: card, Warm: placementsOf(t, card, "3g.40gb@4")}
				v.MIG[gpuA] = ledger.MIG{Card: card, Occupied: placementsOf(t, card, "7g.80gb@0")}
			}, want: on(gpuB, "3g.40gb@4")},
		{name: "what is kept and may be given out", resource: "example.com/mig-1g.10gb", n: 1,
			offer: func(v *Offer) { v.MIG[gpuB] = ledger.MIG{Card: card, Kept: placementsOf(t, card, "1g.10gb@1")} }, want: on(gpuB, "1g.10gb@1")},
		{name: "must", resource: "example.com/mig-3g.40gb", n: 1, before: on(gpuA, "3g.40gb@0"), must: on(gpuA, "3g.40gb@0"),
			want: on(gpuA, "3g.40gb@0")},
		{name: "must and one that fits beside it", resource: "example.com/mig-1g.10gb.me", n: 2, before: on(gpuA, "1g.10gb+me@0"),
			must: on(gpuA, "1g.10gb+me@0"), available: append(on(gpuA, "1g.10gb+me@5"), on(gpuB, "1g.10gb+me@6")...),
			want: append(on(gpuA, "1g.10gb+me@0"), on(gpuB, "1g.10gb+me@6")...)},
		{name: "that of a holder that is ending, last", resource: "example.com/mig-4g.40gb", n: 1, before: on(gpuA, "4g.40gb@0"),
			available: append(on(gpuA, "4g.40gb@0"), on(gpuB, "4g.40gb@0")...), want: on(gpuB, "4g.40gb@0")},
		{name: "that of a holder that is ending, rather than none", resource: "example.com/mig-4g.40gb", n: 1, before: on(gpuA, "4g.40gb@0"),
			available: on(gpuA, "4g.40gb@0"), want: on(gpuA, "4g.40gb@0")},
		{name: "none that was taken since the kubelet heard", resource: "example.com/mig-7g.80gb", n: 1, before: on(gpuA, "1g.10gb@0"),
			available: append(on(gpuA, "7g.80gb@0"), on(gpuB, "7g.80gb@0")...), want: on(gpuB, "7g.80gb@0")},
		{name: "none of a broken GPU", resource: "example.com/mig-7g.80gb", n: 1, available: append(on(gpuA, "7g.80gb@0"), on(gpuB, "7g.80gb@0")...),
			offer: func(v *Offer) { breakGPU(v, gpuA) }, want: on(gpuB, "7g.80gb@0")},
		{name: "none that leaves", resource: "example.com/mig-3g.40gb", n: 1, available: on(gpuA, "3g.40gb@4"), err: true,
			offer: func(v *Offer) {
				for i := range v.Resources {
					for j := range v.Resources[i].Devices {
						v.Resources[i].Devices[j].Leaving = true
					}
				}
			}},
		{name: "more than there is room for", resource: "example.com/mig-7g.80gb", n: 2, before: on(gpuA, "1g.10gb@0"), err: true},
		{name: "more with media engines than GPUs", resource: "example.com/mig-1g.10gb.me", n: 3, err: true},
		{name: "must that is not listed", resource: "example.com/mig-7g.80gb", n: 1, must: on("GPU-c", "7g.80gb@0"), err: true},
	} {
		t.Run(c.name, func(t *testing.T) {
			d, _ := newDesk()
			v := onDemand(map[gpu.UUID]*mig.Card{gpuA: card, gpuB: card}, nil)
			if c.offer != nil {
				c.offer(v)
			}
			d.set(v)
			if c.before != nil {
				allocate(t, d, c.before...)
			}
			available := c.available
			if available == nil {
				devs, _ := d.List(c.resource)
				for _, dev := range devs {
					if dev.Healthy && !slices.Contains(c.before, dev.ID) {
						available = append(available, dev.ID)
					}
				}
			}
			got, err := d.Prefer(c.resource, available, c.must, c.n)
			if c.err {
				if err == nil {
					t.Errorf("prefers %v", got)
				}
				return
			}
			slices.Sort(got)
			slices.Sort(c.want)
			if err != nil || !slices.Equal(got, c.want) {
				t.Fatalf("prefers %v, %v; want %v", got, err, c.want)
			}
			if _, err := d.Allocate(c.resource, got); err != nil {
				t.Errorf("what it prefers is refused: %v", err)
			}
		})
	}
}

func breakGPU(v *Offer, u gpu.UUID) {
	for i := range v.Resources {
		for j := range v.Resources[i].Devices {
			if dev := &v.Resources[i].Devices[j]; dev.GPU == u {
				dev.Healthy, dev.Reason = false, "broken"
			}
		}
	}
}

// A card may allow fewer of a profile than it has places for: then it is not
// pairs that have no room.
func TestPlacementsThatTogetherAreTooMany(t *testing.T) {
	few := family{"1g.10gb 1 3 0,1,2,3,4,5,6"}
	card, err := mig.NewCard(few.mig())
	if err != nil {
		t.Fatal(err)
	}
	d, _ := newDesk()
	d.set(onDemand(map[gpu.UUID]*mig.Card{gpuA: card}, nil))
	const resource = "example.com/mig-1g.10gb"
	allocate(t, d, on(gpuA, "1g.10gb@0", "1g.10gb@6")...)
	_, err = d.Allocate(resource, on(gpuA, "1g.10gb@2", "1g.10gb@3"))
	wantErr(t, err, "does not fit beside the others of this request")
	if _, err := d.Prefer(resource, on(gpuA, "1g.10gb@2", "1g.10gb@3"), nil, 2); err == nil {
		t.Error("two are preferred where one is left")
	}
	allocate(t, d, on(gpuA, "1g.10gb@2")...)
	if got := offered(d, gpuA); got != "1g.10gb@0 1g.10gb@2 1g.10gb@6" {
		t.Errorf("on offer: %s", got)
	}
	_, err = d.Allocate(resource, on(gpuA, "1g.10gb@3"))
	wantErr(t, err, "its room is taken by 1g.10gb@0, 1g.10gb@2, 1g.10gb@6")
}

// walker drives a desk at random and knows, from the description of the cards
// alone, what has to come of it.
type walker struct {
	t     *testing.T
	rng   *rand.Rand
	d     *desk
	clock *clock
	gpus  []gpu.UUID
	kinds map[gpu.UUID]family
	cards map[gpu.UUID]*mig.Card
	// places are all placements by their device IDs.
	places map[string]mig.Place

	// The world as it should be.
	occupied, kept map[gpu.UUID][]mig.Placement
	withdrawn      map[string]bool // device IDs
	leaving        map[string]bool
	faults         map[gpu.UUID]string
	allocations    map[string]*walked // by key
	said           map[string][]Device
	channels       map[string]<-chan struct{}
	grants, ends   int
	refused        map[string]int
}

type walked struct {
	ids     []string
	at      time.Time
	adopted bool
}

func (w *walker) placementOf(id string) (gpu.UUID, mig.Placement) {
	p, ok := w.places[id]
	if !ok {
		w.t.Fatalf("no placement %s", id)
	}
	return p.GPU, p.Placement
}

// held are the placements of a GPU that allocations have.
func (w *walker) held(u gpu.UUID) map[mig.Placement]bool {
	out := map[mig.Placement]bool{}
	for _, c := range w.allocations {
		for _, id := range c.ids {
			if g, s := w.placementOf(id); g == u {
				out[s] = true
			}
		}
	}
	return out
}

// taken is all that may not go.
func (w *walker) taken(u gpu.UUID) []mig.Placement {
	all := w.held(u)
	for _, s := range slices.Concat(w.occupied[u], w.kept[u]) {
		all[s] = true
	}
	return slices.SortedFunc(maps.Keys(all), mig.ComparePlacements)
}

func (w *walker) healthy(id string) bool {
	u, s := w.placementOf(id)
	held := w.held(u)[s]
	switch {
	case w.faults[u] != "", w.withdrawn[id]:
		return false
	case held:
		return true
	case w.leaving[id]:
		return false
	}
	taken := w.taken(u)
	if slices.Contains(w.kept[u], s) {
		taken = slices.DeleteFunc(taken, func(o mig.Placement) bool { return o == s })
	} else if slices.Contains(taken, s) {
		return false
	}
	return w.kinds[u].legal(append(slices.Clip(taken), s))
}

func (w *walker) fresh(id string) bool {
	for _, c := range w.allocations {
		if slices.Contains(c.ids, id) && !c.adopted && w.clock.now().Sub(c.at) < Grace {
			return true
		}
	}
	return false
}

// grantable is what Allocate is to say.
func (w *walker) grantable(ids []string) (reason string) {
	together := map[gpu.UUID]map[mig.Placement]bool{}
	for _, id := range ids {
		u, s := w.placementOf(id)
		if !w.healthy(id) {
			return "unhealthy"
		}
		if w.leaving[id] && !w.fresh(id) {
			return "leaving"
		}
		if together[u] == nil {
			together[u] = map[mig.Placement]bool{}
			for _, t := range w.taken(u) {
				together[u][t] = true
			}
		}
		together[u][s] = true
	}
	for u, set := range together {
		if !w.kinds[u].legal(slices.Collect(maps.Keys(set))) {
			return "not together"
		}
	}
	return ""
}

// any is a random listed placement, of a resource if one is named.
func (w *walker) any(resource string) string {
	for {
		u := w.gpus[w.rng.IntN(len(w.gpus))]
		placements := w.cards[u].Placements()
		id := mig.ID(u, placements[w.rng.IntN(len(placements))])
		if resource == "" || resourceOf(id) == resource {
			return id
		}
	}
}

func (w *walker) anyAllocation() (key string, c *walked) {
	keys := slices.Sorted(maps.Keys(w.allocations))
	if len(keys) == 0 {
		return "", nil
	}
	key = keys[w.rng.IntN(len(keys))]
	return key, w.allocations[key]
}

func (w *walker) allocate(ids []string) {
	want := w.grantable(ids)
	key, err := keyOf(w.d.Allocate(resourceOf(ids[0]), ids))
	if (err == nil) != (want == "") {
		w.t.Fatalf("allocate %v: %v; it should be %q", ids, err, cmp.Or(want, "granted"))
	}
	if err != nil {
		w.refused[want]++
		return
	}
	w.grants++
	w.allocations[key] = &walked{ids: slices.Sorted(slices.Values(ids)), at: w.clock.now()}
}

// room is a random set of placements that have room on a GPU beside what is taken.
func (w *walker) room(u gpu.UUID, most int) (out []mig.Placement) {
	placements := w.cards[u].Placements()
	for range w.rng.IntN(most + 1) {
		s := placements[w.rng.IntN(len(placements))]
		if all := slices.Concat(w.taken(u), out); w.kinds[u].legal(append(all, s)) {
			out = append(out, s)
		}
	}
	return out
}

func (w *walker) publish() {
	clear(w.withdrawn)
	clear(w.leaving)
	for _, u := range w.gpus {
		w.occupied[u], w.kept[u] = nil, nil
		if w.rng.IntN(2) == 0 {
			w.occupied[u] = w.room(u, 2)
			w.kept[u] = w.room(u, 2)
		}
		for s := range w.held(u) { // an allocation's instance may be one that is kept
			if w.rng.IntN(8) == 0 {
				w.kept[u] = append(w.kept[u], s)
			}
		}
	}
	v := onDemand(w.cards, nil)
	for _, u := range w.gpus {
		v.MIG[u] = ledger.MIG{Card: w.cards[u], Occupied: w.occupied[u], Kept: w.kept[u]}
	}
	for i := range v.Resources {
		for j := range v.Resources[i].Devices {
			dev := &v.Resources[i].Devices[j]
			switch held := w.held(dev.GPU)[dev.Placement]; {
			case w.rng.IntN(10) > 0:
			case held:
				dev.Leaving, dev.Reason = true, "leaves"
				w.leaving[dev.ID] = true
			default:
				dev.Healthy, dev.Reason = false, "withdrawn"
				w.withdrawn[dev.ID] = true
			}
		}
	}
	w.d.set(v)
}

// reconcile ends some allocations that are old enough, and brings one up that the
// desk has not seen allocated.
func (w *walker) reconcile() {
	w.clock.pass(time.Duration(w.rng.IntN(40)) * time.Second)
	var says world
	var found []mig.Placement
	u := w.gpus[w.rng.IntN(len(w.gpus))]
	if w.rng.IntN(3) == 0 {
		found = w.room(u, 1)
	}
	for _, key := range slices.Sorted(maps.Keys(w.allocations)) {
		c := w.allocations[key]
		if w.rng.IntN(3) > 0 {
			says.entries = append(says.entries, node.Entry{PodUID: "u", Container: "c", Resource: resourceOf(c.ids[0]), IDs: c.ids})
		} else if w.clock.now().Sub(c.at) >= Grace {
			delete(w.allocations, key)
			w.ends++
		}
	}
	for _, s := range found {
		ids := []string{mig.ID(u, s)}
		says.entries = append(says.entries, node.Entry{PodUID: "v", Container: "c", Resource: resourceOf(ids[0]), IDs: ids})
		w.allocations[cdi.Key(resourceOf(ids[0]), ids)] = &walked{ids: ids, at: w.clock.now(), adopted: true}
	}
	w.d.Reconcile(says.say(w.clock.now()))
}

func (w *walker) step() string {
	switch n := w.rng.IntN(20); {
	case n < 8:
		ids := []string{w.any("")}
		w.allocate(ids)
		return fmt.Sprint("allocate ", ids)
	case n < 11:
		a := w.any("")
		b := w.any(resourceOf(a))
		for range 8 {
			if b == a {
				b = w.any(resourceOf(a))
			}
		}
		if a == b {
			return "nothing"
		}
		w.allocate([]string{a, b})
		return fmt.Sprint("allocate ", a, b)
	case n < 13:
		if _, c := w.anyAllocation(); c != nil {
			ids := slices.Clone(c.ids)
			w.rng.Shuffle(len(ids), func(i, j int) { ids[i], ids[j] = ids[j], ids[i] })
			w.allocate(ids)
			return fmt.Sprint("allocate again ", ids)
		}
		return "nothing"
	case n < 17:
		w.reconcile()
		return "reconcile"
	case n < 19:
		w.publish()
		return "publish"
	default:
		clear(w.faults)
		if w.rng.IntN(2) == 0 {
			w.faults[w.gpus[w.rng.IntN(len(w.gpus))]] = "Xid 79"
		}
		w.d.SetFaults(w.faults, nil)
		return "faults"
	}
}

// check holds the desk against the world.
func (w *walker) check(step string) {
	live := map[string]bool{}
	for _, c := range w.d.Allocations() {
		live[c.ID] = true
		for _, p := range c.Grants {
			if piece.At(p.Piece).Size == 0 {
				w.t.Fatalf("%s: allocation of %v has placements %v", step, c.IDs, c.Grants)
			}
		}
	}
	for _, key := range slices.Sorted(maps.Keys(w.allocations)) {
		if !live[key] {
			w.t.Fatalf("%s: the allocation of %v is gone", step, w.allocations[key].ids)
		}
	}
	if len(live) != len(w.allocations) {
		w.t.Fatalf("%s: %d allocations, want %d", step, len(live), len(w.allocations))
	}
	for _, u := range w.gpus {
		if taken := w.taken(u); !w.kinds[u].legal(taken) {
			w.t.Fatalf("%s: %v are taken of %s at once", step, taken, u)
		}
	}
	v := w.d.Offer()
	for i := range v.Resources {
		r := &v.Resources[i]
		for _, dev := range r.Devices {
			if want := w.healthy(dev.ID); dev.Healthy != want || !want && dev.Reason == "" {
				w.t.Fatalf("%s: %+v, want Healthy %v beside %v", step, dev, want, w.taken(dev.GPU))
			}
		}
		told := true
		if ch := w.channels[r.Name]; ch != nil {
			select {
			case <-ch:
			default:
				told = false
			}
			if changed := !slices.EqualFunc(w.said[r.Name], r.Devices, sameForKubelet); told != changed {
				w.t.Fatalf("%s: %s: told %v, changed %v", step, r.Name, told, changed)
			}
		}
		if told {
			w.said[r.Name], w.channels[r.Name] = w.d.List(r.Name)
		}
	}
}

// TestPlacementsWalk takes many random steps.
func TestPlacementsWalk(t *testing.T) {
	const steps = 1000
	seeds := uint64(4)
	if testing.Short() {
		seeds = 2 // make test-all has all
	}
	for seed := range seeds {
		t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) {
			d, clock := newDesk()
			w := &walker{t: t, rng: rand.New(rand.NewPCG(seed, 5)), d: d, clock: clock,
				gpus:     []gpu.UUID{gpuA, gpuB, "GPU-cccccccc-0000-0000-0000-000000000000"},
				occupied: map[gpu.UUID][]mig.Placement{}, kept: map[gpu.UUID][]mig.Placement{},
				withdrawn: map[string]bool{}, leaving: map[string]bool{}, faults: map[gpu.UUID]string{}, allocations: map[string]*walked{},
				said: map[string][]Device{}, channels: map[string]<-chan struct{}{}, refused: map[string]int{}}
			w.kinds = map[gpu.UUID]family{w.gpus[0]: a100, w.gpus[1]: a30, w.gpus[2]: a100}
			w.cards, w.places = map[gpu.UUID]*mig.Card{}, map[string]mig.Place{}
			for u, f := range w.kinds {
				w.cards[u] = f.card(t)
				for _, s := range w.cards[u].Placements() {
					w.places[mig.ID(u, s)] = mig.Place{GPU: u, Placement: s}
				}
			}
			w.publish()
			for i := range steps {
				clock.pass(time.Second)
				w.check(fmt.Sprintf("step %d, %s", i, w.step()))
			}
			if w.grants < steps/20 || w.ends < steps/50 || w.refused["unhealthy"] == 0 || w.refused["leaving"] == 0 || w.refused["not together"] == 0 {
				t.Errorf("%d grants, %d ends, refusals %v: too few of a kind", w.grants, w.ends, w.refused)
			}
		})
	}
}

// BenchmarkAllocate is of 24 of 640 memory units, and of one of the 25 placements of
// each of 8 GPUs, half of which is taken.
func BenchmarkAllocate(b *testing.B) {
	run := func(name string, v *Offer, resource string, before [][]string, take []string) {
		b.Run(name, func(b *testing.B) {
			d, _ := newDesk()
			d.set(v)
			for _, ids := range before {
				if _, err := d.Allocate(resourceOf(ids[0]), ids); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportAllocs()
			for b.Loop() {
				key, err := keyOf(d.Allocate(resource, take))
				if err != nil {
					b.Fatal(err)
				}
				d.mu.Lock()
				d.endLocked(key)
				d.lists.showMoved()
				d.mu.Unlock()
			}
		})
	}
	mem := &Offer{Resources: []Resource{{Name: memName, Kind: piece.KindUnits}}}
	cards := map[gpu.UUID]*mig.Card{}
	var before [][]string
	for i := range 8 {
		u := gpu.UUID(fmt.Sprintf("GPU-5a2f0c11-9a3e-4f57-8d57-%012x", i))
		for n := range 80 {
			mem.Resources[0].Devices = append(mem.Resources[0].Devices, Device{ID: ids(u, n)[0], GPU: u, Healthy: true})
		}
		cards[u] = a100.card(b)
		before = append(before, on(u, "3g.40gb@4"))
	}
	first := gpu.UUID("GPU-5a2f0c11-9a3e-4f57-8d57-000000000000")
	var n []int
	for i := range 24 {
		n = append(n, i)
	}
	run("24 of 640 units", mem, memName, nil, ids(first, n...))
	run("a placement of 8 GPUs, and its end", onDemand(cards, nil), "example.com/mig-1g.10gb", before, on(first, "1g.10gb@1"))
}
