// SPDX-License-Identifier: Apache-2.0

package crowd

import (
	"cmp"
	"math/rand/v2"
	"slices"
	"testing"
)

// use is what a GPU may be used as, by a request.
type use string

const (
	whole  use = "whole"
	memory use = "memory"
	mig    use = "mig"
)

func (r *request) use() use {
	switch {
	case r.whole:
		return whole
	case r.gib > 0:
		return memory
	default:
		return mig
	}
}

// card is a GPU of the simulation.
type card struct {
	uses []use // that it may have, one at a time
	now  use   // "" while it is idle
	gib  int
	// taken are its memory slices, and media whether its media extension is.
	taken [slots]bool
	media bool
}

// put places a request where it fits first, or reports that it fits nowhere.
func (c *card) put(r *request) bool {
	u := r.use()
	if !slices.Contains(c.uses, u) || c.now != "" && (c.now != u || u == whole) || c.gib+r.gib > units {
		return false
	}
	after := *c
	if !after.place(r.profiles) {
		return false
	}
	after.now = u
	after.gib += r.gib
	*c = after
	return true
}

// place places instances, all or none of them.
func (c *card) place(names []string) bool {
	if len(names) == 0 {
		return true
	}
	p := profiles()[names[0]]
	// Of +me there is one: that is how many can stand on a card.
	if me := p.Max == 1 && p.Size == 1; me && c.media {
		return false
	}
next:
	for _, start := range p.Starts {
		for s := start; s < start+p.Size; s++ {
			if c.taken[s] {
				continue next
			}
		}
		after := *c
		for s := start; s < start+p.Size; s++ {
			after.taken[s] = true
		}
		after.media = c.media || p.Max == 1 && p.Size == 1
		if after.place(names[1:]) {
			*c = after
			return true
		}
	}
	return false
}

// firstFit simulates requests that come one after the other: of the nodes where one fits,
// it goes to one with the fewest pods, and there to the first GPU. It returns what part of
// all GPUs is used then.
func firstFit(rng *rand.Rand, nodes [][]card, of []*request) float64 {
	pods := make([]int, len(nodes))
	var fleet [][]card
	for _, n := range nodes {
		fleet = append(fleet, slices.Clone(n))
	}
	used, all := 0.0, 0
	for _, n := range fleet {
		all += len(n)
	}
	for _, r := range of {
		order := rng.Perm(len(fleet))
		slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(pods[a], pods[b]) })
	nodes:
		for _, n := range order {
			for i := range fleet[n] {
				if fleet[n][i].put(r) {
					pods[n]++
					used += r.size()
					break nodes
				}
			}
		}
	}
	return used / float64(all)
}

func TestFirstFit(t *testing.T) {
	node := func(uses ...use) []card { return []card{{uses: uses}, {uses: uses}} }
	all := node(whole, memory, mig)
	of := func(r ...request) (out []*request) {
		for i := range r {
			out = append(out, &r[i])
		}
		return out
	}
	for name, c := range map[string]struct {
		nodes [][]card
		of    []*request
		want  float64
	}{
		"a whole GPU, and one more":      {[][]card{all}, of(request{whole: true}, request{whole: true}, request{whole: true}), 1},
		"memory and MIG are apart":       {[][]card{all}, of(request{gib: 79}, request{profiles: []string{"3g.40gb"}}, request{gib: 1}), (1 + 0.5) / 2},
		"one media extension":            {[][]card{{all[0]}}, of(request{profiles: []string{"1g.10gb+me"}}, request{profiles: []string{"1g.10gb+me"}}), 1. / 8},
		"a pair is of one GPU":           {[][]card{all}, of(request{profiles: []string{"4g.40gb"}}, request{profiles: []string{"3g.40gb", "3g.40gb"}}, request{profiles: []string{"3g.40gb"}}), 1},
		"a GPU that is for nothing else": {[][]card{node(memory)}, of(request{whole: true}, request{profiles: []string{"1g.10gb"}}, request{gib: 30}), 30. / 79 / 2},
		"the seventh is the last":        {[][]card{{all[0]}}, of(request{profiles: []string{"1g.10gb", "1g.10gb", "1g.10gb", "1g.10gb", "1g.10gb", "1g.10gb", "1g.10gb", "1g.10gb"}}), 0},
	} {
		if got := firstFit(rand.New(rand.NewPCG(1, 1)), c.nodes, c.of); got-c.want > 1e-9 || c.want-got > 1e-9 {
			t.Errorf("%s: %v of the GPUs is used, want %v", name, got, c.want)
		}
	}
}
