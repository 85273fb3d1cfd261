// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"slices"

	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/plan"
	"example.com/gpu-agent/internal/status"
)

// correct puts right what the plan says to those who wait for an instance, where the
// work for it was not begun. unsaved is why what is to be done could not be written
// down.
func (k *gatekeeper) correct(changes *plan.Changes, unsaved error) {
	for i := range changes.Work {
		w := &changes.Work[i]
		if w.Allocation == "" || k.executor.jobs[w.GPU] != nil {
			continue
		}
		why := status.Why(status.GPUChange, "the work is due") // in a moment, since something has come between
		switch absent := k.reader.absent(); {
		case absent != (status.Cause{}):
			why = absent
		case !k.witnesses.Heard() && w.Takes():
			why = status.Why(status.HoldersUnknown, "nothing is taken away before the kubelet and the container runtime have said who holds what")
			if k.witnesses.Err() != nil {
				why.Message += ": " + k.witnesses.Err().Error()
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
func (k *gatekeeper) shutBecause(c *ledger.Allocation) (none status.Cause) {
	unknown := func(what string) status.Cause {
		why := k.reader.absent()
		if why.Reason == "" {
			why.Reason = status.DriverUnread
		}
		why.Message = sentences(what, why.Message)
		return why
	}
	switch {
	case c.IsOpen():
	case slices.ContainsFunc(c.GPUs(), k.faulty):
		u := c.GPUs()[slices.IndexFunc(c.GPUs(), k.faulty)]
		if d := k.reader.inv.ByUUID(u); d != nil {
			return status.Why(status.GPUUnhealthy, "%s: %s", d.Name(), d.Fault)
		}
		return status.Why(status.GPUMissing, "this node has no GPU %s", u)
	case c.Kind().InMIG() && slices.ContainsFunc(c.GPUs(), k.unread):
		return unknown("this process has not read the driver yet")
	case k.reader.parts == nil && k.reader.partsErr != nil:
		return status.CauseOf(k.reader.partsErr, status.DriverFilesUnknown)
	case k.reader.parts == nil:
		return unknown("it is not known yet which driver files containers need")
	case k.unsliced(c):
		return status.Why(status.DriverFailed, "the time slice of its GPU is not set yet")
	case c.Phase == ledger.Reserved && k.witnesses.Err() != nil:
		return status.Why(status.HoldersUnknown, "it is not known whether its devices are free: %v", k.witnesses.Err())
	}
	return none
}

// tellWaiting tells the ledger why allocations are not ready, for the pods that wait,
// and clears what is over. What failed for an allocation stays until it is tried again.
func (k *gatekeeper) tellWaiting(trouble map[string]status.Cause) {
	for _, c := range k.ledger.Allocations() {
		if why := trouble[c.ID]; !c.IsOpen() && why != c.Cause && (why != (status.Cause{}) || !k.executor.failedFor(c.ID)) {
			k.ledger.SetCause(c.ID, why)
		}
	}
}
