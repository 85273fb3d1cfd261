// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"maps"
	"reflect"
	"slices"
	"sync"

	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/plan"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/dra"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"

	resourcev1 "k8s.io/api/resource/v1"
)

// Offer is what the agent's loop offers of the node's GPUs.
type Offer struct {
	Inventory *gpu.Inventory
	Changes   *plan.Changes
	// Changing are the GPUs that are about to change.
	Changing []gpu.UUID
	Cards    map[gpu.UUID]*mig.Card
	// Failing are placements whose instances cannot be made, with the reason.
	Failing map[mig.Place]status.Cause
	// Refused are those of Failing that the GPU's driver has refused so often that their claims
	// should be made anew, to get another placement.
	Refused map[mig.Place]status.Cause
	// Fixed are the GPUs whose MIG instances stay as the partition lays them out, with any holder.
	Fixed map[gpu.UUID]bool
	// Drain is true if a GPU whose change waits for its holders takes no new ones meanwhile.
	Drain bool
	// Others names, for each GPU that another agent gives out too, that agent.
	Others map[gpu.UUID]string
	// Cordoned are the GPUs that an operator keeps new pods off.
	Cordoned map[gpu.UUID]bool
	// Kept, if set, reports whether the kubelet still has the device's resource from the device
	// plugin. While it has, pods that ask for that resource come here, and the kubelet refuses them
	// if there is no device.
	Kept func(Device) bool
	// Closed is why nothing may be given out at present; empty if it may.
	Closed string
	// Daemons maps the GPUs whose MPS daemons cannot be relied on now to the reason.
	Daemons map[gpu.UUID]status.Cause
	// Guarantee is how strong the cap on a share is: "driver", "api" or "watchdog".
	Guarantee string
}

// shelf has what the loop offers, and what the slices publish of it. Its lock is held while a claim
// is taken, and comes before the publisher's and the ledger's. Use newShelf.
type shelf struct {
	domain, driver, node string
	// fault is the effect of an unhealthy device's taint.
	fault     resourcev1.DeviceTaintEffect
	ledger    *ledger.Ledger
	publisher publisher
	// look wakes the sweeper: there is a first offer, or the server has a taint.
	look token

	// mu guards everything below.
	mu sync.Mutex
	// offer is the loop's last offer; nil before the first. devices are those in the slices. input
	// is what the slices are built from, and basis the part of it that can change. The slices are
	// built each time that they are needed: that is seldom, and they are large.
	offer   *Offer
	devices map[DeviceName]Device
	input   Input
	basis   basis
	// withdrew is the number of the last write that withdraws something from claims. withdraws is
	// true if the next write does.
	withdrew  uint64
	withdraws bool
	faults    faults
	// ending are the devices whose taint ends pods of refused claims.
	ending map[Device]status.Reason
	// listed is true once the claims have been listed. Nothing is published before, since a device
	// that one of them names must not be missing.
	listed bool
	// draining is true if the process is about to end: all devices are tainted.
	draining bool
	leaving  leaving
	// news is closed, and replaced, when the slices, listed or Offer.Refused change.
	news chan struct{}
}

// publisher is the part of a Publisher that the shelf needs.
type publisher interface {
	Set(func() []resourcev1.ResourceSlice) uint64
	state() (asked, wrote uint64, registered bool)
}

// faults has why GPUs are unhealthy, and why placements on healthy GPUs are.
type faults struct {
	gpus       map[gpu.UUID]string
	placements map[mig.Place]string
}

func (f *faults) of(d Device) string {
	if why := f.gpus[d.GPU]; why != "" || !d.Kind.InMIG() {
		return why
	}
	return f.placements[placeOf(d)]
}

func newShelf(o *Options, p publisher, look token) *shelf {
	return &shelf{domain: o.Domain, driver: o.Driver, node: o.Node, fault: o.Fault, ledger: o.Ledger,
		publisher: p, look: look, leaving: leaving{}, news: make(chan struct{})}
}

// now returns the present view.
func (s *shelf) now() view {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.viewLocked()
}

// while calls f with the present view, which stays the present one during the call.
func (s *shelf) while(f func(view)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f(s.viewLocked())
}

func (s *shelf) viewLocked() view {
	_, written, _ := s.publisher.state()
	return view{s.offer, s.devices, s.leaving, s.listed, s.withdrew, written, s.news}
}

func (s *shelf) Publish(o Offer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.offer == nil {
		s.look.poke() // the sweeper can list the claims now
	} else if !maps.Equal(s.offer.Refused, o.Refused) {
		s.tellLocked()
	}
	s.offer = &o
	s.showLocked()
}

// tellLocked wakes all who wait for news.
func (s *shelf) tellLocked() {
	close(s.news)
	s.news = make(chan struct{})
}

func (s *shelf) SetFaults(gpus map[gpu.UUID]string, placements map[mig.Place]string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.faults = faults{gpus, placements}
	if s.offer != nil {
		s.showLocked()
	}
}

// setEnding sets the devices whose taint ends pods of refused claims.
func (s *shelf) setEnding(ending map[Device]status.Reason) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ending = ending
	s.showLocked()
}

// drain taints all devices, since the process is about to end. It returns false if the scheduler
// sends no pods here.
func (s *shelf) drain() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, written, registered := s.publisher.state(); s.offer == nil || !registered || written == 0 {
		return false
	}
	s.draining = true
	s.showLocked()
	return true
}

// written is called when the server has new slices.
func (s *shelf) written() {
	if len(s.now().leaving) > 0 {
		s.look.poke() // a device may leave its slice now
	}
}

// begin starts to publish. named are the devices that claims name, which stay in their slices.
func (s *shelf) begin(named map[DeviceName]bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	every := everyDevice(s.node, s.offer.Inventory, s.offer.Cards)
	s.leaving = maps.Clone(s.leaving)
	for name := range named {
		if d, ok := every[name]; ok {
			s.leaving[d] = departure{} // setLeavingLocked removes it if a layout has it
		}
	}
	s.listed = true
	s.tellLocked()
	s.showLocked()
}

// forget removes devices from their slices, and returns how many. It removes a device if the write
// that tainted it is not after `written`, no claim names it, and no allocation of this front-end
// has it.
func (s *shelf) forget(named map[DeviceName]bool, written uint64) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	held := map[Device]bool{}
	for _, a := range s.ledger.Allocations() {
		for j := range a.Grants {
			d := deviceOf(&a.Grants[j])
			held[d] = held[d] || a.Owner == ledger.DRA
		}
	}
	goes := func(name DeviceName, d Device) bool {
		return s.leaving[d].tainted(written) && !named[name] && !held[d]
	}
	before, devices, stay := s.devices, map[DeviceName]Device{}, maps.Clone(s.leaving)
	for name, d := range before {
		if goes(name, d) {
			delete(stay, d)
		} else {
			devices[name] = d
		}
	}
	if len(devices) < len(before) {
		s.leaving, s.devices = stay, devices
		s.showLocked()
	}
	return len(before) - len(devices)
}

// showLocked publishes what follows from the offer, the faults and the ledger.
func (s *shelf) showLocked() {
	o, held := s.offer, s.ledger.Allocations()
	in := Input{Node: s.node, Driver: s.driver, Inventory: o.Inventory, Cards: o.Cards, Guarantee: o.Guarantee,
		Fixed: o.Fixed, Layouts: map[gpu.UUID]plan.Layout{}}
	for u, l := range o.Changes.Layouts {
		if l.Through(ledger.DRA) {
			in.Layouts[u] = l
		}
	}
	s.setLeavingLocked(held, in.has)
	in.Departing = slices.SortedFunc(maps.Keys(s.leaving), compareDevices)
	w := withdrawals{offer: o, domain: s.domain, faults: &s.faults, fault: s.fault, ending: s.ending,
		draining: s.draining, held: held, has: in.has}
	in.Taints = w.taints
	same := true
	if now := in.basis(); s.devices == nil || !reflect.DeepEqual(now, s.basis) {
		in.Taints = func(d Device) []resourcev1.DeviceTaint { return now.taints[d] }
		built := Build(in)
		same = s.devices != nil && reflect.DeepEqual(Build(s.input).Slices, built.Slices)
		s.withdraws = s.withdraws || s.devices == nil || s.basis.withdraws(&now)
		s.devices, s.input, s.basis = built.Devices, in, now
	}
	if !same {
		s.tellLocked()
	}
	if s.listed {
		s.setLocked(same)
	}
}

// setLeavingLocked sets which devices leave: those that are published or held, and in no layout.
func (s *shelf) setLeavingLocked(held []ledger.Allocation, has func(Device) bool) {
	out := leaving{}
	add := func(d Device) {
		if !has(d) {
			out[d] = s.leaving[d]
		}
	}
	for d := range s.leaving {
		add(d)
	}
	for _, d := range s.devices {
		add(d)
	}
	for i := range held {
		for j := range held[i].Grants {
			if g := &held[i].Grants[j]; held[i].Owner == ledger.DRA && !g.NoRoom {
				add(deviceOf(g))
			}
		}
	}
	s.leaving = out
}

// setLocked has the slices written, unless they are the same as before. It notes the number of the
// write that withdraws something.
func (s *shelf) setLocked(same bool) {
	n, _, _ := s.publisher.state()
	if !same || n == 0 {
		in := s.input
		n = s.publisher.Set(func() []resourcev1.ResourceSlice { return Build(in).Slices })
	}
	if s.withdraws {
		s.withdraws, s.withdrew = false, n
	}
	for d, at := range s.leaving { // setLeavingLocked has made this map anew, so no view has it yet
		if !at.set {
			s.leaving[d] = departure{true, n}
		}
	}
}

func (s *shelf) Offers(u gpu.UUID) bool {
	v := s.now()
	for _, d := range v.devices {
		if d.GPU == u {
			return true
		}
	}
	return v.devices == nil
}

func (s *shelf) Health() ([]dra.Health, <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []dra.Health
	for name, d := range s.viewLocked().devices {
		why := s.faults.of(d)
		out = append(out, dra.Health{Pool: name.Pool, Name: name.Name, Healthy: why == "", Message: why})
	}
	slices.SortFunc(out, func(a, b dra.Health) int {
		return compareNames(DeviceName{a.Pool, a.Name}, DeviceName{b.Pool, b.Name})
	})
	return out, s.news
}
