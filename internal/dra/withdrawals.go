// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"slices"

	"example.com/gpu-agent/internal/kube"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/mig"
)

// withdrawals says what keeps claims off devices.
type withdrawals struct {
	*Offer
	domain string
	faults *faults
	held   []ledger.Allocation
	// has says whether a layout that is in force has a device.
	has func(Device) bool
}

// taints are those of a device: none where it is on offer. None of them ends a pod.
func (w *withdrawals) taints(d Device) (out []kube.Taint) {
	if w.faults.of(d) != "" {
		out = append(out, kube.Taint{Key: w.domain + "/unhealthy", Value: string(status.GPUUnhealthy), Effect: kube.NoSchedule})
	}
	if why := w.withdrawn(d); why != "" {
		out = append(out, kube.Taint{Key: w.domain + "/withdrawn", Value: string(why), Effect: kube.NoSchedule})
	}
	return out
}

// withdrawn is why a device is to be given to nobody, empty where it may be.
func (w *withdrawals) withdrawn(d Device) status.Reason {
	drains := w.Changes.Drains(d.GPU, w.Drain)
	switch {
	case !w.has(d):
		return status.NotInPartition
	case slices.Contains(w.Changing, d.GPU), drains && d.Kind != ledger.Placement:
		return status.GPUChange
	case w.Others[d.GPU] != "":
		return status.OtherOwner
	case w.elsewhere(d):
		return status.HeldByPods
	case w.Closed != "":
		return status.DriverFilesUnknown
	case d.Kind != ledger.Placement:
		return ""
	}
	if why := w.Changes.Leaving[d.GPU][d.Placement]; why.Message != "" && (drains || !w.Changes.Blocks(d.GPU)) {
		return why.Reason
	}
	return w.Failing[mig.Place{GPU: d.GPU, Placement: d.Placement}].Reason
}

// elsewhere reports whether somebody has the GPU through the other front-end.
func (w *withdrawals) elsewhere(d Device) bool {
	return slices.ContainsFunc(w.held, func(a ledger.Allocation) bool { return a.Owner != ledger.DRA && a.On(d.GPU) })
}
