// SPDX-License-Identifier: Apache-2.0

package crowd

import (
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	resource "k8s.io/api/resource/v1"

	"example.com/gpu-agent/tests/emulator"
)

var (
	long  = flag.Bool("long", false, "20 seeds, and ten minutes of pods that come and go")
	first = flag.Uint64("seed", 1, "the first seed")
)

const (
	// requests are sent by a seed, in waves that make demand times what there is. In the short form
	// there are few of them, and two nodes.
	requests, few = 500, 25
	demand        = 1.5
	// worse is by how much less than a simulated first fit the cards may be used, in parts
	// of all of them.
	worse = 0.02
)

// fleet is a cluster: an entry of the partition for each GPU or all GPUs of each node, and
// what the GPUs may be used as.
type fleet struct {
	entries [][]string
	cards   [][]card
	// gangs says that the scheduler binds pods of a group together or not at all.
	gangs bool
}

// fleets are four nodes of two GPUs each, by how these are laid out.
var fleets = map[string]fleet{
	"dynamic": {
		entries: slices.Repeat([][]string{{"{devices: all, mode: dynamic, api: dra}"}}, 4),
		cards:   slices.Repeat([][]card{slices.Repeat([]card{{uses: []use{whole, memory, mig}}}, gpus)}, 4),
	},
	"each mode apart": {
		entries: [][]string{
			{"{devices: [0], mode: mig, api: dra}", "{devices: [1], mode: shared, api: dra}"},
			{"{devices: [0], mode: mig, api: dra}", "{devices: [1], mode: whole, api: dra}"},
			{"{devices: [0], mode: mig, api: dra}", "{devices: [1], mode: mig, api: dra}"},
			{"{devices: [0], mode: mig, api: dra}", "{devices: [1], mode: shared, api: dra}"},
		},
		cards: [][]card{{{uses: []use{mig}}, {uses: []use{memory}}}, {{uses: []use{mig}}, {uses: []use{whole}}}, {{uses: []use{mig}}, {uses: []use{mig}}}, {{uses: []use{mig}}, {uses: []use{memory}}}},
	},
}

// some are the first nodes of a fleet.
func (f fleet) some(n int) fleet { return fleet{entries: f.entries[:n], cards: f.cards[:n]} }

// Random requests, in waves of more than there is room for. All that fits runs, nobody is
// refused, and the cards are as full as first fit can make them.
//
// In the short form nobody judges how full they are. Pods come and go on the same cluster then, and
// nodes are laid out anew: a cluster takes as long to start as all of that.
func TestMixedRequests(t *testing.T) {
	names, seeds := []string{"dynamic"}, uint64(1)
	if *long {
		names, seeds = slices.Sorted(maps.Keys(fleets)), 20
	}
	for _, name := range names {
		t.Run(strings.ReplaceAll(name, " ", "-"), func(t *testing.T) {
			fleet := fleets[name]
			if testing.Short() {
				fleet = fleet.some(2)
			}
			c := startCluster(t, fleet.entries, true)
			before := c.versions()
			for seed := *first; seed < *first+seeds; seed++ {
				c.waves(seed, fleet.cards)
			}
			if after := c.versions(); !maps.Equal(before, after) {
				t.Errorf("slices were written for claims: they are %v, and were %v", after, before)
			}
			if testing.Short() {
				t.Log(c.comeAndGo(5*time.Second, 2*time.Second))
				c.editUnderChurn(8*time.Second, 2*time.Second, 2*time.Second)
			}
		})
	}
}

// versions are the slices' at the API server, by name.
func (c *cluster) versions() map[string]string {
	c.t.Helper()
	var list resource.ResourceSliceList
	if err := c.get(slicesAt, &list); err != nil {
		c.t.Fatal(err)
	}
	out := map[string]string{}
	for i := range list.Items {
		out[list.Items[i].Name] = list.Items[i].ResourceVersion
	}
	return out
}

func (c *cluster) waves(seed uint64, cards [][]card) {
	c.t.Helper()
	rng := rand.New(rand.NewPCG(seed, 16))
	began, waves, real, fit := time.Now(), 0, 0.0, 0.0
	all, most := float64(gpus*len(c.nodes)), requests
	if testing.Short() {
		most = few
	}
	for n := 0; n < most; waves++ {
		var wave []*request
		for asked := 0.0; asked < demand*all && n < most; n++ {
			r := draw(rng, fmt.Sprintf("s%d-%d", seed, n))
			wave = append(wave, r)
			asked += r.size()
		}
		for _, r := range wave {
			c.send(r)
		}
		running := c.settled()
		used := 0.0
		for _, r := range running {
			used += r.size()
		}
		const tries = 20
		for range tries {
			fit += firstFit(rng, cards, wave) / tries
		}
		real += used / all
		c.endAll()
	}
	real, fit = real/float64(waves), fit/float64(waves)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.t.Logf("seed %d, %d waves in %.0f s: %.1f %% of the GPUs in use, by simulated first fit %.1f %%; %v", seed, waves, time.Since(began).Seconds(), 100*real, 100*fit, c.done)
	if real < fit-worse && !testing.Short() {
		c.t.Errorf("%.1f %% of the GPUs in use, want %.1f %% less %.0f points at most", 100*real, 100*fit, 100*worse)
	}
	for _, line := range c.wrong {
		c.t.Error(line)
	}
	c.wrong = nil
}

// stand reports whether an instance is where a claim has it.
func stand(all []emulator.GPUInstanceState, d device) bool {
	for _, i := range all {
		if i.Profile == d.profile && i.Start == d.start {
			return len(i.Compute) == 1
		}
	}
	return false
}
