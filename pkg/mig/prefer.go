// SPDX-License-Identifier: Apache-2.0

package mig

import (
	"cmp"
	"fmt"
	"slices"

	"example.com/gpu-agent/pkg/gpu"
)

// Offer is a GPU on which slots are on offer.
type Offer struct {
	GPU  gpu.UUID
	Card *Card
	// Taken may not go: claims, busy and foreign instances. Warm stands. What is
	// in Warm alone is idle and may go for another; what is in both stands, may
	// not go and may be given out.
	Taken, Warm []Slot
	// Rank decides between GPUs that are as good as each other; less is better.
	Rank int
}

// Place is a slot of a GPU.
type Place struct {
	GPU  gpu.UUID
	Slot Slot
}

// Weights of what an offer's choice is judged by, each greater than all that is
// below it can sum up to over a node.
const (
	lossUnit  = 1 << 32
	exactUnit = 1 << 16 // for a place that stands
	spareUnit = 1       // for an idle instance that stays
)

// Prefer chooses n of the available places, all of must among them, that can
// stand together and beside what is taken. It packs: the choice takes least of
// what could still be made on the GPUs (see the package comment for the
// measure). Of such choices it takes the one with most places that stand
// already, then the one that takes the room of the fewest other idle instances,
// then by rank, then with as much as can be on the GPU whose UUID is first, from
// left to right. No other choice is better in that order.
//
// A place that is taken itself needs no further room. If it is warm too it
// stands for whoever wants it and is the first choice. If not, its holder is
// about to end (or is the same pod's init container): it is the last choice.
//
// One call is about one resource, so all available places are of one profile.
// Prefer fails with gpu.ErrNoRoom where fewer than n can stand together, and
// with gpu.ErrInvalid for places of several profiles or of an unknown GPU and
// for n below the number of must. The order of the arguments plays no part.
func Prefer(offers []Offer, available, must []Place, n int) ([]Place, error) {
	if n < len(must) {
		return nil, fmt.Errorf("choose %d slots: %d must be among them: %w", n, len(must), gpu.ErrInvalid)
	}
	tables := make([]table, len(offers))
	for i := range offers {
		o := &offers[i]
		if o.Card == nil {
			return nil, fmt.Errorf("choose slots: nothing is known of %s: %w", o.GPU, gpu.ErrInvalid)
		}
		tables[i] = table{Offer: o, taken: slices.Clone(o.Taken), fit: make([]Slot, 0, 8)}
	}
	slices.SortFunc(tables, func(a, b table) int {
		return cmp.Or(cmp.Compare(a.Rank, b.Rank), cmp.Compare(a.GPU, b.GPU))
	})
	find := func(p Place) (*table, error) {
		for i := range tables {
			if tables[i].GPU == p.GPU {
				return &tables[i], nil
			}
		}
		return nil, fmt.Errorf("choose slots: %s is on a GPU that is not on offer: %w", ID(p.GPU, p.Slot), gpu.ErrInvalid)
	}
	out := make([]Place, 0, n)
	for _, p := range must {
		t, err := find(p)
		if err != nil {
			return nil, err
		}
		if slices.Contains(out, p) {
			return nil, fmt.Errorf("choose slots: %s must be there twice: %w", ID(p.GPU, p.Slot), gpu.ErrInvalid)
		}
		if !slices.Contains(t.taken, p.Slot) {
			if !t.Card.Fits(t.taken, p.Slot) {
				return nil, fmt.Errorf("choose slots: %s must be among them and cannot stand beside what is taken: %w", ID(p.GPU, p.Slot), gpu.ErrNoRoom)
			}
			t.taken = append(t.taken, p.Slot)
		}
		out = append(out, p)
	}
	var free, last []Place
	for _, p := range available {
		t, err := find(p)
		switch {
		case err != nil:
			return nil, err
		case p.Slot.Profile != available[0].Slot.Profile:
			return nil, fmt.Errorf("choose slots: %s and %s are different profiles: %w",
				ID(available[0].GPU, available[0].Slot), ID(p.GPU, p.Slot), gpu.ErrInvalid)
		case slices.Contains(must, p):
		case slices.Contains(t.taken, p.Slot):
			if slices.Contains(t.Warm, p.Slot) {
				free = append(free, p)
			} else {
				last = append(last, p)
			}
		case t.Card.Fits(t.taken, p.Slot) && !slices.Contains(t.fit, p.Slot):
			t.fit = append(t.fit, p.Slot)
		}
	}
	need := n - len(out)
	for i := range tables {
		for _, s := range tables[i].inside() {
			free = append(free, Place{tables[i].GPU, s})
		}
	}
	rank := func(u gpu.UUID) int { return slices.IndexFunc(tables, func(t table) bool { return t.GPU == u }) }
	warm := func(p Place) int {
		if slices.Contains(tables[rank(p.GPU)].Warm, p.Slot) {
			return 0
		}
		return 1
	}
	order := func(a, b Place) int {
		return cmp.Or(cmp.Compare(rank(a.GPU), rank(b.GPU)), CompareSlots(a.Slot, b.Slot))
	}
	slices.SortFunc(free, func(a, b Place) int { return cmp.Or(cmp.Compare(warm(a), warm(b)), order(a, b)) })
	slices.SortFunc(last, order)
	free, last = slices.Compact(free), slices.Compact(last)
	take := min(need, len(free))
	out, need = append(out, free[:take]...), need-take

	defer func() {
		for i := range tables {
			if p := tables[i].planner; p != nil {
				tables[i].Card.release(p)
			}
		}
	}()
	chosen, err := spread(tables, need)
	if err != nil {
		return nil, err
	}
	out, need = append(out, chosen...), need-len(chosen)

	if need > len(last) {
		return nil, fmt.Errorf("choose %d slots: only %d of those available can stand together: %w", n, len(out)+len(last), gpu.ErrNoRoom)
	}
	out = append(out, last[:need]...)
	slices.SortFunc(out, order)
	return out, nil
}

// table is an offer with what is chosen and known of it so far.
type table struct {
	*Offer
	taken []Slot // Taken, and those of must
	fit   []Slot // available, not taken, each of them fits beside what is taken
	// best[k] is what choosing k of fit is worth at best, none where so many do
	// not fit; it begins with what choosing none is worth.
	best    []int64
	planner *planner // of the search that best was found by; nil before
	splits  int      // the dim of GPU instances where the profile is split, or -1
	gis     []int
}

// inside takes those splits out of fit that lie in GPU instances which are
// taken anyway: they cost no room. Splits of one profile never clash.
func (t *table) inside() (out []Slot) {
	slices.SortFunc(t.fit, CompareSlots)
	rest := t.fit[:0]
	for _, s := range t.fit {
		if slices.ContainsFunc(t.taken, s.sameGI) {
			out = append(out, s)
		} else {
			rest = append(rest, s)
		}
	}
	t.fit = rest
	return out
}

// rate fills in best for up to n places.
func (t *table) rate(n int) error {
	c := t.Card
	var taken uint64
	for _, s := range t.taken {
		taken |= s.mask()
	}
	// What cannot stand beside what is taken goes in any case.
	idle := make([]Slot, 0, len(t.Warm))
	for _, s := range t.Warm {
		if c.Fits(t.taken, s) {
			idle = append(idle, s)
		}
	}
	w := c.memory + 1
	gaps := make([]int64, w*w)
	for a := 0; a < c.memory; a++ {
		for b := a + 1; b <= c.memory; b++ {
			gap := ones(b-a) << a
			sum := c.worth(taken|^gap) * lossUnit
			for _, s := range idle {
				if s.mask()&^gap == 0 {
					sum += spareUnit
				}
			}
			gaps[a*w+b] = sum
		}
	}
	t.splits = -1
	t.planner = c.planner(nil, nil)
	s := &t.planner.search
	s.reset(c.memory, gaps, w)
	most := min(n, len(t.fit))
	s.dims = append(s.dims, dim{n: most})
	worth := func(devices []Slot) (v int64) {
		for _, d := range devices {
			if slices.Contains(idle, d) {
				v += exactUnit
			}
		}
		return v
	}
	if len(t.fit) > 0 && t.fit[0].Profile.Compute != 0 {
		t.splits = 1
		var gis []Slot
		for _, d := range t.fit {
			if !slices.ContainsFunc(gis, d.sameGI) {
				gis = append(gis, d)
			}
		}
		s.dims = append(s.dims, dim{n: min(most, len(gis))})
		for _, gi := range gis {
			var in []Slot
			for _, d := range t.fit {
				if d.sameGI(gi) {
					in = append(in, d)
				}
			}
			// Those that stand come first: any number of them is a beginning of the list.
			slices.SortStableFunc(in, func(a, b Slot) int { return cmp.Compare(worth([]Slot{b}), worth([]Slot{a})) })
			for k := min(most, len(in)); k > 0; k-- {
				s.parts = append(s.parts, part{start: gi.Start, end: gi.Start + gi.Size, uses: []use{{0, k}, {1, 1}}, value: worth(in[:k]), devices: in[:k]})
			}
		}
	} else {
		uses := []use{{0, 1}}
		for i, d := range t.fit {
			s.parts = append(s.parts, part{start: d.Start, end: d.Start + d.Size, uses: uses, value: worth(t.fit[i : i+1]), devices: t.fit[i : i+1]})
		}
	}
	if err := s.prepare(); err != nil {
		return err
	}
	t.best = []int64{s.gap(0, c.memory)}
	t.gis = []int{0}
	base := c.tally(t.taken)
	for k := 1; k <= most; k++ {
		v, gis := int64(none), 0
		s.dims[0].left = k
		if t.splits < 0 {
			now := base
			now.add(c, c.index(t.fit[0].Profile), k-1)
			if !now.allows(c, c.index(t.fit[0].Profile)) {
				break
			}
			v = s.solve()
		} else {
			now, i := base, c.index(t.fit[0].Profile.GPUInstance())
			for g := 1; g <= min(k, s.dims[1].n) && now.allows(c, i); g++ {
				now.add(c, i, 1)
				s.dims[1].left = g
				if x := s.solve(); x > v {
					v, gis = x, g
				}
			}
		}
		if v == none {
			break
		}
		t.best, t.gis = append(t.best, v), append(t.gis, gis)
	}
	return nil
}

// choice is the best way to have some number of places on the GPUs from some
// one on: its worth, the ranks of its places, and how many are on the first.
type choice struct {
	value int64
	rank  int
	here  int
}

// spread chooses n places, or as many as there are, over all GPUs. What is on
// one GPU does not touch another, so that it is enough to know what each number
// of places is worth on each.
func spread(tables []table, n int) ([]Place, error) {
	if n == 0 {
		return nil, nil
	}
	// from[g][k]: the best k places on GPUs g and following.
	from := make([][]choice, len(tables)+1)
	from[len(tables)] = []choice{{}}
	for g := len(tables) - 1; g >= 0; g-- {
		t := &tables[g]
		if err := t.rate(n); err != nil {
			return nil, fmt.Errorf("choose slots on %s: %w", t.GPU, err)
		}
		after := from[g+1]
		most := min(n, len(t.best)-1+len(after)-1)
		from[g] = make([]choice, most+1)
		for k := range from[g] {
			first := true
			for here := min(k, len(t.best)-1); here >= 0 && k-here < len(after); here-- {
				rest := after[k-here]
				now := choice{t.best[here] - t.best[0] + rest.value, t.Rank*here + rest.rank, here}
				if first || now.value > from[g][k].value || now.value == from[g][k].value && now.rank < from[g][k].rank {
					from[g][k], first = now, false
				}
			}
		}
	}
	k := min(n, len(from[0])-1)
	var out []Place
	for g := range tables {
		t, here := &tables[g], from[g][k].here
		if here > 0 {
			t.planner.dims[0].left = here
			if t.splits > 0 {
				t.planner.dims[t.splits].left = t.gis[here]
			}
			t.planner.target(func(p *part) {
				for _, s := range p.devices {
					out = append(out, Place{t.GPU, s})
				}
			})
		}
		k -= here
	}
	return out, nil
}
