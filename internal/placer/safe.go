// SPDX-License-Identifier: Apache-2.0

package placer

import (
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
// in any order. The first fixed requests are of pods that are on the node already. One of these that
// has no room even alone is left out: it has its devices, and its pod's status does not name them yet,
// or it is lost in any case.
//
// MIG devices of several profiles are never safe beside each other: the place of one decides how
// many of another fit. A search that needs more than maxSteps returns false.
func (b bound) safe(family string, items []item, fixed int) bool {
	if family == "mig" {
		return b.alike(items)
	}
	type request struct {
		item
		fixed bool
	}
	seen, sum := map[request]bool{}, 0
	for _, it := range items {
		sum += it.n
	}
	for i, it := range items {
		of := request{it, i < fixed}
		if seen[of] {
			continue // the others are the same
		}
		seen[of] = true
		if !b.steps.spend(len(items) + len(b.gpus)) {
			return false
		}
		most, alone := b.spare(it, slices.Concat(items[:i], items[i+1:]))
		if b.steps.left < 0 {
			return false
		}
		if !alone && i < fixed {
			continue
		}
		if !alone || sum-it.n > most {
			return false
		}
	}
	return true
}

// alike reports whether MIG devices are all of one profile, and there is room for so many. Then it makes
// no difference to the others which placement the agent chooses for one of them.
func (b bound) alike(items []item) bool {
	resource, most := items[0].resource, 0
	if slices.ContainsFunc(items, func(o item) bool { return o.resource != resource }) {
		return false
	}
	for i := range b.gpus {
		s := &b.gpus[i]
		n, apart := s.together(s.places[resource], b.steps)
		if !apart {
			return false
		}
		most += n
	}
	return len(items) <= most
}

// together is how many of a profile's placements fit at a time, and whether they lie apart, so that
// taking one leaves the others.
func (s *space) together(places []mig.Placement, steps *steps) (n int, apart bool) {
	if !s.onDemand { // devices that exist exclude no others
		return len(places), true
	}
	standing := slices.Clone(s.standing)
	for i, p := range places {
		over := func(q mig.Placement) bool { return p.Start < q.Start+q.Size && q.Start < p.Start+p.Size }
		if !steps.spend(1+len(standing)+len(places)) || slices.ContainsFunc(places[i+1:], over) {
			return 0, false
		}
		if s.card.Fits(standing, p) {
			standing = append(standing, p)
			n++
		}
	}
	return n, true
}

// spare is how many devices others may take, all together, with none of them able to keep a
// request from its room. Alone is false where there is no room without them.
func (b bound) spare(it item, others []item) (most int, alone bool) {
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
