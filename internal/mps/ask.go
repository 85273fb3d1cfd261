// SPDX-License-Identifier: Apache-2.0

package mps

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"example.com/gpu-agent/pkg/gpu"
)

// answerWait is how long Sync waits for the keepers' rounds. What is not done by then is in the
// state of a later call.
const answerWait = 3 * time.Second

// Sync sets what shall be on all GPUs. A GPU that wants does not name shall have no daemon, and
// clients that are left there are ended. It returns what is after a round of each keeper, or after
// some seconds. It may be repeated.
//
// The error wraps gpu.ErrInvalid for wants that cannot be; then nothing is changed.
func (s *Supervisor) Sync(ctx context.Context, wants []Want) (State, error) {
	wants, err := check(wants)
	if err != nil {
		return State{}, fmt.Errorf("set what MPS daemons shall be: %w", err)
	}
	s.mu.Lock()
	if !s.isLocked(wants) {
		if err := s.save(wants); err != nil {
			s.mu.Unlock()
			return State{}, err
		}
		s.opts.at("saved")
		s.adoptWantsLocked(wants)
	}
	s.beginLocked()
	s.mu.Unlock()
	return s.settled(ctx), nil
}

func (s *Supervisor) isLocked(wants []Want) bool {
	if !s.known || len(s.wants) != len(wants) {
		return false
	}
	return !slices.ContainsFunc(wants, func(w Want) bool { return s.wants[w.GPU] != w })
}

// settled waits until each keeper has made a round, and returns what is.
func (s *Supervisor) settled(ctx context.Context) State {
	ctx, cancel := context.WithTimeout(ctx, max(answerWait, 3*s.opts.patience))
	defer cancel()
	asked := map[*rounds]int{}
	s.mu.Lock()
	for _, r := range s.rounds {
		r.asked++
		asked[r] = r.asked
		select {
		case r.wake <- struct{}{}:
		default: // it is awake
		}
	}
	s.mu.Unlock()
	for r, round := range asked {
		for {
			s.mu.Lock()
			done, ended := r.done >= round, r.ended
			s.mu.Unlock()
			if done {
				break
			}
			select {
			case <-ended:
			case <-ctx.Done():
				return s.State()
			}
		}
	}
	return s.State()
}

// State returns what the last rounds have found.
func (s *Supervisor) State() State {
	s.mu.Lock()
	st := State{Known: s.known}
	var keepers []*rounds
	for _, r := range s.rounds {
		keepers = append(keepers, r)
	}
	s.mu.Unlock()
	for _, r := range keepers {
		st.Daemons = append(st.Daemons, r.snapshot())
	}
	slices.SortFunc(st.Daemons, func(a, b Daemon) int { return strings.Compare(string(a.GPU), string(b.GPU)) })
	return st
}

// Detach detaches clients, so that their end harms no other client, and returns what became of
// each, in the same order. It tells the daemon of one client after the other, and then waits up to 1.2 s for all to
// go. Each answer is waited for as long; after a client without an answer it asks for no other. The error wraps
// gpu.ErrNotFound for a GPU without a daemon.
func (s *Supervisor) Detach(ctx context.Context, d Detach) ([]Detached, error) {
	if err := d.check(); err != nil {
		return nil, fmt.Errorf("detach clients of MPS: %w", err)
	}
	s.mu.Lock()
	r := s.rounds[d.GPU]
	s.mu.Unlock()
	if r == nil {
		return nil, fmt.Errorf("detach clients of %s: it has no MPS daemon: %w", d.GPU, gpu.ErrNotFound)
	}
	return r.detach(ctx, d.Clients), nil
}
