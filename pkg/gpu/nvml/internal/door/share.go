// SPDX-License-Identifier: Apache-2.0

package door

import (
	"context"
	"fmt"
	"sync"

	"example.com/gpu-agent/pkg/gpu"
)

// Share is held by many together or by one alone, and those in line for it can
// Leave. It guards what is used outside the general door: handles of the
// driver's library, which end when that is initialised anew.
//
// While one waits to be alone nobody else joins, so that it comes to its turn.
type Share struct {
	mu sync.Mutex
	// Guarded by mu:
	together int
	alone    bool
	seekers  int           // those who wait to be alone
	sought   chan struct{} // closed while seekers is not 0
	moved    chan struct{} // closed, and made anew, when someone leaves
}

// NewShare returns a share that nobody holds.
func NewShare() *Share {
	return &Share{sought: make(chan struct{}), moved: make(chan struct{})}
}

// Join waits for its turn to hold s beside others. The error wraps
// gpu.ErrTimeout and the context's.
func (s *Share) Join(ctx context.Context) error {
	return s.wait(ctx, func() bool { return s.seekers == 0 && s.joinLocked() })
}

// TryJoin joins at once or not at all. Those in line do not stop it, so what it
// is for must be short.
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

// Part ends a join.
func (s *Share) Part() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.together--
	s.movedLocked()
}

// Seize waits until it holds s alone; the error is as Join's.
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
		s.movedLocked() // those who let this one go first
	}
	return err
}

// TrySeize holds s alone at once or not at all.
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

// Yield ends a seize.
func (s *Share) Yield() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.alone = false
	s.movedLocked()
}

// Wanted is closed when someone wants to be alone: for those who hold s for
// long, and can come back.
func (s *Share) Wanted() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.sought
}

func (s *Share) movedLocked() {
	close(s.moved)
	s.moved = make(chan struct{})
}

// wait calls enter, with s locked, until it succeeds.
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
