// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"cmp"
	"maps"
	"slices"

	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/internal/plan"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/compute"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
	"example.com/gpu-agent/pkg/topology"
)

// Input is everything that an offer is built from.
type Input struct {
	Inventory *gpu.Inventory
	Changes   *plan.Changes
	// Changing are the GPUs that are about to change. All their devices are withdrawn.
	Changing []gpu.UUID
	// Past has the former layouts of GPUs whose devices are still listed.
	Past map[gpu.UUID][]plan.Past
	// Held are the allocations at the moment of publishing.
	Held  []ledger.Allocation
	Names *Names
	Cards map[gpu.UUID]*mig.Card
	// Failing maps the placements that cannot be created to the reason.
	Failing map[mig.Place]status.Cause
	// Drain is true if a GPU whose change waits for holders offers nothing meanwhile.
	Drain bool
	// Topology is how the GPUs of Inventory are connected. Aligned selects the devices whose NUMA
	// node the kubelet is told. OnDemand reports whether a GPU's MIG instances are, or may be,
	// created for pods.
	Topology *topology.Graph
	Aligned  Alignment
	OnDemand func(gpu.UUID) bool
	// Others maps the GPUs that another program gives out too to the reason.
	Others map[gpu.UUID]string
	// Cordoned are the GPUs that an operator has closed to new pods.
	Cordoned map[gpu.UUID]bool
	// Closed is why no device may be given out now. Empty if devices may be.
	Closed string
	// Daemons maps the GPUs whose MPS daemons cannot be relied on now to the reason.
	Daemons map[gpu.UUID]status.Cause
}

// Build makes the offer for the kubelet. It is pure.
//
// The first rule that applies decides about a device. If it is held, it is healthy, and also
// leaving if its GPU is to change. If it is withdrawn, it is unhealthy. Otherwise it is healthy.
// [FrontEnd.SetFaults] adds the faults of GPUs later.
func Build(in Input) *Offer {
	v := &Offer{
		Rank: map[gpu.UUID]int{}, Topology: in.Topology, MIG: in.Changes.MIG, Shares: map[gpu.UUID]piece.Share{},
		Compute: map[gpu.UUID]compute.Sharing{}, Spot: map[gpu.UUID]ledger.Offering{},
	}
	lists := map[string][][]Device{} // by resource; one list for each GPU
	kinds := map[string]piece.Kind{}
	for i := range in.Inventory.GPUs {
		d := &in.Inventory.GPUs[i]
		v.Rank[d.UUID] = d.Index
		if layout := in.Changes.Layouts[d.UUID]; layout.Kind.Shared() {
			v.Shares[d.UUID] = piece.Share{Division: layout.Division, Usable: d.Usable()}
			if layout.Compute.MPS {
				v.Compute[d.UUID] = layout.Compute
			}
		}
		if o := in.Changes.Layouts[d.UUID].Spot; o.On {
			v.Spot[d.UUID] = o
		}
		for _, l := range deviceLists(&in, d) {
			lists[l.resource] = append(lists[l.resource], l.devices)
			kinds[l.resource] = l.kind
		}
	}
	for _, l := range strays(&in) {
		lists[l.resource] = append(lists[l.resource], l.devices)
		kinds[l.resource] = l.kind
	}
	for _, name := range slices.Sorted(maps.Keys(lists)) {
		devices := slices.Concat(lists[name]...)
		align(&in, kinds[name], devices)
		tier, _ := TierOf(name)
		v.Resources = append(v.Resources, Resource{Name: name, Kind: kinds[name], Tier: tier, Devices: devices})
	}
	return v
}

// Alignment selects the devices whose NUMA node the kubelet's topology manager is told.
type Alignment string

// Alignments. The kubelet counts the devices of a NUMA node without regard to their GPUs. So it can
// send a request for memory units to a NUMA node whose GPUs have enough only together; the agent
// then refuses the pod. With MIG on demand the kubelet would count devices that exclude each other.
const (
	AlignNone  Alignment = "none"
	AlignFixed Alignment = "fixed" // whole GPUs and MIG devices of a fixed geometry
	AlignAll   Alignment = "all"
)

// align adds the NUMA nodes to the devices of a resource: to all of them or to none. If only some
// had one, the kubelet would leave the others out of its count.
func align(in *Input, kind piece.Kind, devices []Device) {
	switch {
	case in.Aligned == AlignAll:
	case in.Aligned == AlignFixed && !kind.Shared():
	default:
		return
	}
	numa := map[gpu.UUID]NUMA{}
	for i := range in.Inventory.GPUs {
		if d := &in.Inventory.GPUs[i]; d.NUMA != nil && *d.NUMA >= 0 {
			numa[d.UUID] = NUMA{Node: *d.NUMA, Known: true}
		}
	}
	for i := range devices {
		u := devices[i].GPU
		if !numa[u].Known || in.Aligned != AlignAll && kind.InMIG() && in.OnDemand(u) {
			return
		}
	}
	for i := range devices {
		devices[i].NUMA = numa[devices[i].GPU]
	}
}

// strays lists held devices that no GPU's list has. They are of two kinds: devices of unknown GPUs,
// which were missing when the agent started without its journal, and devices of resources that this
// node has renamed. The sockets of renamed resources are served as long as a device of them is
// held. Such devices stay listed, because the kubelet crashes when an ID that a pod has leaves
// its list.
func strays(in *Input) []deviceList {
	var out []deviceList
	listed := map[string]bool{} // as "resource id"
	for i := range in.Held {
		a := &in.Held[i]
		named := in.Names.Ours(a.Resource)
		l := deviceList{resource: a.Resource, kind: a.Kind()}
		for j := range a.Grants {
			g := &a.Grants[j]
			if a.Owner != ledger.DevicePlugin || named && in.Inventory.ByUUID(g.GPU) != nil {
				continue
			}
			dev := Device{GPU: g.GPU, Placement: piece.At(g.Piece), Reason: "this node has no GPU " + string(g.GPU)}
			if !named {
				dev.Healthy, dev.Leaving, dev.Reason = true, true, "the node's resources have other names now"
			}
			for _, dev.ID = range pieceIDs(g.GPU, g.Piece) {
				if !listed[a.Resource+" "+dev.ID] {
					listed[a.Resource+" "+dev.ID] = true
					l.devices = append(l.devices, dev)
				}
			}
		}
		if l.devices != nil {
			out = append(out, l)
		}
	}
	return out
}

// deviceList has the devices of one resource on one GPU.
type deviceList struct {
	resource string
	kind     piece.Kind
	devices  []Device
}

// name identifies an entry of a list. A unit and a replica can have the same ID, so it includes the kind.
type name struct {
	kind piece.Kind
	tier ledger.Tier
	id   string
}

// gpuLists builds the device lists of one GPU.
type gpuLists struct {
	in     *Input
	gpu    *gpu.Device
	layout plan.Layout
	// held are the held devices, in the order of the allocations. isHeld has the same devices as a
	// set. placements has the placement of each MIG device, by ID.
	held       []name
	isHeld     map[name]bool
	placements map[string]mig.Placement
	// mixed is true if the GPU is held otherwise than its layout offers it: as another kind, or in a way that
	// these lists do not show (through another front-end, under a former resource name, as a kind that this
	// version does not know).
	mixed bool
	// leaving maps the placements that are withdrawn when their holders end to the reason.
	leaving map[mig.Placement]status.Cause
	listed  map[name]bool
	lists   []deviceList
}

// deviceLists returns the lists of one GPU: the devices of its layout, devices of former layouts
// that are still listed, and held devices.
func deviceLists(in *Input, d *gpu.Device) []deviceList {
	l := &gpuLists{
		in: in, gpu: d, layout: in.Changes.Layouts[d.UUID], isHeld: map[name]bool{},
		placements: map[string]mig.Placement{},
	}
	if !l.layout.Through(ledger.DevicePlugin) {
		l.layout = plan.Layout{Known: l.layout.Known}
	}
	l.holders()
	// Rounds are frequent and lists long, so allocate the final size at once.
	l.listed = make(map[name]bool, l.layout.N+len(l.held))
	drains := in.Changes.Drains(d.UUID, in.Drain)
	if l.leaving = in.Changes.Leaving[d.UUID]; in.Changes.Blocks(d.UUID) && !drains {
		l.leaving = nil
	}
	withdrawn, leaving := l.withdrawal(drains)
	const gone = "the node's partition no longer has it"
	l.addAll(l.layout, withdrawn, leaving)
	for _, p := range in.Past[d.UUID] {
		l.addAll(p.Layout, gone, gone)
	}
	for _, n := range l.held {
		l.add(n, gone, gone)
	}
	return l.lists
}

// addAll lists the devices of a layout, in each tier in which it offers them.
func (l *gpuLists) addAll(c plan.Layout, withdrawn, leaving string) {
	ids := l.ids(c)
	for _, id := range ids {
		l.add(name{c.Kind, ledger.Guaranteed, id}, withdrawn, leaving)
	}
	if !c.Spot.On || !HasSpot(c.Kind) {
		return
	}
	for _, id := range ids {
		l.add(name{c.Kind, ledger.Spot, id}, withdrawn, leaving)
	}
}

// holders fills in held, isHeld and mixed. What a spot allocation has given back is listed for its pod, and
// is not held.
func (l *gpuLists) holders() {
	for i := range l.in.Held {
		a := &l.in.Held[i]
		if !a.On(l.gpu.UUID) {
			continue
		}
		if a.Owner != ledger.DevicePlugin || !l.in.Names.Ours(a.Resource) || !a.Kind().Known() {
			l.mixed = l.mixed || a.Takes(l.gpu.UUID)
			continue
		}
		l.mixed = l.mixed || a.Kind() != l.layout.Kind && !a.Out()
		for j := range a.Grants {
			g := &a.Grants[j]
			if g.GPU != l.gpu.UUID {
				continue
			}
			for _, id := range pieceIDs(g.GPU, g.Piece) {
				n := name{g.Kind(), a.Tier, id}
				l.held, l.isHeld[n] = append(l.held, n), true
				l.placements[id] = piece.At(g.Piece)
			}
		}
	}
}

// withdrawal returns the reasons for two things: withdrawn is why the layout's devices may not be
// given out, and leaving is why held devices go when their holders end. Each is empty if there is
// no reason. drains is true if the GPU's change waits for holders and the GPU offers nothing
// meanwhile.
func (l *gpuLists) withdrawal(drains bool) (withdrawn, leaving string) {
	u := l.gpu.UUID
	switch {
	case l.mixed && l.layout.Offers:
		// Devices of two kinds would promise the same memory twice.
		withdrawn = "the GPU is held as another resource"
	case l.in.Others[u] != "" && l.layout.Offers: // until its holders end; plan.Make then drops its layout
		withdrawn = "another program gives the GPU out" // a pod reads this: name no other pod
	case slices.Contains(l.in.Changing, u):
		withdrawn = "the GPU is being laid out anew"
	case drains && !l.layout.InMIG(): // add withdraws placements one by one
		withdrawn = "the GPU's partition changes when its holders end"
	case l.in.Cordoned[u]: // held devices stay
		return "an operator keeps new pods off the GPU", ""
	default: // held devices stay
		return cmp.Or(l.in.Closed, l.in.Daemons[u].Message), ""
	}
	return withdrawn, withdrawn
}

// add lists a device unless it is listed already.
func (l *gpuLists) add(n name, withdrawn, leaving string) {
	if l.listed[n] {
		return
	}
	l.listed[n] = true
	dev := Device{ID: n.id, GPU: l.gpu.UUID, Healthy: true}
	if n.kind.InMIG() {
		dev.Placement = l.in.sized(l.gpu.UUID, l.placements[n.id])
		at := mig.Place{GPU: l.gpu.UUID, Placement: dev.Placement}
		for _, why := range []status.Cause{l.leaving[dev.Placement], l.in.Failing[at]} {
			if why.Message != "" && leaving == "" {
				withdrawn, leaving = cmp.Or(withdrawn, why.Message), why.Message
			}
		}
	}
	switch {
	case l.isHeld[n]:
		dev.Leaving, dev.Reason = leaving != "", leaving
	case withdrawn != "":
		dev.Healthy, dev.Reason = false, withdrawn
	}
	resource := InTier(l.in.Names.Of(n.kind, dev.Placement.Profile), n.tier)
	at := slices.IndexFunc(l.lists, func(o deviceList) bool { return o.resource == resource })
	if at < 0 {
		at = len(l.lists)
		l.lists = append(l.lists, deviceList{resource, n.kind, make([]Device, 0, l.layout.N)})
	}
	l.lists[at].devices = append(l.lists[at].devices, dev)
}

// ids returns the device IDs of a layout, and records the placements of its MIG devices.
func (l *gpuLists) ids(c plan.Layout) []string {
	if !c.Offers {
		return nil
	}
	ids := DivisionIDs(c.Division, l.gpu.UUID)
	for i, s := range c.Placements {
		l.placements[ids[i]] = s
	}
	return ids
}

// sized returns a MIG device's placement with its size. The size is 0 if the GPU's driver does not
// report that placement.
func (in *Input) sized(u gpu.UUID, s mig.Placement) mig.Placement {
	if card := in.Cards[u]; card != nil {
		if known, ok := card.Placement(s.Profile, s.Start, s.CI); ok {
			return known
		}
	}
	s.Size = 0
	return s
}
