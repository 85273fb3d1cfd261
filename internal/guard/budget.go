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

// begin begins the readings of a look, by container. Counters that are dear, and those
// that were never read, have a budget for all of them together; who has waited
// longest is first.
func (g *Guard) begin(u gpu.UUID, now time.Time) map[string]*sight {
	begun := map[string]*sight{}
	var dearOnes []place
	for p, s := range g.seen {
		switch {
		case p.gpu != u || s.meter == nil:
		case !s.read.IsZero() && s.cost < dear:
			g.beginOne(p, s, begun)
		case now.Sub(s.read) >= dearRest*s.cost:
			dearOnes = append(dearOnes, p)
		}
	}
	slices.SortFunc(dearOnes, func(a, b place) int {
		return cmp.Or(g.seen[a].read.Compare(g.seen[b].read), strings.Compare(a.container, b.container))
	})
	var spent time.Duration
	for _, p := range dearOnes {
		if spent >= dearBudget {
			break
		}
		s := g.seen[p]
		s.read = now
		g.beginOne(p, s, begun)
		spent += 2 * s.cost // it is read again when the driver has answered
	}
	return begun
}

func (g *Guard) beginOne(p place, s *sight, begun map[string]*sight) {
	err := s.meter.Begin()
	s.cost = s.meter.Cost()
	if err != nil {
		g.spoilt(p.container, s, err)
		return
	}
	begun[p.container] = s
}
