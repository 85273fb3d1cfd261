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
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
)

// Linger is how long a withdrawn device stays listed as Unhealthy before its ID
// leaves. The kubelet (1.36.3) ends with a nil dereference when an ID leaves
// the list while its Allocate is on the wire.
const Linger = 60 * time.Second

// Layout is how a GPU is divided: which resource its devices belong to and how
// many there are. Two that are Equal have the same devices.
type Layout struct {
	// Known is false for a GPU of which nothing is known: it offers nothing,
	// and anything may be made of it.
	Known bool `json:"-"`
	// Offers is false for a GPU in mode off.
	Offers bool `json:"-"`
	// API is the front-end through which it is offered; empty is the device plugin.
	API ledger.FrontEnd `json:"api,omitempty"`
	piece.Division
	// Dynamic says of MIG instances that the GPU is offered whole and as memory besides;
	// N counts memory units then. It is one of these at a time: whoever comes first has
	// the MIG mode changed.
	Dynamic bool `json:"dynamic,omitempty"`
}

// Divided is the layout of a GPU that is offered so, through the device plugin.
func Divided(of piece.Division) Layout { return Layout{Known: true, Offers: true, Division: of} }

// Equal reports whether both have the same devices, through the same front-end.
func (c Layout) Equal(o Layout) bool {
	return c.Known == o.Known && c.Offers == o.Offers && !c.speaksOther(o) && c.Dynamic == o.Dynamic &&
		c.Division.Equal(o.Division)
}

// Of is into which devices of a kind the GPU is divided; ok is false where it offers none.
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

// Has reports whether pieces of a kind are offered.
func (c Layout) Has(k piece.Kind) bool {
	_, ok := c.Of(k)
	return ok
}

// InMIG reports whether MIG instances are offered: of a dynamic GPU, besides others.
func (c Layout) InMIG() bool { return c.Offers && c.Kind.InMIG() }

// Counts reports whether N counts the devices of its kind, or of a dynamic one its memory units:
// those of a GPU in MIG mode are counted by their placements.
func (c Layout) Counts() bool { return c.Offers && (!c.Kind.InMIG() || c.Dynamic) }

// Through reports whether a GPU is offered through a front-end.
func (c Layout) Through(f ledger.FrontEnd) bool { return c.Offers && api(c.API) == f }

// speaksOther reports whether two layouts are offered through different front-ends.
func (c Layout) speaksOther(o Layout) bool { return c.Offers && o.Offers && api(c.API) != api(o.API) }

// api is the front-end that a layout, a wish or an allocation means: the device plugin
// where it does not say.
func api(f ledger.FrontEnd) ledger.FrontEnd { return cmp.Or(f, ledger.DevicePlugin) }

// sameSize reports whether both offer devices by one wish: a GPU keeps the number and the size
// that it was first given.
func (c Layout) sameSize(o Layout) bool {
	return c.Offers && o.Offers && c.SameSize(o.Division)
}

// Mode is the word that people use for the layout.
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

// Words is the layout for people who compare it with another: "shared (units of 1024 MiB)",
// "whole, through dra"; empty where nothing is known.
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

// division is into what a shared GPU is divided, for people: " (4 replicas)".
func (c Layout) division() string {
	if words := c.Division.String(); c.Offers && words != "" {
		return " (" + words + ")"
	}
	return ""
}

// layoutOf is the layout that a wish means on a GPU that has nothing to do with MIG. ok
// is false where the wish is to leave the GPU as it is.
func layoutOf(w config.Want, d *gpu.Device, unit gpu.MiB) (c Layout, ok bool) {
	if w.Mode == config.Off {
		return Layout{Known: true}, true
	}
	of, ok := piece.Divide(piece.Wish{Mode: string(w.Mode), Replicas: w.Replicas, Unit: unit}, d)
	if !ok {
		return Layout{}, false
	}
	c = Divided(of)
	c.API = w.API
	return c, true
}

// mostNamed is how many holders of one GPU a sentence names; a GPU of many units may
// have hundreds.
const mostNamed = 10

// Blocked is a GPU whose change waits for holders. It is told on the Node and in
// status, which are for operators, and names pods of every namespace.
type Blocked struct {
	GPU   gpu.UUID
	Index int
	// From and To are modes, for people.
	From, To string
	// Reason says what kind of holder is in the way.
	Reason status.Reason
	// Holders is sorted, each once.
	Holders []string
	// In are the MIG instances in the way, each with its holder; empty where the holders have
	// the GPU as something else, or all of them are in the way.
	In []mig.Standing
	// API says that the GPU is to be offered through another front-end.
	API bool
}

// String is a sentence for an annotation.
func (b Blocked) String() string {
	return fmt.Sprintf("GPU %d (%s) stays %s, not yet %s, until these end: %s",
		b.Index, b.GPU, b.From, b.To, brief.List(b.Holders, mostNamed))
}

// Condition is the same as a fact about the GPU.
func (b Blocked) Condition() status.Condition {
	return status.Cause{Reason: b.Reason, Message: b.String()}.Condition(status.Blocked, string(b.GPU))
}

// Changes is what a plan comes to.
type Changes struct {
	// Layouts has every GPU of the inventory whose layout is known after the plan.
	Layouts map[gpu.UUID]Layout
	// Changing names the GPUs whose layout changes now, in index order.
	Changing []gpu.UUID
	// Work is what is to be done to the hardware now, in index order.
	Work []Work
	// Leaving has the MIG devices that the target does not keep, with the reason:
	// they are withdrawn, or leave with their holder.
	Leaving map[gpu.UUID]map[mig.Placement]status.Cause
	// MIG is what the ledger must know of GPUs that offer MIG devices.
	MIG map[gpu.UUID]ledger.MIG
	// Made are the instances that are this agent's from now on, since the
	// partition keeps them or an allocation has them.
	Made map[gpu.UUID][]mig.Placement
	// Trouble is why allocations do not get their instances now, by key. Their pods are
	// told: no other tenant's pod is named.
	Trouble map[string]status.Cause
	// Conditions are facts about GPUs, in index order: Refused of one that cannot be
	// what is wanted, whether held or not, and that offers nothing; Pending of one that
	// offers nothing until other devices have left the kubelet's lists; and Noted.
	Conditions []status.Condition
	// Blocked is in index order.
	Blocked []Blocked
	// Stuck is why the MIG mode of a dynamic GPU cannot change: what needs the other mode
	// cannot be had.
	Stuck map[gpu.UUID]status.Cause
	// Busy says that a process which no allocation covers is on a MIG instance, Process
	// that a change or a container waits for the end of one.
	Busy, Process bool
}

func (c *Changes) say(kind status.Type, of gpu.UUID, why status.Cause) {
	c.Conditions = append(c.Conditions, why.Condition(kind, string(of)))
}

// Blocks reports whether a GPU's change waits.
func (c *Changes) Blocks(u gpu.UUID) bool {
	return slices.ContainsFunc(c.Blocked, func(b Blocked) bool { return b.GPU == u })
}

// Drains reports whether a GPU whose change waits offers nothing meanwhile. drain is what
// the operator wants of a change. One of the front-end is never waited for in another way:
// of a name that has devices through the device plugin the scheduler does not see the rest.
func (c *Changes) Drains(u gpu.UUID, drain bool) bool {
	return slices.ContainsFunc(c.Blocked, func(b Blocked) bool { return b.GPU == u && (drain || b.API) })
}

// Past is a layout that a GPU no longer has, whose devices are still listed.
type Past struct {
	Layout
	// Until is when they leave the list, if no allocation has them.
	Until time.Time `json:"until"`
}

// Input is everything that a plan is made from.
type Input struct {
	Inventory   *gpu.Inventory
	Allocations []ledger.Allocation
	Wanted      []config.Want
	// Layouts is how the GPUs are divided now.
	Layouts map[gpu.UUID]Layout
	// Others is why GPUs are somebody else's to give out.
	Others map[gpu.UUID]string
	// Unit is what a memory unit is from now on.
	Unit gpu.MiB
	MIG  MIGInput

	// Past is what GPUs had before and is still listed.
	Past map[gpu.UUID][]Past

	rows *Rows // what is listed before the plan, and what it adds
	// unknown are the GPUs of Others that only a newer version of this program could give out.
	unknown map[gpu.UUID]bool
}

// Make decides which GPUs change their layout now and which must wait. It is pure.
//
// A GPU without a known layout that allocations are on (the agent has restarted) has
// the layout that its allocations speak of. A GPU with allocations keeps its layout; one
// without takes the wanted one. GPUs that wanted does not name, or that it
// leaves as they are, keep what they have. A GPU whose new devices the kubelet's lists
// have no room for now is withdrawn, and laid out when others have left them. One that would
// offer nothing although it is to offer something is Refused, and keeps what it has.
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
	in.rows = in.listed()
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
			out.say(status.Refused, d.UUID, in.notOffered(d))
			to = Layout{Known: true}
		case ok && to.N == 0 && d.Fault == "": // what cannot be described is said to be faulty elsewhere
			out.say(status.Refused, d.UUID, status.Why(status.PartitionUnfit,
				"%s cannot be %s: it has %d MiB that programs can have, and a memory unit has %d MiB, "+
					"so it would offer nothing", d.Name(), to.Mode(), d.Usable(), in.Unit))
			to = have
		}
		holders, waits := in.inTheWay(d.UUID, have, to)
		if !have.Equal(to) && !waits && !in.rows.Fits(d.UUID, to) {
			// What it has is withdrawn all the same: so it leaves the lists, and there
			// is room in the end.
			out.say(status.Pending, d.UUID, crowded(d, to))
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
			// MIG mode would come with the next reset. To take that back touches
			// nothing that is in force.
			out.Work = append(out.Work, Work{GPU: d.UUID, Steps: []mig.Step{{Op: mig.Disable}}})
		}
	}
	return out
}

// leaveUnknown leaves GPUs alone of which somebody has a piece of a kind that this version does
// not know, as those that somebody else gives out.
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

// notOffered is why a GPU of Others is not offered.
func (in *Input) notOffered(d *gpu.Device) status.Cause {
	reason := status.OtherOwner
	if in.unknown[d.UUID] {
		reason = status.UnknownKind
	}
	return status.Why(reason, "%s is not offered: %s", d.Name(), in.Others[d.UUID])
}

// holdersOf names who has something of a GPU through another front-end than except, and
// whether anyone has; an empty one excepts nobody.
func holdersOf(allocations []ledger.Allocation, u gpu.UUID, except ledger.FrontEnd) (names []string, held bool) {
	for i := range allocations {
		if a := &allocations[i]; a.Takes(u) && api(a.Owner) != except {
			names = append(names, a.Who())
		}
	}
	return compact(names), len(names) > 0
}

// inTheWay names whom a GPU's change waits for: all who have something of it, or where the
// front-end alone changes those who have it through another one than the new.
func (in *Input) inTheWay(u gpu.UUID, have, to Layout) (names []string, waits bool) {
	if have.API = to.API; have.Equal(to) {
		return holdersOf(in.Allocations, u, api(to.API))
	}
	return holdersOf(in.Allocations, u, "")
}

// between adds what a change is about where that is not the mode: how the GPU is shared, and
// the front-ends.
func (b Blocked) between(have, to Layout) Blocked {
	b.API = have.speaksOther(to)
	switch {
	case b.API:
		b.From += " (api: " + string(api(have.API)) + ")"
		b.To += " (api: " + string(api(to.API)) + ")"
	case b.From == b.To: // shared in another way
		b.From, b.To = b.From+have.division(), b.To+to.division()
	}
	return b
}

// inferLayout is inferLayout of the allocations. Where the lists have no room for all devices of
// such a layout, the GPU offers nothing, and those that are held are listed alone.
func (in *Input) inferLayout(d *gpu.Device, to Layout) Layout {
	c := inferLayout(in.Allocations, d, to, in.Unit)
	if !in.rows.Fits(d.UUID, c) {
		return Layout{Known: true}
	}
	in.rows.Add(d.UUID, c)
	return c
}

// inferLayout says how a GPU must be laid out for its allocations to be there, with the caps
// that their holders were given, through the front-end that they came by.
func inferLayout(allocations []ledger.Allocation, d *gpu.Device, to Layout, unit gpu.MiB) Layout {
	c := Layout{Known: true}
	var pieces []piece.Piece
	for i := range allocations {
		for j := range allocations[i].Grants {
			g := &allocations[i].Grants[j]
			if g.GPU != d.UUID || g.NoRoom || !g.Kind().Known() ||
				c.Offers && (g.Kind() != c.Kind || allocations[i].Owner != c.API) {
				continue // two kinds at once: the first one counts, and the other's devices are listed as leaving
			}
			c.Offers, c.API, c.Kind = true, allocations[i].Owner, g.Kind()
			pieces = append(pieces, g.Piece)
		}
	}
	if c.Offers {
		var wish piece.Division
		if to.Offers {
			wish = to.Division
		}
		c.Division = piece.Infer(pieces, d, wish, unit)
	}
	return c
}
