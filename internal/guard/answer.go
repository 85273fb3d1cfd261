// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"time"

	"example.com/gpu-agent/pkg/gpu"
)

const (
	// askEvery is how often the guard checks whether a process waits for a reading. A program that
	// comes near its cap waits once, and a short one lasts some 30 ms. With many pages the guard
	// waits askEach for each page instead, so that the checks cost at most 4 % of a processor.
	askEvery = 5 * time.Millisecond
	askEach  = 200 * time.Microsecond
	// askShare is how many times as long as an answer took the guard rests after it, since a tenant
	// may ask all the time.
	askShare = 19
	// askFor is how long after a process has asked the guard checks so often. An ordinary look
	// finds the first ask.
	askFor = 10 * time.Second
)

// listen returns a channel that has a value when it is time to check whether a process waits for a
// reading. The channel is nil if no process has asked within askFor.
func (ts *tallies) listen(now time.Time) <-chan time.Time {
	pages := 0
	for _, t := range ts.by {
		if t.listens(now) {
			pages++
		}
	}
	if pages == 0 {
		return nil
	}
	return time.After(max(askEvery, time.Duration(pages)*askEach))
}

// listens reports whether a process has asked for a reading within askFor, and the counters are
// cheap to read and make sense.
func (t *tally) listens(now time.Time) bool {
	return t.meter != nil && t.valid && t.cost < expensive && now.Sub(t.lastAsk) <= askFor
}

func (e *examiner) asked(now time.Time) (asked map[gpu.UUID]bool) {
	for p, t := range e.tallies.by {
		if asked[p.gpu] || !t.listens(now) || !t.meter.Asked() {
			continue
		}
		if asked == nil {
			asked = map[gpu.UUID]bool{}
		}
		asked[p.gpu] = true
	}
	return asked
}

// answer looks at each GPU on which a process waits for a reading.
func (g *Guard) answer(ctx context.Context) {
	began := time.Now()
	if began.Before(g.answerFrom) {
		return
	}
	asked := g.examiner.asked(began)
	if asked == nil {
		return
	}
	gpus, held := g.allocations.Offered(), g.held()
	for i := range gpus {
		if d := &gpus[i]; asked[d.UUID] && ctx.Err() == nil {
			g.look(ctx, d, held, nil)
		}
	}
	now := time.Now()
	g.answerFrom = now.Add(askShare * now.Sub(began))
}
