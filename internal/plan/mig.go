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

// MIGInput is what plans of GPUs with MIG are made from, beside the rest.
type MIGInput struct {
	// Cards says what can stand on each GPU that is capable of MIG.
	Cards map[gpu.UUID]*mig.Card
	// Made are the instances that this agent has made, or taken over.
	Made map[gpu.UUID]map[mig.Placement]bool
	// Reclaim says that foreign instances may be destroyed while they are idle.
	Reclaim bool
	// Working is what is being done to the hardware at this moment.
	Working map[gpu.UUID]*Work
	// Expired are instances on demand that have been idle for long enough.
	Expired map[gpu.UUID][]mig.Placement
	// Deferred are the instances of allocations that are not to be tried again yet. Without
	// a placement it is the MIG mode that an allocation needs.
	Deferred map[Want]bool
	// Stuck is why the MIG mode of a GPU could not be changed of late, and NeverReset says
	// that no GPU may be reset for it.
	Stuck      map[gpu.UUID]status.Cause
	NeverReset bool
}

// Work is what is to be done to one GPU's hardware.
type Work struct {
	GPU   gpu.UUID
	Steps []mig.Step
	// Allocation is the key of the allocation that wants Placement; empty where the partition
	// wants the work.
	Allocation string
	Placement  mig.Placement
	// Leaving are the devices that stay withdrawn meanwhile.
	Leaving map[mig.Placement]status.Cause
}

// String is the work in words: "destroy 1g.10gb@0, create 3g.40gb@0".
func (w *Work) String() string {
	words := make([]string, len(w.Steps))
	for i, s := range w.Steps {
		words[i] = s.String()
	}
	return strings.Join(words, ", ")
}

// Want is what work for an allocation makes.
func (w *Work) Want() Want { return Want{w.Allocation, w.GPU, w.Placement} }

// Takes reports whether work takes something away from the hardware.
func (w *Work) Takes() bool {
	return slices.ContainsFunc(w.Steps, func(s mig.Step) bool { return s.Op == mig.Destroy || s.Op == mig.Disable })
}

// concernsMIG reports whether a GPU is in MIG mode, or on its way there or back. A
// mode that is pending and not wanted is neither.
func (in *Input) concernsMIG(d *gpu.Device, w config.Want) bool {
	return w.Mode == config.MIG || w.Mode == config.Dynamic || d.MIG.Enabled ||
		in.MIG.Working[d.UUID] != nil ||
		slices.ContainsFunc(in.Allocations, func(c ledger.Allocation) bool {
			return c.Kind().InMIG() && c.Takes(d.UUID)
		})
}

// gpuWithMIG is a GPU and all that counts for its plan.
type gpuWithMIG struct {
	*gpu.Device
	card *mig.Card
	// standing has every instance, those pinned that may not go.
	standing []mig.Standing
	// held are the placements that allocations have.
	held map[mig.Placement]*ledger.Allocation
	// missing are those of them that do not stand, pinned: nothing else may come
	// there.
	missing []mig.Standing
	// wishes are the allocations whose containers are to start and whose instances do not
	// stand, the oldest wish first.
	wishes []wish
	// holders have MIG devices of the GPU, others have it as something else.
	holders, others []string
	// owner is the front-end of the first of holders.
	owner ledger.FrontEnd
}

// Want is an instance that an allocation, named by its key, waits for, or without a
// placement the MIG mode.
type Want struct {
	Allocation string
	GPU        gpu.UUID
	Placement  mig.Placement
}

type wish struct {
	allocation *ledger.Allocation
	placement  mig.Placement
}

// Reasons why an instance may not go.
const (
	heldReason    = string(status.HeldByPods)
	busyReason    = string(status.BusyProcess)
	foreignReason = string(status.ForeignInstance)
)

// notKept is why a device leaves that the target does not have.
var notKept = status.Cause{Reason: status.NotInPartition, Message: "the node's partition does not keep it"}

// look gathers what counts for a GPU's plan. The error says why there can be none.
func (in *Input) look(d *gpu.Device) (*gpuWithMIG, error) {
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
				continue // of another driver's table; nothing can be made of it
			}
			g.held[placement] = c
			if !stands[placement] {
				g.missing = append(g.missing, mig.Standing{
					Placement: placement, Pinned: true, Holder: c.Who(), Reason: heldReason,
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
			s.Pinned, s.Holder, s.Reason = true, holder.Who(), heldReason
		case inst.Busy:
			s.Pinned, s.Holder, s.Reason = true, "a process that no allocation covers", busyReason
		case !in.MIG.Reclaim && !in.mine(d.UUID, s):
			s.Pinned, s.Reason = true, foreignReason
			s.Holder = "an instance that this agent did not make, which --foreign-instances reclaim would let go"
		}
		g.standing = append(g.standing, s)
	}
	return g, nil
}

// mine reports whether an instance is the agent's. A GPU instance that stands empty
// is what is left of a compute instance that was being made in it, or destroyed.
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

// placementsThrough is the layout of a GPU in MIG mode that offers placements.
func placementsThrough(f ledger.FrontEnd, placements []mig.Placement) Layout {
	c := Divided(piece.Instances(placements))
	c.API = f
	return c
}

// Names names MIG devices, for the log.
func Names(placements []mig.Placement) string {
	words := make([]string, len(placements))
	for i, s := range placements {
		words[i] = s.String()
	}
	return strings.Join(words, " ")
}

// target is what a wanted layout means for the hardware; ok is false if it means nothing.
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

// targetText is a wanted layout in words, for people.
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

// planMIG decides for a GPU that is in MIG mode, or on its way there or back.
func (in *Input) planMIG(d *gpu.Device, w config.Want, have Layout, out *Changes) {
	g, err := in.look(d)
	if err != nil {
		in.unplanned(d, w, have, err, out)
		return
	}
	if odd := g.card.Odd(); odd != nil && w.OnDemand && len(w.Profiles) == 0 {
		out.say(status.Noted, d.UUID, status.Why(status.ProfileUnknown,
			"%s offers all of its MIG profiles that this version understands, and not the others: %s",
			d.Name(), strings.NewReplacer(": "+gpu.ErrInvalid.Error(), "", "\n", "; ").Replace(odd.Error())))
	}
	if !have.Known && len(g.holders) > 0 {
		have = placementsThrough(g.owner, nil) // the agent has restarted
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
		// What does not stand is withdrawn before the work like what does.
		for _, s := range g.of(have) {
			if _, goes := leaving[s]; !goes && !slices.Contains(to.Placements, s) {
				leaving[s] = notKept
			}
		}
	}
	switch can := work == nil && d.Fault == "" && in.Others[d.UUID] == ""; {
	// An allocation that was granted is made good, whatever the partition has
	// become since: its holder could not end otherwise.
	case can && (to.Dynamic && len(g.holders)+len(g.others) > 0 || in.otherMode(g, w)):
		in.switchMode(g, w, leaving, out)
	case can && d.MIG.Enabled:
		in.grant(g, leaving, w, out)
	default:
		in.postpone(g, nil, out)
	}
	in.finishMIG(g, have, to, leaving, out)
}

// unplanned leaves a GPU as it is for which there can be no plan, and says why. A GPU
// that cannot be read is said to be faulty elsewhere.
func (in *Input) unplanned(d *gpu.Device, w config.Want, have Layout, err error, out *Changes) {
	planned := w.Mode == config.MIG || w.Mode == config.Dynamic ||
		d.MIG.Enabled && w.Mode != config.Off && w.Mode != config.Keep
	if d.Fault == "" && planned {
		out.say(status.Refused, d.UUID, status.CauseOf(err, status.MIGUnsupported))
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

// next is the layout that a GPU gets now, and the devices that are withdrawn or leave
// with their holder, with the reason.
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
		out.say(status.Refused, g.UUID, in.notOffered(g.Device))
		if !held {
			return Layout{Known: true}, leaving
		}
		return have, g.all(have, status.Why(status.OtherOwner, "somebody else gives the GPU out"))
	case g.Fault != "":
		return have, leaving // what cannot be read is left as it is
	case w.Mode == config.Off && held:
		block(status.HeldByPods, slices.Concat(g.holders, g.others))
		return have, g.all(have, status.Why(status.NotInPartition, "the node's partition switches the GPU off"))
	case w.Mode == config.Off:
		return Layout{Known: true}, leaving
	case !ok: // to be left as it is
		if offers && g.MIG.Enabled {
			return placementsThrough(have.API, g.listed()), leaving
		}
		return have, leaving
	case wanted.MIG && len(g.others) > 0:
		block(status.HeldByPods, g.others)
		return have, leaving
	case !wanted.MIG && !g.MIG.Enabled && held:
		// The mode was lost under them, as in a reboot, and is not wanted back.
		block(status.HeldByPods, slices.Concat(g.holders, g.others))
		if offers {
			return placementsThrough(have.API, nil), leaving
		}
		return have, leaving
	}
	to = in.follow(g, w, wanted, have, leaving, block, out)
	if others, held := holdersOf(in.Allocations, g.UUID, api(w.API)); held && to.Offers {
		// It stays with the front-end through which they have it.
		if to.API = g.owner; have.Offers {
			to.API = have.API
		}
		if api(to.API) != api(w.API) {
			other := status.Why(status.NotInPartition, "the node's partition offers the GPU through %s", api(w.API))
			maps.Copy(leaving, g.all(to, other))
			if !out.Blocks(g.UUID) {
				block(status.HeldByPods, others)
			}
		}
	}
	return to, leaving
}

// all is one reason for everything that a GPU has, that allocations have of it and that its
// layout offers, whether it stands or not.
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

// postpone tells the allocations that wait for an instance, and plain ones that wait for
// the MIG mode, why nothing is done on their GPU now. A pod is told this: no other tenant's is
// named.
func (in *Input) postpone(g *gpuWithMIG, plain []*ledger.Allocation, out *Changes) {
	why := status.Why(status.MIGOff, "%s is not in MIG mode", g.Name())
	switch work := in.MIG.Working[g.UUID]; {
	case work != nil:
		why = status.Why(status.GPUChange, "%s is being worked on: %s", g.Name(), work)
	case in.Others[g.UUID] != "":
		why = status.Why(status.OtherOwner, "%s is left alone: somebody else gives it out", g.Name())
	case g.Fault != "":
		why = status.Why(status.GPUUnhealthy, "%s: %s", g.Name(), g.Fault)
	}
	for _, wish := range g.wishes {
		out.Trouble[wish.allocation.ID] = why
	}
	await(plain, why, out)
}

// follow plans what the partition wants of a GPU that nothing else stands against,
// and returns its layout meanwhile. What the target does not keep is added to leaving.
func (in *Input) follow(
	g *gpuWithMIG, w config.Want, wanted mig.Target, have Layout, leaving map[mig.Placement]status.Cause,
	block func(status.Reason, []string), out *Changes,
) Layout {
	plan, err := in.change(g, wanted)
	if err == nil && wanted.OnDemand {
		err = in.offersNone(g, w)
	}
	if err != nil {
		out.say(status.Refused, g.UUID,
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
		keep = nil // what fits is given out, and stays somebody else's until it is held
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

// change plans a GPU's way to its target. What allocations have and does not stand is
// put back where it was, if the target has room for it there.
func (in *Input) change(g *gpuWithMIG, to mig.Target) (mig.Plan, error) {
	switch {
	case len(g.missing) == 0 || to.OnDemand:
		return mig.Change(&g.MIG, g.card, g.standing, to)
	case to.MIG && !g.MIG.Enabled:
		// The mode was lost under them, as in a reboot. First things first.
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

// grant plans the instance of the first allocation that waits for one, in front of what
// else is to be done to the GPU. If no allocation waits, it destroys what has been idle
// for long enough.
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

// adopt makes the agent the owner of instances that an allocation has or a geometry
// keeps.
func (in *Input) adopt(g *gpuWithMIG, keep map[mig.Placement]bool, out *Changes) {
	for _, s := range g.standing {
		if _, held := g.held[s.Placement]; (held || keep[s.Placement] && s.Reason != busyReason) &&
			!in.MIG.Made[g.UUID][s.Placement] {
			out.Made[g.UUID] = append(out.Made[g.UUID], s.Placement)
		}
	}
}

// onDemand lists the placements of every profile that the partition allows.
func (in *Input) onDemand(g *gpuWithMIG, w config.Want) []mig.Placement {
	placements := g.card.Placements()
	if len(w.Profiles) > 0 {
		placements = slices.DeleteFunc(slices.Clone(placements), func(s mig.Placement) bool {
			return !slices.Contains(w.Profiles, s.Profile)
		})
	}
	return placements
}

// offersNone is why a GPU would offer nothing on demand; nil where it would offer something,
// and where that is told only once it is in MIG mode.
func (in *Input) offersNone(g *gpuWithMIG, w config.Want) error {
	if len(in.onDemand(g, w)) > 0 || !g.MIG.Enabled && !g.card.Known() {
		return nil
	}
	return status.Why(status.PartitionUnfit,
		"its driver tells of no place for an instance that this version understands, so it would offer nothing")
}

// of are those placements of a layout that the GPU can have.
func (g *gpuWithMIG) of(c Layout) (out []mig.Placement) {
	for _, s := range c.Placements {
		if s, ok := g.card.Placement(s.Profile, s.Start, s.CI); ok {
			out = append(out, s)
		}
	}
	return out
}

// listed are the devices that exist.
func (g *gpuWithMIG) listed() []mig.Placement {
	var out []mig.Placement
	for _, s := range g.standing {
		if !s.Empty {
			out = append(out, s.Placement)
		}
	}
	return out
}

// now is what a GPU is, in words.
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

// finishMIG says what a GPU offers, and what the ledger must know about it.
func (in *Input) finishMIG(g *gpuWithMIG, have, to Layout, leaving map[mig.Placement]status.Cause, out *Changes) {
	u := g.UUID
	if to.Known {
		out.Layouts[u] = to
	}
	if !to.InMIG() || !have.InMIG() || have.speaksOther(to) || have.Dynamic && (!to.Dynamic || have.Unit != to.Unit) {
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
				out.say(status.Noted, u, status.Why(status.ForeignInstance, "%s has a %s that this agent did not "+
					"make: it stays, unless --foreign-instances is reclaim", g.Name(), s.Placement))
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
