// SPDX-License-Identifier: Apache-2.0

package placer

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"time"
)

// Group is so many pods that ask for the same, each of which may be on some nodes.
type Group struct {
	Containers []Container
	N          int
	// Among are the nodes on which there may be room. Closed are those that take no new pods,
	// where pods of the group may be all the same.
	Among, Closed []string
}

// hold is room for pods that are to come.
type hold struct {
	id, name string
	seats    []*seat
	// among are all nodes of its groups, nil while they are not known, and members the pods of
	// the hold that have or will have devices of one of them.
	among   map[string]bool
	members map[string]*entry
	seq     int
}

// holds are what Books hold, by ID.
type holds struct {
	b  *Books
	by map[string]*hold
}

// seat is the room of one pod of a hold. While no member has it, its entry is among the pods
// of its node, and is not the API's: it never reports devices.
type seat struct {
	entry
	group int
	node  string
	by    *entry
}

// Hold finds room for groups of pods, for all or for none, and keeps it under an ID until
// [Books.Drop]. It is for pods whose Hold is that ID: each uses one seat, that of a pod that
// asks for the same, and leaves it when it is gone. Name is for people who are refused beside
// it. At has the nodes of each group's pods. The error is a [Refusal] of the first pod that
// finds no room.
//
// A hold that there is already becomes what is asked for now: what has its room stays
// where it is, and the rest is looked for. Where that is not found, the hold stays as it was.
// Pods of it on other nodes than those of the groups have nothing to do with it: those of a
// job that comes back from elsewhere may not have ended there yet.
func (b *Books) Hold(id, name string, groups []Group, now time.Time) (at [][]string, err error) {
	b.expire(now)
	h := b.holds.holdOf(id, name)
	b.holds.narrow(h, groups)
	before := h.seats
	b.holds.seat(h, h.remaining(groups, b.holds.lost(h)))
	b.holds.seat(h, append(slices.Clone(h.seats), h.ofMembers(groups)...))
	b.quotas.balance()
	return b.holds.fill(h, groups, before, func(e *entry, among []string) (string, *Refusal) { return b.best(context.Background(), e, among) })
}

// fill seats the pods that groups lack, the hardest to place first, each on the node that best finds.
// Where that finds none, the hold gets the seats that it had before.
func (hs *holds) fill(h *hold, groups []Group, before []*seat, best func(e *entry, among []string) (string, *Refusal)) (at [][]string, err error) {
	if no := tooMany(groups); no != nil {
		hs.restore(h, before)
		return nil, no
	}
	missing := h.missing(groups)
	slices.SortStableFunc(missing, func(x, y *seat) int { return heavier(&x.entry, &y.entry) })
	for i, s := range missing {
		node, no := best(&s.entry, groups[s.group].Among)
		if no != nil {
			found := len(h.seats)
			hs.restore(h, before)
			no.Found, no.Of = found, found+len(missing)-i
			return nil, no
		}
		s.node = node
		hs.add(h, s)
	}
	return h.at(len(groups)), nil
}

// restore gives a hold the seats that it had before, of which there may be none.
func (hs *holds) restore(h *hold, before []*seat) {
	if hs.seat(h, before); len(before) == 0 {
		hs.b.Drop(h.id)
	}
}

// MaxSeats is for how many pods a hold has room at most. Whoever writes a workload writes any
// number of them, and each is looked for on all nodes.
const MaxSeats = 4096

// tooMany refuses groups of more pods; nil where there are fewer.
func tooMany(groups []Group) *Refusal {
	pods, no := 0, &Refusal{Nodes: map[string]string{}, Largest: map[string]Block{}}
	for _, g := range groups {
		pods += min(g.N, MaxSeats+1)
		for _, node := range g.Among {
			no.Nodes[node] = fmt.Sprintf("room is held for at most %d pods at a time", MaxSeats)
		}
	}
	if no.Of = pods; pods <= MaxSeats {
		return nil
	}
	return no
}

// SetHold notes a hold as somebody has written it down, with the nodes of each group's pods,
// of which nothing is asked. Room that is not there is lost ([Books.Lost]).
func (b *Books) SetHold(id, name string, groups []Group, at [][]string) {
	h := b.holds.holdOf(id, name)
	var seats []*seat
	for g := range min(len(groups), len(at)) {
		for i := range min(groups[g].N, len(at[g])) {
			s := h.seat(g, groups[g].Containers)
			s.node = at[g][i]
			seats = append(seats, s)
		}
	}
	b.holds.seat(h, seats)
}

// Drop gives up what is held under an ID. Pods that have got some of it keep that.
func (b *Books) Drop(id string) {
	h := b.holds.by[id]
	if h == nil {
		return
	}
	b.holds.seat(h, nil)
	for _, e := range h.members {
		e.in = nil
	}
	delete(b.holds.by, id)
}

// Leave says of the pods that are on nodes that they use no seat of what is held under an ID from now
// on: those who hold it have ended them, and begin anew. Pods that are bound later do.
func (b *Books) Leave(id string) {
	for _, e := range b.pods {
		if e.Hold == id && e.Node != "" && !e.left {
			e.left = true
			b.holds.sit(e)
		}
	}
}

// Lost are the nodes on which pods of a hold that are to come have no room any more, as far
// as one can tell, one for each.
func (b *Books) Lost(id string) (nodes []string) {
	if h := b.holds.by[id]; h != nil {
		for s := range b.holds.lost(h) {
			nodes = append(nodes, s.node)
		}
	}
	slices.Sort(nodes)
	return nodes
}

// Holds are the IDs of all holds, in order.
func (b *Books) Holds() []string { return slices.Sorted(maps.Keys(b.holds.by)) }

// holdOf is the hold of an ID, which is made where there is none.
func (hs *holds) holdOf(id, name string) *hold {
	h := hs.by[id]
	if h == nil {
		h = &hold{id: id, members: map[string]*entry{}}
		hs.by[id] = h
		for _, e := range hs.b.pods {
			if e.Hold == id {
				hs.sit(e)
			}
		}
	}
	h.name = name
	return h
}

// narrow makes pods members that are on nodes of some groups, and no others.
func (hs *holds) narrow(h *hold, groups []Group) {
	among := map[string]bool{}
	for _, g := range groups {
		for _, node := range slices.Concat(g.Among, g.Closed) {
			among[node] = true
		}
	}
	if h.among != nil && maps.Equal(among, h.among) {
		return
	}
	h.among = among
	for _, e := range hs.b.pods {
		if e.Hold == h.id {
			hs.sit(e)
		}
	}
}

// seat makes a seat that is nowhere yet.
func (h *hold) seat(group int, containers []Container) *seat {
	h.seq++
	s := &seat{group: group}
	// No pod has such a name, so that no GPUNode names it as a holder.
	s.set(Pod{UID: fmt.Sprintf("hold %s %08d", h.id, h.seq), Name: "a pod to come of " + h.name, Containers: containers, Hold: h.id})
	s.seat = s
	return s
}

// remaining are the seats that stay when these groups are wanted.
func (h *hold) remaining(groups []Group, lost map[*seat]bool) (out []*seat) {
	for g := range groups {
		shape, n := fmt.Sprint(groups[g].Containers), 0
		for _, taken := range []bool{true, false} {
			for _, s := range h.seats {
				if s.group == g && s.shape == shape && n < groups[g].N && taken == (s.by != nil) &&
					(taken || !lost[s] && slices.Contains(groups[g].Among, s.node)) {
					out = append(out, s)
					n++
				}
			}
		}
	}
	return out
}

// ofMembers are seats for members that have none.
func (h *hold) ofMembers(groups []Group) (out []*seat) {
	left := map[int]int{}
	for g := range groups {
		left[g] = groups[g].N
	}
	seated := map[*entry]bool{}
	for _, s := range h.seats {
		left[s.group]--
		seated[s.by] = true
	}
	for _, uid := range slices.Sorted(maps.Keys(h.members)) {
		e := h.members[uid]
		for g := range groups {
			if !seated[e] && left[g] > 0 && fmt.Sprint(groups[g].Containers) == e.shape {
				s := h.seat(g, e.Containers)
				s.node = e.at
				out = append(out, s)
				seated[e] = true
				left[g]--
			}
		}
	}
	return out
}

// missing are seats that groups lack.
func (h *hold) missing(groups []Group) (out []*seat) {
	for g := range groups {
		n := 0
		for _, s := range h.seats {
			if s.group == g {
				n++
			}
		}
		for range groups[g].N - n {
			out = append(out, h.seat(g, groups[g].Containers))
		}
	}
	return out
}

// at are the nodes of each group's seats.
func (h *hold) at(groups int) [][]string {
	out := make([][]string, groups)
	for _, s := range h.seats {
		out[s.group] = append(out[s.group], s.node)
	}
	for _, of := range out {
		slices.Sort(of)
	}
	return out
}

// seat gives a hold other seats, and its members theirs.
func (hs *holds) seat(h *hold, seats []*seat) {
	for _, s := range h.seats {
		hs.open(s, false)
	}
	h.seats = seats
	hs.reseat(h)
}

// add gives a hold one seat more. Those that it has need not be looked at anew where all members
// sit: a hold of thousands of seats gets them one after the other.
func (hs *holds) add(h *hold, s *seat) {
	sitting := 0
	for _, o := range h.seats {
		if o.by != nil {
			sitting++
		}
	}
	if h.seats = append(h.seats, s); sitting < len(h.members) {
		hs.reseat(h)
		return
	}
	hs.open(s, true)
}

// reseat finds out which member has which seat. Where a pod has got its room elsewhere, its
// seat goes with it.
func (hs *holds) reseat(h *hold) {
	free := map[[2]string][]*seat{}
	at := func(node, shape string) *seat {
		key := [2]string{node, shape}
		of := free[key]
		for len(of) > 0 && of[0].by != nil {
			of = of[1:]
		}
		free[key] = of
		if len(of) == 0 {
			return nil
		}
		return of[0]
	}
	for _, s := range h.seats {
		s.by = nil
		free[[2]string{s.node, s.shape}] = append(free[[2]string{s.node, s.shape}], s)
		free[[2]string{"", s.shape}] = append(free[[2]string{"", s.shape}], s)
	}
	uids := slices.Sorted(maps.Keys(h.members))
	var elsewhere []*entry
	for _, uid := range uids {
		if e := h.members[uid]; at(e.at, e.shape) == nil {
			elsewhere = append(elsewhere, e)
		} else {
			at(e.at, e.shape).by = e
		}
	}
	for _, e := range elsewhere {
		if s := at("", e.shape); s != nil {
			hs.open(s, false)
			s.by, s.node = e, e.at
		}
	}
	for _, s := range h.seats {
		hs.open(s, s.by == nil)
	}
}

// open puts a seat among the pods of its node, or takes it out.
func (hs *holds) open(s *seat, open bool) {
	if open == (s.at != "") {
		return
	}
	n := hs.b.node(s.node)
	if s.at = ""; open {
		s.at = s.node
		n.here[s.UID] = &s.entry
		n.room = n.room.joined(&s.entry)
	} else {
		delete(n.here, s.UID)
		n.room = nil
	}
	hs.b.quotas.moved = true
	hs.b.prune(s.node)
}

// sit puts a pod among the members of its hold, or takes it out.
func (hs *holds) sit(e *entry) {
	was, is := e.in, hs.by[e.Hold]
	if e.at == "" || e.left || is != nil && is.among != nil && !is.among[e.at] {
		is = nil
	}
	if e.in = is; was != nil && was != is {
		delete(was.members, e.UID)
		hs.reseat(was)
	}
	if is != nil {
		is.members[e.UID] = e
		hs.reseat(is)
	}
}

// seatsOn are the open seats on a node, the hardest to place first.
func (n *node) seatsOn() (out []*seat) {
	for _, e := range n.here {
		if e.seat != nil {
			out = append(out, e.seat)
		}
	}
	slices.SortFunc(out, func(x, y *seat) int { return cmp.Or(heavier(&x.entry, &y.entry), cmp.Compare(x.UID, y.UID)) })
	return out
}

// heavier sorts what pods ask for, the hardest to place first.
func heavier(x, y *entry) int {
	return cmp.Or(cmp.Compare(y.largest, x.largest), cmp.Compare(y.sum, x.sum), cmp.Compare(x.shape, y.shape))
}

// lost are open seats of a hold for which there is no room any more.
func (hs *holds) lost(h *hold) map[*seat]bool {
	out := map[*seat]bool{}
	looked := map[string]bool{}
	for _, s := range h.seats {
		if s.at == "" || looked[s.node] {
			continue
		}
		looked[s.node] = true
		n := hs.b.nodes[s.node]
		on := n.seatsOn()
		_, no := hs.b.roomOf(n, besides(on)).seated(nil, on)
		for _, s := range no {
			if s != nil && slices.Contains(h.seats, s) {
				out[s] = true
			}
		}
	}
	return out
}

// besides are seats as those who are to be left out.
func besides(seats []*seat) map[string]bool {
	out := map[string]bool{}
	for _, s := range seats {
		out[s.UID] = true
	}
	return out
}

// seated tries a pod, and then what is to come and what quotas have, with the agent's packing.
// First is whether the pod has its room, and not are those that have none then; of a part of
// a quota nil.
func (r *room) seated(p *Pod, seats []*seat) (first bool, not []*seat) {
	t := r.expect().anew()
	if p != nil && !t.pod(p) {
		return false, nil
	}
	for _, s := range seats {
		next := t.clone()
		if !next.pod(&s.Pod) {
			not = append(not, s)
			continue
		}
		t = next
	}
	for _, p := range r.kept {
		if _, ok := t.take(p.Resource, p.N, nil); !ok {
			not = append(not, nil)
		}
	}
	return true, not
}

// pod gives a pod all that it asks for.
func (t *trial) pod(p *Pod) bool {
	again := map[string][]string{}
	for i := range p.Containers {
		c := &p.Containers[i]
		for _, name := range sorted(c.Requests) {
			if _, ours := t.kinds[name]; !ours && c.Requests[name] > 0 || ours && c.Requests[name] > 0 && !t.container(c, name, again) {
				return false
			}
		}
	}
	return true
}

// seatOf is an open seat on a node that a pod may use; nil where there is none.
func (n *node) seatOf(h *hold, e *entry) *seat {
	if h == nil || e.seat != nil {
		return nil
	}
	for _, s := range h.seats {
		if s.at != "" && n.here[s.UID] != nil && s.shape == e.shape {
			return s
		}
	}
	return nil
}

// judgeSeat gives a node's verdict on a pod that may use a seat of its hold, or on a new
// seat; alone is the verdict on it as on any other pod. Own says that there is a seat for it.
//
// Seats are beside others only where each has its room whatever the agents choose. Seats of
// one hold may be more than that, as many as the agent's packing has room for, if nobody else
// is about to get devices there. So a pod that has a seat need not wait for pods that are to
// come: it must only leave as many of them their room as had it before.
func (hs *holds) judgeSeat(h *hold, e *entry, name string, alone verdict) (v verdict, own bool) {
	n := hs.b.nodes[name]
	if n == nil {
		return alone, false
	}
	mine := n.seatOf(h, e)
	if own = mine != nil; alone.why == "" || !own && e.seat == nil {
		return alone, own
	}
	// A hold of thousands of seats is asked about the same full nodes for each of them.
	r, key := hs.b.room(name), seatKey{h.id, e.shape, own}
	v, known := r.seats[key]
	if !known {
		if v = hs.tryon(h, e, n, mine); v.why != "" && !own {
			v = alone
		}
		if r.seats == nil {
			r.seats = map[seatKey]verdict{}
		}
		if len(r.seats) < maxVerdicts && len(e.shape) <= maxShape {
			r.seats[key] = v
		}
	}
	return v, own
}

// tryon judges a pod beside the seats on a node, without the one that would be its own.
func (hs *holds) tryon(h *hold, e *entry, n *node, mine *seat) verdict {
	aside := n.seatsOn()
	if e.seat != nil {
		aside = slices.DeleteFunc(aside, func(s *seat) bool { return !slices.Contains(h.seats, s) })
	}
	if mine == nil && len(aside) == 0 {
		return verdict{why: "no seats"}
	}
	r := hs.b.roomOf(n, besides(aside))
	v := r.judge(e)
	if v.why != "" || mine == nil && len(r.pending) > 0 {
		return verdict{why: cmp.Or(v.why, "others are to come"), waits: v.waits}
	}
	_, before := r.seated(nil, aside)
	fits, after := r.seated(&e.Pod, slices.DeleteFunc(slices.Clone(aside), func(s *seat) bool { return s == mine }))
	if !fits || len(after) > len(before) {
		return verdict{why: "other pods of the same hold are to have the room first", waits: true}
	}
	v.spoilt, v.left = n.room.expect().score(&e.Pod)
	return v
}

// who is the pod for people.
func (e *entry) who() string {
	if e.seat != nil {
		return e.Name
	}
	return e.Namespace + "/" + e.Name
}
