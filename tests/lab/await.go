// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// lookEvery is the pause between two looks. A look costs a request on loopback.
const lookEvery = 100 * time.Millisecond

// ErrNever is wrapped by a look's error that no time will mend, such as a pod
// that has failed where it should run: Await then returns at once.
var ErrNever = errors.New("cannot become true any more")

// Await looks until look returns nil. It gives up after limit, which is enough for a machine
// that has nothing else to do; where this process is late, by as many times more as its own
// sleeps of 10 ms take longer, at most five times. It then returns look's last error, with
// what was waited for and the factor before it. look says what it saw that is not as it
// should be.
func Await(ctx context.Context, limit time.Duration, what string, look func(context.Context) error) error {
	return await(ctx, limit, lookEvery, what, look, ownPace().since())
}

// Moment is Await for who wants to know when: it looks at a pace of the caller's
// and returns the time of the look that was the first to be content. What it
// says is late by as much as the pace and two looks take.
func Moment(ctx context.Context, limit, pace time.Duration, what string, look func(context.Context) error) (time.Time, error) {
	err := await(ctx, limit, pace, what, look, ownPace().since())
	return time.Now(), err
}

// Holds looks again and again for as long as it is told, and returns what is
// wrong as soon as look says so: it is for what must not happen.
func Holds(ctx context.Context, span time.Duration, what string, look func(context.Context) error) error {
	began := time.Now()
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	for looks := 1; ; looks++ {
		if err := look(ctx); err != nil {
			return fmt.Errorf("%s, %.1f s on, at look %d: %w", what, time.Since(began).Seconds(), looks, err)
		}
		if time.Since(began) >= span {
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
	}
}

// await is Await with a pause between two looks, and with stretch, which says how many times
// longer than limit a wait may take by now.
func await(ctx context.Context, limit, pause time.Duration, what string, look func(context.Context) error, stretch func() float64) error {
	began := time.Now()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	over := func() bool { return time.Since(began) >= time.Duration(float64(limit)*stretch()) }
	// A look that hangs ends with the limit, too.
	go func() {
		for !over() {
			select {
			case <-ctx.Done():
				return
			case <-time.After(max(pause, limit-time.Since(began))):
			}
		}
		cancel()
	}()
	tick := time.NewTicker(pause)
	defer tick.Stop()
	var last error
	for {
		err := look(ctx)
		if err == nil {
			return nil
		}
		// The end of time is not what was seen.
		if last == nil || ctx.Err() == nil {
			last = err
		}
		if errors.Is(err, ErrNever) {
			return fmt.Errorf("wait for %s: %w", what, err)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for %s: not within %.0f s, with the limit of %.0f s stretched %.1f times; last seen: %w",
				what, time.Since(began).Seconds(), limit.Seconds(), stretch(), last)
		case <-tick.C:
		}
	}
}
