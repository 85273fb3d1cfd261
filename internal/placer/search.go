// SPDX-License-Identifier: Apache-2.0

package placer

import (
	"container/heap"
	"fmt"
	"maps"
	"slices"
)

// search looks for room for the groups of a hold.
type search struct {
	hs     *holds
	h      *hold
	groups []Group
	// shapes are what a pod of each group asks for, as the seats have it.
	shapes []string
	// before are the seats that the hold had when the search began.
	before []*seat
}

// search begins a search for the hold of an ID.
func (hs *holds) search(id, name string, groups []Group) *search {
	h := hs.holdOf(id, name)
	hs.narrow(h, groups)
	s := &search{hs: hs, h: h, groups: groups, before: slices.Clone(h.seats)}
	for g := range groups {
		s.shapes = append(s.shapes, shapeOf(groups[g].Containers))
	}
	return s
}

// MaxSeats is how many pods a hold has room for at most. A tenant's workload may ask for any number,
// and each is looked for on all nodes.
const MaxSeats = 4096

// tooMany refuses groups of more pods; nil where there are fewer.
func tooMany(groups []Group) *Refusal {
	pods := 0
	for _, g := range groups {
		pods += min(g.N, MaxSeats+1)
	}
	if pods <= MaxSeats {
		return nil
	}
	no := newRefusal()
	no.Of, no.Group = pods, -1
	for _, g := range groups {
		for _, node := range g.Among {
			no.Nodes[node] = fmt.Sprintf("room is held for at most %d pods at a time", MaxSeats)
		}
	}
	return no
}

// fill seats the pods that the groups lack, the hardest to place first, and returns the nodes of each group's pods.
// find opens a seat for each and returns how many have one. If one finds no room, the hold gets the seats that it had
// before, and err is a [Refusal].
func (s *search) fill(find func(missing []*seat) (int, *Refusal)) (at [][]string, err error) {
	no := tooMany(s.groups)
	if no == nil {
		missing := s.missing()
		slices.SortStableFunc(missing, func(x, y *seat) int { return heavier(x.ask, y.ask) })
		had := len(s.h.seats)
		var found int
		if found, no = find(missing); no == nil {
			return s.h.at(len(s.groups)), nil
		}
		no.Found, no.Of, no.Group = had+found, had+len(missing), missing[found].group
		for _, o := range s.h.seats {
			if o.group == no.Group {
				no.Fit++
			}
		}
	}
	if s.hs.set(s.h, s.before); len(s.before) == 0 {
		s.hs.drop(s.h)
	}
	return nil, no
}

// remaining are the seats that stay: they have their room, and the groups still want them. Those that a member uses
// come first.
func (s *search) remaining() (out []*seat) {
	for g := range s.groups {
		n := 0
		for _, taken := range []bool{true, false} {
			for _, o := range s.h.seats {
				wanted := o.group == g && n < s.groups[g].N &&
					o.shape == s.shapes[g] && slices.Equal(o.Plain, s.groups[g].Plain)
				if wanted && taken == (o.by != "") && !s.hs.lost(o) {
					out = append(out, o)
					n++
				}
			}
		}
	}
	return out
}

// ofMembers are seats for members that have none.
func (s *search) ofMembers() (out []*seat) {
	left := s.lacks()
	for _, uid := range slices.Sorted(maps.Keys(s.h.members)) {
		e := s.h.members[uid]
		found := -1
		for g := range s.groups {
			wants := e.sits == nil && left[g] > 0 && s.shapes[g] == e.shape
			if wants && (found < 0 || slices.Equal(s.groups[g].Plain, e.Plain)) {
				found = g
			}
		}
		if found >= 0 {
			out = append(out, s.hs.seat(s.h, found, s.groups[found].pod(), e.at))
			left[found]--
		}
	}
	return out
}

// lacks is how many seats more each of the groups needs.
func (s *search) lacks() []int {
	left := make([]int, len(s.groups))
	for g := range s.groups {
		left[g] = s.groups[g].N
	}
	for _, o := range s.h.seats {
		left[o.group]--
	}
	return left
}

// missing are the seats that the groups lack, on no node yet.
func (s *search) missing() (out []*seat) {
	for g, n := range s.lacks() {
		for range n {
			out = append(out, s.hs.seat(s.h, g, s.groups[g].pod(), ""))
		}
	}
	return out
}

// findAll opens each seat on the best node that has room for it. Seats that follow each other and ask for
// the same are looked for at once.
func (s *search) findAll(missing []*seat) (found int, no *Refusal) {
	for len(missing) > 0 {
		n := 1
		for n < len(missing) && missing[n].group == missing[0].group && missing[n].shape == missing[0].shape {
			n++
		}
		some, no := s.findSame(missing[:n])
		if found += some; no != nil {
			return found, no
		}
		missing = missing[n:]
	}
	return found, nil
}

// findSame is findAll of seats of one group that ask for the same. It looks at each node once, and again
// only at a node that got a seat or had news: a hold may have hundreds of seats.
func (s *search) findSame(missing []*seat) (found int, no *Refusal) {
	one, among := missing[0].ask, s.groups[missing[0].group].Among
	judge := func(name string) verdict { return s.hs.b.nodes[name].judgeSeat(s.hs.b.room(name), one) }
	var all choices
	consider := func(name string) {
		if v := judge(name); v.why == "" {
			heap.Push(&all, choice{name, v})
		}
		s.hs.pause()
	}
	for _, name := range among {
		consider(name)
	}
	pick := func() int {
		if s.hs.b.asked == nil {
			return 0 // the first of a heap
		}
		return s.hs.b.pick(one, missing[0].namespace, all)
	}
	for _, next := range missing {
		at := pick()
		for len(all) > 0 && judge(all[at].node) != all[at].verdict { // there was news
			consider(heap.Remove(&all, at).(choice).node)
			at = pick()
		}
		if len(all) == 0 {
			no := newRefusal()
			for _, name := range among {
				v := judge(name)
				no.note(one, s.hs.b.room(name), name, &v)
			}
			return found, no
		}
		node := heap.Remove(&all, at).(choice).node
		s.seat(next, node)
		consider(node)
		found++
	}
	return found, nil
}

// seat gives a seat a node and opens it there.
func (s *search) seat(of *seat, node string) {
	of.node = node
	s.h.seats = append(s.h.seats, of)
	s.hs.open(of, true)
}

// choices are a heap, the best first.
type choices []choice

func (c choices) Len() int           { return len(c) }
func (c choices) Less(i, j int) bool { return better(&c[i], &c[j]) < 0 }

// first returns the index of the best one, 0 if there is none.
func (c choices) first() (at int) {
	for i := range c {
		if c.Less(i, at) {
			at = i
		}
	}
	return at
}

func (c choices) Swap(i, j int) { c[i], c[j] = c[j], c[i] }
func (c *choices) Push(x any)   { *c = append(*c, x.(choice)) }
func (c *choices) Pop() any {
	last := len(*c) - 1
	out := (*c)[last]
	*c = (*c)[:last]
	return out
}
