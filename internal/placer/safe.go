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
//
// The agent chooses devices when the kubelet asks for them, and the kubelet takes pods in any order. A
// pod that has ended may also have left room that the API does not show yet. So for each request there is a
// bound: the least that other requests must take in all to leave no room for this one. The request is safe
// if all others together ask for less.
//
//   - Memory units: to keep r units from a GPU with f free ones takes f-r+1 of them, on each GPU where
//     r would fit. An empty GPU counts for more (see spareUnits).
//   - Replicas: a request for n of them needs n GPUs. To keep one from a GPU takes all its free
//     replicas, and each other request takes at most one of a GPU.
//   - Whole GPUs: to keep n of f free ones from a request takes f-n+1.
//   - MIG devices on demand: others must take all placements that the profile could have at a time, or
//     use up what else the card allows, such as its media engines. Each of the others counts for as
//     many of them as one of its profile can take.
//
// For a spot pod beside guaranteed ones there is no bound: the agent may give these any of its room.
//
// Once all pods of a node have reported, the bound is not needed.
//
// It cannot judge a pinned pod: one with init containers that ask for GPUs, or with split compute
// instances. The packing alone places such a pod, and others that compete with it wait until it has
// reported. If another pod ends in the same second, the agent may choose other devices for the
// pod's first request than the packing did, and refuse its second.
//
// Without the bound, a node would take the next pod only when the last one has reported. Then the last
// of 22 pods on three nodes would run at least a third later (internal/fleet, TestCrowds).
type bound struct {
	*room
	steps *steps
}

// holds reports whether the pod and those beside it are sure to have their room.
func (b bound) holds(p *ask, families map[string]bool, beside []*ask) bool {
	if p.pinned || slices.ContainsFunc(beside, func(e *ask) bool { return e.pinned }) {
		return false
	}
	if spot, _ := p.tiers(); spot {
		firm := func(e *ask) bool { return !e.spotOnly() }
		if firm(p) || slices.ContainsFunc(beside, firm) {
			return false // what is guaranteed may take any of its room
		}
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
// Where that takes more than maxSteps, it returns false.
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
		most, take, alone := b.spare(it, slices.Concat(items[:i], items[i+1:]))
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

// spare is how much others may take in all, without any way to keep a request from its room, and how much
// they take. alone is false where there is no room without them.
func (b bound) spare(it item, others []item) (most, take int, alone bool) {
	for _, o := range others {
		take += o.n
	}
	switch b.kinds[it.resource] {
	case piece.KindUnits:
		most, alone = b.spareUnits(it, others)
	case piece.KindReplica:
		most, alone = b.spareReplicas(it, others)
	case piece.KindPlacement:
		return b.sparePlacements(it.resource, others)
	case piece.KindWhole:
		free := 0
		for i := range b.gpus {
			if b.gpus[i].resource == it.resource {
				free += b.gpus[i].free
			}
		}
		most, alone = free-it.n, free >= it.n
	}
	return most, take, alone
}

// spareUnits is one less than what keeps r units off every GPU. A GPU on which they fit
// must lose all its free units but r-1.
//
// An empty GPU must lose more. Think of the GPU to which the agent turned last, with a request for x
// units. Since the agent takes the fullest GPU that fits, x did not fit on the others that were less
// full before: each had fewer than x free. (Or the agent turned to it with more than the last one had.)
// Held units can become free at any moment, which changes that order. So this counts for empty GPUs
// alone. For spot pods it does not count while guaranteed pods lend devices: the agent gives those last.
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
	lent := slices.ContainsFunc(b.gpus, func(s space) bool { return s.resource == it.resource && s.lentFree > 0 })
	least := func(last *space, x int) (sum int) {
		for _, s := range fit {
			need := s.free - it.n + 1
			switch {
			case s == last:
				need = max(need, x)
			case s.free == s.total && !lent:
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
		if s := &b.gpus[i]; s.resource == it.resource && s.free > 0 && !(s.single && it.n > 1) {
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

// sparePlacements counts the placements that a profile can have at a time. Each other device takes
// as many of them as one of its profile can at worst, for any place that the agent gives it.
func (b bound) sparePlacements(resource string, others []item) (most, take int, alone bool) {
	worst := map[string]int{}
	for _, o := range others {
		worst[o.resource] = 0
	}
	free := 0
	for i := range b.gpus {
		s := &b.gpus[i]
		apart := s.apart(s.places[resource])
		for name := range worst {
			if len(apart) > 0 && b.steps.spend(1+len(s.standing)+len(s.all[name])*len(apart)) {
				worst[name] = max(worst[name], s.costs(apart, s.all[name], name == resource))
			}
		}
		free += mig.Whole * len(apart)
	}
	for _, o := range others {
		take += worst[o.resource]
	}
	return free - 1, take, free > 0
}

// apart are those of a profile's free placements that do not overlap: as many as there is room for at a time.
func (s *space) apart(places []mig.Placement) (out []mig.Placement) {
	for _, p := range places {
		if !s.onDemand || !slices.ContainsFunc(out, func(o mig.Placement) bool { return overlap(o, p) }) {
			out = append(out, p)
		}
	}
	return out
}

// costs is how much one of other placements takes at most of some that do not overlap: of the room for them, or
// of what else the card allows of them. One of them is mig.Whole. What stands now can go at any time, so the
// other may be anywhere.
func (s *space) costs(apart, others []mig.Placement, same bool) (most int) {
	if !s.onDemand && same {
		return mig.Whole
	} else if !s.onDemand || len(others) == 0 { // a device that exists excludes no other
		return 0
	}
	for _, q := range others {
		n := 0
		for _, p := range apart {
			if overlap(p, q) {
				n += mig.Whole
			}
		}
		most = max(most, n)
	}
	return max(most, len(apart)*s.card.Uses(s.standing, others[0].Profile, apart[0].Profile))
}

// overlap reports whether two placements need the same memory slices.
func overlap(p, q mig.Placement) bool { return p.Start < q.Start+q.Size && q.Start < p.Start+p.Size }
