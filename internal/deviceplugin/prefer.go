// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"

	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/timeslice"
	"example.com/gpu-agent/pkg/topology"
)

// Prefer chooses n of the available devices of a resource, must among them. It
// is a pure choice on the offer and the allocations: nothing is taken. An error says
// that no choice can work, with the largest request that could.
//
// Nothing is chosen that Allocate would refuse: what is Unhealthy or leaving, of
// which the kubelet may not have heard. Must is not asked about; a pod's init
// container has had it. What an allocation covers is chosen only where too little else
// is left. The kubelet offers that where a pod was deleted by force and its
// container has not ended: the next container on it waits for that.
func (f *FrontEnd) Prefer(resource string, available, must []string, n int) ([]string, error) {
	f.asked.note(f.now())
	defer func() { f.asked.note(f.now()) }()
	v := f.Offer()
	r := v.resource(resource)
	if r == nil {
		return nil, fmt.Errorf("%s is not offered by this node any more", resource)
	}
	row, ok := rows[r.Kind]
	if !ok {
		return nil, piece.UnknownKind{Word: r.Kind}
	}
	return row.prefer(&preference{front: f, offer: v, of: r, available: available, must: must, n: n})
}

// preference is a request to choose n of the available devices of a resource, must among them.
type preference struct {
	front           *FrontEnd
	offer           *Offer
	of              *Resource
	available, must []string
	n               int
}

// told adds to an error what the resource could give at best, and why devices that the kubelet
// offers were passed over.
func (s *supply) told(r *Resource, err error) error {
	if err == nil {
		return nil
	}
	if err = r.withCapacity(err); s.refusal != "" {
		err = fmt.Errorf("%w; %s", err, s.refusal)
	}
	return err
}

// supply is what a request can be served from. A device is in one of its lists.
type supply struct {
	// must is in the answer.
	must []string
	// idle is what no allocation covers, taken what one does.
	idle, taken []string
	// refusal is why a device that the kubelet offers is in none of them, empty
	// where all are.
	refusal string
}

// supply sorts out what the kubelet offers.
func (p *preference) supply() *supply {
	r := p.of
	s := &supply{must: p.must, idle: make([]string, 0, len(p.available))}
	taken, gpus := p.front.covered(r.Name)
	given := make(map[string]bool, len(p.must))
	for _, id := range p.must {
		given[id] = true
	}
	for _, id := range p.available {
		if len(given) > 0 && given[id] {
			continue // the kubelet names the musts among the available, too
		}
		i, ok := r.index[id]
		if !ok {
			continue // it has left the list
		}
		switch dev := &r.Devices[i]; {
		case !dev.Healthy || dev.Leaving:
			if why := dev.refusal(); s.refusal == "" || why < s.refusal { // the kubelet offers them in random order
				s.refusal = why
			}
		case taken[id] || gpus[dev.GPU]:
			s.taken = append(s.taken, id)
		default:
			s.idle = append(s.idle, id)
		}
	}
	return s
}

// covered is what allocations cover for a resource: its devices that they have, and all
// that is on the GPUs of which allocations have something as another resource.
func (f *FrontEnd) covered(resource string) (ids map[string]bool, gpus map[gpu.UUID]bool) {
	ids, gpus = map[string]bool{}, map[gpu.UUID]bool{}
	f.mu.Lock()
	defer f.mu.Unlock()
	held := f.ledger.Allocations()
	for i := range held {
		a := &held[i]
		if e := f.seen[a.ID]; e != nil && e.resource == resource {
			for _, id := range e.ids {
				ids[id] = true
			}
			continue
		}
		for _, u := range a.GPUs() {
			gpus[u] = true
		}
	}
	return ids, gpus
}

// refusal is why Allocate refuses a device that is Unhealthy or leaving.
func (dev *Device) refusal() string {
	if !dev.Healthy {
		return fmt.Sprintf("device %s was withdrawn: %s", dev.ID, dev.Reason)
	}
	return fmt.Sprintf("device %s is leaving: %s", dev.ID, dev.Reason)
}

// whole chooses GPUs that are joined: of the idle ones, or all of these and the
// rest of those with allocations. A whole GPU's ID is its name.
func (s *supply) whole(n int, g *topology.Graph, free []gpu.UUID) ([]string, error) {
	of, must := s.idle, s.must
	if n > len(s.must)+len(s.idle) {
		of, must = s.taken, slices.Concat(s.must, s.idle)
	}
	chosen, err := g.Choose(topology.Request{Available: toUUIDs(of), Must: toUUIDs(must), N: n, Free: free})
	if err != nil {
		return nil, err
	}
	out := make([]string, len(chosen))
	for i, u := range chosen {
		out[i] = string(u)
	}
	return out, nil
}

// units chooses units of a GPU that has enough idle ones. Where none has, it is
// the GPU with the most idle ones of those on which the request fits, then the one
// of lowest rank: all its idle units, and the rest of those with allocations.
func (s *supply) units(n int, rank map[gpu.UUID]int) ([]string, error) {
	out, err := timeslice.PreferUnits(s.idle, s.must, n, rank)
	if len(s.taken) == 0 || !errors.Is(err, gpu.ErrNoRoom) {
		return out, err
	}
	all := slices.Concat(s.idle, s.taken)
	idle, fits := byGPU(s.idle), byGPU(all)
	if len(s.must) > 0 { // all of one GPU
		u := onGPU(s.must[0])
		fits = map[gpu.UUID]int{u: fits[u] + len(s.must)}
	}
	maps.DeleteFunc(fits, func(_ gpu.UUID, have int) bool { return have < n })
	if len(fits) == 0 {
		return timeslice.PreferUnits(all, s.must, n, rank)
	}
	best := slices.MinFunc(slices.Collect(maps.Keys(fits)), func(a, b gpu.UUID) int {
		return cmp.Or(cmp.Compare(idle[b], idle[a]), cmp.Compare(rank[a], rank[b]), cmp.Compare(a, b))
	})
	elsewhere := func(id string) bool { return onGPU(id) != best }
	given := slices.Concat(s.must, slices.DeleteFunc(slices.Clone(s.idle), elsewhere))
	return timeslice.PreferUnits(slices.DeleteFunc(slices.Clone(s.taken), elsewhere), given, n, rank)
}

// replicas chooses idle replicas of different GPUs. Where too few GPUs have one,
// it takes one of each of these, and of others replicas with allocations.
func (s *supply) replicas(n int, rank map[gpu.UUID]int) ([]string, error) {
	out, err := timeslice.PreferReplicas(s.idle, s.must, n, rank)
	var short *timeslice.SpreadError
	if len(s.taken) == 0 || !errors.As(err, &short) {
		return out, err
	}
	first, err := timeslice.PreferReplicas(s.idle, s.must, short.Free, rank)
	if err != nil {
		return nil, err
	}
	return timeslice.PreferReplicas(s.taken, first, n, rank)
}

// byGPU counts devices.
func byGPU(ids []string) map[gpu.UUID]int {
	out := map[gpu.UUID]int{}
	for _, id := range ids {
		out[onGPU(id)]++
	}
	return out
}

// onGPU is the GPU of a unit or replica. Whoever chooses among them has found
// their IDs to be such.
func onGPU(id string) gpu.UUID {
	u, _, _ := timeslice.ParseID(id)
	return u
}

func toUUIDs(ids []string) []gpu.UUID {
	out := make([]gpu.UUID, len(ids))
	for i, id := range ids {
		out[i] = gpu.UUID(id)
	}
	return out
}

// untouched lists the GPUs that a resource has, that can be had and of which
// nobody has anything, in the order of its list.
func untouched(l *ledger.Ledger, r *Resource) []gpu.UUID {
	taken := map[gpu.UUID]bool{}
	held := l.Allocations()
	for i := range held {
		for _, u := range held[i].GPUs() {
			taken[u] = true
		}
	}
	var out []gpu.UUID
	for i := range r.Devices {
		dev := &r.Devices[i]
		if dev.Healthy && !dev.Leaving && !taken[dev.GPU] {
			taken[dev.GPU] = true // once is enough
			out = append(out, dev.GPU)
		}
	}
	return out
}

// rank is the order in which shares go to GPUs where nothing better decides: first
// those that are broken up already, then those whose loss breaks up least.
func rank(l *ledger.Ledger, o *Offer, r *Resource) map[gpu.UUID]int {
	spare := o.Topology.Spare(untouched(l, r))
	out := make(map[gpu.UUID]int, len(o.Rank))
	maps.Copy(out, o.Rank)
	for i, u := range spare {
		out[u] = len(o.Rank) + i
	}
	return out
}
