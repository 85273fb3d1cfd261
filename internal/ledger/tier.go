// SPDX-License-Identifier: Apache-2.0

package ledger

import (
	"slices"
	"time"

	"example.com/gpu-agent/internal/brief"
)

// Tier is whether an allocation keeps its room until it ends.
type Tier string

// Tiers.
const (
	// Guaranteed keeps its room. No two guaranteed allocations have the same piece, but for the cases
	// that Request.Overlap permits.
	Guaranteed Tier = ""
	// Spot has room that no guaranteed allocation has, and gives it back when one is given it.
	Spot Tier = "spot"
)

// Known reports whether this version knows the tier.
func (t Tier) Known() bool { return t == Guaranteed || t == Spot }

// Word returns the tier for people and metrics: "guaranteed" or "spot".
func (t Tier) Word() string {
	if t == Guaranteed {
		return "guaranteed"
	}
	return string(t)
}

// Offering is how a GPU's room is offered a second time, to spot pods. The zero value does not offer it.
type Offering struct {
	// On is true if it is.
	On bool `json:"on,omitempty"`
	// Most is how many memory units of the GPU spot pods may have at once; 0 means all.
	Most int `json:"most,omitempty"`
	// Lend is how long no process may have been on the piece of a guaranteed holder before the holder's
	// room is offered, too; 0 means that it never is.
	Lend time.Duration `json:"lend,omitempty"`
}

// Yield is why a spot allocation gives its room back. The zero Yield gives none. As long as there is one, no
// container starts with the allocation.
type Yield struct {
	// Since is the time from which the allocation's grace counts.
	Since time.Time
	// To are the guaranteed allocations that have its pieces, sorted. Layout is true if the layout of
	// its GPU is to change.
	To     []string
	Layout bool
	// Told names to whom the room goes in words for the allocation's own pod, and Named is true if the kubelet
	// has named all the pods that are given it. Both are zero while no reason stands.
	Told  string
	Named bool
	// Out is true if a look that began after Since has found no container of it.
	Out bool
}

// Parks is how often a container was parked, for how long, and what it had on GPUs then. The zero Parks is of one that
// never was, as far as this process of the agent knows: it knows only the present park of an earlier process.
type Parks struct {
	// Times is how often it was parked.
	Times int
	// Bytes is what was moved to the host by the last park.
	Bytes uint64
	// Since and Until are the time of the last park; Until is zero while it lasts. Earlier is how long those before
	// it took together.
	Since, Until time.Time
	Earlier      time.Duration
}

// Total returns for how long the container was parked until now, all times together.
func (p *Parks) Total(now time.Time) time.Duration {
	if p.Times == 0 {
		return 0
	}
	until := p.Until
	if until.IsZero() {
		until = now
	}
	return p.Earlier + max(0, until.Sub(p.Since))
}

// begin notes a park, or that the last one goes on: its restore had no room.
func (p *Parks) begin(bytes uint64, since time.Time) {
	if p.Times == 0 || !p.Since.Equal(since) {
		p.Earlier = p.Total(since)
		p.Times++
		p.Since = since
	}
	p.Bytes, p.Until = bytes, time.Time{}
}

// Asked reports whether there is a reason to give the room back.
func (y *Yield) Asked() bool { return len(y.To) > 0 || y.Layout }

// Yielding reports whether a spot allocation is to give its room back, and may have a container still.
func (a *Allocation) Yielding() bool { return a.Yield.Asked() && !a.Out() }

// Out reports whether a spot allocation has given its room back: no container of it runs or can start, or all
// processes of its container are parked. Where the layout of its GPU changes, it would not find its room again,
// so to be parked is not enough.
func (a *Allocation) Out() bool {
	return a.Yield.Asked() && (a.Yield.Out || a.Phase == Parked && !a.Yield.Layout)
}

// wanted returns the time from which a guaranteed allocation that does not lend has wanted its room.
func (a *Allocation) wanted() time.Time {
	if a.Recalled.After(a.Given) {
		return a.Recalled
	}
	return a.Given
}

// Free reports whether an allocation's room is free for one of a tier: a guaranteed one that lends is no
// obstacle for spot. Its MIG instances stay as they are, so a spot allocation can only have the same ones.
func (a *Allocation) Free(to Tier) bool { return a.Lending && to == Spot }

// SetLending sets whether spot allocations may have the room of a guaranteed allocation. It does nothing if
// the allocation has another epoch by now, and lends nothing of a spot allocation, one that is superseded, and
// one that two pods have. When lending ends, the spot allocations in that room yield, from this moment on.
//
// The ledger knows nothing of the holder's processes. The caller makes sure that none of them uses the GPU from
// before lending begins until the spot allocations are Out.
//
// A MIG instance is lent as it is: it is not destroyed while its holder lends it. So a spot allocation has room of it
// only if it has the same placement. One that has another placement in that room goes on yielding.
//
// Whether an allocation lends is in no record: the next process finds it out anew. SetLending reports whether
// something changed.
func (l *Ledger) SetLending(id string, epoch uint64, on bool) (changed bool) {
	now := l.now()
	l.mu.Lock()
	defer l.mu.Unlock()
	a := l.allocations[id]
	if a == nil || a.Epoch != epoch || a.Lending == on || on && (a.Tier != Guaranteed || a.Superseded || a.Twice) {
		return false
	}
	l.lendLocked(a, on, now)
	return true
}

// lendLocked begins or ends lending.
func (l *Ledger) lendLocked(a *allocation, on bool, now time.Time) {
	if a.Lending == on {
		return
	}
	if a.Lending = on; !on {
		a.Recalled = now
	}
	l.version++
	l.yieldLocked()
}

// Borrowed reports whether a spot allocation has, or may still have, room of an allocation.
func (l *Ledger) Borrowed(id string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	g := l.allocations[id]
	if g == nil || l.spots == 0 {
		return false
	}
	for _, a := range l.allocations {
		if a.Tier == Spot && a != g && !a.Out() && overlap(l.rooms, g.Grants, a.Grants) {
			return true
		}
	}
	return false
}

// yieldLocked works out which spot allocations give their room back, and to which guaranteed ones. It is
// called whenever an allocation comes, goes, or has other grants.
func (l *Ledger) yieldLocked() {
	if l.spots == 0 {
		return
	}
	for _, a := range l.allocations {
		if a.Tier != Spot {
			continue
		}
		var to []string
		var since time.Time
		for _, g := range l.allocations {
			if g.Tier == Guaranteed && (!g.Lending && overlap(l.rooms, g.Grants, a.Grants) ||
				g.Lending && alters(l.rooms, a.Grants, g.Grants)) {
				to = append(to, g.ID)
				if at := g.wanted(); since.IsZero() || at.Before(since) {
					since = at
				}
			}
		}
		slices.Sort(to)
		l.askLocked(a, to, a.Yield.Layout, since)
	}
}

// askLocked sets why a spot allocation gives its room back. since is when it was asked, if it was not asked
// before.
func (l *Ledger) askLocked(a *allocation, to []string, layout bool, since time.Time) {
	was := a.Yield.Asked()
	a.Yield.To, a.Yield.Layout = to, layout
	switch {
	case !a.Yield.Asked():
		a.Yield = Yield{}
		if was && !a.Superseded && a.Phase != Parked { // whether its pieces are free, the next look finds out
			a.After, a.forPod = "", ""
			l.moveLocked(a, Reserved)
		}
	case !was:
		a.Yield.Since, a.Yield.Out = since, false
		if a.Phase != Parked {
			l.moveLocked(a, Waiting)
		}
	}
	if !a.Yield.Asked() {
		return
	}
	var others string
	others, a.Yield.Told, a.Yield.Named = l.whyLocked(a)
	if !a.Superseded {
		a.After, a.forPod = others, a.Yield.Told
	}
}

// whyLocked returns to whom a spot allocation gives its room, in words for operators and for its own pod, and whether
// the kubelet has named all of these.
func (l *Ledger) whyLocked(a *allocation) (others, told string, named bool) {
	if len(a.Yield.To) == 0 {
		const layout = "the GPU's layout changes"
		return layout, layout, true
	}
	names, its := make([]string, len(a.Yield.To)), make([]string, len(a.Yield.To))
	named = true
	for i, id := range a.Yield.To {
		g := l.allocations[id]
		names[i], its[i] = g.Who(), g.Holder.Told(a.Holder.Namespace, id)
		named = named && g.Holder.Name != ""
	}
	list := func(of []string) string {
		slices.Sort(of)
		return brief.List(slices.Compact(of), 3)
	}
	return list(names), list(its), named
}

// SetLayoutYields sets which spot allocations give their room back because the layout of their GPU is to
// change, and takes that back for all others.
func (l *Ledger) SetLayoutYields(ids map[string]bool) {
	now := l.now()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.spots == 0 {
		return
	}
	for _, a := range l.allocations {
		if a.Tier == Spot && a.Yield.Layout != ids[a.ID] {
			l.askLocked(a, a.Yield.To, ids[a.ID], now)
			l.version++
		}
	}
}

// SetOut reports that no container of a spot allocation that gives its room back runs, or can be about to
// start. It does nothing if the allocation has another epoch by now.
func (l *Ledger) SetOut(id string, epoch uint64) {
	l.edit(id, func(a *allocation) {
		if a.Epoch == epoch && a.Yielding() {
			a.Yield.Out = true
			l.version++
		}
	})
}

// SetParked reports that no process of a spot allocation has memory on a GPU since a time, while its container runs, and
// how many bytes of it were moved to the host. No container starts with it from then on. It reports false, and does
// nothing, if the allocation has another epoch by now or is superseded.
func (l *Ledger) SetParked(id string, epoch uint64, bytes uint64, since time.Time) (parked bool) {
	l.edit(id, func(a *allocation) {
		if a.Epoch == epoch && a.Tier == Spot && !a.Superseded {
			a.Parks.begin(bytes, since)
			l.moveLocked(a, Parked)
			l.version++
			parked = true
		}
	})
	return parked
}

// Unpark takes a parked allocation's room for it again, before its processes are restored. From then on a
// guaranteed allocation that is given the room waits for it, as for any spot allocation. Unpark reports false, and
// does nothing, if the room is still wanted, or if the allocation is not parked or has another epoch by now.
func (l *Ledger) Unpark(id string, epoch uint64) (free bool) {
	l.edit(id, func(a *allocation) {
		if a.Epoch == epoch && a.Phase == Parked && !a.Yield.Asked() {
			l.moveLocked(a, Reserved)
			l.version++
			free = true
		}
	})
	return free
}

// EndParked reports that the processes of a parked allocation have ended, or run again.
func (l *Ledger) EndParked(id string, epoch uint64) {
	l.edit(id, func(a *allocation) {
		if a.Epoch != epoch || a.Phase != Parked {
			return
		}
		if a.Yield.Asked() {
			l.moveLocked(a, Waiting)
		} else {
			l.moveLocked(a, Reserved)
		}
		l.version++
	})
}

// Spots returns how many spot allocations there are.
func (l *Ledger) Spots() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.spots
}
