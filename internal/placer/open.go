// SPDX-License-Identifier: Apache-2.0

package placer

import (
	"cmp"
	"maps"
	"math/bits"
	"slices"
	"strings"
	"time"
)

// Guest is a hold whose room another one may take.
type Guest struct {
	// ID is the hold's. It may have been dropped: its pods have the room as long as they are
	// there.
	ID string
	// Rank orders guests: the lower one goes first.
	Rank int
	// Going is true for a guest that goes in any case.
	Going bool
}

const (
	// enoughNodes is on how many nodes Open looks for the guests that are best ended. A thousand
	// nodes would take seconds.
	enoughNodes = 100
	// leavesWithin is how long the devices of a pod that has gone count as free while its GPUNode
	// counts them as held.
	leavesWithin = 2 * time.Minute
	// maxMasks is for how many guests of one GPU all subsets are tried. With more, the dearest are
	// spared one by one.
	maxMasks = 8
)

// Open holds room as Hold does, also where guests still have it, and returns the guests that are to
// end. The caller ends them, and calls Hold or Open again until they have gone. Until then the seats
// in their room are lost; they get the room once it is free, before any pod. Guests of one rank go in
// their order here; pods that are being deleted need not be among them.
//
//	a node with two GPUs of 79 units; the holds "a" and "b" have 40 and 39 of one GPU,
//	"c" has 79 of the other
//	Open for 60 units    "a" and "b" could end, or "c" alone: "c" ends, since that is fewer
//	Open again           "c" has not gone, or the GPUNode still counts its units: none ends
//	Hold                 the GPUNode shows them as free: the seat has its room
//
// Open ends guests of the lowest ranks, and as few of them as it can find: on each GPU the fewest for a
// pod that fits on one GPU. It chooses for one pod after the other. It ends no guest on a node where a
// pod has not reported its devices: that might be in vain. Devices of a pod that has gone count as free
// for two minutes, although its GPUNode still counts them as held.
//
// The error is a [Refusal] where there is no room without all guests either; the hold then stays as
// it was.
func (hs *holds) Open(
	id, name string, groups []Group, guests []Guest, now time.Time,
) (ends []string, at [][]string, err error) {
	hs.b.expire(now)
	o := opening{search: hs.search(id, name, groups), guests: guests, going: map[string]bool{}, now: now}
	hs.set(o.h, nil)
	hs.set(o.h, o.ofMembers())
	hs.balance()
	for _, g := range guests {
		o.going[g.ID] = g.Going
	}
	if at, err = o.fill(o.find); err != nil {
		return nil, nil, err
	}
	slices.Sort(o.ends)
	return o.ends, at, nil
}

// Might reports whether there would be room for groups if of all pods and seats only those stayed for whose holds stay
// returns true. It holds nothing.
func (hs *holds) Might(groups []Group, stay func(hold string) bool, now time.Time) bool {
	hs.b.expire(now)
	o := opening{search: hs.search("might", "", groups), stay: stay, now: now}
	_, err := o.fill(o.findAny)
	hs.drop(o.h)
	return err == nil
}

// findAny opens each seat on the first node that would have room for it.
func (o *opening) findAny(missing []*seat) (found int, no *Refusal) {
	for _, s := range missing {
		i := slices.IndexFunc(o.groups[s.group].Among, func(name string) bool {
			o.hs.pause()
			return o.on(name).judge(nil, s.ask).why == ""
		})
		if i < 0 {
			return found, newRefusal()
		}
		o.seat(s, o.groups[s.group].Among[i])
		found++
	}
	return found, nil
}

// opening is a search for room that guests still have.
type opening struct {
	*search
	// stay reports whether a hold's pods and seats stay. If it is nil, those of all but guests do.
	stay   func(hold string) bool
	guests []Guest
	// going has the IDs of the guests, true for those that go in any case or by this search.
	going map[string]bool
	// ends are the IDs of those that go by this search.
	ends []string
	now  time.Time
}

// find opens each seat where the cheapest guests end for it.
func (o *opening) find(missing []*seat) (found int, no *Refusal) {
	for _, s := range missing {
		best, no := o.best(s.ask, o.groups[s.group].Among)
		if no != nil {
			return found, no
		}
		for _, g := range best.ends {
			o.going[g.ID] = true
			o.ends = append(o.ends, g.ID)
		}
		o.seat(s, best.node)
		found++
	}
	return found, nil
}

// offer is a node with the guests that must end for a pod to have room there. last is the highest
// index of them among all guests, which are in the order of their going.
type offer struct {
	node string
	ends []Guest
	last int
	verdict
}

// cheaper compares two offers: whom they end, how many, what a pod spoils, and who is to go first.
func cheaper(x, y *offer) int {
	return cmp.Or(dearer(x.ends, y.ends), cmp.Compare(x.spoilt, y.spoilt), cmp.Compare(x.left, y.left),
		cmp.Compare(x.last, y.last), cmp.Compare(x.node, y.node))
}

// dearer compares guests that end: by the highest rank, and then by their number.
func dearer(x, y []Guest) int {
	if len(x) == 0 || len(y) == 0 {
		return cmp.Compare(len(x), len(y))
	}
	rank := func(all []Guest) int {
		return slices.MaxFunc(all, func(a, b Guest) int { return cmp.Compare(a.Rank, b.Rank) }).Rank
	}
	return cmp.Or(cmp.Compare(rank(x), rank(y)), cmp.Compare(len(x), len(y)))
}

// best is the best offer of some nodes.
func (o *opening) best(e *ask, among []string) (best *offer, no *Refusal) {
	no = newRefusal()
	found := 0
	for _, name := range among {
		of := o.on(name)
		v := of.judge(nil, e)
		if v.why == "" {
			if one := (&offer{node: name, verdict: v}); best == nil || cheaper(one, best) < 0 {
				best = one
			}
			continue
		}
		if best != nil && len(best.ends) == 0 || found == enoughNodes {
			continue
		}
		if v = of.judge(of.guests, e); v.why != "" {
			no.note(e, o.hs.b.roomOf(of.n, of.without(of.guests), of.free...), name, &v)
			continue
		}
		found++
		if one := of.cheapest(e, v, best); one != nil && (best == nil || cheaper(one, best) < 0) {
			one.node, best = name, one
		}
	}
	if best == nil {
		return nil, no
	}
	return best, nil
}

// hosted is a node with the guests that have some of it.
type hosted struct {
	*opening
	name   string
	n      *node
	guests []Guest
	gone   map[string]bool     // UIDs of those that go in any case
	free   []string            // devices of pods that have gone
	vague  *ask                // a pod that has not reported its devices
	uids   map[string][]string // of guests' pods and seats, by hold
	gpus   map[string][]Guest  // by UUID, those with devices of it
}

// on finds the guests of a node.
func (o *opening) on(name string) *hosted {
	n := o.hs.b.nodes[name]
	if n == nil {
		n = &node{}
	}
	of := &hosted{opening: o, name: name, n: n,
		gone: map[string]bool{}, uids: map[string][]string{}, gpus: map[string][]Guest{}}
	for id, since := range n.leaving {
		if since.IsZero() {
			n.leaving[id], since = o.now, o.now
		}
		if o.now.Sub(since) < leavesWithin {
			of.free = append(of.free, id)
		}
	}
	for _, e := range o.hs.b.room(name).pending {
		if e.Hold != o.h.id {
			of.vague = e
		}
	}
	here := map[string]*ask{}
	for uid, e := range n.here {
		here[uid] = e.ask
	}
	for _, s := range n.seats {
		here[s.UID] = s.ask
	}
	devices := map[string]map[string]bool{}
	for _, uid := range slices.Sorted(maps.Keys(here)) {
		e := here[uid]
		going, guest := o.going[e.Hold]
		switch {
		case e.Ending, going && guest, o.stay != nil && e.Hold != o.h.id && !o.stay(e.Hold):
			of.gone[uid] = true
			continue
		case !guest || e.Hold == o.h.id:
			continue
		}
		of.uids[e.Hold] = append(of.uids[e.Hold], uid)
		for _, id := range n.devices(&e.Pod) {
			gpu, _, _ := strings.Cut(strings.TrimSuffix(id, spotMark), "::")
			if devices[gpu] == nil {
				devices[gpu] = map[string]bool{}
			}
			devices[gpu][e.Hold] = true
		}
	}
	for _, g := range o.guests {
		if of.uids[g.ID] == nil {
			continue
		}
		of.guests = append(of.guests, g)
		for gpu, has := range devices {
			if has[g.ID] {
				of.gpus[gpu] = append(of.gpus[gpu], g)
			}
		}
	}
	return of
}

// without are the UIDs that are gone once guests are.
func (of *hosted) without(ends []Guest) map[string]bool {
	gone := maps.Clone(of.gone)
	for _, g := range ends {
		for _, uid := range of.uids[g.ID] {
			gone[uid] = true
		}
	}
	return gone
}

// judge is the verdict on a seat once guests have gone.
func (of *hosted) judge(ends []Guest, e *ask) verdict {
	if of.vague != nil && len(ends) > 0 { // a guest might end in vain
		return verdict{why: "it is not known yet which devices " + of.vague.who() + " has", waits: true}
	}
	without := of.without(ends)
	if len(without) == 0 && len(of.free) == 0 && of.n.here != nil {
		return of.n.judgeSeat(of.hs.b.room(of.name), e) // as it is known already
	}
	return of.n.judgeSeat(of.hs.b.roomOf(of.n, without, of.free...), e, of.n.freed(without)...)
}

// cheapest are the guests that are best ended; nil where that is not better than another offer. All is
// the verdict once all of them have gone.
func (of *hosted) cheapest(e *ask, all verdict, than *offer) (best *offer) {
	take := func(ends []Guest, v verdict) {
		one := &offer{ends: ends, verdict: v}
		for _, g := range ends {
			one.last = max(one.last, slices.Index(of.opening.guests, g))
		}
		if (than == nil || dearer(one.ends, than.ends) <= 0) && (best == nil || cheaper(one, best) < 0) {
			best = one
		}
	}
	for _, gpu := range slices.Sorted(maps.Keys(of.gpus)) {
		pool := of.gpus[gpu]
		v := of.judge(pool, e)
		if v.why != "" {
			continue
		}
		spared, v := of.spare(pool, e, v)
		take(spared, v)
		if len(pool) > maxMasks {
			continue
		}
		for mask := range uint(1) << len(pool) {
			if bits.OnesCount(mask) > len(spared) {
				continue
			}
			var some []Guest
			for i, g := range pool {
				if mask&(1<<i) != 0 {
					some = append(some, g)
				}
			}
			if dearer(some, spared) >= 0 || best != nil && dearer(some, best.ends) > 0 ||
				than != nil && dearer(some, than.ends) > 0 {
				continue
			}
			if v := of.judge(some, e); v.why == "" {
				take(some, v)
			}
		}
	}
	if best == nil { // it needs more than one GPU
		take(of.spare(of.guests, e, all))
	}
	return best
}

// spare leaves those guests alone that need not end, the dearest first.
func (of *hosted) spare(all []Guest, e *ask, v verdict) ([]Guest, verdict) {
	ends := slices.Clone(all)
	order := slices.Clone(all)
	slices.Reverse(order)
	slices.SortStableFunc(order, func(a, b Guest) int { return cmp.Compare(b.Rank, a.Rank) })
	for _, g := range order {
		fewer := slices.DeleteFunc(slices.Clone(ends), func(o Guest) bool { return o.ID == g.ID })
		if w := of.judge(fewer, e); w.why == "" {
			ends, v = fewer, w
		}
	}
	return ends, v
}
