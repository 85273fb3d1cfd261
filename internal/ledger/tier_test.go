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
	"time"

	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/internal/workload"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
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

// A parked allocation has given its room back, and has it again only when no guaranteed one wants it. Then it is in
// the way of the next one, until it is parked again.
func TestParked(t *testing.T) {
	l, now := newLedger(), time.Unix(1e9, 0)
	s, err := l.Take(spotOf("s", unitsOf("GPU-a", 0, 1)))
	if err != nil {
		t.Fatal(err)
	}
	open(t, l, "s")
	if _, err := l.Take(guaranteedOf("g", unitsOf("GPU-a", 1))); err != nil {
		t.Fatal(err)
	}
	if l.SetParked("s", s.Epoch+1, 5, now) || l.SetParked("g", getOf(l, "g").Epoch, 5, now) || l.SetParked("none", 1, 5, now) {
		t.Error("an older, a guaranteed or an unknown allocation is parked")
	}
	if !l.SetParked("s", s.Epoch, 5, now) || !getOf(l, "s").Out() || getOf(l, "s").Yielding() || getOf(l, "s").Phase != Parked {
		t.Fatalf("%+v", getOf(l, "s"))
	}
	l.Looked("s", s.Epoch, "", "")
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if err := l.Prepare(ended, "s"); l.SetOpen("s", s.Epoch) || !errors.Is(err, ErrNotOpen) {
		t.Errorf("a container starts beside a parked one: %v", err)
	}
	if l.Unpark("s", s.Epoch) {
		t.Error("it has its room while that is wanted")
	}
	if _, err := l.Take(spotOf("other", unitsOf("GPU-a", 0))); err != nil || getOf(l, "s").Phase != Parked {
		t.Errorf("%v, %+v", err, getOf(l, "s")) // the front-end permits overlaps
	}
	l.Release(DevicePlugin, "g")
	if a := getOf(l, "s"); a.Phase != Parked || a.Yield.Asked() || a.Out() {
		t.Errorf("the room is free, and nothing is restored yet: %+v", a)
	}
	if _, err := l.Take(guaranteedOf("g", unitsOf("GPU-a", 1))); err != nil || !getOf(l, "s").Out() {
		t.Errorf("%v: the room is wanted again: %+v", err, getOf(l, "s"))
	}
	l.Release(DevicePlugin, "g")
	if !l.Unpark("s", s.Epoch) || l.Unpark("s", s.Epoch) || getOf(l, "s").Phase != Reserved {
		t.Errorf("%+v", getOf(l, "s"))
	}
	if _, err := l.Take(guaranteedOf("g", unitsOf("GPU-a", 1))); err != nil || !getOf(l, "s").Yielding() {
		t.Errorf("%v: while it is restored, the next one waits: %+v", err, getOf(l, "s"))
	}
	// Where the layout changes, it does not find its room again: it has to end.
	if l.SetParked("s", s.Epoch, 5, now); !getOf(l, "s").Out() {
		t.Errorf("%+v", getOf(l, "s"))
	}
	if l.SetLayoutYields(map[string]bool{"s": true}); !getOf(l, "s").Yielding() {
		t.Errorf("%+v", getOf(l, "s"))
	}
	if l.SetOut("s", s.Epoch); !getOf(l, "s").Out() {
		t.Errorf("%+v", getOf(l, "s"))
	}
	if l.EndParked("s", s.Epoch); getOf(l, "s").Phase != Waiting {
		t.Errorf("its container has ended: %+v", getOf(l, "s"))
	}
}

// The ledger knows how often, and for how long, an allocation was parked. A restore that finds no room is part of the same
// park.
func TestHowLongParked(t *testing.T) {
	at := time.Unix(1e9, 0)
	l := New(func() {}, func() time.Time { return at })
	pass := func() { at = at.Add(time.Minute) }
	s, err := l.Take(spotOf("s", unitsOf("GPU-a", 0)))
	if err != nil {
		t.Fatal(err)
	}
	is := func(what string, times int, total time.Duration, bytes uint64) {
		t.Helper()
		if p := getOf(l, "s").Parks; p.Times != times || p.Total(at) != total || p.Bytes != bytes {
			t.Errorf("%s: %+v, %v in all; want %d times, %v", what, p, p.Total(at), times, total)
		}
	}
	is("never", 0, 0, 0)
	first := at
	pass()
	l.SetParked("s", s.Epoch, 5, first) // an earlier process has parked it
	is("parked", 1, time.Minute, 5)
	l.Unpark("s", s.Epoch)
	is("restored", 1, time.Minute, 5)
	pass()
	l.SetParked("s", s.Epoch, 5, first)
	is("without room", 1, 2*time.Minute, 5)
	l.Unpark("s", s.Epoch)
	pass()
	l.SetParked("s", s.Epoch, 7, at)
	is("again", 2, 2*time.Minute, 7)
	pass()
	l.EndParked("s", s.Epoch)
	pass()
	is("ended", 2, 3*time.Minute, 7)
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

// The room of a guaranteed allocation that lends is free for spot and for no other. When lending ends, the spot
// allocations in it yield from that moment, and no other is made there. Only a guaranteed allocation that one pod
// has lends, and only for the epoch that was looked at.
func TestLending(t *testing.T) {
	now := time.Date(2026, 11, 1, 12, 0, 0, 0, time.UTC)
	l := New(func() {}, func() time.Time { return now })
	for _, r := range []Request{guaranteedOf("g", unitsOf("GPU-a", 0, 1, 2, 3)), guaranteedOf("beside", unitsOf("GPU-a", 4, 5))} {
		if _, err := l.Take(r); err != nil {
			t.Fatal(err)
		}
	}
	g := getOf(l, "g")
	if l.SetLending("g", g.Epoch+1, true) || l.SetLending("h", 0, true) || l.SetLending("g", g.Epoch, false) {
		t.Error("something changes by the news of another epoch, of no allocation, or without news")
	}
	before, _, _ := l.State()
	if !l.SetLending("g", g.Epoch, true) || !getOf(l, "g").Lending || l.Borrowed("g") {
		t.Fatalf("it does not lend: %+v", getOf(l, "g"))
	}
	if after, _, _ := l.State(); after == before {
		t.Error("the version is as before, so no round would look at it")
	}
	now = now.Add(time.Hour)
	r := spotOf("s", unitsOf("GPU-a", 2, 3))
	r.Overlap = false
	if _, err := l.Take(r); err != nil {
		t.Fatalf("over what is lent: %v", err)
	}
	if _, err := l.Take(spotOf("t", unitsOf("GPU-a", 3, 4))); !errors.Is(err, ErrHeld) {
		t.Errorf("also over what is not lent: %v", err)
	}
	h := guaranteedOf("h", unitsOf("GPU-a", 0))
	h.Overlap = false
	if _, err := l.Take(h); !errors.Is(err, ErrHeld) {
		t.Errorf("a guaranteed one over what is lent: %v", err)
	}
	open(t, l, "s")
	if s := getOf(l, "s"); s.Yield.Asked() || l.SetLending("s", s.Epoch, true) || !l.Borrowed("g") || l.Borrowed("beside") || l.Borrowed("nobody") {
		t.Errorf("%+v; g lends %v, beside %v", s, l.Borrowed("g"), l.Borrowed("beside"))
	}

	now = now.Add(time.Hour)
	if !l.SetLending("g", g.Epoch, false) {
		t.Fatal("lending does not end")
	}
	s := getOf(l, "s")
	if !slices.Equal(s.Yield.To, []string{"g"}) || !s.Yield.Since.Equal(now) || s.Phase != Waiting || !l.Borrowed("g") {
		t.Errorf("at the end, %v: %+v", now, s)
	}
	if _, err := l.Take(spotOf("t", unitsOf("GPU-a", 0))); !errors.Is(err, ErrHeld) {
		t.Errorf("after the end: %v", err)
	}
	l.SetOut("s", s.Epoch)
	if l.Borrowed("g") {
		t.Error("it is borrowed though the spot allocation is out")
	}
	if !l.SetLending("g", g.Epoch, true) || getOf(l, "s").Phase != Reserved {
		t.Errorf("lent again: %+v", getOf(l, "s"))
	}

	for what, end := range map[string]func(id string, epoch uint64){
		"renewed": func(id string, _ uint64) {
			if _, err := l.Renew(guaranteedOf(id, unitsOf("GPU-a", 0, 1, 2, 3))); err != nil {
				t.Error(err)
			}
		},
		"superseded":   func(id string, epoch uint64) { l.Supersede(id, epoch, "x", "x") },
		"of two pods":  func(id string, _ uint64) { l.SetTwice(id, true) },
		"of two again": func(id string, _ uint64) { l.SetTwice(id, true) },
	} {
		l.Release(DevicePlugin, "g")
		if _, err := l.Take(guaranteedOf("g", unitsOf("GPU-a", 0, 1, 2, 3))); err != nil {
			t.Fatal(err)
		}
		if g = getOf(l, "g"); !l.SetLending("g", g.Epoch, true) || getOf(l, "s").Yield.Asked() {
			t.Fatalf("before it is %s: %+v", what, getOf(l, "s"))
		}
		now = now.Add(time.Hour)
		end("g", g.Epoch)
		if g, s := getOf(l, "g"), getOf(l, "s"); g.Lending || !s.Yielding() || !s.Yield.Since.Equal(now) {
			t.Errorf("%s: %+v\n%+v", what, g, s)
		}
		if g := getOf(l, "g"); what != "renewed" && l.SetLending("g", g.Epoch, true) {
			t.Errorf("it lends though it is %s", what)
		}
	}
}

// A new process has the room of a holder that lent for as long as it finds out, whichever record it reads first.
func TestLendingIsInNoRecord(t *testing.T) {
	for _, order := range [][]string{{"s", "g"}, {"g", "s"}} {
		l := newLedger()
		for _, id := range order {
			r := Record{Owner: DevicePlugin, Grants: unitsOf("GPU-a", 0, 1)}
			if id == "s" {
				r.Tier = Spot
			}
			if _, err := l.Found(id, r, time.Time{}); err != nil {
				t.Fatal(err)
			}
		}
		if g, s := getOf(l, "g"), getOf(l, "s"); g.Lending || !s.Yielding() {
			t.Errorf("%v: %+v\n%+v", order, g, s)
		}
		if !l.SetLending("g", 0, true) || getOf(l, "s").Yield.Asked() || getOf(l, "s").Phase != Reserved {
			t.Errorf("%v: found to lend: %+v", order, getOf(l, "s"))
		}
	}
}

// In random histories, whatever is reported and in which order: no two guaranteed allocations of requests without
// overlap meet, a spot allocation is open only while no guaranteed one meets it, a guaranteed request is never
// refused because of spot, and what yields is asked to since the first of those that it yields to. What lends meets
// spot allocations that do not yield to it, and no guaranteed one.
func TestTiersWalk(t *testing.T) {
	rng := rand.New(rand.NewPCG(44, 1))
	l := newLedger()
	met := map[string]int{}
	ids := []string{"a", "b", "c", "d", "e", "f", "g", "h"}
	for range 100_000 {
		id := ids[rng.IntN(len(ids))]
		a, known := l.Get(id)
		switch rng.IntN(13) {
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
				if l.Overlap(o.Grants, r.Grants) && o.Tier == Guaranteed && (r.Tier == Guaranteed || !o.Lending) {
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
		case 9:
			l.Looked(id, a.Epoch, "", "")
			l.SetOpen(id, a.Epoch)
		case 10, 11, 12:
			on := rng.IntN(8) > 0
			if changed := l.SetLending(id, a.Epoch, on); changed != (known && a.Tier == Guaranteed && a.Lending != on) {
				t.Fatalf("lending of %+v is set to %v: %v", a, on, changed)
			}
		}
		all := l.Allocations()
		for i := range all {
			x := &all[i]
			var to []string
			borrowed := false
			for j := range all {
				y := &all[j]
				if i == j || !l.Overlap(x.Grants, y.Grants) {
					continue
				}
				if x.Tier == Guaranteed && y.Tier == Guaranteed {
					t.Fatalf("two guaranteed allocations meet: %+v %+v", x, y)
				}
				borrowed = borrowed || y.Tier == Spot && !y.Out()
				switch {
				case x.Tier == Spot && y.Lending:
					met["in lent room"]++
					if x.IsOpen() {
						met["open in lent room"]++
					}
				case x.Tier == Spot && y.Tier == Guaranteed:
					to = append(to, y.ID)
					if wanted := slices.MaxFunc([]time.Time{y.Given, y.Recalled}, time.Time.Compare); x.Yield.Since.After(wanted) && !x.Yield.Layout && len(x.Yield.To) == 1 {
						t.Fatalf("asked after the request: %+v %+v", x, y)
					}
				}
			}
			if x.Tier == Guaranteed && l.Borrowed(x.ID) != borrowed {
				t.Fatalf("borrowed: %v, and %+v", borrowed, x)
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
	for _, what := range []string{"take guaranteed", "take guaranteed refused", "take spot", "take spot refused", "out", "yielding", "open spot", "in lent room", "open in lent room"} {
		if met[what] < 1000 {
			t.Errorf("%q was met %d times", what, met[what])
		}
	}
	if l.Spots() > len(ids) {
		t.Errorf("%d spot allocations are counted", l.Spots())
	}
}

// halves is a card with profiles of several sizes.
func halves(t *testing.T) *mig.Card {
	t.Helper()
	at := func(size int, starts ...int) (out []gpu.Placement) {
		for _, s := range starts {
			out = append(out, gpu.Placement{Start: s, Size: size})
		}
		return out
	}
	c, err := mig.NewCard(&gpu.MIG{Capable: true, Enabled: true, Profiles: []gpu.Profile{
		{Name: "1g.10gb", ID: 19, Slices: 1, Max: 7, Placements: at(1, 0, 1, 2, 3, 4, 5, 6)},
		{Name: "2g.20gb", ID: 14, Slices: 2, Max: 3, Placements: at(2, 0, 2, 4)},
		{Name: "3g.40gb", ID: 9, Slices: 3, Max: 2, Placements: at(4, 0, 4)},
		{Name: "7g.80gb", ID: 0, Slices: 7, Max: 1, Placements: at(8, 0)},
	}})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// A MIG instance is lent as it is: a spot allocation gets the same one. No other placement in its room can be had, and one
// that an earlier spot allocation has there goes on yielding.
func TestLentInstance(t *testing.T) {
	at := func(slices, gb, start, size int) []Grant {
		return []Grant{{GPU: "GPU-a", Piece: piece.Instance(mig.Placement{Profile: mig.Name{Slices: slices, GB: gb}, Start: start, Size: size})}}
	}
	l := newLedger()
	l.SetMIG(map[gpu.UUID]MIG{"GPU-a": {Card: halves(t)}})
	if _, err := l.Take(spotOf("small", at(1, 10, 4, 1))); err != nil {
		t.Fatal(err)
	}
	g, err := l.Take(guaranteedOf("g", at(3, 40, 4, 4)))
	if err != nil || !getOf(l, "small").Yielding() {
		t.Fatal(err)
	}
	small := getOf(l, "small")
	l.SetOut("small", small.Epoch)
	open(t, l, "g")
	has := func(of Tier, want int, free bool) {
		t.Helper()
		r := l.Rooms([]gpu.UUID{"GPU-a"}, of)["GPU-a"]
		if len(r.Placements) != want || (len(r.Free()) > 0) != free {
			t.Errorf("for %s: %v are taken, %v free", of.Word(), r.Placements, r.Free())
		}
	}
	has(Guaranteed, 1, false)
	l.Release(DevicePlugin, "small")
	has(Spot, 1, false)
	if _, err := l.Take(spotOf("s", at(3, 40, 4, 4))); !errors.Is(err, ErrHeld) {
		t.Errorf("before it lends: %v", err)
	}
	if !l.SetLending("g", g.Epoch, true) {
		t.Fatal("it does not lend")
	}
	has(Guaranteed, 1, false)
	has(Spot, 1, true)
	room := l.Rooms([]gpu.UUID{"GPU-a"}, Spot)["GPU-a"]
	for _, other := range [][]Grant{at(1, 10, 4, 1), at(2, 20, 4, 2), at(7, 80, 0, 8)} {
		if why := room.Lacks(piece.At(other[0].Piece)); why == "" {
			t.Errorf("%v is offered", other[0].Piece)
		}
		if _, err := l.Take(spotOf("s", other)); !errors.Is(err, ErrHeld) || !strings.Contains(err.Error(), "only as they are") {
			t.Errorf("%v: %v", other[0].Piece, err)
		}
	}
	if why := room.Lacks(piece.At(g.Grants[0].Piece)); why != "" {
		t.Errorf("the instance is not offered: %s", why)
	}
	s, err := l.Take(spotOf("s", at(3, 40, 4, 4)))
	if err != nil || s.Yield.Asked() || !l.Borrowed("g") {
		t.Fatalf("%+v, %v", s, err)
	}
	has(Spot, 1, false)
	l.SetLending("g", g.Epoch, false)
	if !getOf(l, "s").Yielding() {
		t.Errorf("it does not yield: %+v", getOf(l, "s"))
	}

	// What has another placement in that room yields as long as the instance stands.
	l = newLedger()
	l.SetMIG(map[gpu.UUID]MIG{"GPU-a": {Card: halves(t)}})
	if _, err := l.Take(spotOf("small", at(1, 10, 4, 1))); err != nil {
		t.Fatal(err)
	}
	if g, err = l.Take(guaranteedOf("g", at(3, 40, 4, 4))); err != nil || !l.SetLending("g", g.Epoch, true) {
		t.Fatal(err)
	}
	if !getOf(l, "small").Yield.Asked() {
		t.Error("it wants to start where the lent instance is")
	}
	if l.Release(DevicePlugin, "g"); getOf(l, "small").Yield.Asked() {
		t.Error("it yields to nobody")
	}
}
