// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"time"

	"example.com/gpu-agent/internal/brief"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/internal/park"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/memcap/lib"
)

const (
	// parkEvery is how often the parker looks while a container is parked.
	parkEvery = time.Second
	// restoreAfter is how long the room of a parked container must have been free before it is restored, so that
	// one guaranteed pod after the other does not move its memory to and fro. noRoomFor is the same after the
	// driver had no room for it.
	restoreAfter = 5 * time.Second
	noRoomFor    = 30 * time.Second
)

// Parking is what the agent parks containers with.
type Parking struct {
	// Keeper knows which are parked; *park.Keeper implements it.
	Keeper interface {
		Park(context.Context, park.Set) error
		Restore(ctx context.Context, key string) error
		Settle(context.Context) error
		Sets() []park.Record
	}
	// Find returns what has to be parked with a container, or why it cannot be.
	Find func(ctx context.Context, key string, c *node.Container, gpus []gpu.UUID) (park.Set, error)
	// Seen is nil if nothing is counted.
	Seen ParkObserver
}

// ParkObserver counts parks; it must not block.
type ParkObserver interface {
	// Parked is called after a try to park a container: what it has on GPUs, in bytes, and how long that took. outcome
	// is "parked", "refused" or "broken".
	Parked(outcome string, bytes uint64, took time.Duration)
	// Restored is called after a restore: how long it took, and for how long the container was parked.
	Restored(outcome string, took, parked time.Duration)
	// ParkedNow has how many containers are parked, and what they have on the host, in bytes.
	ParkedNow(containers int, bytes uint64)
}

// parker parks containers of the spot tier for the yielder, and restores them when their room is free again, the one
// that was parked first before the others. A nil *parker parks nothing. Use newParker.
//
// The keeper knows which processes are parked, also after a kill; the ledger knows whose the room is. The parker
// brings the two together: a container is restored only after the ledger has given its room back to it (Unpark).
type parker struct {
	with   *Parking
	ledger *ledger.Ledger
	caps   Caps
	wake   func() // has the witnesses asked
	log    *slog.Logger
	ration *brief.Ration
	news   chan struct{}

	mu sync.Mutex
	// Guarded by mu, all by the allocation's ID: those that a goroutine parks or restores; when the room was last
	// wanted that a park was tried for in vain; those whose container must be ended.
	busy   map[string]bool
	vain   map[string]time.Time
	broken map[string]bool
	ready  bool // true once what an earlier process has left is settled

	// The goroutine of run alone uses these: since when the room of a parked allocation is free, not before when it is
	// restored, and the allocations that were looked at for a hold that an earlier process has left.
	free, notBefore map[string]time.Time
	looked          map[string]bool
}

func newParker(w *Worlds, l *ledger.Ledger, wake func(), log *slog.Logger, ration *brief.Ration) *parker {
	if w.Parking == nil {
		return nil
	}
	return &parker{with: w.Parking, ledger: l, caps: w.Caps, wake: wake, log: log, ration: ration, news: make(chan struct{}, 1),
		busy: map[string]bool{}, vain: map[string]time.Time{}, broken: map[string]bool{},
		free: map[string]time.Time{}, notBefore: map[string]time.Time{}, looked: map[string]bool{}}
}

// takes reports whether the parker takes care of an allocation that is to give its room back: its container is being
// parked, or must be ended at once, since its processes may be broken. It begins to park the container, unless that was
// tried in vain. by is when the grace ends.
func (p *parker) takes(ctx context.Context, a *ledger.Allocation, of []using, by, now time.Time) bool {
	if p == nil {
		return false
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.broken[a.ID], p.busy[a.ID], !p.ready && now.Before(by):
		return true
	case !p.ready, p.vain[a.ID].Equal(a.Yield.Since) && !a.Yield.Since.IsZero(), !parkable(a, of), !now.Before(by):
		return false
	}
	p.busy[a.ID] = true
	go p.park(ctx, a, of[0].Container, by)
	return true
}

// parkable reports whether the driver may be able to checkpoint the container of an allocation.
func parkable(a *ledger.Allocation, of []using) bool {
	return len(of) == 1 && len(of[0].has) == 1 && !a.Yield.Layout && !a.Kind().InMIG() && !throughMPS(a)
}

func (p *parker) done(id string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.busy, id)
	poke(p.news)
}

func (p *parker) breaks(id string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.broken[id] = true
}

// hold has newcomers of an allocation's container wait, or go on.
func (p *parker) hold(id string, held bool) error {
	bits := uint64(0)
	if held {
		bits = lib.ControlHold
	}
	err := p.caps.SetControl(id, bits, lib.ControlHold)
	if errors.Is(err, gpu.ErrNotFound) && !held {
		return nil
	}
	return err
}

// park parks a container within the grace.
func (p *parker) park(ctx context.Context, a *ledger.Allocation, c *node.Container, by time.Time) {
	defer p.done(a.ID)
	began := time.Now()
	var set park.Set
	err := p.hold(a.ID, true)
	if err == nil {
		bounded, cancel := context.WithDeadline(ctx, by)
		defer cancel()
		if set, err = p.with.Find(bounded, a.ID, c, a.GPUs()); err == nil {
			err = p.with.Keeper.Park(bounded, set)
		}
	}
	took, outcome := time.Since(began), "parked"
	switch {
	case err == nil:
		p.log.Info("parked a container of the spot tier: its memory is on the host", "allocation", a.ID, "pod", a.Holder.String(),
			"processes", len(set.Processes), "bytes", set.Bytes, "after", took.Round(time.Millisecond).String())
		if !p.ledger.SetParked(a.ID, a.Epoch) {
			p.log.Warn("a parked container's allocation was renewed meanwhile", "allocation", a.ID) // run goes on with it
		}
		p.wake()
	case errors.Is(err, park.ErrBroken):
		outcome = "broken"
		p.breaks(a.ID)
		p.log.Error("ending a container of the spot tier, which its checkpoint may have broken", "allocation", a.ID,
			"pod", a.Holder.String(), "err", err)
	default:
		outcome = "refused"
		p.mu.Lock()
		p.vain[a.ID] = a.Yield.Since
		p.mu.Unlock()
		p.log.Info("a container of the spot tier cannot be parked; it has its grace", "allocation", a.ID, "pod", a.Holder.String(), "err", err)
		if !slices.ContainsFunc(p.with.Keeper.Sets(), func(r park.Record) bool { return r.Key == a.ID }) {
			if err := p.hold(a.ID, false); err != nil {
				p.ration.Log(slog.LevelWarn, "cannot let a container's newcomers go on", []any{"allocation", a.ID}, "err", err)
			}
		}
	}
	if p.with.Seen != nil {
		p.with.Seen.Parked(outcome, set.Bytes, took)
	}
}

// turn is called at the end of each round.
func (p *parker) turn(bool) {
	if p != nil {
		poke(p.news)
	}
}

// run settles what an earlier process has left, and then restores what can be restored, until ctx ends.
func (p *parker) run(ctx context.Context) error {
	for {
		p.look(ctx, time.Now())
		timer := time.NewTimer(parkEvery)
		select {
		case <-ctx.Done():
			timer.Stop()
			return ctx.Err()
		case <-timer.C:
		case <-p.news:
			timer.Stop()
		}
	}
}

// look goes through all that is parked once.
func (p *parker) look(ctx context.Context, now time.Time) {
	if err := p.with.Keeper.Settle(ctx); err != nil {
		p.ration.Log(slog.LevelWarn, "cannot settle what was parked; it is tried again", nil, "err", err)
	}
	p.mu.Lock()
	p.ready = true
	p.mu.Unlock()
	sets := p.with.Keeper.Sets()
	slices.SortStableFunc(sets, func(a, b park.Record) int { return a.Parked.Compare(b.Parked) })
	var bytes uint64
	known := map[string]bool{}
	restored := false
	for i := range sets {
		r := &sets[i]
		known[r.Key] = true
		if r.Phase == park.Parked {
			bytes += r.Bytes
		}
		a, found := p.ledger.Get(r.Key)
		if found && !restored && !p.isBusy(r.Key) {
			restored = p.goOn(ctx, &a, r, now)
		}
	}
	p.lookAtOthers(known)
	if p.with.Seen != nil {
		p.with.Seen.ParkedNow(len(sets), bytes)
	}
}

func (p *parker) isBusy(id string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.busy[id]
}

// goOn takes a set a step further, and reports whether it is being restored: one at a time, since each takes the
// host's whole bandwidth.
func (p *parker) goOn(ctx context.Context, a *ledger.Allocation, r *park.Record, now time.Time) (restores bool) {
	switch r.Phase {
	case park.Broken:
		p.breaks(a.ID)
		p.ledger.EndParked(a.ID, a.Epoch)
		return false
	case park.Locking, park.Saving: // Settle was not able to
		return false
	case park.Restoring: // an earlier process, or a driver that did not answer
		if a.Yield.Asked() {
			p.background(a.ID, func() { p.again(ctx, a) })
			return false
		}
	case park.Parked:
		if a.Phase != ledger.Parked {
			p.ledger.SetParked(a.ID, a.Epoch)
			p.wake()
			return false
		}
		if a.Yield.Asked() {
			delete(p.free, a.ID)
			return false
		}
		if p.free[a.ID].IsZero() {
			p.free[a.ID] = now
		}
		if now.Sub(p.free[a.ID]) < restoreAfter || now.Before(p.notBefore[a.ID]) {
			return false
		}
		if !p.ledger.Unpark(a.ID, a.Epoch) {
			return false
		}
		delete(p.free, a.ID)
		p.notBefore[a.ID] = now.Add(noRoomFor) // if it has to be tried again
	}
	p.background(a.ID, func() { p.restore(ctx, a, r) })
	return true
}

func (p *parker) background(id string, do func()) {
	p.mu.Lock()
	p.busy[id] = true
	p.mu.Unlock()
	go func() {
		defer p.done(id)
		do()
	}()
}

// again parks what was about to be restored when its room was wanted.
func (p *parker) again(ctx context.Context, a *ledger.Allocation) {
	switch err := p.with.Keeper.Park(ctx, park.Set{Key: a.ID}); {
	case errors.Is(err, park.ErrBroken):
		p.breaks(a.ID)
	case err != nil:
		p.ration.Log(slog.LevelWarn, "cannot park a container again; it is tried again", []any{"allocation", a.ID}, "err", err)
	default:
		p.ledger.SetParked(a.ID, a.Epoch)
		p.wake()
	}
}

// restore restores a container whose room is its own.
func (p *parker) restore(ctx context.Context, a *ledger.Allocation, r *park.Record) {
	began := time.Now()
	err := p.with.Keeper.Restore(ctx, a.ID)
	took, outcome := time.Since(began), "restored"
	switch {
	case err == nil:
		p.log.Info("restored a container of the spot tier", "allocation", a.ID, "pod", a.Holder.String(), "bytes", r.Bytes,
			"after", took.Round(time.Millisecond).String(), "parked", began.Sub(r.Parked).Round(time.Second).String())
		if err := p.hold(a.ID, false); err != nil {
			p.ration.Log(slog.LevelWarn, "cannot let a container's newcomers go on", []any{"allocation", a.ID}, "err", err)
		}
		p.wake()
	case errors.Is(err, park.ErrBroken):
		outcome = "broken"
		p.breaks(a.ID)
		p.log.Error("ending a container of the spot tier, which its restore may have broken", "allocation", a.ID,
			"pod", a.Holder.String(), "err", err)
	case errors.Is(err, park.ErrNoRoom):
		outcome = "no room"
		p.ledger.SetParked(a.ID, a.Epoch)
		p.ration.Log(slog.LevelWarn, "a GPU has no room for a parked container, although none is given out", []any{"allocation", a.ID}, "err", err)
	default:
		outcome = "failed"
		p.ration.Log(slog.LevelWarn, "cannot restore a parked container; it is tried again", []any{"allocation", a.ID}, "err", err)
	}
	if p.with.Seen != nil {
		p.with.Seen.Restored(outcome, took, max(0, began.Sub(r.Parked)))
	}
}

// lookAtOthers looks at the allocations of which nothing is parked: a container that has ended while it was parked,
// and a hold that an earlier process has left.
func (p *parker) lookAtOthers(known map[string]bool) {
	all := p.ledger.Allocations()
	spot := map[string]bool{}
	for i := range all {
		a := &all[i]
		if a.Tier != ledger.Spot {
			continue
		}
		if spot[a.ID] = true; known[a.ID] || p.isBusy(a.ID) {
			continue
		}
		if a.Phase == ledger.Parked {
			p.ledger.EndParked(a.ID, a.Epoch)
			p.looked[a.ID] = false
			p.wake()
		}
		if !p.looked[a.ID] {
			if err := p.hold(a.ID, false); err != nil {
				p.ration.Log(slog.LevelWarn, "cannot let a container's newcomers go on", []any{"allocation", a.ID}, "err", err)
				continue
			}
			p.looked[a.ID] = true
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for id := range p.broken {
		if !known[id] && !p.busy[id] {
			delete(p.broken, id) // its processes have ended
		}
	}
	for _, of := range []map[string]time.Time{p.vain, p.free, p.notBefore} {
		for id := range of {
			if !spot[id] {
				delete(of, id)
			}
		}
	}
	for id := range p.looked {
		if !spot[id] {
			delete(p.looked, id)
		}
	}
}

// ends returns the allocations whose containers must be ended although their room is not wanted.
func (p *parker) ends() map[string]bool {
	out := map[string]bool{}
	if p == nil {
		return out
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for id := range p.broken {
		out[id] = true
	}
	return out
}
