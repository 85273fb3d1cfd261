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

// Await looks until look returns nil, and returns look's last error, after at
// most limit, with what was waited for before it. look says what it saw that
// is not as it should be.
func Await(ctx context.Context, limit time.Duration, what string, look func(context.Context) error) error {
	began := time.Now()
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	tick := time.NewTicker(lookEvery)
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
			return fmt.Errorf("wait for %s: not within %.0f s; last seen: %w", what, time.Since(began).Seconds(), last)
		case <-tick.C:
		}
	}
}
