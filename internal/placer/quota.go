// SPDX-License-Identifier: Apache-2.0

package placer

import (
	"cmp"
	"maps"
	"slices"
	"strings"

	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/pkg/mig"
)

// Part is an amount of a resource in one place: on one node, and for memory units on one GPU.
type Part struct {
	Node, Resource string
	N              int
}

// Keep keeps room for an amount of each resource under an ID, until the next call or [Books.Drop]. It returns the
// amounts that found no room, nil if all did. The books look for these again after each piece of news.
//
// It takes the nodes that where returns true for, or any node if where is nil. where may change its answer only with
// news of that node. Pods with the ID as their Hold use the room, and what they have is part of it.
//
// Such a pod goes before pods that may still come. If there is not room for the rest of the hold's amount beside it,
// that rest loses its room. If that is not enough, other amounts on the node lose theirs, too; seats of groups do not.
//
// Each resource is kept in as few parts as there is room for. A part that has lost its room is in short until it finds
// other room. If there is too little room, older parts keep theirs.
func (hs *holds) Keep(id string, want map[string]int, where func(node string) bool) (short map[string]int) {
	// First the amounts that are kept already find room after news. Otherwise this hold, if it is older and wants
	// more now, would take the room that another one is about to find again.
	hs.balance()
	h := hs.by[id]
	if h == nil {
		h = &hold{owner: &owner{id: id, amounts: true}, members: map[string]*entry{}, want: map[string]int{}}
		hs.by[id] = h
		hs.kept = append(hs.kept, h)
		hs.sitAll(h)
	}
	h.want, h.where = maps.Clone(want), where
	hs.moved = true
	hs.b.news++
	_, short = hs.Kept(id)
	return short
}

// Kept returns the parts that are kept under an ID beside what members use, and the amounts that have no room, nil if
// there are none.
func (hs *holds) Kept(id string) (parts []Part, short map[string]int) {
	hs.balance()
	h := hs.by[id]
	if h == nil {
		return nil, nil
	}
	for name, n := range h.short() {
		if n > 0 {
			if short == nil {
				short = map[string]int{}
			}
			short[name] = n
		}
	}
	for _, s := range h.seats {
		parts = append(parts, s.part)
	}
	slices.SortFunc(parts, func(x, y Part) int {
		return cmp.Or(cmp.Compare(x.Node, y.Node), harder(x.Resource, y.Resource), cmp.Compare(y.N, x.N))
	})
	return parts, short
}

// MembersOn returns the nodes with pods of a hold, sorted.
func (hs *holds) MembersOn(id string) (nodes []string) {
	if h := hs.by[id]; h != nil {
		for _, e := range h.members {
			nodes = append(nodes, e.at)
		}
	}
	slices.Sort(nodes)
	return slices.Compact(nodes)
}

// short returns how much of each resource is wanted and not kept. It is negative where too much is kept.
func (h *hold) short() map[string]int {
	out := maps.Clone(h.want)
	for _, e := range h.members {
		for name, n := range e.needs {
			if left, of := out[name]; of {
				out[name] = max(0, left-n)
			}
		}
	}
	for _, s := range h.seats {
		out[s.part.Resource] -= s.part.N
	}
	return out
}

// balance adapts the holds for amounts to the room that there is after news.
func (hs *holds) balance() {
	if !hs.moved || len(hs.kept) == 0 {
		return
	}
	hs.moved = false
	for _, h := range hs.kept {
		hs.set(h, slices.DeleteFunc(slices.Clone(h.seats),
			func(s *seat) bool { return h.where != nil && !h.where(s.node) }))
		for name, n := range h.short() {
			if n < 0 {
				hs.set(h, hs.less(h.seats, name, -n))
			}
		}
	}
	// Find all lost seats before any goes: one that goes would open room for another on the same node.
	lost := map[*seat]bool{}
	for _, h := range hs.kept {
		for _, s := range h.seats {
			lost[s] = hs.lost(s)
		}
	}
	for _, h := range hs.kept {
		hs.set(h, slices.DeleteFunc(slices.Clone(h.seats), func(s *seat) bool { return lost[s] }))
	}
	for _, h := range hs.kept {
		hs.regain(h)
	}
	hs.moved = false // set by the changes above
}

// regain looks for room for the amounts that a hold lacks.
func (hs *holds) regain(h *hold) {
	short := h.short()
	for _, name := range slices.SortedFunc(maps.Keys(short), harder) {
		hs.extend(h, name, short[name])
	}
}

// extend keeps up to n more of a resource, in the largest parts that there is room for. Among equals it takes the node
// where the least is left beside the part.
func (hs *holds) extend(h *hold, resource string, n int) {
	for n > 0 {
		best, most, tight := "", 0, 0
		for _, name := range slices.Sorted(maps.Keys(hs.b.nodes)) {
			if h.where != nil && !h.where(name) {
				continue
			}
			all := hs.b.room(name).chunk(resource)
			if c := min(all, n); c > most || c == most && c > 0 && all < tight {
				best, most, tight = name, c, all
			}
		}
		if most == 0 {
			return
		}
		n -= most
		hs.add(h, Part{best, resource, most})
	}
}

// add keeps one part more. If there is room, it joins the part with another one on the same node, since one large
// part is worth more than two.
func (hs *holds) add(h *hold, p Part) {
	i := slices.IndexFunc(h.seats, func(s *seat) bool { return s.part.Node == p.Node && s.part.Resource == p.Resource })
	if i >= 0 {
		before := slices.Clone(h.seats)
		all := Part{p.Node, p.Resource, before[i].part.N + p.N}
		hs.set(h, slices.Delete(slices.Clone(before), i, i+1))
		if hs.b.room(p.Node).chunk(p.Resource) >= all.N {
			p = all
		} else {
			hs.set(h, before)
		}
	}
	hs.set(h, append(slices.Clone(h.seats), hs.parted(h, p)))
}

// parted makes a seat for a part.
func (hs *holds) parted(h *hold, p Part) *seat {
	s := hs.seat(h, 0, Pod{Containers: []Container{{Requests: map[string]int{p.Resource: p.N}}}}, p.Node)
	s.part = p
	return s
}

// smaller makes a seat of the same age for n of the same part.
func (hs *holds) smaller(s *seat, n int) *seat {
	out := hs.parted(hs.by[s.owner.id], Part{s.part.Node, s.part.Resource, n})
	out.age = s.age
	return out
}

// harder compares names of resources: large MIG profiles come first, since MIG devices exclude each other.
func harder(x, y string) int {
	return cmp.Or(cmp.Compare(slicesOf(y), slicesOf(x)), cmp.Compare(x, y))
}

// slicesOf returns a number that orders MIG profiles by their size, 0 for other resources.
func slicesOf(resource string) int {
	resource, _ = piece.OfSpot(resource)
	_, short, _ := strings.Cut(resource, "/")
	profile, err := mig.ParseResource(short)
	if err != nil {
		return 0
	}
	return profile.Slices*1000 + profile.GB
}

// less takes n of a resource out of seats, the smallest first.
func (hs *holds) less(seats []*seat, resource string, n int) (out []*seat) {
	smallest := slices.Clone(seats)
	slices.SortStableFunc(smallest, func(x, y *seat) int { return cmp.Compare(x.part.N, y.part.N) })
	left := map[*seat]int{}
	for _, s := range smallest {
		if left[s] = s.part.N; s.part.Resource == resource {
			k := min(n, s.part.N)
			left[s], n = s.part.N-k, n-k
		}
	}
	for _, s := range seats {
		switch left[s] {
		case 0:
		case s.part.N:
			out = append(out, s)
		default:
			out = append(out, hs.smaller(s, left[s]))
		}
	}
	return out
}

// cut takes what a pod asks for out of the seats on its node. For each resource it takes from the smallest seat that
// has enough. If none has, it takes from several, the smallest first.
func (hs *holds) cut(seats []*seat, needs map[string]int, node string) []*seat {
	var here, out []*seat
	for _, s := range seats {
		if s.node == node {
			here = append(here, s)
		} else {
			out = append(out, s)
		}
	}
	for _, resource := range sorted(needs) {
		n := needs[resource]
		var whole *seat
		for _, s := range here {
			if s.part.Resource == resource && s.part.N >= n && (whole == nil || s.part.N < whole.part.N) {
				whole = s
			}
		}
		if whole == nil {
			here = hs.less(here, resource, n)
			continue
		}
		i := slices.Index(here, whole)
		rest := hs.less([]*seat{whole}, resource, n)
		here = slices.Concat(here[:i], rest, here[i+1:])
	}
	return append(out, here...)
}
