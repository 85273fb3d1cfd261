// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"cmp"
	"fmt"
	"reflect"
	"slices"
	"strings"

	"example.com/gpu-agent/internal/deviceplugin"
	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/internal/plan"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/compute"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/memcap"
	"example.com/gpu-agent/pkg/mig"
)

// gpuNode returns the status of the GPUNode object, for programs that place pods. It is a pure function of
// the scene. What it says of guaranteed pods is what it would say if there were no spot pods.
func (at *scene) gpuNode(in gpunode.HoldersIn, caps memcap.Level) *gpunode.Status {
	out := at.guaranteed().gpuNodeOf(caps)
	out.HoldersIn = in
	for i := range out.GPUs {
		g := &out.GPUs[i]
		u := gpu.UUID(g.UUID)
		g.Spot = at.spot(g)
		g.ComputeGuarantee = string(at.computeGuarantee(u))
		g.Namespaces = min(at.namespaces(u), mostNamespaces)
		if in == gpunode.InObject {
			g.Holders = at.gpuNodeHolders(u)
		}
	}
	out.Sum()
	out.Cut()
	return out
}

// guaranteed returns the scene without spot pods and what is on offer to them.
func (at *scene) guaranteed() *scene {
	theirs := func(r deviceplugin.Resource) bool { return r.Tier != ledger.Guaranteed }
	has := func(a ledger.Allocation) bool { return a.Tier != ledger.Guaranteed }
	if !slices.ContainsFunc(at.offer.Resources, theirs) && !slices.ContainsFunc(at.allocations, has) {
		return at
	}
	offer := *at.offer
	offer.Resources = slices.DeleteFunc(slices.Clone(offer.Resources), theirs)
	allocations := slices.DeleteFunc(slices.Clone(at.allocations), has)
	out := newScene(at.snap, at.names, at.domain, at.unit, &offer, allocations)
	out.over, out.computed = at.over, at.computed
	return out
}

// spot returns what spot pods can have of a GPU; nil if its room is not offered to them.
func (at *scene) spot(g *gpunode.GPU) *gpunode.Spot {
	u := gpu.UUID(g.UUID)
	offering := at.offer.Spot[u]
	if !offering.On {
		return nil
	}
	layout, out := at.snap.shape.Layouts[u], &gpunode.Spot{}
	if g.Resource != "" {
		out.Resource, out.Total = deviceplugin.InTier(g.Resource, ledger.Spot), g.Total
		if offering.Most > 0 {
			out.Total = min(offering.Most, g.Total)
		}
	}
	usedBy := func(these func(*ledger.Allocation) bool) (piece.Set, []string) {
		by := scene{allocations: slices.DeleteFunc(slices.Clone(at.allocations),
			func(a ledger.Allocation) bool { return !these(&a) })}
		return by.used(u, layout.Kind), by.usedPlacements(u)
	}
	out.Used, out.UsedPlacements = usedBy(func(a *ledger.Allocation) bool { return a.Tier == ledger.Spot && !a.Yield.Asked() })
	out.Yielding, out.YieldingPlacements = usedBy(func(a *ledger.Allocation) bool { return a.Tier == ledger.Spot && a.Yield.Asked() })
	out.Lent, out.LentPlacements = usedBy(func(a *ledger.Allocation) bool { return a.Free(ledger.Spot) })
	for i := range at.offer.Resources {
		r := &at.offer.Resources[i]
		if r.Tier != ledger.Spot {
			continue
		}
		for j := range r.Devices {
			dev := &r.Devices[j]
			free := dev.Healthy && !dev.Leaving && !at.held[r.Name][dev.ID] && gpunode.Is(g.Conditions, gpunode.Available)
			switch {
			case dev.GPU != u || lingers(dev.ID, layout):
			case r.Kind.InMIG():
				out.Offers = addOffer(out.Offers, r.Name, dev.Placement, free)
			case r.Name == out.Resource && free:
				out.Free++
			}
		}
	}
	slices.SortFunc(out.Offers, func(a, b gpunode.Offer) int { return cmp.Compare(a.Profile, b.Profile) })
	if out.Largest = out.Free; !g.Kind.Counted().Together() {
		out.Largest = min(1, out.Free)
	}
	return out
}

// addOffer adds a placement to the offer of its profile, which it makes if need be.
func addOffer(offers []gpunode.Offer, resource string, p mig.Placement, free bool) []gpunode.Offer {
	profile := p.Profile.String()
	i := slices.IndexFunc(offers, func(o gpunode.Offer) bool { return o.Profile == profile })
	if i < 0 {
		i, offers = len(offers), append(offers, gpunode.Offer{Profile: profile, Resource: resource})
	}
	o, start := &offers[i], strings.TrimPrefix(p.String(), profile+"@")
	o.Placements = append(o.Placements, start)
	if free {
		o.Free = append(o.Free, start)
	}
	return offers
}

// usedPlacements returns the MIG placements of a GPU that allocations have, by place.
func (at *scene) usedPlacements(u gpu.UUID) (out []string) {
	var placements []mig.Placement
	for i := range at.allocations {
		for j := range at.allocations[i].Grants {
			if g := &at.allocations[i].Grants[j]; g.GPU == u && g.Kind().InMIG() && !g.NoRoom {
				placements = append(placements, piece.At(g.Piece))
			}
		}
	}
	slices.SortFunc(placements, mig.ComparePlacements)
	for _, p := range slices.Compact(placements) {
		out = append(out, p.String())
	}
	return out
}

// gpuNodeOf returns the object without what depends on the tiers: what spot pods can have, holders, and how
// strongly their shares are held.
func (at *scene) gpuNodeOf(caps memcap.Level) *gpunode.Status {
	s := status.Status{GPUs: at.gpus()}
	out := &gpunode.Status{MemoryUnitMiB: int(at.unit)}
	ready := gpunode.Condition{Type: gpunode.Ready, Status: gpunode.True, Reason: status.Offered}
	if at.snap.Missing != "" || at.snap.At.IsZero() {
		// A missing driver is the reason, as in the Node's GPUReady, since that may last.
		ready.Status, ready.Reason = gpunode.False, cmp.Or(at.snap.usable.absent.Reason, status.Starting)
		ready.Message = cmp.Or(at.snap.Missing, "the first round has not ended")
	}
	out.Conditions = []gpunode.Condition{ready}
	if o := &at.snap.Outcome; at.snap.Heard && o.State != Applied {
		out.Conditions = append(out.Conditions, gpunode.Condition{Type: gpunode.Applied, Status: gpunode.False,
			Reason: cmp.Or(o.Reason, status.Starting), Message: fmt.Sprintf("partition %s is %s: the Node's annotation %s says why",
				cmp.Or(o.Partition, "of this node"), o.State, MessageAnnotation)})
	}
	for i := range s.GPUs {
		g, d := &s.GPUs[i], at.snap.hardware.Inventory.ByUUID(gpu.UUID(s.GPUs[i].UUID))
		layout := at.snap.shape.Layouts[d.UUID]
		to := gpunode.GPU{UUID: g.UUID, Index: g.Index, Model: g.Model, MemoryMiB: int(g.MemoryMiB), Mode: string(g.Mode),
			Resource: g.Resource, Cordoned: at.snap.cordoned(d.UUID), Conditions: at.gpuConditions(g, layout)}
		if layout.Offers {
			to.API, to.Kind = string(cmp.Or(layout.API, ledger.DevicePlugin)), layout.Kind
			switch {
			case layout.InMIG() && !layout.Dynamic:
				to.Guarantee = string(memcap.Hardware)
			case !layout.Kind.Alone():
				to.Guarantee = string(caps)
			}
			if layout.Counts() {
				to.Total = layout.N
			}
			if layout.Compute.MPS {
				to.Compute = gpunode.Through
			}
		}
		if g.MIG != nil {
			to.MIG = at.gpuNodeMIG(g, d, &out.Cards)
		}
		if gpunode.Is(to.Conditions, gpunode.Available) && to.Total > 0 {
			to.Free = min(g.Free, to.Total)
			if to.Largest = to.Free; !to.Kind.Counted().Together() {
				to.Largest = min(1, to.Free)
			}
		}
		if g.Resource != "" {
			to.Used = at.used(d.UUID, layout.Kind)
		}
		out.GPUs = append(out.GPUs, to)
	}
	slices.SortFunc(out.Cards, func(a, b gpunode.Card) int { return cmp.Compare(a.Name, b.Name) })
	return out
}

// computeGuarantee returns how strongly all containers on a GPU are held to their shares of its SMs; empty if
// none has a share.
func (at *scene) computeGuarantee(u gpu.UUID) (weakest compute.Guarantee) {
	for i := range at.allocations {
		a := &at.allocations[i]
		for j := range a.Grants {
			if g := &a.Grants[j]; g.GPU != u || g.Compute.Ceiling == 0 {
				continue
			}
			if at.computed(a.ID, u).Guarantee != compute.Ceiling {
				return compute.None
			}
			weakest = compute.Ceiling
		}
	}
	return weakest
}

// mostNamespaces is the largest GPU.Namespaces of a GPUNode. An MPS server accepts far fewer clients.
const mostNamespaces = 1024

// namespaces returns how many namespaces the pods with shares of a GPU's SMs belong to, as far as the kubelet has
// named them. A spot pod that has given its room back does not count.
func (at *scene) namespaces(u gpu.UUID) int {
	of := map[string]bool{}
	for i := range at.allocations {
		a := &at.allocations[i]
		share := func(g ledger.Grant) bool { return g.GPU == u && g.Compute.Ceiling > 0 }
		if a.Holder.Namespace != "" && !a.Out() && slices.ContainsFunc(a.Grants, share) {
			of[a.Holder.Namespace] = true
		}
	}
	return len(of)
}

// used returns the numbers of the held devices of a GPU; a whole GPU is number 0.
func (at *scene) used(u gpu.UUID, kind piece.Kind) piece.Set {
	var numbers []int
	for i := range at.allocations {
		for j := range at.allocations[i].Grants {
			if g := &at.allocations[i].Grants[j]; g.GPU == u && g.Kind() == kind && !g.NoRoom {
				numbers = slices.AppendSeq(numbers, g.Numbers().All())
			}
		}
	}
	slices.Sort(numbers)
	return piece.SetOf(slices.Compact(numbers))
}

// gpuConditions returns whether a GPU is healthy, and whether pods can get what is free of it.
func (at *scene) gpuConditions(g *status.GPU, layout plan.Layout) []gpunode.Condition {
	healthy := gpunode.Condition{Type: gpunode.Healthy, Status: gpunode.True, Reason: status.GPUsHealthy}
	if g.Health != status.Healthy {
		healthy.Status, healthy.Reason, healthy.Message = gpunode.False, status.GPUUnhealthy, g.Reason
	}
	available := gpunode.Condition{Type: gpunode.Available, Status: gpunode.True, Reason: status.Offered}
	if why := at.withdrawn(g, layout); why != (status.Cause{}) {
		available.Status, available.Reason, available.Message = gpunode.False, why.Reason, why.Message
	}
	out := []gpunode.Condition{available, healthy}
	if n := at.idle(gpu.UUID(g.UUID)); n > 0 {
		// Do not name pods: any user of the API may read the object.
		out = append(out, gpunode.Condition{Type: gpunode.Idle, Status: gpunode.True, Reason: status.GrantIdle,
			Message: fmt.Sprintf("allocations that have been unused for a while: %d", n)})
	}
	return out
}

// idle returns the number of allocations on a GPU that are not used.
func (at *scene) idle(u gpu.UUID) (n int) {
	for i := range at.allocations {
		a := &at.allocations[i]
		idle := func(c status.Condition) bool { return c.Reason == status.GrantIdle && c.Subject == a.ID }
		if a.On(u) && slices.ContainsFunc(at.snap.Conditions, idle) {
			n++
		}
	}
	return n
}

// withdrawn returns why new pods cannot get anything of a GPU; zero if they can, or could if the
// GPU were not full.
func (at *scene) withdrawn(g *status.GPU, layout plan.Layout) status.Cause {
	u := gpu.UUID(g.UUID)
	for _, v := range at.snap.hardware.Verdicts {
		if v.GPU == u && v.GI < 0 { // with a fault of one instance, the rest goes on
			return status.Why(status.GPUUnhealthy, "%s", v.Reason)
		}
	}
	switch none := at.snap.offersNothing(u); {
	case none != (status.Cause{}):
		return none
	case at.snap.cordoned(u):
		return status.Why(status.GPUCordoned, "an operator keeps new pods off the GPU")
	case g.Resource == "":
		return status.Cause{}
	}
	for i := range at.offer.Resources {
		r := &at.offer.Resources[i]
		if r.Name != g.Resource {
			continue
		}
		for j := range r.Devices {
			dev := &r.Devices[j]
			if dev.GPU != u || !dev.Leaving && (dev.Healthy || at.held[r.Name][dev.ID]) {
				continue
			}
			if lingers(dev.ID, layout) {
				continue
			}
			if g.Blocked != "" {
				// Do not name pods: any user of the API may read the object. The Node's condition does.
				return status.Why(at.blockedBy(g.UUID), "a change of the GPU's partition waits for those that hold it")
			}
			return status.Why(status.NotOffered, "%s", dev.Reason)
		}
	}
	return status.Cause{}
}

// blockedBy returns the reason why a GPU's change waits. The GPU must have such a condition.
func (at *scene) blockedBy(uuid string) status.Reason {
	i := slices.IndexFunc(at.snap.Conditions, func(c status.Condition) bool {
		return c.Type == status.Blocked && c.Subject == uuid
	})
	return at.snap.Conditions[i].Reason
}

// gpuNodeMIG returns a GPU's MIG devices, and adds its card to cards.
func (at *scene) gpuNodeMIG(g *status.GPU, d *gpu.Device, cards *[]gpunode.Card) *gpunode.MIG {
	m := &gpunode.MIG{OnDemand: g.MIG.OnDemand, Card: nameCard(gpunode.CardOf(d), cards)}
	leaving := map[string]bool{}
	for _, c := range at.snap.Conditions {
		if c.Type == status.Leaving {
			leaving[c.Subject] = true
		}
	}
	for i := range g.MIG.Placements {
		p := &g.MIG.Placements[i]
		_, place, _ := strings.Cut(p.Device, "::")
		switch p.State {
		case status.PlacementHeld, status.PlacementMaking:
			m.Used = append(m.Used, place)
		case status.PlacementWarm:
			m.Warm = append(m.Warm, place)
		case status.PlacementForeign, status.PlacementLeaving:
			if p.UUID != "" {
				m.Blocked = append(m.Blocked, place)
			}
			continue
		case status.PlacementCovered:
			if p.UUID != "" && p.Resource == "" {
				continue // exists, but is not on offer
			}
		}
		if leaving[p.Device] && p.State != status.PlacementFailed {
			continue
		}
		j := slices.IndexFunc(m.Offers, func(o gpunode.Offer) bool { return o.Profile == p.Profile })
		if j < 0 {
			j, m.Offers = len(m.Offers), append(m.Offers, gpunode.Offer{Profile: p.Profile, Resource: p.Resource})
		}
		o, start := &m.Offers[j], strings.TrimPrefix(place, p.Profile+"@")
		o.Placements = append(o.Placements, start)
		if p.State == status.PlacementFree || p.State == status.PlacementWarm {
			o.Free = append(o.Free, start)
		}
	}
	slices.SortFunc(m.Offers, func(a, b gpunode.Offer) int { return cmp.Compare(a.Profile, b.Profile) })
	return m
}

// nameCard finds a card among cards, or adds it, and returns its name there. Different cards of one
// model get different names. A nil card has no name.
func nameCard(c *gpunode.Card, cards *[]gpunode.Card) string {
	if c == nil {
		return ""
	}
	model := c.Name
	for n := 2; ; n++ {
		i := slices.IndexFunc(*cards, func(o gpunode.Card) bool { return o.Name == c.Name })
		if i < 0 {
			*cards = append(*cards, *c)
			return c.Name
		}
		if reflect.DeepEqual((*cards)[i], *c) {
			return c.Name
		}
		c.Name = fmt.Sprintf("%s (%d)", model, n)
	}
}

// gpuNodeHolders returns the holders of a GPU's devices.
func (at *scene) gpuNodeHolders(u gpu.UUID) []gpunode.Holder {
	var out []gpunode.Holder
	for i := range at.allocations {
		a := &at.allocations[i]
		if !a.On(u) {
			continue
		}
		of := scene{allocations: at.allocations[i : i+1]}
		h := gpunode.Holder{Namespace: a.Holder.Namespace, Pod: a.Holder.Name, Container: a.Holder.Container,
			Resource: a.Resource}
		if a.Owner == ledger.DevicePlugin && !a.Kind().InMIG() {
			h.Devices = of.used(u, a.Kind())
		}
		for j := range a.Grants {
			g := &a.Grants[j]
			if g.GPU == u && g.Kind().InMIG() {
				h.Placements = append(h.Placements, g.Piece.String())
			}
			if g.GPU == u {
				h.ComputePercent = max(h.ComputePercent, g.Compute.Ceiling)
			}
		}
		out = append(out, h)
	}
	slices.SortStableFunc(out, func(a, b gpunode.Holder) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Pod, b.Pod),
			cmp.Compare(a.Container, b.Container), cmp.Compare(a.Resource, b.Resource))
	})
	return out
}

// gpuNode is Agent.GPUNode.
func (y *display) gpuNode(in gpunode.HoldersIn) *gpunode.Status {
	return y.scene().gpuNode(in, y.caps)
}

// holdersIn returns where the holders of devices are published on the node of in. fixed is the
// operator's choice, which may be empty.
func (in *input) holdersIn(fixed gpunode.HoldersIn) gpunode.HoldersIn {
	switch {
	case fixed != "":
		return fixed
	case in.podsTell:
		return gpunode.InPods
	}
	return gpunode.InObject
}
