// SPDX-License-Identifier: Apache-2.0

package placer

import (
	"cmp"
	"maps"
	"math"
	"slices"
	"strings"

	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
	"example.com/gpu-agent/pkg/timeslice"
)

// trial is a node on which pods are tried out, with the agent's own packing.
type trial struct {
	gpus  []space
	at    map[string]int // as in the room
	kinds map[string]piece.Kind
	// steps are shared with those that it is copied to.
	steps *steps
	// least remembers how much a device of a resource spoils at least.
	least map[string]int
}

// trial copies the room.
func (r *room) trial() *trial {
	return &trial{gpus: shared(r.gpus), at: r.at, kinds: r.kinds, steps: newSteps(r.taken)}
}

// fits reports whether a pod gets all that it asks for if no other pod comes. The kubelet asks
// container by container, and for the resources of one container in any order.
func (r *room) fits(p *Pod) bool {
	tries := maxTries
	return r.try(p, 0, r.trial(), map[string][]string{}, &tries)
}

// maxTries bounds the orders that are tried. A container that asks for one resource has
// one order.
const maxTries = 64

// try tries the containers from one on, in each order of their resources.
func (r *room) try(p *Pod, from int, t *trial, again map[string][]string, tries *int) bool {
	if from == len(p.Containers) {
		*tries--
		return true
	}
	c := &p.Containers[from]
	var numbered, placed []string
	for _, name := range sorted(c.Requests) {
		switch kind, ours := t.kinds[name]; {
		case !ours || c.Requests[name] <= 0:
		case kind == piece.KindPlacement:
			placed = append(placed, name)
		default:
			numbered = append(numbered, name) // they do not compete with each other
		}
	}
	ok := true
	permute(placed, func(order []string) bool {
		next, reuse := t.clone(), maps.Clone(again)
		for _, name := range slices.Concat(numbered, order) {
			if ok = next.container(c, name, reuse); !ok {
				return false
			}
		}
		ok = r.try(p, from+1, next, reuse, tries)
		return ok && *tries > 0
	})
	return ok
}

func (t *trial) clone() *trial {
	c := t.anew()
	c.steps = t.steps
	return c
}

// anew is clone with all steps left.
func (t *trial) anew() *trial {
	r := room{gpus: t.gpus, at: t.at, kinds: t.kinds, taken: t.steps.taken}
	return r.trial()
}

// maxSteps bounds what is done to try one pod on one node, about a millisecond. A step is a device
// or a placement that is looked at. On a node of eight GPUs with a MIG device in each place, a pod
// of eight containers takes 10,000. No real node uses up all; a trial that does finds no room. So
// the cost of a question is bounded for each node.
const maxSteps = 200_000

// steps are those of one trial.
type steps struct {
	left  int
	taken *int // in all, by the books
}

func newSteps(taken *int) *steps {
	if taken == nil {
		taken = new(int)
	}
	return &steps{maxSteps, taken}
}

// spend takes some, and reports whether there were as many left.
func (s *steps) spend(n int) bool {
	*s.taken += min(n, max(s.left, 0))
	s.left -= n
	return s.left >= 0
}

// permute calls yield with each order of names until it returns false.
func permute(names []string, yield func([]string) bool) bool {
	if len(names) < 2 {
		return yield(names)
	}
	for i := range names {
		rest := slices.Concat(names[:i], names[i+1:])
		if !permute(rest, func(order []string) bool { return yield(slices.Concat(names[i:i+1], order)) }) {
			return false
		}
	}
	return true
}

// container gives a container its devices of a resource: first those that init containers
// before it had, as the kubelet does.
func (t *trial) container(c *Container, resource string, again map[string][]string) bool {
	n := c.Requests[resource]
	had := again[resource]
	must := had[:min(n, len(had))]
	got := must
	if n > len(must) {
		var ok bool
		if got, ok = t.take(resource, n, must); !ok {
			return false
		}
	}
	if c.Init {
		again[resource] = slices.Compact(slices.Sorted(slices.Values(slices.Concat(had, got))))
	} else {
		again[resource] = slices.DeleteFunc(slices.Clone(had), func(id string) bool { return slices.Contains(got, id) })
	}
	return true
}

// lends reports whether a GPU has devices of a guaranteed resource that spot pods may have.
func (t *trial) lends(resource string) bool {
	return slices.ContainsFunc(t.gpus, func(s space) bool {
		return s.spot != 0 && (s.resource == resource || len(s.places[resource]) > 0)
	})
}

// take chooses devices as the agent would, and takes them. A guaranteed request gets devices of the GPUs that it would
// get without spot pods. Among equal GPUs, and on each, those that spot pods have come last.
func (t *trial) take(resource string, n int, must []string) (ids []string, ok bool) {
	if t.kinds[resource] == piece.KindPlacement {
		return t.takePlacements(resource, n, must)
	}
	if len(must) > 0 {
		if ids, ok = t.takeBeside(resource, n, must, true); !ok && t.lends(resource) {
			return t.takeBeside(resource, n, must, false)
		}
		return ids, ok
	}
	// What is free is counted and not listed: a crowd of small pods is tried for each of its pods.
	var of []timeslice.Free
	var at []int
	free := 0
	for i := range t.gpus {
		s := &t.gpus[i]
		if s.resource == resource && s.free > 0 && !(s.single && n > 1) {
			of, at = append(of, timeslice.Free{GPU: s.uuid, N: s.free, Rank: s.rank}), append(at, i)
			free += s.free
		}
	}
	if n > free || !t.steps.spend(len(t.gpus)+n) {
		return nil, false
	}
	switch t.kinds[resource] {
	case piece.KindUnits:
		g := timeslice.Fullest(of, n)
		if g < 0 {
			return nil, false
		}
		for i := range of {
			if of[i].N == of[g].N && min(idle(t.gpus, at[i]), n) > min(idle(t.gpus, at[g]), n) {
				g = i
			}
		}
		ids = t.lowest(ids, at[g], n)
	case piece.KindReplica:
		chosen := timeslice.Fewest(of, n)
		if len(chosen) < n {
			return nil, false
		}
		for _, g := range chosen {
			ids = t.lowest(ids, at[g], 1)
		}
	case piece.KindWhole, piece.KindPlacement:
		fallthrough
	default: // which GPUs they are makes no difference to the number that is left
		slices.SortStableFunc(at, func(a, b int) int { return last(idle(t.gpus, a) == 0, idle(t.gpus, b) == 0) })
		for _, i := range at {
			if m := min(t.gpus[i].free, n-len(ids)); m > 0 {
				ids = t.lowest(ids, i, m)
			}
		}
	}
	return ids, true
}

// lowest takes the n lowest free devices of a GPU, and appends them to ids. Those that spot pods have come last.
func (t *trial) lowest(ids []string, gpu, n int) []string {
	s := &t.gpus[gpu]
	s.alter()
	if s.spot != 0 && !s.inSpot {
		return t.lowestOverSpot(ids, gpu, n)
	}
	for number := s.lowest; n > 0; number++ {
		t.steps.spend(1)
		if s.lowest = number + 1; !s.held[number] {
			s.holdNumber(number, s.inSpot)
			ids, n = append(ids, s.id(number)), n-1
		}
	}
	return ids
}

// lowestOverSpot is lowest of a GPU whose room is offered to spot pods, too.
func (t *trial) lowestOverSpot(ids []string, gpu, n int) []string {
	s, theirs := &t.gpus[gpu], &t.gpus[t.gpus[gpu].spot]
	for _, free := range []func(int) bool{
		func(number int) bool { return !theirs.held[number] },
		func(number int) bool { return theirs.yielding[number] },
		func(int) bool { return true },
	} {
		for number := 0; number < s.total && n > 0; number++ {
			t.steps.spend(1)
			if !s.held[number] && free(number) {
				s.holdNumber(number, false)
				theirs.holdNumber(number, false)
				theirs.yielded(number)
				ids, n = append(ids, s.id(number)), n-1
			}
		}
	}
	return ids
}

// takeBeside is take of a container that gets some devices again.
func (t *trial) takeBeside(resource string, n int, must []string, onlyIdle bool) (ids []string, ok bool) {
	total := 0
	for i := range t.gpus {
		total += t.gpus[i].total
	}
	if n > total || !t.steps.spend(total) {
		return nil, false
	}
	var free []string
	rank := map[gpu.UUID]int{}
	mark := markOf(resource)
	must = unmarked(must, mark)
	for i := range t.gpus {
		s := &t.gpus[i]
		rank[s.uuid] = s.rank
		theirs := s.held
		if onlyIdle && s.spot != 0 {
			theirs = t.gpus[s.spot].held
		}
		if s.resource == resource && s.single && n > 1 {
			if slices.ContainsFunc(must, func(id string) bool { return strings.HasPrefix(id, string(s.uuid)+"::") }) {
				return nil, false
			}
			continue
		}
		for number := range s.held {
			if s.resource == resource && !s.held[number] && !theirs[number] {
				free = append(free, strings.TrimSuffix(s.id(number), mark))
			}
		}
	}
	var err error
	switch t.kinds[resource] {
	case piece.KindUnits:
		ids, err = timeslice.PreferUnits(free, must, n, rank)
	case piece.KindReplica:
		ids, err = timeslice.PreferReplicas(free, must, n, rank)
	case piece.KindWhole, piece.KindPlacement:
		fallthrough
	default:
		if len(must)+len(free) < n {
			return nil, false
		}
		ids = slices.Concat(must, free)[:n]
	}
	if err != nil {
		return nil, false
	}
	ids = marked(ids, mark)
	t.hold(ids...)
	return ids, true
}

// unmarked returns IDs without a mark at their end.
func unmarked(ids []string, mark string) []string {
	out := slices.Clone(ids)
	for i := range out {
		out[i] = strings.TrimSuffix(out[i], mark)
	}
	return out
}

// marked returns IDs with a mark at their end.
func marked(ids []string, mark string) []string {
	out := slices.Clone(ids)
	for i := range out {
		out[i] += mark
	}
	return out
}

// hold takes devices.
func (t *trial) hold(ids ...string) {
	r := room{gpus: t.gpus, at: t.at}
	for _, id := range ids {
		r.hold(id)
	}
}

// takePlacements chooses MIG devices.
func (t *trial) takePlacements(resource string, n int, must []string) (ids []string, ok bool) {
	mark := markOf(resource)
	var offers []mig.Offer
	var free, given []mig.Place
	for i := range t.gpus {
		s := &t.gpus[i]
		if s.card == nil || s.inSpot != (mark != "") {
			continue
		}
		o := mig.Offer{GPU: s.uuid, Card: s.card, Pinned: s.standing, Warm: s.warm, Rank: s.rank}
		if !s.onDemand {
			for _, of := range s.places {
				o.Pinned = slices.Concat(o.Pinned, of)
				o.Warm = slices.Concat(o.Warm, of)
			}
		}
		offers = append(offers, o)
		for _, p := range s.places[resource] {
			free = append(free, mig.Place{GPU: s.uuid, Placement: p})
		}
		for _, p := range s.standing {
			if slices.Contains(must, mig.ID(s.uuid, p)+mark) {
				given = append(given, mig.Place{GPU: s.uuid, Placement: p})
			}
		}
	}
	choose := func(free []mig.Place) ([]mig.Place, error) {
		left := t.steps.left
		defer func() { t.steps.spend(t.steps.left - left) }()
		return mig.PreferWithin(&left, offers, free, given, n)
	}
	chosen, err := choose(free)
	if err != nil {
		return nil, false
	}
	if mark == "" && t.lends(resource) {
		if spared, err := choose(t.sparing(free, chosen, n == len(given)+1)); err == nil {
			chosen = spared
		}
	}
	for _, p := range chosen {
		ids = append(ids, mig.ID(p.GPU, p.Placement)+mark)
	}
	t.hold(ids...)
	for i := range t.gpus {
		s := &t.gpus[i]
		s.warm = slices.DeleteFunc(slices.Clone(s.warm),
			func(p mig.Placement) bool { return slices.Contains(s.standing, p) })
	}
	return ids, true
}

// sparing returns the free places on the GPUs of those that were chosen. For a request of one place it returns only
// those that the fewest MIG devices of spot pods overlap. The agent knows besides which pod has them, and since when.
func (t *trial) sparing(free, chosen []mig.Place, one bool) (out []mig.Place) {
	least := math.MaxInt
	for _, p := range free {
		if !slices.ContainsFunc(chosen, func(c mig.Place) bool { return c.GPU == p.GPU }) {
			continue
		}
		n := 0
		if one {
			n = t.overlaps(p)
		}
		if n < least {
			out, least = nil, n
		}
		if n == least {
			out = append(out, p)
		}
	}
	return out
}

// overlaps returns how many MIG devices of spot pods have room of a place.
func (t *trial) overlaps(p mig.Place) (n int) {
	s := &t.gpus[t.at[string(p.GPU)]]
	if s.spot == 0 {
		return 0
	}
	for _, q := range t.gpus[s.spot].keeping() {
		theirs := !slices.Contains(s.standing, q)
		if theirs && (s.onDemand && !s.card.Fits([]mig.Placement{q}, p.Placement) || !s.onDemand && q == p.Placement) {
			n++
		}
	}
	return n
}

// after is what is left of the room once those who are about to have some of it do.
func (r *room) after() *trial {
	if r.settled == nil {
		r.settled = r.trial()
		for _, e := range r.pending {
			r.settled.expect(e)
		}
	}
	return r.settled
}

// expect is what is left once seats have theirs, too: those of groups, and then those of amounts. A seat
// that finds no room then is passed over.
func (r *room) expect() *trial {
	if r.expected != nil {
		return r.expected
	}
	r.expected = r.after()
	for i, s := range r.seats {
		if s.owner.amounts && r.grouped == nil {
			r.grouped = r.expected
		}
		if i == 0 {
			r.expected = r.expected.anew()
		}
		r.seat(s)
	}
	r.grouped = cmp.Or(r.grouped, r.expected)
	r.rest = r.expected.steps.left
	return r.expected
}

// seat expects a seat after all others, if it has room.
func (r *room) seat(s *seat) {
	t := r.expected
	if s.sum > 1 || len(s.Containers) > 1 || t == r.grouped { // it may have only some of its room
		t = t.clone()
	}
	if t.pod(&s.Pod) {
		t.least = nil
		r.expected, r.stands = t, append(slices.Clip(r.stands), s)
	}
}

// lacks reports whether a seat has no room.
func (r *room) lacks(s *seat) bool {
	r.expect()
	return !slices.Contains(r.stands, s)
}

// pod gives a pod all that it asks for.
func (t *trial) pod(p *Pod) bool {
	again := map[string][]string{}
	for i := range p.Containers {
		c := &p.Containers[i]
		for _, name := range sorted(c.Requests) {
			if _, ours := t.kinds[name]; c.Requests[name] > 0 && (!ours || !t.container(c, name, again)) {
				return false
			}
		}
	}
	return true
}

// expect gives a pod what there is room for. The rest of what it asks for is not expected.
func (t *trial) expect(e *ask) {
	again := map[string][]string{}
	for i := range e.Containers {
		c := &e.Containers[i]
		for _, name := range sorted(c.Requests) {
			if _, ours := t.kinds[name]; ours && c.Requests[name] > 0 {
				t.container(c, name, again)
			}
		}
	}
}

// joined is the room with a seat more, nil where it has to be worked out anew. A hold of thousands of
// seats gets them one after the other, and dozens of them are on one node: what is left beside those
// that it has need not be found again for each, where the new one is the last.
func (r *room) joined(s *seat, last bool) *room {
	if r == nil || r.expected == nil || !last {
		return nil
	}
	next := &room{gpus: r.gpus, at: r.at, passed: r.passed, has: r.has, taken: r.taken, kinds: r.kinds,
		pending: r.pending, seats: append(slices.Clip(r.seats), s),
		settled: r.settled, grouped: r.grouped, expected: r.expected.anew(), stands: r.stands}
	next.expected.steps.left = r.rest // what answers have taken since is not of this
	if next.seat(s); !s.owner.amounts {
		next.grouped = next.expected
	}
	next.rest = next.expected.steps.left
	return next
}

// score is how bad a choice a node is: what a pod spoils there beyond what it takes, and
// then how much room there is of what it asks for. Of memory units it spoils what is left over on the
// GPU with the fewest, and for MIG devices the room of other placements at the place where that is least.
func (t *trial) score(p *Pod) (spoilt, left int) {
	for i := range p.Containers {
		for name, n := range p.Containers[i].Requests {
			kind, ours := t.kinds[name]
			if !ours || n <= 0 {
				continue
			}
			for j := range t.gpus {
				if s := &t.gpus[j]; s.resource == name {
					left += s.free
				} else if _, has := s.places[name]; has {
					for _, of := range s.places {
						left += len(of)
					}
				}
			}
			switch kind {
			case piece.KindUnits:
				spoilt += t.remnant(name, n)
			case piece.KindPlacement:
				spoilt += n * t.loss(name)
			case piece.KindWhole, piece.KindReplica:
			}
		}
	}
	return spoilt, left
}

// noRemnant is more than any remnant.
const noRemnant = 1 << 20

// remnant is what is left of the fullest GPU that has n free units.
func (t *trial) remnant(resource string, n int) int {
	least := -1
	for i := range t.gpus {
		s := &t.gpus[i]
		if s.resource == resource && s.free >= n && (least < 0 || s.free-n < least) {
			least = s.free - n
		}
	}
	if least < 0 { // those who are about to have it may leave some yet
		return noRemnant
	}
	return least
}

// loss is how many memory slices of free placements are lost for others if a device of a resource
// is put where that is least.
func (t *trial) loss(resource string) int {
	if least, known := t.least[resource]; known {
		return least
	}
	least := 1 << 20
	for i := range t.gpus {
		s := &t.gpus[i]
		for _, p := range s.places[resource] {
			if !s.onDemand {
				least = min(least, p.Size)
				continue
			}
			if !t.steps.spend(1) {
				return least
			}
			lost, looked := s.of.loss(s.standing, p)
			t.steps.spend(looked)
			least = min(least, lost)
		}
	}
	if t.least == nil {
		t.least = map[string]int{}
	}
	t.least[resource] = least
	return least
}

// loss is a placement beside what stands on a card.
type loss struct {
	standing uint64 // by number
	place    mig.Placement
}

// maxLosses bounds what is remembered of a card.
const maxLosses = 10_000

// loss is how many memory slices of placements are lost for others when p is taken, and how many steps
// it took to find out. Cards of a kind are in few states, and the same states come back all over a fleet.
func (c *cardOf) loss(standing []mig.Placement, p mig.Placement) (lost, looked int) {
	key, named := loss{place: p}, true
	for _, o := range standing {
		i := slices.Index(c.card.Placements(), o)
		named = named && i >= 0 && i < 64 // split compute instances have no number
		key.standing |= 1 << max(i, 0)
	}
	if lost, known := c.losses[key]; known && named {
		return lost, 0
	}
	beside := append(slices.Clone(standing), p)
	for _, q := range c.card.Placements() {
		if c.card.Fits(standing, q) && !c.card.Fits(beside, q) {
			lost += q.Size
		}
	}
	if len(c.losses) >= maxLosses {
		clear(c.losses)
	}
	if named {
		c.losses[key] = lost
	}
	return lost, len(c.card.Placements()) * (1 + len(standing))
}
