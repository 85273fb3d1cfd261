// SPDX-License-Identifier: Apache-2.0

package placer

import (
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"testing"

	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/internal/workload"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
	"example.com/gpu-agent/pkg/timeslice"
)

const (
	memName = "example.com/gpu-mem"
	repName = "example.com/gpu.shared"
	gpuName = "example.com/gpu"
)

// machine is a node as it really is: its agent and its kubelet.
type machine struct {
	name    string
	gpus    []*device
	holders gpunode.HoldersIn
	card    *mig.Card
	told    *gpunode.Card
	// rank is the agent's own, of which nobody else knows.
	rank map[gpu.UUID]int
}

// device is a GPU; by has who holds which piece.
type device struct {
	uuid     gpu.UUID
	index    int
	kind     piece.Kind
	total    int
	onDemand bool
	single   bool // replicas with a share through MPS, of which a container has one and nothing else
	mps      bool // pieces of another kind with a share through MPS
	static   []mig.Placement
	by       map[string]string // device ID → pod's UID
	warm     []mig.Placement
}

// h100 is the table of a recorded H100.
func h100(t testing.TB) (*gpunode.Card, *mig.Card) {
	t.Helper()
	text, err := os.ReadFile("../../tests/testdata/h100-80.json")
	if err != nil {
		t.Fatal(err)
	}
	inv := new(gpu.Inventory)
	if err := json.Unmarshal(text, inv); err != nil {
		t.Fatal(err)
	}
	told := gpunode.CardOf(&inv.GPUs[0])
	card, err := mig.NewCard(&inv.GPUs[0].MIG)
	if err != nil {
		t.Fatal(err)
	}
	return told, card
}

// newMachine has n GPUs of a kind; of placements, every third GPU has fixed devices.
func newMachine(t testing.TB, r *rand.Rand, name string, kind piece.Kind, n, total int) *machine {
	m := &machine{name: name, holders: gpunode.InPods, rank: map[gpu.UUID]int{}}
	m.told, m.card = h100(t)
	for i := range n {
		d := &device{uuid: gpu.UUID(fmt.Sprintf("GPU-%s-%d", name, i)), index: i, kind: kind, total: total,
			by: map[string]string{}, single: kind == piece.KindReplica && i%3 == 1}
		if kind == piece.KindPlacement {
			d.onDemand, d.total = i%3 != 2, 0
			if !d.onDemand {
				for _, text := range []string{"3g.40gb@0", "1g.10gb@4", "1g.10gb@5", "1g.20gb@6"} {
					p, err := gpunode.Placement(m.card, text)
					if err != nil {
						t.Fatal(err)
					}
					d.static = append(d.static, p)
				}
			}
		}
		m.rank[d.uuid] = r.IntN(3)
		m.gpus = append(m.gpus, d)
	}
	return m
}

// resource is what a GPU's devices are of.
func (d *device) resource() string {
	return map[piece.Kind]string{piece.KindUnits: memName, piece.KindReplica: repName, piece.KindWhole: gpuName}[d.kind]
}

func (d *device) id(n int) string {
	if d.kind == piece.KindWhole {
		return string(d.uuid)
	}
	return timeslice.ID(d.uuid, n)
}

// standing are the placements that are held.
func (m *machine) standing(d *device) (out []mig.Placement) {
	for _, p := range m.offered(d) {
		if d.by[mig.ID(d.uuid, p)] != "" {
			out = append(out, p)
		}
	}
	return out
}

func (m *machine) offered(d *device) []mig.Placement {
	if d.onDemand {
		return m.card.Placements()
	}
	return d.static
}

// available are the placements that can be had.
func (m *machine) available(d *device) (out []mig.Placement) {
	standing := m.standing(d)
	for _, p := range m.offered(d) {
		if d.onDemand && m.card.Fits(standing, p) || !d.onDemand && !slices.Contains(standing, p) {
			out = append(out, p)
		}
	}
	return out
}

// says is what the agent writes into the GPUNode now.
func (m *machine) says() *gpunode.Status {
	s := &gpunode.Status{HoldersIn: m.holders, Cards: []gpunode.Card{*m.told},
		Conditions: []gpunode.Condition{{Type: gpunode.Ready, Status: gpunode.True}}}
	for _, d := range m.gpus {
		g := gpunode.GPU{UUID: string(d.uuid), Index: d.index, API: string(workload.DevicePlugin), Kind: d.kind,
			Resource: d.resource(), Total: d.total,
			Conditions: []gpunode.Condition{{Type: gpunode.Available, Status: gpunode.True},
				{Type: gpunode.Healthy, Status: gpunode.True}}}
		if d.single || d.mps {
			g.Compute = gpunode.Through
		}
		holders := map[string]*gpunode.Holder{}
		holder := func(id string) *gpunode.Holder {
			uid := d.by[id]
			if holders[uid] == nil {
				holders[uid] = &gpunode.Holder{Namespace: "x", Pod: uid}
			}
			return holders[uid]
		}
		if d.kind == piece.KindPlacement {
			g.MIG = &gpunode.MIG{Card: m.told.Name, OnDemand: d.onDemand}
			for _, p := range m.standing(d) {
				g.MIG.Used = append(g.MIG.Used, p.String())
				h := holder(mig.ID(d.uuid, p))
				h.Placements = append(h.Placements, p.String())
			}
			for _, p := range d.warm {
				g.MIG.Warm = append(g.MIG.Warm, p.String())
			}
			free := m.available(d)
			for _, p := range m.offered(d) {
				i := slices.IndexFunc(g.MIG.Offers,
					func(o gpunode.Offer) bool { return o.Profile == p.Profile.String() })
				if i < 0 {
					i = len(g.MIG.Offers)
					g.MIG.Offers = append(g.MIG.Offers,
						gpunode.Offer{Profile: p.Profile.String(), Resource: "example.com/" + p.Profile.Resource()})
				}
				o := &g.MIG.Offers[i]
				o.Placements = append(o.Placements, fmt.Sprint(p.Start))
				if slices.Contains(free, p) {
					o.Free = append(o.Free, fmt.Sprint(p.Start))
				}
			}
		} else {
			var used []int
			for n := range d.total {
				if d.by[d.id(n)] != "" {
					used = append(used, n)
					h := holder(d.id(n))
					h.Devices = append(h.Devices, piece.Range{First: n, Last: n})
				}
			}
			g.Used = piece.SetOf(used)
		}
		if m.holders == gpunode.InObject {
			for _, uid := range slices.Sorted(maps.Keys(holders)) {
				g.Holders = append(g.Holders, *holders[uid])
			}
		}
		s.GPUs = append(s.GPUs, g)
	}
	s.Sum()
	return s
}

// clone is a copy to try things on.
func (m *machine) clone() *machine {
	out := *m
	out.gpus = nil
	for _, d := range m.gpus {
		e := *d
		e.by = maps.Clone(d.by)
		e.warm = slices.Clone(d.warm)
		out.gpus = append(out.gpus, &e)
	}
	return &out
}

// admit is what kubelet and agent do for a pod. It returns the pod's devices, or why it
// is refused.
func (m *machine) admit(r *rand.Rand, p *Pod) ([]string, error) {
	reuse := map[string][]string{}
	var all []string
	for i := range p.Containers {
		c := &p.Containers[i]
		names := sorted(c.Requests)
		r.Shuffle(len(names), func(i, j int) { names[i], names[j] = names[j], names[i] })
		for _, name := range names {
			n := c.Requests[name]
			must := reuse[name][:min(n, len(reuse[name]))]
			got := must
			if n > len(must) {
				var err error
				if got, err = m.prefer(r, name, must, n); err != nil {
					return nil, fmt.Errorf("container %d: %w", i, err)
				}
			}
			for _, id := range got {
				d := m.of(id)
				if who := d.by[id]; who != "" && who != p.UID {
					return nil, fmt.Errorf("%s is of %s", id, who)
				}
				d.by[id] = p.UID
				d.warm = slices.DeleteFunc(d.warm, func(w mig.Placement) bool { return !m.card.Fits(m.standing(d), w) })
			}
			all = append(all, got...)
			if c.Init {
				reuse[name] = slices.Compact(slices.Sorted(slices.Values(slices.Concat(reuse[name], got))))
			} else {
				reuse[name] = slices.DeleteFunc(slices.Clone(reuse[name]),
					func(id string) bool { return slices.Contains(got, id) })
			}
		}
	}
	slices.Sort(all)
	return slices.Compact(all), nil
}

func (m *machine) of(id string) *device {
	for _, d := range m.gpus {
		if id == string(d.uuid) || len(id) > len(d.uuid) && id[:len(d.uuid)+2] == string(d.uuid)+"::" {
			return d
		}
	}
	return nil
}

// prefer is the agent's choice: of the free pieces, in an order of GPUs that is its own.
func (m *machine) prefer(r *rand.Rand, name string, must []string, n int) ([]string, error) {
	var free []string
	var offers []mig.Offer
	var places, given []mig.Place
	for _, d := range m.gpus {
		if d.kind == piece.KindPlacement {
			o := mig.Offer{GPU: d.uuid, Card: m.card, Pinned: m.standing(d), Warm: d.warm, Rank: m.rank[d.uuid]}
			if !d.onDemand {
				o.Pinned, o.Warm = d.static, m.available(d)
			}
			offers = append(offers, o)
			for _, p := range m.available(d) {
				if "example.com/"+p.Profile.Resource() == name {
					places = append(places, mig.Place{GPU: d.uuid, Placement: p})
				}
			}
			for _, p := range m.standing(d) {
				if slices.Contains(must, mig.ID(d.uuid, p)) {
					given = append(given, mig.Place{GPU: d.uuid, Placement: p})
				}
			}
			continue
		}
		if d.single && n > 1 && d.resource() == name {
			if slices.ContainsFunc(must, func(id string) bool { return m.of(id) == d }) {
				return nil, fmt.Errorf("%s is a share through MPS", must)
			}
			continue
		}
		for i := range d.total {
			if id := d.id(i); d.resource() == name && d.by[id] == "" {
				free = append(free, id)
			}
		}
	}
	r.Shuffle(len(free), func(i, j int) { free[i], free[j] = free[j], free[i] })
	switch name {
	case memName:
		return timeslice.PreferUnits(free, must, n, m.rank)
	case repName:
		return timeslice.PreferReplicas(free, must, n, m.rank)
	case gpuName:
		if len(must)+len(free) < n {
			return nil, fmt.Errorf("%d GPUs asked for, %d are free", n, len(must)+len(free))
		}
		return slices.Concat(must, free)[:n], nil
	}
	chosen, err := mig.Prefer(offers, places, given, n)
	var ids []string
	for _, p := range chosen {
		ids = append(ids, mig.ID(p.GPU, p.Placement))
	}
	return ids, err
}

// end takes everything from a pod. Instances on demand stay warm, or not.
func (m *machine) end(r *rand.Rand, uid string) {
	for _, d := range m.gpus {
		for _, p := range m.standing(d) {
			if d.onDemand && d.by[mig.ID(d.uuid, p)] == uid && r.IntN(2) == 0 {
				d.warm = append(d.warm, p)
			}
		}
		maps.DeleteFunc(d.by, func(_, who string) bool { return who == uid })
	}
}

// canPlace looks by brute force for a way to give one container n devices.
func (m *machine) canPlace(name string, n int) bool {
	free := 0
	for _, d := range m.gpus {
		own := 0
		for i := range d.total {
			if d.resource() == name && d.by[d.id(i)] == "" {
				own++
			}
		}
		switch {
		case name == memName && own >= n:
			return true
		case d.single && n > 1:
		case name == repName || name == gpuName:
			free += min(own, 1)
		}
		if d.kind == piece.KindPlacement {
			free += m.most(d, name, m.standing(d), m.available(d))
		}
	}
	return name != memName && free >= n
}

// most is how many of a profile can stand together.
func (m *machine) most(d *device, name string, standing, available []mig.Placement) (n int) {
	for i, p := range available {
		if "example.com/"+p.Profile.Resource() != name || d.onDemand && !m.card.Fits(standing, p) {
			continue
		}
		n = max(n, 1+m.most(d, name, append(slices.Clone(standing), p), available[i+1:]))
	}
	return n
}
