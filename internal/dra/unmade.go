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

// The scheduler may give a claim a placement whose instance the GPU's driver refuses to make. Such
// a claim gives up what it has and is refused, so that its pod is ended and gets another placement.

// placeOf returns a device's MIG placement; of another kind of device, one with a zero Placement.
func placeOf(d Device) mig.Place { return mig.Place{GPU: d.GPU, Placement: d.Placement} }

// refusedByDriver returns a permanent error if the GPU's driver refuses to make the instance
// of a result, and nil if nothing is known against it. The error lasts as long as the placement is
// withdrawn.
func refusedByDriver(o *Offer, w *want) error {
	if why, refused := o.Refused[placeOf(w.device)]; refused && !w.Admin {
		return permanent(status.ClaimRefused,
			fmt.Errorf("the GPU's driver refuses device %s (%s): make the claim anew, to get another one: %w",
				w.Device, why.Message, gpu.ErrInvalid))
	}
	return nil
}

// whileMakeable returns a context that ends with ctx, or when the GPU's driver is known to refuse
// what a claim has.
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

// giveUp ends the allocations of a claim if the GPU's driver refuses to make one of them, and
// reports whether it did. It leaves a claim that the kubelet has been told is prepared, or that a
// container may have: the pod of such a claim is not ended.
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
