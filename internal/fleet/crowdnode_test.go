// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
	"example.com/gpu-agent/pkg/timeslice"
)

// host is a node with its agent and its kubelet.
type host struct {
	name string
	told *gpunode.Card
	card *mig.Card
	gpus []chip
	// rank is the agent's own order of GPUs, of which the placer does not know.
	rank map[gpu.UUID]int
	// alloc and requested are how many devices of each resource the scheduler thinks that there are, and are taken.
	alloc, requested map[string]int
	// written is the GPUNode, and shown what was held then; due is when it is written next, zero if it need not be.
	written *gpunode.Status
	shown   []chip
	due     time.Time
	// starting is how many pods are on their way to the node, and have not reported their devices.
	starting int
}

// chip is a GPU with MIG on demand, or else with units of memory. Held has each device's pod.
type chip struct {
	uuid gpu.UUID
	mig  bool
	held map[string]string
}

// newHost is a node with so many GPUs of each kind, those with MIG as a recorded H100.
func newHost(t *testing.T, name string, has gpus, r *rand.Rand) *host {
	t.Helper()
	inv := new(gpu.Inventory)
	text, err := os.ReadFile("../../tests/testdata/h100-80.json")
	if err == nil {
		err = json.Unmarshal(text, inv)
	}
	if err != nil {
		t.Fatal(err)
	}
	h := &host{name: name, told: gpunode.CardOf(&inv.GPUs[0]), rank: map[gpu.UUID]int{}, requested: map[string]int{}}
	if h.card, err = mig.NewCard(&inv.GPUs[0].MIG); err != nil {
		t.Fatal(err)
	}
	for i := range has.units + has.mig {
		g := chip{uuid: gpu.UUID(fmt.Sprintf("GPU-%s-%d", name, i)), mig: i >= has.units, held: map[string]string{}}
		h.rank[g.uuid] = r.IntN(3)
		h.gpus = append(h.gpus, g)
	}
	return h
}

// standing are a GPU's placements that pods have, and free those that can be had.
func (h *host) placements(g *chip) (standing, free []mig.Placement) {
	for _, p := range h.card.Placements() {
		if g.held[mig.ID(g.uuid, p)] != "" {
			standing = append(standing, p)
		}
	}
	for _, p := range h.card.Placements() {
		if h.card.Fits(standing, p) {
			free = append(free, p)
		}
	}
	return standing, free
}

// admit has the agent choose devices for a pod. The error is why it refuses.
func (h *host) admit(pod string, a ask) (ids []string, err error) {
	var units []string
	var offers []mig.Offer
	var places []mig.Place
	for i := range h.gpus {
		g := &h.gpus[i]
		if !g.mig {
			for n := range 79 {
				if id := timeslice.ID(g.uuid, n); g.held[id] == "" {
					units = append(units, id)
				}
			}
			continue
		}
		standing, free := h.placements(g)
		offers = append(offers, mig.Offer{GPU: g.uuid, Card: h.card, Pinned: standing, Rank: h.rank[g.uuid]})
		for _, p := range free {
			if instance(p.Profile.String()).of == a.of {
				places = append(places, mig.Place{GPU: g.uuid, Placement: p})
			}
		}
	}
	if a.of == memory {
		ids, err = timeslice.PreferUnits(units, nil, a.n, h.rank)
	} else if places, err = mig.Prefer(offers, places, nil, a.n); err == nil {
		for _, p := range places {
			ids = append(ids, mig.ID(p.GPU, p.Placement))
		}
	}
	for _, id := range ids {
		for i := range h.gpus {
			if strings.HasPrefix(id, string(h.gpus[i].uuid)+"::") {
				h.gpus[i].held[id] = pod
			}
		}
	}
	return ids, err
}

// end takes everything from a pod.
func (h *host) end(pod string) {
	for i := range h.gpus {
		maps.DeleteFunc(h.gpus[i].held, func(_, of string) bool { return of == pod })
	}
}

// listed is how many healthy devices of each resource the agent tells the kubelet of.
func (h *host) listed() map[string]int {
	out := map[string]int{}
	for i := range h.gpus {
		if g := &h.gpus[i]; g.mig {
			standing, free := h.placements(g)
			for _, p := range slices.Concat(standing, free) {
				out[instance(p.Profile.String()).of]++
			}
		} else {
			out[memory] += 79
		}
	}
	return out
}

// says is what the agent would write into the GPUNode.
func (h *host) says() *gpunode.Status {
	var uuids []string
	for i := range h.gpus {
		uuids = append(uuids, string(h.gpus[i].uuid))
	}
	s := says(uuids...)
	s.HoldersIn, s.Cards = gpunode.InPods, []gpunode.Card{*h.told}
	for i := range h.gpus {
		c, g := &h.gpus[i], &s.GPUs[i]
		if c.mig {
			g.Kind, g.Resource, g.Total, g.Free, g.Largest, g.MIG = piece.KindPlacement, "", 0, 0, 0, h.instances(c)
			continue
		}
		var used []int
		for n := range g.Total {
			if c.held[timeslice.ID(c.uuid, n)] != "" {
				used = append(used, n)
			}
		}
		g.Used, g.Free, g.Largest = piece.SetOf(used), g.Total-len(used), g.Total-len(used)
	}
	s.Sum()
	return s
}

// instances is what the GPUNode says of a GPU with MIG.
func (h *host) instances(g *chip) *gpunode.MIG {
	m := &gpunode.MIG{Card: h.told.Name, OnDemand: true}
	standing, free := h.placements(g)
	for _, p := range standing {
		m.Used = append(m.Used, p.String())
	}
	for _, p := range h.card.Placements() {
		profile, at := p.Profile.String(), fmt.Sprint(p.Start)
		i := slices.IndexFunc(m.Offers, func(o gpunode.Offer) bool { return o.Profile == profile })
		if i < 0 {
			i = len(m.Offers)
			m.Offers = append(m.Offers, gpunode.Offer{Profile: profile, Resource: instance(profile).of})
		}
		o := &m.Offers[i]
		if o.Placements = append(o.Placements, at); slices.Contains(free, p) {
			o.Free, o.Largest = append(o.Free, at), 1
		}
	}
	return m
}

func clone(gpus []chip) []chip {
	out := slices.Clone(gpus)
	for i := range out {
		out[i].held = maps.Clone(out[i].held)
	}
	return out
}

// fits reports whether a node, as the API shows it while no pod is on its way there, has room for all of some
// requests, in one order or another.
func (h *host) fits(all []ask) bool {
	if len(all) == 0 {
		return true
	}
	for i, a := range all {
		c := *h
		c.gpus = clone(h.gpus)
		for j := range c.gpus {
			maps.Copy(c.gpus[j].held, h.shown[j].held) // what has ended since is not known to be free
		}
		rest := slices.Concat(all[:i], all[i+1:])
		if _, err := c.admit("a pod to come", a); err == nil && slices.Index(all, a) == i && c.fits(rest) {
			return true
		}
	}
	return false
}
