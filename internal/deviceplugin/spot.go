// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
)

// spotRoom is the room of spot devices that are not MIG devices: what no guaranteed allocation has and does not
// lend.
type spotRoom struct {
	// ours are the devices that spot allocations have and keep, by ID; theirs are those of guaranteed
	// allocations. whole are the GPUs of guaranteed allocations of another kind.
	ours, theirs map[string]bool
	whole        map[gpu.UUID]bool
	// beyond are free devices of which spot pods may not have more.
	beyond map[string]bool
}

// newSpotRoom returns the room of a resource of an offer, beside these allocations.
func newSpotRoom(o *Offer, r *Resource, held []ledger.Allocation) *spotRoom {
	s := &spotRoom{
		ours: map[string]bool{}, theirs: map[string]bool{}, whole: map[gpu.UUID]bool{}, beyond: map[string]bool{},
	}
	have := map[gpu.UUID]int{} // devices that spot allocations have
	for i := range held {
		a := &held[i]
		for j := range a.Grants {
			g := &a.Grants[j]
			switch {
			case g.NoRoom || g.GPU == "" || a.Free(ledger.Spot):
			case a.Tier == ledger.Spot && a.Yield.Asked():
			case g.Kind() != r.Kind:
				s.whole[g.GPU] = true
			case a.Tier == ledger.Spot:
				for _, id := range pieceIDs(g.GPU, g.Piece) {
					s.ours[id] = true
					have[g.GPU]++
				}
			default:
				for _, id := range pieceIDs(g.GPU, g.Piece) {
					s.theirs[id] = true
				}
			}
		}
	}
	// Of the free devices those of the highest numbers are offered, since guaranteed pods get the lowest.
	for _, dev := range slices.Backward(r.Devices) {
		most := o.Spot[dev.GPU].Most
		if most == 0 || s.ours[dev.ID] || s.theirs[dev.ID] {
			continue
		}
		if have[dev.GPU] >= most {
			s.beyond[dev.ID] = true
		}
		have[dev.GPU]++
	}
	return s
}

func (s *spotRoom) knows(gpu.UUID) bool { return true }

// Reasons why a device is not offered to spot pods. Pods read them, so they name no holder.
const (
	guaranteedHas = "a guaranteed pod has its room"
	spotHasMost   = "spot pods have as much of the GPU as its partition lets them"
)

func (s *spotRoom) lacks(dev *Device) string {
	switch {
	case s.theirs[dev.ID] || s.whole[dev.GPU]:
		return guaranteedHas
	case s.ours[dev.ID]:
		return ""
	case dev.Leaving:
		return dev.Reason
	case s.beyond[dev.ID]:
		return spotHasMost
	}
	return ""
}

// SetLending is [ledger.Ledger.SetLending], and tells the kubelet of the room that spot pods may have from now on.
func (f *FrontEnd) SetLending(id string, epoch uint64, on bool) (changed bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	a, known := f.ledger.Get(id)
	if !known || !f.ledger.SetLending(id, epoch, on) {
		return false
	}
	f.lists.noteMoved(&a)
	f.lists.showMoved()
	return true
}

// spotHolder is a spot allocation that has some of a request's devices.
type spotHolder struct {
	id    string
	given time.Time
	// out is true if it has given its room back already.
	out bool
	// on has its devices of the resource, by GPU.
	on map[gpu.UUID][]string
}

// younger orders the spot holders in which they yield if nothing better decides: those that have yielded
// already, then the youngest.
func younger(a, b *spotHolder) int {
	switch {
	case a.out != b.out && a.out:
		return -1
	case a.out != b.out:
		return 1
	}
	return cmp.Or(b.given.Compare(a.given), cmp.Compare(a.id, b.id))
}

// yielders returns the fewest spot holders of a GPU that have n of its devices together, among equals the
// youngest. It returns nil if all of them have fewer.
func yielders(of []*spotHolder, u gpu.UUID, n int) []*spotHolder {
	var left []*spotHolder
	for _, h := range of {
		if len(h.on[u]) > 0 {
			left = append(left, h)
		}
	}
	slices.SortFunc(left, younger)
	var out []*spotHolder
	for n > 0 {
		best := -1
		for i, h := range left {
			switch have := len(h.on[u]); {
			case best < 0:
				best = i
			case min(have, n) > min(len(left[best].on[u]), n): // the largest first gives the fewest
				best = i
			}
		}
		if best < 0 {
			return nil
		}
		n -= len(left[best].on[u])
		out = append(out, left[best])
		left = slices.Delete(left, best, best+1)
	}
	return out
}

// unitsOverSpot chooses n units of the GPU that a request would get if there were no spot allocations: the fullest one
// with room. So guaranteed allocations are packed as without the tier, and leave as much room together on one GPU. Among
// equals, and on the GPU, it takes idle units first, and then those of the fewest spot holders. ok is false if no GPU has
// so many units that no guaranteed allocation has.
func (s *supply) unitsOverSpot(n int, rank map[gpu.UUID]int) (must, available []string, ok bool) {
	type choice struct {
		gpu        gpu.UUID
		idle, room int // room is what there is without spot allocations, idle what there is beside them
		yield      []*spotHolder
		running    int // of yield, those that have not yielded yet
	}
	idle := byGPU(s.idle)
	room := maps.Clone(idle)
	for _, h := range s.spot {
		for u, ids := range h.on {
			room[u] += len(ids)
		}
	}
	if len(s.must) > 0 {
		u := onGPU(s.must[0])
		room = map[gpu.UUID]int{u: room[u]}
	}
	var choices []choice
	for u, have := range room {
		short := n - len(s.must) - idle[u]
		c := choice{gpu: u, idle: idle[u], room: have}
		if short > 0 {
			if c.yield = yielders(s.spot, u, short); c.yield == nil {
				continue
			}
		}
		for _, h := range c.yield {
			if !h.out {
				c.running++
			}
		}
		choices = append(choices, c)
	}
	if len(choices) == 0 {
		return nil, nil, false
	}
	best := slices.MinFunc(choices, func(a, b choice) int {
		if c := cmp.Or(cmp.Compare(a.room, b.room), cmp.Compare(a.running, b.running),
			cmp.Compare(len(a.yield), len(b.yield))); c != 0 {
			return c
		}
		if len(a.yield) > 0 {
			if c := younger(a.yield[0], b.yield[0]); c != 0 {
				return c
			}
		}
		return cmp.Or(cmp.Compare(a.idle, b.idle), cmp.Compare(rank[a.gpu], rank[b.gpu]), cmp.Compare(a.gpu, b.gpu))
	})
	var there []string
	for _, id := range s.idle {
		if onGPU(id) == best.gpu {
			there = append(there, id)
		}
	}
	if len(best.yield) == 0 {
		return s.must, there, true
	}
	for _, h := range best.yield {
		available = append(available, h.on[best.gpu]...)
	}
	return slices.Concat(s.must, there), available, true
}

// wholeOverSpot returns n GPUs that spot pods have, those first whose holders yield first. It returns fewer if
// there are fewer.
func (s *supply) wholeOverSpot(n int) (out []string) {
	of := slices.Clone(s.spot)
	slices.SortFunc(of, younger)
	for _, h := range of {
		for _, ids := range h.on {
			for _, id := range ids {
				if len(out) < n && !slices.Contains(out, id) {
					out = append(out, id)
				}
			}
		}
	}
	return out
}

// chooseOverSpot chooses places for a guaranteed request by choose, which does not see spot allocations. What
// guaranteed allocations have comes last. Each GPU gets what it would get without spot allocations, so that guaranteed
// ones are packed as without the tier. If one place is asked for, places come first on that GPU that fewer spot
// allocations have.
func (f *FrontEnd) chooseOverSpot(
	choose func([]mig.Place) ([]mig.Place, error), free []mig.Place, one bool,
) ([]mig.Place, error) {
	unheld := f.unheld(free)
	chosen, err := choose(unheld)
	if err != nil {
		return choose(free)
	}
	there := slices.DeleteFunc(slices.Clone(unheld), func(p mig.Place) bool {
		return !slices.ContainsFunc(chosen, func(c mig.Place) bool { return c.GPU == p.GPU })
	})
	if one {
		there = f.leastSpot(there)
	}
	if better, err := choose(there); err == nil {
		return better, nil
	}
	return chosen, nil
}

// chooseBeforeLent chooses places for a request: free ones if there are enough, and otherwise also those that guaranteed
// allocations lend. ids maps places to devices.
func (f *FrontEnd) chooseBeforeLent(
	r *Resource, choose func([]mig.Place) ([]mig.Place, error), free []mig.Place, ids map[mig.Place]string,
) ([]mig.Place, error) {
	if r.Tier != ledger.Spot {
		return choose(free)
	}
	lent := f.covered(r).lent
	if own := slices.DeleteFunc(slices.Clone(free), func(p mig.Place) bool { return lent[ids[p]] }); len(own) < len(free) {
		if chosen, err := choose(own); err == nil {
			return chosen, nil
		}
	}
	return choose(free)
}

// unheld returns the places that no guaranteed allocation has.
func (f *FrontEnd) unheld(places []mig.Place) []mig.Place {
	held := map[mig.Place]bool{}
	for _, a := range f.ledger.Allocations() {
		if a.Tier == ledger.Spot {
			continue
		}
		for i := range a.Grants {
			held[unsized(mig.Place{GPU: a.Grants[i].GPU, Placement: piece.At(a.Grants[i].Piece)})] = true
		}
	}
	return slices.DeleteFunc(slices.Clone(places), func(p mig.Place) bool { return held[unsized(p)] })
}

// leastSpot returns the places that the fewest spot allocations have room of, among equals those of the youngest.
func (f *FrontEnd) leastSpot(places []mig.Place) (least []mig.Place) {
	var spot []ledger.Allocation
	for _, a := range f.ledger.Allocations() {
		if a.Tier == ledger.Spot && !a.Out() {
			spot = append(spot, a)
		}
	}
	type cost struct {
		n      int
		oldest time.Time // of those that would yield
	}
	var best cost
	for _, p := range places {
		wanted := []ledger.Grant{{GPU: p.GPU, Piece: piece.Instance(p.Placement)}}
		var c cost
		for i := range spot {
			if a := &spot[i]; f.ledger.Overlap(a.Grants, wanted) {
				if c.n++; c.oldest.IsZero() || a.Given.Before(c.oldest) {
					c.oldest = a.Given
				}
			}
		}
		switch {
		case least == nil || c.n < best.n || c.n == best.n && c.oldest.After(best.oldest):
			best, least = c, []mig.Place{p}
		case c == best:
			least = append(least, p)
		}
	}
	return least
}

// unsized returns a place without the size of its placement, which an allocation may not know.
func unsized(p mig.Place) mig.Place {
	p.Placement.Size = 0
	return p
}
