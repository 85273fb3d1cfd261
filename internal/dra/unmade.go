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

// unmadeLocked is why the GPU's driver makes no instance for a result, nil where nothing is
// known against it. That lasts for as long as its placement is withdrawn.
func (f *refusals) unmadeLocked(w *want) error {
	if why, refused := f.offer.Refused[placeOf(w.device)]; refused && !w.Admin {
		return never(status.ClaimRefused, fmt.Errorf("the GPU's driver refuses device %s (%s): make the claim anew, to have another one: %w", w.Device, why.Message, gpu.ErrInvalid))
	}
	return nil
}

// refusesLocked reports whether the GPU's driver refuses to make something that a claim has
// and that does not stand.
func (f *refusals) refusesLocked(shares []share) bool {
	return slices.ContainsFunc(shares, func(s share) bool {
		a, has := f.Ledger.Get(s.id())
		if !has || a.IsOpen() || a.Grants[0].NoRoom { // nothing is made for that
			return false
		}
		_, refused := f.offer.Refused[placeOf(deviceOf(&a.Grants[0]))]
		return refused
	})
}

// whileMakeable returns a context that ends with ctx, or when the GPU's driver is known to
// refuse what a claim has.
func (f *refusals) whileMakeable(ctx context.Context, shares []share) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(ctx)
	go func() {
		for ctx.Err() == nil {
			f.mu.Lock()
			refused, news := f.offer != nil && f.refusesLocked(shares), f.news
			f.mu.Unlock()
			if refused {
				cancel()
			}
			select {
			case <-news:
			case <-ctx.Done():
			}
		}
	}()
	return ctx, cancel
}

// giveUp gives back what a claim has where the GPU's driver refuses to make it, and reports
// whether it did. It does not where the kubelet has been told that the claim is prepared, or
// where a container may have it: that one's pod is not ended.
func (f *refusals) giveUp(ctx context.Context, shares []share) bool {
	f.mu.Lock()
	refused := f.offer != nil && f.refusesLocked(shares)
	f.mu.Unlock()
	if !refused {
		return false
	}
	uid := shares[0].UID
	state, err := f.Kubelet.DRAState()
	if err != nil && !errors.Is(err, gpu.ErrNotFound) || answered(&state, f.Driver, uid) {
		return false
	}
	used, sure, err := inContainers(ctx, f.Runtime, f.Domain)
	if err != nil || !sure || slices.ContainsFunc(shares, func(s share) bool { return len(used[s.id()]) > 0 }) {
		return false
	}
	f.mu.Lock()
	for i := range shares {
		f.endLocked(shares[i].id(), uid)
	}
	f.mu.Unlock()
	f.Wake()
	return true
}
