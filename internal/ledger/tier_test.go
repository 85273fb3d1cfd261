// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"context"
	"encoding/json"
	"errors"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"example.com/gpu-agent/internal/workload"
	"example.com/gpu-agent/pkg/gpu"
)

func spotOf(id string, grants []Grant) Request {
	return Request{ID: id, Owner: DevicePlugin, Tier: Spot, Grants: grants, Overlap: true}
}

func guaranteedOf(id string, grants []Grant) Request {
	return Request{ID: id, Owner: DevicePlugin, Grants: grants, Overlap: true}
}

// open has a container let in.
func open(t *testing.T, l *Ledger, id string) {
	t.Helper()
	a, _ := l.Get(id)
	l.Looked(id, a.Epoch, "", "")
	if !l.SetOpen(id, a.Epoch) || l.Prepare(t.Context(), id) != nil {
		t.Fatalf("%s does not open: %+v", id, a)
	}
}

// A spot allocation yields to a guaranteed one: from then on no container starts with it, whatever is reported. It
// opens again when the guaranteed one has ended.
func TestSpotYields(t *testing.T) {
	l := newLedger()
	s, err := l.Take(spotOf("spot", unitsOf("GPU-a", 4, 5, 6, 7)))
	if err != nil || s.Yield.Asked() {
		t.Fatal(s, err)
	}
	open(t, l, "spot")
	l.SetHolder("spot", Holder{Pod: workload.Pod{Namespace: "batch", Name: "job"}})
	if _, err := l.Take(guaranteedOf("beside", unitsOf("GPU-a", 0, 1))); err != nil {
		t.Fatal(err)
	}
	if s, _ := l.Get("spot"); s.Yield.Asked() {
		t.Fatalf("it yields to what is beside it: %+v", s.Yield)
	}
	g, err := l.Take(guaranteedOf("g", unitsOf("GPU-a", 3, 4)))
	if err != nil {
		t.Fatal(err)
	}
	l.SetHolder("g", Holder{Pod: workload.Pod{Namespace: "prod", Name: "api"}})
	s, _ = l.Get("spot")
	if !slices.Equal(s.Yield.To, []string{"g"}) || !s.Yield.Since.Equal(g.Given) || s.Phase != Waiting || !s.Yielding() || s.After != "prod/api" {
		t.Fatalf("%+v", s)
	}
	l.Looked("spot", s.Epoch, "", "")
	if l.SetOpen("spot", s.Epoch) {
		t.Error("it opens while it yields")
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if err := l.Prepare(ended, "spot"); !errors.Is(err, ErrNotOpen) || !strings.Contains(err.Error(), "spot tier, and its room is wanted by allocation g") {
		t.Errorf("Prepare: %v", err) // a pod of another namespace is not named
	}
	if l.SetOut("spot", s.Epoch+1); !getOf(l, "spot").Yielding() {
		t.Error("out by an older look")
	}
	if l.SetOut("spot", s.Epoch); !getOf(l, "spot").Out() {
		t.Error("not out")
	}
	if _, err := l.Take(guaranteedOf("h", unitsOf("GPU-a", 7))); err != nil {
		t.Fatal(err)
	}
	if s, _ = l.Get("spot"); !slices.Equal(s.Yield.To, []string{"g", "h"}) || !s.Out() || !s.Yield.Since.Equal(g.Given) {
		t.Errorf("to a second one: %+v", s.Yield)
	}
	l.Release(DevicePlugin, "g")
	if s, _ = l.Get("spot"); !slices.Equal(s.Yield.To, []string{"h"}) || s.Phase != Waiting {
		t.Errorf("after the first has ended: %+v", s)
	}
	l.Release(DevicePlugin, "h")
	if s, _ = l.Get("spot"); s.Yield.Asked() || s.Phase != Reserved || s.After != "" {
		t.Errorf("after all have ended: %+v", s)
	}
	open(t, l, "spot")
}

func getOf(l *Ledger, id string) *Allocation {
	a, _ := l.Get(id)
	return &a
}

// A spot allocation is never made over a guaranteed one, whatever overlap the front-end permits, and never
// stands in the way of one.
func TestSpotIsRefusedOverGuaranteed(t *testing.T) {
	l := newLedger()
	if _, err := l.Take(guaranteedOf("g", unitsOf("GPU-a", 0, 1))); err != nil {
		t.Fatal(err)
	}
	if _, err := l.Take(spotOf("s", unitsOf("GPU-a", 1, 2))); !errors.Is(err, ErrHeld) {
		t.Errorf("over a guaranteed one: %v", err)
	}
	if _, err := l.Take(spotOf("s", unitsOf("GPU-a", 2, 3))); err != nil {
		t.Errorf("beside it: %v", err)
	}
	r := guaranteedOf("h", unitsOf("GPU-a", 3))
	r.Overlap = false
	if _, err := l.Take(r); err != nil {
		t.Errorf("a guaranteed one without overlap: %v", err)
	}
	if _, err := l.Renew(spotOf("s", unitsOf("GPU-a", 2, 3))); !errors.Is(err, ErrHeld) {
		t.Errorf("renewed over it: %v", err)
	}
}

// A change of a GPU's layout makes spot allocations yield, and no other. When it is called off, they go on.
func TestSpotYieldsToALayout(t *testing.T) {
	l := newLedger()
	for _, r := range []Request{spotOf("s", unitsOf("GPU-a", 0)), guaranteedOf("g", unitsOf("GPU-a", 1))} {
		if _, err := l.Take(r); err != nil {
			t.Fatal(err)
		}
	}
	open(t, l, "s")
	l.SetLayoutYields(map[string]bool{"s": true, "g": true})
	if s, g := getOf(l, "s"), getOf(l, "g"); !s.Yield.Layout || s.Phase != Waiting || s.Yield.Since.IsZero() || g.Yield.Asked() {
		t.Fatalf("%+v\n%+v", s, g)
	}
	since := getOf(l, "s").Yield.Since
	l.SetLayoutYields(map[string]bool{"s": true})
	if !getOf(l, "s").Yield.Since.Equal(since) {
		t.Error("the grace began again")
	}
	l.SetLayoutYields(nil)
	if s := getOf(l, "s"); s.Yield.Asked() || s.Phase != Reserved {
		t.Errorf("called off: %+v", s)
	}
}

// A new process reads tiers from records, and has spot allocations yield as before. A tier that it does not know
// is refused, and never taken for another.
func TestTierIsInRecords(t *testing.T) {
	l := newLedger()
	for _, r := range []Request{spotOf("s", unitsOf("GPU-a", 0, 1)), guaranteedOf("g", unitsOf("GPU-a", 1))} {
		if _, err := l.Take(r); err != nil {
			t.Fatal(err)
		}
	}
	for _, order := range [][]string{{"s", "g"}, {"g", "s"}} {
		next := newLedger()
		for _, id := range order {
			text, _ := json.Marshal(getOf(l, id).Record())
			r, err := ReadRecord(string(text))
			if err != nil {
				t.Fatal(err)
			}
			if _, err := next.Found(id, r, getOf(l, id).Given); err != nil {
				t.Fatal(err)
			}
		}
		if s := getOf(next, "s"); s.Tier != Spot || !slices.Equal(s.Yield.To, []string{"g"}) || s.Phase != Waiting {
			t.Errorf("%v: %+v", order, s)
		}
	}
	text, _ := json.Marshal(Record{Owner: DevicePlugin, Tier: "gold", Grants: unitsOf("GPU-a", 0)})
	if _, err := ReadRecord(string(text)); !errors.Is(err, gpu.ErrInvalid) {
		t.Errorf("a tier of the future: %v", err)
	}
}

// In random histories, whatever is reported and in which order: no two guaranteed allocations of requests without
// overlap meet, a spot allocation is open only while no guaranteed one meets it, a guaranteed request is never
// refused because of spot, and what yields is asked to since the first of those that it yields to.
func TestTiersWalk(t *testing.T) {
	rng := rand.New(rand.NewPCG(44, 1))
	l := newLedger()
	met := map[string]int{}
	ids := []string{"a", "b", "c", "d", "e", "f", "g", "h"}
	for range 100_000 {
		id := ids[rng.IntN(len(ids))]
		a, known := l.Get(id)
		switch rng.IntN(9) {
		case 0, 1:
			first, n := rng.IntN(12), 1+rng.IntN(4)
			var numbers []int
			for i := range n {
				numbers = append(numbers, first+i)
			}
			r := Request{ID: id, Owner: DevicePlugin, Grants: unitsOf("GPU-a", numbers...)}
			if rng.IntN(2) == 0 {
				r.Tier, r.Overlap = Spot, true
			}
			inTheWay := known
			for _, o := range l.Allocations() {
				if l.Overlap(o.Grants, r.Grants) && o.Tier == Guaranteed {
					inTheWay = true
				}
			}
			_, err := l.Take(r)
			if (err != nil) != inTheWay {
				t.Fatalf("take %+v: %v, and in the way: %v", r, err, inTheWay)
			}
			met["take "+r.Tier.Word()+map[bool]string{true: " refused"}[err != nil]]++
		case 2:
			l.Looked(id, a.Epoch, "", "")
		case 3:
			l.SetOpen(id, a.Epoch)
		case 4:
			l.SetOut(id, a.Epoch)
		case 5:
			l.Shut(id)
		case 6:
			l.SetLayoutYields(map[string]bool{ids[rng.IntN(len(ids))]: true})
		case 7, 8:
			l.Release(DevicePlugin, id)
		}
		all := l.Allocations()
		for i := range all {
			x := &all[i]
			var to []string
			for j := range all {
				y := &all[j]
				if i == j || !l.Overlap(x.Grants, y.Grants) {
					continue
				}
				if x.Tier == Guaranteed && y.Tier == Guaranteed {
					t.Fatalf("two guaranteed allocations meet: %+v %+v", x, y)
				}
				if x.Tier == Spot && y.Tier == Guaranteed {
					to = append(to, y.ID)
					if x.Yield.Since.After(y.Given) && !x.Yield.Layout && len(x.Yield.To) == 1 {
						t.Fatalf("asked after the request: %+v %+v", x, y)
					}
				}
			}
			switch {
			case !slices.Equal(to, x.Yield.To):
				t.Fatalf("%+v meets %v", x, to)
			case x.Yield.Asked() && x.Phase != Waiting:
				t.Fatalf("yields, and is %s", x.Phase)
			case x.Tier == Guaranteed && x.Yield.Asked():
				t.Fatalf("a guaranteed one yields: %+v", x)
			case x.Out():
				met["out"]++
			case x.Yielding():
				met["yielding"]++
			case x.Tier == Spot && x.IsOpen():
				met["open spot"]++
			}
		}
	}
	for _, what := range []string{"take guaranteed", "take guaranteed refused", "take spot", "take spot refused", "out", "yielding", "open spot"} {
		if met[what] < 1000 {
			t.Errorf("%q was met %d times", what, met[what])
		}
	}
	if l.Spots() > len(ids) {
		t.Errorf("%d spot allocations are counted", l.Spots())
	}
}
