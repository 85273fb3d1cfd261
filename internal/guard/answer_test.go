// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"testing"
	"time"
)

// TestAnswer: a process that waits for a reading has it at once, and not with the next look. Who
// asks all the time, and whose GPU's driver is slow, has the guard do so for a twentieth of its time.
func TestAnswer(t *testing.T) {
	for name, c := range map[string]struct {
		asks        bool
		driver      time.Duration // what its answer takes
		least, most int           // looks in ten seconds, beside those of the calm
	}{
		"nobody asks":             {false, 0, 0, 0},
		"a quick driver":          {true, 0, 1800, 2000},
		"a driver that takes 5ms": {true, 5 * time.Millisecond, 90, 100},
		"a slow driver":           {true, 100 * time.Millisecond, 4, 5},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld()
			w.container("a", []int{10}, 4*gib, gpu0)
			m := &meter{w: w, word: 7, quiet: true}
			w.pages["a"+string(gpu0)] = m
			watch(t, w, Options{}, func(g *Guard, pass func(time.Duration)) {
				w.uses(10, gpu0, 2*gib)
				pass(11 * time.Second)
				before := m.ended
				pass(10 * time.Second)
				calm := m.ended - before
				m.asks = c.asks
				w.listing = func() {
					w.mu.Unlock()
					time.Sleep(c.driver)
					w.mu.Lock()
				}
				pass(6 * time.Second) // after a long calm the first who asks waits for a look of the guard's own
				before = m.ended
				pass(10 * time.Second)
				// A look in answer has the calm forgotten, so that the guard's own looks are four a second.
				if got := m.ended - before; !c.asks && got != calm || c.asks && (got < c.least || got > c.most+4*10+1) {
					t.Errorf("%d looks in ten seconds, %d in calm; want %d to %d in answer", got, calm, c.least, c.most)
				}
			})
		})
	}
}
