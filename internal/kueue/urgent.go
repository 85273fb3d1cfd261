// SPDX-License-Identifier: Apache-2.0

package kueue

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"example.com/gpu-agent/internal/placer"
)

// lookAgain is how often it is looked anew who makes room for an urgent workload. To go through a
// large fleet takes a part of a second.
const lookAgain = time.Second

// urgent answers whether there is room for an urgent workload, and has others make some where there
// is none: ends are what these are told.
func (c *Checks) urgent(w *Workload, s *CheckState, v *View, now time.Time) (a *Answer, ends []Answer) {
	want := c.want(w, v, c.byFlavors(w, v))
	h := c.held[c.id(w)]
	if !want.asks || s.State != Pending || h != nil && h.by != w.UID {
		if a = c.onPrem(w, s, v, now); a != nil && a.State.State == Retry {
			a = retry(a.State.Message, 0) // it is not kept from any flavor: once it has quota again, others make room
		}
		return a, nil
	}
	at, no := c.find(w, &want, false)
	if no == nil {
		return c.placed(w, &want, at), nil
	}
	if _, lately := c.sought[w.UID]; lately {
		return nil, nil
	}
	c.sought[w.UID] = now
	guests := c.guests(w, v)
	gone, at, no := c.books.Open(c.id(w), w.Namespace+"/"+w.Name, want.groups, guests)
	if no != nil {
		c.drop(c.id(w))
		if no.Waits {
			return pending("no room yet: " + because(no, &want)), nil
		}
		why := "no room, not even without workloads of lower priority: " + because(no, &want)
		return pending(why), nil
	}
	c.held[c.id(w)] = &held{by: w.UID, shape: want.shape, opening: true}
	why := fmt.Sprintf("its room is for a workload of a higher priority (UID: %s)", w.UID)
	for _, y := range sorted(v.Workloads) {
		if !slices.Contains(gone, c.id(y)) || c.held[c.id(y)] == nil || c.held[c.id(y)].by != y.UID {
			continue
		}
		c.drop(c.id(y))
		for i := range y.Checks {
			if k := &y.Checks[i]; y.Reserved && c.room(v, k.Name) {
				theirs := c.want(y, v, c.byFlavors(y, v))
				ends = append(ends, c.refuse(y, &theirs, -1, why).to(y, k, now))
			}
		}
	}
	return pending("other workloads make room: " + places(at)), ends
}

// guests are the holds whose room a workload may take: of workloads of lower priority, the youngest
// of the lowest first. Those that have lost their quota go in any case.
func (c *Checks) guests(w *Workload, v *View) (out []placer.Guest) {
	all := sorted(v.Workloads)
	slices.Reverse(all)
	slices.SortStableFunc(all, func(x, y *Workload) int { return cmp.Compare(x.Priority, y.Priority) })
	seen := map[string]bool{c.id(w): true}
	for _, y := range all {
		h := c.held[c.id(y)]
		told := func(s CheckState) bool { return s.State == Retry && c.room(v, s.Name) }
		going := h == nil && (y.Over || y.Evicted || !y.Reserved || slices.ContainsFunc(y.Checks, told))
		yields := h != nil && h.by == y.UID && y.Priority < w.Priority
		if seen[c.id(y)] || !going && !yields {
			continue
		}
		seen[c.id(y)] = true
		out = append(out, placer.Guest{ID: c.id(y), Rank: y.Priority, Going: going})
	}
	return out
}
