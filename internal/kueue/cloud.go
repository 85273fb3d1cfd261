// SPDX-License-Identifier: Apache-2.0

package kueue

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"example.com/gpu-agent/internal/placer"
)

const (
	// stay is how long a workload is left in a cloud before it may come back. Where a cloud has room, pods have their
	// nodes by then.
	stay = 10 * time.Second
	// arrive is how long a workload without a node is left in a cloud that has room for one of its pods: its node has
	// just come, and the scheduler takes a few seconds. If the pods have no node after that, something else keeps them
	// from it.
	arrive = 30 * time.Second
	// noQuota is how the message of a check begins that lets a workload into a cloud although there is room on-prem. It
	// is in the workload, so it outlives the process. quotaAgain is how long such a workload is left there. The placer
	// does not know quotas, and a workload that comes back and finds none has been ended in vain.
	noQuota    = "on-prem, there is room and no quota"
	quotaAgain = 10 * time.Minute
	// partQuota is the same for a workload of whose sets others are on-prem.
	partQuota = "on-prem has no quota for all of its pods, and others of them are there"
)

// cloud answers whether on-prem is full, and brings back what may be moved.
func (c *Checks) cloud(w *Workload, s *CheckState, v *View, now time.Time) *Answer {
	switch s.State {
	case Ready:
		return c.comeBack(w, s, movable, v, now)
	case Pending:
	default:
		return nil // Kueue has not acted on the last answer yet
	}
	want := c.outside(w, v)
	h := c.held[c.id(w)]
	switch {
	case !want.asks:
		return ready("it asks for nothing that the GPU agents offer")
	case c.split(w, v):
		if refused, _, _ := c.refused(w); len(refused) > 0 {
			return c.goes(w, "on-prem has no room for all of its pods, and others of them are there")
		}
		return c.goes(w, partQuota)
	case h != nil && h.by != w.UID:
		return nil // its slice before, or its variant
	case c.running(w):
		return c.goes(w, "its pods run in the cloud already")
	}
	_, no := c.hold(w, &want, now)
	refused, _, mine := c.refused(w)
	if _, before := c.tried[w.UID]; !before {
		c.tried[w.UID] = now
	}
	switch {
	case no != nil:
		c.drop(c.id(w))
		delete(c.tried, w.UID)
		if by := c.waitsUntil(w, &want, v, now); !by.IsZero() {
			const as = "it waits for room on-prem until %s, and goes to the cloud then: on-prem, %s"
			return pending(fmt.Sprintf(as, by.UTC().Format(time.RFC3339), because(no, &want)))
		}
		if no.Waits && now.Sub(s.LastTransitionTime.Time) < settle {
			return pending("on-prem, no room yet: " + because(no, &want))
		}
		return c.goes(w, "on-prem, "+because(no, &want))
	case mine && len(refused) > 0:
		a := retry("there is room on-prem: it begins again with the first flavor", 0)
		a.Changes = true
		return a
	case now.Sub(c.tried[w.UID]) >= forQuota:
		c.drop(c.id(w))
		return c.goes(w, noQuota)
	case now.Sub(s.LastTransitionTime.Time) < pause:
		return pending("there is room on-prem, and no quota yet")
	}
	return retry("there is room on-prem: it begins again with the first flavor", 0)
}

// goes lets a workload into a cloud. Its pods are told the key of the workload, so that the books know which they are.
// Where a set has other flavors, another check tells its pods the same key: Kueue takes the same word twice.
func (c *Checks) goes(w *Workload, why string) *Answer {
	a := ready(why)
	for i := range w.Sets {
		told := map[string]string{c.domain + "/" + holdName: c.key(w)}
		a.State.PodSetUpdates = append(a.State.PodSetUpdates, Update{Name: w.Sets[i].Name, Annotations: told})
	}
	return a
}

// outside is what a workload asks for, on nodes that neither its flavors nor other clouds have. If it has sets on-prem
// and others in a cloud, those on-prem stay where they are.
func (c *Checks) outside(w *Workload, v *View) wanted {
	split, here := c.split(w, v), c.byFlavors(w, v)
	return c.want(w, v, func(s *Set) where {
		if split && !v.far(s) {
			return here(s)
		}
		of := v.labels(s)
		return where{key: "cloud " + fmt.Sprint(of), holds: func(labels map[string]string) bool {
			return (len(of) == 0 || !has(labels, of)) && !v.cloud(labels)
		}}
	})
}

// nowhere brings back what has no node in a cloud.
func (c *Checks) nowhere(w *Workload, s *CheckState, v *View, now time.Time) *Answer {
	if s.State != Ready {
		return nil
	}
	return c.comeBack(w, s, idle, v, now)
}

// comeBack has a workload in a cloud begin again if it may be moved for a reason, and there is room on-prem; nil where
// it stays.
func (c *Checks) comeBack(w *Workload, s *CheckState, why string, v *View, now time.Time) *Answer {
	h := c.held[c.id(w)]
	if c.mayReturn(w, s, now) != why || h != nil && h.by != w.UID || why == idle && c.split(w, v) {
		if why == idle {
			delete(c.arriving, w.UID)
		}
		return nil
	}
	want := c.outside(w, v)
	if !want.asks {
		return nil
	}
	if _, no := c.hold(w, &want, now); no != nil {
		delete(c.arriving, w.UID)
		return nil
	}
	if why == idle && c.arrives(w, v, now) {
		c.drop(c.id(w))
		return nil
	}
	a := retry("there is room on-prem, and "+why+": it comes back", 0)
	_, _, a.Changes = c.refused(w)
	return a
}

// Reasons why a workload may be moved.
const (
	movable = "it checkpoints"
	idle    = "none of its pods has a node in the cloud"
)

// mayReturn returns why a workload in a cloud may be moved, empty if it may not. It has been there for a while, and
// either its pods say that they checkpoint, or none of them has a node, so that nothing is lost. It stays if Kueue
// would delete pods of it that have no controller, which makes other ones.
func (c *Checks) mayReturn(w *Workload, s *CheckState, now time.Time) string {
	since, left := s.LastTransitionTime.Time, stay
	if w.Admitted && w.Turned.After(since) {
		since = w.Turned
	}
	if strings.HasPrefix(s.Message, noQuota) || strings.HasPrefix(s.Message, partQuota) {
		left = quotaAgain
	}
	if w.Bare || now.Sub(since) < left {
		return ""
	}
	pods, placed, owned := c.books.Members(c.id(w))
	label := c.domain + "/" + checkpoints
	switch {
	case w.OfPods && owned < pods:
		return ""
	case w.Admitted && !slices.ContainsFunc(w.Sets, func(s Set) bool { return s.Labels[label] != "true" }):
		return movable
	case placed > 0, w.Admitted && pods == 0: // those of an earlier build do not say whose they are
		return ""
	}
	return idle
}

// arrives reports whether a cloud has had room for one of a workload's pods for a moment only.
func (c *Checks) arrives(w *Workload, v *View, now time.Time) bool {
	all := func(string) bool { return true }
	room := func(g placer.Group) bool {
		g.N = min(g.N, 1)
		return g.N > 0 && c.books.Might([]placer.Group{g}, all)
	}
	if !slices.ContainsFunc(c.want(w, v, c.byFlavors(w, v)).groups, room) {
		delete(c.arriving, w.UID)
		return false
	}
	since, known := c.arriving[w.UID]
	if !known {
		c.arriving[w.UID], since = now, now
	}
	return now.Sub(since) < arrive
}
