// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"slices"

	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/plan"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/gpu"
)

// fileInputs has all that the CDI files of allocations depend on beside the ledger, at one moment
// of a round. So the gatekeeper needs neither the reader nor the executor. It is immutable.
type fileInputs struct {
	inv *gpu.Inventory
	// parts are nil if it is not known what containers need. partsErr is why; nil before the first
	// try.
	parts    *parts
	partsErr error
	// absent is why the driver cannot be used, zero if it can.
	absent  status.Cause
	layouts map[gpu.UUID]plan.Layout
	// working is the work that runs now, by GPU.
	working map[gpu.UUID]*plan.Work
	// sliced reports whether the driver was asked for the time slice of a grant.
	sliced func(ledger.Grant) bool
	// daemon returns why no container may start with a share of a GPU under MPS; zero if one may.
	// known is false until that is known.
	daemon func(gpu.UUID) (why status.Cause, known bool)
	// heard is Witnesses.Heard. unheard is why the witnesses last did not answer; nil if they did.
	heard   bool
	unheard error
}

// fileInputs returns the present state.
func (l *loop) fileInputs() *fileInputs {
	return &fileInputs{inv: l.reader.inv, parts: l.gates.driverFiles.parts, partsErr: l.gates.driverFiles.err,
		absent: l.reader.absent(), layouts: l.layouts.now, working: l.executor.working(), sliced: l.slices.wasAsked,
		daemon: l.mps.gate,
		heard:  l.witnesses.Heard(), unheard: l.witnesses.Err()}
}

// unsliced reports whether the driver still has to be asked for a time slice of an allocation.
func (on *fileInputs) unsliced(c *ledger.Allocation) bool {
	return slices.ContainsFunc(c.Grants, func(g ledger.Grant) bool { return !on.sliced(g) })
}

// withoutMPS returns why an allocation's container may not start with its share of a GPU under MPS; zero
// if it may, or has no such share. known is as in daemon.
func (on *fileInputs) withoutMPS(c *ledger.Allocation) (why status.Cause, known bool) {
	for i := range c.Grants {
		if g := &c.Grants[i]; g.Compute.Ceiling > 0 {
			if why, known := on.daemon(g.GPU); why != (status.Cause{}) {
				return why, known
			}
		}
	}
	return why, true
}

// beside returns why the container of an allocation with a share of a GPU under MPS may not start: it has
// another allocation, and its processes reach one MPS server only. It is zero if there is no reason, or
// the container is not known yet.
func (on *fileInputs) beside(c *ledger.Allocation, all []ledger.Allocation) (none status.Cause) {
	if c.Holder.Container == "" || !throughMPS(c) {
		return none
	}
	for i := range all {
		o := &all[i]
		if o.ID != c.ID && o.Holder.Pod == c.Holder.Pod && o.Holder.Container == c.Holder.Container {
			return status.Why(status.MPSOneGPU, "a container with a share through MPS holds one GPU, and %s has %s, too: "+
				"ask for one of them", c.Holder.Container, o.Resource)
		}
	}
	return none
}

// faulty reports whether the driver cannot tell what a container would need of a GPU.
func (on *fileInputs) faulty(u gpu.UUID) bool {
	d := on.inv.ByUUID(u)
	return d == nil || d.Fault != ""
}

// unread reports whether this process has not read the instances of a GPU yet.
func (on *fileInputs) unread(u gpu.UUID) bool {
	d := on.inv.ByUUID(u)
	return d != nil && d.Fault == "" && !d.MIG.Capable
}

// correct corrects the plan's reasons for allocations that wait for an instance whose work has not
// begun. unsaved is why the state could not be saved, nil if it was.
func (on *fileInputs) correct(changes *plan.Changes, unsaved error) {
	for i := range changes.Work {
		w := &changes.Work[i]
		if w.Allocation == "" || on.working[w.GPU] != nil {
			continue
		}
		why := status.Why(status.GPUChange, "the work is due") // by a later round, since something has come between
		switch {
		case on.absent != (status.Cause{}):
			why = on.absent
		case !on.heard && w.Takes():
			why = status.Why(status.HoldersUnknown,
				"nothing is taken away before the kubelet and the container runtime have said who holds what")
			if on.unheard != nil {
				why.Message += ": " + on.unheard.Error()
			}
		case unsaved != nil:
			why = status.CauseOf(unsaved, status.FilesFailed)
		}
		why.Message = "its instance is not being made yet (" + w.String() + "): " + why.Message
		changes.Trouble[w.Allocation] = why
	}
}

// shutBecause returns why an allocation's container may not be created yet. The pod's Event has
// that reason. It is zero if there is no reason, or if the plan has it.
func (on *fileInputs) shutBecause(c *ledger.Allocation) (none status.Cause) {
	unknown := func(what string) status.Cause {
		why := on.absent
		if why.Reason == "" {
			why.Reason = status.DriverUnread
		}
		why.Message = sentences(what, why.Message)
		return why
	}
	noMPS, _ := on.withoutMPS(c)
	switch {
	case c.IsOpen():
	case slices.ContainsFunc(c.GPUs(), on.faulty):
		u := c.GPUs()[slices.IndexFunc(c.GPUs(), on.faulty)]
		if d := on.inv.ByUUID(u); d != nil {
			return status.Why(status.GPUUnhealthy, "%s: %s", d.Name(), d.Fault)
		}
		return status.Why(status.GPUMissing, "this node has no GPU %s", u)
	case c.Kind().InMIG() && slices.ContainsFunc(c.GPUs(), on.unread):
		return unknown("this process has not read the driver yet")
	case on.parts == nil && on.partsErr != nil:
		return status.CauseOf(on.partsErr, status.DriverFilesUnknown)
	case on.parts == nil:
		return unknown("it is not known yet which driver files containers need")
	case noMPS != (status.Cause{}):
		return noMPS
	case on.unsliced(c):
		return status.Why(status.DriverFailed, "the time slice of its GPU is not set yet")
	case c.Phase == ledger.Reserved && on.unheard != nil:
		return status.Why(status.HoldersUnknown, "it is not known whether its devices are free: %v", on.unheard)
	}
	return none
}

// tellWaiting tells the ledger why allocations are not ready, and clears reasons that are over. The
// reason of failed work stays until the work is tried again, which failed reports.
func (k *gatekeeper) tellWaiting(trouble map[string]status.Cause, failed func(id string) bool) {
	for _, c := range k.ledger.Allocations() {
		if why := trouble[c.ID]; !c.IsOpen() && why != c.Cause && (why != (status.Cause{}) || !failed(c.ID)) {
			k.ledger.SetCause(c.ID, why)
		}
	}
}
