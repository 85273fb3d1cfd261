// SPDX-License-Identifier: Apache-2.0

package mig

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"example.com/gpu-agent/pkg/gpu"
)

// choice of the test's own: what is chosen on each GPU, as bits.
type selection []uint64

// desk is a node at random, for Prefer.
type desk struct {
	f           []*field
	offers      []Offer
	taken, warm []uint64
}

func newDesk(r *rand.Rand, fields []*field, cards []*Card) *desk {
	d := &desk{}
	for g := range 1 + r.IntN(3) {
		k := r.IntN(len(fields))
		f := fields[k]
		set := f.sets[r.IntN(len(f.sets))]
		o := Offer{GPU: gpu.UUID(fmt.Sprint("GPU-", 9-g)), Card: cards[k], Rank: r.IntN(3)}
		var taken, warm uint64
		for i, s := range f.slots {
			if set>>i&1 == 0 {
				continue
			}
			switch r.IntN(5) {
			case 0, 1:
				taken |= 1 << i
				o.Taken = append(o.Taken, s)
			case 2:
				warm |= 1 << i
				o.Warm = append(o.Warm, s)
			case 3:
				taken |= 1 << i
				warm |= 1 << i
				o.Taken, o.Warm = append(o.Taken, s), append(o.Warm, s)
			}
		}
		d.f, d.offers = append(d.f, f), append(d.offers, o)
		d.taken, d.warm = append(d.taken, taken), append(d.warm, warm)
	}
	return d
}

// cost of a selection, must included, in the order of Prefer's comment; false
// where it cannot stand.
func (d *desk) cost(must, chosen selection) (p price, ok bool) {
	for g, f := range d.f {
		taken := d.taken[g] | must[g]
		fresh := chosen[g] &^ taken
		if !f.legal[taken] || !f.legal[taken|fresh] {
			return p, false
		}
		for i, s := range f.slots {
			bit := uint64(1) << i
			if chosen[g]&bit != 0 && must[g]&bit == 0 {
				if d.taken[g]&bit != 0 && d.warm[g]&bit == 0 {
					p[0]++
				}
				if d.warm[g]&bit != 0 {
					p[2]--
				}
				p[4] += d.offers[g].Rank
			}
			// An idle instance goes if its room is wanted by another.
			if d.warm[g]&bit != 0 && !f.allowed(taken|bit) {
				continue // it goes in any case
			}
			if d.warm[g]&^fresh&bit != 0 && f.overlaps(s, fresh) {
				p[3]++
			}
		}
		p[1] += f.room(taken) - f.room(taken|fresh)
	}
	return p, true
}

// overlaps says whether a slot's memory is wanted by any of a set.
func (f *field) overlaps(s Slot, set uint64) bool {
	for i, o := range f.slots {
		if set>>i&1 == 1 && o.Start < s.Start+s.Size && s.Start < o.Start+o.Size {
			return true
		}
	}
	return false
}

// TestPreferIsBest tries every choice on small nodes.
func TestPreferIsBest(t *testing.T) {
	var fields []*field
	var cards []*Card
	for _, family := range families {
		fields, cards = append(fields, newField(t, family.rows)), append(cards, card(t, family.rows))
	}
	r := rand.New(rand.NewPCG(7, 7))
	refused, met := 0, 0
	for range tell(3000, 100_000) {
		// One table a node: profiles of different cards have different names.
		k := r.IntN(len(fields))
		d := newDesk(r, fields[k:k+1], cards[k:k+1])
		f := fields[k]
		profile := f.slots[r.IntN(len(f.slots))].Profile
		var available, must []Place
		must0 := make(selection, len(d.f))
		options := make(selection, len(d.f))
		for g := range d.f {
			for i, s := range f.slots {
				if s.Profile != profile || r.IntN(4) == 0 {
					continue
				}
				available = append(available, Place{d.offers[g].GPU, s})
				options[g] |= 1 << i
				if r.IntN(12) == 0 && f.legal[d.taken[g]|must0[g]|1<<i] {
					must = append(must, Place{d.offers[g].GPU, s})
					must0[g] |= 1 << i
				}
			}
		}
		n := len(must) + r.IntN(5)
		if len(available) > 16 {
			continue
		}
		// All subsets of available that have n.
		var best price
		found := false
		for set := range 1 << len(available) {
			chosen, k := slices.Clone(must0), 0
			for b, p := range available {
				if set>>b&1 == 1 {
					g := slices.IndexFunc(d.offers, func(o Offer) bool { return o.GPU == p.GPU })
					chosen[g] |= 1 << slices.Index(f.slots, p.Slot)
				}
			}
			for g := range chosen {
				for m := chosen[g]; m != 0; m &= m - 1 {
					k++
				}
			}
			if k != n {
				continue
			}
			if p, ok := d.cost(must0, chosen); ok && (!found || less(p, best)) {
				best, found = p, true
			}
		}
		got, err := Prefer(d.offers, available, must, n)
		if (err == nil) != found {
			t.Fatalf("Prefer(%+v, %v, %v, %d) = %v, %v; there is a way: %v", d.offers, available, must, n, got, err, found)
		}
		if err != nil {
			if !errors.Is(err, gpu.ErrNoRoom) {
				t.Fatalf("%v is no ErrNoRoom", err)
			}
			refused++
			continue
		}
		met++
		chosen := make(selection, len(d.f))
		for _, p := range got {
			g := slices.IndexFunc(d.offers, func(o Offer) bool { return o.GPU == p.GPU })
			bit := uint64(1) << slices.Index(f.slots, p.Slot)
			if chosen[g]&bit != 0 || (options[g]|must0[g])&bit == 0 {
				t.Fatalf("%v was not available, or is there twice", p)
			}
			chosen[g] |= bit
		}
		for g := range chosen {
			if must0[g]&^chosen[g] != 0 {
				t.Fatalf("%v lacks some of %v", got, must)
			}
		}
		p, ok := d.cost(must0, chosen)
		if len(got) != n || !ok || p != best {
			t.Fatalf("Prefer(%+v, %v, %v, %d) = %v costs %v, the best %v", d.offers, available, must, n, got, p, best)
		}
		r.Shuffle(len(available), func(a, b int) { available[a], available[b] = available[b], available[a] })
		r.Shuffle(len(d.offers), func(a, b int) { d.offers[a], d.offers[b] = d.offers[b], d.offers[a] })
		again, err := Prefer(d.offers, available, must, n)
		if err != nil || !slices.Equal(again, got) {
			t.Fatalf("in another order %v, %v, not %v", again, err, got)
		}
	}
	t.Logf("%d choices, %d refusals", met, refused)
	if met < 1000 || refused < 100 {
		t.Errorf("too few of each to mean anything")
	}
}
