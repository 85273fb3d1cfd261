// SPDX-License-Identifier: Apache-2.0

package ctxlock

import (
	"context"
	"fmt"
	"sync"

	"example.com/gpu-agent/pkg/gpu"
)

// RWMutex is a lock that many hold together (RLock), or one alone (Lock). Waiting for it ends with
// the context. While a caller waits in Lock, RLock waits too, so that this caller gets its turn.
type RWMutex struct {
	mu sync.Mutex
	// Guarded by mu:
	readers int
	writing bool
	writers int           // how many wait in Lock
	sought  chan struct{} // closed while writers is not 0
	moved   chan struct{} // closed and replaced when a holder leaves
}

// NewRWMutex returns a mutex that is free.
func NewRWMutex() *RWMutex {
	return &RWMutex{sought: make(chan struct{}), moved: make(chan struct{})}
}

// RLock waits until it holds s together with others. If ctx ends first, the error wraps
// gpu.ErrTimeout and the context's cause.
func (s *RWMutex) RLock(ctx context.Context) error {
	return s.wait(ctx, func() bool { return s.writers == 0 && s.rlockLocked() })
}

// TryRLock is RLock without waiting: it returns false if s is held alone. It succeeds even while
// another caller waits in Lock, so its caller must release s soon.
func (s *RWMutex) TryRLock() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.rlockLocked()
}

func (s *RWMutex) rlockLocked() bool {
	if s.writing {
		return false
	}
	s.readers++
	return true
}

// RUnlock releases what RLock or TryRLock took.
func (s *RWMutex) RUnlock() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.readers--
	s.movedLocked()
}

// Lock waits until it holds s alone. It fails as RLock does.
func (s *RWMutex) Lock(ctx context.Context) error {
	s.mu.Lock()
	if s.writers++; s.writers == 1 {
		close(s.sought)
	}
	s.mu.Unlock()
	err := s.wait(ctx, s.lockLocked)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.writers--; s.writers == 0 {
		s.sought = make(chan struct{})
	}
	if err != nil {
		s.movedLocked() // wake those that waited for this caller
	}
	return err
}

// TryLock takes s alone at once, or returns false.
func (s *RWMutex) TryLock() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.lockLocked()
}

func (s *RWMutex) lockLocked() bool {
	if s.writing || s.readers > 0 {
		return false
	}
	s.writing = true
	return true
}

// Unlock releases what Lock or TryLock took.
func (s *RWMutex) Unlock() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.writing = false
	s.movedLocked()
}

// Wanted returns a channel that is closed when a caller waits in Lock. It is for holders that stay
// long and can come back later.
func (s *RWMutex) Wanted() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.sought
}

func (s *RWMutex) movedLocked() {
	close(s.moved)
	s.moved = make(chan struct{})
}

// wait calls enter, with s.mu held, until it succeeds.
func (s *RWMutex) wait(ctx context.Context, enter func() bool) error {
	for {
		s.mu.Lock()
		entered, moved := enter(), s.moved
		s.mu.Unlock()
		if entered {
			return nil
		}
		select {
		case <-moved:
		case <-ctx.Done():
			return fmt.Errorf("%w: %w", gpu.ErrTimeout, context.Cause(ctx))
		}
	}
}
