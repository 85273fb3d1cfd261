// SPDX-License-Identifier: Apache-2.0

package ctxlock

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"

	"example.com/gpu-agent/pkg/gpu"
)

func TestShareHoldersExcludeEachOther(t *testing.T) {
	s := NewRWMutex()
	var together, alone atomic.Int32
	var wg sync.WaitGroup
	for i := range 60 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			if i%3 == 0 {
				if err := s.Lock(t.Context()); err != nil {
					t.Error(err)
					return
				}
				defer s.Unlock()
				if n := alone.Add(1); n != 1 || together.Load() != 0 {
					t.Errorf("one of %d that are alone, beside %d", n, together.Load())
				}
				alone.Add(-1)
				return
			}
			if err := s.RLock(t.Context()); err != nil {
				t.Error(err)
				return
			}
			defer s.RUnlock()
			if together.Add(1); alone.Load() != 0 {
				t.Error("joined one who is alone")
			}
			together.Add(-1)
		}()
	}
	wg.Wait()
	if !s.TryLock() {
		t.Error("somebody has not left")
	}
}

// One who wants to be alone is let in before those who come after it, and those
// go on when it gives up.
func TestShareLetsASeekerGoFirst(t *testing.T) {
	s := NewRWMutex()
	if !s.TryRLock() {
		t.Fatal("cannot join")
	}
	if s.TryLock() {
		t.Fatal("alone beside another")
	}
	ctx, leave := context.WithCancel(t.Context())
	sought := make(chan error)
	go func() { sought <- s.Lock(ctx) }()
	<-s.Wanted()
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	if err := s.RLock(gone); !errors.Is(err, gpu.ErrTimeout) || !errors.Is(err, context.Canceled) {
		t.Errorf("joined before one who waited: %v", err)
	}
	if !s.TryRLock() {
		t.Error("a short use had to wait")
	}
	s.RUnlock()
	joined := make(chan error)
	go func() { joined <- s.RLock(t.Context()) }()
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
	s.RUnlock()
	go func() { sought <- s.Lock(t.Context()) }()
	<-s.Wanted()
	s.RUnlock()
	if err := <-sought; err != nil {
		t.Error(err)
	}
	if s.TryRLock() {
		t.Error("joined one who is alone")
	}
}
