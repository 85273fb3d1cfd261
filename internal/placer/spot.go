// SPDX-License-Identifier: Apache-2.0

package placer

import (
	"slices"
	"strings"

	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/pkg/mig"
)

// A node may offer the room of a GPU a second time, to spot pods, which ask for resources of their own and give
// the room back when a guaranteed pod is given it. The books keep two spaces of such a GPU: what guaranteed pods
// can have, as if there were no spot pods, and what spot pods can have beside both. What a guaranteed pod takes
// is taken from both spaces, and what a spot pod takes from the second alone.
//
// A guaranteed pod gets the GPUs that it would get without spot pods, and there room that no spot pod has, if there is
// any. Otherwise the agent has spot pods yield. For memory units and whole GPUs, all answers to guaranteed pods are
// therefore as without spot pods. For MIG devices, the agent's choice of places on a GPU goes by the spot pods that
// have them, and by their age, which the books do not know. So a pod with several requests may get other places there.
//
// A spot pod waits while guaranteed pods that compete with it have not reported their devices. It gets no room of
// the open seats of groups, whose pods are about to come, but that of amounts: those may never be used.

// spotMark ends the ID of a device that a spot pod has: it is the same device as a guaranteed pod's of that ID,
// and need not be held twice.
const spotMark = " spot"

// SpotDevice returns the ID in Pod.Devices of a device that a pod has in the spot tier.
func SpotDevice(id string) string { return id + spotMark }

// deviceOf returns a device's ID in Pod.Devices, by the resource that it was given as.
func deviceOf(resource, id string) string {
	if _, spot := piece.OfSpot(resource); spot {
		return SpotDevice(id)
	}
	return id
}

// markOf returns what ends the IDs of a resource's devices in Pod.Devices.
func markOf(resource string) string { return deviceOf(resource, "") }

// tiers reports whether a pod asks for anything in the spot tier, and in the guaranteed one.
func (a *ask) tiers() (spot, guaranteed bool) {
	for _, name := range a.names {
		if _, is := piece.OfSpot(name); is {
			spot = true
		} else {
			guaranteed = true
		}
	}
	return spot, guaranteed
}

// spotOnly reports whether a pod asks for something, and for nothing in the guaranteed tier.
func (a *ask) spotOnly() bool {
	spot, guaranteed := a.tiers()
	return spot && !guaranteed
}

// spotSpace returns what spot pods can have of a GPU, beside what is taken of the other space.
func (n *node) spotSpace(of *space, g *gpunode.GPU, open bool, gone map[string]bool) space {
	s := space{own: true, inSpot: true, uuid: of.uuid, rank: of.rank, kind: of.kind, resource: g.Spot.Resource,
		total: of.total, held: slices.Clone(of.held), unheld: of.free, most: g.Spot.Total,
		onDemand: of.onDemand, of: of.of, card: of.card}
	for number := range g.Spot.Lent.All() {
		if open && number < s.total && s.held[number] {
			if s.lent == nil {
				s.lent = map[int]bool{}
			}
			s.held[number], s.lent[number] = false, true
			s.unheld, s.lentFree = s.unheld+1, s.lentFree+1
		}
	}
	for number := range g.Spot.Used.All() {
		if !gone[s.id(number)] {
			s.holdNumber(number, true)
		}
	}
	for number := range g.Spot.Yielding.All() {
		if number < s.total && !gone[s.id(number)] {
			s.yield(number, !of.held[number])
		}
	}
	s.free = min(s.unheld, s.most)
	if !of.kind.InMIG() {
		return s
	}
	s.places, s.all = map[string][]mig.Placement{}, map[string][]mig.Placement{}
	s.standing, s.warm = slices.Clone(of.standing), slices.Clone(of.warm)
	for _, text := range g.Spot.LentPlacements {
		if p, ok := s.read(text); open && ok && slices.Contains(s.standing, p) {
			if s.lentPlaces == nil {
				s.lentPlaces = map[mig.Placement]bool{}
			}
			s.lentPlaces[p] = true
		}
	}
	s.standing = slices.DeleteFunc(s.standing, func(p mig.Placement) bool { return s.lentPlaces[p] })
	freed := map[mig.Placement]bool{}
	for text := range goneOf(gone, g.UUID) {
		if p, ok := s.read(text); ok {
			freed[p] = true
		}
	}
	for i, text := range slices.Concat(g.Spot.UsedPlacements, g.Spot.YieldingPlacements) {
		p, ok := s.read(text)
		if !ok || gone[SpotDevice(mig.ID(s.uuid, p))] {
			continue
		}
		if i >= len(g.Spot.UsedPlacements) {
			s.yieldingPlaces = append(s.yieldingPlaces, p)
		}
		if !slices.Contains(s.standing, p) {
			s.standing = append(s.standing, p)
		}
	}
	for _, o := range g.Spot.Offers {
		if o.Resource == "" || s.of == nil {
			continue
		}
		s.places[o.Resource], s.all[o.Resource] = nil, s.of.profiles[o.Profile]
		for _, at := range o.Placements {
			p, ok := s.read(o.Profile + "@" + at)
			if open && ok && (slices.Contains(o.Free, at) || len(gone) > 0 && s.opens(g, p, freed)) {
				s.places[o.Resource] = append(s.places[o.Resource], p)
			}
		}
	}
	s.narrow()
	return s
}

// goneOf returns the placements of a GPU among devices that are gone, in either tier.
func goneOf(gone map[string]bool, uuid string) map[string]bool {
	out := map[string]bool{}
	for id := range gone {
		if text, of := strings.CutPrefix(strings.TrimSuffix(id, spotMark), uuid+"::"); of {
			out[text] = true
		}
	}
	return out
}

// read reads a placement; false where the GPU's card has none such, or is not known.
func (s *space) read(text string) (mig.Placement, bool) {
	if s.of == nil {
		return mig.Placement{}, false
	}
	return s.of.read(text)
}

// holdNumber notes that a device with a number is held, of a spot space by a spot pod or a guaranteed one.
func (s *space) holdNumber(number int, bySpot bool) {
	switch {
	case number < 0 || number >= s.total || s.held[number]:
		return
	case s.lent[number] && !bySpot:
		return // spot pods may have it all the same
	case s.lent[number]:
		s.lentFree--
	}
	s.alter()
	s.held[number] = true
	if !s.inSpot {
		s.free--
		return
	}
	s.unheld--
	if bySpot {
		s.most = max(0, s.most-1)
	}
	s.free = min(s.unheld, s.most)
}

// yield notes that a spot pod is to give a device back, or has done so. No other spot pod can be given it, but it is none
// of the most that spot pods may have. free is true if no guaranteed pod has it.
func (s *space) yield(number int, free bool) {
	if s.yielding == nil {
		s.yielding = map[int]bool{}
	}
	if s.yielding[number] {
		return
	}
	s.yielding[number] = true
	if free {
		s.yieldingFree++
	}
	if s.lent[number] && !s.held[number] {
		s.lentFree--
	}
	if !s.held[number] {
		s.held[number] = true
		s.unheld--
	}
}

// yielded notes that a guaranteed pod gets a device that may be one that a spot pod gives back.
func (s *space) yielded(number int) {
	if s.yielding[number] {
		s.yieldingFree--
	}
}

// holdPlacement notes that a MIG device is held, of a spot space by a spot pod or a guaranteed one.
func (s *space) holdPlacement(p mig.Placement, bySpot bool) {
	if s.lentPlaces[p] && !bySpot {
		return // spot pods may have it all the same
	}
	if !slices.Contains(s.standing, p) {
		s.alter()
		s.standing = append(s.standing, p)
		s.narrow()
	}
}

// idle returns how many of a GPU's free devices no spot pod has. What one is to give back counts as idle.
func idle(gpus []space, i int) int {
	if s := &gpus[i]; s.spot != 0 && !s.inSpot {
		return gpus[s.spot].unheld - gpus[s.spot].lentFree + gpus[s.spot].yieldingFree
	}
	return gpus[i].free
}

// yields returns how many devices spot pods would lose at least if a pod came.
func (t *trial) yields(p *Pod) (n int) {
	for i := range p.Containers {
		for name, asked := range p.Containers[i].Requests {
			if _, ours := t.kinds[name]; ours && asked > 0 {
				n += t.lacksIdle(name, asked)
			}
		}
	}
	return n
}

// lacksIdle returns how many of the devices of a request spot pods have at least. Memory units come from the GPU that
// the pod would get without spot pods.
func (t *trial) lacksIdle(resource string, n int) int {
	most, lent := 0, false
	fullest := -1
	for i := range t.gpus {
		s := &t.gpus[i]
		if s.resource != resource && s.places[resource] == nil {
			continue
		}
		lent = lent || s.spot != 0
		switch {
		case s.kind.InMIG():
			most += len(t.idlePlaces(s, resource))
		case !s.kind.Together():
			most += idle(t.gpus, i)
		case s.free < n || fullest >= 0 && s.free > t.gpus[fullest].free:
		case fullest < 0 || s.free < t.gpus[fullest].free:
			fullest, most = i, idle(t.gpus, i)
		default:
			most = max(most, idle(t.gpus, i))
		}
	}
	if !lent {
		return 0
	}
	return max(0, n-most)
}

// idlePlaces returns the free placements of a resource that have their room beside those of spot pods, too.
func (t *trial) idlePlaces(s *space, resource string) []mig.Placement {
	places := s.places[resource]
	if s.spot == 0 || s.inSpot {
		return places
	}
	beside := t.gpus[s.spot].keeping()
	return slices.DeleteFunc(slices.Clone(places), func(p mig.Placement) bool {
		return s.onDemand && !s.card.Fits(beside, p) || !s.onDemand && slices.Contains(beside, p)
	})
}

// keeping returns the MIG devices that stand there without those that spot pods are to give back.
func (s *space) keeping() []mig.Placement {
	if len(s.yieldingPlaces) == 0 {
		return s.standing
	}
	return slices.DeleteFunc(slices.Clone(s.standing),
		func(p mig.Placement) bool { return slices.Contains(s.yieldingPlaces, p) })
}
