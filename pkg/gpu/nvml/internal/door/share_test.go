// SPDX-License-Identifier: Apache-2.0

package door

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"

	"example.com/gpu-agent/pkg/gpu"
)

func TestShareHoldersExcludeEachOther(t *testing.T) {
	s := NewShare()
	var together, alone atomic.Int32
	var wg sync.WaitGroup
	for i := range 60 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			if i%3 == 0 {
				if err := s.Seize(t.Context()); err != nil {
					t.Error(err)
					return
				}
				defer s.Yield()
				if n := alone.Add(1); n != 1 || together.Load() != 0 {
					t.Errorf("one of %d that are alone, beside %d", n, together.Load())
				}
				alone.Add(-1)
				return
			}
			if err := s.Join(t.Context()); err != nil {
				t.Error(err)
				return
			}
			defer s.Part()
			if together.Add(1); alone.Load() != 0 {
				t.Error("joined one who is alone")
			}
			together.Add(-1)
		}()
	}
	wg.Wait()
	if !s.TrySeize() {
		t.Error("somebody has not left")
	}
}

// One who wants to be alone is let in before those who come after it, and those
// go on when it gives up.
func TestShareLetsASeekerGoFirst(t *testing.T) {
	s := NewShare()
	if !s.TryJoin() {
		t.Fatal("cannot join")
	}
	if s.TrySeize() {
		t.Fatal("alone beside another")
	}
	ctx, leave := context.WithCancel(t.Context())
	sought := make(chan error)
	go func() { sought <- s.Seize(ctx) }()
	<-s.Wanted()
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	if err := s.Join(gone); !errors.Is(err, gpu.ErrTimeout) || !errors.Is(err, context.Canceled) {
		t.Errorf("joined before one who waited: %v", err)
	}
	if !s.TryJoin() {
		t.Error("a short use had to wait")
	}
	s.Part()
	joined := make(chan error)
	go func() { joined <- s.Join(t.Context()) }()
	leave()
	if err := <-sought; !errors.Is(err, gpu.ErrTimeout) {
		t.Errorf("alone beside another: %v", err)
	}
	if err := <-joined; err != nil {
		t.Error(err)
	}
	select {
	case <-s.Wanted():
		t.Error("wanted by nobody")
	default:
	}
	s.Part()
	go func() { sought <- s.Seize(t.Context()) }()
	<-s.Wanted()
	s.Part()
	if err := <-sought; err != nil {
		t.Error(err)
	}
	if s.TryJoin() {
		t.Error("joined one who is alone")
	}
}
