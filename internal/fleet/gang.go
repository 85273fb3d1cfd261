// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"example.com/gpu-agent/internal/placer"
)

// hopelessFor is how long at most the pods of a group are refused without a search. The scheduler may learn that
// CPU or memory has become free, which the Fleet does not learn.
const hopelessFor = time.Minute

// gang is the result of the searches for a group of pods since the last news of a node with room for one of them.
// Its size does not depend on the number of pods.
type gang struct {
	// nodes are those on which the scheduler asked for room.
	nodes nodeSet
	// by is the UID of the pod that was refused last, and why is the reason. Both are empty if none was.
	by, why string
	// at is the time of the last search.
	at time.Time
}

// hopeless returns the reason why a pod of a group is refused without a search. It is empty if a search is needed.
//
// The scheduler asks for the pods of a group one after the other. Then it binds as many as the group needs, or it
// binds none, begins anew at once, and asks for all of them again. The Fleet does not know how many the group needs.
// When it refuses one pod, the scheduler may bind the others without it, as slowly as any pod, so they keep their
// reservations. A pod that is asked for again is not being bound. It is refused, and loses its reservation (leave).
func (f *Fleet) hopeless(p *asking, among []string) (why string) {
	g := f.gangs[p.group]
	if g == nil || g.why == "" {
		return ""
	}
	_, placed := f.answers[p.UID]
	if !placed && f.refusedPods[p.UID] == nil {
		return ""
	}
	untried := func(node string) bool { return !g.nodes.has(f.number(node)) }
	if f.now().Sub(g.at) >= hopelessFor || slices.ContainsFunc(among, untried) {
		g.by, g.why = "", ""
	}
	return g.why
}

// leave ends the reservation of a pod that is refused with its group. The room is news for other pods only if one of
// them was refused while it was reserved. Otherwise two groups that wait would wake each other without end.
func (f *Fleet) leave(p *asking) {
	a := f.answers[p.UID]
	delete(f.answers, p.UID)
	f.books.Unreserve(p.UID)
	if f.others > a.refusals || f.last != p.group && f.refusals > a.refusals {
		f.touch(a.node)
	}
}

// found notes the result of a search for room on some nodes. no is nil if there was room.
func (w *waiting) found(p *asking, among []string, no *placer.Refusal, now time.Time) {
	if by := cmp.Or(p.group, p.UID); no != nil {
		if by != w.last {
			w.last, w.others = by, w.refusals
		}
		w.refusals++
	}
	if p.group == "" {
		return
	}
	g := w.gangs[p.group]
	if g == nil {
		g = &gang{}
		w.gangs[p.group] = g
	}
	g.at = now
	for _, name := range among {
		g.nodes.add(w.number(name))
	}
	switch {
	case no != nil && slices.Equal(among, []string{p.Nominated}): // the scheduler asks about the other nodes next
	case no != nil:
		g.by, g.why = p.UID, fmt.Sprintf("no room for all of its group: for %s/%s %v", p.Namespace, p.Name, no)
	case g.by == p.UID:
		g.by, g.why = "", ""
	}
}

// hope forgets the searches for the groups of a shape's pods, since there may be room for them now.
func (w *waiting) hope(s *shape, asks map[string]*asking) {
	for uid := range s.since {
		if p := asks[uid]; p != nil {
			delete(w.gangs, p.group)
		}
	}
}

// each maps each of some nodes to the same reason.
func each(nodes []string, why string) map[string]string {
	out := make(map[string]string, len(nodes))
	for _, name := range nodes {
		out[name] = why
	}
	return out
}
