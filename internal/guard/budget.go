// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"cmp"
	"slices"
	"strings"
	"time"

	"example.com/gpu-agent/pkg/gpu"
)

// A container writes its counters itself, and can make them expensive to read. A page on which it
// has thousands of locks takes 50 ms in each look. All other pages are read first.
const (
	// expensive is the CPU time of a reading from which on the budget counts it. A page with a
	// thousand processes takes half of it.
	expensive = 5 * time.Millisecond
	// budget is how much CPU time one look at a GPU spends at most on expensive counters. After a
	// reading these are left alone for restFactor times what it cost.
	budget     = 25 * time.Millisecond
	restFactor = 25
)

// begin begins the readings of a look, and returns the tallies that it has begun, by allocation.
// Expensive counters, and those that were never read, share one budget. Those that have waited
// longest come first.
func (ts *tallies) begin(u gpu.UUID, now time.Time) map[string]*tally {
	begun := map[string]*tally{}
	var due []page
	for p, t := range ts.by {
		switch {
		case p.gpu != u || t.meter == nil:
		case !t.read.IsZero() && t.cost < expensive:
			ts.beginOne(p, t, begun)
		case now.Sub(t.read) >= restFactor*t.cost:
			due = append(due, p)
		}
	}
	slices.SortFunc(due, func(a, b page) int {
		return cmp.Or(ts.by[a].read.Compare(ts.by[b].read), strings.Compare(a.allocation, b.allocation))
	})
	var spent time.Duration
	for _, p := range due {
		if spent >= budget {
			break
		}
		t := ts.by[p]
		t.read = now
		ts.beginOne(p, t, begun)
		spent += 2 * t.cost // it is read again after the driver's answer
	}
	return begun
}

func (ts *tallies) beginOne(p page, t *tally, begun map[string]*tally) {
	err := t.meter.Begin()
	t.cost = t.meter.Cost()
	if err != nil {
		ts.discard(p, t, err)
		return
	}
	begun[p.allocation] = t
}
