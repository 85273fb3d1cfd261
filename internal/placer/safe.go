// SPDX-License-Identifier: Apache-2.0

package placer

import (
	"cmp"
	"math"
	"slices"

	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/pkg/mig"
)

// bound decides whether pods get their room beside each other for any choice that the agent makes. It
// has a number of steps for each family.
type bound struct {
	*room
	steps *steps
}

// holds reports whether the pod and those beside it are sure to have their room.
func (b bound) holds(p *ask, families map[string]bool, beside []*ask) bool {
	if p.pinned || slices.ContainsFunc(beside, func(e *ask) bool { return e.pinned }) {
		return false
	}
	for family := range families {
		var items []item
		for _, e := range beside {
			items = append(items, b.items(&e.Pod, family)...)
		}
		b.steps = newSteps(b.taken)
		if fixed := len(items); !b.safe(family, append(items, b.items(&p.Pod, family)...), fixed) {
			return false
		}
	}
	return true
}

// item is a request of one container: n devices of a resource, of a MIG profile always one.
type item struct {
	resource string
	n        int
}

// items are the requests of a pod for what competes in a family, as they are if no device
// is used twice.
func (b bound) items(p *Pod, family string) (out []item) {
	for i := range p.Containers {
		requests := p.Containers[i].Requests
		for _, name := range sorted(requests) {
			n := requests[name]
			switch {
			case n <= 0 || b.family(name) != family:
			case b.kinds[name] == piece.KindPlacement:
				for range n {
					out = append(out, item{name, 1})
				}
			default:
				out = append(out, item{name, n})
			}
		}
	}
	return out
}

// safe reports whether each request gets its room for any choice that the agent makes for the others,
// in any order. The first fixed requests are of pods that are on the node already, or of seats. One of
// these that has no room even alone is left out: it has its devices, and its pod's status does not name
// them yet, or it is lost in any case.
//
// A search that needs more than maxSteps returns false.
func (b bound) safe(family string, items []item, fixed int) bool {
	type request struct {
		item
		fixed bool
	}
	seen := map[request]bool{}
	for i, it := range items {
		of := request{it, i < fixed}
		if seen[of] {
			continue // the others are the same
		}
		seen[of] = true
		if !b.steps.spend(len(items) + len(b.gpus)) {
			return false
		}
		others := slices.Concat(items[:i], items[i+1:])
		take := b.total(family, others)
		most, alone := b.spare(family, it, others, take)
		if b.steps.left < 0 {
			return false
		}
		if !alone && i < fixed {
			continue
		}
		if !alone || take > most {
			return false
		}
	}
	return true
}

// spare is how much others may take in all, without any way to keep a request from its room. alone is
// false where there is no room without them. They ask for take in all, so a search may end there.
func (b bound) spare(family string, it item, others []item, take int) (most int, alone bool) {
	if family == "mig" {
		return b.sparePlacements(it.resource, others, take)
	}
	switch b.kinds[it.resource] {
	case piece.KindUnits:
		return b.spareUnits(it, others)
	case piece.KindReplica:
		return b.spareReplicas(it, others)
	case piece.KindWhole, piece.KindPlacement:
	}
	free := 0
	for i := range b.gpus {
		if b.gpus[i].resource == it.resource {
			free += b.gpus[i].free
		}
	}
	return free - it.n, free >= it.n
}

// total is what requests take, in the measure of spare.
func (b bound) total(family string, items []item) (sum int) {
	for _, it := range items {
		if family == "mig" {
			sum += b.size(it.resource)
		} else {
			sum += it.n
		}
	}
	return sum
}

// spareUnits is one less than what keeps r units off every GPU. A GPU on which they fit
// must lose all its free units but r-1.
//
// An empty GPU must lose more. Think of the GPU to which the agent turned last, with a request for x
// units. Since the agent takes the fullest GPU that fits, x did not fit on the others that were less
// full before: each had fewer than x free. (Or the agent turned to it with more than the last one had.)
// Held units can become free at any moment, which changes that order. So this counts for empty GPUs
// alone.
func (b bound) spareUnits(it item, others []item) (most int, alone bool) {
	var fit []*space
	for i := range b.gpus {
		if s := &b.gpus[i]; s.resource == it.resource && s.free >= it.n {
			fit = append(fit, s)
		}
	}
	if len(fit) == 0 {
		return 0, false
	}
	// One of several requests for as much is enough.
	sizes := map[int]bool{}
	for _, x := range others {
		sizes[x.n] = true
	}
	if !b.steps.spend(len(fit) * len(fit) * len(sizes)) {
		return 0, false
	}
	least := func(last *space, x int) (sum int) {
		for _, s := range fit {
			need := s.free - it.n + 1
			switch {
			case s == last:
				need = max(need, x)
			case s.free == s.total:
				need = max(need, min(s.free-x+1, last.free+1))
			}
			sum += need
		}
		return sum
	}
	block := math.MaxInt
	for _, last := range fit {
		for x := range sizes {
			block = min(block, least(last, x))
		}
	}
	return block - 1, true
}

// spareReplicas is how much others may take if they use up the GPUs with the fewest free
// replicas first. Each takes at most one of a GPU.
func (b bound) spareReplicas(it item, others []item) (most int, alone bool) {
	var free []int
	for i := range b.gpus {
		if s := &b.gpus[i]; s.resource == it.resource && s.free > 0 {
			free = append(free, s.free)
		}
	}
	slices.Sort(free)
	if len(free) < it.n {
		return 0, false
	}
	block := 0
	for _, f := range free[:len(free)-it.n+1] {
		if f > len(others) {
			return math.MaxInt, true
		}
		block += f
	}
	return block - 1, true
}

// size is how many memory slices a MIG device takes at most.
func (b bound) size(resource string) (n int) {
	for i := range b.gpus {
		for _, p := range b.gpus[i].all[resource] {
			n = max(n, p.Size)
		}
	}
	return n
}

// sparePlacements is one less than the memory slices that others must take to keep a MIG
// device off every GPU, or more than take if that is enough to know.
func (b bound) sparePlacements(resource string, others []item, take int) (most int, alone bool) {
	counts := map[string]int{}
	for _, o := range others {
		counts[o.resource]++
	}
	block := 0
	for i := range b.gpus {
		s := &b.gpus[i]
		if len(s.places[resource]) == 0 {
			continue
		}
		if alone = true; block > take {
			break
		}
		block += s.block(resource, counts, take-block+1, b.steps)
	}
	return block - 1, alone
}

// block is the fewest memory slices that others, a number of each resource, must take of the GPU until
// none of a resource's placements fits; most if it is not fewer.
func (s *space) block(resource string, others map[string]int, most int, steps *steps) int {
	wanted := s.places[resource]
	if !s.onDemand { // devices that exist exclude nobody
		if others[resource] < len(wanted) {
			return most
		}
		return min(len(wanted)*wanted[0].Size, most)
	}
	c := cover{space: s, best: most, steps: steps}
	for _, name := range sorted(others) {
		if of := s.all[name]; len(of) > 0 {
			c.pieces = append(c.pieces, of...)
			// One without a place takes no room, and counts for what the card allows.
			c.kinds = append(c.kinds, kind{
				mig.Placement{Profile: of[0].Profile, Start: -1}, of[0].Size, min(others[name], maxCount)})
		}
	}
	slices.SortFunc(c.pieces, func(a, b mig.Placement) int { return cmp.Compare(a.Size, b.Size) })
	c.places(wanted, slices.Clone(s.standing), 0)
	c.counts(wanted, slices.Clone(s.standing), 0, 0)
	return c.best
}

// maxCount is more MIG devices than a card has room for.
const maxCount = 16

// cover looks for the cheapest way to block placements. Others may take any place of the card: what
// stands there now can go at any time.
type cover struct {
	*space
	pieces []mig.Placement
	kinds  []kind
	best   int
	steps  *steps
}

// step takes one, and reports whether there was one left.
func (c *cover) step() bool { return c.steps.spend(1 + len(c.pieces)) }

type kind struct {
	piece     mig.Placement
	cost, max int
}

// places covers the first placement that still fits in each way that there is.
func (c *cover) places(wanted, standing []mig.Placement, cost int) {
	if !c.step() {
		return
	}
	for len(wanted) > 0 && !c.card.Fits(standing, wanted[0]) {
		wanted = wanted[1:]
	}
	if len(wanted) == 0 {
		c.best = min(c.best, cost)
		return
	}
	w := wanted[0]
	for _, p := range c.pieces {
		if cost+p.Size >= c.best {
			return // they are sorted
		}
		if p.Start < w.Start+w.Size && w.Start < p.Start+p.Size {
			c.places(wanted[1:], append(standing, p), cost+p.Size)
		}
	}
}

// counts uses up what the card allows besides room: how many of a profile, and engines.
func (c *cover) counts(wanted, standing []mig.Placement, from, cost int) {
	if cost >= c.best || !c.step() {
		return
	}
	if !slices.ContainsFunc(wanted, func(p mig.Placement) bool { return c.card.Fits(standing, p) }) {
		c.best = cost
		return
	}
	for i := from; i < len(c.kinds); i++ {
		k := &c.kinds[i]
		if k.max > 0 {
			k.max--
			c.counts(wanted, append(standing, k.piece), i, cost+k.cost)
			k.max++
		}
	}
}
