// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"time"

	"example.com/gpu-agent/pkg/gpu"
)

const (
	// askEvery is how often the guard looks whether a process waits for a reading. A program that
	// comes near its cap waits once, and a short one lasts no longer than that.
	askEvery = 20 * time.Millisecond
	// askShare is how much longer the guard rests after an answer than the answer took. A tenant
	// may ask all the time.
	askShare = 19
	// askFor is how long after an ask the guard looks so often. It finds the first ask with a look
	// of its own: to look at a hundred pages fifty times a second costs 4 % of a processor.
	askFor = 10 * time.Second
)

// answer looks at the GPUs for which a process waits for a reading.
func (g *Guard) answer(ctx context.Context) {
	began := time.Now()
	if began.Before(g.answerFrom) {
		return
	}
	var asked map[gpu.UUID]bool
	for p, t := range g.tallies.by {
		if t.meter == nil || !t.sound || asked[p.gpu] || t.cost >= expensive || began.Sub(t.lively) > askFor || !t.meter.Asked() {
			continue
		}
		if asked == nil {
			asked = map[gpu.UUID]bool{}
		}
		asked[p.gpu] = true
	}
	if asked == nil {
		return
	}
	gpus, held := g.w.Allocations.Offered(), g.held()
	for i := range gpus {
		if d := &gpus[i]; asked[d.UUID] && ctx.Err() == nil {
			g.look(ctx, d, held, nil)
		}
	}
	now := time.Now()
	g.answerFrom = now.Add(askShare * now.Sub(began))
}
