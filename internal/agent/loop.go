// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"maps"
	"slices"
	"time"

	"example.com/gpu-agent/internal/brief"
	"example.com/gpu-agent/internal/deviceplugin"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/pkg/gpu"
)

// loop has the rounds, and joins the rooms that it asks in them; doc.go has a table of these. All
// of it is for its goroutine, which [Agent.Run] begins. Use [New].
type loop struct {
	bell       *bell
	mail       *mailbox
	ledger     *ledger.Ledger
	witnesses  *deviceplugin.Witnesses
	reader     *reader
	partitions *partitions
	others     neighbours
	layouts    *layouts
	executor   *executor
	slices     *timeSlices
	gates      *gatekeeper
	offering   *offering
	journal    *journal
	reporter   reports
	beside     *beside
	observer   Observer
	// ration is the log for what a program on a GPU, or a server that is away, can
	// repeat as often as it likes.
	ration *brief.Ration
}

// neighbours are others who may give out the node's GPUs; coexistence finds them.
type neighbours interface {
	// look looks for them where that is due: see coexistence.
	look(ctx context.Context, inv *gpu.Inventory, migManager string, mine []string) (map[string][]string, bool)
	// lookAtCheckpoint has look find out what is new in the kubelet's checkpoint.
	lookAtCheckpoint()
	// theirs is why GPUs are, or may be, given out by somebody else; nil before the first look.
	theirs() map[gpu.UUID]string
	// next is when the next look is due, zero before the first; soon has it come no later than
	// at that time.
	next() time.Time
	soon(at time.Time)
}

// reports keeps what rounds came to; reporter does.
type reports interface {
	finish(s *Snapshot, f *findings)
	last() *Snapshot
}

// run has one round after the other, as long as the driver can be used.
func (l *loop) run(ctx context.Context) error {
	pause := backOff(backOffMax)
	for {
		began := time.Now()
		err := l.round(ctx)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if errors.Is(err, gpu.ErrReloaded) {
			return err
		}
		l.observer.Round(err, time.Since(began))
		wait := l.nextLook(time.Now())
		if err != nil {
			most := pause.Step()
			l.ration.Log(slog.LevelError, "round failed", nil, "err", err, "again_in", most.String())
			// Not at once: what failed may be what makes wait short.
			wait = min(max(wait, backOffMin), most)
		} else {
			pause = backOff(backOffMax)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-l.bell.rounds:
		case <-time.After(wait):
		}
	}
}

// nextLook says how long the loop may sleep if nobody wakes it.
func (l *loop) nextLook(now time.Time) time.Duration {
	wait := inventoryEvery
	if l.reader.reading == nil && l.reader.letGo == "" {
		wait = l.reader.nextReading(now).Sub(now)
	}
	in := l.mail.latest()
	for _, r := range in.refused {
		if left := silentFor - now.Sub(r.since); left > 0 {
			wait = min(wait, left)
		}
	}
	if l.offering.unregistered() {
		wait = min(wait, holdersEvery) // it is news when it has been so for a while
	}
	if l.reader.inv == nil {
		// A round ends behind the driver then: what is due later on would stay due.
		return max(wait, leastSleep)
	}
	if due := l.others.next(); !due.IsZero() {
		wait = min(wait, due.Sub(now))
	}
	if at, ok := l.witnesses.Next(l.reporter.last().blocked, now); ok {
		wait = min(wait, at)
	}
	if l.someoneWaits() {
		wait = min(wait, waitEvery)
	}
	if at, ok := l.executor.nextWork(now); ok {
		wait = min(wait, at)
	}
	for _, past := range l.layouts.past {
		for _, p := range past {
			wait = min(wait, p.Until.Sub(now))
		}
	}
	return max(wait, leastSleep)
}

// someoneWaits reports whether an allocation waits for the holder before it.
func (l *loop) someoneWaits() bool {
	return slices.ContainsFunc(l.ledger.Allocations(), func(c ledger.Allocation) bool {
		return c.Phase == ledger.Waiting
	})
}

func sortedKeys[K cmp.Ordered, V any](m map[K]V) []K { return slices.Sorted(maps.Keys(m)) }
