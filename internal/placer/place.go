// SPDX-License-Identifier: Apache-2.0

package placer

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
)

// Refusal says why a pod has no place. Its text is for the person whose pod waits.
type Refusal struct {
	// Nodes has the reason of each node that was asked.
	Nodes map[string]string
	// Largest are the largest requests that would fit on one of these nodes, by resource, once
	// pods that have not reported their devices have those that the agent's packing would give
	// them, and beside what is kept for other clusters; of a MIG profile how many placements
	// are free.
	Largest map[string]Block
	// Kept says that a node would have room but for that.
	Kept bool
	// Waits says that there may be room as soon as pods that are starting have reported
	// their devices.
	Waits bool
	// Found is for how many pods of a hold there is room, of so many; both 0 for a pod.
	Found, Of int
}

// Block is how much there is at one place.
type Block struct {
	N    int
	Node string
}

func (r *Refusal) Error() string {
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(r.Largest)) {
		if b := r.Largest[name]; b.N > 0 {
			parts = append(parts, fmt.Sprintf("the largest free block of %s is %d, on %s", name, b.N, b.Node))
		} else {
			parts = append(parts, fmt.Sprintf("no %s is free", name))
		}
	}
	if parts == nil && r.Of > MaxSeats {
		parts = []string{fmt.Sprintf("room is held for at most %d pods at a time", MaxSeats)}
	} else if parts == nil {
		parts = []string{"no node was asked"}
	}
	if r.Kept {
		parts = append(parts, "the rest is kept for other clusters")
	}
	if r.Waits {
		parts = append(parts, "and pods that are starting have not reported their devices yet")
	}
	if r.Of > 1 {
		return fmt.Sprintf("room for %d of %d pods, and for the next one on none of %d nodes: %s", r.Found, r.Of, len(r.Nodes), strings.Join(parts, "; "))
	}
	return fmt.Sprintf("none of %d nodes has room: %s", len(r.Nodes), strings.Join(parts, "; "))
}

// measure notes what the largest requests are that a pod's resources allow in the room of a node.
func (r *Refusal) measure(p *entry, of *room, node string) {
	for _, resource := range p.names {
		if n := of.beside(resource); n > r.Largest[resource].N || r.Largest[resource].Node == "" {
			r.Largest[resource] = Block{n, node}
		}
	}
}

// Place picks the best of some nodes for a pod and reserves there. A reservation that it
// had is given up first. A pod that is bound stays where it is. The error is a [Refusal]
// where no node can take the pod.
//
// An end of ctx ends the search; its cause is the error then, and nothing is reserved.
func (b *Books) Place(ctx context.Context, p Pod, among []string, now time.Time) (string, error) {
	b.expire(now)
	e := b.pods[p.UID]
	if e == nil {
		e = &entry{}
		b.pods[p.UID] = e
	}
	if e.Node != "" {
		return e.Node, nil
	}
	e.reserved, e.asking = "", true
	b.settle(e)
	e.set(p)
	b.quotas.balance()
	best, why := b.best(ctx, e, among)
	if e.asking = false; why == nil && ctx.Err() == nil {
		e.reserved, e.until = best, now.Add(ReservedFor)
		if b.due.IsZero() || e.until.Before(b.due) {
			b.due = e.until
		}
	}
	if b.settle(e); e.of != nil {
		b.quotas.regain(e.of) // before others do
	}
	if e.reserved == "" {
		if !e.told {
			delete(b.pods, p.UID)
		}
		if ctx.Err() != nil {
			return "", context.Cause(ctx)
		}
		return "", why
	}
	return best, nil
}

// best is the best of some nodes. Where ctx ends first it is not known.
func (b *Books) best(ctx context.Context, p *entry, among []string) (string, *Refusal) {
	if q := b.quotas.by[p.Quota]; q != nil {
		if node, parts := b.quotas.bestOf(q, p, among); node != "" {
			b.quotas.put(q, parts)
			return node, nil
		}
	}
	type choice struct {
		node         string
		spoilt, left int
		seat         int // 0 where it has one
	}
	var best *choice
	h, waits := b.holds.by[p.Hold], false
	no := &Refusal{Largest: map[string]Block{}}
	whys := make([]string, len(among))
	for i, name := range among {
		if ctx.Err() != nil {
			return "", no
		}
		r := b.room(name)
		v, own := r.judge(p), 1
		if h != nil {
			var at bool
			if v, at = b.holds.judgeSeat(h, p, name, v); at {
				own, waits = 0, waits || v.waits
			}
		}
		if v.why != "" {
			whys[i], no.Waits, no.Kept = v.why, no.Waits || v.waits, no.Kept || v.why == isKept
			no.measure(p, r, name)
			continue
		}
		if c := (choice{name, v.spoilt, v.left, own}); best == nil ||
			cmp.Or(cmp.Compare(c.seat, best.seat), cmp.Compare(c.spoilt, best.spoilt), cmp.Compare(c.left, best.left), cmp.Compare(c.node, best.node)) < 0 {
			best = &c
		}
	}
	if best != nil && (best.seat == 0 || !waits) {
		return best.node, nil
	}
	no.Nodes = make(map[string]string, len(among))
	for i, name := range among {
		// Where there is room and another node is about to have its own for it again, it
		// need not take somebody else's.
		no.Nodes[name] = cmp.Or(whys[i], "room is held for it elsewhere")
		no.Waits = no.Waits || best != nil
	}
	return "", no
}

// room is that of a node, empty where nothing is known of it.
func (b *Books) room(name string) *room {
	n := b.nodes[name]
	if n == nil {
		return &room{taken: &b.taken}
	}
	if n.room == nil {
		n.room = b.roomOf(n, nil)
	}
	return n.room
}

// Fits says whether a node would have room for a pod if others, named by their UIDs, were
// gone from it; nil if so. The error is a [Refusal]. Nothing is reserved.
func (b *Books) Fits(p Pod, name string, without []string, now time.Time) error {
	b.expire(now)
	n := b.nodes[name]
	if n == nil {
		n = &node{}
	}
	gone := map[string]bool{p.UID: true}
	for _, uid := range without {
		gone[uid] = true
	}
	b.quotas.balance()
	e := &entry{}
	e.set(p)
	if s := n.seatOf(b.holds.by[p.Hold], e); s != nil {
		gone[s.UID] = true
	}
	r := b.roomOf(n, gone)
	why, waits := r.refuse(e)
	if why == "" {
		return nil
	}
	no := &Refusal{Nodes: map[string]string{name: why}, Largest: map[string]Block{}, Waits: waits, Kept: why == isKept}
	no.measure(e, r, name)
	return no
}

// refuse is why a pod may not be placed in the room, empty where it may. Waits says that
// pods which have not reported their devices are the reason.
func (r *room) refuse(p *entry) (why string, waits bool) {
	if why, waits = r.refuseAlone(p); why == "" && len(r.kept) > 0 && !r.holdsBeside(&p.Pod, r.kept) {
		why = isKept
	}
	return why, waits
}

// isKept is why a node is refused that would have room if nothing were kept there.
const isKept = "the rest of it is kept for another cluster"

// refuseAlone is that where nothing is kept for anybody.
func (r *room) refuseAlone(p *entry) (why string, waits bool) {
	if r.of != nil && r.of.passed != "" {
		return r.of.passed, false
	}
	families := map[string]bool{}
	for _, name := range p.names {
		if _, ours := r.kinds[name]; !ours {
			return fmt.Sprintf("the node does not offer %s through the device plugin, or its agent is not ready", name), false
		}
		if n := p.needs[name]; r.largest(name) == 0 {
			return fmt.Sprintf("no room for %d of %s: none is free", n, name), false
		}
		families[r.family(name)] = true
	}
	// Numbers that a node can never give are refused before anybody counts with them.
	if r.of != nil && r.of.cannot(p) != "" || r.tooLarge(p) {
		return r.noBlock(p), false
	}
	var beside []*entry
	for _, e := range r.pending {
		if e.UID != p.UID && r.competes(e, families) {
			beside = append(beside, e)
		}
	}
	if r.bounded(p, families, beside) {
		return "", false
	}
	if r.fits(&p.Pod) {
		if len(beside) == 0 {
			return "", false
		}
		return fmt.Sprintf("which devices %s has, and %d others, is not known yet", beside[0].who(), len(beside)-1), true
	}
	return r.noBlock(p), false
}

// tooLarge reports whether one container asks for more than any could have.
func (r *room) tooLarge(p *entry) bool {
	for i := range p.Containers {
		for name, n := range p.Containers[i].Requests {
			if _, ours := r.kinds[name]; ours && n > r.largest(name) {
				return true
			}
		}
	}
	return false
}

// noBlock says that no free block is large enough for a pod.
func (r *room) noBlock(p *entry) string {
	var largest []string
	for _, name := range p.names {
		largest = append(largest, fmt.Sprintf("no room for %d of %s: the largest free block is %d", p.needs[name], name, r.foreseen(name)))
	}
	return strings.Join(largest, "; ")
}

// competes reports whether a pod asks for something of the families.
func (r *room) competes(p *entry, families map[string]bool) bool {
	for _, name := range p.names {
		if _, ours := r.kinds[name]; ours && families[r.family(name)] {
			return true
		}
	}
	return false
}

// bounded reports whether the pod and those beside it are sure to have their room.
func (r *room) bounded(p *entry, families map[string]bool, beside []*entry) bool {
	if p.pinned || slices.ContainsFunc(beside, func(e *entry) bool { return e.pinned }) {
		return false
	}
	for family := range families {
		var items []item
		for _, e := range beside {
			items = append(items, r.items(&e.Pod, family)...)
		}
		fixed := len(items)
		if !r.safe(family, append(items, r.items(&p.Pod, family)...), fixed) {
			return false
		}
	}
	return true
}
