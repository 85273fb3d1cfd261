// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
)

// A claim may be given a placement that the GPU's driver refuses to make. It is given up then,
// and refused, so that its pod is ended and gets another one.

// placeOf is the MIG placement that a device stands for, if it is one.
func placeOf(d Device) mig.Place { return mig.Place{GPU: d.GPU, Placement: d.Placement} }

// unmade is why the GPU's driver makes no instance for a result, nil where nothing is
// known against it. That lasts for as long as its placement is withdrawn.
func unmade(o *Offer, w *want) error {
	if why, refused := o.Refused[placeOf(w.device)]; refused && !w.Admin {
		return never(status.ClaimRefused,
			fmt.Errorf("the GPU's driver refuses device %s (%s): make the claim anew, to have another one: %w",
				w.Device, why.Message, gpu.ErrInvalid))
	}
	return nil
}

// whileMakeable returns a context that ends with ctx, or when the GPU's driver is known to
// refuse what a claim has.
func (in *intake) whileMakeable(ctx context.Context, shares []share) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(ctx)
	go func() {
		for ctx.Err() == nil {
			v := in.shelf.now()
			if v.refuses(in.o.Ledger, shares) {
				cancel()
			}
			select {
			case <-v.news:
			case <-ctx.Done():
			}
		}
	}()
	return ctx, cancel
}

// giveUp gives back what a claim has where the GPU's driver refuses to make it, and reports
// whether it did. It does not where the kubelet has been told that the claim is prepared, or
// where a container may have it: that one's pod is not ended.
func (in *intake) giveUp(ctx context.Context, shares []share) bool {
	if !in.shelf.now().refuses(in.o.Ledger, shares) {
		return false
	}
	state, err := in.o.Kubelet.DRAState()
	if err != nil && !errors.Is(err, gpu.ErrNotFound) || answered(&state, in.o.Driver, shares[0].UID) {
		return false
	}
	used, sure, err := inContainers(ctx, in.o.Runtime, in.o.Domain)
	if err != nil || !sure || slices.ContainsFunc(shares, func(s share) bool { return len(used[s.id()]) > 0 }) {
		return false
	}
	in.book.giveUp(shares)
	return true
}
