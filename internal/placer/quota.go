// SPDX-License-Identifier: Apache-2.0

package placer

import (
	"cmp"
	"maps"
	"slices"
	"strings"

	"example.com/gpu-agent/pkg/mig"
)

// Part is so much of a resource that is kept in one place: on one node, and of memory units
// on one GPU.
type Part struct {
	Node, Resource string
	N              int
}

// Keep keeps room for so much of each resource under an ID, until the next call or [Books.Drop]. It
// takes nodes for which where returns true, or any node if where is nil; where may answer otherwise
// after news of a node. Pods with that ID as their Hold use the room, and what they have is part of
// it. Short is what found no room, nil if all did. The books look for it again after each piece of news.
//
// Each resource is kept in as few parts as there is room for. A part that loses its room is in short
// until it finds other room. When there is too little room, older parts keep theirs.
func (hs *holds) Keep(id string, want map[string]int, where func(node string) bool) (short map[string]int) {
	// With news comes first what is kept already: one that wants more, and has been there for
	// longer, would get the room that another one is to have back.
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

// Kept is what is kept under an ID beside what members use, and what there is no room for,
// nil if nothing.
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

// MembersOn are the nodes with pods of a hold.
func (hs *holds) MembersOn(id string) (nodes []string) {
	if h := hs.by[id]; h != nil {
		for _, e := range h.members {
			nodes = append(nodes, e.at)
		}
	}
	slices.Sort(nodes)
	return slices.Compact(nodes)
}

// short is how much is to be kept and is not, of each resource, less than nothing where
// too much is.
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

// balance makes what is kept what there is room for, after news.
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
	// All at once: what one loses opens room for another that has none on the same node.
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
	hs.moved = false // by ourselves
}

// regain looks for room for what a hold lacks.
func (hs *holds) regain(h *hold) {
	short := h.short()
	for _, name := range slices.SortedFunc(maps.Keys(short), harder) {
		hs.extend(h, name, short[name])
	}
}

// extend keeps up to n more of a resource, in the largest parts that there is room for,
// and those where the least is left beside.
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

// add keeps one part more: as one with another on its node where there is room for that, which is
// worth more.
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

// parted makes a seat for an amount.
func (hs *holds) parted(h *hold, p Part) *seat {
	s := hs.seat(h, 0, []Container{{Requests: map[string]int{p.Resource: p.N}}}, p.Node)
	s.part = p
	return s
}

// smaller makes a seat for less of the same amount, in its place.
func (hs *holds) smaller(s *seat, n int) *seat {
	out := hs.parted(hs.by[s.owner.id], Part{s.part.Node, s.part.Resource, n})
	out.age = s.age
	return out
}

// harder sorts names of resources: of MIG devices, which exclude each other, large profiles
// first.
func harder(x, y string) int {
	return cmp.Or(cmp.Compare(slicesOf(y), slicesOf(x)), cmp.Compare(x, y))
}

// slicesOf is how large a MIG device is, 0 for what is none.
func slicesOf(resource string) int {
	_, short, _ := strings.Cut(resource, "/")
	profile, err := mig.ParseResource(short)
	if err != nil {
		return 0
	}
	return profile.Slices*1000 + profile.GB
}

// less takes n of a resource out of seats, of the smallest first.
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

// cut takes what a pod asks for out of the seats on its node: of each resource out of the smallest
// that has as much, or else out of the smallest ones.
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
