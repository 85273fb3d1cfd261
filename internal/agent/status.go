// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"example.com/gpu-agent/internal/deviceplugin"
	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/internal/plan"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
	"example.com/gpu-agent/pkg/timeslice"
)

// scene is all that a Status is made from.
type scene struct {
	*Snapshot
	names       *deviceplugin.Names
	unit        gpu.MiB // what a memory unit is from now on
	offer       *deviceplugin.Offer
	allocations []ledger.Allocation
	// held has the IDs that allocations have, by resource, and holders the allocations by ID.
	held    map[string]map[string]bool
	holders map[string]*ledger.Allocation
	// over says of an allocation that its init container has ended.
	over func(id string) bool
}

// scene looks at the node: the last round's inventory and outcome, and the offer and the
// allocations as they are now.
func (r *reporter) scene() *scene {
	at := newScene(r.snapshot.Load(), r.names, r.opts.MemoryUnit, r.front.Offer(), r.ledger.Allocations())
	at.over = r.front.Over
	return at
}

func newScene(s *Snapshot, names *deviceplugin.Names, unit gpu.MiB, offer *deviceplugin.Offer, allocations []ledger.Allocation) *scene {
	at := &scene{s, names, unit, offer, allocations, map[string]map[string]bool{}, map[string]*ledger.Allocation{}, func(string) bool { return false }}
	for i := range at.allocations {
		c := &at.allocations[i]
		if at.held[c.Resource] == nil {
			at.held[c.Resource] = map[string]bool{}
		}
		for _, id := range deviceplugin.IDs(c.Grants) {
			at.held[c.Resource][id], at.holders[id] = true, c
		}
	}
	return at
}

// Status is what people and metrics are shown.
func (r *reporter) Status() status.Status {
	at := r.scene()
	s := r.show(at)
	n := at.gpuNode(&s, gpunode.InPods, r.claims.caps)
	s.SaturationPercent = &n.Summary.SaturationPercent
	for i := range s.Resources {
		r := &s.Resources[i]
		if j := slices.IndexFunc(n.Resources, func(o gpunode.Resource) bool { return o.Name == r.Name }); j >= 0 {
			r.Free, r.Largest = n.Resources[j].Free, n.Resources[j].Largest
		}
	}
	return s
}

// show shows a scene, but for what can be had of it.
func (r *reporter) show(at *scene) status.Status {
	s := status.Status{
		Driver:  at.Inventory.Driver,
		CUDA:    at.Inventory.CUDA,
		Machine: at.Inventory.Machine,
		Partition: status.Partition{
			Name: at.Outcome.Partition, State: string(at.Outcome.State), Reason: at.Outcome.Reason, Message: at.Outcome.Message,
			Source: at.Source, Generation: at.Generation,
		},
		Allocations: len(at.allocations),
		Hardware:    at.Hangs,
		Conditions:  at.Conditions,
		Topology:    at.Matrix,
		Resources:   r.resources(at.Unknown),
		GPUs:        at.gpus(),
	}
	return s
}

// gpus shows the GPUs.
func (at *scene) gpus() (out []status.GPU) {
	for i := range at.Inventory.GPUs {
		out = append(out, at.gpu(&at.Inventory.GPUs[i]))
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
	layout := at.Layouts[d.UUID]
	if layout.Known {
		g.Mode = layout.Mode()
	}
	if counted := layout.Kind.Counted(); counted.Together() && layout.Has(counted) {
		g.UnitMiB = uint64(cmp.Or(layout.Unit, at.unit)) // a GPU in use keeps the unit that it has
	}
	switch {
	case layout.Through(ledger.DRA):
		g.API = string(ledger.DRA)
	case layout.Offers && !layout.Kind.InMIG():
		g.Resource = at.names.Of(layout.Kind, mig.Name{})
	}
	var reasons []string
	for _, v := range at.Verdicts { // the worst first
		if v.GPU != d.UUID {
			continue
		}
		if reasons = append(reasons, v.Reason); len(reasons) == 1 {
			g.Health, g.Class, g.Since, g.Needs = "unhealthy", string(v.Class), &v.Since, v.Needs
		}
	}
	g.Reason = strings.Join(reasons, "; ")
	if i := slices.IndexFunc(at.Conditions, func(c status.Condition) bool { return c.Type == status.Blocked && c.Subject == g.UUID }); i >= 0 {
		g.Blocked = at.Conditions[i].Message
	}
	g.MIG, g.Holders = at.mig(d), at.holdersOf(d.UUID)
	return g
}

// holdersOf shows who has something of a GPU.
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
				Resource: c.Resource, Instances: c.Kind().InMIG(), Units: n, Since: &c.Given, Waits: c.After, Over: at.over(c.ID),
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

// count counts the devices that GPUs have on offer, of their resource and of MIG.
func (at *scene) count(gpus []status.GPU) {
	index := map[gpu.UUID]*status.GPU{}
	for i := range gpus {
		g := &gpus[i]
		index[gpu.UUID(g.UUID)] = g
		if layout := at.Layouts[gpu.UUID(g.UUID)]; layout.Through(ledger.DRA) {
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
			if !held && lingers(dev.ID, at.Layouts[dev.GPU]) {
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

// lingers reports whether a device is not of its GPU's layout: it is of the one before, and
// still listed.
func lingers(id string, layout plan.Layout) bool {
	_, n, err := timeslice.ParseID(id)
	return err == nil && n >= layout.N && layout.Kind.Shared()
}

// countClaims counts what a GPU has for claims, in the pieces of its layout; those of a
// dynamic one are its memory units.
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
			case layout.Dynamic && of.Kind().InMIG(): // by its part of the memory slices
				width := at.Inventory.ByUUID(of.GPU).MIG.MemorySlices()
				g.Used += (piece.At(of.Piece).Size*layout.N + width - 1) / max(width, 1)
			case layout.Dynamic && of.Kind().Alone():
				g.Used = layout.N
			default:
				g.Used += piece.Count(of.Piece)
			}
		}
	}
	g.Used = min(g.Used, g.Total)
	if g.Free = g.Total - g.Used; g.Health != status.Healthy || at.cordoned(gpu.UUID(g.UUID)) {
		g.Unhealthy, g.Free = g.Free, 0
	}
}

// cordoned reports whether an operator keeps new pods off a GPU.
func (at *scene) cordoned(u gpu.UUID) bool {
	return slices.ContainsFunc(at.Conditions, func(c status.Condition) bool { return c.Reason == status.GPUCordoned && c.Subject == string(u) })
}

// forClaims are the MIG devices that a GPU offers through DRA, as the other front-end would
// list them: healthy where no claim is on their memory slices, and nobody keeps pods off.
func (at *scene) forClaims(u gpu.UUID) (out []deviceplugin.Device) {
	layout := at.Layouts[u]
	if !layout.Through(ledger.DRA) || !layout.InMIG() {
		return nil
	}
	for _, p := range layout.Placements {
		dev := deviceplugin.Device{ID: mig.ID(u, p), GPU: u, Placement: p, Healthy: !at.cordoned(u)}
		for i := range at.allocations {
			for _, g := range at.allocations[i].Grants {
				on := piece.At(g.Piece)
				dev.Healthy = dev.Healthy && (g.GPU != u || g.NoRoom || g.Kind().InMIG() && (on.Start >= p.Start+p.Size || p.Start >= on.Start+on.Size))
			}
		}
		out = append(out, dev)
	}
	return out
}

// mig shows a GPU's MIG devices: those that stand and those on offer. It is nil where
// there are none.
func (at *scene) mig(d *gpu.Device) *status.MIG {
	layout := at.Layouts[d.UUID]
	offers := layout.InMIG()
	if !d.MIG.Enabled && d.MIG.Pending == nil && !offers && at.Work[d.UUID] == "" {
		return nil
	}
	out := &status.MIG{Enabled: d.MIG.Enabled, Pending: d.MIG.Pending, Work: at.Work[d.UUID]}
	for _, w := range at.Wanted {
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
				continue // lingers in the list
			}
			placements[dev.ID] = s
			s.Resource, s.Reason = resource, dev.Reason
			if c := at.holders[dev.ID]; c != nil {
				s.Namespace, s.Pod, s.Container = c.Holder.Namespace, c.Holder.Name, c.Holder.Container
				s.Reason = cmp.Or(s.Reason, c.Cause.Message)
			}
		}
	}
	for i := range at.offer.Resources {
		if r := &at.offer.Resources[i]; r.Kind.InMIG() {
			list(r.Name, r.Devices)
		}
	}
	list("", at.forClaims(d.UUID))
	for _, s := range placements {
		out.Placements = append(out.Placements, *s)
	}
	slices.SortFunc(out.Placements, func(a, b status.Placement) int {
		return cmp.Or(cmp.Compare(a.Start, b.Start), cmp.Compare(a.Size, b.Size), cmp.Compare(a.Profile, b.Profile), cmp.Compare(a.CI, b.CI))
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
		if !at.Made[d.UUID][placement] {
			s.State = status.PlacementForeign
		}
		out[id] = s
	}
	return out
}

// placementState is the state of a listed MIG device, of which s shows the instance, if it
// stands; empty where the device merely lingers in the list.
func (at *scene) placementState(dev *deviceplugin.Device, s *status.Placement) string {
	layout, stands := at.Layouts[dev.GPU], s.UUID != ""
	switch {
	case at.holders[dev.ID] != nil && stands:
		return status.PlacementHeld
	case at.holders[dev.ID] != nil:
		return status.PlacementMaking
	case at.Failing[mig.Place{GPU: dev.GPU, Placement: dev.Placement}] != (status.Cause{}):
		return status.PlacementFailed
	case dev.Healthy && s.State == "":
		return status.PlacementFree
	case dev.Healthy:
		return status.PlacementWarm
	case at.Leaving[dev.GPU][dev.Placement] != (status.Cause{}), !layout.InMIG():
		return status.PlacementLeaving
	case s.State == status.PlacementForeign:
		return status.PlacementForeign
	case stands, slices.Contains(layout.Placements, dev.Placement): // its room is promised to somebody
		return status.PlacementCovered
	}
	return ""
}

// Ready returns nil once this process has read the driver, with the files of it
// that containers need, and has heard of the partitions; else it says what is
// missing. What a predecessor knew does not count, or a rolling update would walk
// past nodes on which the new version does not work. A first partition that is
// invalid is not enough where nothing is on offer.
//
// Once ready, the agent stays so: a driver that is lost later, and a bad edit, are
// in the outcome and in the health of the GPUs, and no reason to hold up or to take
// back the update of an agent that works.
func (r *reporter) Ready() error {
	snap := r.snapshot.Load()
	if snap.At.IsZero() {
		return errors.New("the first round has not ended")
	}
	if snap.Missing != "" {
		return errors.New(snap.Missing)
	}
	return nil
}

// stuckAfter is longer than the loop sleeps, by more than any round can take: each
// thing that a round waits for has a deadline.
const stuckAfter = inventoryEvery + 5*time.Minute

// Healthy returns nil while rounds come to an end.
func (r *reporter) Healthy() error {
	if at := r.snapshot.Load().At; !at.IsZero() && time.Since(at) > stuckAfter {
		return fmt.Errorf("the loop has not finished a round since %s", at.Format(time.RFC3339))
	}
	return nil
}

// Offered returns the GPUs that the agent gives out, in index order: who uses one
// of them without an allocation is an intruder.
func (r *reporter) Offered() []gpu.Device {
	snap := r.snapshot.Load()
	var out []gpu.Device
	for _, d := range snap.Inventory.GPUs {
		if snap.Layouts[d.UUID].Offers && !d.Gone {
			out = append(out, d)
		}
	}
	return out
}

// Open reports whether somebody else, too, gives a GPU out: who uses it without a
// allocation of ours may have one of theirs.
func (r *reporter) Open(u gpu.UUID) bool { return r.snapshot.Load().Others[u] != "" }
