// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"example.com/gpu-agent/internal/kube"
)

// server has slices, and answers as a test says.
type server struct {
	mu      sync.Mutex
	have    []kube.ResourceSlice // guarded by mu
	writes  int                  // guarded by mu
	fails   error                // guarded by mu
	changed func()               // guarded by mu
}

func (s *server) PublishSlices(_ context.Context, _ string, want []kube.ResourceSlice) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.writes++; s.fails == nil || errors.Is(s.fails, kube.ErrDropped) {
		s.have = want
	}
	return s.fails
}

func (s *server) WatchSlices(ctx context.Context, _ string, changed func()) error {
	s.mu.Lock()
	s.changed = changed
	s.mu.Unlock()
	<-ctx.Done()
	return ctx.Err()
}

func (s *server) set(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f()
}

func publishing(t *testing.T) (*Publisher, *server) {
	s := &server{}
	p := NewPublisher(driver, s, slog.New(slog.DiscardHandler))
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- p.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
	synctest.Wait()
	return p, s
}

// Nothing is written before the kubelet has the driver, and everything at once then.
func TestNoSlicesBeforeRegistration(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, s := publishing(t)
		p.Set([]kube.ResourceSlice{{Name: "a"}})
		time.Sleep(time.Hour)
		if synctest.Wait(); s.writes > 0 {
			t.Error("slices of a driver that the kubelet does not have")
		}
		p.Registered(true)
		if synctest.Wait(); len(s.have) != 1 {
			t.Error("no slices at the registration")
		}
		p.Registered(false)
		p.Set([]kube.ResourceSlice{{Name: "a"}, {Name: "b"}})
		if synctest.Wait(); len(s.have) != 1 {
			t.Error("slices while the kubelet is away")
		}
	})
}

// A kubelet that starts deletes the slices, also long after it has registered the driver.
func TestSlicesThatVanish(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, s := publishing(t)
		p.Set([]kube.ResourceSlice{{Name: "a"}})
		p.Registered(true)
		for range 3 {
			time.Sleep(10 * time.Minute)
			synctest.Wait()
			before := s.writes
			s.set(func() { s.have = nil })
			s.changed()
			if synctest.Wait(); len(s.have) != 1 || s.writes != before+1 {
				t.Errorf("%v after %d writes", s.have, s.writes-before)
			}
		}
		// Somebody who does it all the time gets no flood of writes.
		before := s.writes
		for range 10_000 {
			s.changed()
			time.Sleep(time.Millisecond)
		}
		if synctest.Wait(); s.writes-before > 10*5+20+1 {
			t.Errorf("%d writes in 10 s", s.writes-before)
		}
	})
}

// What fails is tried again, less and less often; what the server drops is not.
func TestFailuresOfTheServer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, s := publishing(t)
		s.set(func() { s.fails = errors.New("no route to host") })
		p.Set([]kube.ResourceSlice{{Name: "a"}})
		p.Registered(true)
		time.Sleep(10 * time.Minute)
		if synctest.Wait(); p.Err() == nil || s.writes < 10 || s.writes > 40 {
			t.Errorf("%v after %d tries", p.Err(), s.writes)
		}
		s.set(func() { s.fails = nil })
		time.Sleep(2 * lastPause)
		if synctest.Wait(); p.Err() != nil || len(s.have) != 1 {
			t.Errorf("%v, %v", p.Err(), s.have)
		}
		s.set(func() { s.fails = fmt.Errorf("slice a: %w", kube.ErrDropped) })
		before := s.writes
		p.Set([]kube.ResourceSlice{{Name: "b"}})
		time.Sleep(time.Hour)
		if synctest.Wait(); !errors.Is(p.Err(), kube.ErrDropped) || s.writes != before+1 {
			t.Errorf("%v after %d writes", p.Err(), s.writes-before)
		}
	})
}
