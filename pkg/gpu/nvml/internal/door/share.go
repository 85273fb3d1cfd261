// SPDX-License-Identifier: Apache-2.0

package door

import (
	"context"
	"fmt"
	"sync"

	"example.com/gpu-agent/pkg/gpu"
)

// Share is a lock that many hold together, or one alone. Waiting for it ends with the context. It
// guards the use of the driver library's handles outside the other locks: they become invalid
// when the library is initialised anew.
//
// While a caller waits to hold it alone, Join waits too. So that caller gets its turn.
type Share struct {
	mu sync.Mutex
	// Guarded by mu:
	together int
	alone    bool
	seekers  int           // how many wait to hold it alone
	sought   chan struct{} // closed while seekers is not 0
	moved    chan struct{} // closed and replaced when a holder leaves
}

// NewShare returns a share that is free.
func NewShare() *Share {
	return &Share{sought: make(chan struct{}), moved: make(chan struct{})}
}

// Join waits until it holds s together with others. If ctx ends first, the error wraps
// gpu.ErrTimeout and the context's cause.
func (s *Share) Join(ctx context.Context) error {
	return s.wait(ctx, func() bool { return s.seekers == 0 && s.joinLocked() })
}

// TryJoin joins s at once, or returns false. It succeeds even while a caller waits to hold s
// alone, so the caller must part soon.
func (s *Share) TryJoin() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.joinLocked()
}

func (s *Share) joinLocked() bool {
	if s.alone {
		return false
	}
	s.together++
	return true
}

// Part ends what Join or TryJoin began.
func (s *Share) Part() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.together--
	s.movedLocked()
}

// Seize waits until it holds s alone. It fails as Join does.
func (s *Share) Seize(ctx context.Context) error {
	s.mu.Lock()
	if s.seekers++; s.seekers == 1 {
		close(s.sought)
	}
	s.mu.Unlock()
	err := s.wait(ctx, s.seizeLocked)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.seekers--; s.seekers == 0 {
		s.sought = make(chan struct{})
	}
	if err != nil {
		s.movedLocked() // wake those that waited for this caller
	}
	return err
}

// TrySeize holds s alone at once, or returns false.
func (s *Share) TrySeize() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.seizeLocked()
}

func (s *Share) seizeLocked() bool {
	if s.alone || s.together > 0 {
		return false
	}
	s.alone = true
	return true
}

// Yield ends what Seize or TrySeize began.
func (s *Share) Yield() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.alone = false
	s.movedLocked()
}

// Wanted returns a channel that is closed when a caller waits to hold s alone. It is for holders
// that stay long and can come back later.
func (s *Share) Wanted() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.sought
}

func (s *Share) movedLocked() {
	close(s.moved)
	s.moved = make(chan struct{})
}

// wait calls enter, with s.mu held, until it succeeds.
func (s *Share) wait(ctx context.Context, enter func() bool) error {
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
