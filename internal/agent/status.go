// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"example.com/gpu-agent/internal/config"
	"example.com/gpu-agent/internal/deviceplugin"
	"example.com/gpu-agent/internal/found"
	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/internal/guard"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/internal/plan"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/compute"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/memcap"
	"example.com/gpu-agent/pkg/mig"
	"example.com/gpu-agent/pkg/timeslice"
)

// scene has all that a Status is made from.
type scene struct {
	snap        *Snapshot
	names       *deviceplugin.Names
	domain      string
	unit        gpu.MiB // the size of a memory unit in new layouts
	offer       *deviceplugin.Offer
	allocations []ledger.Allocation
	// held has the device IDs of allocations, by resource. holders has the allocations, by device
	// ID: the guaranteed one, if a spot one has the device, too.
	held    map[string]map[string]bool
	holders map[string]*ledger.Allocation
	// over reports whether an allocation's init container has ended.
	over func(id string) bool
	// computed returns how strongly the share of the SMs that an allocation has on a GPU is held.
	computed func(id string, u gpu.UUID) compute.Held
	// grace is Options.YieldGrace.
	grace time.Duration
	// lends returns what people are told of the lending of an allocation's room; empty if there is nothing.
	lends func(id string) string
}

// display shows the results of rounds: as the status, as the GPUNode, and as the answers of
// Foresee. Any goroutine may use it.
type display struct {
	names  *deviceplugin.Names
	domain string
	// unit is Options.MemoryUnit, drain the opposite of Options.KeepOffering, and caps how memory
	// caps are guaranteed.
	unit    gpu.MiB
	drain   bool
	grace   time.Duration // Options.YieldGrace
	caps    memcap.Level
	front   *deviceplugin.FrontEnd
	ledger  *ledger.Ledger
	plugins Plugins
	// latest returns the last round's result.
	latest func() *Snapshot
	// choice returns the partition of a file that the node follows, or why there is none.
	choice func(*config.File) (name string, unset status.Cause)
	// containers returns what the watchdog last saw of containers.
	containers func() []status.Container
	// claimed reports whether the agent offers GPUs through DRA, or has done so.
	claimed func() bool
	// daemons returns the MPS daemons of the GPUs that are laid out for it, as they are now.
	daemons func() map[gpu.UUID]guard.Daemon
	// lends is as in scene.
	lends func(id string) string
}

// scene returns the last round's inventory and outcome, with the present offer and allocations.
func (y *display) scene() *scene {
	at := newScene(y.latest(), y.names, y.domain, y.unit, y.front.Offer(), y.ledger.Allocations())
	at.over, at.grace, at.lends = y.front.Over, y.grace, y.lends
	seen := y.containers()
	at.computed = func(id string, u gpu.UUID) compute.Held { return heldIn(seen, id, u) }
	return at
}

// heldIn returns how strongly the share of the SMs that an allocation has on a GPU is held, by what was seen of
// containers.
func heldIn(seen []status.Container, id string, u gpu.UUID) compute.Held {
	for i := range seen {
		if c := &seen[i]; c.Allocation == id && c.GPU == string(u) && c.Compute != nil {
			return *c.Compute
		}
	}
	return unseen
}

// unseen is how strongly a share is held that the watchdog has not seen.
var unseen = compute.NoneFor("the watchdog has not seen it")

func newScene(s *Snapshot, names *deviceplugin.Names, domain string, unit gpu.MiB, offer *deviceplugin.Offer,
	allocations []ledger.Allocation) *scene {
	at := &scene{s, names, domain, unit, offer, allocations, map[string]map[string]bool{},
		map[string]*ledger.Allocation{}, func(string) bool { return false },
		func(string, gpu.UUID) compute.Held { return unseen }, 0, func(string) string { return "" }}
	for i := range at.allocations {
		c := &at.allocations[i]
		if at.held[c.Resource] == nil {
			at.held[c.Resource] = map[string]bool{}
		}
		for _, id := range deviceplugin.IDs(c.Grants) {
			at.held[c.Resource][id] = true
			if at.holders[id] == nil || c.Tier == ledger.Guaranteed {
				at.holders[id] = c
			}
		}
	}
	return at
}

// status is Agent.Status.
func (y *display) status() status.Status {
	at := y.scene()
	s := y.show(at)
	n := at.gpuNode(gpunode.InPods, y.caps)
	s.SaturationPercent = &n.Summary.SaturationPercent
	for i := range s.Resources {
		r := &s.Resources[i]
		if j := slices.IndexFunc(n.Resources, func(o gpunode.Resource) bool { return o.Name == r.Name }); j >= 0 {
			r.Free, r.Largest = n.Resources[j].Free, n.Resources[j].Largest
		}
	}
	return s
}

// show returns the status of a scene, without what is free of each resource.
func (y *display) show(at *scene) status.Status {
	s := status.Status{
		Driver:  at.snap.hardware.Inventory.Driver,
		CUDA:    at.snap.hardware.Inventory.CUDA,
		Machine: at.snap.hardware.Inventory.Machine,
		Partition: status.Partition{
			Name: at.snap.Outcome.Partition, State: string(at.snap.Outcome.State),
			Reason: at.snap.Outcome.Reason, Message: at.snap.Outcome.Message,
			Source: at.snap.asked.Source, Generation: at.snap.asked.Generation,
		},
		Allocations: len(at.allocations),
		Hardware:    at.snap.hardware.Hangs,
		Conditions:  at.snap.Conditions,
		Found:       foundIn(at.snap.found),
		Topology:    at.snap.hardware.Matrix,
		Resources:   resourcesOf(y.plugins, at.snap.Unknown),
		GPUs:        at.gpus(),
	}
	daemons := y.daemons()
	for i := range s.GPUs {
		if d, is := daemons[gpu.UUID(s.GPUs[i].UUID)]; is {
			s.GPUs[i].MPS = &status.MPS{Percent: d.Percent, Clients: len(d.Clients),
				Namespaces: at.namespaces(gpu.UUID(s.GPUs[i].UUID)), Trouble: d.Trouble}
		}
	}
	return s
}

// foundIn shows findings.
func foundIn(findings []found.Finding) (out []status.Condition) {
	for _, f := range findings {
		out = append(out, f.Condition)
	}
	return out
}

// gpus shows the GPUs.
func (at *scene) gpus() (out []status.GPU) {
	for i := range at.snap.hardware.Inventory.GPUs {
		out = append(out, at.gpu(&at.snap.hardware.Inventory.GPUs[i]))
	}
	at.count(out)
	return out
}

// gpu shows a GPU.
func (at *scene) gpu(d *gpu.Device) status.GPU {
	g := status.GPU{
		Index: d.Index, UUID: string(d.UUID), Model: d.Model, MemoryMiB: uint64(d.Memory),
		PCI: d.PCI, NUMA: d.NUMA, Health: status.Healthy,
	}
	layout := at.snap.shape.Layouts[d.UUID]
	if layout.Known {
		g.Mode = status.Mode(layout.Mode())
	}
	if layout.Compute.MPS {
		g.Compute = layout.Compute.String()
	}
	if counted := layout.Kind.Counted(); counted.Together() && layout.Has(counted) {
		g.UnitMiB = uint64(cmp.Or(layout.Unit, at.unit)) // a GPU in use keeps its unit
	}
	switch {
	case layout.Through(ledger.DRA):
		g.API = string(ledger.DRA)
		if counted := layout.Kind.Counted(); layout.Counts() {
			g.DeviceClass = counted.Class() + "." + at.domain
		}
	case layout.Offers && !layout.Kind.InMIG():
		g.Resource = at.names.Of(layout.Kind, mig.Name{})
	}
	var reasons []string
	for _, v := range at.snap.hardware.Verdicts { // the worst first
		if v.GPU != d.UUID {
			continue
		}
		if reasons = append(reasons, v.Reason); len(reasons) == 1 {
			g.Health, g.Class, g.Since, g.Needs = "unhealthy", string(v.Class), &v.Since, v.Needs
		}
	}
	g.Reason = strings.Join(reasons, "; ")
	blocked := func(c status.Condition) bool { return c.Type == status.Blocked && c.Subject == g.UUID }
	if i := slices.IndexFunc(at.snap.Conditions, blocked); i >= 0 {
		g.Blocked = at.snap.Conditions[i].Message
	}
	g.MIG, g.Holders = at.mig(d), at.holdersOf(d.UUID)
	return g
}

// holdersOf shows the allocations on a GPU.
func (at *scene) holdersOf(u gpu.UUID) (out []status.Holder) {
	for i := range at.allocations {
		c := &at.allocations[i]
		n := 0
		for j := range c.Grants {
			if g := &c.Grants[j]; g.GPU == u {
				n += piece.Count(g.Piece)
			}
		}
		if n > 0 {
			h := status.Holder{
				Namespace: c.Holder.Namespace, Pod: c.Holder.Name, Container: c.Holder.Container,
				Resource: c.Resource, Instances: c.Kind().InMIG(), Units: n, Since: &c.Given,
				Waits: c.After, Over: at.over(c.ID), Lending: at.lends(c.ID),
			}
			if c.Owner == ledger.DRA {
				h.Kind = string(c.Kind())
			}
			if c.Tier != ledger.Guaranteed {
				h.Tier = c.Tier.Word()
			}
			if y := c.Yield; y.Asked() {
				h.Waits, h.Yield = "", &status.Yield{Since: y.Since, By: y.Since.Add(at.grace), Out: c.Out()}
				if len(y.To) > 0 {
					h.Yield.To = c.After
				}
			}
			if p := c.Parks; p.Times > 0 {
				h.Parks = &status.Parks{Times: p.Times, MiB: p.Bytes >> 20, Seconds: p.Total(time.Now()).Seconds()}
				if c.Phase == ledger.Parked {
					h.Parks.Since = &p.Since
				}
			}
			for _, p := range c.Beside {
				h.Beside = append(h.Beside, p.String())
			}
			if c.Adopted {
				if h.Since = &c.Holder.Since; h.Since.IsZero() {
					h.Since = nil
				}
			}
			out = append(out, h)
		}
	}
	slices.SortStableFunc(out, func(a, b status.Holder) int { // otherwise by ID
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Pod, b.Pod),
			cmp.Compare(a.Container, b.Container), cmp.Compare(a.Resource, b.Resource))
	})
	return out
}

// count fills in the number of devices that each GPU has on offer, of its resource and of MIG.
func (at *scene) count(gpus []status.GPU) {
	index := map[gpu.UUID]*status.GPU{}
	for i := range gpus {
		g := &gpus[i]
		index[gpu.UUID(g.UUID)] = g
		if layout := at.snap.shape.Layouts[gpu.UUID(g.UUID)]; layout.Through(ledger.DRA) {
			at.countClaims(g, layout)
		}
	}
	for _, r := range at.offer.Resources {
		for j := range r.Devices {
			dev := &r.Devices[j]
			g := index[dev.GPU]
			if g == nil || g.Resource != r.Name && !r.Kind.InMIG() {
				continue
			}
			held := at.held[r.Name][dev.ID]
			if !held && lingers(dev.ID, at.snap.shape.Layouts[dev.GPU]) {
				continue
			}
			g.Total++
			switch {
			case held:
				g.Used++
			case dev.Healthy:
				g.Free++
			default:
				g.Unhealthy++
			}
		}
	}
}

// lingers reports whether a device belongs to an earlier layout of its GPU and is only still
// listed.
func lingers(id string, layout plan.Layout) bool {
	_, n, err := timeslice.ParseID(id)
	return err == nil && n >= layout.N && layout.Kind.Shared()
}

// countClaims fills in what a GPU has for DRA claims, in the units of its layout. Those of a
// dynamic GPU are its memory units.
func (at *scene) countClaims(g *status.GPU, layout plan.Layout) {
	if !layout.Counts() {
		for _, dev := range at.forClaims(gpu.UUID(g.UUID)) {
			g.Total++
			switch {
			case at.holders[dev.ID] != nil:
				g.Used++
			case dev.Healthy && g.Health == status.Healthy:
				g.Free++
			default:
				g.Unhealthy++
			}
		}
		return
	}
	g.Total = layout.N
	for i := range at.allocations {
		for j := range at.allocations[i].Grants {
			switch of := &at.allocations[i].Grants[j]; {
			case string(of.GPU) != g.UUID || !layout.Has(of.Kind()) || of.NoRoom:
			case layout.Dynamic && of.Kind().InMIG(): // the instance's part of the memory slices
				width := at.snap.hardware.Inventory.ByUUID(of.GPU).MIG.MemorySlices()
				g.Used += (piece.At(of.Piece).Size*layout.N + width - 1) / max(width, 1)
			case layout.Dynamic && of.Kind().Alone():
				g.Used = layout.N
			default:
				g.Used += piece.Count(of.Piece)
			}
		}
	}
	g.Used = min(g.Used, g.Total)
	if g.Free = g.Total - g.Used; g.Health != status.Healthy || at.snap.cordoned(gpu.UUID(g.UUID)) {
		g.Unhealthy, g.Free = g.Free, 0
	}
}

// forClaims returns the MIG devices that a GPU offers through DRA, in the form of the device
// plugin's list. A device is healthy if no claim has any of its memory slices and the GPU is not
// cordoned.
func (at *scene) forClaims(u gpu.UUID) (out []deviceplugin.Device) {
	layout := at.snap.shape.Layouts[u]
	if !layout.Through(ledger.DRA) || !layout.InMIG() {
		return nil
	}
	for _, p := range layout.Placements {
		dev := deviceplugin.Device{ID: mig.ID(u, p), GPU: u, Placement: p, Healthy: !at.snap.cordoned(u)}
		for i := range at.allocations {
			for _, g := range at.allocations[i].Grants {
				on := piece.At(g.Piece)
				apart := g.Kind().InMIG() && (on.Start >= p.Start+p.Size || p.Start >= on.Start+on.Size)
				dev.Healthy = dev.Healthy && (g.GPU != u || g.NoRoom || apart)
			}
		}
		out = append(out, dev)
	}
	return out
}

// mig shows a GPU's MIG devices: those that exist and those on offer. It is nil if there are none.
func (at *scene) mig(d *gpu.Device) *status.MIG {
	layout := at.snap.shape.Layouts[d.UUID]
	offers := layout.InMIG()
	if !d.MIG.Enabled && d.MIG.Pending == nil && !offers && at.snap.shape.Work[d.UUID] == "" {
		return nil
	}
	out := &status.MIG{Enabled: d.MIG.Enabled, Pending: d.MIG.Pending, Work: at.snap.shape.Work[d.UUID]}
	for _, w := range at.snap.asked.Wanted {
		if w.GPU == d.UUID {
			out.OnDemand = w.OnDemand
		}
	}
	out.Size = d.MIG.MemorySlices()
	placements := at.standing(d)
	list := func(resource string, devices []deviceplugin.Device) {
		for j := range devices {
			dev := &devices[j]
			if dev.GPU != d.UUID || dev.Placement.Size == 0 {
				continue
			}
			s := placements[dev.ID]
			if s == nil {
				s = newPlacement(dev.ID, dev.Placement)
			}
			if s.State = at.placementState(dev, s); s.State == "" {
				continue // only still listed
			}
			placements[dev.ID] = s
			if s.Resource, s.Reason = resource, dev.Reason; resource == "" {
				s.DeviceClass = dev.Placement.Profile.Resource() + "." + at.domain
			}
			if c := at.holders[dev.ID]; c != nil {
				s.Namespace, s.Pod, s.Container = c.Holder.Namespace, c.Holder.Name, c.Holder.Container
				s.Reason = cmp.Or(s.Reason, c.Cause.Message)
			}
		}
	}
	for i := range at.offer.Resources {
		if r := &at.offer.Resources[i]; r.Kind.InMIG() && r.Tier == ledger.Guaranteed {
			list(r.Name, r.Devices)
		}
	}
	list("", at.forClaims(d.UUID))
	for _, s := range placements {
		out.Placements = append(out.Placements, *s)
	}
	slices.SortFunc(out.Placements, func(a, b status.Placement) int {
		return cmp.Or(cmp.Compare(a.Start, b.Start), cmp.Compare(a.Size, b.Size),
			cmp.Compare(a.Profile, b.Profile), cmp.Compare(a.CI, b.CI))
	})
	return out
}

func newPlacement(id string, s mig.Placement) *status.Placement {
	return &status.Placement{Device: id, Profile: s.Profile.String(), Start: s.Start, Size: s.Size, CI: s.CI}
}

// standing shows a GPU's MIG instances, by device ID.
func (at *scene) standing(d *gpu.Device) map[string]*status.Placement {
	out := map[string]*status.Placement{}
	for i := range d.MIG.Instances {
		in := &d.MIG.Instances[i]
		placement, err := mig.PlacementOf(in)
		if err != nil {
			continue
		}
		id := mig.ID(d.UUID, placement)
		s := newPlacement(id, placement)
		s.UUID, s.GI, s.CIID, s.State = string(in.UUID), in.GI, in.CI, status.PlacementWarm
		if !at.snap.shape.Made[d.UUID][placement] {
			s.State = status.PlacementForeign
		}
		out[id] = s
	}
	return out
}

// placementState returns the state of a listed MIG device. s shows its instance, if there is one.
// The state is empty if the device is only still listed.
func (at *scene) placementState(dev *deviceplugin.Device, s *status.Placement) string {
	layout, stands := at.snap.shape.Layouts[dev.GPU], s.UUID != ""
	switch {
	case at.holders[dev.ID] != nil && stands:
		return status.PlacementHeld
	case at.holders[dev.ID] != nil:
		return status.PlacementMaking
	case at.snap.shape.Failing[mig.Place{GPU: dev.GPU, Placement: dev.Placement}] != (status.Cause{}):
		return status.PlacementFailed
	case dev.Healthy && s.State == "":
		return status.PlacementFree
	case dev.Healthy:
		return status.PlacementWarm
	case at.snap.shape.Leaving[dev.GPU][dev.Placement] != (status.Cause{}), !layout.InMIG():
		return status.PlacementLeaving
	case s.State == status.PlacementForeign:
		return status.PlacementForeign
	case stands, slices.Contains(layout.Placements, dev.Placement): // other allocations need its room
		return status.PlacementCovered
	}
	return ""
}

// ready is Agent.Ready.
func (y *display) ready() error {
	snap := y.latest()
	if snap.At.IsZero() {
		return errors.New("the first round has not ended")
	}
	if snap.Missing != "" {
		return errors.New(snap.Missing)
	}
	return nil
}

// stuckAfter is the longest time between two rounds of a working loop: its longest sleep, and more
// than any round takes, since each wait in a round has a deadline.
const stuckAfter = inventoryEvery + 5*time.Minute

// healthy is Agent.Healthy.
func (y *display) healthy() error {
	if at := y.latest().At; !at.IsZero() && time.Since(at) > stuckAfter {
		return fmt.Errorf("the loop has not finished a round since %s", at.Format(time.RFC3339))
	}
	return nil
}

// offered is Agent.Offered.
func (y *display) offered() []gpu.Device {
	snap := y.latest()
	var out []gpu.Device
	for _, d := range snap.hardware.Inventory.GPUs {
		if snap.shape.Layouts[d.UUID].Offers && !d.Gone {
			out = append(out, d)
		}
	}
	return out
}

// open is Agent.Open.
func (y *display) open(u gpu.UUID) bool { return y.latest().shape.Others[u] != "" }
