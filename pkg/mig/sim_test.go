// SPDX-License-Identifier: Apache-2.0

package mig

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"example.com/gpu-agent/pkg/gpu"
)

// TestPackingAcceptsMore plays the same demand against a node of eight GPUs
// twice: once with the places that Prefer chooses, once spread over the least
// used GPUs. Demand is of mixed profiles, about as much as the node has room
// for; a request that finds no place is lost. The figure is the share of memory
// asked for that was given.
func TestPackingAcceptsMore(t *testing.T) {
	c := card(t, seven)
	for _, mix := range []struct {
		name    string
		weights []int // by profile, in the order of seven
	}{
		{"small and half", []int{4, 0, 0, 0, 3, 0, 0}},
		{"small to large", []int{8, 1, 2, 4, 2, 1, 1}},
		{"as often as small", []int{1, 1, 1, 1, 1, 1, 1}},
	} {
		for _, load := range []float64{0.8, 1, 1.3} {
			pack := simulate(t, c, mix.weights, load, func(offers []Offer, places []Place) (Place, bool) {
				got, err := Prefer(offers, places, nil, 1)
				if err != nil {
					return Place{}, false
				}
				return got[0], true
			})
			spread := simulate(t, c, mix.weights, load, leastUsed)
			t.Logf("%-18s load %.1f: packed %4.1f %%, spread %4.1f %%, %+.1f points", mix.name, load, pack, spread, pack-spread)
			if pack <= spread {
				t.Errorf("packing accepts %.1f %% of %s at load %.1f, spreading %.1f %%", pack, mix.name, load, spread)
			}
		}
	}
}

// leastUsed spreads: the GPU with most free memory slices, then from left to
// right.
func leastUsed(offers []Offer, places []Place) (Place, bool) {
	used := func(u gpu.UUID) (n int) {
		for _, o := range offers {
			if o.GPU == u {
				for _, s := range o.Pinned {
					n += s.Size
				}
			}
		}
		return n
	}
	var best Place
	least := 1 << 20
	for _, p := range places {
		i := slices.IndexFunc(offers, func(o Offer) bool { return o.GPU == p.GPU })
		if offers[i].Card.Fits(offers[i].Pinned, p.Placement) && used(p.GPU) < least {
			best, least = p, used(p.GPU)
		}
	}
	return best, least < 1<<20
}

// simulate returns the percentage of memory asked for that was given.
func simulate(t *testing.T, c *Card, weights []int, load float64, place func([]Offer, []Place) (Place, bool)) float64 {
	t.Helper()
	const gpus, rounds, life = 8, 4000, 100
	r := rand.New(rand.NewPCG(9, 9))
	offers := make([]Offer, gpus)
	for g := range offers {
		offers[g] = Offer{GPU: gpu.UUID(fmt.Sprint("GPU-", g)), Card: c, Rank: g}
	}
	var by [][]Place
	for _, row := range seven {
		var places []Place
		for _, o := range offers {
			for _, s := range c.Placements() {
				if s.Profile.String() == row.name {
					places = append(places, Place{o.GPU, s})
				}
			}
		}
		by = append(by, places)
	}
	sum, size := 0, 0
	for i, w := range weights {
		sum += w
		size += w * seven[i].size
	}
	// As many arrivals a round as keep load × the node's memory in use.
	rate := load * gpus * 8 * float64(sum) / float64(size) / life
	type running struct {
		Place
		until int
	}
	var pods []running
	var free []Place
	asked, given := 0, 0
	due := 0.0
	for now := range rounds {
		pods = slices.DeleteFunc(pods, func(p running) bool {
			if p.until > now {
				return false
			}
			i := slices.IndexFunc(offers, func(o Offer) bool { return o.GPU == p.GPU })
			offers[i].Pinned = slices.DeleteFunc(offers[i].Pinned, func(s Placement) bool { return s == p.Placement })
			return true
		})
		for due += rate; due >= 1; due-- {
			k, at := 0, r.IntN(sum)
			for at >= weights[k] {
				at -= weights[k]
				k++
			}
			until := now + 1 + int(r.ExpFloat64()*life)
			if now >= life {
				asked += seven[k].size
			}
			// The kubelet offers what nobody holds.
			free = free[:0]
			for _, p := range by[k] {
				if !slices.ContainsFunc(pods, func(o running) bool { return o.Place == p }) {
					free = append(free, p)
				}
			}
			p, ok := place(offers, free)
			if !ok {
				continue
			}
			i := slices.IndexFunc(offers, func(o Offer) bool { return o.GPU == p.GPU })
			if !c.Fits(offers[i].Pinned, p.Placement) {
				t.Fatalf("%v is preferred beside %v", p, offers[i].Pinned)
			}
			offers[i].Pinned = append(offers[i].Pinned, p.Placement)
			pods = append(pods, running{p, until})
			if now >= life {
				given += seven[k].size
			}
		}
	}
	return 100 * float64(given) / float64(asked)
}
