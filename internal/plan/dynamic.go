// SPDX-License-Identifier: Apache-2.0

package plan

import (
	"slices"

	"example.com/gpu-agent/internal/config"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
	"example.com/gpu-agent/pkg/timeslice"
)

// planDynamic plans a dynamic GPU. Its first holder decides whether it is whole, memory or MIG
// instances. The scheduler gives it out as one of these at a time, so its holders need the same MIG
// mode. An idle GPU keeps its mode.
func (in *Input) planDynamic(g *gpuWithMIG, w config.Want, have Layout, out *Changes) {
	to, leaving := in.nextDynamic(g, w, have, out)
	if in.MIG.Working[g.UUID] != nil || g.Fault != "" || in.Others[g.UUID] != "" {
		plain, _ := in.kinds(g.UUID)
		in.postpone(g, plain, out)
	} else if to.Dynamic {
		in.switchMode(g, w, leaving, out)
	}
	in.finishMIG(g, have, to, leaving, out)
}

// kinds returns the allocations that take something of a GPU. plain need it outside of MIG mode,
// and placed have instances.
func (in *Input) kinds(u gpu.UUID) (plain, placed []*ledger.Allocation) {
	for i := range in.Allocations {
		switch a := &in.Allocations[i]; {
		case !a.Takes(u):
		case a.Kind().InMIG():
			placed = append(placed, a)
		default:
			plain = append(plain, a)
		}
	}
	return plain, placed
}

// nextDynamic returns the layout that a dynamic GPU gets now, and the devices that are withdrawn.
func (in *Input) nextDynamic(
	g *gpuWithMIG, w config.Want, have Layout, out *Changes,
) (to Layout, leaving map[mig.Placement]status.Cause) {
	leaving = map[mig.Placement]status.Cause{}
	others, elsewhere := holdersOf(in.Allocations, g.UUID, frontEndOf(w.API))
	_, anyHeld := holdersOf(in.Allocations, g.UUID, "")
	switch work := in.MIG.Working[g.UUID]; {
	case work != nil:
		return have, work.Leaving
	case in.Others[g.UUID] != "":
		out.addCondition(status.Refused, g.UUID, in.notOffered(g.Device))
		if !anyHeld {
			return Layout{Known: true}, leaving
		}
		return have, g.all(have, status.Why(status.OtherOwner, "another program gives the GPU out"))
	case g.Fault != "", w.Mode == config.Keep:
		return have, leaving // do not touch a GPU that cannot be read or is not named
	case elsewhere:
		b := Blocked{
			GPU: g.UUID, Index: g.Index, From: g.now(have), To: targetText(w), Reason: status.HeldByPods,
			Holders: others,
		}
		out.Blocked = append(out.Blocked, b.between(have, Layout{Offers: true, API: w.API}))
		return have, g.all(have, status.Why(status.NotInPartition, "the node's partition offers the GPU through %s",
			frontEndOf(w.API)))
	}
	to = placementsThrough(w.API, in.onDemand(g, w))
	to.Dynamic, to.N, to.Unit = true, timeslice.Units(g.Device, in.Unit), in.Unit
	counted := to.Kind.Counted()
	held := slices.ContainsFunc(in.Allocations, func(a ledger.Allocation) bool {
		return a.Takes(g.UUID) && a.Kind() == counted
	})
	if have.Has(counted) && (have.Unit == to.Unit || held) {
		to.N, to.Unit = have.N, have.Unit // as for shared GPUs, see sameSize
	}
	err := in.offersNone(g, w)
	if to.N == 0 {
		err = status.Why(status.PartitionUnfit, "it has %d MiB that programs can have, and a memory unit has %d MiB, "+
			"so it would offer no memory", g.Usable(), in.Unit)
	}
	if err != nil {
		out.addCondition(status.Refused, g.UUID, status.Why(status.PartitionUnfit, "%s cannot be %s: %v",
			g.Name(), targetText(w), err))
		return have, leaving
	}
	return to, leaving
}

// stuck sets Stuck if a dynamic GPU cannot change its MIG mode: a reset is not allowed, a recent
// change failed, or an instance without an allocation must stay.
func (in *Input) stuck(g *gpuWithMIG, out *Changes) {
	switch why := in.MIG.Stuck[g.UUID]; {
	case in.neverChanges(g):
		out.Stuck[g.UUID] = status.Why(status.ResetDue, "%s changes its MIG mode with a reset, and --reset is never",
			g.Name())
	case why.Message != "":
		out.Stuck[g.UUID] = why
	}
	for i := range g.standing {
		if s := &g.standing[i]; s.Pinned && s.Reason != heldReason {
			out.Stuck[g.UUID] = status.Why(status.Reason(s.Reason), "%s stays in MIG mode: %s is on %s", g.Name(),
				s.Holder, s.Placement)
		}
	}
}

// switchMode plans the MIG mode that the holders of a dynamic GPU need, and their instances.
// Trouble gets the reason for what cannot be done now.
func (in *Input) switchMode(g *gpuWithMIG, w config.Want, leaving map[mig.Placement]status.Cause, out *Changes) {
	in.stuck(g, out)
	plain, placed := in.kinds(g.UUID)
	if g.MIG.Enabled {
		in.adopt(g, nil, out)
	}
	switch {
	case len(plain)+len(placed) == 0 && g.MIG.Pending != nil && *g.MIG.Pending != g.MIG.Enabled:
		// No allocation wants the pending mode any longer. To take it back changes nothing that is
		// in force.
		back := mig.Disable
		if g.MIG.Enabled {
			back = mig.Enable
		}
		out.Work = append(out.Work, Work{GPU: g.UUID, Steps: []mig.Step{{Op: back}}})
	case len(plain)+len(placed) == 0 && !g.MIG.Enabled && !g.card.Known() && out.Stuck[g.UUID].Message == "":
		// Its driver reports only in MIG mode which placements instances can have.
		out.Work = append(out.Work, Work{GPU: g.UUID, Steps: []mig.Step{{Op: mig.Enable}}})
	case g.MIG.Enabled && (len(placed) > 0 || len(plain) == 0):
		in.grant(g, leaving, w, out)
		await(plain, status.Why(status.HeldByPods, "%s is in MIG mode, and instances of it are held", g.Name()), out)
	case g.MIG.Enabled:
		plan, err := mig.Change(&g.MIG, g.card, g.standing, mig.Target{})
		switch {
		case err != nil:
			await(plain, status.CauseOf(err, status.MIGUnsupported), out)
		case len(plan.Blocked) > 0:
			b := plan.Blocked[0]
			out.Process = out.Process || b.Reason == busyReason
			await(plain, status.Why(status.Reason(b.Reason), "%s leaves MIG mode after the end of %s (%s)",
				g.Name(), b.Holder, b.Placement), out)
		default:
			in.setMode(g, plain, plan.Steps, out)
		}
	case len(placed) > 0 && len(plain) == 0:
		in.setMode(g, placed, []mig.Step{{Op: mig.Enable}}, out)
	default:
		await(placed, status.Why(status.HeldByPods, "%s is held, and is not in MIG mode", g.Name()), out)
	}
}

// neverChanges reports whether this agent may not change a GPU's MIG mode.
func (in *Input) neverChanges(g *gpuWithMIG) bool {
	return in.MIG.NeverReset && resetsForMIG(g.Device)
}

// otherMode reports whether the holders of a GPU need the other MIG mode, and the wanted layout
// does not lead there. The GPU was dynamic before; after a restart no layout shows that.
func (in *Input) otherMode(g *gpuWithMIG, w config.Want) bool {
	if to, ok := target(w); ok && to.MIG != g.MIG.Enabled {
		return false
	}
	plain, placed := in.kinds(g.UUID)
	if !g.MIG.Enabled {
		return len(placed) > 0 && len(plain) == 0
	}
	return len(placed) == 0 && slices.ContainsFunc(plain, func(a *ledger.Allocation) bool {
		return a.Owner == ledger.DRA && !a.IsOpen()
	})
}

// setMode plans a change of the MIG mode, for the first of the allocations that is not deferred.
func (in *Input) setMode(g *gpuWithMIG, of []*ledger.Allocation, steps []mig.Step, out *Changes) {
	if in.neverChanges(g) {
		await(of, out.Stuck[g.UUID], out)
		return
	}
	for _, a := range of {
		if in.MIG.Deferred[Want{Allocation: a.ID, GPU: g.UUID}] {
			continue
		}
		work := Work{GPU: g.UUID, Steps: steps, Allocation: a.ID}
		out.Work = append(out.Work, work)
		await(of, status.Why(status.GPUChange, "its GPU is being prepared: %s", &work), out)
		return
	}
}

// await records why the allocations wait that are not open yet.
func await(of []*ledger.Allocation, why status.Cause, out *Changes) {
	for _, a := range of {
		if !a.IsOpen() {
			out.Trouble[a.ID] = why
		}
	}
}
