// SPDX-License-Identifier: Apache-2.0

package placer

import (
	"context"
	"errors"
	"fmt"
	"math/bits"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"example.com/gpu-agent/internal/piece"
)

// guest lets a hold of one pod have its room on a node.
func (f *fleet) guest(id, resource string, amount int, node string) {
	f.t.Helper()
	f.give(asks("p-"+id, resource, amount).of(id), node)
}

// leave ends the pods of a hold.
func (f *fleet) leave(id string) {
	f.books.Drop(id)
	for name, m := range f.machines {
		m.end(f.r, "p-"+id)
		f.books.SetNode(name, m.says(), true)
	}
	f.books.DeletePod("p-" + id)
}

func profile(name string) string { return "example.com/mig-" + name }

// Seven jobs of 1g fill a card. Three of them next to each other make room for a 3g, and not
// the three that came last.
func TestRoomIsOpenedWhereJobsAreNeighbours(t *testing.T) {
	f := of(piece.KindPlacement, 1, 0, "a")(t)
	for _, i := range []int{0, 1, 2, 3, 4, 5, 6} {
		f.guest(fmt.Sprint("job-", i), profile("1g.10gb"), 1, "a")
	}
	at := map[int]string{} // by slice
	for id, uid := range f.machines["a"].gpus[0].by {
		var slice int
		if _, err := fmt.Sscanf(id[len(id)-1:], "%d", &slice); err != nil {
			t.Fatal(err)
		}
		at[slice] = uid[len("p-"):]
	}
	var guests []Guest
	for _, slice := range []int{4, 1, 6, 3, 5, 0, 2} { // the last that came are neighbours of none
		guests = append(guests, Guest{ID: at[slice]})
	}
	urgent := f.group(1, profile("3g.40gb"), 1)
	ends, nodes, err := f.books.Open("urgent", "x/urgent", []Group{urgent}, guests, f.now)
	want := []string{at[4], at[5], at[6]}
	if slices.Sort(want); err != nil || !slices.Equal(ends, want) || fmt.Sprint(nodes) != "[[a]]" {
		t.Fatalf("ends %v for room on %v, want %v: %v", ends, nodes, want, err)
	}
	if f.books.Lost("urgent") == nil {
		t.Error("it has its room while all are there yet")
	}
	for i, id := range ends {
		f.wantRefused(asks("other", profile("1g.10gb"), 1), "none of 1 nodes has room")
		f.leave(id)
		for j := range guests {
			guests[j].Going = guests[j].Going || slices.Contains(ends[:i+1], guests[j].ID)
		}
		if more, _, err := f.books.Open("urgent", "x/urgent", []Group{urgent}, guests, f.now); err != nil ||
			i == len(ends)-1 && more != nil {
			t.Errorf("with %v gone, %v are to end: %v", ends[:i+1], more, err)
		}
	}
	f.wantHeld("urgent", "[[a]]", urgent)
	f.wantRefused(asks("other", profile("1g.10gb"), 1), "none of 1 nodes has room")
	f.wantPlaced(asks("p-urgent", profile("3g.40gb"), 1).of("urgent"), "a")
}

// What pods have left is waited for, and nobody else ends meanwhile, until it takes too long.
func TestLeftDevicesAreWaitedFor(t *testing.T) {
	for _, c := range []struct {
		kind             piece.Kind
		resource, urgent string
		n, wants         int
	}{
		{piece.KindUnits, memName, memName, 39, 60},
		{piece.KindPlacement, profile("3g.40gb"), profile("7g.80gb"), 1, 1},
	} {
		f := of(c.kind, 1, 79, "a", "b")(t)
		for _, id := range []string{"one", "two", "three", "four"} {
			node, err := f.books.Place(context.Background(), asks("p-"+id, c.resource, c.n).of(id), f.names, f.now)
			if err != nil {
				t.Fatal(err)
			}
			f.guest(id, c.resource, c.n, node)
		}
		urgent := []Group{f.group(1, c.urgent, c.wants)}
		guests := []Guest{{ID: "one"}, {ID: "two"}, {ID: "three"}, {ID: "four"}}
		open := func() []string {
			t.Helper()
			ends, _, err := f.books.Open("urgent", "x/urgent", urgent, guests, f.now)
			if err != nil {
				t.Fatal(err)
			}
			return ends
		}
		first := open()
		if len(first) != 2 {
			t.Fatalf("%s: %v end", c.kind, first)
		}
		// Their pods are gone at the API server, and the GPUNode has not heard of it.
		for _, id := range first {
			f.books.DeletePod("p-" + id)
		}
		if more := open(); more != nil {
			t.Errorf("%s: before the GPUNode says so, %v end", c.kind, more)
		}
		f.now = f.now.Add(leavesWithin - time.Second)
		if more := open(); more != nil {
			t.Errorf("%s: a while later %v end", c.kind, more)
		}
		f.now = f.now.Add(time.Second)
		if more := open(); len(more) != 2 {
			t.Errorf("%s: where that never happens, %v end", c.kind, more)
		}
		for _, id := range first {
			f.leave(id)
		}
		if more := open(); more != nil {
			t.Errorf("%s: with room, %v end", c.kind, more)
		}
		for name, n := range f.books.nodes {
			if len(n.leaving) > 0 {
				t.Errorf("%s: %s remembers %v", c.kind, name, n.leaving)
			}
		}
	}
}

// Nobody ends where it is not known yet who has what.
func TestNobodyEndsForWhatIsNotKnown(t *testing.T) {
	f := of(piece.KindUnits, 1, 79, "a")(t)
	f.guest("small", memName, 40, "a")
	vague := units("p-vague", 20)
	vague.Node = "a"
	f.books.SetPod(vague)
	urgent := []Group{f.group(1, memName, 59)}
	guests := []Guest{{ID: "small"}}
	var no *Refusal
	if ends, _, err := f.books.Open("urgent", "x/urgent", urgent, guests, f.now); !errors.As(err, &no) || !no.Waits ||
		!strings.Contains(no.Nodes["a"], "which devices x/p-vague has") {
		t.Errorf("%v end: %v, %+v", ends, err, no)
	}
	f.give(vague, "a")
	if ends, _, err := f.books.Open("urgent", "x/urgent", urgent, guests, f.now); err != nil ||
		!slices.Equal(ends, []string{"small"}) {
		t.Errorf("%v end: %v", ends, err)
	}
}

// Nobody ends where there is room, or where no end makes any.
func TestNobodyEndsInVain(t *testing.T) {
	f := of(piece.KindUnits, 1, 79, "a", "b")(t)
	f.guest("small", memName, 40, "a")
	f.give(units("p-fixed", 40), "b")
	guests := []Guest{{ID: "small"}}
	if ends, at, err := f.books.Open("fits", "x/fits", []Group{f.group(1, memName, 39)}, guests, f.now); err != nil ||
		ends != nil {
		t.Errorf("%v end for room on %v: %v", ends, at, err)
	}
	f.books.Drop("fits")
	var no *Refusal
	ends, _, err := f.books.Open("two", "x/two", []Group{f.group(2, memName, 60)}, guests, f.now)
	if !errors.As(err, &no) || ends != nil || no.Found != 1 || no.Of != 2 {
		t.Errorf("%v end: %v", ends, err)
	}
	if held := f.books.Holds(); len(held) != 0 {
		t.Errorf("held are %v", held)
	}
	// The cheapest goes, and of several pods each has its own.
	f.guest("dear", memName, 30, "b")
	guests = []Guest{{ID: "small", Rank: 1}, {ID: "dear", Rank: 2}}
	if ends, at, err := f.books.Open("mid", "x/mid", []Group{f.group(1, memName, 39)}, guests, f.now); err != nil ||
		ends != nil || fmt.Sprint(at) != "[[a]]" {
		t.Errorf("%v end for room on %v: %v", ends, at, err)
	}
	if ends, at, err := f.books.Open("mid", "x/mid", []Group{f.group(2, memName, 39)}, guests, f.now); err != nil ||
		!slices.Equal(ends, []string{"small"}) || fmt.Sprint(at) != "[[a a]]" {
		t.Errorf("%v end for room on %v: %v", ends, at, err)
	}
}

// On random layouts the guests that end are of the lowest ranks that can make room, and as few
// as brute force finds.
func TestTheFewestEnd(t *testing.T) {
	names := []string{profile("1g.10gb"), profile("1g.20gb"), profile("2g.20gb"), profile("3g.40gb")}
	opened, refused := 0, 0
	all := rounds(40, 1000)
	for seed := range uint64(all) {
		r := rand.New(rand.NewPCG(seed, 18))
		kind, urgent := piece.KindPlacement, asks("", names[2+r.IntN(2)], 1)
		if seed%2 == 1 {
			kind, urgent = piece.KindUnits, units("", 30+r.IntN(49))
		}
		f := of(kind, 1, 79, "a", "b")(t)
		f.r = r
		var guests []Guest
		for i := range 9 {
			p := asks("", names[r.IntN(3)], 1)
			if kind == piece.KindUnits {
				p = units("", 5+r.IntN(30))
			}
			id := fmt.Sprint("job-", i)
			p.UID, p.Name, p.Hold = "p-"+id, "p-"+id, id
			node, err := f.books.Place(context.Background(), p, f.names, f.now)
			if err != nil {
				continue
			}
			if r.IntN(6) == 0 {
				p.Hold = "" // nobody's to end
			} else {
				guests = append(guests, Guest{ID: id, Rank: r.IntN(2)})
			}
			f.give(p, node)
		}
		group := Group{N: 1, Containers: urgent.Containers, Among: f.names}
		ends, _, err := f.books.Open("urgent", "x/urgent", []Group{group}, guests, f.now)
		f.books.Drop("urgent")
		// By brute force: each set of guests, gone from the books.
		var best []Guest
		found := false
		for mask := range uint(1) << len(guests) {
			var some []Guest
			var gone []string
			for i, g := range guests {
				if mask&(1<<i) != 0 {
					some, gone = append(some, g), append(gone, "p-"+g.ID)
				}
			}
			if found && dearer(some, best) >= 0 || bits.OnesCount(mask) > 7 {
				continue
			}
			for _, name := range f.names {
				if f.books.Fits(Pod{UID: "u", Containers: urgent.Containers}, name, gone, f.now) == nil {
					best, found = some, true
				}
			}
		}
		if found != (err == nil) {
			t.Fatalf("seed %d: brute force finds room: %v; %v", seed, found, err)
		}
		if err != nil {
			refused++
			continue
		}
		var got []Guest
		for _, g := range guests {
			if slices.Contains(ends, g.ID) {
				got = append(got, g)
			}
		}
		if dearer(got, best) != 0 {
			t.Errorf("seed %d: %v end for %v, and brute force ends %v of %v", seed, got, urgent.Containers, best,
				guests)
		}
		if len(got) > 0 {
			opened++
		}
	}
	t.Logf("room was opened %d times of %d, and not to be had %d times", opened, all, refused)
	if opened < all/2 {
		t.Error("there is little to be seen")
	}
}

// TestMight: what would be free if only some stayed, without a change of the books.
func TestMight(t *testing.T) {
	f := of(piece.KindUnits, 1, 79, "a", "b")(t)
	f.wantHeld("stays", "[[a]]", f.group(1, memName, 50))
	f.give(units("p", 60), "b")
	f.wantHeld("goes", "[[a]]", f.group(1, memName, 20))
	stay := func(ids ...string) func(string) bool {
		return func(id string) bool { return slices.Contains(ids, id) }
	}
	might := func(yes bool, groups []Group, ids ...string) {
		t.Helper()
		if got := f.books.Might(groups, stay(ids...), f.now); got != yes {
			t.Errorf("if only %q stay there might be room: %v", ids, got)
		}
	}
	two := []Group{f.group(2, memName, 60)}
	might(true, two)
	might(false, two, "stays")
	might(true, []Group{f.group(1, memName, 60)}, "stays")
	might(true, []Group{f.group(1, memName, 29), f.group(1, memName, 70)}, "stays")
	might(false, []Group{f.group(1, memName, 30), f.group(1, memName, 70)}, "stays")
	might(false, []Group{f.group(1, memName, 80)})
	if ids := f.books.Holds(); !slices.Equal(ids, []string{"goes", "stays"}) {
		t.Errorf("held are %q", ids)
	}
	for _, id := range f.books.Holds() {
		if lost := f.books.Lost(id); len(lost) > 0 {
			t.Errorf("%s has lost its room", id)
		}
	}
	f.wantRefused(units("x", 30), "none of 2 nodes")
}

func TestRunning(t *testing.T) {
	f := of(piece.KindUnits, 1, 79, "a")(t)
	f.wantHeld("g", "[[a]]", f.group(1, memName, 50))
	p := units("m", 50).of("g")
	want := func(yes bool, when string) {
		t.Helper()
		if f.books.Running("g") != yes {
			t.Errorf("%s it runs: %v", when, !yes)
		}
	}
	want(false, "without a pod")
	f.books.SetPod(p)
	want(false, "while its pod has no node")
	f.give(p, "a")
	want(true, "on a node")
	p.Node, p.Ending = "a", true
	f.books.SetPod(p)
	want(false, "while its pod is ending")
}
