// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"slices"
	"strings"

	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
)

// lists holds what the kubelet is told. The front-end's mutex guards it.
type lists struct {
	ledger *ledger.Ledger
	// base is the offer as it was published. offer is base after markHealth has added what is taken
	// and the faults.
	base, offer *Offer
	// faults are the unhealthy GPUs and placements, with the reasons.
	faults faults
	// moved are the GPUs on which allocations have taken or freed what the lists show since offer was made:
	// placements, and pieces that spot pods may have.
	moved []gpu.UUID
	// changed has a channel for each resource, which is closed when its list changes.
	changed map[string]chan struct{}
}

// publish puts an offer in force. It adds the resources of the last offer that the new one lacks,
// without devices.
func (l *lists) publish(o *Offer) {
	byName := func(a, b Resource) int { return strings.Compare(a.Name, b.Name) }
	slices.SortFunc(o.Resources, byName)
	var carried []Resource
	for _, old := range l.base.Resources {
		if o.resource(old.Name) == nil {
			carried = append(carried, Resource{Name: old.Name, Kind: old.Kind})
		}
	}
	o.Resources = append(o.Resources, carried...)
	slices.SortFunc(o.Resources, byName)
	for i := range o.Resources {
		r := &o.Resources[i]
		if old := l.base.resource(r.Name); old != nil && slices.EqualFunc(old.Devices, r.Devices, sameID) {
			r.index = old.index
			continue
		}
		r.index = make(map[string]int, len(r.Devices))
		for j := range r.Devices {
			r.index[r.Devices[j].ID] = j
		}
	}
	l.base = o
	l.ledger.SetMIG(o.MIG)
	l.show()
}

func sameID(a, b Device) bool { return a.ID == b.ID }

// faults are the reasons why GPUs are unhealthy, and why MIG placements on healthy GPUs are.
type faults struct {
	gpus       map[gpu.UUID]string
	placements map[mig.Place]string
}

// of reports whether a device is unhealthy, and why.
func (f *faults) of(dev *Device) (why string, bad bool) {
	if why, bad = f.gpus[dev.GPU]; !bad && len(f.placements) > 0 {
		why, bad = f.placements[mig.Place{GPU: dev.GPU, Placement: dev.Placement}]
	}
	return why, bad
}

// show makes the offer in force from the published one, what allocations have taken, and the
// faults. It wakes the streams of the resources whose list has changed for the kubelet. A list
// without any change stays the same slice.
func (l *lists) show() {
	o := l.base.copyAs(l.offer.Gen + 1)
	room := l.roomOf(o, o.placementGPUs())
	l.moved = l.moved[:0]
	for i := range o.Resources {
		r := &o.Resources[i]
		if r.changes() || len(l.faults.gpus) > 0 {
			r.Devices = markHealth(r.Devices, r, room(r), &l.faults)
		}
		switch old := l.offer.resource(r.Name); {
		case old != nil && slices.Equal(old.Devices, r.Devices):
			r.Devices = old.Devices
		case old == nil || !slices.EqualFunc(old.Devices, r.Devices, sameForKubelet):
			l.tell(r.Name)
		}
	}
	l.offer = o
}

// sameForKubelet reports whether the kubelet is told the same about two devices.
func sameForKubelet(a, b Device) bool {
	return a.ID == b.ID && a.Healthy == b.Healthy && a.NUMA == b.NUMA
}

// tell makes the stream of a resource send its list.
func (l *lists) tell(resource string) {
	if ch := l.changed[resource]; ch != nil {
		close(ch)
		delete(l.changed, resource)
	}
}

// noteMoved notes that an allocation was made or has ended.
func (l *lists) noteMoved(a *ledger.Allocation) {
	if a.Kind().InMIG() || slices.ContainsFunc(a.GPUs(), func(u gpu.UUID) bool { return l.offer.Spot[u].On }) {
		l.moved = append(l.moved, a.GPUs()...)
	}
}

// roomOf returns what says, for each resource of an offer, which of its devices have room on these GPUs.
func (l *lists) roomOf(o *Offer, gpus []gpu.UUID) func(*Resource) room {
	placements := map[ledger.Tier]map[gpu.UUID]*ledger.Room{}
	var held []ledger.Allocation
	return func(r *Resource) room {
		switch {
		case r.Kind.InMIG():
			if placements[r.Tier] == nil {
				placements[r.Tier] = l.ledger.Rooms(gpus, r.Tier)
			}
			return &placementRoom{resource: r.Name, rooms: placements[r.Tier]}
		case r.Tier == ledger.Spot:
			if held == nil {
				held = l.ledger.Allocations()
			}
			return newSpotRoom(o, r, held)
		}
		return nil
	}
}

// showMoved updates the offer on the GPUs where allocations have taken or freed what the lists show since its
// last call.
func (l *lists) showMoved() {
	if len(l.moved) == 0 {
		return
	}
	room := l.roomOf(l.offer, slices.Clone(l.moved))
	l.moved = l.moved[:0]
	var o *Offer
	for i := range l.offer.Resources {
		r := &l.offer.Resources[i]
		if !r.changes() || len(r.Devices) == 0 {
			continue
		}
		devices := markHealth(r.Devices, &l.base.Resources[i], room(r), &l.faults)
		if &devices[0] == &r.Devices[0] {
			continue
		}
		if o == nil {
			o = l.offer.copyAs(l.offer.Gen + 1)
		}
		o.Resources[i].Devices = devices
		if !slices.EqualFunc(r.Devices, devices, sameForKubelet) {
			l.tell(r.Name)
		}
	}
	if o != nil {
		l.offer = o
	}
}
