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
	// mostSteps is how many members the search may try. Beyond that, grow adds one GPU after the
	// other. 16 GPUs have 12,870 sets of 8. Sets with the same first members share the steps to
	// these, so it takes at most 24,310 steps for any graph.
	mostSteps = 25000
	// maskBits is the most GPUs in the pool of the exact search, since a set is a word.
	maskBits = 64
)

// Request asks for a set of GPUs.
type Request struct {
	// Available are the GPUs that may be chosen. Must are part of the result, even if Available
	// does not have them. No GPU may be twice in either list.
	Available, Must []gpu.UUID
	// N is the size of the result, including Must.
	N int
	// Free are all free GPUs of the node, even those that Available does not have: a kubelet that
	// aligns NUMA nodes offers only a part. What is left for later requests is judged on Free.
	// Nil means Available.
	Free []gpu.UUID
}

// Choose returns the best set for a request, in the node's order. The package comment defines the
// best. GPUs that the graph does not know count as unlinked and come last.
//
// It fails if there are fewer GPUs than N, if N is below the number of Must, or if a GPU is named
// twice. The error wraps gpu.ErrInvalid.
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

// Spare returns free, sorted by how well single GPUs can be taken: first the one whose loss
// costs later requests the least, then the one whose loss costs the least after that, and so on.
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

// weight is how near two GPUs are, as numbers that can be added up over a set.
type weight struct {
	// link is NVLink bandwidth in MB/s, or in lanes if any speed is not known.
	link int64
	// near is nearness: NUMA nodes in units of 2^numaShift, then their distance in units of
	// 2^distanceShift, then Level in units of 1.
	near int64
}

// With these shifts, the sums over all pairs of 160 GPUs do not overflow into the next part.
const (
	distanceShift = 16
	numaShift     = 38
)

// maxDistance is the greatest value in the firmware's table of NUMA nodes (SLIT).
const maxDistance = 255

func (w weight) plus(o weight) weight  { return weight{w.link + o.link, w.near + o.near} }
func (w weight) minus(o weight) weight { return weight{w.link - o.link, w.near - o.near} }

func (w weight) compare(o weight) int {
	return cmp.Or(cmp.Compare(w.link, o.link), cmp.Compare(w.near, o.near))
}

// weigh returns the weight of a pair.
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

// score is the value of a set. Choose compares scores.
type score struct {
	// parts is the number of parts that NVLink connects the set into.
	parts int
	// in is the weight of all pairs inside the set. cost is the sum of its members' weights with
	// all of the pool. The weight of all pairs outside is that of all pairs of the pool, minus
	// cost, plus in: the pairs inside were subtracted twice. So of two sets with the same in, the
	// one with the lower cost leaves more outside.
	in, cost weight
}

// compare returns a positive number if s is better than o.
func (s score) compare(o score) int {
	return cmp.Or(cmp.Compare(o.parts, s.parts), s.compareSums(o))
}

func (s score) compareSums(o score) int {
	return cmp.Or(
		cmp.Compare(s.in.link, o.in.link), cmp.Compare(o.cost.link, s.cost.link),
		cmp.Compare(s.in.near, o.in.near), cmp.Compare(o.cost.near, s.cost.near),
	)
}

// pool is the GPUs that a request names, each once.
type pool struct {
	uuids   []gpu.UUID // in the node's order, then unknown ones by name
	weights [][]weight // zero for a GPU with itself
	reach   []weight   // the sum of each GPU's weights
}

func (g *Graph) pool(lists ...[]gpu.UUID) *pool {
	if g == nil {
		g = &Graph{} // a graph without GPUs
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

// search tries each set of must and need more GPUs of open, and returns the best. It tries them
// in ascending order, so that the first of equal sets wins. It returns false if that takes too
// many steps.
//
// A set grows by one GPU at a time, and the search keeps what each further GPU would add: all
// sums are over pairs. Parts are counted only for sets whose sums could win. A GPU is skipped if
// its twin is not in the set yet; real machines have many twins. The worst graph of 16 GPUs takes
// half a millisecond.
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

// twins reports whether two GPUs can replace each other in each set: they are equally near to
// each third GPU.
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

// searching is the state of one search. A set has a bit for each GPU, by its index in the pool.
type searching struct {
	*pool
	open  []int
	links []uint64
	// twin[c] is the twin of open[c] that comes before it, as a set, or 0 if there is none. Of
	// two sets that differ only in these, the one with the first of them wins. So a GPU is tried
	// only once its twin is in the set.
	twin []uint64
	// sums[d][c] is the weight of open[c] with the set that lacks d members.
	sums [][]weight
	// fewest is a lower bound of the number of parts.
	fewest int
	// left is how many more members may be tried. The search has failed if it is below 0.
	left int

	found bool
	score score
	best  uint64
}

// step tries each GPU of open[from:] as the next member of a set that lacks need members.
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
		return // better in no sum, and fewer parts are impossible
	}
	sc.parts = s.parts(set)
	if !s.found || sc.compare(s.score) > 0 {
		s.found, s.score, s.best = true, sc, set
	}
}

// parts counts the parts that NVLink connects a set into.
func (s *searching) parts(set uint64) int {
	n := 0
	for ; set != 0; n++ {
		set &^= s.part(set)
	}
	return n
}

// part returns the part of a set that has its first GPU.
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

// fewestParts returns a lower bound of the number of parts. It takes the parts of all GPUs of
// must and open: first those with GPUs of must, then the largest, until they have enough GPUs.
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

// grow adds the GPU that gives the best set, until the set is large enough. It starts with must,
// or else with each GPU in turn, and returns the best of these sets. That may not be the best of
// all.
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
		// part is the part of each member, named by one of its GPUs; -1 for other GPUs.
		part = slices.Repeat([]int{-1}, len(p.uuids))
		// with is the weight of each GPU with the set.
		with = make([]weight, len(p.uuids))
		// seen[part] is the last candidate that was found to have a link to the part.
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
