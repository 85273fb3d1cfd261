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
	// Namespace is the pods' namespace, for KeepApart; empty if it is not known.
	Namespace  string
	Containers []Container
	// Plain is what a pod asks for beside the agents' devices.
	Plain Amounts
	N     int
	// Among are the nodes on which the books look for room.
	Among []string
	// Closed are nodes that take no new pods. Pods of the group that are there already have their seats there.
	Closed []string
}

// hold is room that is set aside before pods use it: seats, until it is given up. It is for groups of
// pods ([Books.Hold]), each pod with a seat of its own, or for amounts ([Books.Keep]), which pods take
// in pieces of any size.
type hold struct {
	*owner
	seats []*seat
	// members are the pods of the hold that have or will have devices of a node, by UID.
	members map[string]*entry
	// among are the nodes on which pods of a hold for groups are members. It is nil until the groups are known:
	// then pods on all nodes are.
	among map[string]bool
	// open are the nodes of each group that take new pods.
	open []map[string]bool
	// want is how much the caller wants of each resource. It is nil for a hold for groups.
	want map[string]int
	// where reports whether an amount may be on a node. It may be nil, for any node.
	where func(node string) bool
}

// owner identifies a hold: its ID, a name for people, and whether it is for amounts.
type owner struct {
	id, name string
	amounts  bool
}

// seat is room on a node for what a pod asks for.
type seat struct {
	*ask  // of a pod that does not exist
	owner *owner
	// namespace is that of the pod, empty if it is not known.
	namespace string
	// open is true while no member uses the seat. Then it is in its node's list of seats.
	open bool
	// group is the index of the seat's group, 0 for an amount.
	group int
	// age is the seat's number; a seat that is made later has a higher one. If there is not room for all, the
	// oldest keep theirs.
	age  int
	node string
	by   string // the UID of the member that uses it, empty if none does
	// part is the amount that the seat is for, zero for a seat of a group.
	part Part
}

// holds are all holds of Books.
type holds struct {
	b *Books
	// by has the holds by ID.
	by map[string]*hold
	// age is the age of the seat that was made last.
	age int
	// pause is called between the steps of a long search.
	pause func()
	// kept are the holds for amounts, oldest first.
	kept []*hold
	// moved is true if there has been news since balance last looked at kept.
	moved bool
}

// Hold finds a seat for each pod of some groups, and keeps the seats under an ID until [Books.Drop]. It returns the
// nodes of each group's pods. If a pod finds no room, Hold returns its [Refusal], and holds nothing new.
//
// The seats are for pods with that ID as their Hold. Each uses a seat for the same requests, and leaves it when it is
// gone. name is for people: the reason of a pod that is refused beside the hold names it.
//
// If there is a hold with that ID, Hold changes it: seats that have their room stay where they are, and the books look
// for the others. They do so only when the caller calls Hold, since it has written down on which nodes the pods are to
// go. If the others find no room, the hold stays as it was. Only pods on nodes of the groups use its seats. A job that
// comes back from elsewhere may still have pods on other nodes, which have not ended yet.
func (hs *holds) Hold(id, name string, groups []Group, now time.Time) (at [][]string, err error) {
	hs.b.expire(now)
	hs.balance()
	s := hs.search(id, name, groups)
	hs.set(s.h, s.remaining())
	hs.set(s.h, append(slices.Clone(s.h.seats), s.ofMembers()...))
	return s.fill(s.findAll)
}

// SetHold notes a hold that was written down, with the nodes of each group's pods. It looks for no room: a seat without
// room is lost ([Books.Lost]).
func (hs *holds) SetHold(id, name string, groups []Group, at [][]string) {
	h := hs.holdOf(id, name)
	var seats []*seat
	for g := range min(len(groups), len(at)) {
		for i := range min(groups[g].N, len(at[g])) {
			seats = append(seats, hs.seat(h, g, groups[g].pod(), at[g][i]))
		}
	}
	hs.set(h, seats)
}

// Drop ends the hold of an ID. Pods that use its seats keep their room.
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

// Leave takes the seats from the pods of a hold that are bound now. The caller uses it when a workload has ended its
// pods and begins anew. Pods that are bound later get seats again.
func (hs *holds) Leave(id string) {
	for _, e := range hs.b.pods {
		if e.Hold == id && e.Node != "" && !e.left {
			e.left = true
			hs.sit(e)
		}
	}
}

// Lost returns the nodes of a hold's seats that are lost, sorted, each node once for each seat. An open seat is lost if
// it has no room, or if its node takes no new pods by the last Hold.
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

// lost reports whether a seat is open and has no room, or is open on a node that takes no new pods.
func (hs *holds) lost(s *seat) bool {
	open := hs.by[s.owner.id].open
	closed := s.group < len(open) && !open[s.group][s.node]
	return s.open && (closed || hs.b.room(s.node).lacks(s) || slices.Contains(hs.b.nodes[s.node].restOf().tight, s))
}

// Pause has f called between the steps of a search for a hold. While f runs, the books may be told and asked anything
// that does not concern that hold.
func (hs *holds) Pause(f func()) { hs.pause = f }

// holdOf returns the hold for groups of an ID, and makes it if there is none.
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

// narrow makes the pods on nodes of some groups members of a hold, and no others.
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

// seat makes a seat for a pod that asks for as much as another one. It is not open yet.
func (hs *holds) seat(h *hold, group int, as Pod, node string) *seat {
	hs.age++
	// No pod can have such a name, so no GPUNode names it as a holder.
	of := newAsk(Pod{UID: fmt.Sprintf("hold %s %d", h.id, hs.age), Name: "a pod to come of " + h.name,
		Containers: as.Containers, Plain: as.Plain, Hold: h.id})
	return &seat{ask: of, owner: h.owner, namespace: as.Namespace, group: group, age: hs.age, node: node}
}

// pod is what a pod of the group asks for.
func (g *Group) pod() Pod {
	return Pod{Namespace: g.Namespace, Containers: g.Containers, Plain: g.Plain}
}

// at returns the nodes of each group's seats, sorted.
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

// set replaces the seats of a hold. Members without a seat get one, if there is one for their requests.
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

// offer gives a member without a seat an open one for the same requests. If none is on the member's node, it takes one
// of another node, which moves to the member's.
func (hs *holds) offer(e *entry) {
	h := hs.by[e.in]
	if e.sits != nil || h.want != nil {
		return
	}
	var found *seat
	best := -1
	for _, s := range h.seats {
		if !s.open || s.shape != e.shape {
			continue
		}
		match := 0 // a seat on its node counts for more than one for the same cpu and the like
		if s.node == e.at {
			match += 2
		}
		if slices.Equal(s.Plain, e.Plain) {
			match++
		}
		if match > best {
			found, best = s, match
		}
	}
	if found != nil {
		hs.open(found, false)
		found.node, found.by, e.sits = e.at, e.UID, found
	}
}

// older compares seats by their turn to get room: those of groups come before those of amounts, which may as well be
// on another node, guaranteed ones before spot ones, and then the oldest first.
func older(x, y *seat) int {
	return cmp.Or(last(x.owner.amounts, y.owner.amounts), last(x.spotOnly(), y.spotOnly()), cmp.Compare(x.age, y.age))
}

// open opens a seat, or closes it.
func (hs *holds) open(s *seat, open bool) {
	if open == s.open {
		return
	}
	n := hs.b.node(s.node)
	i, _ := slices.BinarySearchFunc(n.seats, s, older)
	n.rest = nil
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

// sit makes a pod a member of its hold and gives it a seat, or takes both away.
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
		hs.set(is, hs.cut(is.seats, e.needs, e.at)) // the member has a part of the amount now
	}
}

// heavier compares what pods ask for: the hardest to place comes first.
func heavier(x, y *ask) int {
	return cmp.Or(cmp.Compare(y.largest, x.largest), cmp.Compare(y.sum, x.sum), cmp.Compare(x.shape, y.shape),
		cmp.Compare(y.Plain.Of("cpu"), x.Plain.Of("cpu")))
}

// seatOf returns an open seat on a node that a pod of the hold may use, nil if there is none.
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

// who names the pod, or the pod that a seat is for, for people.
func (a *ask) who() string {
	if a.Namespace == "" {
		return a.Name // a seat's
	}
	return a.Namespace + "/" + a.Name
}
