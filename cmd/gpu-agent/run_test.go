// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

// The loop takes its leave while all around it still runs, and what ends in between ends
// the rest.
func TestTheLoopEndsFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		left := false
		loop := func(ctx context.Context) error {
			<-ctx.Done()
			time.Sleep(time.Second)
			left = true
			return ctx.Err()
		}
		service := func(ctx context.Context) error {
			<-ctx.Done()
			if !left {
				t.Error("a service ends while the loop takes its leave")
			}
			return ctx.Err()
		}
		time.AfterFunc(time.Minute, cancel)
		if err := around(ctx, loop, service, service); !errors.Is(err, context.Canceled) {
			t.Errorf("told to end: %v", err)
		}
	})
	synctest.Test(t, func(t *testing.T) {
		failed := errors.New("the port is taken")
		wait := func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }
		if err := around(t.Context(), wait, wait, func(context.Context) error { return failed }); !errors.Is(err, failed) {
			t.Errorf("a service that fails: %v", err)
		}
	})
}
