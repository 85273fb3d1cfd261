// SPDX-License-Identifier: Apache-2.0

package crowd

import (
	"math/rand/v2"
	"testing"
	"time"
)

// layouts are what a node is edited to, one entry for each GPU.
var layouts = [][]string{
	{"{devices: all, mode: dynamic, api: dra}"},
	{"{devices: [0], mode: whole, api: dra}", "{devices: [1], mode: dynamic, api: dra}"},
	{"{devices: all, mode: mig, api: dra}"},
	{"{devices: all, mode: mig, api: dra, profiles: [1g.10gb, 3g.40gb]}"},
	{"{devices: [0], mode: shared, api: dra}", "{devices: [1], mode: mig, api: dra}"},
	{"{devices: all, mode: dynamic, api: dra, profiles: [2g.20gb]}"},
	{"{devices: [0], mode: off}", "{devices: [1], mode: shared, api: dra}"},
}

// patience is how long a pod may be bound and neither run nor be ended.
const patience = 90 * time.Second

// Edits while pods come and go: nobody who runs loses anything, and whoever was placed by a
// layout that is no more runs all the same or is ended, and does not hang. Each write of a
// slice says something that was not there before.
func TestEditsUnderChurn(t *testing.T) {
	if testing.Short() {
		t.Skip("make test-all runs it: TestMixedRequests has nodes edited for a while")
	}
	span, mean, every := 15*time.Second, 3*time.Second, 4*time.Second
	if *long {
		span, mean, every = 10*time.Minute, 20*time.Second, 7*time.Second
	}
	startCluster(t, [][]string{layouts[0], layouts[0]}, true).editUnderChurn(span, mean, every)
}

// editUnderChurn lays two nodes out anew while pods come and go.
func (c *cluster) editUnderChurn(span, mean, every time.Duration) {
	c.t.Helper()
	c.mu.Lock()
	c.edits = true
	c.mu.Unlock()
	over, ended := make(chan struct{}), make(chan struct{})
	w, err := c.watchWrites()
	if err != nil {
		c.t.Fatal(err)
	}
	c.work.Go(func() {
		defer close(ended)
		w.follow(c, over)
	})
	c.work.Go(func() {
		rng := rand.New(rand.NewPCG(*first, 7))
		names := []string{"node-1", "node-2"}
		for {
			select {
			case <-over:
				return
			case <-c.t.Context().Done():
				return
			case <-time.After(every):
			}
			c.edit(names[rng.IntN(len(names))], layouts[rng.IntN(len(layouts))])
			c.checkAll()
		}
	})
	began := time.Now()
	ran := c.ran(10)
	runs, starts := c.churn(*first, span, mean, func() bool { return ran() && c.edited() >= 4 })
	close(over)
	// With a layout that stays, all that wait run or find no room.
	for _, name := range []string{"node-1", "node-2"} {
		c.edit(name, layouts[0])
	}
	c.settled()
	c.checkAll()
	c.endAll()
	<-ended
	if err := w.read(c); err != nil {
		c.t.Error(err)
	}
	c.t.Logf("slices: %v", w)
	for _, line := range w.needless {
		c.t.Errorf("a slice was written anew, and says what it said: %s", line)
	}
	if w.changed == 0 {
		c.t.Error("no slice has changed")
	}
	c.mu.Lock()
	c.t.Logf("%.0f s, %.1f %% of the GPUs in use, %.1f %% by pods that start: %v", time.Since(began).Seconds(), 100*runs, 100*starts, c.done)
	c.mu.Unlock()
	c.over(c.t)
}

// edited is how often nodes were laid out anew.
func (c *cluster) edited() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.done["edits"]
}

// edit lays a node out in another way.
func (c *cluster) edit(name string, entries []string) {
	if err := c.nodes[name].Partition(entries); err != nil {
		c.breaks("edit %s: %v", name, err)
	}
	c.mu.Lock()
	c.done["edits"]++
	c.mu.Unlock()
}

// checkAll looks at the GPUs of all pods that run.
func (c *cluster) checkAll() {
	c.mu.Lock()
	var running []*sent
	for _, p := range c.pods {
		if p.running {
			running = append(running, p)
		}
	}
	c.mu.Unlock()
	for _, p := range running {
		c.check(p)
	}
}
