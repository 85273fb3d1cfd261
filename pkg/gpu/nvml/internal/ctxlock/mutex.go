// SPDX-License-Identifier: Apache-2.0

package ctxlock

import (
	"context"
	"fmt"
	"sync"
	"time"

	"example.com/gpu-agent/pkg/gpu"
)

// HungAfter is the age at which a call whose caller has left counts as hung. The caller may have
// left for another reason, and the call may be about to return. So waiting callers are refused
// only after this time.
const HungAfter = time.Second

// Mutex is a lock for calls that can hang. It runs one call at a time, and lets a caller leave
// before its call has returned.
type Mutex struct {
	token chan struct{} // holds one token while no call runs
	// patient is true if no call counts as hung, however long it takes.
	patient bool

	mu sync.Mutex
	// Guarded by mu:
	inside *visit        // the call that runs; nil if none does
	hung   chan struct{} // closed while the running call counts as hung
	moved  uint64        // how often a call has begun or ended
}

// visit is one call that holds the lock.
type visit struct {
	what  string
	since time.Time

	// Guarded by Mutex.mu:
	left     bool // the caller has left
	answered bool // the call has returned
}

// NewMutex returns a mutex that is free.
func NewMutex() *Mutex {
	m := &Mutex{token: make(chan struct{}, 1), hung: make(chan struct{})}
	m.token <- struct{}{}
	return m
}

// NewPatientMutex returns a mutex where no call counts as hung. It is for work that may take long:
// callers wait as long as their contexts allow.
func NewPatientMutex() *Mutex {
	m := NewMutex()
	m.patient = true
	return m
}

// Lock takes the lock; Unlock releases it. It fails as Do does if ctx ends first, or if the running
// call counts as hung.
func (m *Mutex) Lock(ctx context.Context, what string) error {
	_, err := m.lock(ctx, what)
	return err
}

func (m *Mutex) lock(ctx context.Context, what string) (*visit, error) {
	m.mu.Lock()
	hung := m.hung
	m.mu.Unlock()
	select {
	case <-hung:
		return nil, m.refusal(what, nil)
	default:
	}
	select {
	case <-hung:
		return nil, m.refusal(what, nil)
	case <-ctx.Done():
		return nil, m.refusal(what, context.Cause(ctx))
	case <-m.token:
	}
	v := &visit{what: what, since: time.Now()}
	m.mu.Lock()
	m.inside = v
	m.moved++
	m.mu.Unlock()
	return v, nil
}

// Do runs f with the lock held and returns its results. If ctx ends first, the error wraps
// gpu.ErrTimeout and the context's cause. If the running call counts as hung, the error wraps
// gpu.ErrTimeout alone.
//
// f may go on after Do has returned, so it must not write to anything that the caller reads.
// If f succeeds after its caller has left, undo gets the value, with the lock still held. Undo
// may be nil.
func Do[T any](ctx context.Context, m *Mutex, what string, f func() (T, error), undo func(T)) (T, error) {
	var none T
	v, err := m.lock(ctx, what)
	if err != nil {
		return none, err
	}
	type answer struct {
		value T
		err   error
	}
	answers := make(chan answer, 1) // the call may return after the caller has left
	go func() {
		value, err := f()
		if left := m.answer(v); left && err == nil && undo != nil {
			undo(value)
		}
		answers <- answer{value, err}
		m.Unlock()
	}()
	select {
	case a := <-answers:
		return a.value, a.err
	case <-ctx.Done():
	}
	if m.abandon(v) {
		return none, m.refusal(what, context.Cause(ctx))
	}
	a := <-answers // the call returned at the same moment
	return a.value, a.err
}

// answer records that the call has returned, and reports whether its caller has left.
func (m *Mutex) answer(v *visit) (left bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	v.answered = true
	return v.left
}

// abandon records that the caller leaves. It returns false if the call has already returned.
func (m *Mutex) abandon(v *visit) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if v.answered {
		return false
	}
	v.left = true
	if m.patient {
		return true
	}
	if wait := HungAfter - time.Since(v.since); wait > 0 {
		time.AfterFunc(wait, func() { m.shut(v) })
	} else {
		close(m.hung)
	}
	return true
}

// shut makes m refuse all callers until v ends. It does nothing if v has ended.
func (m *Mutex) shut(v *visit) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.inside == v {
		close(m.hung)
	}
}

// Unlock releases the lock, for the next call.
func (m *Mutex) Unlock() {
	m.mu.Lock()
	m.inside = nil
	m.moved++
	select {
	case <-m.hung:
		m.hung = make(chan struct{})
	default:
	}
	m.mu.Unlock()
	m.token <- struct{}{}
}

// Moves returns how often a call has begun or ended. If two results are equal, no call began or
// ended in between.
func (m *Mutex) Moves() uint64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.moved
}

// UnderWay describes the running call in words. It is empty if none runs.
func (m *Mutex) UnderWay() string {
	m.mu.Lock()
	v := m.inside
	m.mu.Unlock()
	if v == nil {
		return ""
	}
	return fmt.Sprintf("the call to %s began %s ago and has not returned",
		v.what, time.Since(v.since).Round(time.Millisecond))
}

// refusal is the error for a caller that did not get the lock, or left. It names the running
// call.
func (m *Mutex) refusal(what string, cause error) error {
	err := fmt.Errorf("%s: %w", what, gpu.ErrTimeout)
	if call := m.UnderWay(); call != "" {
		err = fmt.Errorf("%w: %s", err, call)
	}
	if cause != nil {
		err = fmt.Errorf("%w: %w", err, cause)
	}
	return err
}
