// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"maps"
	"slices"
	"strings"

	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
	"example.com/gpu-agent/pkg/topology"
)

// Offer is what is on offer at one moment. It is immutable once published.
type Offer struct {
	// Gen grows by one with every published offer.
	Gen uint64
	// Resources is sorted by name. A resource that was ever published stays in
	// every later offer of the process, with no devices if need be, because
	// pods that held its devices can only restart while its socket is served.
	Resources []Resource
	// Rank orders GPUs where nothing better decides (their index).
	Rank map[gpu.UUID]int
	// Topology is how the GPUs are joined: which of them go together, and which
	// are best broken up. Nil joins none.
	Topology *topology.Graph
	// Shares is how GPUs are divided that several containers have at once.
	Shares map[gpu.UUID]Share
	// MIG has every GPU that Resources have slots of. A slot is listed Healthy
	// where it would be if its GPU were empty: what has no room beside the
	// allocations and what else may not go is the front-end's to find out.
	MIG map[gpu.UUID]ledger.MIG
}

// Share is how a GPU is divided that several containers have at once.
type Share struct {
	// Unit is the size of a memory unit; 0 where the GPU has none, or that is not known.
	Unit gpu.MiB
	// Replicas is how many there are, and Replica what one may have, in bytes.
	Replicas int
	Replica  uint64
}

// Resource is one extended resource and its devices.
type Resource struct {
	// Name is the full resource name, for example "example.com/gpu-mem".
	Name string
	// Kind is what one device stands for, and so which sets of them make sense
	// together: units lie on one GPU, replicas on different ones, and placements can
	// stand beside each other, on one GPU or several.
	Kind ledger.Kind
	// Devices is in the order in which the kubelet is told of them.
	Devices []Device

	index map[string]int
}

// Device is one entry of a resource's list.
type Device struct {
	ID  string
	GPU gpu.UUID
	// Slot is what a device of kind Placement stands for.
	Slot mig.Slot
	// NUMA is what the kubelet's topology manager is told of the device.
	NUMA NUMA
	// Healthy is what the kubelet is told.
	Healthy bool
	// Leaving marks a held device that the wanted partition does not keep: it
	// is listed healthy for its holder's sake and refused to anyone new.
	Leaving bool
	// Reason is why the device is unhealthy or leaving, for people.
	Reason string
}

// NUMA is the NUMA node that a device is aligned to; the zero NUMA is none.
type NUMA struct {
	Node  int
	Known bool
}

// Publish makes an offer the one in force and tells the streams of those resources
// of which the kubelet hears anything else. The offer must not be changed afterwards.
// Resources of the offer before that it does not have are carried over without devices.
//
// build makes the offer from the allocations. It runs without the mutex, since it may
// take a millisecond, and again if the allocations have changed meanwhile: a device
// that has just been given away must not be published as if nobody had it. While
// allocations come faster than offers can be built, the last build stands; what it
// missed is in the next one.
func (f *FrontEnd) Publish(build func([]ledger.Allocation) *Offer) *Offer {
	for range publishTries {
		held, version := f.ledger.Look()
		if f.publish(build(held), version) {
			return f.Offer()
		}
	}
	held := f.ledger.Allocations()
	f.publish(build(held), anyVersion)
	return f.Offer()
}

const (
	publishTries = 3
	anyVersion   = ^uint64(0)
)

// publish does so unless the allocations have changed since a version of them.
func (f *FrontEnd) publish(o *Offer, version uint64) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if now, _ := f.ledger.State(); version != anyVersion && version != now {
		return false
	}
	byName := func(a, b Resource) int { return strings.Compare(a.Name, b.Name) }
	slices.SortFunc(o.Resources, byName)
	var carried []Resource
	for _, old := range f.base.Resources {
		if o.resource(old.Name) == nil {
			carried = append(carried, Resource{Name: old.Name, Kind: old.Kind})
		}
	}
	o.Resources = append(o.Resources, carried...)
	slices.SortFunc(o.Resources, byName)
	for i := range o.Resources {
		r := &o.Resources[i]
		if old := f.base.resource(r.Name); old != nil && slices.EqualFunc(old.Devices, r.Devices, sameID) {
			r.index = old.index
			continue
		}
		r.index = make(map[string]int, len(r.Devices))
		for j := range r.Devices {
			r.index[r.Devices[j].ID] = j
		}
	}
	f.base = o
	f.ledger.SetMIG(o.MIG)
	f.showLocked()
	return true
}

func sameID(a, b Device) bool { return a.ID == b.ID }

// SetFaults says which GPUs are not fit for work, and why, and which MIG slots on
// the others: from now on all devices of those GPUs and those of the slots are
// Unhealthy in every offer, and no others for this reason. It does not wait for the
// loop, so that a fault reaches the kubelet while a round is under way.
func (f *FrontEnd) SetFaults(gpus map[gpu.UUID]string, slots map[mig.Place]string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if maps.Equal(f.faults.gpus, gpus) && maps.Equal(f.faults.slots, slots) {
		return
	}
	f.faults = faults{maps.Clone(gpus), maps.Clone(slots)}
	f.showLocked()
}

// faults is why GPUs are not fit for work, and why MIG slots are not whose GPUs are.
type faults struct {
	gpus  map[gpu.UUID]string
	slots map[mig.Place]string
}

// of is why a device is not fit for work.
func (f *faults) of(dev *Device) (why string, bad bool) {
	if why, bad = f.gpus[dev.GPU]; !bad && len(f.slots) > 0 {
		why, bad = f.slots[mig.Place{GPU: dev.GPU, Slot: dev.Slot}]
	}
	return why, bad
}

// showLocked makes the offer in force from the published one, what allocations have
// taken and the faults, and tells the streams of those resources of which the
// kubelet hears anything else. A list that is as it was stays the same slice.
func (f *FrontEnd) showLocked() {
	o := f.base.copyAs(f.offer.Gen + 1)
	rooms := f.ledger.Rooms(o.slotGPUs())
	f.moved = f.moved[:0]
	for i := range o.Resources {
		r := &o.Resources[i]
		if r.Kind == ledger.Placement {
			r.Devices = lay(r.Devices, r.Devices, r.Name, rooms, &f.faults)
		} else {
			r.Devices = faulted(r.Devices, f.faults.gpus)
		}
		switch old := f.offer.resource(r.Name); {
		case old != nil && slices.Equal(old.Devices, r.Devices):
			r.Devices = old.Devices
		case old == nil || !slices.EqualFunc(old.Devices, r.Devices, sameWord):
			f.tellLocked(r.Name)
		}
	}
	f.offer = o
}

// sameWord reports whether the kubelet hears the same of two devices.
func sameWord(a, b Device) bool {
	return a.ID == b.ID && a.Healthy == b.Healthy && a.NUMA == b.NUMA
}

// faulted returns the devices with those of faulty GPUs unhealthy; the slice
// itself where there is none.
func faulted(devices []Device, faults map[gpu.UUID]string) []Device {
	if len(faults) == 0 {
		return devices
	}
	out, copied := devices, false
	for i := range devices {
		why, bad := faults[devices[i].GPU]
		if !bad {
			continue
		}
		if !copied {
			out, copied = slices.Clone(devices), true
		}
		out[i].Healthy, out[i].Leaving, out[i].Reason = false, false, why
	}
	return out
}

// Resend sends a resource's list to the kubelet again although nothing in it has
// changed: that makes the kubelet write its checkpoint anew.
func (f *FrontEnd) Resend(resource string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.tellLocked(resource)
}

func (f *FrontEnd) tellLocked(resource string) {
	if ch := f.changed[resource]; ch != nil {
		close(ch)
		delete(f.changed, resource)
	}
}

// Offer returns the offer in force.
func (f *FrontEnd) Offer() *Offer {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.offer
}

// List returns the devices of a resource in the offer in force, and a channel
// that is closed when the kubelet is to be told anew: other devices are listed, one
// has turned Healthy or Unhealthy, or Resend was called. An unchanged list is the same slice.
func (f *FrontEnd) List(resource string) ([]Device, <-chan struct{}) {
	f.mu.Lock()
	defer f.mu.Unlock()
	ch := f.changed[resource]
	if ch == nil {
		ch = make(chan struct{})
		f.changed[resource] = ch
	}
	if r := f.offer.resource(resource); r != nil {
		return r.Devices, ch
	}
	return nil, ch
}

// copyAs returns a copy of everything in an offer, of another generation, whose list
// of resources may be changed.
func (o *Offer) copyAs(gen uint64) *Offer {
	out := *o
	out.Gen, out.Resources = gen, slices.Clone(o.Resources)
	return &out
}

func (o *Offer) resource(name string) *Resource {
	i, ok := slices.BinarySearchFunc(o.Resources, name, func(r Resource, n string) int { return strings.Compare(r.Name, n) })
	if !ok {
		return nil
	}
	return &o.Resources[i]
}
