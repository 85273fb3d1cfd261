// SPDX-License-Identifier: Apache-2.0

package crowd

import (
	"cmp"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"
)

// Pods that come and go: as soon as some have ended others are sent, so that there is
// always demand times what there is. Each runs for some seconds.

// stays is for how long a pod runs, half to one and a half times the mean.
func stays(rng *rand.Rand, mean time.Duration) time.Duration {
	return time.Duration((0.5 + rng.Float64()) * float64(mean))
}

// offer is what a GPU of a static partition offers: how much of each resource.
type offer map[string]int

const (
	ofGPU    = "example.com/gpu"
	ofMemory = "example.com/gpu-mem"
	ofMIG    = "example.com/mig-"
)

// entry is the line of a partition by which a GPU offers that.
func (o offer) entry(index int) string {
	switch {
	case o[ofGPU] > 0:
		return fmt.Sprintf("{devices: [%d], mode: whole}", index)
	case o[ofMemory] > 0:
		return fmt.Sprintf("{devices: [%d], mode: shared}", index)
	}
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(o)) {
		parts = append(parts, fmt.Sprintf("%s: %d", strings.ReplaceAll(strings.TrimPrefix(name, ofMIG), ".me", "+me"), o[name]))
	}
	return fmt.Sprintf("{devices: [%d], mode: mig, geometry: {%s}}", index, strings.Join(parts, ", "))
}

// drawOffer draws a layout of a GPU: instances of profiles in random order, as many as fit.
func drawOffer(rng *rand.Rand) offer {
	switch rng.IntN(8) {
	case 0:
		return offer{ofGPU: 1}
	case 1:
		return offer{ofMemory: units}
	}
	names, of, out := slices.Sorted(maps.Keys(profiles())), card{uses: []use{mig}}, offer{}
	for range 30 {
		p := names[rng.IntN(len(names))]
		if of.put(&request{profiles: []string{p}}) {
			out[ofMIG+strings.ReplaceAll(p, "+", ".")]++
		}
	}
	return out
}

// simulate lets pods come and go for so many seconds on a static partition, as the
// scheduler and a device plugin would place them at best, and returns what part of the GPUs
// is in use on average.
func simulate(seed uint64, seconds float64, fleet []offer) float64 {
	rng := rand.New(rand.NewPCG(seed, 17))
	nodes := len(fleet) / gpus
	free := make([]offer, nodes) // but memory, which is of one GPU
	memory := make([][]int, nodes)
	for i, o := range fleet {
		n := i / gpus
		if free[n] == nil {
			free[n] = offer{}
		}
		for name, count := range o {
			if name == ofMemory {
				memory[n] = append(memory[n], count)
			} else {
				free[n][name] += count
			}
		}
	}
	type running struct {
		*request
		ends    float64
		node, n int
	}
	var runs []running
	var waits []*request
	now, asked, sum := 0.0, 0.0, 0.0
	place := func(r *request) bool {
		for n := range nodes {
			if r.gib > 0 {
				// The fullest that it fits on.
				best := -1
				for i, left := range memory[n] {
					if left >= r.gib && (best < 0 || left < memory[n][best]) {
						best = i
					}
				}
				if best >= 0 {
					memory[n][best] -= r.gib
					runs = append(runs, running{r, now + stays(rng, 6*time.Second).Seconds(), n, best})
					return true
				}
				continue
			}
			fits := true
			for name, count := range r.resources() {
				fits = fits && free[n][name] >= count
			}
			if fits {
				for name, count := range r.resources() {
					free[n][name] -= count
				}
				runs = append(runs, running{r, now + stays(rng, 6*time.Second).Seconds(), n, 0})
				return true
			}
		}
		return false
	}
	for now < seconds {
		for asked < demand*float64(len(fleet)) {
			r := draw(rng, "")
			waits = append(waits, r)
			asked += r.size()
		}
		waits = slices.DeleteFunc(waits, place)
		if len(runs) == 0 {
			return 0 // nobody will ever run
		}
		next := slices.MinFunc(runs, func(a, b running) int { return cmp.Compare(a.ends, b.ends) })
		for _, r := range runs {
			sum += r.size() * (min(next.ends, seconds) - now)
		}
		now = next.ends
		runs = slices.DeleteFunc(runs, func(r running) bool {
			if r.ends > now {
				return false
			}
			asked -= r.size()
			if r.gib > 0 {
				memory[r.node][r.n] += r.gib
			} else {
				for name, count := range r.resources() {
					free[r.node][name] += count
				}
			}
			return true
		})
	}
	return sum / seconds / float64(len(fleet))
}

// best searches for a good static partition of so many GPUs, by simulation.
func best(count int) (fleet []offer, used float64) {
	rng := rand.New(rand.NewPCG(3, 3))
	judge := func(f []offer) float64 { return (simulate(1, 300, f) + simulate(2, 300, f)) / 2 }
	for range 6 { // starts
		own := make([]offer, count)
		for i := range own {
			own[i] = drawOffer(rng)
		}
		is := judge(own)
		for range 250 {
			next := slices.Clone(own)
			for range 1 + rng.IntN(2) {
				next[rng.IntN(count)] = drawOffer(rng)
			}
			if value := judge(next); value >= is {
				own, is = next, value
			}
		}
		if is > used {
			fleet, used = own, is
		}
	}
	return fleet, used
}

// churn lets pods come and go for a while, and on until it is enough, and returns what part of the GPUs
// they run on, and what part has been given out to pods that do not run yet, on average.
func (c *cluster) churn(seed uint64, span, mean time.Duration, enough func() bool) (runs, starts float64) {
	c.t.Helper()
	rng := rand.New(rand.NewPCG(seed, 17))
	all, n := float64(gpus*len(c.nodes)), 0
	ends := map[string]time.Time{}
	began, last := time.Now(), time.Now()
	for time.Since(began) < span || !enough() && c.t.Context().Err() == nil {
		asked, passed := 0.0, time.Since(last).Seconds()
		last = time.Now()
		var over []string
		c.mu.Lock()
		for name, p := range c.pods {
			switch at, known := ends[name]; {
			case p.failed:
				over = append(over, name)
				continue
			case p.running && !known:
				ends[name] = time.Now().Add(stays(rng, mean))
			case p.running && time.Now().After(at):
				over = append(over, name)
				continue
			}
			asked += p.size()
			switch {
			case p.running:
				runs += p.size() * passed
			case p.node != nil:
				starts += p.size() * passed
			}
		}
		c.mu.Unlock()
		c.end(over)
		for asked < demand*all {
			r := draw(rng, fmt.Sprintf("churn-%d", n))
			c.send(r)
			asked += r.size()
			n++
		}
		select {
		case <-c.t.Context().Done():
		case <-time.After(50 * time.Millisecond):
		}
	}
	all *= time.Since(began).Seconds()
	return runs / all, starts / all
}

// comeAndGo has pods come and go that ask by claims, and says what part of the GPUs was in use.
func (c *cluster) comeAndGo(span, mean time.Duration) string {
	c.t.Helper()
	runs, starts := c.churn(*first, span, mean, c.ran(10))
	c.endAll()
	c.over(c.t)
	c.mu.Lock()
	defer c.mu.Unlock()
	return fmt.Sprintf("%.1f %% of the GPUs in use, %.1f %% by pods that start; %v", 100*runs, 100*starts, c.done)
}

// ran tells whether so many more pods have run by then.
func (c *cluster) ran(more int) (enough func() bool) {
	count := func() int {
		c.mu.Lock()
		defer c.mu.Unlock()
		return c.done["ran"]
	}
	before := count()
	return func() bool { return count() >= before+more }
}

// Pods come and go, through DRA on GPUs that are whatever is asked first, and through the
// device plugin on the best static partition that a search has found.
func TestComeAndGo(t *testing.T) {
	if testing.Short() {
		t.Skip("make test-all runs it: TestMixedRequests has pods come and go for a while")
	}
	span, mean := 20*time.Second, 4*time.Second
	if *long {
		// The scheduler leaves a pod alone for up to ten seconds.
		span, mean = 10*time.Minute, 30*time.Second
	}
	said := map[string]string{}
	t.Run("dynamic", func(t *testing.T) {
		c := startCluster(t, fleets["dynamic"].entries, true)
		said["by claims, mode dynamic"] = c.comeAndGo(span, mean)
	})
	if !*long {
		t.Log("the device plugin beside it is part of -long")
	} else {
		t.Run("static", func(t *testing.T) {
			fleet, simulated := best(gpus * 4)
			var entries [][]string
			for part := range slices.Chunk(fleet, gpus) {
				entries = append(entries, []string{part[0].entry(0), part[1].entry(1)})
			}
			c := startCluster(t, entries, false)
			for i, part := range slices.Collect(slices.Chunk(fleet, gpus)) {
				want := offer{}
				for _, o := range part {
					for name, count := range o {
						want[name] += count
					}
				}
				n := c.nodes[fmt.Sprintf("node-%d", i+1)]
				c.Await(t, n.Name+" offers what its partition says", func() error {
					if got := n.Offered(); !maps.Equal(got, want) {
						return fmt.Errorf("%v, want %v", got, want)
					}
					return nil
				})
				if err := n.Says(t, want); err != nil {
					t.Fatal(err)
				}
			}
			runs, starts := c.churn(*first, span, mean, c.ran(10))
			c.endAll()
			c.over(t)
			c.mu.Lock()
			defer c.mu.Unlock()
			said["by the device plugin, static"] = fmt.Sprintf("%.1f %% of the GPUs in use, %.1f %% by pods that start, in simulation %.1f %%; %v; %v", 100*runs, 100*starts, 100*simulated, c.done, entries)
		})
	}
	for _, name := range slices.Sorted(maps.Keys(said)) {
		t.Logf("%s: %s", name, said[name])
	}
}
