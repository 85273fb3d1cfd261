// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"cmp"
	"fmt"
	"slices"

	"example.com/gpu-agent/internal/brief"
	"example.com/gpu-agent/internal/config"
	"example.com/gpu-agent/internal/desk"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
	"example.com/gpu-agent/pkg/timeslice"
)

// Cut is how a GPU is divided: which resource its devices belong to and how
// many there are. Two that are Equal have the same devices.
type Cut struct {
	// Known is false for a GPU of which nothing is known: it offers nothing,
	// and anything may be made of it.
	Known bool
	// Offers is false for a GPU in mode off.
	Offers bool
	Kind   ledger.Kind
	// N is the number of devices: 1, the memory units, or the replicas.
	N int
	// Unit is the size of a memory unit, 0 for other kinds and where it is not
	// known.
	Unit gpu.MiB
	// Slots are the MIG devices of kind Placement, in the order of the list; N counts
	// them.
	Slots []mig.Slot
	// Alone are the numbers of the only devices of kind Units or Replica, where they
	// linger without the others; empty where the first N are meant.
	Alone ledger.UnitSet
}

// Equal reports whether both have the same devices.
func (c Cut) Equal(o Cut) bool {
	return c.Known == o.Known && c.Offers == o.Offers && c.Kind == o.Kind && c.N == o.N && c.Unit == o.Unit &&
		slices.Equal(c.Slots, o.Slots) && slices.Equal(c.Alone, o.Alone)
}

// ids returns the device IDs of a GPU that is cut so.
func (c Cut) ids(u gpu.UUID) []string {
	if !c.Offers {
		return nil
	}
	switch {
	case c.Kind == ledger.Whole:
		return []string{string(u)}
	case c.Kind == ledger.Placement:
		out := make([]string, len(c.Slots))
		for i, s := range c.Slots {
			out[i] = mig.ID(u, s)
		}
		return out
	case len(c.Alone) > 0:
		out := make([]string, 0, c.N)
		for n := range c.Alone.All() {
			out = append(out, timeslice.ID(u, n))
		}
		return out
	}
	out := make([]string, c.N)
	for i := range out {
		out[i] = timeslice.ID(u, i)
	}
	return out
}

// sameUnits reports whether both offer memory units. Their number follows from
// what the driver keeps for itself, which can move by some MiB from one reading
// to the next: a GPU keeps the number that it was first cut with.
func (c Cut) sameUnits(o Cut) bool {
	return c.Offers && o.Offers && c.Kind == ledger.Units && o.Kind == ledger.Units && c.N > 0 && c.Unit == o.Unit
}

// mode is the word that people use for the cut.
func (c Cut) mode() string {
	switch {
	case !c.Known:
		return "unset"
	case !c.Offers:
		return string(config.Off)
	case c.Kind == ledger.Whole:
		return string(config.Whole)
	case c.Kind == ledger.Placement:
		return string(config.MIG)
	default:
		return string(config.Shared)
	}
}

// cutOf is the cut that a wish means on a GPU that has nothing to do with MIG. ok
// is false where the wish is to leave the GPU as it is.
func cutOf(w config.Want, d *gpu.Device, unit gpu.MiB) (c Cut, ok bool) {
	switch w.Mode {
	case config.Whole:
		return Cut{Known: true, Offers: true, Kind: ledger.Whole, N: 1}, true
	case config.Off:
		return Cut{Known: true}, true
	case config.Shared:
		if w.Replicas > 0 {
			return Cut{Known: true, Offers: true, Kind: ledger.Replica, N: w.Replicas}, true
		}
		return Cut{Known: true, Offers: true, Kind: ledger.Units, N: timeslice.Units(d, unit), Unit: unit}, true
	default:
		return Cut{}, false
	}
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
	// Holders is sorted, each once.
	Holders []string
}

// String is a sentence for an annotation.
func (b Blocked) String() string {
	return fmt.Sprintf("GPU %d (%s) stays %s, not yet %s, until these end: %s", b.Index, b.GPU, b.From, b.To, brief.List(b.Holders, mostNamed))
}

// Changes is what a plan comes to.
type Changes struct {
	// Cuts has every GPU of the inventory whose cut is known after the plan.
	Cuts map[gpu.UUID]Cut
	// Recut names the GPUs whose cut changes now, in index order.
	Recut []gpu.UUID
	// Work is what is to be done to the hardware now, in index order.
	Work []Work
	// Leaving has the MIG devices that the target does not keep, with the reason:
	// they are withdrawn, or leave with their holder.
	Leaving map[gpu.UUID]map[mig.Slot]string
	// MIG is what the desk must know of GPUs that offer MIG devices.
	MIG map[gpu.UUID]desk.MIGView
	// Made are the instances that are this agent's from now on, since the
	// partition keeps them or a claim has them.
	Made map[gpu.UUID][]mig.Slot
	// Trouble is why claims do not get their instances now, by key. Their pods are
	// told: no other tenant's pod is named.
	Trouble map[string]string
	// Notes are remarks for people, in index order.
	Notes []string
	// Blocked is in index order.
	Blocked []Blocked
	// Busy says that a process which no claim covers is on a MIG instance, Process
	// that a change or a container waits for the end of one.
	Busy, Process bool
	// Crowded says of GPUs, in index order, that they offer nothing until other
	// devices have left the kubelet's lists.
	Crowded []string
	// Refused says of GPUs, in index order, why they cannot be what is wanted
	// whoever holds them. They offer nothing.
	Refused []string
}

// blocks reports whether a GPU's change waits.
func (c *Changes) blocks(u gpu.UUID) bool {
	return slices.ContainsFunc(c.Blocked, func(b Blocked) bool { return b.GPU == u })
}

// PlanInput is everything that a plan is made from.
type PlanInput struct {
	Inventory *gpu.Inventory
	Claims    []desk.Claim
	Wanted    []config.Want
	// Cuts is how the GPUs are divided now.
	Cuts map[gpu.UUID]Cut
	// Others is why GPUs are somebody else's to give out.
	Others map[gpu.UUID]string
	Names  *desk.Names
	// Unit is what a memory unit is from now on.
	Unit gpu.MiB
	MIG  MIGInput

	past map[gpu.UUID][]pastCut // what GPUs had before and is still listed
	rows *rows                  // what is listed before the plan, and what it adds
}

// Plan decides which GPUs change their cut now and which must wait. It is pure.
//
// A GPU without a known cut that claims are on (the agent has restarted) has
// the cut that its claims speak of. A GPU with claims keeps its cut; one
// without takes the wanted one. GPUs that wanted does not name, or that it
// leaves as they are, keep what they have. A GPU whose new devices the kubelet's lists
// have no room for now is withdrawn, and cut when others have left them.
func Plan(in PlanInput) Changes {
	out := Changes{Cuts: map[gpu.UUID]Cut{}, Leaving: map[gpu.UUID]map[mig.Slot]string{}, MIG: map[gpu.UUID]desk.MIGView{}, Made: map[gpu.UUID][]mig.Slot{}, Trouble: map[string]string{}}
	want := map[gpu.UUID]config.Want{}
	for _, w := range in.Wanted {
		want[w.GPU] = w
	}
	in.rows = in.listed()
	for i := range in.Inventory.GPUs {
		d := &in.Inventory.GPUs[i]
		have := in.Cuts[d.UUID]
		if in.concernsMIG(d, want[d.UUID]) {
			in.planMIG(d, want[d.UUID], have, &out)
			continue
		}
		to, ok := cutOf(want[d.UUID], d, in.Unit)
		holders, held := holdersOf(in.Claims, d.UUID)
		if !have.Known && held {
			have = in.inferCut(d, to)
		}
		if !ok || have.sameUnits(to) {
			to = have
		}
		switch other := in.Others[d.UUID]; {
		case !to.Offers:
		case other != "":
			out.Refused = append(out.Refused, describe(d)+" is not offered: "+other)
			to = Cut{Known: true}
		}
		if !have.Equal(to) && !held && !in.rows.fits(d.UUID, to) {
			// What it has is withdrawn all the same: so it leaves the lists, and there
			// is room in the end.
			out.Crowded = append(out.Crowded, crowded(d, to))
			to = Cut{Known: true}
		}
		switch {
		case have.Equal(to):
		case held:
			out.Blocked = append(out.Blocked, Blocked{GPU: d.UUID, Index: d.Index, From: have.mode(), To: to.mode(), Holders: holders})
			to = have
		default:
			out.Recut = append(out.Recut, d.UUID)
		}
		if to.Known {
			out.Cuts[d.UUID] = to
			in.rows.add(d.UUID, to)
		}
		if mode := want[d.UUID].Mode; !held && d.Fault == "" && in.Others[d.UUID] == "" && (mode == config.Whole || mode == config.Shared) &&
			d.MIG.Pending != nil && *d.MIG.Pending {
			// MIG mode would come with the next reset. To take that back touches
			// nothing that is in force.
			out.Work = append(out.Work, Work{GPU: d.UUID, Steps: []mig.Step{{Op: mig.Disable}}})
		}
	}
	return out
}

// holdersOf names who has a claim on a GPU, and whether anyone has.
func holdersOf(claims []desk.Claim, u gpu.UUID) (names []string, held bool) {
	for i := range claims {
		if claims[i].On(u) {
			names = append(names, claims[i].Holder.String())
		}
	}
	slices.Sort(names)
	return slices.Compact(names), len(names) > 0
}

// inferCut is inferCut of the claims. Where the lists have no room for all devices of
// such a cut, the GPU offers nothing, and those that are held are listed alone.
func (in *PlanInput) inferCut(d *gpu.Device, to Cut) Cut {
	c := inferCut(in.Claims, d, to, in.Unit)
	if !in.rows.fits(d.UUID, c) {
		return Cut{Known: true}
	}
	in.rows.add(d.UUID, c)
	return c
}

// inferCut says how a GPU must have been cut for its claims to be there, with the caps
// that their holders were given.
func inferCut(claims []desk.Claim, d *gpu.Device, to Cut, unit gpu.MiB) Cut {
	c := Cut{Known: true}
	of := 0
	for i := range claims {
		for j := range claims[i].Grants {
			g := &claims[i].Grants[j]
			if g.GPU != d.UUID || c.Offers && g.Kind != c.Kind {
				continue // two kinds at once: the first claim's stands, the other's devices are listed as leaving
			}
			c.Offers, c.Kind = true, g.Kind
			switch g.Kind {
			case ledger.Whole:
				c.N = 1
			case ledger.Units:
				c.N, c.Unit = max(c.N, g.Units.Most()+1), max(c.Unit, g.Unit)
			case ledger.Replica:
				c.N, of = max(c.N, g.Replica+1), max(of, g.Of)
			}
		}
	}
	switch {
	case c.Kind == ledger.Units:
		size := cmp.Or(c.Unit, unit)
		all := timeslice.Units(d, size)
		if all >= c.N {
			c.N, c.Unit = all, size // they agree with it
		}
	// The number of replicas cannot be read off a few of them, but off what they may
	// have; else, where the wish agrees with what is held, it was the wish before, too.
	case c.Kind == ledger.Replica && of > 0:
		c.N = max(c.N, of)
	case c.Kind == ledger.Replica && to.Offers && to.Kind == ledger.Replica && to.N >= c.N:
		return to
	}
	return c
}
