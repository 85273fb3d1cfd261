// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"maps"
	"slices"
	"strings"

	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/pkg/compute"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
	"example.com/gpu-agent/pkg/topology"
)

// Offer is the list of devices on offer at one moment. It is immutable once published.
type Offer struct {
	// Gen is the generation, which grows by one with each change of the offer in force.
	Gen uint64
	// Resources is sorted by name. A published resource stays in every later offer of the process,
	// without devices if need be: pods that held its devices can restart only while its socket is
	// served.
	Resources []Resource
	// Rank orders the GPUs if nothing better decides. It is their index.
	Rank map[gpu.UUID]int
	// Topology is how the GPUs are connected. It decides which GPUs go together, and which are
	// divided first. Nil connects none.
	Topology *topology.Graph
	// Shares is how the shared GPUs are divided.
	Shares map[gpu.UUID]piece.Share
	// Compute is how the containers of GPUs share the SMs. GPUs whose containers take turns are missing.
	Compute map[gpu.UUID]compute.Sharing
	// MIG has every GPU with placements in Resources. There, a placement is listed Healthy as if
	// its GPU were empty. The front-end finds out which of them have no room beside the taken ones.
	MIG map[gpu.UUID]ledger.MIG
	// Spot is how the room of GPUs is offered to spot pods. GPUs whose room is not are missing.
	Spot map[gpu.UUID]ledger.Offering
}

// Resource is one extended resource and its devices.
type Resource struct {
	// Name is the full resource name, for example "example.com/gpu-mem".
	Name string
	// Kind is what a device is, and so which devices may be given out together: units of one GPU,
	// replicas of different GPUs, and placements that fit beside each other, on one GPU or several.
	Kind piece.Kind
	// Tier is that of the allocations that are made of its devices. A device has the same ID in both tiers,
	// and is one device. In the spot tier it is listed Healthy as if its GPU were empty; the front-end finds
	// out which guaranteed allocations have it.
	Tier ledger.Tier
	// Devices has the order that the kubelet is told.
	Devices []Device

	index map[string]int
}

// Device is one entry of a resource's list.
type Device struct {
	ID  string
	GPU gpu.UUID
	// Placement is the placement of a MIG device; zero for other devices.
	Placement mig.Placement
	// NUMA is the NUMA node for the kubelet's topology manager.
	NUMA NUMA
	// Healthy is the health that the kubelet is told.
	Healthy bool
	// Leaving is true for a held device that the wanted partition does not keep. It is listed
	// healthy for its holder, and refused to new pods.
	Leaving bool
	// Reason is why the device is unhealthy or leaving, for people. Empty if it is neither.
	Reason string
}

// NUMA is the NUMA node of a device. The zero NUMA is none.
type NUMA struct {
	Node  int
	Known bool
}

// Publish puts an offer in force and wakes the streams of the resources whose list has changed for
// the kubelet. It adds the resources of the last offer that the new one lacks, without devices. It
// returns the offer in force, which callers must not change.
//
// build makes the offer from the allocations. It runs without the mutex, since it may take a
// millisecond. If the allocations change meanwhile, it runs again, so that a device that was just
// given out is not published as free. If they change on each of publishTries tries, the last
// result counts, and the next offer has what it missed.
func (f *FrontEnd) Publish(build func([]ledger.Allocation) *Offer) *Offer {
	for tries := 1; ; tries++ {
		held, version := f.ledger.Look()
		o := build(held)
		f.mu.Lock()
		if now, _, _ := f.ledger.State(); version == now || tries == publishTries {
			defer f.mu.Unlock()
			f.lists.publish(o)
			return f.lists.offer
		}
		f.mu.Unlock()
	}
}

// publishTries is how often Publish builds an offer at most.
const publishTries = 4

// SetFaults sets the unhealthy GPUs, and the unhealthy MIG placements on other GPUs, each with the
// reason. From now on their devices are Unhealthy in every offer. SetFaults does not wait for the
// loop, so a fault reaches the kubelet in the middle of a round.
func (f *FrontEnd) SetFaults(gpus map[gpu.UUID]string, placements map[mig.Place]string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if maps.Equal(f.lists.faults.gpus, gpus) && maps.Equal(f.lists.faults.placements, placements) {
		return
	}
	f.lists.faults = faults{maps.Clone(gpus), maps.Clone(placements)}
	f.lists.show()
}

// Resend sends a resource's list to the kubelet again, even unchanged. The kubelet then writes its
// checkpoint anew.
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

// List returns the devices of a resource in the offer in force, and a channel. The channel is
// closed when the kubelet needs the list again: a device was added, removed or moved to another
// NUMA node, its health has changed, or Resend was called. An unchanged list is the same slice.
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

// copyAs returns a copy of an offer with another generation. Its list of resources may be changed.
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
