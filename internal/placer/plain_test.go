// SPDX-License-Identifier: Apache-2.0

package placer

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"example.com/gpu-agent/internal/piece"
)

// amounts are cores, GiB of memory, and one pod.
func amounts(cores, gib int64) Amounts {
	return NewAmounts(map[string]int64{"cpu": cores * 1000, "memory": gib << 30, "pods": 1})
}

// has is what a node has.
func has(cores, gib, pods int64) map[string]int64 {
	return map[string]int64{"cpu": cores * 1000, "memory": gib << 30, "pods": pods}
}

// with makes a pod ask for cores, and nothing else beside GPUs.
func (p Pod) with(cores int64) Pod {
	p.Plain = NewAmounts(map[string]int64{"cpu": cores * 1000, "pods": 1})
	return p
}

// thick is a group whose pods ask for cores and GiB, too.
func (f *fleet) thick(n int, units int, cores, gib int64) Group {
	g := f.group(n, memName, units)
	g.Plain = amounts(cores, gib)
	return g
}

// TestSeatsNeedPlainRoom: a seat goes where there is cpu, memory, or room for one pod more.
func TestSeatsNeedPlainRoom(t *testing.T) {
	f := of(piece.KindUnits, 1, 79, "a", "b")(t)
	f.books.SetPlain("a", has(3, 64, 110))
	f.books.SetPlain("b", has(8, 64, 110))
	f.wantHeld("g", "[[b b]]", f.thick(2, 10, 4, 8))
	no := f.wantNotHeld("h", "2 of them have GPUs for it and too little cpu (it asks for 4, the most is 3, on a)", f.thick(1, 10, 4, 8))
	if no.Nodes["b"] != "not enough cpu: 4 of it is asked for, and 0 is left" {
		t.Errorf("%q", no.Nodes["b"])
	}
	f.wantNotHeld("h", "too little memory (it asks for 57Gi, the most is 48Gi, on b)", func() Group {
		g := f.thick(1, 10, 0, 57)
		g.Among = []string{"b"}
		return g
	}())
	f.books.SetPlain("a", has(3, 64, 0))
	f.wantNotHeld("h", "too little pods (it asks for 1, the most is 0, on a)", func() Group {
		g := f.thick(1, 10, 0, 1)
		g.Among = []string{"a"}
		return g
	}())
	f.books.Drop("g")
	f.wantHeld("h", "[[b]]", f.thick(1, 10, 4, 8))
}

// TestOtherResources: what a node does not have at all is none, but for pods.
func TestOtherResources(t *testing.T) {
	f := of(piece.KindUnits, 1, 79, "a", "b")(t)
	f.books.SetPlain("b", map[string]int64{"example.org/nic": 2})
	g := f.group(2, memName, 10)
	g.Plain = NewAmounts(map[string]int64{"example.org/nic": 1, "pods": 1})
	f.wantHeld("g", "[[b b]]", g)
	f.wantNotHeld("h", "too little example.org/nic", g)
}

// TestPlainRoomOfSeats: no pod takes it, but for those that it is held for.
func TestPlainRoomOfSeats(t *testing.T) {
	f := of(piece.KindUnits, 1, 79, "a")(t)
	f.books.SetPlain("a", has(8, 64, 110))
	f.wantHeld("g", "[[a]]", f.thick(1, 10, 6, 1))
	f.wantRefused(units("x", 5).with(3), "the rest is held for others")
	if err := f.books.Fits(units("x", 5).with(3), "a", nil, f.now); err == nil {
		t.Error("Fits gives away the cpu of a seat")
	}
	f.wantPlaced(units("y", 5).with(2), "a")
	f.books.DeletePod("y")
	f.give(units("y", 5).with(2), "a")
	// Whoever goes leaves its cpu, too.
	if err := f.books.Fits(units("x", 5).with(2), "a", []string{"y"}, f.now); err != nil {
		t.Error(err)
	}
	f.wantPlaced(units("m", 10).with(6).of("g"), "a")
	// What a node never had is for the scheduler to judge: its books may be newer.
	f.books.Drop("g")
	f.wantPlaced(units("z", 5).with(100), "a")
}

// TestPlainRoomIsLost: pods without GPUs took it, and the seat is looked for elsewhere.
func TestPlainRoomIsLost(t *testing.T) {
	f := of(piece.KindUnits, 1, 79, "a", "b")(t)
	f.books.SetPlain("a", has(8, 64, 110))
	f.books.SetPlain("b", has(2, 64, 110))
	f.wantHeld("first", "[[a]]", f.thick(1, 10, 4, 1))
	f.wantHeld("second", "[[a]]", f.thick(1, 10, 4, 1))
	f.books.SetPlain("a", has(5, 64, 110))
	if first, second := f.books.Lost("first"), f.books.Lost("second"); len(first) != 0 || fmt.Sprint(second) != "[a]" {
		t.Fatalf("lost are %v and %v, want the younger one", first, second)
	}
	news := f.books.News()
	f.books.SetPlain("b", has(4, 64, 110))
	if f.books.News() == news {
		t.Error("more cpu is no news")
	}
	f.wantHeld("second", "[[b]]", f.thick(1, 10, 4, 1))
	if lost := f.books.Lost("second"); len(lost) != 0 {
		t.Error(lost)
	}
}

// TestSeatOfTheSameCores: of pods with the same GPUs, each takes the seat for its own cpu, those that run when the hold
// is made anew, too.
func TestSeatOfTheSameCores(t *testing.T) {
	for cores, left := range map[int64]int64{2: 8, 8: 2} {
		f := of(piece.KindUnits, 1, 79, "a")(t)
		f.books.SetPlain("a", has(11, 64, 110))
		groups := []Group{f.thick(1, 10, 2, 0), f.thick(1, 10, 8, 0)}
		f.wantHeld("g", "[[a] [a]]", groups...)
		p := units("m", 10).of("g")
		p.Plain = amounts(cores, 0)
		f.give(p, "a")
		for range 2 {
			f.wantRefused(units("x", 5).with(2), "the rest is held for others")
			if got := f.books.nodes["a"].seats[0].Plain.Of("cpu"); got != left*1000 {
				t.Errorf("with a pod of %d cores the open seat is for %d millicores", cores, got)
			}
			f.books.Drop("g")
			f.wantHeld("g", "[[a] [a]]", groups...)
		}
	}
}

// TestThePodWithoutRoom: the refusal names its group.
func TestThePodWithoutRoom(t *testing.T) {
	f := of(piece.KindUnits, 1, 79, "a")(t)
	f.books.SetPlain("a", has(10, 64, 110))
	if no := f.wantNotHeld("g", "room for 1 of 2 pods", f.thick(1, 10, 2, 0), f.thick(1, 10, 9, 0)); no.Group != 0 {
		t.Errorf("group %d: the one with most cpu goes first, so the other one has none", no.Group)
	}
	if no := f.wantNotHeld("g", "room for 0 of 2 pods", f.thick(1, 10, 2, 0), f.thick(1, 20, 11, 0)); no.Group != 1 {
		t.Errorf("group %d", no.Group)
	}
	if no := f.wantNotHeld("g", "at most 4096", f.thick(5000, 1, 0, 0)); no.Group != -1 {
		t.Errorf("group %d", no.Group)
	}
}

// TestPlainRoomAtRandom: while nodes keep what they have, no seat loses its plain room to a pod or to
// another seat, and none is refused that a count finds room for.
func TestPlainRoomAtRandom(t *testing.T) {
	for seed := range uint64(40) {
		r := rand.New(rand.NewPCG(seed, 9))
		f := of(piece.KindUnits, 4, 1000, "a", "b", "c")(t)
		nodes := map[string]map[string]int64{}
		for _, name := range f.names {
			nodes[name] = has(int64(8+r.IntN(40)), int64(16+r.IntN(100)), int64(3+r.IntN(12)))
			f.books.SetPlain(name, nodes[name])
		}
		held := map[string]bool{}
		for i := range 120 {
			switch id := fmt.Sprint("g", r.IntN(8)); r.IntN(4) {
			case 0:
				one := f.thick(1, 1, int64(r.IntN(8)), int64(r.IntN(16)))
				_, err := f.books.Hold(id, id, []Group{one}, f.now)
				if held[id] = held[id] || err == nil; err == nil {
					break
				}
				for _, name := range f.names {
					if !held[id] && lackOf(f.leftOf(name, nodes[name], true), one.Plain) == (Lack{}) {
						t.Fatalf("seed %d: %v, and %s has %v", seed, err, name, f.leftOf(name, nodes[name], true))
					}
				}
			case 1:
				f.books.Drop(id)
				delete(held, id)
			case 2:
				p := units(fmt.Sprint("p", i), 1).with(int64(r.IntN(6)))
				among := slices.DeleteFunc(slices.Clone(f.names), func(name string) bool { // as the scheduler asks
					return lackOf(f.leftOf(name, nodes[name], false), p.Plain) != (Lack{})
				})
				_, err := f.books.Place(t.Context(), p, among, f.now)
				for _, name := range among {
					if err != nil && lackOf(f.leftOf(name, nodes[name], true), p.Plain) == (Lack{}) {
						t.Fatalf("seed %d: %v, and %s has %v", seed, err, name, f.leftOf(name, nodes[name], true))
					}
				}
			case 3:
				f.books.DeletePod(fmt.Sprint("p", r.IntN(i+1)))
			}
			for id := range held {
				if lost := f.books.Lost(id); len(lost) > 0 {
					t.Fatalf("seed %d: %s lost its room on %v", seed, id, lost)
				}
			}
		}
	}
}

// leftOf is what a node has left beside all pods, and beside seats.
func (f *fleet) leftOf(name string, has map[string]int64, seats bool) map[string]int64 {
	left := maps.Clone(has)
	n := f.books.nodes[name]
	var all []Amounts
	for _, e := range n.here {
		all = append(all, e.Plain)
	}
	for _, s := range n.seats {
		if seats {
			all = append(all, s.Plain)
		}
	}
	for _, a := range slices.Concat(all...) {
		left[a.Name] -= a.N
	}
	return left
}

func TestAmountOf(t *testing.T) {
	for want, a := range map[string]Amount{
		"1500m": {"cpu", 1500}, "2": {"cpu", 2000}, "0": {"cpu", 0}, "4Gi": {"memory", 4 << 30}, "1.5Gi": {"hugepages-2Mi", 3 << 29},
		"0.5Mi": {"ephemeral-storage", 1 << 19}, "7": {"example.org/nic", 7},
	} {
		if got := amountOf(a.Name, a.N); got != want {
			t.Errorf("%v is written %q, want %q", a, got, want)
		}
	}
}
