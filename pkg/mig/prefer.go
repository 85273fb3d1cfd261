// SPDX-License-Identifier: Apache-2.0

package mig

import (
	"cmp"
	"fmt"
	"math"
	"slices"

	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig/internal/fill"
)

// Offer is a GPU on which placements are on offer.
type Offer struct {
	GPU  gpu.UUID
	Card *Card
	// Pinned may not be destroyed: what allocations have, busy and foreign instances.
	// Warm exists. What is in Warm alone is idle and may be destroyed for another;
	// what is in both exists, may not be destroyed and may be given out.
	Pinned, Warm []Placement
	// Rank decides between GPUs that are as good as each other; less is better.
	Rank int
}

// Place is a placement of a GPU.
type Place struct {
	GPU       gpu.UUID
	Placement Placement
}

// Weights of what an offer's choice is judged by, each greater than all that is
// below it can sum up to over a node.
const (
	lossUnit  = 1 << 32
	exactUnit = 1 << 16 // for a place whose instance exists
	spareUnit = 1       // for an idle instance that stays
)

// Prefer chooses n of the available places, all of must among them, that can
// stand together and beside what is taken. It packs: the choice takes least of
// what could still be made on the GPUs (see the package comment for the
// measure). Of such choices it takes the one with most places whose instances exist
// already, then the one that takes the room of the fewest other idle instances,
// then by rank, then with as much as can be on the GPU whose UUID is first, from
// left to right. No other choice is better in that order.
//
// A place that is taken itself needs no more room. If it is warm too, its instance
// exists for any pod, and it is the first choice. If not, its holder is about to end (or
// is the same pod's init container), and it is the last choice.
//
// One call is about one resource, so all available places are of one profile.
// Prefer fails with gpu.ErrNoRoom where fewer than n can exist together, and
// with gpu.ErrInvalid for places of several profiles or of an unknown GPU and
// for n below the number of must. The order of the arguments plays no part.
func Prefer(offers []Offer, available, must []Place, n int) ([]Place, error) {
	steps := math.MaxInt
	return PreferWithin(&steps, offers, available, must, n)
}

// PreferWithin is Prefer that takes the steps of its search off a number, and fails with
// gpu.ErrNotSupported before it takes more. It is for tables that somebody else has written: one of
// a real card takes some hundred steps a GPU.
func PreferWithin(steps *int, offers []Offer, available, must []Place, n int) ([]Place, error) {
	if n < len(must) {
		return nil, fmt.Errorf("choose %d placements: %d must be among them: %w", n, len(must), gpu.ErrInvalid)
	}
	b := &budget{steps}
	most := 0
	for i := range offers {
		most = max(most, len(offers[i].Pinned)+len(offers[i].Warm))
	}
	if err := b.spend((len(offers) + most) * (1 + len(available))); err != nil { // to sort them
		return nil, err
	}
	ts, err := newTables(offers)
	if err != nil {
		return nil, err
	}
	out := make([]Place, 0, min(n, len(must)+len(available)))
	for _, p := range must {
		if slices.Contains(out, p) {
			return nil, fmt.Errorf("choose placements: %s must be there twice: %w",
				ID(p.GPU, p.Placement), gpu.ErrInvalid)
		}
		if err := ts.admit(p); err != nil {
			return nil, err
		}
		out = append(out, p)
	}
	free, last, err := ts.sort(available, must)
	if err != nil {
		return nil, err
	}
	take := min(n-len(out), len(free))
	out = append(out, free[:take]...)

	defer func() {
		for i := range ts {
			if s := ts[i].search; s != nil {
				s.Reset(0, nil, 1)
				ts[i].Card.searches.Put(s)
			}
		}
	}()
	chosen, err := spread(ts, n-len(out), b)
	if err != nil {
		return nil, err
	}
	out = append(out, chosen...)

	need := n - len(out)
	if need > len(last) {
		return nil, fmt.Errorf("choose %d placements: only %d of those available can stand together: %w",
			n, len(out)+len(last), gpu.ErrNoRoom)
	}
	out = append(out, last[:need]...)
	slices.SortFunc(out, ts.order)
	return out, nil
}

// table is an offer with what is chosen and known of it so far.
type table struct {
	*Offer
	taken []Placement // Pinned, and those of must
	fit   []Placement // available, not taken, each of them fits beside what is taken
	// best[k] is the value of the best choice of k of fit. It ends where more do not
	// fit, and begins with the value of choosing none.
	best   []int64
	search *fill.Search  // that best was found by; nil before
	holds  [][]Placement // the devices of each of its parts
	splits int           // the dim of GPU instances where the profile is split, or -1
	gis    []int
}

// tables are those of all offers, by rank.
type tables []table

func newTables(offers []Offer) (tables, error) {
	ts := make(tables, len(offers))
	for i := range offers {
		o := &offers[i]
		if o.Card == nil {
			return nil, fmt.Errorf("choose placements: nothing is known of %s: %w", o.GPU, gpu.ErrInvalid)
		}
		ts[i] = table{Offer: o, taken: slices.Clone(o.Pinned), fit: make([]Placement, 0, 8)}
	}
	slices.SortFunc(ts, func(a, b table) int {
		return cmp.Or(cmp.Compare(a.Rank, b.Rank), cmp.Compare(a.GPU, b.GPU))
	})
	return ts, nil
}

func (ts tables) rank(u gpu.UUID) int {
	return slices.IndexFunc(ts, func(t table) bool { return t.GPU == u })
}

// order compares places as the tables are ordered, and on a GPU from left to right.
func (ts tables) order(a, b Place) int {
	return cmp.Or(cmp.Compare(ts.rank(a.GPU), ts.rank(b.GPU)), ComparePlacements(a.Placement, b.Placement))
}

func (ts tables) find(p Place) (*table, error) {
	i := ts.rank(p.GPU)
	if i < 0 {
		return nil, fmt.Errorf("choose placements: %s is on a GPU that is not on offer: %w",
			ID(p.GPU, p.Placement), gpu.ErrInvalid)
	}
	return &ts[i], nil
}

// admit takes a place that must be among those chosen.
func (ts tables) admit(p Place) error {
	t, err := ts.find(p)
	if err != nil || slices.Contains(t.taken, p.Placement) {
		return err
	}
	if !t.Card.Fits(t.taken, p.Placement) {
		return fmt.Errorf("choose placements: %s must be among them and cannot stand beside what is taken: %w",
			ID(p.GPU, p.Placement), gpu.ErrNoRoom)
	}
	t.taken = append(t.taken, p.Placement)
	return nil
}

// sort tells the available places apart: free ones need no further room and come
// first, last ones are those whose holders are about to end, and all others that fit
// are noted in the tables.
func (ts tables) sort(available, must []Place) (free, last []Place, err error) {
	for _, p := range available {
		t, err := ts.find(p)
		switch {
		case err != nil:
			return nil, nil, err
		case p.Placement.Profile != available[0].Placement.Profile:
			return nil, nil, fmt.Errorf("choose placements: %s and %s are different profiles: %w",
				ID(available[0].GPU, available[0].Placement), ID(p.GPU, p.Placement), gpu.ErrInvalid)
		case slices.Contains(must, p):
		case slices.Contains(t.taken, p.Placement):
			if slices.Contains(t.Warm, p.Placement) {
				free = append(free, p)
			} else {
				last = append(last, p)
			}
		case t.Card.Fits(t.taken, p.Placement) && !slices.Contains(t.fit, p.Placement):
			t.fit = append(t.fit, p.Placement)
		}
	}
	for i := range ts {
		for _, s := range ts[i].inside() {
			free = append(free, Place{ts[i].GPU, s})
		}
	}
	cold := func(p Place) int {
		if slices.Contains(ts[ts.rank(p.GPU)].Warm, p.Placement) {
			return 0
		}
		return 1
	}
	slices.SortFunc(free, func(a, b Place) int { return cmp.Or(cmp.Compare(cold(a), cold(b)), ts.order(a, b)) })
	slices.SortFunc(last, ts.order)
	return slices.Compact(free), slices.Compact(last), nil
}

// inside removes from fit, and returns, the splits in GPU instances that are taken
// anyway: they cost no room. Splits of one profile never clash.
func (t *table) inside() (out []Placement) {
	slices.SortFunc(t.fit, ComparePlacements)
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

// budget is what a search may take.
type budget struct{ left *int }

func (b *budget) spend(steps int) error {
	if *b.left -= steps; *b.left < 0 {
		return fmt.Errorf("the search takes more steps than it may: %w", gpu.ErrNotSupported)
	}
	return nil
}

// rate fills in best for up to n places.
func (t *table) rate(n int, b *budget) error {
	c := t.Card
	// The gaps, and what each is worth.
	if err := b.spend((c.memory + 1) * (c.memory + 1) * (1 + len(t.Warm)) / 2); err != nil {
		return err
	}
	// What cannot exist beside what is taken goes in any case.
	idle := make([]Placement, 0, len(t.Warm))
	for _, s := range t.Warm {
		if c.Fits(t.taken, s) {
			idle = append(idle, s)
		}
	}
	t.search, _ = c.searches.Get().(*fill.Search)
	if t.search == nil {
		t.search = &fill.Search{}
	}
	s := t.search
	s.Reset(c.memory, t.gaps(idle), c.memory+1)
	t.parts(s, min(n, len(t.fit)), func(devices []Placement) (v int64) {
		for _, d := range devices {
			if slices.Contains(idle, d) {
				v += exactUnit
			}
		}
		return v
	})
	if !s.Prepare() {
		return errTooLarge
	}
	if err := b.spend(s.Effort()); err != nil {
		return err
	}
	t.solve(s)
	return nil
}

// gaps is what each run of memory slices that stays free is worth: gaps[a*w+b] the one
// from a up to, not including, b.
func (t *table) gaps(idle []Placement) []int64 {
	c := t.Card
	var taken uint64
	for _, s := range t.taken {
		taken |= s.mask()
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
	return gaps
}

// parts gives the search what it may choose from, most places at most: single places, or
// for splits a number of them in one GPU instance.
func (t *table) parts(s *fill.Search, most int, worth func([]Placement) int64) {
	s.Dims = append(s.Dims, fill.Dim{N: most})
	t.holds = make([][]Placement, 0, len(t.fit))
	t.splits = -1
	if len(t.fit) == 0 || t.fit[0].Profile.Compute == 0 {
		uses := []fill.Use{{Dim: 0, N: 1}}
		for i, d := range t.fit {
			one := t.fit[i : i+1]
			s.Parts = append(s.Parts, fill.Part{
				Start: d.Start, End: d.Start + d.Size, Uses: uses, Value: worth(one),
			})
			t.holds = append(t.holds, one)
		}
		return
	}
	t.splits = 1
	var gis []Placement
	for _, d := range t.fit {
		if !slices.ContainsFunc(gis, d.sameGI) {
			gis = append(gis, d)
		}
	}
	s.Dims = append(s.Dims, fill.Dim{N: min(most, len(gis))})
	for _, gi := range gis {
		var in []Placement
		for _, d := range t.fit {
			if d.sameGI(gi) {
				in = append(in, d)
			}
		}
		// Those that exist come first: any number of them is a beginning of the list.
		slices.SortStableFunc(in, func(a, b Placement) int {
			return cmp.Compare(worth([]Placement{b}), worth([]Placement{a}))
		})
		for k := min(most, len(in)); k > 0; k-- {
			s.Parts = append(s.Parts, fill.Part{
				Start: gi.Start, End: gi.Start + gi.Size,
				Uses: []fill.Use{{Dim: 0, N: k}, {Dim: 1, N: 1}}, Value: worth(in[:k]),
			})
			t.holds = append(t.holds, in[:k])
		}
	}
}

// solve finds the best value for each number of places, up to the most instances of the
// profile that the card allows.
func (t *table) solve(s *fill.Search) {
	c := t.Card
	t.best = []int64{s.Gap(0, c.memory)}
	t.gis = []int{0}
	base := c.tally(t.taken)
	for k := 1; k <= s.Dims[0].N; k++ {
		v, gis := int64(fill.None), 0
		s.Dims[0].Left = k
		if t.splits < 0 {
			now := base
			now.add(c, c.index(t.fit[0].Profile), k-1)
			if !now.allows(c, c.index(t.fit[0].Profile)) {
				return
			}
			v = s.Solve()
		} else {
			now, i := base, c.index(t.fit[0].Profile.GPUInstance())
			for g := 1; g <= min(k, s.Dims[1].N) && now.allows(c, i); g++ {
				now.add(c, i, 1)
				s.Dims[1].Left = g
				if x := s.Solve(); x > v {
					v, gis = x, g
				}
			}
		}
		if v == fill.None {
			return
		}
		t.best, t.gis = append(t.best, v), append(t.gis, gis)
	}
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
func spread(tables []table, n int, b *budget) ([]Place, error) {
	if n == 0 {
		return nil, nil
	}
	// from[g][k]: the best k places on GPUs g and following.
	from := make([][]choice, len(tables)+1)
	from[len(tables)] = []choice{{}}
	for g := len(tables) - 1; g >= 0; g-- {
		t := &tables[g]
		if err := t.rate(n, b); err != nil {
			return nil, fmt.Errorf("choose placements on %s: %w", t.GPU, err)
		}
		after := from[g+1]
		most := min(n, len(t.best)-1+len(after)-1)
		from[g] = make([]choice, most+1)
		for k := range from[g] {
			first := true
			for here := min(k, len(t.best)-1); here >= 0 && k-here < len(after); here-- {
				rest := after[k-here]
				now := choice{t.best[here] - t.best[0] + rest.value, t.Rank*here + rest.rank, here}
				was := &from[g][k]
				if first || now.value > was.value || now.value == was.value && now.rank < was.rank {
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
			t.search.Dims[0].Left = here
			if t.splits > 0 {
				t.search.Dims[t.splits].Left = t.gis[here]
			}
			t.search.Target(func(part int) {
				for _, s := range t.holds[part] {
					out = append(out, Place{t.GPU, s})
				}
			})
		}
		k -= here
	}
	return out, nil
}
