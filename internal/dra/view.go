// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"fmt"
	"maps"
	"slices"

	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/gpu"
)

// leaving are the devices that no layout has any more and that a claim may still name, each
// with the writing that taints it. It does not change once it is in a view.
type leaving map[Device]departure

// departure is the writing that taints a device. The zero value is of a device whose taint is in
// no writing yet.
type departure struct {
	set    bool   // whether the publisher has the taint to write
	number uint64 // the writing's, where it has
}

// tainted reports whether the server has the taint, which has all writings up to a number.
func (d departure) tainted(written uint64) bool { return d.set && d.number <= written }

// view is what the scheduler is told at one moment. It does not change.
type view struct {
	// offer is what the loop said last, nil before that.
	offer *Offer
	// devices are those in the slices, nil before the first offer.
	devices map[DeviceName]Device
	leaving leaving
	// listed says that the claims that there were at the start are known.
	listed bool
	// withdrew is the number of the last writing that withdraws something, and written that of
	// the last one that the server has.
	withdrew, written uint64
	// news is closed when there is another view for a claim that waits.
	news <-chan struct{}
}

// find says which devices a claim's results are; ready is false where it is not known yet what this
// node has, or which claims there are.
func (v view) find(wants []want) (ready bool, err error) {
	if !v.listed || v.devices == nil {
		return false, nil
	}
	for i := range wants {
		w := &wants[i]
		var ok bool
		if w.device, ok = v.devices[DeviceName{w.Pool, w.Device}]; !ok {
			return true, never(status.ClaimOutdated,
				fmt.Errorf("this node has no device %s in pool %s now; its layout may have changed since: "+
					"make the claim anew: %w",
					w.Device, w.Pool, gpu.ErrNotFound))
		}
	}
	return true, nil
}

// late is why results of an older layout have come too late: their devices are in
// no layout any more, and others have the room.
func (v view) late(wants []want) error {
	for i := range wants {
		if _, gone := v.leaving[wants[i].device]; gone {
			return never(status.ClaimOutdated,
				fmt.Errorf("device %s is not in its GPU's layout any more, and others have its room: "+
					"make the claim anew: %w",
					wants[i].Device, ledger.ErrHeld))
		}
	}
	return nil
}

// refuses reports whether the GPU's driver refuses to make something that a claim has
// and that does not stand.
func (v view) refuses(l *ledger.Ledger, shares []share) bool {
	return v.offer != nil && slices.ContainsFunc(shares, func(s share) bool {
		a, has := l.Get(s.id())
		if !has || a.IsOpen() || a.Grants[0].NoRoom { // nothing is made for that
			return false
		}
		_, refused := v.offer.Refused[placeOf(deviceOf(&a.Grants[0]))]
		return refused
	})
}

// parts reports whether a device may leave its slice if no claim names it: the server has its taint.
func (v view) parts() bool {
	tainted := func(d departure) bool { return d.tainted(v.written) }
	return slices.ContainsFunc(slices.Collect(maps.Values(v.leaving)), tainted)
}
