// SPDX-License-Identifier: Apache-2.0

package topology

import (
	"cmp"
	"fmt"
	"math/bits"
	"slices"

	"example.com/gpu-agent/pkg/gpu"
)

const (
	// mostSteps is how many members the search may try before it is given up for
	// adding one GPU after the other. 16 GPUs have 12,870 sets of 8, whatever the
	// graph, and the ways to them share all but their last step: at most 24,310.
	mostSteps = 25000
	// maskBits is how many GPUs fit a set of the exact search.
	maskBits = 64
)

// Request asks for a set of GPUs.
type Request struct {
	// Available is what may be chosen. Must is part of the answer, whether or not
	// Available names it too. No GPU is twice in either.
	Available, Must []gpu.UUID
	// N is how many are asked for, those of Must included.
	N int
	// Free is all free GPUs of the node, whether or not Available has them: a kubelet
	// that aligns NUMA nodes offers only a part. What is left for later requests is
	// judged on Free. Nil means Available.
	Free []gpu.UUID
}

// Choose returns the best set for a request, in the node's order (see the
// package comment for what best is). GPUs that the graph does not know count as
// unlinked and come last.
//
// Every error wraps gpu.ErrInvalid: fewer GPUs than N, N below the number of
// Must, or one GPU twice.
func (g *Graph) Choose(r Request) ([]gpu.UUID, error) {
	for _, list := range [][]gpu.UUID{r.Available, r.Must} {
		if u, twice := repeated(list); twice {
			return nil, fmt.Errorf("choose %d GPUs: %q is named twice: %w", r.N, u, gpu.ErrInvalid)
		}
	}
	if r.N < len(r.Must) {
		return nil, fmt.Errorf("choose %d GPUs: %d must be among them: %w", r.N, len(r.Must), gpu.ErrInvalid)
	}
	if r.N == 0 {
		return nil, nil
	}
	p := g.pool(r.Available, r.Must, r.Free)
	var must, open []int
	for i, u := range p.uuids {
		if slices.Contains(r.Must, u) {
			must = append(must, i)
		} else if slices.Contains(r.Available, u) {
			open = append(open, i)
		}
	}
	if have := len(must) + len(open); r.N > have {
		return nil, fmt.Errorf("choose %d GPUs: %d are free: %w", r.N, have, gpu.ErrInvalid)
	}
	set, ok := p.search(must, open, r.N-len(must))
	if !ok {
		set = p.grow(must, open, r.N-len(must))
	}
	slices.Sort(set)
	out := make([]gpu.UUID, len(set))
	for i, at := range set {
		out[i] = p.uuids[at]
	}
	return out, nil
}

// Spare returns free in the order in which single GPUs are best broken up: first
// the one whose loss costs later requests least, then the one whose loss costs
// least after that, and so on.
func (g *Graph) Spare(free []gpu.UUID) []gpu.UUID {
	p := g.pool(free)
	out := make([]gpu.UUID, 0, len(p.uuids))
	gone := make([]bool, len(p.uuids))
	for range p.uuids {
		best := -1
		for i := range p.uuids {
			if !gone[i] && (best < 0 || p.reach[i].compare(p.reach[best]) < 0) {
				best = i
			}
		}
		gone[best] = true
		out = append(out, p.uuids[best])
		for i := range p.uuids {
			p.reach[i] = p.reach[i].minus(p.weights[best][i])
		}
	}
	return out
}

// weight is how near two GPUs are, in numbers that add up over a set.
type weight struct {
	// link is NVLink bandwidth, in MB/s or, where a speed is not known, in lanes.
	link int64
	// near is in units of 2^numaShift for a NUMA node; below these, in units of
	// 2^distanceShift for its distance, and in steps of Level.
	near int64
}

// numaShift and distanceShift leave room for all pairs of 160 GPUs.
const (
	distanceShift = 16
	numaShift     = 38
)

// maxDistance is the most that the firmware's table of NUMA nodes (SLIT) can say.
const maxDistance = 255

func (w weight) plus(o weight) weight  { return weight{w.link + o.link, w.near + o.near} }
func (w weight) minus(o weight) weight { return weight{w.link - o.link, w.near - o.near} }

func (w weight) compare(o weight) int {
	return cmp.Or(cmp.Compare(w.link, o.link), cmp.Compare(w.near, o.near))
}

// weigh says what a pair adds to a set.
func (p Pair) weigh(byLanes bool) weight {
	var w weight
	if p.Linked() {
		w.link = int64(p.MBps)
		if byLanes {
			w.link = int64(max(p.NVLink, 1))
		}
	}
	switch p.NUMA {
	case Same:
		w.near = 2 << numaShift
	case Unknown:
		w.near = 1 << numaShift
	case Different:
		if p.Distance > 0 {
			w.near = int64(maxDistance-p.Distance) << distanceShift
		}
	}
	switch p.Level {
	case LevelSwitch:
		w.near += 5
	case LevelSwitches:
		w.near += 4
	case LevelHost:
		w.near += 3
	case LevelNode:
		w.near += 2
	case LevelUnknown:
		w.near++
	}
	return w
}

// score is what a set is judged by.
type score struct {
	// parts is the number of sets that NVLink leaves it in.
	parts int
	// in is the weight of all pairs inside it. cost is what its members add up to
	// with all of the pool. What is left outside is what all pairs of the pool
	// weigh, minus cost, plus in, since the pairs inside were taken off twice. So of
	// two sets with the same in the one that costs less leaves more.
	in, cost weight
}

// compare is above 0 where s is better than o.
func (s score) compare(o score) int {
	return cmp.Or(cmp.Compare(o.parts, s.parts), s.compareSums(o))
}

func (s score) compareSums(o score) int {
	return cmp.Or(
		cmp.Compare(s.in.link, o.in.link), cmp.Compare(o.cost.link, s.cost.link),
		cmp.Compare(s.in.near, o.in.near), cmp.Compare(o.cost.near, s.cost.near),
	)
}

// pool is the GPUs that a choice is made from and judged on, each once.
type pool struct {
	uuids   []gpu.UUID // in the node's order; after these, unknown ones by name
	weights [][]weight // 0 of one with itself
	reach   []weight   // the sum of weights of each
}

func (g *Graph) pool(lists ...[]gpu.UUID) *pool {
	if g == nil {
		g = &Graph{} // which knows no GPU
	}
	p := &pool{uuids: slices.Concat(lists...)}
	place := func(u gpu.UUID) int {
		if i, ok := g.at[u]; ok {
			return i
		}
		return len(g.pairs)
	}
	slices.SortFunc(p.uuids, func(a, b gpu.UUID) int {
		return cmp.Or(cmp.Compare(place(a), place(b)), cmp.Compare(a, b))
	})
	p.uuids = slices.Compact(p.uuids)
	n := len(p.uuids)
	p.weights, p.reach = make([][]weight, n), make([]weight, n)
	cells := make([]weight, n*n)
	stranger := Pair{}.weigh(g.byLanes)
	for i := range n {
		p.weights[i] = cells[i*n : (i+1)*n]
		at := place(p.uuids[i])
		for j := range n {
			if i == j {
				continue
			}
			w := stranger
			if to := place(p.uuids[j]); max(at, to) < len(g.weights) {
				w = g.weights[at][to]
			}
			p.weights[i][j] = w
			p.reach[i] = p.reach[i].plus(w)
		}
	}
	return p
}

// search looks at every set of must and need of open, in ascending order, so
// that of equal ones the first stays. It reports false where there are too many.
func (p *pool) search(must, open []int, need int) ([]int, bool) {
	if len(p.uuids) > maskBits {
		return nil, false
	}
	s := &searching{
		pool: p, open: open, left: mostSteps,
		links: make([]uint64, len(p.uuids)), twin: make([]uint64, len(open)), sums: make([][]weight, need+1),
	}
	for i := range p.uuids {
		for j := range p.uuids {
			if p.weights[i][j].link > 0 {
				s.links[i] |= 1 << j
			}
		}
	}
	for c, o := range open {
		for i := c - 1; i >= 0 && s.twin[c] == 0; i-- {
			if p.twins(open[i], o) {
				s.twin[c] = 1 << open[i]
			}
		}
	}
	sums := make([]weight, (need+1)*len(open))
	for d := range s.sums {
		s.sums[d] = sums[d*len(open) : (d+1)*len(open)]
	}
	var start score
	var set uint64
	for _, m := range must {
		for rest := set; rest != 0; rest &= rest - 1 {
			start.in = start.in.plus(p.weights[m][bits.TrailingZeros64(rest)])
		}
		start.cost = start.cost.plus(p.reach[m])
		set |= 1 << m
		for c, o := range open {
			s.sums[need][c] = s.sums[need][c].plus(p.weights[m][o])
		}
	}
	s.best = set
	if need > 0 {
		s.fewest = s.fewestParts(set, need)
		s.step(0, need, set, start)
		if s.left < 0 {
			return nil, false
		}
	}
	out := make([]int, 0, len(must)+need)
	for rest := s.best; rest != 0; rest &= rest - 1 {
		out = append(out, bits.TrailingZeros64(rest))
	}
	return out, true
}

// twins says that two GPUs can stand for each other in every set.
func (p *pool) twins(a, b int) bool {
	if p.reach[a] != p.reach[b] {
		return false
	}
	for x := range p.uuids {
		if x != a && x != b && p.weights[a][x] != p.weights[b][x] {
			return false
		}
	}
	return true
}

// searching is the state of one search. Sets are bits by place in the pool.
type searching struct {
	*pool
	open  []int
	links []uint64
	// twin is the GPU before open[c] that can stand for it, 0 for none. Of two sets
	// that differ only in these the one with the first of them is the answer, so
	// that a GPU is tried only once its twin is in the set.
	twin []uint64
	// sums[d][c] is what open[c] weighs with the set that lacks d members.
	sums [][]weight
	// fewest is a number of parts that no set can go below.
	fewest int
	// left is how many more members may be tried; below 0 the search has failed.
	left int

	found bool
	score score
	best  uint64
}

// step tries all of open from there on as the next member of a set that lacks
// need of them.
func (s *searching) step(from, need int, set uint64, sum score) {
	sums := s.sums[need]
	for c := from; c <= len(s.open)-need; c++ {
		at := s.open[c]
		if s.twin[c]&^set != 0 {
			continue
		}
		if s.left--; s.left < 0 {
			return
		}
		next := score{in: sum.in.plus(sums[c]), cost: sum.cost.plus(s.reach[at])}
		if need == 1 {
			s.judge(set|1<<at, next)
			continue
		}
		below := s.sums[need-1]
		for i := c + 1; i < len(s.open); i++ {
			below[i] = sums[i].plus(s.weights[at][s.open[i]])
		}
		s.step(c+1, need-1, set|1<<at, next)
	}
}

func (s *searching) judge(set uint64, sc score) {
	if s.found && s.score.parts == s.fewest && sc.compareSums(s.score) <= 0 {
		return // whatever its parts are
	}
	sc.parts = s.parts(set)
	if !s.found || sc.compare(s.score) > 0 {
		s.found, s.score, s.best = true, sc, set
	}
}

// parts counts the sets that NVLink leaves a set in.
func (s *searching) parts(set uint64) int {
	n := 0
	for ; set != 0; n++ {
		set &^= s.part(set)
	}
	return n
}

// part is the first of the parts of a set.
func (s *searching) part(set uint64) uint64 {
	all, edge := uint64(0), set&-set
	for edge != 0 {
		all |= edge
		reached := uint64(0)
		for ; edge != 0; edge &= edge - 1 {
			reached |= s.links[bits.TrailingZeros64(edge)]
		}
		edge = reached & set &^ all
	}
	return all
}

// fewestParts takes the parts of all GPUs at hand, first those that must is in,
// then the largest, until they have as many GPUs as are asked for.
func (s *searching) fewestParts(must uint64, need int) int {
	rest := must
	for _, o := range s.open {
		rest |= 1 << o
	}
	n := 0
	var others []int
	for rest != 0 {
		part := s.part(rest)
		rest &^= part
		if part&must != 0 {
			n++
			need -= bits.OnesCount64(part &^ must)
		} else {
			others = append(others, bits.OnesCount64(part))
		}
	}
	slices.Sort(others)
	for i := len(others) - 1; i >= 0 && need > 0; i-- {
		n++
		need -= others[i]
	}
	return n
}

// grow adds the GPU that makes the best of a set until it is large enough,
// beginning with must, or else with each GPU in turn. The best of these sets need
// not be the best of all.
func (p *pool) grow(must, open []int, need int) []int {
	if len(must) > 0 {
		set, _ := p.growFrom(must, open, need)
		return set
	}
	var best []int
	var bestScore score
	for _, first := range open {
		if set, sc := p.growFrom([]int{first}, open, need-1); best == nil || sc.compare(bestScore) > 0 {
			best, bestScore = set, sc
		}
	}
	return best
}

func (p *pool) growFrom(start, open []int, need int) ([]int, score) {
	var (
		set []int
		sum score
		// part names the part of each member by one of its GPUs; -1 for non-members.
		part = slices.Repeat([]int{-1}, len(p.uuids))
		// with is what each weighs with the set.
		with = make([]weight, len(p.uuids))
		// seen[name] is the last candidate that was found to touch the part.
		seen = slices.Repeat([]int{-1}, len(p.uuids))
	)
	try := func(c int) score {
		next := score{parts: sum.parts + 1, in: sum.in.plus(with[c]), cost: sum.cost.plus(p.reach[c])}
		for _, m := range set {
			if p.weights[c][m].link > 0 && seen[part[m]] != c {
				seen[part[m]] = c
				next.parts--
			}
		}
		for _, m := range set {
			seen[part[m]] = -1
		}
		return next
	}
	add := func(c int) {
		sum = try(c)
		part[c] = c
		for _, m := range set {
			if old := part[m]; p.weights[c][m].link > 0 && old != c {
				for _, o := range set {
					if part[o] == old {
						part[o] = c
					}
				}
			}
		}
		set = append(set, c)
		for i := range with {
			with[i] = with[i].plus(p.weights[c][i])
		}
	}
	for _, c := range start {
		add(c)
	}
	for range need {
		best, bestScore := -1, score{}
		for _, c := range open {
			if part[c] >= 0 {
				continue
			}
			if sc := try(c); best < 0 || sc.compare(bestScore) > 0 {
				best, bestScore = c, sc
			}
		}
		add(best)
	}
	return set, sum
}

func repeated(list []gpu.UUID) (gpu.UUID, bool) {
	for i, u := range list {
		if slices.Contains(list[:i], u) {
			return u, true
		}
	}
	return "", false
}
