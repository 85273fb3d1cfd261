// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"example.com/gpu-agent/internal/config"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
)

// MIGInput is the part of Input for GPUs with MIG.
type MIGInput struct {
	// Cards has the card of each GPU that is capable of MIG.
	Cards map[gpu.UUID]*mig.Card
	// Made are the instances that this agent has made or adopted.
	Made map[gpu.UUID]map[mig.Placement]bool
	// Reclaim is true if idle instances that this agent did not make may be destroyed.
	Reclaim bool
	// Working is the work in progress on each GPU.
	Working map[gpu.UUID]*Work
	// Expired are instances on demand that have been idle longer than --idle-instance-ttl.
	Expired map[gpu.UUID][]mig.Placement
	// Deferred are the wants that must not be tried again yet.
	Deferred map[Want]bool
	// Stuck is why a recent change of a GPU's MIG mode failed. NeverReset is true if no GPU may be
	// reset for a change of the MIG mode.
	Stuck      map[gpu.UUID]status.Cause
	NeverReset bool
}

// Work is what has to be done to the hardware of one GPU.
type Work struct {
	GPU   gpu.UUID
	Steps []mig.Step
	// Allocation is the ID of the allocation that waits for the work. Empty if the partition wants
	// it. Placement is the instance for the allocation.
	Allocation string
	Placement  mig.Placement
	// Leaving are the devices that stay withdrawn meanwhile, with the reason.
	Leaving map[mig.Placement]status.Cause
}

// String describes the work: "destroy 1g.10gb@0, create 3g.40gb@0".
func (w *Work) String() string {
	words := make([]string, len(w.Steps))
	for i, s := range w.Steps {
		words[i] = s.String()
	}
	return strings.Join(words, ", ")
}

// Want returns what the work makes for an allocation.
func (w *Work) Want() Want { return Want{w.Allocation, w.GPU, w.Placement} }

// Takes reports whether the work takes something away from the hardware.
func (w *Work) Takes() bool {
	return slices.ContainsFunc(w.Steps, func(s mig.Step) bool { return s.Op == mig.Destroy || s.Op == mig.Disable })
}

// concernsMIG reports whether a GPU is planned by the rules of MIG: it is in MIG mode, is wanted in
// it, is being worked on, or has allocations of instances. A pending mode that is not wanted does
// not count.
func (in *Input) concernsMIG(d *gpu.Device, w config.Want) bool {
	return w.Mode == config.MIG || w.Mode == config.Dynamic || d.MIG.Enabled ||
		in.MIG.Working[d.UUID] != nil ||
		slices.ContainsFunc(in.Allocations, func(c ledger.Allocation) bool {
			return c.Kind().InMIG() && c.Takes(d.UUID)
		})
}

// gpuWithMIG is a GPU with everything that its plan depends on.
type gpuWithMIG struct {
	*gpu.Device
	card *mig.Card
	// standing has every instance. Those that must stay are pinned.
	standing []mig.Standing
	// held maps each placement of an allocation to the allocation.
	held map[mig.Placement]*ledger.Allocation
	// missing are the placements of held without an instance. They are pinned, so that nothing else
	// gets their room.
	missing []mig.Standing
	// wishes are the allocations whose containers are about to start and whose instances do not
	// exist, the longest waiting first.
	wishes []wish
	// holders are the names of those with MIG devices of the GPU, others of those that have it as
	// something else.
	holders, others []string
	// owner is the front-end of the first holder.
	owner ledger.FrontEnd
}

// Want is an instance that an allocation waits for. Without a placement, it is the MIG mode.
type Want struct {
	Allocation string
	GPU        gpu.UUID
	Placement  mig.Placement
}

type wish struct {
	allocation *ledger.Allocation
	placement  mig.Placement
}

// Reasons why an instance must stay.
const (
	heldReason    = string(status.HeldByPods)
	busyReason    = string(status.BusyProcess)
	foreignReason = string(status.ForeignInstance)
)

// notKept is the reason of a device that the target does not have.
var notKept = status.Cause{Reason: status.NotInPartition, Message: "the node's partition does not keep it"}

// inspect gathers what a GPU's plan depends on. It fails if the GPU has no card, or an instance
// that this version does not understand.
func (in *Input) inspect(d *gpu.Device) (*gpuWithMIG, error) {
	g := &gpuWithMIG{Device: d, held: map[mig.Placement]*ledger.Allocation{}}
	if g.card = in.MIG.Cards[d.UUID]; g.card == nil {
		return g, status.Why(status.MIGUnsupported, "%s cannot do MIG", d.Name())
	}
	stands := map[mig.Placement]bool{}
	for i := range d.MIG.Instances {
		placement, err := mig.PlacementOf(&d.MIG.Instances[i])
		if err != nil {
			return g, status.Why(status.InstanceUnknown, "%s has an instance that this version does not understand: %v",
				d.Name(), err)
		}
		stands[placement] = d.MIG.Instances[i].CI >= 0
	}
	for i := range in.Allocations {
		c := &in.Allocations[i]
		if !c.Takes(d.UUID) {
			continue
		}
		if !c.Kind().InMIG() {
			g.others = append(g.others, c.Who())
			continue
		}
		for j := range c.Grants {
			has := &c.Grants[j]
			if has.GPU != d.UUID || has.NoRoom {
				continue
			}
			if g.holders = append(g.holders, c.Who()); len(g.holders) == 1 {
				g.owner = c.Owner
			}
			at := piece.At(has.Piece)
			placement, ok := g.card.Placement(at.Profile, at.Start, at.CI)
			if !ok {
				continue // from another driver's table; it cannot be created
			}
			g.held[placement] = c
			if !stands[placement] {
				g.missing = append(g.missing, mig.Standing{
					Placement: placement, Pinned: true, Holder: c.Who(), Reason: heldReason, Yields: c.Tier == ledger.Spot,
				})
				if !c.Asked.IsZero() {
					g.wishes = append(g.wishes, wish{c, placement})
				}
			}
		}
	}
	slices.SortFunc(g.wishes, func(a, b wish) int {
		return cmp.Or(a.allocation.Asked.Compare(b.allocation.Asked), cmp.Compare(a.allocation.ID, b.allocation.ID),
			mig.ComparePlacements(a.placement, b.placement))
	})
	for i := range d.MIG.Instances {
		inst := &d.MIG.Instances[i]
		placement, _ := mig.PlacementOf(inst)
		s := mig.Standing{Placement: placement, Empty: inst.CI < 0}
		holder, held := g.held[placement]
		switch {
		case held && !s.Empty:
			s.Pinned, s.Holder, s.Reason, s.Yields = true, holder.Who(), heldReason, holder.Tier == ledger.Spot
		case inst.Busy:
			s.Pinned, s.Holder, s.Reason = true, "a process that no allocation covers", busyReason
		case !in.MIG.Reclaim && !in.mine(d.UUID, s):
			s.Pinned, s.Reason = true, foreignReason
			s.Holder = "an instance that this agent did not make and --foreign-instances reclaim would destroy"
		}
		g.standing = append(g.standing, s)
	}
	return g, nil
}

// mine reports whether an instance is the agent's. An empty GPU instance is the agent's if one of
// the agent's compute instances was being created in it, or destroyed.
func (in *Input) mine(u gpu.UUID, s mig.Standing) bool {
	if in.MIG.Made[u][s.Placement] {
		return true
	}
	if s.Empty {
		for m := range in.MIG.Made[u] {
			if m.GPUInstance() == s.Placement.GPUInstance() {
				return true
			}
		}
	}
	return false
}

// placementsThrough returns the layout of a GPU in MIG mode that offers placements through a
// front-end.
func placementsThrough(f ledger.FrontEnd, placements []mig.Placement) Layout {
	c := Divided(piece.Instances(placements))
	c.API = f
	return c
}

// Names joins the names of MIG devices, for the log.
func Names(placements []mig.Placement) string {
	words := make([]string, len(placements))
	for i, s := range placements {
		words[i] = s.String()
	}
	return strings.Join(words, " ")
}

// target returns the hardware target of a wanted layout. ok is false if it has none.
func target(w config.Want) (to mig.Target, ok bool) {
	switch w.Mode {
	case config.MIG:
		return mig.Target{MIG: true, OnDemand: w.OnDemand, Geometry: w.Geometry}, true
	case config.Whole, config.Shared:
		return mig.Target{}, true
	case config.Keep, config.Off, config.Dynamic:
	}
	return mig.Target{}, false
}

// targetText describes a wanted layout, for people.
func targetText(w config.Want) string {
	switch {
	case w.Mode != config.MIG:
		return string(w.Mode)
	case w.OnDemand:
		return "MIG on demand"
	case len(w.Geometry) == 0:
		return "MIG without instances"
	default:
		return mig.DescribeCounts(w.Geometry)
	}
}

// planMIG plans a GPU that concerns MIG, see concernsMIG.
func (in *Input) planMIG(d *gpu.Device, w config.Want, have Layout, out *Changes) {
	g, err := in.inspect(d)
	if err != nil {
		in.unplanned(d, w, have, err, out)
		return
	}
	if odd := g.card.Odd(); odd != nil && w.OnDemand && len(w.Profiles) == 0 {
		out.addCondition(status.Noted, d.UUID, status.Why(status.ProfileUnknown,
			"%s offers all of its MIG profiles that this version understands, and not the others: %s",
			d.Name(), strings.NewReplacer(": "+gpu.ErrInvalid.Error(), "", "\n", "; ").Replace(odd.Error())))
	}
	if !have.Known && len(g.holders) > 0 {
		have = placementsThrough(g.owner, nil) // after a restart of the agent
	}
	if !have.Known && len(g.others) > 0 {
		have = in.inferLayout(d, Layout{})
	}
	if w.Mode == config.Dynamic || w.Mode == config.Keep && have.Dynamic {
		in.planDynamic(g, w, have, out)
		return
	}
	to, leaving := in.next(g, w, have, out)
	work := in.MIG.Working[d.UUID]
	if work == nil && have.InMIG() && to.Offers && !have.Equal(to) {
		// Withdraw offered placements without an instance too, before the work begins.
		for _, s := range g.of(have) {
			if _, goes := leaving[s]; !goes && !slices.Contains(to.Placements, s) {
				leaving[s] = notKept
			}
		}
	}
	switch can := work == nil && d.Fault == "" && in.Others[d.UUID] == ""; {
	// An allocation gets its instance even if the partition has changed since, because its pod
	// could not end otherwise.
	case can && (to.Dynamic && len(g.holders)+len(g.others) > 0 || in.otherMode(g, w)):
		in.switchMode(g, w, leaving, out)
	case can && d.MIG.Enabled:
		in.grant(g, leaving, w, out)
	default:
		in.postpone(g, nil, out)
	}
	in.finishMIG(g, have, to, leaving, out)
}

// unplanned keeps a GPU as it is if it cannot be planned, and reports why. For a GPU that cannot be
// read, another condition reports the fault.
func (in *Input) unplanned(d *gpu.Device, w config.Want, have Layout, err error, out *Changes) {
	planned := w.Mode == config.MIG || w.Mode == config.Dynamic ||
		d.MIG.Enabled && w.Mode != config.Off && w.Mode != config.Keep
	if d.Fault == "" && planned {
		out.addCondition(status.Refused, d.UUID, status.CauseOf(err, status.MIGUnsupported))
	}
	if have.Known {
		out.Layouts[d.UUID] = have
	}
	for i := range in.Allocations {
		if c := &in.Allocations[i]; c.Kind().InMIG() && c.Takes(d.UUID) && d.Fault == "" && d.MIG.Capable {
			out.Trouble[c.ID] = status.CauseOf(err, status.MIGUnsupported)
		}
	}
}

// next returns the layout that a GPU gets now. leaving maps the devices that are withdrawn, or
// leave when their holder ends, to the reason.
func (in *Input) next(
	g *gpuWithMIG, w config.Want, have Layout, out *Changes,
) (to Layout, leaving map[mig.Placement]status.Cause) {
	held := len(g.holders)+len(g.others) > 0
	offers := have.InMIG()
	wanted, ok := target(w)
	block := func(reason status.Reason, by []string) {
		b := Blocked{
			GPU: g.UUID, Index: g.Index, From: g.now(have), To: targetText(w), Reason: reason, Holders: compact(by),
		}
		out.Blocked = append(out.Blocked, b.between(have, Layout{Offers: ok, API: w.API}))
	}
	leaving = map[mig.Placement]status.Cause{}
	switch work := in.MIG.Working[g.UUID]; {
	case work != nil:
		return have, work.Leaving
	case in.Others[g.UUID] != "" && w.Mode != config.Off:
		out.addCondition(status.Refused, g.UUID, in.notOffered(g.Device))
		if !held {
			return Layout{Known: true}, leaving
		}
		return have, g.all(have, status.Why(status.OtherOwner, "another program gives the GPU out"))
	case g.Fault != "":
		return have, leaving // do not touch a GPU that cannot be read
	case w.Mode == config.Off && held:
		block(status.HeldByPods, slices.Concat(g.holders, g.others))
		return have, g.all(have, status.Why(status.NotInPartition, "the node's partition switches the GPU off"))
	case w.Mode == config.Off:
		return Layout{Known: true}, leaving
	case !ok: // the wish is to leave it as it is
		if offers && g.MIG.Enabled {
			return placementsThrough(have.API, g.listed()), leaving
		}
		return have, leaving
	case wanted.MIG && len(g.others) > 0:
		block(status.HeldByPods, g.others)
		return have, leaving
	case !wanted.MIG && !g.MIG.Enabled && held:
		// The holders have lost the MIG mode, as after a reboot, and it is not wanted back.
		block(status.HeldByPods, slices.Concat(g.holders, g.others))
		if offers {
			return placementsThrough(have.API, nil), leaving
		}
		return have, leaving
	}
	to = in.follow(g, w, wanted, have, leaving, block, out)
	if others, held := holdersOf(in.Allocations, g.UUID, frontEndOf(w.API)); held && to.Offers {
		// It stays with the front-end of its holders.
		if to.API = g.owner; have.Offers {
			to.API = have.API
		}
		if frontEndOf(to.API) != frontEndOf(w.API) {
			other := status.Why(status.NotInPartition, "the node's partition offers the GPU through %s",
				frontEndOf(w.API))
			maps.Copy(leaving, g.all(to, other))
			if !out.Blocks(g.UUID) {
				block(status.HeldByPods, others)
			}
		}
	}
	return to, leaving
}

// all returns one reason for every MIG device of a GPU: those that exist, those that allocations
// have, and those that its layout offers.
func (g *gpuWithMIG) all(have Layout, why status.Cause) map[mig.Placement]status.Cause {
	leaving := map[mig.Placement]status.Cause{}
	for _, s := range g.standing {
		leaving[s.Placement] = why
	}
	for s := range g.held {
		leaving[s] = why
	}
	for _, s := range g.of(have) {
		leaving[s] = why
	}
	return leaving
}

// postpone sets why nothing is done on a GPU now, for the allocations that wait for an instance,
// and for plain ones that wait for the MIG mode. Pods read this, so it names no other tenant's pod.
func (in *Input) postpone(g *gpuWithMIG, plain []*ledger.Allocation, out *Changes) {
	why := status.Why(status.MIGOff, "%s is not in MIG mode", g.Name())
	switch work := in.MIG.Working[g.UUID]; {
	case work != nil:
		why = status.Why(status.GPUChange, "%s is being worked on: %s", g.Name(), work)
	case in.Others[g.UUID] != "":
		why = status.Why(status.OtherOwner, "%s is left alone: another program gives it out", g.Name())
	case g.Fault != "":
		why = status.Why(status.GPUUnhealthy, "%s: %s", g.Name(), g.Fault)
	}
	for _, wish := range g.wishes {
		out.Trouble[wish.allocation.ID] = why
	}
	await(plain, why, out)
}

// follow plans what the partition wants of a GPU, if nothing else prevents that. It returns the
// GPU's layout until the plan is carried out, and adds to leaving the devices that the target does
// not keep.
func (in *Input) follow(
	g *gpuWithMIG, w config.Want, wanted mig.Target, have Layout, leaving map[mig.Placement]status.Cause,
	block func(status.Reason, []string), out *Changes,
) Layout {
	plan, err := in.change(g, wanted)
	if err == nil && wanted.OnDemand {
		err = in.offersNone(g, w)
	}
	if err != nil {
		out.addCondition(status.Refused, g.UUID,
			status.Why(status.CauseOf(err, status.NoRoom).Reason, "%s cannot be %s: %v", g.Name(), targetText(w), err))
		return have
	}
	keep := map[mig.Placement]bool{}
	for _, s := range plan.Keep {
		keep[s] = true
	}
	if !wanted.OnDemand {
		for _, s := range slices.Concat(g.standing, g.missing) {
			if !keep[s.Placement] {
				leaving[s.Placement] = notKept
			}
		}
	}
	var by []string
	for _, b := range plan.Blocked {
		by = append(by, fmt.Sprintf("%s (%s)", b.Holder, b.Placement))
		out.Process = out.Process || b.Reason == busyReason
	}
	if len(by) > 0 {
		block(status.Reason(plan.Blocked[0].Reason), by)
		out.Blocked[len(out.Blocked)-1].In = plan.Blocked
	}
	if len(plan.Steps) > 0 {
		out.Work = append(out.Work, Work{GPU: g.UUID, Steps: plan.Steps, Leaving: leaving})
	}
	if wanted.OnDemand {
		keep = nil // a foreign instance that fits is given out, and is adopted once it is held
	}
	if wanted.MIG && g.MIG.Enabled {
		in.adopt(g, keep, out)
	}
	switch {
	case wanted.OnDemand && g.MIG.Enabled:
		return placementsThrough(w.API, in.onDemand(g, w))
	case wanted.MIG:
		return placementsThrough(w.API, g.listed())
	case have.InMIG():
		return placementsThrough(have.API, g.listed())
	default:
		return Layout{Known: true}
	}
}

// change plans the way from a GPU's instances to its target. Missing instances of allocations are
// created again, if the target has room for them there.
func (in *Input) change(g *gpuWithMIG, to mig.Target) (mig.Plan, error) {
	switch {
	case len(g.missing) == 0 || to.OnDemand:
		return mig.Change(&g.MIG, g.card, g.standing, to)
	case to.MIG && !g.MIG.Enabled:
		// The holders have lost the MIG mode, as after a reboot. Restore the mode first.
		return mig.Change(&g.MIG, g.card, g.standing, mig.Target{MIG: true, OnDemand: true})
	}
	plan, err := mig.Change(&g.MIG, g.card, append(slices.Clone(g.standing), g.missing...), to)
	if err != nil || len(plan.Blocked) > 0 {
		return plan, err
	}
	for _, s := range g.missing {
		plan.Steps = append(plan.Steps, mig.Step{Op: mig.Create, Placement: s.Placement})
	}
	return plan, nil
}

// grant plans the instance of the first allocation that waits for one, instead of other work on the
// GPU. If no allocation waits and there is no other work, it destroys empty instances, and
// instances on demand that have been idle for long enough.
func (in *Input) grant(g *gpuWithMIG, leaving map[mig.Placement]status.Cause, w config.Want, out *Changes) {
	u := g.UUID
	for i, wish := range g.wishes {
		if in.MIG.Deferred[Want{wish.allocation.ID, u, wish.placement}] {
			continue
		}
		plan, err := g.card.Make(g.standing, wish.placement)
		switch {
		case err != nil:
			out.Trouble[wish.allocation.ID] = status.CauseOf(err, status.NoRoom)
		case len(plan.Blocked) > 0:
			b := plan.Blocked[0]
			out.Process = out.Process || b.Reason == busyReason
			who := b.Holder
			if c := g.held[b.Placement]; c != nil && b.Reason == heldReason {
				who = c.Holder.Told(wish.allocation.Holder.Namespace, c.ID)
			}
			out.Trouble[wish.allocation.ID] = status.Why(status.Reason(b.Reason), "%s waits for the end of %s (%s)",
				wish.placement, who, b.Placement)
		}
		if len(plan.Steps) == 0 {
			continue
		}
		out.Work = slices.DeleteFunc(out.Work, func(o Work) bool { return o.GPU == u })
		work := Work{
			GPU: u, Steps: plan.Steps, Allocation: wish.allocation.ID, Placement: wish.placement, Leaving: leaving,
		}
		out.Work = append(out.Work, work)
		out.Trouble[wish.allocation.ID] = status.Why(status.GPUChange, "its instance is being made: %s", &work)
		for _, next := range g.wishes[i+1:] {
			if next.allocation != wish.allocation {
				out.Trouble[next.allocation.ID] = status.Why(status.GPUChange, "%s comes after other work on %s: %s",
					next.placement, g.Name(), &work)
			}
		}
		return
	}
	if !w.OnDemand || len(g.wishes) > 0 || slices.ContainsFunc(out.Work, func(o Work) bool { return o.GPU == u }) {
		return
	}
	var steps []mig.Step
	for _, s := range g.standing {
		if !s.Pinned && (s.Empty || slices.Contains(in.MIG.Expired[u], s.Placement)) {
			steps = append(steps, mig.Step{Op: mig.Destroy, Placement: s.Placement})
		}
	}
	if len(steps) > 0 {
		out.Work = append(out.Work, Work{GPU: u, Steps: steps, Leaving: leaving})
	}
}

// adopt makes the agent the owner of the instances that an allocation has or a geometry keeps.
func (in *Input) adopt(g *gpuWithMIG, keep map[mig.Placement]bool, out *Changes) {
	for _, s := range g.standing {
		if _, held := g.held[s.Placement]; (held || keep[s.Placement] && s.Reason != busyReason) &&
			!in.MIG.Made[g.UUID][s.Placement] {
			out.Made[g.UUID] = append(out.Made[g.UUID], s.Placement)
		}
	}
}

// onDemand returns the placements of every profile that the partition allows.
func (in *Input) onDemand(g *gpuWithMIG, w config.Want) []mig.Placement {
	placements := g.card.Placements()
	if len(w.Profiles) > 0 {
		placements = slices.DeleteFunc(slices.Clone(placements), func(s mig.Placement) bool {
			return !slices.Contains(w.Profiles, s.Profile)
		})
	}
	return placements
}

// offersNone returns why a GPU would offer nothing on demand. It returns nil if the GPU would offer
// something, or if its driver reports that only in MIG mode.
func (in *Input) offersNone(g *gpuWithMIG, w config.Want) error {
	if len(in.onDemand(g, w)) > 0 || !g.MIG.Enabled && !g.card.Known() {
		return nil
	}
	return status.Why(status.PartitionUnfit,
		"its driver reports no placement that this version understands, so it would offer nothing")
}

// of returns the placements of a layout that the GPU's card has.
func (g *gpuWithMIG) of(c Layout) (out []mig.Placement) {
	for _, s := range c.Placements {
		if s, ok := g.card.Placement(s.Profile, s.Start, s.CI); ok {
			out = append(out, s)
		}
	}
	return out
}

// listed returns the instances that exist and are not empty.
func (g *gpuWithMIG) listed() []mig.Placement {
	var out []mig.Placement
	for _, s := range g.standing {
		if !s.Empty {
			out = append(out, s.Placement)
		}
	}
	return out
}

// now describes the GPU as it is now.
func (g *gpuWithMIG) now(have Layout) string {
	switch {
	case !g.MIG.Enabled:
		return have.Mode()
	case len(g.standing) == 0:
		return "MIG without instances"
	default:
		return mig.Describe(g.listed())
	}
}

// finishMIG sets what a GPU offers, and what the ledger needs to know of it.
func (in *Input) finishMIG(g *gpuWithMIG, have, to Layout, leaving map[mig.Placement]status.Cause, out *Changes) {
	u := g.UUID
	if to.Known {
		out.Layouts[u] = to
	}
	if !to.InMIG() || !have.InMIG() || have.otherFrontEnd(to) || have.Dynamic && (!to.Dynamic || have.Unit != to.Unit) {
		if !have.Equal(to) && (have.Offers || to.Offers || have.Known != to.Known) {
			out.Changing = append(out.Changing, u)
		}
		if !to.InMIG() {
			return
		}
	}
	if len(leaving) > 0 {
		out.Leaving[u] = leaving
	}
	v := ledger.MIG{Card: g.card}
	for _, s := range g.standing {
		_, held := g.held[s.Placement]
		_, goes := leaving[s.Placement]
		switch {
		case held && !s.Empty:
		case s.Reason == foreignReason && !s.Empty && slices.Contains(to.Placements, s.Placement) && !goes:
			v.Kept = append(v.Kept, s.Placement)
		case s.Pinned:
			v.Occupied = append(v.Occupied, s.Placement)
			out.Busy = out.Busy || s.Reason == busyReason
			if s.Reason == foreignReason {
				out.addCondition(status.Noted, u, status.Why(status.ForeignInstance, "%s has a %s that this agent "+
					"did not make: it stays, unless --foreign-instances is reclaim", g.Name(), s.Placement))
			}
		case !s.Empty:
			v.Warm = append(v.Warm, s.Placement)
		}
	}
	out.MIG[u] = v
}

func compact(words []string) []string {
	words = slices.Clone(words)
	slices.Sort(words)
	return slices.Compact(words)
}
