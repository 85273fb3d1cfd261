// SPDX-License-Identifier: Apache-2.0

package placer

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"
)

// Group is a number of pods that ask for the same, and the nodes that they may be on.
type Group struct {
	Containers []Container
	N          int
	// Among are the nodes on which there may be room. Closed are those that take no new pods,
	// where pods of the group may be all the same.
	Among, Closed []string
}

// hold is room that is set aside before pods use it: seats, until it is given up. It is for groups of
// pods ([Books.Hold]), each pod with a seat of its own, or for amounts ([Books.Keep]), which pods take
// in pieces of any size.
type hold struct {
	*owner
	seats []*seat
	// members are the pods of the hold that have or will have devices of a node. A hold for groups
	// counts those on nodes of among alone, or all while that is nil: the groups are not known yet.
	// open are the nodes of each group that take new pods.
	members map[string]*entry
	among   map[string]bool
	open    []map[string]bool
	// want is how much is to be kept of each resource, nil of a hold for groups; where, if set,
	// says on which nodes.
	want  map[string]int
	where func(node string) bool
}

// owner is whose a hold is: its ID, a name for people, and whether it is for amounts.
type owner struct {
	id, name string
	amounts  bool
}

// seat is room on a node for what a pod asks for. While no member uses it, it is open, and among
// the node's.
type seat struct {
	*ask  // it is no pod of the API's, and never has devices
	owner *owner
	open  bool
	group int
	// age counts seats: where there is not room for all, those that came first keep theirs.
	age  int
	node string
	by   string // the UID of the member that uses it, empty if none does
	// part is the amount that the seat is for, zero of a group's.
	part Part
}

// holds are what Books hold, by ID.
type holds struct {
	b   *Books
	by  map[string]*hold
	age int
	// pause is called between the steps of a long search.
	pause func()
	// kept are the holds for amounts, oldest first. moved is true when there was news since balance
	// last looked at them.
	kept  []*hold
	moved bool
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
func (hs *holds) Hold(id, name string, groups []Group, now time.Time) (at [][]string, err error) {
	hs.b.expire(now)
	hs.balance()
	s := hs.search(id, name, groups)
	hs.set(s.h, s.remaining())
	hs.set(s.h, append(slices.Clone(s.h.seats), s.ofMembers()...))
	return s.fill(s.findAll)
}

// SetHold notes a hold as it was written down, with the nodes of each group's pods. It looks for no
// room: seats that have none are lost ([Books.Lost]).
func (hs *holds) SetHold(id, name string, groups []Group, at [][]string) {
	h := hs.holdOf(id, name)
	var seats []*seat
	for g := range min(len(groups), len(at)) {
		for i := range min(groups[g].N, len(at[g])) {
			seats = append(seats, hs.seat(h, g, groups[g].Containers, at[g][i]))
		}
	}
	hs.set(h, seats)
}

// Drop gives up what is held under an ID. Pods that have got some of it keep that.
func (hs *holds) Drop(id string) {
	if h := hs.by[id]; h != nil {
		hs.b.news++
		hs.drop(h)
	}
}

func (hs *holds) drop(h *hold) {
	hs.set(h, nil)
	for _, e := range h.members {
		e.in = ""
	}
	delete(hs.by, h.id)
	hs.kept = slices.DeleteFunc(hs.kept, func(o *hold) bool { return o == h })
	hs.moved = true
}

// Leave takes their seats from the pods of a hold that are on nodes now: the workload has ended them,
// and begins anew. Pods that are bound later get seats again.
func (hs *holds) Leave(id string) {
	for _, e := range hs.b.pods {
		if e.Hold == id && e.Node != "" && !e.left {
			e.left = true
			hs.sit(e)
		}
	}
}

// Lost returns the nodes of seats that have lost their room, or that take no new pods by the last Hold,
// sorted, a node once for each seat.
func (hs *holds) Lost(id string) (nodes []string) {
	if h := hs.by[id]; h != nil {
		for _, s := range h.seats {
			if hs.lost(s) {
				nodes = append(nodes, s.node)
			}
		}
	}
	slices.Sort(nodes)
	return nodes
}

// lost reports whether a seat is open and has lost its room, or is on a node that takes no new pods.
func (hs *holds) lost(s *seat) bool {
	open := hs.by[s.owner.id].open
	closed := s.group < len(open) && !open[s.group][s.node]
	return s.open && (closed || hs.b.room(s.node).lacks(s))
}

// Pause has f called between the steps of a search for a hold: the books may be told and asked of
// anything but that hold meanwhile.
func (hs *holds) Pause(f func()) { hs.pause = f }

// Holds are the IDs of all holds for groups, in order.
func (hs *holds) Holds() (ids []string) {
	for id, h := range hs.by {
		if h.want == nil {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	return ids
}

// holdOf is the hold of an ID, which is made where there is none.
func (hs *holds) holdOf(id, name string) *hold {
	h := hs.by[id]
	if h == nil {
		h = &hold{owner: &owner{id: id}, members: map[string]*entry{}}
		hs.by[id] = h
		hs.sitAll(h)
	}
	h.name = name
	return h
}

// narrow makes pods members that are on nodes of some groups, and no others.
func (hs *holds) narrow(h *hold, groups []Group) {
	among := map[string]bool{}
	h.open = make([]map[string]bool, len(groups))
	for i, g := range groups {
		h.open[i] = map[string]bool{}
		for _, node := range g.Among {
			h.open[i][node], among[node] = true, true
		}
		for _, node := range g.Closed {
			among[node] = true
		}
	}
	if h.among == nil || !maps.Equal(among, h.among) {
		h.among = among
		hs.sitAll(h)
	}
}

// sitAll finds out which pods are members of a hold.
func (hs *holds) sitAll(h *hold) {
	var of []*entry
	for _, e := range hs.b.pods {
		if e.Hold == h.id {
			of = append(of, e)
		}
	}
	slices.SortFunc(of, func(x, y *entry) int { return cmp.Compare(x.UID, y.UID) })
	for _, e := range of {
		hs.sit(e)
	}
}

// seat makes a seat, which is not open yet.
func (hs *holds) seat(h *hold, group int, containers []Container, node string) *seat {
	hs.age++
	// No pod has such a name, so that no GPUNode names it as a holder.
	of := newAsk(Pod{UID: fmt.Sprintf("hold %s %d", h.id, hs.age), Name: "a pod to come of " + h.name,
		Containers: containers, Hold: h.id})
	return &seat{ask: of, owner: h.owner, group: group, age: hs.age, node: node}
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

// set gives a hold other seats, and members that had none or lose theirs what there is.
func (hs *holds) set(h *hold, seats []*seat) {
	stays := make(map[*seat]bool, len(seats))
	for _, s := range seats {
		stays[s] = true
	}
	for _, s := range h.seats {
		if stays[s] {
			continue
		}
		if hs.open(s, false); s.by != "" {
			hs.b.pods[s.by].sits, s.by = nil, ""
		}
	}
	h.seats = seats
	for _, s := range seats {
		hs.open(s, s.by == "")
	}
	for _, uid := range slices.Sorted(maps.Keys(h.members)) {
		hs.offer(h.members[uid])
	}
}

// offer gives a member a seat of one that asks for the same, if it has none: one of its node, or
// else another, which goes with it.
func (hs *holds) offer(e *entry) {
	h := hs.by[e.in]
	if e.sits != nil || h.want != nil {
		return
	}
	var found *seat
	for _, s := range h.seats {
		if s.open && s.shape == e.shape {
			if s.node == e.at {
				found = s
				break
			}
			found = cmp.Or(found, s)
		}
	}
	if found != nil {
		hs.open(found, false)
		found.node, found.by, e.sits = e.at, e.UID, found
	}
}

// older sorts seats as they get their room: those of groups before those of amounts, which may as well be
// elsewhere, and then those that came first.
func older(x, y *seat) int {
	switch {
	case x.owner.amounts == y.owner.amounts:
		return cmp.Compare(x.age, y.age)
	case y.owner.amounts:
		return -1
	}
	return 1
}

// open puts a seat among those of its node, or takes it out.
func (hs *holds) open(s *seat, open bool) {
	if open == s.open {
		return
	}
	n := hs.b.node(s.node)
	i, _ := slices.BinarySearchFunc(n.seats, s, older)
	if s.open = open; open {
		n.room = n.room.joined(s, i == len(n.seats))
		n.seats = slices.Insert(slices.Clip(n.seats), i, s)
	} else {
		n.room = nil
		n.seats = slices.Delete(slices.Clone(n.seats), i, i+1)
	}
	hs.moved = true
	hs.b.prune(s.node)
}

// sit puts a pod among the members of its hold, with a seat, or takes it out.
func (hs *holds) sit(e *entry) {
	was, is := hs.by[e.in], hs.by[e.Hold]
	if e.at == "" || e.left || is != nil && is.among != nil && !is.among[e.at] {
		is = nil
	}
	if s := e.sits; s != nil && (is != was || s.node != e.at || s.shape != e.shape) {
		s.by, e.sits = "", nil
		hs.open(s, true)
	}
	if was != nil && was != is {
		delete(was.members, e.UID)
	}
	if e.in = ""; is == nil {
		return
	}
	e.in = is.id
	_, known := is.members[e.UID]
	is.members[e.UID] = e
	if hs.offer(e); is.want != nil && !known {
		hs.set(is, hs.cut(is.seats, e.needs, e.at)) // it has some of what is kept
	}
}

// heavier sorts what pods ask for, the hardest to place first.
func heavier(x, y *ask) int {
	return cmp.Or(cmp.Compare(y.largest, x.largest), cmp.Compare(y.sum, x.sum), cmp.Compare(x.shape, y.shape))
}

// seatOf is an open seat on a node that a pod may use; nil where there is none.
func (n *node) seatOf(h *hold, shape string) *seat {
	if h == nil || n == nil {
		return nil
	}
	for _, s := range n.seats {
		if s.owner == h.owner && s.shape == shape && h.want == nil {
			return s
		}
	}
	return nil
}

// who is the pod for people.
func (a *ask) who() string { return a.Namespace + "/" + a.Name }
