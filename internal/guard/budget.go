// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"cmp"
	"slices"
	"strings"
	"time"

	"example.com/gpu-agent/pkg/gpu"
)

// A container writes its counters itself, and can make them dear to read: 50 ms for
// each look at a page on which it has thousands of locks. Those of everybody else
// come first.
const (
	// dear is what a reading costs, in CPU time, from which on it has to be paid for:
	// a thousand processes take half of it.
	dear = 5 * time.Millisecond
	// dearBudget is how much of that one look at a GPU begins at most, and dearRest for
	// how many times its cost such counters are left alone afterwards.
	dearBudget = 25 * time.Millisecond
	dearRest   = 25
)

// begin begins the readings of a look, by claim. Counters that are dear, and those
// that were never read, have a budget for all of them together; who has waited
// longest is first.
func (ts *tallies) begin(u gpu.UUID, now time.Time) map[string]*tally {
	begun := map[string]*tally{}
	var dearOnes []page
	for p, t := range ts.by {
		switch {
		case p.gpu != u || t.meter == nil:
		case !t.read.IsZero() && t.cost < dear:
			ts.beginOne(p, t, begun)
		case now.Sub(t.read) >= dearRest*t.cost:
			dearOnes = append(dearOnes, p)
		}
	}
	slices.SortFunc(dearOnes, func(a, b page) int {
		return cmp.Or(ts.by[a].read.Compare(ts.by[b].read), strings.Compare(a.claim, b.claim))
	})
	var spent time.Duration
	for _, p := range dearOnes {
		if spent >= dearBudget {
			break
		}
		t := ts.by[p]
		t.read = now
		ts.beginOne(p, t, begun)
		spent += 2 * t.cost // it is read again when the driver has answered
	}
	return begun
}

func (ts *tallies) beginOne(p page, t *tally, begun map[string]*tally) {
	err := t.meter.Begin()
	t.cost = t.meter.Cost()
	if err != nil {
		ts.spoilt(p, t, err)
		return
	}
	begun[p.claim] = t
}
