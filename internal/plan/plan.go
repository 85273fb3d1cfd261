// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"

	"example.com/gpu-agent/internal/brief"
	"example.com/gpu-agent/internal/config"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/compute"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
)

// Linger is how long a withdrawn device stays listed as Unhealthy before its ID leaves the list.
// The kubelet (1.36.3) crashes with a nil dereference if an ID leaves the list while the ID's
// Allocate is under way.
const Linger = 60 * time.Second

// Layout is how a GPU is divided: the resource of its devices, and their number. Two layouts that
// are Equal have the same devices.
type Layout struct {
	// Known is false if the layout is not known. The GPU then offers nothing, and may get any
	// layout.
	Known bool `json:"-"`
	// Offers is false for a GPU in mode off.
	Offers bool `json:"-"`
	// API is the front-end that offers the GPU. Empty is the device plugin.
	API ledger.FrontEnd `json:"api,omitempty"`
	piece.Division
	// Dynamic is true for a GPU that is offered as MIG instances, whole and as memory. N then
	// counts its memory units. The GPU is one of these at a time: its first holder decides the MIG
	// mode.
	Dynamic bool `json:"dynamic,omitempty"`
	// Compute is how the containers of a shared GPU share its SMs. Like the devices it changes only
	// while no allocation is on the GPU.
	Compute compute.Sharing `json:"compute,omitzero"`
	// Spot is how its room is offered a second time. It changes at once, also while the GPU is held, so
	// Equal ignores it.
	Spot ledger.Offering `json:"spot,omitzero"`
}

// Divided returns the layout of a GPU that is divided like this and offered through the device
// plugin.
func Divided(of piece.Division) Layout { return Layout{Known: true, Offers: true, Division: of} }

// Equal reports whether both have the same devices, through the same front-end.
func (c Layout) Equal(o Layout) bool {
	return c.Known == o.Known && c.Offers == o.Offers && !c.otherFrontEnd(o) && c.Dynamic == o.Dynamic &&
		c.Compute == o.Compute && c.Division.Equal(o.Division)
}

// Of returns how the GPU is divided into devices of a kind. ok is false if it offers none.
func (c Layout) Of(k piece.Kind) (of piece.Division, ok bool) {
	switch {
	case !c.Offers || c.Kind != k && !(c.Dynamic && k.Dynamic()):
		return piece.Division{}, false
	case !c.Dynamic:
		return c.Division, true
	case k.InMIG():
		return piece.Division{Kind: k, N: len(c.Placements), Placements: c.Placements}, true
	case k.Alone():
		return piece.Division{Kind: k, N: 1}, true
	case k.Shared():
		return piece.Division{Kind: k, N: c.N, Unit: c.Unit}, true
	}
	return piece.Division{}, false // the kind is not known
}

// Has reports whether the layout offers devices of a kind.
func (c Layout) Has(k piece.Kind) bool {
	_, ok := c.Of(k)
	return ok
}

// InMIG reports whether the layout offers MIG instances. A dynamic GPU offers other devices too.
func (c Layout) InMIG() bool { return c.Offers && c.Kind.InMIG() }

// Counts reports whether N counts devices: those of its kind, or the memory units of a dynamic GPU.
// For other GPUs in MIG mode, the placements count.
func (c Layout) Counts() bool { return c.Offers && (!c.Kind.InMIG() || c.Dynamic) }

// Through reports whether the layout is offered through a front-end.
func (c Layout) Through(f ledger.FrontEnd) bool { return c.Offers && frontEndOf(c.API) == f }

// otherFrontEnd reports whether two layouts are offered through different front-ends.
func (c Layout) otherFrontEnd(o Layout) bool {
	return c.Offers && o.Offers && frontEndOf(c.API) != frontEndOf(o.API)
}

// frontEndOf returns the front-end of a layout, a wish or an allocation. Empty is the device
// plugin.
func frontEndOf(f ledger.FrontEnd) ledger.FrontEnd { return cmp.Or(f, ledger.DevicePlugin) }

// sameSize reports whether both layouts offer the same kind of devices by the same wish. A GPU then
// keeps the number and the size of its devices.
func (c Layout) sameSize(o Layout) bool {
	return c.Offers && o.Offers && c.SameSize(o.Division)
}

// Mode returns the name of the layout for people.
func (c Layout) Mode() string {
	switch {
	case !c.Known:
		return "unset"
	case !c.Offers:
		return string(config.Off)
	case c.Dynamic:
		return string(config.Dynamic)
	}
	return c.Kind.Mode()
}

// Words describes the layout for people who compare it with another: "shared (units of 1024 MiB)",
// "shared (4 replicas, mps)", "whole, through dra". It is empty if the layout is not known.
func (c Layout) Words() string {
	if !c.Known {
		return ""
	}
	words := c.Mode() + c.division()
	if c.Through(ledger.DRA) {
		words += ", through dra"
	}
	return words
}

// division describes how a shared GPU is divided, for people: " (4 replicas)", " (4 replicas, mps)".
func (c Layout) division() string {
	words := c.Division.String()
	if !c.Offers || words == "" {
		return ""
	}
	if c.Compute.MPS {
		words += ", " + c.Compute.String()
	}
	return " (" + words + ")"
}

// ComputeOf returns the share of the GPU's SMs that the holder of a piece gets.
func (c Layout) ComputeOf(p piece.Piece) compute.Share { return c.Compute.Share(c.Part(p)) }

// layoutOf returns the layout that a wish means for a GPU without MIG. ok is false if the wish is
// to leave the GPU as it is.
func layoutOf(w config.Want, d *gpu.Device, unit gpu.MiB) (c Layout, ok bool) {
	if w.Mode == config.Off {
		return Layout{Known: true}, true
	}
	of, ok := piece.Divide(piece.Wish{Mode: string(w.Mode), Replicas: w.Replicas, Unit: unit}, d)
	if !ok {
		return Layout{}, false
	}
	c = Divided(of)
	c.API, c.Compute = w.API, w.Compute
	return c, true
}

// mostNamed is how many holders of one GPU a sentence names. A GPU with many units may have
// hundreds.
const mostNamed = 10

// Blocked is a GPU whose change waits for holders. It is shown on the Node and in the status. Both
// are for operators, so it names pods of every namespace.
type Blocked struct {
	GPU   gpu.UUID
	Index int
	// From and To are modes, for people.
	From, To string
	// Reason is the kind of holder that is in the way.
	Reason status.Reason
	// Holders is sorted, each once.
	Holders []string
	// In are the MIG instances in the way, each with its holder. Empty if the holders have the GPU
	// as something else, or if all of its holders are in the way.
	In []mig.Standing
	// API is true if the GPU is to be offered through another front-end.
	API bool
}

// String returns a sentence for an annotation.
func (b Blocked) String() string {
	return fmt.Sprintf("GPU %d (%s) stays %s, not yet %s, until these end: %s",
		b.Index, b.GPU, b.From, b.To, brief.List(b.Holders, mostNamed))
}

// Condition returns the same as a condition of the GPU.
func (b Blocked) Condition() status.Condition {
	return status.Cause{Reason: b.Reason, Message: b.String()}.Condition(status.Blocked, string(b.GPU))
}

// Changes is a plan.
type Changes struct {
	// Layouts maps each GPU to its layout after the plan. GPUs without a known layout are missing.
	Layouts map[gpu.UUID]Layout
	// Changing are the GPUs whose layout changes now, in index order.
	Changing []gpu.UUID
	// Work is what has to be done to the hardware now, in index order.
	Work []Work
	// Leaving maps the MIG devices that the target does not keep to the reason. They are withdrawn,
	// or leave when their holder ends.
	Leaving map[gpu.UUID]map[mig.Placement]status.Cause
	// MIG is what the ledger needs to know of GPUs that offer MIG devices.
	MIG map[gpu.UUID]ledger.MIG
	// Made are the instances that become this agent's, because the partition keeps them or an
	// allocation has them.
	Made map[gpu.UUID][]mig.Placement
	// Trouble is why allocations do not get their instances now, by allocation ID. Pods read this,
	// so it names no other tenant's pod.
	Trouble map[string]status.Cause
	// Conditions are conditions of GPUs, in index order. Refused: the GPU cannot become what is
	// wanted, held or not, or it may not be offered. Pending: it offers nothing until other devices
	// have left the kubelet's lists. Noted: remarks.
	Conditions []status.Condition
	// Blocked is in index order.
	Blocked []Blocked
	// Yields has the IDs of the spot allocations that changes wait for.
	Yields map[string]bool
	// Stuck is why the MIG mode of a dynamic GPU cannot change. Devices of the other mode cannot be
	// given out.
	Stuck map[gpu.UUID]status.Cause
	// Busy is true if a process without an allocation is on a MIG instance. Process is true if a
	// change or a container waits for the end of such a process.
	Busy, Process bool
}

func (c *Changes) addCondition(kind status.Type, of gpu.UUID, why status.Cause) {
	c.Conditions = append(c.Conditions, why.Condition(kind, string(of)))
}

// Blocks reports whether a GPU's change waits for holders.
func (c *Changes) Blocks(u gpu.UUID) bool {
	return slices.ContainsFunc(c.Blocked, func(b Blocked) bool { return b.GPU == u })
}

// Drains reports whether a GPU whose change waits for holders offers nothing meanwhile. drain is
// what the operator wants in general. A change of the front-end always drains: if a resource still
// has devices in the device plugin, the scheduler does not look for it in the other front-end.
func (c *Changes) Drains(u gpu.UUID, drain bool) bool {
	return slices.ContainsFunc(c.Blocked, func(b Blocked) bool { return b.GPU == u && (drain || b.API) })
}

// Past is a layout that a GPU no longer has and whose devices are still listed.
type Past struct {
	Layout
	// Until is when they leave the list, unless an allocation has them.
	Until time.Time `json:"until"`
}

// Input is everything that a plan is made from.
type Input struct {
	Inventory   *gpu.Inventory
	Allocations []ledger.Allocation
	Wanted      []config.Want
	// Layouts is how the GPUs are divided now.
	Layouts map[gpu.UUID]Layout
	// Others maps the GPUs that another program gives out to the reason.
	Others map[gpu.UUID]string
	// Unit is the size of a memory unit from now on, in MiB.
	Unit gpu.MiB
	MIG  MIGInput

	// Past has the former layouts of GPUs whose devices are still listed.
	Past map[gpu.UUID][]Past

	rows *Rows // the listed devices before the plan, and those that it adds
	// unknown are the GPUs of Others that only a newer version of this program could give out.
	unknown map[gpu.UUID]bool
}

// Make decides which GPUs change their layout now, and which must wait. It is pure.
//
//   - A GPU with allocations keeps its layout. One without allocations gets the wanted layout.
//   - After a restart of the agent, the layout of a GPU with allocations follows from these.
//   - A GPU that the partition does not name, or leaves as it is, keeps its layout.
//   - If the kubelet's lists have no room for a GPU's new devices, the GPU is withdrawn. It gets
//     its new layout when other devices have left the lists.
//   - A GPU that should offer devices, and could offer none, is Refused. It keeps its layout.
func Make(in Input) Changes {
	out := Changes{
		Layouts: map[gpu.UUID]Layout{}, Leaving: map[gpu.UUID]map[mig.Placement]status.Cause{},
		MIG: map[gpu.UUID]ledger.MIG{}, Made: map[gpu.UUID][]mig.Placement{}, Trouble: map[string]status.Cause{},
		Stuck: map[gpu.UUID]status.Cause{},
	}
	want := map[gpu.UUID]config.Want{}
	for _, w := range in.Wanted {
		want[w.GPU] = w
	}
	// What has yielded holds nothing. Its devices stay listed all the same.
	all := in.Allocations
	in.rows = in.listed()
	in.Allocations = slices.DeleteFunc(slices.Clone(in.Allocations), func(a ledger.Allocation) bool { return a.Out() })
	in.leaveUnknown()
	for i := range in.Inventory.GPUs {
		d := &in.Inventory.GPUs[i]
		have := in.Layouts[d.UUID]
		if in.concernsMIG(d, want[d.UUID]) {
			in.planMIG(d, want[d.UUID], have, &out)
			continue
		}
		to, ok := layoutOf(want[d.UUID], d, in.Unit)
		_, held := holdersOf(in.Allocations, d.UUID, "")
		if !have.Known && held {
			have = in.inferLayout(d, to)
		}
		if !ok {
			to = have
		} else if have.sameSize(to) {
			to.N, to.Unit = have.N, have.Unit
		}
		switch other := in.Others[d.UUID]; {
		case !to.Offers:
		case other != "":
			out.addCondition(status.Refused, d.UUID, in.notOffered(d))
			to = Layout{Known: true}
		case ok && to.N == 0 && d.Fault == "": // another condition has the fault
			out.addCondition(status.Refused, d.UUID, status.Why(status.PartitionUnfit,
				"%s cannot be %s: it has %d MiB that programs can have, and a memory unit has %d MiB, "+
					"so it would offer nothing", d.Name(), to.Mode(), d.Usable(), in.Unit))
			to = have
		}
		holders, waits := in.inTheWay(d.UUID, have, to)
		if !have.Equal(to) && !waits && !in.rows.Fits(d.UUID, to) {
			// Its present devices are withdrawn all the same. So they leave the lists, and make
			// room in the end.
			out.addCondition(status.Pending, d.UUID, crowded(d, to))
			to = Layout{Known: true}
		}
		switch {
		case have.Equal(to):
		case waits:
			b := Blocked{
				GPU: d.UUID, Index: d.Index, From: have.Mode(), To: to.Mode(), Reason: status.HeldByPods,
				Holders: holders,
			}
			out.Blocked = append(out.Blocked, b.between(have, to))
			to = have
		default:
			out.Changing = append(out.Changing, d.UUID)
		}
		if to.Known {
			out.Layouts[d.UUID] = to
			in.rows.Add(d.UUID, to)
		}
		if mode := want[d.UUID].Mode; !held && d.Fault == "" && in.Others[d.UUID] == "" &&
			(mode == config.Whole || mode == config.Shared) &&
			d.MIG.Pending != nil && *d.MIG.Pending {
			// The next reset would bring MIG mode. To take that back changes nothing that is in
			// force.
			out.Work = append(out.Work, Work{GPU: d.UUID, Steps: []mig.Step{{Op: mig.Disable}}})
		}
	}
	in.offerSpot(want, &out)
	out.Yields = yields(all, &out)
	return out
}

// offerSpot sets how the GPUs' room is offered to spot pods.
func (in *Input) offerSpot(want map[gpu.UUID]config.Want, out *Changes) {
	for u, c := range out.Layouts {
		switch w := want[u]; {
		case !c.Through(ledger.DevicePlugin) || out.Blocks(u):
			c.Spot = ledger.Offering{}
		case w.Mode != config.Keep:
			c.Spot = w.Spot
		default:
			c.Spot = in.Layouts[u].Spot
		}
		out.Layouts[u] = c
	}
}

// yields returns the spot allocations that changes wait for, and those whose pieces the layouts no longer have. One
// that has given its room back to a change gets it back when the change is in force, and its GPU has such a piece.
// Otherwise the next plan would find a holder again.
func yields(all []ledger.Allocation, out *Changes) map[string]bool {
	changes := map[gpu.UUID]bool{}
	for _, u := range out.Changing {
		changes[u] = true
	}
	for _, w := range out.Work {
		changes[w.GPU] = true
	}
	for _, b := range out.Blocked {
		changes[b.GPU] = true
	}
	var ids map[string]bool
	for i := range all {
		a := &all[i]
		waits := func(b Blocked) bool { return !a.Out() && b.waitsFor(a) }
		yielded := func(g ledger.Grant) bool {
			return a.Out() && a.Yield.Layout && changes[g.GPU] || out.Layouts[g.GPU].lacks(&g)
		}
		if a.Tier == ledger.Spot && (slices.ContainsFunc(out.Blocked, waits) || slices.ContainsFunc(a.Grants, yielded)) {
			if ids == nil {
				ids = map[string]bool{}
			}
			ids[a.ID] = true
		}
	}
	return ids
}

// lacks reports whether a known layout does not have a grant's piece for the device plugin.
func (c Layout) lacks(g *ledger.Grant) bool {
	if !c.Known {
		return false
	}
	of, ok := c.Of(g.Kind())
	if !ok || !c.Through(ledger.DevicePlugin) {
		return true
	}
	if at, ok := g.Placement(); ok {
		return !slices.ContainsFunc(of.Placements, func(p mig.Placement) bool { return piece.SamePlace(p, at) })
	}
	_, rest := of.Rest(g.Piece)
	return rest || of.Unit != 0 && g.Size() != 0 && g.Size() != of.Unit
}

// waitsFor reports whether a GPU's change waits for an allocation.
func (b *Blocked) waitsFor(a *ledger.Allocation) bool {
	if len(b.In) == 0 {
		return a.Takes(b.GPU)
	}
	return slices.ContainsFunc(a.Grants, func(g ledger.Grant) bool {
		at, ok := g.Placement()
		return ok && g.GPU == b.GPU && slices.ContainsFunc(b.In, func(s mig.Standing) bool {
			return piece.SamePlace(s.Placement, at)
		})
	})
}

// leaveUnknown adds to Others the GPUs on which an allocation has a piece of a kind that this
// version does not know.
func (in *Input) leaveUnknown() {
	in.Others, in.unknown = maps.Clone(in.Others), map[gpu.UUID]bool{}
	for i := range in.Allocations {
		a := &in.Allocations[i]
		for j := range a.Grants {
			g := &a.Grants[j]
			if err := g.Kind().Check(); err != nil && in.Others[g.GPU] == "" {
				if in.Others == nil {
					in.Others = map[gpu.UUID]string{}
				}
				in.Others[g.GPU], in.unknown[g.GPU] = fmt.Sprintf("%s has a piece of it, and %v", a.Who(), err), true
			}
		}
	}
}

// notOffered returns why a GPU of Others is not offered.
func (in *Input) notOffered(d *gpu.Device) status.Cause {
	reason := status.OtherOwner
	if in.unknown[d.UUID] {
		reason = status.UnknownKind
	}
	return status.Why(reason, "%s is not offered: %s", d.Name(), in.Others[d.UUID])
}

// holdersOf returns the holders of a GPU, except those of one front-end. held is true if there are
// any. An empty except leaves out none.
func holdersOf(allocations []ledger.Allocation, u gpu.UUID, except ledger.FrontEnd) (names []string, held bool) {
	for i := range allocations {
		if a := &allocations[i]; a.Takes(u) && frontEndOf(a.Owner) != except {
			names = append(names, a.Who())
		}
	}
	return compact(names), len(names) > 0
}

// inTheWay returns the holders that a GPU's change waits for. If only the front-end changes, these
// are the holders of the old one. Otherwise they are all holders.
func (in *Input) inTheWay(u gpu.UUID, have, to Layout) (names []string, waits bool) {
	if have.API = to.API; have.Equal(to) {
		return holdersOf(in.Allocations, u, frontEndOf(to.API))
	}
	return holdersOf(in.Allocations, u, "")
}

// between adds to From and To what changes if the mode does not say it: how the GPU is shared, or
// the front-end.
func (b Blocked) between(have, to Layout) Blocked {
	b.API = have.otherFrontEnd(to)
	switch {
	case b.API:
		b.From += " (api: " + string(frontEndOf(have.API)) + ")"
		b.To += " (api: " + string(frontEndOf(to.API)) + ")"
	case b.From == b.To: // only the division changes
		b.From, b.To = b.From+have.division(), b.To+to.division()
	}
	return b
}

// inferLayout returns the layout that follows from the allocations on a GPU. If the lists have no
// room for all devices of that layout, the GPU offers nothing, and only held devices are listed.
func (in *Input) inferLayout(d *gpu.Device, to Layout) Layout {
	c := inferLayout(in.Allocations, d, to, in.Unit)
	if !in.rows.Fits(d.UUID, c) {
		return Layout{Known: true}
	}
	in.rows.Add(d.UUID, c)
	return c
}

// inferLayout returns the layout that a GPU must have for its allocations: with the memory limits and
// the shares of the SMs that their holders were given, and through the same front-end.
func inferLayout(allocations []ledger.Allocation, d *gpu.Device, to Layout, unit gpu.MiB) Layout {
	c := Layout{Known: true}
	var pieces []piece.Piece
	var most compute.Share
	for i := range allocations {
		for j := range allocations[i].Grants {
			g := &allocations[i].Grants[j]
			if g.GPU != d.UUID || g.NoRoom || !g.Kind().Known() ||
				c.Offers && (g.Kind() != c.Kind || allocations[i].Owner != c.API) {
				continue // of two kinds the first counts; devices of the other are listed as leaving
			}
			c.Offers, c.API, c.Kind = true, allocations[i].Owner, g.Kind()
			pieces = append(pieces, g.Piece)
			most.Ceiling = max(most.Ceiling, g.Compute.Ceiling)
		}
	}
	if c.Offers {
		var wish piece.Division
		if to.Offers {
			wish = to.Division
		}
		c.Division = piece.Infer(pieces, d, wish, unit)
		c.Compute = compute.Infer(most, c.Parts(), to.Compute)
	}
	return c
}
