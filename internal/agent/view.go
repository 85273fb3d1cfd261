// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"example.com/gpu-agent/internal/desk"
	"example.com/gpu-agent/pkg/gpu"
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
	drain  bool
	// closed is why nothing may be given out at present, empty where it may.
	closed string
}

// buildView says what the kubelet is told of. It is pure.
//
// In order of precedence, a device is: healthy, if a claim has it (leaving, where
// the GPU is to change); unhealthy, if it is withdrawn; else healthy. Faults of
// GPUs are the desk's to add.
func buildView(in viewInput) *desk.View {
	v := &desk.View{Rank: map[gpu.UUID]int{}}
	lists := map[desk.Kind][]desk.Device{}
	for i := range in.inv.GPUs {
		d := &in.inv.GPUs[i]
		v.Rank[d.UUID] = d.Index
		for kind, devs := range deviceLists(&in, d) {
			if lists[kind] == nil {
				lists[kind] = make([]desk.Device, 0, len(devs)*len(in.inv.GPUs))
			}
			lists[kind] = append(lists[kind], devs...)
		}
	}
	for _, kind := range []desk.Kind{desk.Whole, desk.Units, desk.Replicas} {
		if devs := lists[kind]; devs != nil {
			v.Resources = append(v.Resources, desk.Resource{Name: in.names.of(kind), Kind: kind, Devices: devs})
		}
	}
	v.Resources = append(v.Resources, formerly(&in)...)
	return v
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

// deviceLists lists what one GPU has, had, and has given away.
func deviceLists(in *viewInput, d *gpu.Device) map[desk.Kind][]desk.Device {
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
	switch {
	case mixed:
		// Two kinds of devices are two promises of the same memory.
		withdrawn = "the GPU is held as another resource"
		leaving = withdrawn
	case slices.Contains(in.recutting, d.UUID):
		withdrawn = "the GPU is being cut anew"
		leaving = withdrawn
	case in.changes.blocks(d.UUID) && in.drain:
		withdrawn = "the GPU's partition changes when its holders end"
		leaving = withdrawn
	}

	// Rounds are frequent and lists long: sizes are known, so nothing grows.
	listed := make(map[name]bool, cut.N+len(held))
	out := map[desk.Kind][]desk.Device{}
	if cut.Offers {
		out[cut.Kind] = make([]desk.Device, 0, cut.N)
	}
	add := func(n name, withdrawn, leaving string) {
		if listed[n] {
			return
		}
		listed[n] = true
		dev := desk.Device{ID: n.id, GPU: d.UUID, Healthy: true}
		switch {
		case isHeld[n]:
			dev.Leaving, dev.Reason = leaving != "", leaving
		case withdrawn != "":
			dev.Healthy, dev.Reason = false, withdrawn
		}
		out[n.kind] = append(out[n.kind], dev)
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

// describe is a GPU's name for people: "GPU 3 (GPU-…)".
func describe(d *gpu.Device) string { return fmt.Sprintf("GPU %d (%s)", d.Index, d.UUID) }
