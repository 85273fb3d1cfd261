// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"example.com/gpu-agent/internal/placer"
)

// hopelessFor is how long at most a group for which there was no room is not looked at again. The
// scheduler may hear of room in other resources, of which there is no news here.
const hopelessFor = time.Minute

// gang is what was found of a group of pods since there was news that concerns it. Nothing in it grows
// with the group.
type gang struct {
	// nodes are those that its pods were asked for with.
	nodes nodeSet
	// by is the pod that was refused last, and why the reason; empty if none was.
	by, why string
	// at is when room was last looked for.
	at time.Time
}

// hopeless is why a pod is refused at once since its group has no room; empty if room is to be looked for.
//
// A scheduler asks for all pods of a group, one after the other. Then it binds as many as the group
// needs, or it binds none, begins anew at once, and asks for all of them again. Here it is not known how
// many the group needs: when one is refused, the others may be bound without it, as slowly as any pod, and
// keep their places. Those that are asked for again are not being bound, and lose theirs.
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

// leave ends the reservation of a pod that is refused with its group. That is no news unless somebody
// else was refused while there was this one: otherwise two groups that wait would wake each other for ever.
func (f *Fleet) leave(p *asking) {
	a := f.answers[p.UID]
	delete(f.answers, p.UID)
	f.books.Unreserve(p.UID)
	if f.others > a.refusals || f.last != p.group && f.refusals > a.refusals {
		f.touch(a.node)
	}
}

// found notes what came of looking for room on some nodes; no is nil if there was some.
func (f *Fleet) found(p *asking, among []string, no *placer.Refusal) {
	if by := cmp.Or(p.group, p.UID); no != nil {
		if by != f.last {
			f.last, f.others = by, f.refusals
		}
		f.refusals++
	}
	if p.group == "" {
		return
	}
	g := f.gangs[p.group]
	if g == nil {
		g = &gang{}
		f.gangs[p.group] = g
	}
	g.at = f.now()
	for _, name := range among {
		g.nodes.add(f.number(name))
	}
	switch {
	case no != nil && slices.Equal(among, []string{p.Nominated}): // the scheduler asks about the others next
	case no != nil:
		g.by, g.why = p.UID, fmt.Sprintf("no room for all of its group: for %s/%s %v", p.Namespace, p.Name, no)
	case g.by == p.UID:
		g.by, g.why = "", ""
	}
}

// hope notes that there may be room for groups of some pods.
func (f *Fleet) hope(s *shape) {
	for uid := range s.since {
		if p := f.asks[uid]; p != nil {
			delete(f.gangs, p.group)
		}
	}
}

// each has the same reason for each of some nodes.
func each(nodes []string, why string) map[string]string {
	out := make(map[string]string, len(nodes))
	for _, name := range nodes {
		out[name] = why
	}
	return out
}
