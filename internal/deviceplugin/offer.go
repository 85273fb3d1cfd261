// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"maps"
	"slices"
	"strings"

	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/piece"
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
	Shares map[gpu.UUID]piece.Share
	// MIG has every GPU that Resources have placements of. A placement is listed Healthy
	// where it would be if its GPU were empty: what has no room beside the
	// allocations and what else may not go is the front-end's to find out.
	MIG map[gpu.UUID]ledger.MIG
}

// Resource is one extended resource and its devices.
type Resource struct {
	// Name is the full resource name, for example "example.com/gpu-mem".
	Name string
	// Kind is what one device stands for, and so which sets of them make sense
	// together: units lie on one GPU, replicas on different ones, and placements can
	// stand beside each other, on one GPU or several.
	Kind piece.Kind
	// Devices is in the order in which the kubelet is told of them.
	Devices []Device

	index map[string]int
}

// Device is one entry of a resource's list.
type Device struct {
	ID  string
	GPU gpu.UUID
	// Placement is what a device of kind Placement stands for.
	Placement mig.Placement
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
	for tries := 1; ; tries++ {
		held, version := f.ledger.Look()
		o := build(held)
		f.mu.Lock()
		if now, _, _ := f.ledger.State(); version == now || tries > publishTries {
			defer f.mu.Unlock()
			f.lists.publish(o)
			return f.lists.offer
		}
		f.mu.Unlock()
	}
}

// publishTries is how often an offer is built anew because allocations have changed.
const publishTries = 3

// SetFaults says which GPUs are unhealthy, and which MIG placements on the others, each
// with the reason. From now on their devices are Unhealthy in every offer. It does not
// wait for the loop, so that a fault reaches the kubelet while a round is under way.
func (f *FrontEnd) SetFaults(gpus map[gpu.UUID]string, placements map[mig.Place]string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if maps.Equal(f.lists.faults.gpus, gpus) && maps.Equal(f.lists.faults.placements, placements) {
		return
	}
	f.lists.faults = faults{maps.Clone(gpus), maps.Clone(placements)}
	f.lists.show()
}

// Resend sends a resource's list to the kubelet again although nothing in it has
// changed: that makes the kubelet write its checkpoint anew.
func (f *FrontEnd) Resend(resource string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.lists.tell(resource)
}

// Offer returns the offer in force.
func (f *FrontEnd) Offer() *Offer {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.lists.offer
}

// List returns the devices of a resource in the offer in force, and a channel
// that is closed when the kubelet is to be told anew: other devices are listed, one
// has turned Healthy or Unhealthy, or Resend was called. An unchanged list is the same slice.
func (f *FrontEnd) List(resource string) ([]Device, <-chan struct{}) {
	f.mu.Lock()
	defer f.mu.Unlock()
	ch := f.lists.changed[resource]
	if ch == nil {
		ch = make(chan struct{})
		f.lists.changed[resource] = ch
	}
	if r := f.lists.offer.resource(resource); r != nil {
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
	i, ok := slices.BinarySearchFunc(o.Resources, name, func(r Resource, n string) int {
		return strings.Compare(r.Name, n)
	})
	if !ok {
		return nil
	}
	return &o.Resources[i]
}
