// SPDX-License-Identifier: Apache-2.0

package kueue

import (
	"maps"
	"time"
)

const (
	// patienceName is the annotation of a cloud's ResourceFlavor with how long a workload waits for room on-prem before
	// this cloud is paid, for example "2m".
	patienceName = "gpu.patience"
	// runsName is the annotation of pods with how long they run at most, for example "1h30m".
	runsName = "gpu.runs-for"
	// hopeAgain is how often it is looked anew whether waiting may be of use. In a large fleet that takes a part of a
	// second.
	hopeAgain = 5 * time.Second
)

// hopes are the workloads in a cloud's queue that were looked at lately, by UID.
type hopes map[string]hope

// hope is whether a workload may get room on-prem while it waits, as of a time.
type hope struct {
	at    time.Time
	there bool
}

// forget forgets what was found some time ago.
func (hs hopes) forget(now time.Time) {
	maps.DeleteFunc(hs, func(_ string, h hope) bool { return now.Sub(h.at) >= hopeAgain })
}

// waitsUntil returns until when a workload that a cloud has quota for waits for room on-prem, zero if it goes to the
// cloud now. It waits as long as its flavor says, from when it was made or last ran. It does not wait if the workloads
// that have the room say that they run longer.
func (c *Checks) waitsUntil(w *Workload, want *wanted, v *View, now time.Time) time.Time {
	by := w.Turned.Add(v.patience(w))
	if !now.Before(by) {
		return time.Time{}
	}
	h, lately := c.hopes[w.UID]
	if !lately {
		h = hope{now, c.mayEnd(want, v, by)}
		c.hopes[w.UID] = h
	}
	if !h.there {
		return time.Time{}
	}
	return by
}

// patience is the longest of a workload's flavors.
func (v *View) patience(w *Workload) (most time.Duration) {
	for i := range w.Sets {
		for _, name := range w.Sets[i].Flavors {
			if f := v.Flavors[name]; f != nil {
				most = max(most, f.Patience)
			}
		}
	}
	return most
}

// mayEnd reports whether a workload may have room by a time: if all ended by then that do not say that they run on.
// Pods that came without Kueue say nothing.
func (c *Checks) mayEnd(want *wanted, v *View, by time.Time) bool {
	stay := map[string]bool{}
	for _, y := range v.Workloads {
		if c.end(y).After(by) {
			stay[c.id(y)] = true
		}
	}
	return c.books.Might(want.groups, func(hold string) bool { return stay[hold] })
}

// end returns when a workload that runs is over at the latest, zero if it does not say. Kueue's limit is for all the
// times together that it is admitted.
func (n names) end(w *Workload) time.Time {
	if !w.Admitted || w.Over {
		return time.Time{}
	}
	longest := time.Duration(0)
	for i := range w.Sets {
		runs := n.runs(w, &w.Sets[i])
		if runs == 0 {
			longest = 0
			break
		}
		longest = max(longest, runs)
	}
	if w.Longest > 0 {
		if limit := max(w.Longest-w.Past, time.Second); longest == 0 || limit < longest {
			longest = limit
		}
	}
	if longest == 0 {
		return time.Time{}
	}
	return w.Turned.Add(longest)
}

// runs returns how long a pod of one of a workload's sets runs from now on at most, 0 if it does not say. One that
// checkpoints goes on from where it was when it was evicted, and one that does not begins anew.
func (n names) runs(w *Workload, s *Set) time.Duration {
	runs, _ := time.ParseDuration(s.Annotations[n.domain+"/"+runsName]) // one that is no duration says nothing
	if runs > 0 && s.Labels[n.domain+"/"+checkpoints] == "true" {
		runs = max(runs-w.Past, time.Second)
	}
	if d := s.Pod.ActiveDeadlineSeconds; d != nil && (runs <= 0 || runs > seconds(*d)) {
		runs = seconds(*d)
	}
	return max(runs, 0)
}

// seconds returns n seconds, at least 0 and at most a year: tenants choose n.
func seconds(n int64) time.Duration {
	const year = 365 * 24 * 3600
	return time.Duration(min(max(n, 0), year)) * time.Second
}
