// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"example.com/gpu-agent/internal/status"
)

// bell has rounds come. All of it may be used by several goroutines.
type bell struct {
	// rounds holds at most one token: somebody wants a round.
	rounds chan struct{}
	// stirred has one too: the watchdog has something new to look at.
	stirred chan struct{}
	// soon says that wakeSoon has a round coming.
	soon atomic.Bool
}

func newBell() *bell {
	return &bell{rounds: make(chan struct{}, 1), stirred: make(chan struct{}, 1)}
}

// wake asks for a round.
func (b *bell) wake() {
	poke(b.rounds)
	poke(b.stirred)
}

// poke leaves a token in a channel that has room for one.
func poke(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// wakeSoon asks for a round after answerTime, for all who ask meanwhile, unless
// PreStartContainer has had one by then: unopened reports that an allocation has had none.
func (b *bell) wakeSoon(unopened func() bool) {
	if b.soon.CompareAndSwap(false, true) {
		time.AfterFunc(answerTime, func() {
			b.soon.Store(false)
			if unopened() {
				b.wake()
			}
		})
	}
}

// beside is what runs beside the loop, or is told of its rounds. It is not changed after New.
type beside struct {
	// runs run as long as the agent does.
	runs []func(context.Context) error
	// leaves are called one after the other when the agent is to end, while everything still
	// runs.
	leaves []func(context.Context)
	// remarks are what they have to say of themselves.
	remarks []func() []status.Condition
	// turns are called at the end of each round; heard says that the witnesses have once said
	// who holds what.
	turns []func(heard bool)
}

// add has these run, if at all.
func (b *beside) add(wanted bool, runs ...func(context.Context) error) {
	if wanted {
		b.runs = append(b.runs, runs...)
	}
}

// conditions are what all have to say of themselves.
func (b *beside) conditions() (out []status.Condition) {
	for _, of := range b.remarks {
		out = append(out, of()...)
	}
	return out
}

// run runs everything beside a loop, until asked ends and all have taken their leave.
func (b *beside) run(asked context.Context, loop func(context.Context) error) error {
	ctx, end := context.WithCancel(context.WithoutCancel(asked))
	defer end()
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error {
		select {
		case <-asked.Done():
			for _, leave := range b.leaves {
				leave(ctx)
			}
			end()
			return asked.Err()
		case <-ctx.Done():
			return ctx.Err()
		}
	})
	for _, run := range b.runs {
		g.Go(func() error { return run(ctx) })
	}
	g.Go(func() error { return loop(ctx) })
	return g.Wait()
}

// abandon does something that is not waited for at the end: a wait inside the driver
// cannot be cut short, and the process may end without it.
func abandon(ctx context.Context, do func(context.Context) error) error {
	ended := make(chan error, 1)
	go func() { ended <- do(ctx) }()
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}
