// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"example.com/gpu-agent/internal/desk"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
	"example.com/gpu-agent/pkg/topology"
)

// Linger is how long a withdrawn device stays listed as Unhealthy before its ID
// leaves. The kubelet (1.36.3) ends with a nil dereference when an ID leaves
// the list while its Allocate is on the wire.
const Linger = 60 * time.Second

// pastCut is a cut that a GPU no longer has, whose devices are still listed.
type pastCut struct {
	cut   Cut
	until time.Time
}

// viewInput is everything a view is made from.
type viewInput struct {
	inv     *gpu.Inventory
	changes *Changes
	// recutting are the GPUs that are about to change: all that they offer is
	// withdrawn.
	recutting []gpu.UUID
	past      map[gpu.UUID][]pastCut
	// claims are as of the moment of publishing.
	claims []desk.Claim
	names  *Names
	cards  map[gpu.UUID]*mig.Card
	// failing are slots that cannot be made, with the reason.
	failing map[gpu.UUID]map[mig.Slot]string
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
// GPUs are the desk's to add.
func buildView(in viewInput) *desk.View {
	v := &desk.View{Rank: map[gpu.UUID]int{}, Topology: in.topology, MIG: in.changes.MIG}
	lists := map[string][][]desk.Device{} // by resource, of each GPU
	kinds := map[string]desk.Kind{}
	for i := range in.inv.GPUs {
		d := &in.inv.GPUs[i]
		v.Rank[d.UUID] = d.Index
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
		v.Resources = append(v.Resources, desk.Resource{Name: name, Kind: kinds[name], Devices: devices})
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
func align(in *viewInput, kind desk.Kind, devices []desk.Device) {
	switch {
	case in.aligned == AlignAll:
	case in.aligned == AlignFixed && (kind == desk.Whole || kind == desk.Slots):
	default:
		return
	}
	numa := map[gpu.UUID]desk.NUMA{}
	for i := range in.inv.GPUs {
		if d := &in.inv.GPUs[i]; d.NUMA != nil && *d.NUMA >= 0 {
			numa[d.UUID] = desk.NUMA{Node: *d.NUMA, Known: true}
		}
	}
	for i := range devices {
		u := devices[i].GPU
		if !numa[u].Known || in.aligned != AlignAll && kind == desk.Slots && in.onDemand(u) {
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
		kind, known := in.names.kind(c.Resource)
		l := deviceList{resource: c.Resource, kind: kind}
		for _, id := range c.IDs {
			u, _, _ := strings.Cut(id, "::")
			if !known || in.inv.ByUUID(gpu.UUID(u)) != nil || listed[c.Resource+" "+id] {
				continue
			}
			listed[c.Resource+" "+id] = true
			d := desk.Device{ID: id, GPU: gpu.UUID(u), Reason: "this node has no GPU " + u}
			if kind == desk.Slots {
				d.Slot = in.slot(d.GPU, id)
			}
			l.devices = append(l.devices, d)
		}
		if l.devices != nil {
			out = append(out, l)
		}
	}
	return out
}

// formerly lists what is held under names that the node's resources have no more:
// their sockets are served for as long as that.
func formerly(in *viewInput) []desk.Resource {
	var out []desk.Resource
	for i := range in.claims {
		c := &in.claims[i]
		kind, known := kindOf(c.Resource)
		if _, present := in.names.kind(c.Resource); present || !known {
			continue
		}
		at := slices.IndexFunc(out, func(r desk.Resource) bool { return r.Name == c.Resource })
		if at < 0 {
			at = len(out)
			out = append(out, desk.Resource{Name: c.Resource, Kind: kind})
		}
		for _, id := range c.IDs {
			if slices.ContainsFunc(out[at].Devices, func(d desk.Device) bool { return d.ID == id }) {
				continue
			}
			u, _, _ := strings.Cut(id, "::")
			out[at].Devices = append(out[at].Devices, desk.Device{ID: id, GPU: gpu.UUID(u), Healthy: true, Leaving: true,
				Reason: "the node's resources have other names now"})
		}
	}
	return out
}

// deviceList is what one GPU has of one resource.
type deviceList struct {
	resource string
	kind     desk.Kind
	devices  []desk.Device
}

// deviceLists lists what one GPU has, had, and has given away.
func deviceLists(in *viewInput, d *gpu.Device) []deviceList {
	// A unit and a replica can have the same ID, so a device is known by both.
	type name struct {
		kind desk.Kind
		id   string
	}
	var held []name
	isHeld := map[name]bool{}
	other := false
	for i := range in.claims {
		c := &in.claims[i]
		if !slices.Contains(c.GPUs, d.UUID) {
			continue
		}
		kind, ok := in.names.kind(c.Resource)
		if !ok {
			other = true // held under another name
			continue
		}
		for _, id := range c.IDs {
			if strings.HasPrefix(id, string(d.UUID)) {
				held = append(held, name{kind, id})
				isHeld[name{kind, id}] = true
			}
		}
	}

	cut := in.changes.Cuts[d.UUID]
	mixed := cut.Offers && (other || slices.ContainsFunc(held, func(n name) bool { return n.kind != cut.Kind }))
	withdrawn, leaving := in.closed, ""
	blocked := in.changes.blocks(d.UUID)
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
	case cut.Kind == desk.Slots: // each for itself, see below
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
		resource := in.names.of(n.kind, p)
		at := slices.IndexFunc(out, func(l deviceList) bool { return l.resource == resource })
		if at < 0 {
			at = len(out)
			out = append(out, deviceList{resource, n.kind, make([]desk.Device, 0, size)})
		}
		return &out[at]
	}
	add := func(n name, withdrawn, leaving string) {
		if listed[n] {
			return
		}
		listed[n] = true
		dev := desk.Device{ID: n.id, GPU: d.UUID, Healthy: true}
		if n.kind == desk.Slots {
			dev.Slot = in.slot(d.UUID, n.id)
			if why := parting[dev.Slot]; why != "" && withdrawn == "" {
				withdrawn, leaving = why, why
			}
			if why := in.failing[d.UUID][dev.Slot]; why != "" && withdrawn == "" {
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
	for _, id := range cut.ids(d.UUID) {
		add(name{cut.Kind, id}, withdrawn, leaving)
	}
	const gone = "the node's partition does not have it any more"
	for _, p := range in.past[d.UUID] {
		for _, id := range p.cut.ids(d.UUID) {
			add(name{p.cut.Kind, id}, gone, gone)
		}
	}
	for _, n := range held {
		add(n, gone, gone)
	}
	return out
}

// slot is what a MIG device's ID stands for. Where the GPU's driver does not know
// it (any more) its size is not known.
func (in *viewInput) slot(u gpu.UUID, id string) mig.Slot {
	_, profile, start, ci, err := mig.ParseID(id)
	if err != nil {
		return mig.Slot{}
	}
	if card := in.cards[u]; card != nil {
		if s, ok := card.Slot(profile, start, ci); ok {
			return s
		}
	}
	return mig.Slot{Profile: profile, Start: start, CI: ci}
}

// describe is a GPU's name for people: "GPU 3 (GPU-…)".
func describe(d *gpu.Device) string { return fmt.Sprintf("GPU %d (%s)", d.Index, d.UUID) }
