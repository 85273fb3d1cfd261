// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"log/slog"
	"maps"
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
	// Guarded by mu: what is known of allocations of the spot tier, by ID.
	of    map[string]*parkState
	ready bool // true once what an earlier process has left is settled
}

// parkState is what the parker knows of an allocation.
type parkState struct {
	// busy is true while a goroutine parks or restores its container. broken is true if the container must be ended.
	busy, broken bool
	// vain is when the room was wanted that a park was last tried for in vain; zero if none was.
	vain time.Time

	// The goroutine of run alone uses these. free is the time since which the room of the parked container is
	// free; zero if it is not. The container is not restored before notBefore. swept is true once a hold was cleared
	// that an earlier process may have left.
	free, notBefore time.Time
	swept           bool
}

func newParker(w *Worlds, l *ledger.Ledger, wake func(), log *slog.Logger, ration *brief.Ration) *parker {
	if w.Parking == nil {
		return nil
	}
	return &parker{with: w.Parking, ledger: l, caps: w.Caps, wake: wake, log: log, ration: ration, news: make(chan struct{}, 1),
		of: map[string]*parkState{}}
}

// edit calls change with what is known of an allocation, under the lock.
func (p *parker) edit(id string, change func(*parkState)) *parkState {
	p.mu.Lock()
	defer p.mu.Unlock()
	v := p.of[id]
	if v == nil {
		v = &parkState{}
		p.of[id] = v
	}
	change(v)
	return v
}

// takes reports whether the parker takes care of an allocation that is to give its room back: its container is being
// parked, or must be ended at once, since its processes may be broken. It begins to park the container, unless that was
// tried in vain. by is when the grace ends.
func (p *parker) takes(ctx context.Context, a *ledger.Allocation, of []using, by, now time.Time) (takes bool) {
	if p == nil {
		return false
	}
	begins := false
	p.edit(a.ID, func(v *parkState) {
		switch {
		case v.broken, v.busy, !p.ready && now.Before(by):
			takes = true
		case !p.ready, v.vain.Equal(a.Yield.Since) && !a.Yield.Since.IsZero(), !parkable(a, of), !now.Before(by):
		default:
			takes, begins, v.busy = true, true, true
		}
	})
	if begins {
		go p.park(ctx, a, of[0].Container, by)
	}
	return takes
}

// parkable reports whether the driver may be able to checkpoint the container of an allocation.
func parkable(a *ledger.Allocation, of []using) bool {
	return len(of) == 1 && len(of[0].has) == 1 && !a.Yield.Layout && !a.Kind().InMIG() && !throughMPS(a)
}

func (p *parker) done(id string) {
	p.edit(id, func(v *parkState) { v.busy = false })
	poke(p.news)
}

func (p *parker) breaks(id string) { p.edit(id, func(v *parkState) { v.broken = true }) }

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
		if !p.setParked(a) {
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
		p.edit(a.ID, func(v *parkState) { v.vain = a.Yield.Since })
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
		if v, busy := p.get(r.Key); found && !restored && !busy {
			restored = p.goOn(ctx, &a, v, r, now)
		}
	}
	p.lookAtOthers(known)
	if p.with.Seen != nil {
		p.with.Seen.ParkedNow(len(sets), bytes)
	}
}

// get returns what is known of an allocation, and whether a goroutine parks or restores its container.
func (p *parker) get(id string) (v *parkState, busy bool) {
	v = p.edit(id, func(v *parkState) { busy = v.busy })
	return v, busy
}

// goOn takes a set a step further, and reports whether it is being restored: one at a time, since each takes the
// host's whole bandwidth.
func (p *parker) goOn(ctx context.Context, a *ledger.Allocation, v *parkState, r *park.Record, now time.Time) (restores bool) {
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
			p.setParked(a)
			p.wake()
			return false
		}
		if a.Yield.Asked() {
			v.free = time.Time{}
			return false
		}
		if v.free.IsZero() {
			v.free = now
		}
		if now.Sub(v.free) < restoreAfter || now.Before(v.notBefore) || !p.ledger.Unpark(a.ID, a.Epoch) {
			return false
		}
		v.free, v.notBefore = time.Time{}, now.Add(noRoomFor) // if it has to be tried again
	}
	p.background(a.ID, func() { p.restore(ctx, a, r) })
	return true
}

// setParked tells the ledger that a container is parked, by the keeper's record. It reports false if its allocation was
// given to another holder.
func (p *parker) setParked(a *ledger.Allocation) bool {
	sets := p.with.Keeper.Sets()
	if i := slices.IndexFunc(sets, func(r park.Record) bool { return r.Key == a.ID }); i >= 0 {
		return p.ledger.SetParked(a.ID, a.Epoch, sets[i].Bytes, sets[i].Parked)
	}
	return true // it has ended meanwhile
}

func (p *parker) background(id string, do func()) {
	p.edit(id, func(v *parkState) { v.busy = true })
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
		p.setParked(a)
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
		p.setParked(a)
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
		spot[a.ID] = true
		v, busy := p.get(a.ID)
		if known[a.ID] || busy {
			continue
		}
		if a.Phase == ledger.Parked {
			p.ledger.EndParked(a.ID, a.Epoch)
			v.swept = false
			p.wake()
		}
		if !v.swept {
			if err := p.hold(a.ID, false); err != nil {
				p.ration.Log(slog.LevelWarn, "cannot let a container's newcomers go on", []any{"allocation", a.ID}, "err", err)
				continue
			}
			v.swept = true
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	maps.DeleteFunc(p.of, func(id string, v *parkState) bool {
		if !known[id] && !v.busy {
			v.broken = false // its processes have ended
		}
		return !spot[id] && !known[id] && !v.busy
	})
}

// ends returns the allocations whose containers must be ended although their room is not wanted.
func (p *parker) ends() map[string]bool {
	out := map[string]bool{}
	if p == nil {
		return out
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for id, v := range p.of {
		if v.broken {
			out[id] = true
		}
	}
	return out
}
