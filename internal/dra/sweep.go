// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"example.com/gpu-agent/internal/kube"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/pkg/gpu"
)

const (
	// sweepEvery is how often claims are looked for that have ended without an Unprepare,
	// while there are any, and grace how long one is kept that nobody knows.
	sweepEvery = 30 * time.Second
	grace      = 30 * time.Second
	// apiPatience bounds one question to the API server.
	apiPatience = 10 * time.Second
)

// Observe says which allocations containers have, and who the first of each is, by the
// runtime, which was asked at a moment.
func (f *FrontEnd) Observe(holders map[string]ledger.Holder, asked time.Time) {
	f.mu.Lock()
	f.uses, f.usesAt = holders, asked
	var ours []string
	for _, held := range f.claims {
		ours = append(ours, held...)
	}
	f.mu.Unlock()
	for _, id := range ours {
		if h, ok := holders[id]; ok {
			f.Ledger.SetHolder(id, h)
		}
	}
}

// Run publishes, and ends what the kubelet has forgotten, until ctx ends.
func (f *FrontEnd) Run(ctx context.Context) error {
	all, ctx := errgroup.WithContext(ctx)
	all.Go(func() error { return f.publisher.Run(ctx) })
	all.Go(func() error { return f.follow(ctx) })
	return all.Wait()
}

// follow lists the claims at the start, and then where something depends on them.
func (f *FrontEnd) follow(ctx context.Context) error {
	pause := newPause()
	for {
		var again <-chan time.Time
		switch err := f.look(ctx); {
		case err == nil:
			pause = newPause()
			again = time.After(sweepEvery)
		default:
			if ctx.Err() == nil {
				f.Log.Warn("cannot tell which claims there are; trying again", "driver", f.Driver, "err", err)
			}
			again = time.After(pause.Step())
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-f.sweep:
		case <-again:
		}
	}
}

// lookAgain has the claims listed: something that waits for it was published.
func (f *FrontEnd) lookAgain() {
	f.mu.Lock()
	waits := len(f.leaving) > 0
	f.mu.Unlock()
	if waits {
		f.poke()
	}
}

func (f *FrontEnd) poke() {
	select {
	case f.sweep <- struct{}{}:
	default:
	}
}

// look lists the claims, if anything depends on them: at the start, while a device is
// leaving, and where an allocation may have ended unheard.
func (f *FrontEnd) look(ctx context.Context) error {
	state, err := f.Kubelet.DRAState()
	if err != nil && !errors.Is(err, gpu.ErrNotFound) {
		return fmt.Errorf("read what the kubelet has prepared: %w", err)
	}
	f.mu.Lock()
	first, at, known := !f.listed, f.publisher.done(), f.offer != nil
	suspects := f.suspectsLocked(&state)
	parting := slices.ContainsFunc(slices.Collect(maps.Values(f.leaving)), func(n uint64) bool { return n > 0 && n <= at })
	f.mu.Unlock()
	if !known || !first && len(suspects) == 0 && !parting {
		return nil
	}
	asked := f.Now()
	actx, cancel := context.WithTimeout(ctx, apiPatience)
	defer cancel()
	claims, err := f.API.Claims(actx, f.Driver)
	if err != nil {
		return fmt.Errorf("list the claims: %w", err)
	}
	if first {
		f.begin(claims, &state)
	}
	f.end(suspects, claims, asked)
	f.part(claims, at)
	return nil
}

// suspectsLocked are the claims that the kubelet does not know, whose containers are gone,
// and that are not new.
func (f *FrontEnd) suspectsLocked(state *node.DRAState) (uids []string) {
	for uid, held := range f.claims {
		old := func(id string) bool {
			a, ok := f.Ledger.Get(id)
			return ok && !inUse(f.uses, id) && f.usesAt.After(a.Taken) && f.Now().Sub(a.Taken) >= grace
		}
		if !prepared(state, uid) && !slices.ContainsFunc(held, func(id string) bool { return !old(id) }) {
			uids = append(uids, uid)
		}
	}
	slices.Sort(uids)
	return uids
}

func inUse(holders map[string]ledger.Holder, id string) bool {
	_, ok := holders[id]
	return ok
}

func prepared(state *node.DRAState, uid string) bool {
	return slices.ContainsFunc(state.Claims, func(c node.PreparedClaim) bool { return c.UID == uid })
}

// begin takes over the claims that are prepared and of which no record is left, and keeps
// the devices that claims name in their slices.
func (f *FrontEnd) begin(claims []kube.Claim, state *node.DRAState) {
	for i := range claims {
		c := &claims[i]
		if !prepared(state, c.UID) {
			continue
		}
		if err := f.takeOver(c); err != nil {
			f.Log.Warn("cannot take over what a claim has; its GPU may be given to somebody else", "claim", c.Namespace+"/"+c.Name, "err", err)
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	every := everyDevice(f.Node, f.offer.Inventory, f.offer.Cards)
	for i := range claims {
		for _, w := range wants(&claims[i], f.Driver, f.Node) {
			if d, ok := every[DeviceName{w.Pool, w.Device}]; ok {
				f.leaving[d] = 0 // unless a layout has it
			}
		}
	}
	f.listed = true
	close(f.news)
	f.news = make(chan struct{})
	f.showLocked()
	f.Wake() // for what was taken over
}

// Settle makes sure that whoever was promised what is withdrawn now is in the ledger: it
// waits until the server has the slices as they were published, and takes what claims have
// been allocated since. Where it fails, nothing that this front-end offers may be taken
// away from the hardware.
func (f *FrontEnd) Settle(ctx context.Context) error {
	if err := f.publisher.settled(ctx); err != nil {
		return err
	}
	claims, err := f.API.Claims(ctx, f.Driver)
	if err != nil {
		return fmt.Errorf("list the claims: %w", err)
	}
	for i := range claims {
		wants := wants(&claims[i], f.Driver, f.Node)
		if _, ok := f.taken(claims[i].UID); ok || len(wants) == 0 {
			continue
		}
		if ready, _, err := f.findNow(wants); ready && err == nil {
			// What cannot be taken cannot be prepared either, and its Prepare says why.
			_, _ = f.take(wants)
		}
	}
	return nil
}

// end ends the suspects whose claim is no more, or is allocated no more.
func (f *FrontEnd) end(suspects []string, claims []kube.Claim, asked time.Time) {
	f.mu.Lock()
	ended := false
	for _, uid := range suspects {
		if slices.ContainsFunc(claims, func(c kube.Claim) bool { return c.UID == uid }) {
			continue
		}
		for _, id := range slices.Clone(f.claims[uid]) {
			if a, ok := f.Ledger.Get(id); ok && a.Taken.Before(asked) {
				f.Log.Info("allocation ended: API server, kubelet and container runtime know nothing of it", "allocation", id, "claim", uid)
				f.endLocked(id, uid)
				ended = true
			}
		}
	}
	f.mu.Unlock()
	if ended {
		f.Wake()
	}
}

// part lets those devices go from their slices that were tainted at the server before the
// claims were listed, that no claim names and that nobody has. at is the last writing
// before the list.
func (f *FrontEnd) part(claims []kube.Claim, at uint64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	named := map[DeviceName]bool{}
	for i := range claims {
		for _, w := range wants(&claims[i], f.Driver, f.Node) {
			named[DeviceName{w.Pool, w.Device}] = true
		}
	}
	held := map[Device]bool{}
	for _, a := range f.Ledger.Allocations() {
		for j := range a.Grants {
			held[deviceOf(&a.Grants[j])] = a.Owner == ledger.DRA
		}
	}
	before := len(f.leaving)
	for name, d := range f.published.Devices {
		if n := f.leaving[d]; n > 0 && n <= at && !named[name] && !held[d] {
			delete(f.leaving, d)
			delete(f.published.Devices, name)
		}
	}
	if len(f.leaving) < before {
		f.Log.Info("devices leave their ResourceSlices: no claim names them", "devices", before-len(f.leaving))
		f.showLocked()
	}
}
