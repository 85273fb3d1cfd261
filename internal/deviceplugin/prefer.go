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
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/compute"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/timeslice"
	"example.com/gpu-agent/pkg/topology"
)

// Prefer chooses n of the available devices of a resource. The devices of must are part of the
// answer. It takes nothing. It fails if no choice can work; the error has the largest request that
// could.
//
// Prefer chooses no device that Allocate would refuse as Unhealthy or leaving. The kubelet may not
// have heard of that yet. It does not check must, which a pod's init container already has. It
// chooses devices of other allocations only if too few others are left. The kubelet offers those if
// a pod was deleted by force and its container has not ended. The next container then waits for
// that end.
func (f *FrontEnd) Prefer(resource string, available, must []string, n int) ([]string, error) {
	f.asked.note(f.now())
	defer func() { f.asked.note(f.now()) }()
	v := f.Offer()
	r := v.resource(resource)
	if r == nil {
		return nil, fmt.Errorf("%s is no longer offered by this node", resource)
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

// explain adds to an error the most that the resource could give, and why devices that the kubelet
// offers were left out. It returns nil for nil.
func (s *supply) explain(r *Resource, err error) error {
	if err == nil {
		return nil
	}
	if s.refused != nil {
		return s.refused
	}
	if err = r.withCapacity(err); s.refusal != "" {
		err = fmt.Errorf("%w; %s", err, s.refusal)
	}
	if s.guaranteed {
		err = status.Because(status.SpotRefused, err)
	}
	return err
}

// supply has the devices for a request, each in one of its lists.
type supply struct {
	// must are the devices that the answer must have.
	must []string
	// idle are the devices without an allocation, taken those with one. A guaranteed request may also have
	// those of the spot allocations spot, and a spot request those that guaranteed allocations lend.
	idle, taken, lent []string
	spot              []*spotHolder
	// refusal is why a device that the kubelet offers is in no list. Empty if all are.
	refusal string
	// guaranteed is true if a guaranteed allocation has the room of a spot device that the kubelet offers.
	guaranteed bool
	// refused is why devices of the GPUs that apart leaves out do not go together with others; nil if it
	// left none out.
	refused error
}

// supply sorts the devices that the kubelet offers.
func (p *preference) supply() *supply {
	r := p.of
	s := &supply{must: p.must, idle: make([]string, 0, len(p.available))}
	has := p.front.covered(r)
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
			s.guaranteed = s.guaranteed || r.Tier == ledger.Spot && dev.Reason == guaranteedHas
		case has.taken[id] || has.gpus[dev.GPU]:
			s.taken = append(s.taken, id)
		case has.spot[id] != nil:
			h := has.spot[id]
			if len(h.on) == 0 {
				s.spot = append(s.spot, h)
			}
			h.on[dev.GPU] = append(h.on[dev.GPU], id)
		case has.lent[id]:
			s.lent = append(s.lent, id)
		default:
			s.idle = append(s.idle, id)
		}
	}
	return s
}

// coverage is what allocations have of a resource's devices.
type coverage struct {
	// taken are the devices that they have, and gpus the GPUs that they have as another kind of piece.
	taken map[string]bool
	gpus  map[gpu.UUID]bool
	// lent are the devices that guaranteed allocations lend, for a spot request.
	lent map[string]bool
	// spot maps the devices that spot allocations alone have to those, for a guaranteed request.
	spot map[string]*spotHolder
}

// covered returns what allocations have of a resource's devices. A spot allocation has nothing that a
// guaranteed one could not be given, and one that lends nothing that a spot one could not be.
func (f *FrontEnd) covered(r *Resource) *coverage {
	c := &coverage{taken: map[string]bool{}, gpus: map[gpu.UUID]bool{}, lent: map[string]bool{}, spot: map[string]*spotHolder{}}
	f.mu.Lock()
	defer f.mu.Unlock()
	held := f.ledger.Allocations()
	for i := range held {
		a := &held[i]
		e := f.seen[a.ID]
		switch {
		case e != nil && a.Free(r.Tier):
			for _, id := range e.ids {
				c.lent[id] = true
			}
		case a.Out() && a.Kind() != r.Kind: // it waits until the GPU has such a piece again
		case e == nil || a.Kind() != r.Kind:
			for _, u := range a.GPUs() {
				c.gpus[u] = true
			}
		case a.Tier == ledger.Spot && r.Tier == ledger.Guaranteed:
			h := &spotHolder{id: a.ID, given: a.Given, out: a.Out(), on: map[gpu.UUID][]string{}}
			for _, id := range e.ids {
				c.spot[id] = h
			}
		default:
			for _, id := range e.ids {
				c.taken[id] = true
			}
		}
	}
	return c
}

// refusal returns why Allocate refuses a device that is Unhealthy or leaving.
func (dev *Device) refusal() string {
	if !dev.Healthy {
		return fmt.Sprintf("device %s was withdrawn: %s", dev.ID, dev.Reason)
	}
	return fmt.Sprintf("device %s is leaving: %s", dev.ID, dev.Reason)
}

// whole chooses GPUs that are well connected. If there are too few idle ones, it takes all of them
// and the rest from those that are lent, and then from those with allocations. The ID of a whole GPU is its UUID.
func (s *supply) whole(n int, g *topology.Graph, free []gpu.UUID) ([]string, error) {
	of, must := s.idle, s.must
	if n > len(must)+len(of) && len(s.lent) > 0 {
		of, must = s.lent, slices.Concat(must, of)
	}
	if short := n - len(must) - len(of); short > 0 {
		of = append(slices.Clone(of), s.wholeOverSpot(short)...)
	}
	if n > len(must)+len(of) {
		of, must = s.taken, slices.Concat(must, of)
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

// units chooses units of one GPU that has enough idle ones, for a guaranteed request those of spot allocations among them.
// If no GPU has, a spot request gets what is lent. If that is not enough, it takes the GPU with the most units that
// are idle, of spot or lent, among those where the request fits, then the one of lowest rank. There it takes all of
// these, and the rest from those with allocations.
func (s *supply) units(n int, rank map[gpu.UUID]int) ([]string, error) {
	if len(s.spot) > 0 {
		if must, available, ok := s.unitsOverSpot(n, rank); ok {
			return timeslice.PreferUnits(available, must, n, rank)
		}
	}
	out, err := timeslice.PreferUnits(s.idle, s.must, n, rank)
	if len(s.lent) > 0 && errors.Is(err, gpu.ErrNoRoom) {
		out, err = s.unitsWith(s.idle, s.lent, n, rank)
	}
	if len(s.taken) > 0 && errors.Is(err, gpu.ErrNoRoom) {
		free := slices.Concat(s.idle, s.lent)
		for _, h := range s.spot {
			for _, ids := range h.on {
				free = append(free, ids...)
			}
		}
		out, err = s.unitsWith(free, s.taken, n, rank)
	}
	return out, err
}

// unitsWith chooses n units of one GPU: all that are free there, and the rest from others.
func (s *supply) unitsWith(free, others []string, n int, rank map[gpu.UUID]int) ([]string, error) {
	all := slices.Concat(free, others)
	idle, fits := byGPU(free), byGPU(all)
	if len(s.must) > 0 { // they are all of one GPU
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
	given := slices.Concat(s.must, slices.DeleteFunc(slices.Clone(free), elsewhere))
	return timeslice.PreferUnits(slices.DeleteFunc(slices.Clone(others), elsewhere), given, n, rank)
}

// replicas chooses idle replicas of different GPUs. If too few GPUs have one, it takes one from
// each of those, and from other GPUs replicas with allocations.
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

// apart leaves out the GPUs whose containers have a share through MPS, since the request has devices of
// several GPUs. It fails if the answer must have a device of such a GPU.
func (s *supply) apart(shared map[gpu.UUID]compute.Sharing) error {
	through := func(id string) bool { return shared[onGPU(id)].MPS }
	if i := slices.IndexFunc(s.must, through); i >= 0 {
		return oneGPU(s.must[i])
	}
	for _, of := range []*[]string{&s.idle, &s.taken, &s.lent} {
		if i := slices.IndexFunc(*of, through); i >= 0 {
			s.refused = oneGPU((*of)[i])
			*of = slices.DeleteFunc(*of, through)
		}
	}
	return nil
}

func byGPU(ids []string) map[gpu.UUID]int {
	out := map[gpu.UUID]int{}
	for _, id := range ids {
		out[onGPU(id)]++
	}
	return out
}

// onGPU returns the GPU of a unit or replica. The ID must be valid, as it is after timeslice has
// chosen among such IDs.
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

// untouched returns the GPUs of a resource that may be given out and have no allocation, in the
// order of the resource's list.
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
			taken[dev.GPU] = true // list it once
			out = append(out, dev.GPU)
		}
	}
	return out
}

// rank returns a number for each GPU, by which GPUs are shared if nothing better decides: lowest
// first. GPUs in use come before idle ones, and then those whose loss spoils the fewest
// connections.
func rank(l *ledger.Ledger, o *Offer, r *Resource) map[gpu.UUID]int {
	spare := o.Topology.Spare(untouched(l, r))
	out := make(map[gpu.UUID]int, len(o.Rank))
	maps.Copy(out, o.Rank)
	for i, u := range spare {
		out[u] = len(o.Rank) + i
	}
	return out
}
