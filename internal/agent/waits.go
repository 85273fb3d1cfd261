// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"slices"

	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/plan"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/gpu"
)

// ground is what the files of allocations follow from beside the ledger, as it is at one moment
// of a round. It is a value: nothing of it is changed.
type ground struct {
	inv *gpu.Inventory
	// parts are nil where it is not known what containers need; partsErr is why.
	parts    *parts
	partsErr error
	// absent is why the driver is not to be had, zero where it is.
	absent  status.Cause
	layouts map[gpu.UUID]plan.Layout
	// working is the work under way.
	working map[gpu.UUID]*plan.Work
	// sliced reports whether the driver has been asked for the time slice of a grant.
	sliced func(ledger.Grant) bool
	// heard says that the witnesses have once said who holds what, and unheard is why they last
	// did not.
	heard   bool
	unheard error
}

// ground is what files follow from now.
func (l *loop) ground() *ground {
	return &ground{inv: l.reader.inv, parts: l.gates.supplies.parts, partsErr: l.gates.supplies.err,
		absent: l.reader.absent(), layouts: l.layouts.now, working: l.executor.working(), sliced: l.slices.stands,
		heard: l.witnesses.Heard(), unheard: l.witnesses.Err()}
}

// unsliced reports whether the driver has yet to be asked for a time slice that an
// allocation has.
func (on *ground) unsliced(c *ledger.Allocation) bool {
	return slices.ContainsFunc(c.Grants, func(g ledger.Grant) bool { return !on.sliced(g) })
}

// faulty reports whether the driver cannot say what a container would need of a
// GPU.
func (on *ground) faulty(u gpu.UUID) bool {
	d := on.inv.ByUUID(u)
	return d == nil || d.Fault != ""
}

// unread reports whether this process has not seen yet what stands on a GPU.
func (on *ground) unread(u gpu.UUID) bool {
	d := on.inv.ByUUID(u)
	return d != nil && d.Fault == "" && !d.MIG.Capable
}

// correct puts right what the plan says to those who wait for an instance, where the
// work for it was not begun. unsaved is why what is to be done could not be written
// down.
func (on *ground) correct(changes *plan.Changes, unsaved error) {
	for i := range changes.Work {
		w := &changes.Work[i]
		if w.Allocation == "" || on.working[w.GPU] != nil {
			continue
		}
		why := status.Why(status.GPUChange, "the work is due") // in a moment, since something has come between
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

// shutBecause says why an allocation's container may not be made yet, zero where nothing
// stands against it, or where the plan has to say what does.
func (on *ground) shutBecause(c *ledger.Allocation) (none status.Cause) {
	unknown := func(what string) status.Cause {
		why := on.absent
		if why.Reason == "" {
			why.Reason = status.DriverUnread
		}
		why.Message = sentences(what, why.Message)
		return why
	}
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
	case on.unsliced(c):
		return status.Why(status.DriverFailed, "the time slice of its GPU is not set yet")
	case c.Phase == ledger.Reserved && on.unheard != nil:
		return status.Why(status.HoldersUnknown, "it is not known whether its devices are free: %v", on.unheard)
	}
	return none
}

// tellWaiting tells the ledger why allocations are not ready, for the pods that wait,
// and clears what is over. What failed for an allocation stays until it is tried again: failed
// reports that.
func (k *gatekeeper) tellWaiting(trouble map[string]status.Cause, failed func(id string) bool) {
	for _, c := range k.ledger.Allocations() {
		if why := trouble[c.ID]; !c.IsOpen() && why != c.Cause && (why != (status.Cause{}) || !failed(c.ID)) {
			k.ledger.SetCause(c.ID, why)
		}
	}
}
