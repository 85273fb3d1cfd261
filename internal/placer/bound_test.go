// SPDX-License-Identifier: Apache-2.0

package placer

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/pkg/mig"
)

// adversary looks for an order in which an agent takes requests, and for ends of pods
// between them, after which one of the requests finds no room.
type adversary struct {
	seen map[string]bool
}

// units: the agent takes the fullest GPU that fits; what is not free can become so at any
// moment.
func (a *adversary) units(free, total, items []int) bool {
	key := fmt.Sprint(free, items)
	if known := a.seen[key]; known || len(items) == 0 {
		return false // it has been looked at, and led nowhere
	}
	a.seen[key] = true
	for i, n := range items {
		best := -1
		for g := range free {
			if free[g] >= n && (best < 0 || free[g] < free[best]) {
				best = g
			}
		}
		if best < 0 {
			return true
		}
		next := slices.Clone(free)
		next[best] -= n
		left := slices.Clone(total)
		left[best] -= n // these units do not become free again
		if a.units(next, left, slices.Delete(slices.Clone(items), i, i+1)) {
			return true
		}
	}
	for g := range free {
		if free[g] < total[g] {
			next := slices.Clone(free)
			next[g]++
			if a.units(next, total, items) {
				return true
			}
		}
	}
	return false
}

// TestUnitsWhateverTheAgentChooses: where the bound says that all requests are safe, no
// adversary keeps one from its room.
func TestUnitsWhateverTheAgentChooses(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 5))
	safe, unsafe, lost := 0, 0, 0
	for range 4000 {
		room := &room{kinds: map[string]piece.Kind{memName: piece.KindUnits}}
		var free, total, sizes []int
		for range 1 + r.IntN(3) {
			n := 2 + r.IntN(5)
			f := n - r.IntN(2)*r.IntN(n)
			free, total = append(free, f), append(total, n)
			room.gpus = append(room.gpus, space{resource: memName, kind: piece.KindUnits, total: n, free: f})
		}
		var items []item
		for range 2 + r.IntN(3) {
			n := 1 + r.IntN(5)
			sizes, items = append(sizes, n), append(items, item{memName, n})
		}
		a := adversary{seen: map[string]bool{}}
		beaten := a.units(free, total, sizes)
		switch {
		case !(bound{room, newSteps(nil)}).safe(memName, items, 0):
			unsafe++
			if beaten {
				lost++
			}
		case beaten:
			t.Fatalf("%v are said to be safe on %v of %v", sizes, free, total)
		default:
			safe++
		}
	}
	if t.Logf("%d are safe; of %d that are not said to be, %d can be kept out", safe, unsafe, lost); safe < 500 ||
		lost < 500 {
		t.Error("the test looks at nothing")
	}
}

// placements: the agent takes any placement that can be had; what stands can go.
func (a *adversary) placements(card *mig.Card, standing [][]mig.Placement, held []int, items []mig.Name) bool {
	key := fmt.Sprint(standing, items)
	if a.seen[key] || len(items) == 0 {
		return false
	}
	a.seen[key] = true
	for i, name := range items {
		rest := slices.Delete(slices.Clone(items), i, i+1)
		room := false
		for g := range standing {
			for _, p := range card.Placements() {
				if p.Profile != name || !card.Fits(standing[g], p) {
					continue
				}
				room = true
				next := slices.Clone(standing)
				next[g] = append(slices.Clone(standing[g]), p)
				if a.placements(card, next, held, rest) {
					return true
				}
			}
		}
		if !room {
			return true
		}
	}
	for g := range standing {
		if held[g] > 0 { // the first of them were there before
			next, left := slices.Clone(standing), slices.Clone(held)
			next[g], left[g] = standing[g][1:], held[g]-1
			if a.placements(card, next, left, items) {
				return true
			}
		}
	}
	return false
}

// TestPlacementsWhateverTheAgentChooses is the same for MIG devices on demand.
func TestPlacementsWhateverTheAgentChooses(t *testing.T) {
	_, card := h100(t)
	var kinds []mig.Name
	all := map[string][]mig.Placement{}
	for _, p := range card.Placements() {
		name := "example.com/" + p.Profile.Resource()
		if all[name] = append(all[name], p); !slices.Contains(kinds, p.Profile) {
			kinds = append(kinds, p.Profile)
		}
	}
	r := rand.New(rand.NewPCG(6, 6))
	safe, unsafe, lost := 0, 0, 0
	for range 600 {
		room := &room{kinds: map[string]piece.Kind{}}
		for name := range all {
			room.kinds[name] = piece.KindPlacement
		}
		var standing [][]mig.Placement
		var held []int
		for range 1 + r.IntN(2) {
			s := space{kind: piece.KindPlacement, card: card, onDemand: true, all: all,
				places: map[string][]mig.Placement{}}
			for range r.IntN(3) {
				if p := card.Placements()[r.IntN(len(card.Placements()))]; card.Fits(s.standing, p) {
					s.standing = append(s.standing, p)
				}
			}
			for name, of := range all {
				s.places[name] = of
			}
			s.narrow()
			room.gpus = append(room.gpus, s)
			standing, held = append(standing, s.standing), append(held, len(s.standing))
		}
		var items []item
		var names []mig.Name
		for range 2 + r.IntN(2) {
			name := kinds[r.IntN(len(kinds))]
			names, items = append(names, name), append(items, item{"example.com/" + name.Resource(), 1})
		}
		a := adversary{seen: map[string]bool{}}
		beaten := a.placements(card, standing, held, names)
		switch {
		case !(bound{room, newSteps(nil)}).safe("mig", items, 0):
			unsafe++
			if beaten {
				lost++
			}
		case beaten:
			t.Fatalf("%v are said to be safe beside %v", names, standing)
		default:
			safe++
		}
	}
	if t.Logf("%d are safe; of %d that are not said to be, %d can be kept out", safe, unsafe, lost); safe < 50 ||
		lost < 100 {
		t.Error("the test looks at nothing")
	}
}

// TestReplicasWhateverTheAgentChooses: others use up the GPUs of the adversary's choice.
func TestReplicasWhateverTheAgentChooses(t *testing.T) {
	r := rand.New(rand.NewPCG(7, 7))
	safe, lost := 0, 0
	for range 3000 {
		room := &room{kinds: map[string]piece.Kind{repName: piece.KindReplica}}
		var free []int
		for range 1 + r.IntN(4) {
			f := r.IntN(4)
			free = append(free, f)
			room.gpus = append(room.gpus, space{resource: repName, kind: piece.KindReplica, total: 3, free: f})
		}
		var items []item
		for range 1 + r.IntN(4) {
			items = append(items, item{repName, 1 + r.IntN(3)})
		}
		switch beaten := exhaust(free, items); {
		case !(bound{room, newSteps(nil)}).safe(repName, items, 0):
			if beaten {
				lost++
			}
		case beaten:
			t.Fatalf("%v are said to be safe on %v", items, free)
		default:
			safe++
		}
	}
	if safe < 300 || lost < 300 {
		t.Errorf("%d safe, %d lost: the test looks at nothing", safe, lost)
	}
}

// exhaust tries each order, and for each request each set of GPUs.
func exhaust(free []int, items []item) bool {
	for i, it := range items {
		rest := slices.Delete(slices.Clone(items), i, i+1)
		room := false
		for set := range 1 << len(free) {
			next, n := slices.Clone(free), 0
			for g := range free {
				if set>>g&1 == 1 {
					next[g]--
					n++
				}
			}
			if n != it.n || slices.Min(next) < 0 {
				continue
			}
			room = true
			if exhaust(next, rest) {
				return true
			}
		}
		if !room {
			return true
		}
	}
	return false
}
