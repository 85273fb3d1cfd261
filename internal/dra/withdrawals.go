// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"slices"

	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/mig"

	resourcev1 "k8s.io/api/resource/v1"
)

// withdrawals decides which devices are tainted, and how.
type withdrawals struct {
	offer  *Offer
	domain string
	faults *faults
	// fault is the effect of an unhealthy device's taint.
	fault resourcev1.DeviceTaintEffect
	// ending are the devices whose taint ends pods of refused claims.
	ending map[Device]status.Reason
	held   []ledger.Allocation
	// has reports whether a layout that is in force has a device.
	has func(Device) bool
	// draining is true if the process is about to end and will prepare no further claims.
	draining bool
}

// taints returns the taints of a device; none if it is on offer. The taints of a fault and of a
// refused claim may end pods.
func (w *withdrawals) taints(d Device) (out []resourcev1.DeviceTaint) {
	if w.faults.of(d) != "" {
		out = append(out, resourcev1.DeviceTaint{
			Key: w.domain + "/unhealthy", Value: string(status.GPUUnhealthy), Effect: w.fault})
	}
	if why := w.withdrawn(d); why != "" {
		out = append(out, resourcev1.DeviceTaint{
			Key: w.domain + "/withdrawn", Value: string(why), Effect: resourcev1.DeviceTaintEffectNoSchedule})
	}
	if why := w.ending[d]; why != "" {
		out = append(out, resourcev1.DeviceTaint{
			Key: w.domain + "/claim-refused", Value: string(why), Effect: resourcev1.DeviceTaintEffectNoExecute})
	}
	return out
}

// withdrawn returns why a device must not be given out; empty if it may.
func (w *withdrawals) withdrawn(d Device) status.Reason {
	drains, on := w.offer.Changes.Drains(d.GPU, w.offer.Drain), w.offer.Inventory.ByUUID(d.GPU)
	inMIG := on != nil && on.MIG.Enabled
	switch {
	case !w.has(d):
		return status.NotInPartition
	case w.draining:
		return status.AgentEnds
	case slices.Contains(w.offer.Changing, d.GPU), drains && !(d.Kind.InMIG() && inMIG):
		return status.GPUChange
	case w.offer.Others[d.GPU] != "":
		return status.OtherOwner
	case w.offer.Cordoned[d.GPU]:
		return status.GPUCordoned
	case w.elsewhere(d):
		return status.HeldByPods
	case w.offer.Kept != nil && w.offer.Kept(d):
		return status.NameInUse
	case w.offer.Closed != "":
		return status.DriverFilesUnknown
	case w.offer.Daemons[d.GPU].Reason != "":
		return w.offer.Daemons[d.GPU].Reason
	case w.offer.Changes.Stuck[d.GPU].Message != "" && d.Kind.InMIG() != inMIG:
		return w.offer.Changes.Stuck[d.GPU].Reason
	case !d.Kind.InMIG():
		return ""
	case w.occupied(d):
		return status.NoRoom
	}
	why := w.offer.Changes.Leaving[d.GPU][d.Placement]
	if why.Message != "" && (drains || !w.offer.Changes.Blocks(d.GPU)) {
		return why.Reason
	}
	return w.offer.Failing[placeOf(d)].Reason
}

// occupied reports whether a placement does not fit beside an instance that must not be destroyed
// and that no allocation has.
func (w *withdrawals) occupied(d Device) bool {
	on := w.offer.Changes.MIG[d.GPU]
	besides := func(s mig.Placement) bool { return !on.Card.Fits([]mig.Placement{s}, d.Placement) }
	return on.Card != nil && (slices.ContainsFunc(on.Occupied, besides) ||
		!slices.Contains(on.Kept, d.Placement) && slices.ContainsFunc(on.Kept, besides))
}

// elsewhere reports whether the other front-end has an allocation on the GPU, or there is one of a
// kind that this version does not know.
func (w *withdrawals) elsewhere(d Device) bool {
	return slices.ContainsFunc(w.held, func(a ledger.Allocation) bool {
		return a.On(d.GPU) && (a.Owner != ledger.DRA || !a.Kind().Known())
	})
}
