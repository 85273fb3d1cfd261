// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"slices"

	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/plan"
)

// correct puts right what the plan says to those who wait for an instance, where the
// work for it was not begun. unsaved is why what is to be done could not be written
// down.
func (a *Agent) correct(changes *plan.Changes, unsaved error) {
	for i := range changes.Work {
		w := &changes.Work[i]
		if w.Claim == "" || a.executor.jobs[w.GPU] != nil {
			continue
		}
		why := "the work is due" // in a moment, since something has come between
		switch absent := a.reader.absent(); {
		case absent != "":
			why = absent
		case !a.seen.heard && w.Takes():
			why = "nothing is taken away before the kubelet and the container runtime have said who holds what"
			if a.seen.err != nil {
				why += ": " + a.seen.err.Error()
			}
		case unsaved != nil:
			why = unsaved.Error()
		}
		changes.Trouble[w.Claim] = "its instance is not being made yet (" + w.String() + "): " + why
	}
}

// shutBecause says why a claim's container may not be made yet, empty where nothing
// stands against it, or where the plan has to say what does.
func (a *Agent) shutBecause(c *ledger.Allocation) string {
	switch {
	case c.IsOpen():
		return ""
	case slices.ContainsFunc(c.GPUs(), a.faulty):
		u := c.GPUs()[slices.IndexFunc(c.GPUs(), a.faulty)]
		if d := a.reader.inv.ByUUID(u); d != nil {
			return d.Name() + ": " + d.Fault
		}
		return "this node has no GPU " + string(u)
	case c.Kind() == ledger.Placement && slices.ContainsFunc(c.GPUs(), a.unread):
		return sentences("this process has not read the driver yet", a.reader.absent())
	case a.reader.parts == nil && a.reader.partsErr != nil:
		return a.reader.partsErr.Error()
	case a.reader.parts == nil:
		return sentences("it is not known yet which driver files containers need", a.reader.absent())
	case c.Phase == ledger.Reserved && a.seen.err != nil:
		return "nobody has said whether its devices are free: " + a.seen.err.Error()
	}
	return ""
}

// tellWaiting tells the ledger, for the pods' sake, why claims are not ready, and
// nothing of those of which there is nothing to say any more. What failed for a claim
// stays until it is tried again.
func (a *Agent) tellWaiting(trouble map[string]string) {
	for _, c := range a.ledger.Allocations() {
		if why := trouble[c.ID]; !c.IsOpen() && why != c.Cause && (why != "" || !a.executor.failedFor(c.ID)) {
			a.ledger.SetCause(c.ID, why)
		}
	}
}
