// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"

	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/gpu/nvml/internal/ctxlock"
)

func answer(n int) func() (int, error) {
	return func() (int, error) { return n, nil }
}

// Who leaves the line for the driver leaves the lock of event sets to others at once,
// however long he waited: Events goes on meanwhile.
func TestAloneIsNeverTakenForHung(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &session{locks: newLocks()}
		if err := s.locks.calls.Lock(t.Context(), "stay"); err != nil { // somebody is inside, and his caller waits
			t.Fatal(err)
		}
		for range 100 { // it was shut for a moment, which some of them met
			const patience = 2 * ctxlock.HungAfter
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			err := s.exclusive(ctx, "work alone", func() {}, func() error { return nil })
			if !errors.Is(err, gpu.ErrTimeout) {
				t.Fatalf("beside a call that takes long: %v", err)
			}
			cancel()
			if _, err := ctxlock.Do(t.Context(), s.locks.eventSets, "watch", answer(1), nil); err != nil {
				t.Fatalf("after %s of waiting: %v", patience, err)
			}
		}
	})
}
