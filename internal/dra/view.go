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

// leaving has the devices that no layout has any longer and that a claim may still name, each with
// the write that taints it. The map does not change once it is in a view.
type leaving map[Device]departure

// departure is the write that taints a device. The zero value means that no write has the taint
// yet.
type departure struct {
	set    bool   // whether the publisher has got the taint
	number uint64 // the number of the write, if set
}

// tainted reports whether the server has the taint. written is the last write that the server has.
func (d departure) tainted(written uint64) bool { return d.set && d.number <= written }

// view is the shelf's state at one moment. It does not change.
type view struct {
	// offer is the loop's last offer; nil before the first.
	offer *Offer
	// devices are those in the slices; nil before the first offer.
	devices map[DeviceName]Device
	leaving leaving
	// listed is true once the claims have been listed after the start.
	listed bool
	// withdrew is the number of the last write that withdraws something, and written that of the
	// last write that the server has.
	withdrew, written uint64
	// news is closed when a waiting claim should look at the next view.
	news <-chan struct{}
}

// find sets the device of each result. ready is false if the node's devices or claims are not known
// yet. The error is permanent.
func (v view) find(wants []want) (ready bool, err error) {
	if !v.listed || v.devices == nil {
		return false, nil
	}
	for i := range wants {
		w := &wants[i]
		var ok bool
		if w.device, ok = v.devices[DeviceName{w.Pool, w.Device}]; !ok {
			return true, permanent(status.ClaimOutdated,
				fmt.Errorf("this node has no device %s in pool %s now; its layout may have changed since: "+
					"make the claim anew: %w",
					w.Device, w.Pool, gpu.ErrNotFound))
		}
	}
	return true, nil
}

// late returns a permanent error if a result's device is in no layout any longer, and others have
// its room.
func (v view) late(wants []want) error {
	for i := range wants {
		if _, gone := v.leaving[wants[i].device]; gone {
			return permanent(status.ClaimOutdated,
				fmt.Errorf("device %s is no longer in its GPU's layout, and others have its room: "+
					"make the claim anew: %w",
					wants[i].Device, ledger.ErrHeld))
		}
	}
	return nil
}

// refuses reports whether the GPU's driver refuses to make an instance that a claim has been given
// and that does not exist yet.
func (v view) refuses(l *ledger.Ledger, shares []share) bool {
	return v.offer != nil && slices.ContainsFunc(shares, func(s share) bool {
		a, has := l.Get(s.id())
		if !has || a.IsOpen() || a.Grants[0].NoRoom { // no instance has to be made
			return false
		}
		_, refused := v.offer.Refused[placeOf(deviceOf(&a.Grants[0]))]
		return refused
	})
}

// canForget reports whether some device may leave its slice if no claim names it: the server has its
// taint.
func (v view) canForget() bool {
	tainted := func(d departure) bool { return d.tainted(v.written) }
	return slices.ContainsFunc(slices.Collect(maps.Values(v.leaving)), tainted)
}
