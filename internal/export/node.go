// SPDX-License-Identifier: Apache-2.0

package export

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	"example.com/gpu-agent/internal/config"
	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/internal/label"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
	"example.com/gpu-agent/pkg/timeslice"
)

// Node is what exports need of a node.
type Node struct {
	Name   string
	Labels map[string]string
	// Unit is the size of a unit of GPU memory.
	Unit gpu.MiB
	GPUs []GPU
}

// GPU is how a GPU is offered.
type GPU struct {
	Index  int
	Model  string
	Memory gpu.MiB
	// Mode is empty if no partition is in force.
	Mode config.Mode
	API  ledger.FrontEnd
	// N is the number of devices without a profile, and Kind their kind: of a dynamic GPU these are
	// memory units. They are 0 and empty if there are none.
	N    int
	Kind piece.Kind
	// Slices is the number of its memory slices, and Profiles the MIG instances that it can have.
	// For a profile that the partition does not offer, Most and Devices are 0.
	Slices   int
	Profiles []Profile
	// Spot is true if the room that no guaranteed pod has is offered to spot pods. SpotMost is how many of the N
	// devices they can have at a time, 0 for all.
	Spot     bool
	SpotMost int
	// exact is true if memory counts in MiB and is not rounded, as in the counters of
	// ResourceSlices.
	exact bool
}

// Profile is a kind of MIG instance.
type Profile struct {
	Name mig.Name
	// Slices is the number of memory slices of the GPU instance.
	Slices int
	// Most is how many there can be at a time. Devices is how many devices the kubelet counts while
	// the GPU is idle: on demand, each placement is one.
	Most, Devices int
}

// FromInventory returns a node with a recorded inventory, laid out as wanted. It has the labels
// that the agent would write, and those of more. It fails if the inventory lacks MIG placements
// that it needs.
func FromInventory(
	name, domain string, inv *gpu.Inventory, wanted config.Desired, unit gpu.MiB, more map[string]string,
) (Node, error) {
	n := Node{Name: name, Unit: unit, Labels: maps.Clone(more)}
	if n.Labels == nil {
		n.Labels = map[string]string{}
	}
	maps.Copy(n.Labels, label.Own(domain, label.Node{Inventory: inv, Partition: wanted.Partition, Wanted: wanted.GPUs}))
	for i, w := range wanted.GPUs {
		d := &inv.GPUs[i]
		g := GPU{Index: d.Index, Model: d.Model, Memory: d.Memory, Mode: w.Mode, API: w.API,
			Spot: w.Spot.On, SpotMost: w.Spot.Most}
		switch w.Mode {
		case config.Whole, config.Shared:
			of, _ := piece.Divide(piece.Wish{Mode: string(w.Mode), Replicas: w.Replicas, Unit: unit}, d)
			g.N, g.Kind = of.N, of.Kind
		case config.MIG, config.Dynamic:
			card := gpunode.CardOf(d)
			if card == nil {
				return Node{}, fmt.Errorf("%s: the driver of GPU %d tells no MIG placements, "+
					"which some do only with MIG on: turn MIG on there and record the inventory again", name, d.Index)
			}
			if w.Mode == config.Dynamic {
				g.N, g.Kind = timeslice.Units(d, unit), piece.OfDynamic
			}
			g.Slices, g.Profiles = card.MemorySlices, wantedProfiles(card, &w)
		case config.Keep, config.Off:
		}
		n.GPUs = append(n.GPUs, g)
	}
	return n, nil
}

// wantedProfiles returns the profiles of a card as a partition offers them.
func wantedProfiles(card *gpunode.Card, w *config.Want) (out []Profile) {
	for _, c := range w.Geometry {
		if p := of(card, c.Profile); p != nil {
			out = append(out, Profile{Name: c.Profile, Slices: p.MemorySlices, Most: c.N, Devices: c.N})
		}
	}
	for _, name := range w.Profiles {
		if p := of(card, name); p != nil && w.OnDemand {
			out = append(out, Profile{
				Name: name, Slices: p.MemorySlices, Most: beside(p) * parts(name),
				Devices: len(p.Starts) * parts(name),
			})
		}
	}
	return others(out, card, w.OnDemand && len(w.Profiles) == 0)
}

// others adds the card's other profiles. offered is true if the partition offers them.
func others(out []Profile, card *gpunode.Card, offered bool) []Profile {
	for i := range card.Profiles {
		from := &card.Profiles[i]
		name, err := mig.Parse(from.Name)
		if err != nil || slices.ContainsFunc(out, func(p Profile) bool { return p.Name == name }) {
			continue
		}
		p := Profile{Name: name, Slices: from.MemorySlices}
		if offered {
			p.Most, p.Devices = beside(from), len(from.Starts)
		}
		out = append(out, p)
	}
	return out
}

// parts returns how many instances of a name share a GPU instance.
func parts(name mig.Name) int {
	if name.Compute == 0 {
		return 1
	}
	return name.Slices / name.Compute
}

// of returns a profile's GPU instance on a card, nil if the card does not have it.
func of(card *gpunode.Card, name mig.Name) *gpunode.Profile {
	i := slices.IndexFunc(card.Profiles, func(p gpunode.Profile) bool { return p.Name == name.GPUInstance().String() })
	if i < 0 {
		return nil
	}
	return &card.Profiles[i]
}

// beside returns how many instances of one profile have room beside each other. All have the same
// length, so placing them from left to right finds the most.
func beside(p *gpunode.Profile) (n int) {
	end := 0
	for _, start := range p.Starts {
		if start >= end {
			n, end = n+1, start+p.MemorySlices
		}
	}
	if p.Max > 0 {
		n = min(n, p.Max)
	}
	return n
}

// FromStatus returns a node of a cluster, from its labels and its GPUNode.
func FromStatus(name string, labels map[string]string, s *gpunode.Status) Node {
	n := Node{Name: name, Labels: labels, Unit: gpu.MiB(s.MemoryUnitMiB)}
	for i := range s.GPUs {
		from := &s.GPUs[i]
		g := GPU{
			Index: from.Index, Model: from.Model, Memory: gpu.MiB(from.MemoryMiB), Mode: config.Mode(from.Mode),
			API: ledger.FrontEnd(from.API),
		}
		if from.Total > 0 {
			g.N, g.Kind = from.Total, from.Kind.Counted()
		}
		if from.Spot != nil {
			g.Spot = true
			if from.Spot.Total < from.Total {
				g.SpotMost = from.Spot.Total
			}
		}
		if m := from.MIG; m != nil && (g.Mode == config.MIG || g.Mode == config.Dynamic) {
			if c := slices.IndexFunc(s.Cards, func(c gpunode.Card) bool { return c.Name == m.Card }); c >= 0 {
				g.Slices, g.Profiles = s.Cards[c].MemorySlices, offeredProfiles(&s.Cards[c], m)
			}
		}
		n.GPUs = append(n.GPUs, g)
	}
	return n
}

// offeredProfiles returns the profiles that a GPU offers according to its GPUNode.
func offeredProfiles(card *gpunode.Card, m *gpunode.MIG) (out []Profile) {
	for _, o := range m.Offers {
		name, err := mig.Parse(o.Profile)
		p := of(card, name)
		if err != nil || p == nil {
			continue
		}
		n := len(o.Placements)
		most := n
		if m.OnDemand {
			most = min(n, beside(p)*parts(name))
		}
		out = append(out, Profile{Name: name, Slices: p.MemorySlices, Most: most, Devices: n})
	}
	return others(out, card, false)
}

// offers reports whether the GPU offers anything. One that another program gives out, or whose layout
// waits for holders, has a mode and offers nothing.
func (g *GPU) offers() bool {
	return g.Mode != config.Keep && g.Mode != config.Off &&
		(g.N > 0 || slices.ContainsFunc(g.Profiles, func(p Profile) bool { return p.Devices > 0 }))
}

// resources returns the resources that the GPU offers by name, by short name, each with how many
// devices there can be at a time and are listed.
func (g *GPU) resources() map[string]Profile {
	out := map[string]Profile{}
	one := func(name string, n int) { out[name] = Profile{Most: n, Devices: n} }
	for _, k := range piece.Kinds() {
		if k.Alone() && k.Dynamic() && g.Mode == config.Dynamic {
			one(k.Short(), 1)
		}
		// Through DRA, pods get memory units only with a claim for an amount.
		if k == g.Kind && g.N > 0 && !(k.Together() && g.API == ledger.DRA) {
			one(k.Short(), g.N)
		}
	}
	for _, p := range g.Profiles {
		out[p.Name.Resource()] = p
	}
	return out
}

// spot returns what the GPU offers to spot pods, like resources.
func (g *GPU) spot() map[string]Profile {
	out := map[string]Profile{}
	if !g.Spot {
		return out
	}
	for name, p := range g.resources() {
		if k := kindOf(name); k.Shared() && !k.Together() || p.Devices == 0 {
			continue
		}
		if g.SpotMost > 0 && kindOf(name) != "" {
			p.Most = min(p.Most, g.SpotMost)
		}
		out[piece.InSpot(name)] = p
	}
	return out
}

// spotMemory returns how much GPU memory spot pods can have of the GPU.
func (g *GPU) spotMemory(unit gpu.MiB) gpu.MiB {
	switch {
	case !g.Spot:
		return 0
	case g.SpotMost > 0 && g.Kind.Together():
		return gpu.MiB(min(g.SpotMost, g.N)) * unit
	}
	return g.memory(unit)
}

// whole returns what the GPU's memory counts as: 80 GiB for 81559 MiB.
func (g *GPU) whole() gpu.MiB {
	if g.exact {
		return g.Memory
	}
	return (g.Memory + 1023) / 1024 * 1024
}

// memory returns how much GPU memory the GPU adds to a quota.
func (g *GPU) memory(unit gpu.MiB) gpu.MiB {
	switch {
	case !g.offers():
		return 0
	case g.Mode == config.Dynamic || !g.Kind.Shared():
		return g.whole()
	}
	return gpu.MiB(g.N) * g.share(g.Kind, unit)
}

// share returns how much GPU memory one device of a kind without profiles counts as.
func (g *GPU) share(k piece.Kind, unit gpu.MiB) gpu.MiB {
	switch {
	case k.Together():
		return unit
	case k.Shared():
		return g.whole() / gpu.MiB(max(g.N, 1))
	}
	return g.whole()
}

// kindOf returns the kind of a resource with that short name, in either tier; empty for a MIG profile's.
func kindOf(name string) piece.Kind {
	name, _ = piece.OfSpot(name)
	for _, k := range piece.Kinds() {
		if k.Short() == name {
			return k
		}
	}
	return ""
}

// size returns how much GPU memory one device of a resource counts as.
func (g *GPU) size(name string, p Profile, unit gpu.MiB) gpu.MiB {
	if k := kindOf(name); k != "" {
		return g.share(k, unit)
	}
	size := g.whole() * gpu.MiB(p.Slices) / gpu.MiB(max(g.Slices, 1))
	if p.Name.Compute > 0 { // its neighbours have the rest of the GPU instance
		size = size * gpu.MiB(p.Name.Compute) / gpu.MiB(p.Name.Slices)
	}
	return size
}

// sorted returns the nodes in the order of their names.
func sorted(nodes []Node) []Node {
	return slices.SortedStableFunc(slices.Values(nodes), func(a, b Node) int { return cmp.Compare(a.Name, b.Name) })
}
