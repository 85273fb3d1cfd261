// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"example.com/gpu-agent/internal/status"
)

// waker holds the tokens that start rounds. Any goroutine may use it.
type waker struct {
	// rounds holds a token if a round was asked for.
	rounds chan struct{}
	// stirred holds a token if the watchdog has something new to look at.
	stirred chan struct{}
	// soon is true while a delayed wakeSoon is pending.
	soon atomic.Bool
}

func newWaker() *waker {
	return &waker{rounds: make(chan struct{}, 1), stirred: make(chan struct{}, 1)}
}

// wake asks for a round.
func (b *waker) wake() {
	poke(b.rounds)
	poke(b.stirred)
}

// poke leaves a token in a channel of size one, unless it holds one.
func poke(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// wakeSoon asks for a round after answerTime, one for all calls until then. There is no round if
// unopened returns false by then, because PreStartContainer has had one for each allocation.
func (b *waker) wakeSoon(unopened func() bool) {
	if b.soon.CompareAndSwap(false, true) {
		time.AfterFunc(answerTime, func() {
			b.soon.Store(false)
			if unopened() {
				b.wake()
			}
		})
	}
}

// background lists what runs beside the loop, or is called by it. It does not change after New.
type background struct {
	// runs run as long as the agent does.
	runs []func(context.Context) error
	// atEnd are called one after the other when the agent is to end, while everything still runs.
	atEnd []func(context.Context)
	// remarks return the conditions of what runs beside the loop.
	remarks []func() []status.Condition
	// afterRound are called at the end of each round. heard is Witnesses.Heard.
	afterRound []func(heard bool)
}

// add adds runs if wanted is true.
func (b *background) add(wanted bool, runs ...func(context.Context) error) {
	if wanted {
		b.runs = append(b.runs, runs...)
	}
}

// conditions returns the conditions of all remarks.
func (b *background) conditions() (out []status.Condition) {
	for _, of := range b.remarks {
		out = append(out, of()...)
	}
	return out
}

// run runs loop and everything beside it until asked ends. Then it calls atEnd and stops the
// rest.
func (b *background) run(asked context.Context, loop func(context.Context) error) error {
	ctx, end := context.WithCancel(context.WithoutCancel(asked))
	defer end()
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error {
		select {
		case <-asked.Done():
			for _, leave := range b.atEnd {
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

// abandon runs do, but returns when ctx ends even if do has not: a wait inside the driver cannot be
// interrupted, and the process may end without it.
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
