// SPDX-License-Identifier: Apache-2.0

package mig

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
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
		for i, s := range f.placements {
			if set>>i&1 == 0 {
				continue
			}
			switch r.IntN(5) {
			case 0, 1:
				taken |= 1 << i
				o.Pinned = append(o.Pinned, s)
			case 2:
				warm |= 1 << i
				o.Warm = append(o.Warm, s)
			case 3:
				taken |= 1 << i
				warm |= 1 << i
				o.Pinned, o.Warm = append(o.Pinned, s), append(o.Warm, s)
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
		for i, s := range f.placements {
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

// overlaps says whether a placement's memory is wanted by any of a set.
func (f *field) overlaps(s Placement, set uint64) bool {
	for i, o := range f.placements {
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
	for range tell(700, 20_000) {
		// One table a node: profiles of different cards have different names.
		k := r.IntN(len(fields))
		d := newDesk(r, fields[k:k+1], cards[k:k+1])
		f := fields[k]
		profile := f.placements[r.IntN(len(f.placements))].Profile
		var available, must []Place
		must0 := make(selection, len(d.f))
		options := make(selection, len(d.f))
		for g := range d.f {
			for i, s := range f.placements {
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
					chosen[g] |= 1 << slices.Index(f.placements, p.Placement)
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
			bit := uint64(1) << slices.Index(f.placements, p.Placement)
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
	if met < 300 || refused < 100 {
		t.Errorf("too few of each to mean anything")
	}
}

func TestPrefer(t *testing.T) {
	c, small := card(t, seven), card(t, a30)
	for _, tc := range []struct {
		name        string
		card        *Card
		taken, warm []string // by GPU
		rank        []int
		free        string
		must        string
		n           int
		want        string
	}{
		{"the corner that costs least", c, []string{"", ""}, nil, nil, "1g.10gb", "", 1, "GPU-0::1g.10gb@6"},
		{"the fuller GPU", c, []string{"", "3g.40gb@0"}, nil, nil, "1g.10gb", "", 1, "GPU-1::1g.10gb@6"},
		{"rank among equals", c, []string{"", ""}, nil, []int{1, 0}, "1g.10gb", "", 1, "GPU-1::1g.10gb@6"},
		{"what stands among equals", c, []string{"", ""}, []string{"", "3g.40gb@4"}, nil, "3g.40gb", "", 1, "GPU-1::3g.40gb@4"},
		{"no other for it among equals", c, []string{"", ""}, []string{"1g.10gb@6", ""}, nil, "3g.40gb", "", 1, "GPU-1::3g.40gb@4"},
		{"several on one GPU", c, []string{"", ""}, nil, nil, "3g.40gb", "", 2, "GPU-0::3g.40gb@0 GPU-0::3g.40gb@4"},
		{"over several GPUs", c, []string{"1g.10gb@0", ""}, nil, nil, "3g.40gb", "", 3, "GPU-0::3g.40gb@4 GPU-1::3g.40gb@0 GPU-1::3g.40gb@4"},
		{"more than there is", c, []string{"1g.10gb@0", ""}, nil, nil, "3g.40gb", "", 4, "insufficient resources"},
		{"one with media extensions a GPU", c, []string{"", ""}, nil, nil, "1g.10gb+me", "", 2, "GPU-0::1g.10gb+me@6 GPU-1::1g.10gb+me@6"},
		{"media extensions over all profiles", small, []string{"2g.12gb+me@0", ""}, nil, nil, "1g.6gb+me", "", 2, "insufficient resources"},
		{"what must be", c, []string{"", "3g.40gb@0"}, nil, nil, "1g.10gb", "GPU-0::1g.10gb@2", 2, "GPU-0::1g.10gb@2 GPU-0::1g.10gb@3"},
		{"must, and no room", c, []string{"3g.40gb@0", ""}, nil, nil, "1g.10gb", "GPU-0::1g.10gb@2", 2, "insufficient resources"},
		{"more must than are asked for", c, []string{"", ""}, nil, nil, "1g.10gb", "GPU-0::1g.10gb@2 GPU-0::1g.10gb@3", 1, "invalid argument"},
		{"an idle one that must's media engines shut out", card(t, pro), []string{"", ""}, []string{"1g.24gb+me.all@6", ""}, []int{0, 1}, "1g.24gb", "GPU-0::1g.24gb@9", 4,
			"GPU-0::1g.24gb@0 GPU-0::1g.24gb@3 GPU-0::1g.24gb@6 GPU-0::1g.24gb@9"},
		// The instance of the allocation that is promised has the media engines of the idle one.
		{"an idle one without media engines is not spared", c, []string{"1g.10gb+me@2"}, []string{"1g.10gb+me@0"}, nil, "1g.10gb", "", 2, "GPU-0::1g.10gb@0 GPU-0::1g.10gb@1"},
		// Pinned and warm: stands for whoever wants it.
		{"foreign and kept", c, []string{"1g.10gb@0", "3g.40gb@0"}, []string{"1g.10gb@0", ""}, nil, "1g.10gb", "", 1, "GPU-0::1g.10gb@0"},
		// Pinned alone: its holder is about to end.
		{"ending holders come last", c, []string{"3g.40gb@0 1g.10gb@4 1g.10gb@5", "7g.80gb@0"}, nil, nil, "1g.10gb", "", 2, "GPU-0::1g.10gb@4 GPU-0::1g.10gb@6"},
		{"splits where the GPU instance is taken", c, []string{"", "1c.3g.40gb@4.1"}, nil, nil, "1c.3g.40gb", "", 2, "GPU-1::1c.3g.40gb@4.0 GPU-1::1c.3g.40gb@4.2"},
		{"splits share a new GPU instance", c, []string{"", "7g.80gb@0"}, nil, nil, "1c.3g.40gb", "", 3, "GPU-0::1c.3g.40gb@4.0 GPU-0::1c.3g.40gb@4.1 GPU-0::1c.3g.40gb@4.2"},
		{"splits that stand", c, []string{"", ""}, []string{"", "1c.3g.40gb@4.1 1c.3g.40gb@4.2"}, nil, "1c.3g.40gb", "", 2, "GPU-1::1c.3g.40gb@4.1 GPU-1::1c.3g.40gb@4.2"},
		{"splits of two GPU instances with media extensions", small, []string{"", ""}, nil, nil, "1c.2g.12gb+me", "", 4,
			"GPU-0::1c.2g.12gb+me@0.0 GPU-0::1c.2g.12gb+me@0.1 GPU-1::1c.2g.12gb+me@0.0 GPU-1::1c.2g.12gb+me@0.1"},
		{"splits of more GPU instances than may be", small, []string{"", ""}, nil, nil, "1c.2g.12gb+me", "", 5, "insufficient resources"},
		{"none", c, []string{"", ""}, nil, nil, "1g.10gb", "", 0, ""},
	} {
		var offers []Offer
		var available, must []Place
		for g := range tc.taken {
			o := Offer{GPU: gpu.UUID(fmt.Sprint("GPU-", g)), Card: tc.card, Pinned: placements(stand(t, tc.card, tc.taken[g]))}
			if tc.warm != nil {
				o.Warm = placements(stand(t, tc.card, tc.warm[g]))
			}
			if tc.rank != nil {
				o.Rank = tc.rank[g]
			}
			offers = append(offers, o)
			p := name(t, tc.free)
			for start := range 8 {
				for ci := range 7 {
					if s, ok := tc.card.Placement(p, start, ci); ok {
						available = append(available, Place{o.GPU, s})
					}
				}
			}
		}
		for _, id := range strings.Fields(tc.must) {
			u, p, start, ci, err := ParseID(id)
			if err != nil {
				t.Fatal(err)
			}
			s, _ := tc.card.Placement(p, start, ci)
			must = append(must, Place{u, s})
		}
		got, err := Prefer(offers, available, must, tc.n)
		var ids []string
		for _, p := range got {
			ids = append(ids, ID(p.GPU, p.Placement))
		}
		text := strings.Join(ids, " ")
		if err != nil {
			text = err.Error()
			text = text[strings.LastIndex(text, ": ")+2:]
		}
		if text != tc.want {
			t.Errorf("%s: got %s (%v), want %s", tc.name, text, err, tc.want)
		}
	}

	mixed := []Place{{"GPU-0", at(t, c, "1g.10gb@0")}, {"GPU-0", at(t, c, "2g.20gb@2")}}
	if _, err := Prefer([]Offer{{GPU: "GPU-0", Card: c}}, mixed, nil, 2); !errors.Is(err, gpu.ErrInvalid) {
		t.Errorf("of two profiles: %v", err)
	}
	if _, err := Prefer([]Offer{{GPU: "GPU-1", Card: c}}, mixed[:1], nil, 1); !errors.Is(err, gpu.ErrInvalid) {
		t.Errorf("on a GPU that is not there: %v", err)
	}
	if _, err := Prefer([]Offer{{GPU: "GPU-0"}}, mixed[:1], nil, 1); !errors.Is(err, gpu.ErrInvalid) {
		t.Errorf("on a GPU without a card: %v", err)
	}
}
