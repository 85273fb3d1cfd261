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

// loop runs the rounds and calls the components; doc.go has a table of them. All of it belongs to
// its goroutine, which [Agent.Run] starts. Use [New].
type loop struct {
	waker      *waker
	mail       *mailbox
	ledger     *ledger.Ledger
	witnesses  *deviceplugin.Witnesses
	reader     *reader
	partitions *partitions
	others     neighbours
	layouts    *layouts
	executor   *executor
	slices     *timeSlices
	finder     *finder
	mps        *mpsDaemons
	lender     *Lender
	gates      *gatekeeper
	offering   *offering
	journal    *journal
	yields     *yielder
	reporter   reports
	background *background
	observer   Observer
	// ration limits log lines that a program on a GPU, or a server that is away, can cause again
	// and again.
	ration *brief.Ration
}

// neighbours finds others that may give out the node's GPUs. coexistence implements it.
type neighbours interface {
	// look searches for them if that is due: see coexistence.
	look(ctx context.Context, inv *gpu.Inventory, migManager string, mine []string) (map[string][]string, bool)
	// lookAtCheckpoint makes look check what is new in the kubelet's checkpoint.
	lookAtCheckpoint()
	// theirs returns why GPUs are, or may be, another owner's; nil before the first look.
	theirs() map[gpu.UUID]string
	// next returns when the next look is due; zero before the first. soon makes it due no later
	// than at.
	next() time.Time
	soon(at time.Time)
}

// reports keeps the results of rounds. reporter implements it.
type reports interface {
	finish(s *Snapshot, f *findings)
	last() *Snapshot
}

// run runs rounds as long as the driver can be used. It returns the error of ctx or one that wraps
// gpu.ErrReloaded.
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
			// The failure may also be why wait is short, so there is a minimum.
			wait = min(max(wait, backOffMin), most)
		} else {
			pause = backOff(backOffMax)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-l.waker.rounds:
		case <-time.After(wait):
		}
	}
}

// nextLook returns how long the loop may sleep if no token wakes it.
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
		wait = min(wait, holdersEvery) // the plugin is reported once this has lasted for silentFor
	}
	if l.reader.inv == nil {
		// Such a round ends after the reading, so other due work would stay due and make the loop
		// spin.
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

// someoneWaits reports whether an allocation waits for the previous holder of its devices. What has yielded
// waits for the end of an allocation, which wakes the loop.
func (l *loop) someoneWaits() bool {
	return slices.ContainsFunc(l.ledger.Allocations(), func(c ledger.Allocation) bool {
		return c.Phase == ledger.Waiting && !c.Out()
	})
}

func sortedKeys[K cmp.Ordered, V any](m map[K]V) []K { return slices.Sorted(maps.Keys(m)) }
