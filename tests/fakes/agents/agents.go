// SPDX-License-Identifier: Apache-2.0

package agents

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
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

// Units is how many memory units a GPU without MIG has.
const Units = 79

// Node is a node with its agent.
type Node struct {
	Name string
	GPUs []GPU
	// Card is the kind of the GPUs with MIG.
	Card *mig.Card

	domain string
	told   *gpunode.Card
	// written is the GPUNode, nil while there is none, and due is when it is written next, zero if it need not be.
	written *gpunode.Status
	due     time.Time
}

// GPU has MIG on demand, or else memory units. Held has the pod of each device by the device's ID. Of GPUs that are as
// good for a pod, the agent takes the one of the lowest Rank.
type GPU struct {
	UUID gpu.UUID
	MIG  bool
	Rank int
	Held map[string]string
}

// NewGPU returns a GPU that nobody has anything of.
func NewGPU(uuid string, onDemand bool) GPU {
	return GPU{UUID: gpu.UUID(uuid), MIG: onDemand, Held: map[string]string{}}
}

// New returns a node without GPUs. Those with MIG are as the first one in a file with a recorded inventory, and the
// domain is that of the resources.
func New(t testing.TB, name, inventory, domain string) *Node {
	t.Helper()
	inv, n := new(gpu.Inventory), &Node{Name: name, domain: domain}
	text, err := os.ReadFile(inventory)
	if err == nil {
		err = json.Unmarshal(text, inv)
	}
	if err == nil && len(inv.GPUs) == 0 {
		err = errors.New("it has no GPU")
	}
	if err == nil {
		n.told = gpunode.CardOf(&inv.GPUs[0])
		n.Card, err = mig.NewCard(&inv.GPUs[0].MIG)
	}
	if err != nil {
		t.Fatalf("read %s: %v", inventory, err)
	}
	return n
}

// memory is the resource of memory units, and instance that of a placement.
func (n *Node) memory() string { return n.domain + "/gpu-mem" }

func (n *Node) instance(p mig.Placement) string {
	return n.domain + "/mig-" + strings.ReplaceAll(p.Profile.String(), "+", ".")
}

// placements are a GPU's placements that pods have, and those that can be had.
func (n *Node) placements(g *GPU) (standing, free []mig.Placement) {
	for _, p := range n.Card.Placements() {
		if g.Held[mig.ID(g.UUID, p)] != "" {
			standing = append(standing, p)
		}
	}
	for _, p := range n.Card.Placements() {
		if n.Card.Fits(standing, p) {
			free = append(free, p)
		}
	}
	return standing, free
}

// Admit chooses so many devices of a resource for a pod. The error is why the agent refuses.
func (n *Node) Admit(pod, resource string, count int) (ids []string, err error) {
	var units []string
	var offers []mig.Offer
	var places []mig.Place
	rank := map[gpu.UUID]int{}
	for i := range n.GPUs {
		g := &n.GPUs[i]
		rank[g.UUID] = g.Rank
		if !g.MIG {
			for k := range Units {
				if id := timeslice.ID(g.UUID, k); g.Held[id] == "" {
					units = append(units, id)
				}
			}
			continue
		}
		standing, free := n.placements(g)
		offers = append(offers, mig.Offer{GPU: g.UUID, Card: n.Card, Pinned: standing, Rank: g.Rank})
		for _, p := range free {
			if n.instance(p) == resource {
				places = append(places, mig.Place{GPU: g.UUID, Placement: p})
			}
		}
	}
	if resource == n.memory() {
		ids, err = timeslice.PreferUnits(units, nil, count, rank)
	} else if places, err = mig.Prefer(offers, places, nil, count); err == nil {
		for _, p := range places {
			ids = append(ids, mig.ID(p.GPU, p.Placement))
		}
	}
	for _, id := range ids {
		for i := range n.GPUs {
			if strings.HasPrefix(id, string(n.GPUs[i].UUID)+"::") {
				n.GPUs[i].Held[id] = pod
			}
		}
	}
	return ids, err
}

// End takes everything from a pod.
func (n *Node) End(pod string) {
	for i := range n.GPUs {
		maps.DeleteFunc(n.GPUs[i].Held, func(_, of string) bool { return of == pod })
	}
}

// Listed returns how many healthy devices of each resource the agent tells the kubelet of.
func (n *Node) Listed() map[string]int {
	out := map[string]int{}
	for i := range n.GPUs {
		g := &n.GPUs[i]
		if !g.MIG {
			out[n.memory()] += Units
			continue
		}
		standing, free := n.placements(g)
		for _, p := range slices.Concat(standing, free) {
			out[n.instance(p)]++
		}
	}
	return out
}

// Clone returns a node with the same pods that is another one from then on.
func (n *Node) Clone() *Node {
	out := *n
	out.GPUs = slices.Clone(n.GPUs)
	for i := range out.GPUs {
		out.GPUs[i].Held = maps.Clone(out.GPUs[i].Held)
	}
	return &out
}

// Says returns what the agent would write into the GPUNode.
func (n *Node) Says() *gpunode.Status {
	s := &gpunode.Status{HoldersIn: gpunode.InPods, Cards: []gpunode.Card{*n.told},
		Conditions: []gpunode.Condition{{Type: gpunode.Ready, Status: gpunode.True}}}
	for i := range n.GPUs {
		is := &n.GPUs[i]
		g := gpunode.GPU{UUID: string(is.UUID), Index: i, Mode: "mig", API: "device-plugin", Kind: piece.KindPlacement,
			Conditions: []gpunode.Condition{{Type: gpunode.Healthy, Status: gpunode.True},
				{Type: gpunode.Available, Status: gpunode.True}}}
		if is.MIG {
			g.MIG = n.instances(is)
		} else {
			var used []int
			for k := range Units {
				if is.Held[timeslice.ID(is.UUID, k)] != "" {
					used = append(used, k)
				}
			}
			g.Mode, g.Kind, g.Resource, g.Total = "shared", piece.KindUnits, n.memory(), Units
			g.Used, g.Free, g.Largest = piece.SetOf(used), Units-len(used), Units-len(used)
		}
		s.GPUs = append(s.GPUs, g)
	}
	s.Sum()
	return s
}

// instances is what the GPUNode says of a GPU with MIG.
func (n *Node) instances(g *GPU) *gpunode.MIG {
	m := &gpunode.MIG{Card: n.told.Name, OnDemand: true}
	standing, free := n.placements(g)
	for _, p := range standing {
		m.Used = append(m.Used, p.String())
	}
	for _, p := range n.Card.Placements() {
		profile, at := p.Profile.String(), fmt.Sprint(p.Start)
		i := slices.IndexFunc(m.Offers, func(o gpunode.Offer) bool { return o.Profile == profile })
		if i < 0 {
			i = len(m.Offers)
			m.Offers = append(m.Offers, gpunode.Offer{Profile: profile, Resource: n.instance(p)})
		}
		o := &m.Offers[i]
		if o.Placements = append(o.Placements, at); slices.Contains(free, p) {
			o.Free, o.Largest = append(o.Free, at), 1
		}
	}
	return m
}

// Changed has the GPUNode written after a change, at once or later, as the agent does: soon is how long it waits with
// news. after calls a function after a time.
func (n *Node) Changed(soon func() time.Duration, after func(time.Duration, func()), write func(*gpunode.Status)) {
	wait := time.Minute
	switch n.Says().Since(n.written, time.Now()) {
	case gpunode.Same:
		return
	case gpunode.News:
		wait = soon()
	case gpunode.Occupancy:
	}
	if at := time.Now().Add(wait); n.due.IsZero() || at.Before(n.due) {
		n.due = at
		after(wait, func() {
			if n.due.Equal(at) {
				write(n.Write())
			}
		})
	}
}

// Write returns the GPUNode, and notes that it is written.
func (n *Node) Write() *gpunode.Status {
	now := n.Says()
	now.Since(n.written, time.Now())
	n.due, n.written = time.Time{}, now
	return now
}
