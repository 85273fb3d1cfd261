// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"slices"

	"example.com/gpu-agent/internal/deviceplugin"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/plan"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/memcap"
	"example.com/gpu-agent/pkg/mig"
	"example.com/gpu-agent/pkg/timeslice"
	"example.com/gpu-agent/pkg/topology"
)

// viewInput is everything a view is made from.
type viewInput struct {
	inv     *gpu.Inventory
	changes *plan.Changes
	// recutting are the GPUs that are about to change: all that they offer is
	// withdrawn.
	recutting []gpu.UUID
	past      map[gpu.UUID][]plan.Past
	// claims are as of the moment of publishing.
	claims []ledger.Allocation
	names  *deviceplugin.Names
	cards  map[gpu.UUID]*mig.Card
	// failing are slots that cannot be made, with the reason.
	failing map[mig.Place]status.Cause
	drain   bool
	// topology is how the GPUs of inv are joined; aligned says of which devices
	// the kubelet is told the NUMA node, and onDemand which GPUs have their MIG
	// instances made for pods, or may have.
	topology *topology.Graph
	aligned  Alignment
	onDemand func(gpu.UUID) bool
	// others are the GPUs that somebody else gives out too.
	others map[gpu.UUID]string
	// closed is why nothing may be given out at present, empty where it may.
	closed string
}

// buildView says what the kubelet is told of. It is pure.
//
// In order of precedence, a device is: healthy, if a claim has it (leaving, where
// the GPU is to change); unhealthy, if it is withdrawn; else healthy. Faults of
// GPUs are the front-end's to add.
func buildView(in viewInput) *deviceplugin.Offer {
	v := &deviceplugin.Offer{Rank: map[gpu.UUID]int{}, Topology: in.topology, MIG: in.changes.MIG, Shares: map[gpu.UUID]deviceplugin.Share{}}
	lists := map[string][][]deviceplugin.Device{} // by resource, of each GPU
	kinds := map[string]ledger.Kind{}
	for i := range in.inv.GPUs {
		d := &in.inv.GPUs[i]
		v.Rank[d.UUID] = d.Index
		switch cut := in.changes.Layouts[d.UUID]; cut.Kind {
		case ledger.Units:
			v.Shares[d.UUID] = deviceplugin.Share{Unit: cut.Unit}
		case ledger.Replica:
			v.Shares[d.UUID] = deviceplugin.Share{Replicas: cut.N, Replica: memcap.Replica(d, cut.N)}
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
	for _, name := range sortedKeys(lists) {
		devices := slices.Concat(lists[name]...)
		align(&in, kinds[name], devices)
		v.Resources = append(v.Resources, deviceplugin.Resource{Name: name, Kind: kinds[name], Devices: devices})
	}
	v.Resources = append(v.Resources, formerly(&in)...)
	return v
}

// Alignment says of which devices the kubelet's topology manager is told the NUMA
// node.
type Alignment string

// Alignments. The kubelet counts the devices of a NUMA node without asking which
// GPU they are of: told of memory units, it sends a request to a node that has
// them on several GPUs, where none has enough, and the pod is refused. On demand
// it counts MIG devices that cannot stand beside each other.
const (
	AlignNone  Alignment = "none"
	AlignFixed Alignment = "fixed" // whole GPUs and MIG devices of a fixed geometry
	AlignAll   Alignment = "all"
)

// align adds the NUMA nodes to the devices of a resource: to all of them or to
// none, since where some have one the kubelet leaves the others out of its count.
func align(in *viewInput, kind ledger.Kind, devices []deviceplugin.Device) {
	switch {
	case in.aligned == AlignAll:
	case in.aligned == AlignFixed && (kind == ledger.Whole || kind == ledger.Placement):
	default:
		return
	}
	numa := map[gpu.UUID]deviceplugin.NUMA{}
	for i := range in.inv.GPUs {
		if d := &in.inv.GPUs[i]; d.NUMA != nil && *d.NUMA >= 0 {
			numa[d.UUID] = deviceplugin.NUMA{Node: *d.NUMA, Known: true}
		}
	}
	for i := range devices {
		u := devices[i].GPU
		if !numa[u].Known || in.aligned != AlignAll && kind == ledger.Placement && in.onDemand(u) {
			return
		}
	}
	for i := range devices {
		devices[i].NUMA = numa[devices[i].GPU]
	}
}

// strays lists what is held on GPUs of which nobody knows any more: they were gone when
// the agent started without a memory. The kubelet does not survive that an ID which a
// pod has leaves its list.
func strays(in *viewInput) []deviceList {
	var out []deviceList
	listed := map[string]bool{} // as "resource id"
	for i := range in.claims {
		c := &in.claims[i]
		kind, known := in.names.Kind(c.Resource)
		l := deviceList{resource: c.Resource, kind: kind}
		for j := range c.Grants {
			g := &c.Grants[j]
			if !known || in.inv.ByUUID(g.GPU) != nil {
				continue
			}
			for _, id := range deviceplugin.PieceIDs(g.GPU, &g.Piece) {
				if !listed[c.Resource+" "+id] {
					listed[c.Resource+" "+id] = true
					l.devices = append(l.devices, deviceplugin.Device{ID: id, GPU: g.GPU, Slot: g.Slot, Reason: "this node has no GPU " + string(g.GPU)})
				}
			}
		}
		if l.devices != nil {
			out = append(out, l)
		}
	}
	return out
}

// formerly lists what is held under names that the node's resources have no more:
// their sockets are served for as long as that.
func formerly(in *viewInput) []deviceplugin.Resource {
	var out []deviceplugin.Resource
	for i := range in.claims {
		c := &in.claims[i]
		if in.names.Ours(c.Resource) {
			continue
		}
		at := slices.IndexFunc(out, func(r deviceplugin.Resource) bool { return r.Name == c.Resource })
		if at < 0 {
			at = len(out)
			out = append(out, deviceplugin.Resource{Name: c.Resource, Kind: c.Kind()})
		}
		for j := range c.Grants {
			g := &c.Grants[j]
			for _, id := range deviceplugin.PieceIDs(g.GPU, &g.Piece) {
				if !slices.ContainsFunc(out[at].Devices, func(d deviceplugin.Device) bool { return d.ID == id }) {
					out[at].Devices = append(out[at].Devices, deviceplugin.Device{ID: id, GPU: g.GPU, Healthy: true, Leaving: true,
						Reason: "the node's resources have other names now"})
				}
			}
		}
	}
	return out
}

// deviceList is what one GPU has of one resource.
type deviceList struct {
	resource string
	kind     ledger.Kind
	devices  []deviceplugin.Device
}

// deviceLists lists what one GPU has, had, and has given away.
func deviceLists(in *viewInput, d *gpu.Device) []deviceList {
	// A unit and a replica can have the same ID, so a device is known by both.
	type name struct {
		kind ledger.Kind
		id   string
	}
	var held []name
	isHeld := map[name]bool{}
	slots := map[string]mig.Slot{} // of MIG devices, by ID
	other := false
	for i := range in.claims {
		c := &in.claims[i]
		if !c.On(d.UUID) {
			continue
		}
		if !in.names.Ours(c.Resource) {
			other = true // held under another name
			continue
		}
		for j := range c.Grants {
			g := &c.Grants[j]
			if g.GPU != d.UUID {
				continue
			}
			for _, id := range deviceplugin.PieceIDs(g.GPU, &g.Piece) {
				n := name{g.Kind, id}
				held, isHeld[n] = append(held, n), true
				slots[id] = g.Slot
			}
		}
	}

	cut := in.changes.Layouts[d.UUID]
	mixed := cut.Offers && (other || slices.ContainsFunc(held, func(n name) bool { return n.kind != cut.Kind }))
	withdrawn, leaving := in.closed, ""
	blocked := in.changes.Blocks(d.UUID)
	switch {
	case mixed:
		// Two kinds of devices are two promises of the same memory.
		withdrawn = "the GPU is held as another resource"
		leaving = withdrawn
	case in.others[d.UUID] != "" && cut.Offers: // until its holders have ended
		withdrawn = "somebody else gives the GPU out" // a pod is told this: no names
		leaving = withdrawn
	case slices.Contains(in.recutting, d.UUID):
		withdrawn = "the GPU is being cut anew"
		leaving = withdrawn
	case cut.Kind == ledger.Placement: // each for itself, see below
	case blocked && in.drain:
		withdrawn = "the GPU's partition changes when its holders end"
		leaving = withdrawn
	}
	parting := in.changes.Leaving[d.UUID]
	if blocked && !in.drain {
		parting = nil
	}

	// Rounds are frequent and lists long: sizes are known, so nothing grows.
	listed := make(map[name]bool, cut.N+len(held))
	var out []deviceList
	list := func(n name, p mig.Name, size int) *deviceList {
		resource := in.names.Of(n.kind, p)
		at := slices.IndexFunc(out, func(l deviceList) bool { return l.resource == resource })
		if at < 0 {
			at = len(out)
			out = append(out, deviceList{resource, n.kind, make([]deviceplugin.Device, 0, size)})
		}
		return &out[at]
	}
	add := func(n name, withdrawn, leaving string) {
		if listed[n] {
			return
		}
		listed[n] = true
		dev := deviceplugin.Device{ID: n.id, GPU: d.UUID, Healthy: true}
		if n.kind == ledger.Placement {
			dev.Slot = in.sized(d.UUID, slots[n.id])
			if why := parting[dev.Slot].Message; why != "" && withdrawn == "" {
				withdrawn, leaving = why, why
			}
			if why := in.failing[mig.Place{GPU: d.UUID, Slot: dev.Slot}].Message; why != "" && withdrawn == "" {
				withdrawn, leaving = why, why
			}
		}
		switch {
		case isHeld[n]:
			dev.Leaving, dev.Reason = leaving != "", leaving
		case withdrawn != "":
			dev.Healthy, dev.Reason = false, withdrawn
		}
		l := list(n, dev.Slot.Profile, cut.N)
		l.devices = append(l.devices, dev)
	}
	ids := func(c plan.Layout) []string {
		ids := layoutIDs(c, d.UUID)
		for i, s := range c.Slots {
			slots[ids[i]] = s
		}
		return ids
	}
	for _, id := range ids(cut) {
		add(name{cut.Kind, id}, withdrawn, leaving)
	}
	const gone = "the node's partition does not have it any more"
	for _, p := range in.past[d.UUID] {
		for _, id := range ids(p.Layout) {
			add(name{p.Layout.Kind, id}, gone, gone)
		}
	}
	for _, n := range held {
		add(n, gone, gone)
	}
	return out
}

// sized is a MIG device's place with its size. Where the GPU's driver does not know
// it (any more) that is not known.
func (in *viewInput) sized(u gpu.UUID, s mig.Slot) mig.Slot {
	if card := in.cards[u]; card != nil {
		if known, ok := card.Slot(s.Profile, s.Start, s.CI); ok {
			return known
		}
	}
	s.Size = 0
	return s
}

// layoutIDs are the device IDs of a GPU with a layout.
func layoutIDs(c plan.Layout, u gpu.UUID) []string {
	if !c.Offers {
		return nil
	}
	switch {
	case c.Kind == ledger.Whole:
		return []string{string(u)}
	case c.Kind == ledger.Placement:
		out := make([]string, len(c.Slots))
		for i, s := range c.Slots {
			out[i] = mig.ID(u, s)
		}
		return out
	case len(c.Alone) > 0:
		out := make([]string, 0, c.N)
		for n := range c.Alone.All() {
			out = append(out, timeslice.ID(u, n))
		}
		return out
	}
	out := make([]string, c.N)
	for i := range out {
		out[i] = timeslice.ID(u, i)
	}
	return out
}

// Listed is how many devices the kubelet's lists name now.
func (a *Agent) Listed() (n int) {
	for _, r := range a.front.Offer().Resources {
		n += len(r.Devices)
	}
	return n
}
