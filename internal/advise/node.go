// SPDX-License-Identifier: Apache-2.0

package advise

import (
	"errors"
	"slices"
	"time"

	"example.com/gpu-agent/internal/config"
	"example.com/gpu-agent/internal/deviceplugin"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/internal/plan"
	"example.com/gpu-agent/internal/usage"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
	"example.com/gpu-agent/pkg/topology"
)

// node is a node that is laid out as a partition, with the agent's own front-end, ledger and plan,
// and the kubelet's record of used devices. There is no hardware: each plan is in force at once.
type node struct {
	inv   *gpu.Inventory
	front *deviceplugin.FrontEnd
	input deviceplugin.Input
	offer *deviceplugin.Offer
	// demand are the GPUs with MIG on demand. exact are the resources that are given out through
	// DRA: for these the scheduler knows what fits.
	demand map[gpu.UUID]bool
	exact  map[string]bool
	// dynamic is true if each GPU takes the layout that is asked for first. wants is the present
	// layout of each GPU, and users the number of allocations on it.
	dynamic bool
	plan    plan.Input
	wants   []config.Want
	users   map[gpu.UUID]int
	// inUse are the devices that pods hold, by resource and ID. standing are the MIG instances of
	// GPUs with MIG on demand.
	inUse    map[string]map[string]bool
	standing map[gpu.UUID][]mig.Placement
	now      time.Time
}

// Node is the node on which alternatives are tried.
type Node struct {
	Inventory *gpu.Inventory
	// Unit is the size of a memory unit.
	Unit gpu.MiB
}

// names are the names of resources inside a replay.
var names = deviceplugin.ResourceNames("gpu")

// lay returns the node laid out as wants. It fails if the node cannot have that partition.
func (n Node) lay(wants []config.Want) (*node, error) {
	out := &node{
		inv: &gpu.Inventory{GPUs: slices.Clone(n.Inventory.GPUs)}, demand: map[gpu.UUID]bool{},
		exact: map[string]bool{}, users: map[gpu.UUID]int{}, inUse: map[string]map[string]bool{},
		standing: map[gpu.UUID][]mig.Placement{},
	}
	out.wants = slices.Clone(wants)
	throughDRA := map[gpu.UUID]bool{}
	out.plan = plan.Input{
		Inventory: out.inv, Unit: n.Unit,
		MIG: plan.MIGInput{Cards: map[gpu.UUID]*mig.Card{}, Made: map[gpu.UUID]map[mig.Placement]bool{}},
	}
	for i := range out.inv.GPUs {
		d, w := &out.inv.GPUs[i], &out.wants[i]
		if d.MIG.Capable {
			out.plan.MIG.Cards[d.UUID], _ = mig.NewCard(&d.MIG)
		}
		if w.Mode == config.Dynamic { // nothing, until a pod asks
			out.dynamic = true
			*w = config.Want{GPU: w.GPU, Mode: config.Off}
		}
		if w.API == ledger.DRA { // the same pieces, but the scheduler packs them
			throughDRA[d.UUID], w.API = true, ledger.DevicePlugin
		}
	}
	if out.dynamic && slices.ContainsFunc(wants, func(w config.Want) bool { return w.Mode != config.Dynamic }) {
		return nil, errors.New("a mixture of dynamic and other GPUs cannot be replayed")
	}
	l := ledger.New(func() {}, out.clock)
	out.front = deviceplugin.New(l, out.clock)
	out.input = deviceplugin.Input{
		Inventory: out.inv, Names: names, Cards: out.plan.MIG.Cards, Topology: topology.New(n.Inventory),
		Aligned: deviceplugin.AlignNone, OnDemand: func(u gpu.UUID) bool { return out.demand[u] },
	}
	if err := out.arrange(); err != nil {
		return nil, err
	}
	for i := range out.offer.Resources {
		r := &out.offer.Resources[i]
		out.exact[r.Name] = len(r.Devices) > 0 && throughDRA[r.Devices[0].GPU]
	}
	return out, nil
}

// arrange puts the layouts of wants in force.
func (n *node) arrange() error {
	for i := range n.inv.GPUs {
		d, w := &n.inv.GPUs[i], &n.wants[i]
		made, err := settle(d, w)
		if err != nil {
			return err
		}
		n.plan.MIG.Made[d.UUID], n.demand[d.UUID] = made, w.Mode == config.MIG && w.OnDemand
	}
	n.plan.Wanted = n.wants
	changes := plan.Make(n.plan)
	for _, c := range changes.Conditions {
		return errors.New(c.Message)
	}
	n.input.Changes = &changes
	n.stand()
	return nil
}

// become gives an idle dynamic GPU the layout that offers a resource. It takes the first GPU that
// does not have that layout, and reports whether there was one.
func (n *node) become(resource string) bool {
	kind, _ := names.Kind(resource)
	to := config.Want{API: ledger.DevicePlugin}
	switch to.Mode = config.Mode(kind.Mode()); to.Mode {
	case config.Shared:
		to.TimeSlice = gpu.TimeSliceDefault
	case config.MIG:
		to.OnDemand = true
	case config.Whole, config.Keep, config.Off, config.Dynamic: // nothing to choose
	}
	for i := range n.wants {
		to.GPU = n.wants[i].GPU
		if !n.dynamic || n.users[to.GPU] > 0 || n.wants[i].Equal(to) {
			continue
		}
		n.wants[i] = to
		delete(n.standing, to.GPU) // MIG was off, or is off now
		return n.arrange() == nil
	}
	return false
}

// settle makes the MIG state of a GPU that of its partition. It returns the instances that the
// agent would have made.
func settle(d *gpu.Device, w *config.Want) (map[mig.Placement]bool, error) {
	d.MIG.Pending, d.MIG.Instances, d.MIG.Enabled = nil, nil, w.Mode == config.MIG
	made := map[mig.Placement]bool{}
	if !d.MIG.Enabled {
		return made, nil
	}
	card, _ := mig.NewCard(&d.MIG) // no partition can want what the card leaves out
	p, err := mig.Change(&d.MIG, card, nil, mig.Target{MIG: true, OnDemand: w.OnDemand, Geometry: w.Geometry})
	if err != nil {
		return nil, err
	}
	for i, s := range p.Result {
		made[s] = true
		d.MIG.Instances = append(d.MIG.Instances, gpu.Instance{
			Profile: s.Profile.String(), Placement: gpu.Placement{Start: s.Start, Size: s.Size}, GI: i + 1,
			CIStart: s.CI,
		})
	}
	return made, nil
}

func (n *node) clock() time.Time { return n.now }

// publish publishes the offer.
func (n *node) publish() {
	n.offer = n.front.Publish(func(held []ledger.Allocation) *deviceplugin.Offer {
		n.input.Held = held
		return deviceplugin.Build(n.input)
	})
}

// healthy returns how many devices of a resource there are, free or held.
func (n *node) healthy(resource string) (count int) {
	devices, _ := n.front.List(resource)
	for i := range devices {
		if devices[i].Healthy {
			count++
		}
	}
	return count
}

// available returns the devices of a resource that the kubelet counts as free.
func (n *node) available(resource string) []string {
	devices, _ := n.front.List(resource)
	used := n.inUse[resource]
	out := make([]string, 0, len(devices))
	for i := range devices {
		if devices[i].Healthy && !used[devices[i].ID] {
			out = append(out, devices[i].ID)
		}
	}
	return out
}

// take gives devices to a container. ok is false if there are not enough. If GPUs are dynamic, idle
// ones take the layout one by one until there are.
func (n *node) take(resource string, count int) (a ledger.Allocation, ok bool) {
	for {
		if of := n.available(resource); len(of) >= count {
			if a, err := n.grant(resource, of, count); err == nil {
				return a, true
			}
		}
		if !n.become(resource) {
			return a, false
		}
	}
}

// grant gives out devices as the kubelet does. It asks the agent which of the free ones it prefers,
// and then for these, which the agent may refuse with an error.
func (n *node) grant(resource string, of []string, count int) (ledger.Allocation, error) {
	ids, err := n.front.Prefer(resource, of, nil, count)
	if err != nil {
		return ledger.Allocation{}, err
	}
	a, err := n.front.Allocate(resource, ids)
	if err != nil {
		return a, err
	}
	if n.inUse[resource] == nil {
		n.inUse[resource] = map[string]bool{}
	}
	for _, id := range ids {
		n.inUse[resource][id] = true
	}
	for _, u := range a.GPUs() {
		n.users[u]++
	}
	n.make(a.Grants)
	return a, nil
}

// make makes the missing instances of grants on GPUs with MIG on demand, in place of those that the
// agent would destroy for them.
func (n *node) make(grants []ledger.Grant) {
	made := false
	for i := range grants {
		g := &grants[i]
		if at, ok := g.Placement(); !ok || !n.demand[g.GPU] || slices.Contains(n.standing[g.GPU], at) {
			continue
		}
		var stand []mig.Standing
		for _, s := range n.standing[g.GPU] {
			stand = append(stand, mig.Standing{Placement: s, Pinned: n.held(g.GPU, s)})
		}
		p, err := n.input.Cards[g.GPU].Make(stand, piece.At(g.Piece))
		if err != nil {
			continue // the front-end does not give out such a placement
		}
		n.standing[g.GPU], made = slices.Clone(p.Result), true
	}
	if made {
		n.stand()
	}
}

// stand publishes the instances of GPUs with MIG on demand, and the offer.
func (n *node) stand() {
	for u, stand := range n.standing {
		m := n.input.Changes.MIG[u]
		m.Warm = stand
		n.input.Changes.MIG[u] = m
	}
	n.publish()
}

// held reports whether a pod has an instance.
func (n *node) held(u gpu.UUID, s mig.Placement) bool {
	return n.inUse[names.OfProfile(s.Profile)][mig.ID(u, s)]
}

// put takes back a container's devices: from the kubelet at once, and from the ledger.
func (n *node) put(a *ledger.Allocation) {
	for _, id := range deviceplugin.IDs(a.Grants) {
		delete(n.inUse[a.Resource], id)
	}
	for _, u := range a.GPUs() {
		n.users[u]--
	}
	n.front.Release(a.ID)
}

// pieces returns the pieces of an allocation.
func (n *node) pieces(a *ledger.Allocation) []usage.Piece { return usage.PiecesOf(a.Grants, n.inv) }
