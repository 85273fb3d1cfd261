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

	"example.com/gpu-agent/internal/piece"
)

// Refusal is why a pod has no place. Its text is for the person whose pod waits.
type Refusal struct {
	// Nodes has the reason of each node that was asked.
	Nodes map[string]string
	// Largest are the largest requests that would fit on one of these nodes, by resource, once
	// pods that have not reported their devices have those that the agent's packing would give
	// them, and beside what is held; of a MIG profile how many placements are free.
	Largest map[string]Block
	// Held is true if a node would have room but for what is held there.
	Held bool
	// Waits is true if there may be room as soon as pods that are starting have reported
	// their devices.
	Waits bool
	// Lacks are the nodes that have too little of a plain resource, by resource.
	Lacks map[string]Lacking
	// Found is for how many pods of a hold there is room, of so many; both 0 for a pod. Group is the
	// index of the group of the first pod without room, -1 where it is none in particular, and Fit is
	// for how many pods of that group there is room beside the others of Found.
	Found, Of, Group, Fit int
}

// Lacking are nodes with room on their GPUs that lack a plain resource. Lack is of the one that has
// the most left, which Node names, and N is how many there are.
type Lacking struct {
	Lack
	Node string
	N    int
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
		parts = []string{"there is no node to choose from"}
	}
	for _, name := range slices.Sorted(maps.Keys(r.Lacks)) {
		l := r.Lacks[name]
		const short = "%d of them have GPUs for it and too little %s (it asks for %s, the most is %s, on %s)"
		parts = append(parts,
			fmt.Sprintf(short, l.N, name, amountOf(name, l.Asked), amountOf(name, max(l.Left, 0)), l.Node))
	}
	if r.Held {
		parts = append(parts, "the rest is held for others")
	}
	if r.Waits {
		parts = append(parts, "and pods that are starting have not reported their devices yet")
	}
	if r.Of > 1 {
		return fmt.Sprintf("room for %d of %d pods; none of %d nodes has room for the next one: %s",
			r.Found, r.Of, len(r.Nodes), strings.Join(parts, "; "))
	}
	return fmt.Sprintf("none of %d nodes has room: %s", len(r.Nodes), strings.Join(parts, "; "))
}

func newRefusal() *Refusal {
	return &Refusal{Nodes: map[string]string{}, Largest: map[string]Block{}, Lacks: map[string]Lacking{}}
}

// note notes why a node has no room for a pod, and what there is.
func (r *Refusal) note(p *ask, of *room, node string, v *verdict) {
	r.Nodes[node], r.Waits, r.Held = v.why, r.Waits || v.waits, r.Held || v.held
	if name := v.lack.Name; name != "" {
		l := r.Lacks[name]
		if l.N == 0 || v.lack.Left > l.Left {
			l.Lack, l.Node = v.lack, node
		}
		l.N++
		r.Lacks[name] = l
	}
	for _, resource := range p.names {
		if n := of.block(resource); n > r.Largest[resource].N || r.Largest[resource].Node == "" {
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
		e = &entry{ask: newAsk(p)}
		b.pods[p.UID] = e
	}
	if e.Node != "" {
		return e.Node, nil
	}
	e.reserved, e.asking = "", true
	b.settle(e)
	e.ask = newAsk(p)
	b.holds.balance()
	best, why := b.best(ctx, e.ask, among)
	if e.asking = false; why == nil && ctx.Err() == nil {
		b.reserve(e, best, now.Add(ReservedFor))
	}
	b.settle(e)
	if h := b.holds.by[e.in]; h != nil && h.want != nil {
		b.holds.regain(h) // before others do
	}
	if e.reserved == "" {
		if !e.told {
			b.dropPod(e)
		}
		if ctx.Err() != nil {
			return "", context.Cause(ctx)
		}
		return "", why
	}
	return best, nil
}

// choice is a node that would do.
type choice struct {
	node string
	verdict
}

// better compares two choices: what spot pods lose there, what is spoilt, how much room there is, and the name.
func better(x, y *choice) int {
	return cmp.Or(cmp.Compare(x.yields, y.yields), cmp.Compare(x.spoilt, y.spoilt), cmp.Compare(x.left, y.left),
		cmp.Compare(x.node, y.node))
}

// best is the best of some nodes. Where ctx ends first it is not known.
//
// A pod of a hold goes where that has room for it, as long as it has any. A pod that takes some of
// an amount goes before pods that may still come: if the rest of the amount does not fit beside it, that
// loses its room, and at last so do others' amounts.
func (b *Books) best(ctx context.Context, p *ask, among []string) (string, *Refusal) {
	h := b.holds.by[p.Hold]
	if h != nil && h.want != nil {
		for _, yield := range []yielding{yieldNothing, yieldOwn, yieldAll} {
			var all choices
			for _, name := range among {
				if n := b.nodes[name]; n != nil && n.keepsFor(h, p) {
					if v := b.judge(p, name, yield); v.why == "" {
						all = append(all, choice{name, v})
					}
				}
			}
			if len(all) > 0 {
				return all[b.pick(p, p.Namespace, all)].node, nil
			}
		}
	}
	var free, seated choices
	no, whys, waits := newRefusal(), make([]choice, 0, len(among)), false
	for _, name := range among {
		if ctx.Err() != nil {
			return "", no
		}
		c := choice{name, b.judge(p, name, yieldNothing)}
		own := b.nodes[name].seatOf(h, p.shape) != nil
		switch {
		case c.why != "":
			waits = waits || own && c.waits
			whys = append(whys, c)
		case own:
			seated = append(seated, c)
		default:
			free = append(free, c)
		}
	}
	switch {
	case len(seated) > 0:
		return seated[b.pick(p, p.Namespace, seated)].node, nil
	case len(free) > 0 && !waits:
		return free[b.pick(p, p.Namespace, free)].node, nil
	case len(free) > 0: // another node is about to have its own room for it again
		no.Waits = true
		no.Nodes[free[free.first()].node] = "room is held for it elsewhere"
	}
	for i := range whys {
		no.note(p, b.room(whys[i].node), whys[i].node, &whys[i].verdict)
	}
	return "", no
}

// yielding is what may lose its room on a node when a pod takes some of what is held there.
type yielding int

const (
	yieldNothing yielding = iota
	yieldOwn
	yieldAll
)

// keepsFor reports whether a hold keeps an amount of something on a node that a pod asks for.
func (n *node) keepsFor(h *hold, p *ask) bool {
	return slices.ContainsFunc(n.seats, func(s *seat) bool {
		return s.owner == h.owner && p.needs[s.part.Resource] > 0
	})
}

// judge gives a node's verdict on a pod that is on none, which may use what its hold has there.
func (b *Books) judge(p *ask, name string, yield yielding) verdict {
	n, r := b.nodes[name], b.room(name)
	h := b.holds.by[p.Hold]
	key := verdictKey{shape: p.shape, yield: yield}
	mine := n.seatOf(h, p.shape)
	part := h != nil && h.want != nil && n != nil && n.keepsFor(h, p)
	if h != nil && n != nil && slices.ContainsFunc(n.seats, func(s *seat) bool { return s.owner == h.owner }) {
		key.hold = h.id // awaited goes by it, too
	}
	v := r.remember(key, func() verdict {
		r.expect()
		keep, own := r.besides(mine)
		switch {
		case part && yield == yieldAll:
			keep = slices.DeleteFunc(slices.Clone(keep), func(s *seat) bool { return s.owner.amounts })
		case part:
			keep = slices.DeleteFunc(slices.Clone(keep), func(s *seat) bool { return s.owner == h.owner })
			if yield == yieldNothing {
				parts := slices.DeleteFunc(slices.Clone(r.stands), func(s *seat) bool { return s.owner != h.owner })
				keep, own = append(keep, b.holds.cut(parts, p.needs, name)...), covered(p, parts)
			}
		}
		v := verdict{}
		if v.why, v.waits, v.held = r.refuse(p, keep, own); v.why == "" {
			v.spoilt, v.left = r.expect().score(&p.Pod)
			v.yields = r.expect().yields(&p.Pod)
		}
		return v
	})
	if s := n.spoils(p, mine); v.why == "" && s != nil {
		v.why, v.held = heldFor(s), true
	}
	return v
}

// besides are the seats that have their room, without one that a pod is to use. own is true if that has, too.
func (r *room) besides(mine *seat) (others []*seat, own bool) {
	i := slices.Index(r.stands, mine)
	if i < 0 {
		return r.stands, false
	}
	return slices.Concat(r.stands[:i], r.stands[i+1:]), true
}

// covered reports whether each of a pod's requests is part of one of some amounts.
func covered(p *ask, parts []*seat) bool {
	for _, name := range p.names {
		has := func(s *seat) bool { return s.part.Resource == name && s.part.N >= p.needs[name] }
		if !slices.ContainsFunc(parts, has) {
			return false
		}
	}
	return true
}

// judgeSeat gives the room's verdict on one seat more there, beside those that there are.
//
// The pods of a group come at the same moment. So the bound must hold for a new seat beside the pods that
// have not reported and all seats of groups. There is one exception: a node with no such pods, and no
// seats of other holds for groups, takes as many seats as the packing has room for. The pods of these are then
// placed one after the other. Otherwise four pods that just fill two GPUs could never be held.
func (r *room) judgeSeat(s *ask) verdict {
	return r.remember(verdictKey{shape: s.shape, hold: s.Hold, seat: true}, func() (v verdict) {
		if v.why = r.never(s); v.why != "" {
			return v
		}
		r.expect()
		t := r.grouped.anew()
		if r.awaited(s) != nil || !t.pod(&s.Pod) ||
			slices.ContainsFunc(r.stands, func(o *seat) bool { return o.owner.amounts && !t.pod(&o.Pod) }) {
			v.why, v.held, v.waits = r.noBlock(s), len(r.stands) > 0, len(r.pending) > 0
			return v
		}
		others, beside := slices.Clone(r.pending), slices.Clone(r.pending)
		for _, o := range r.stands {
			if !o.owner.amounts {
				beside = append(beside, o.ask)
				if o.Hold != s.Hold {
					others = append(others, o.ask)
				}
			}
		}
		families := r.families(s)
		if spot, _ := s.tiers(); !spot { // spot pods are not in its way
			others = slices.DeleteFunc(others, (*ask).spotOnly)
		}
		beside = slices.DeleteFunc(beside, func(o *ask) bool { return !r.competes(o, families) })
		if !(bound{room: r}).holds(s, families, beside) && len(others) > 0 {
			v.why, v.waits = vague(others), true
			return v
		}
		v.spoilt, v.left = r.expected.score(&s.Pod)
		return v
	})
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

// Fits returns nil if a node had room for a pod after others, named by their UIDs, were gone from it.
// The error is a [Refusal]. Nothing is reserved.
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
	b.holds.balance()
	e := newAsk(p)
	r := b.roomOf(n, gone)
	r.expect()
	mine := n.seatOf(b.holds.by[p.Hold], e.shape)
	keep, own := r.besides(mine)
	v := verdict{}
	if v.why, v.waits, v.held = r.refuse(e, keep, own); v.why == "" {
		s := n.spoils(e, mine, n.freed(gone)...)
		if s == nil {
			return nil
		}
		v.why, v.held = heldFor(s), true
	}
	no := newRefusal()
	no.note(e, r, name, &v)
	return no
}

// refuse is why a pod has no room where some seats keep theirs; empty if it has. waits is true if pods
// that have not reported their devices are the reason, and held if these seats are. own is true if the pod
// has room of its own there: then it takes nothing of what becomes free.
func (r *room) refuse(p *ask, keep []*seat, own bool) (why string, waits, held bool) {
	if why = r.never(p); why != "" {
		return why, false, false
	}
	if s := r.awaited(p); s != nil && !own {
		return heldFor(s), false, true
	}
	families := r.families(p)
	var pending, beside []*ask
	for _, e := range r.pending {
		if e.UID != p.UID && r.competes(e, families) {
			pending = append(pending, e)
		}
	}
	// An amount has no part in the bound: little would ever be safe beside it.
	var amounts []*seat
	if spot, _ := p.tiers(); !spot {
		keep = slices.DeleteFunc(slices.Clone(keep), func(s *seat) bool { return s.spotOnly() })
	}
	for _, s := range keep {
		switch {
		case s.owner.amounts:
			amounts = append(amounts, s)
		case r.competes(s.ask, families):
			beside = append(beside, s.ask)
		}
	}
	if (bound{room: r}).holds(p, families, append(beside, pending...)) {
		keep = amounts
	} else if !r.fits(&p.Pod) {
		return r.noBlock(p), false, false
	} else if len(pending) > 0 {
		return vague(pending), true, false
	}
	if s := r.robbed(p, keep); s != nil {
		return heldFor(s), false, true
	}
	return "", false, false
}

// vague is the text for a pod that has no room for sure beside some that have not reported their devices.
func vague(others []*ask) string {
	return fmt.Sprintf("it is not known yet which devices %s and %d others have", others[0].who(), len(others)-1)
}

func heldFor(s *seat) string { return "the rest of it is held for " + s.owner.whom() }

// awaited is a seat of another hold that waits for room and competes with a pod; nil if there is none.
// It gets what becomes free. A pod whose own seat has its room does not wait for that.
func (r *room) awaited(p *ask) *seat {
	if len(r.seats) == len(r.stands) {
		return nil
	}
	families := r.families(p)
	for _, s := range r.seats {
		if s.owner.id != p.Hold && r.competes(s.ask, families) && !slices.Contains(r.stands, s) {
			return s
		}
	}
	return nil
}

// families are those of what a pod asks for.
func (r *room) families(p *ask) map[string]bool {
	out := map[string]bool{}
	for _, name := range p.names {
		out[r.family(name)] = true
	}
	return out
}

// whom is whom a hold is for, for people.
func (o *owner) whom() string {
	if o.amounts {
		return "another cluster"
	}
	return "pods to come of " + o.name
}

// never is why a pod has no room on an otherwise idle node, as far as that shows without a trial; empty
// if it may have.
func (r *room) never(p *ask) string {
	if r.passed != "" {
		return r.passed
	}
	for _, name := range p.names {
		if _, ours := r.kinds[name]; !ours {
			return fmt.Sprintf("the node does not offer %s through the device plugin, or its agent is not ready", name)
		}
		if n := p.needs[name]; r.largest(name) == 0 {
			return fmt.Sprintf("no room for %d of %s: none is free", n, name)
		}
	}
	// Refuse numbers that a node can never give before counting with them.
	if p.beyond(r.has) != "" || r.tooLarge(p) {
		return r.noBlock(p)
	}
	return ""
}

// robbed is the first of some seats that has no room once a pod has what it asks for; nil where each
// has.
func (r *room) robbed(p *ask, all []*seat) *seat {
	if len(all) == 0 {
		return nil
	}
	seats := all
	t := r.after().anew()
	if spot, _ := p.tiers(); spot { // it may not rob guaranteed seats of their room, but of the chance to use it
		for _, s := range seats {
			if !s.owner.amounts && !s.spotOnly() {
				t.expect(s.ask)
			}
		}
		seats = slices.DeleteFunc(slices.Clone(seats), func(s *seat) bool { return !s.spotOnly() && !s.owner.amounts })
	}
	if !t.pod(&p.Pod) {
		return all[0] // beside pods that have not reported it has none by the packing
	}
	for _, s := range seats {
		if !t.pod(&s.Pod) {
			return s
		}
	}
	return nil
}

// tooLarge reports whether one container asks for more than any could have.
func (r *room) tooLarge(p *ask) bool {
	for i := range p.Containers {
		for name, n := range p.Containers[i].Requests {
			if _, ours := r.kinds[name]; ours && n > r.largest(name) {
				return true
			}
		}
	}
	return false
}

// noBlock is the text for a pod that no free block is large enough for.
func (r *room) noBlock(p *ask) string {
	var largest []string
	for _, name := range p.names {
		largest = append(largest, fmt.Sprintf(
			"no room for %d of %s: the largest free block is %d", p.needs[name], name, r.block(name)))
	}
	return strings.Join(largest, "; ")
}

// competes reports whether a pod asks for something of the families, or for the same in the guaranteed tier.
func (r *room) competes(p *ask, families map[string]bool) bool {
	for _, name := range p.names {
		if _, ours := r.kinds[name]; !ours {
			continue
		}
		if of := r.family(name); families[of] || families[piece.InSpot(of)] {
			return true
		}
	}
	return false
}
