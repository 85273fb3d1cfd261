// SPDX-License-Identifier: Apache-2.0

package door

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

// Door is a lock for calls that can hang. It runs one call at a time, and lets a caller leave
// before its call has returned.
type Door struct {
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

	// Guarded by Door.mu:
	left     bool // the caller has left
	answered bool // the call has returned
}

// New returns a door that is free.
func New() *Door {
	d := &Door{token: make(chan struct{}, 1), hung: make(chan struct{})}
	d.token <- struct{}{}
	return d
}

// NewPatient returns a door where no call counts as hung. It is for work that may take long:
// callers wait as long as their contexts allow.
func NewPatient() *Door {
	d := New()
	d.patient = true
	return d
}

// Enter takes the lock; Leave releases it. It fails as Through does if ctx ends first, or if the
// running call counts as hung.
func (d *Door) Enter(ctx context.Context, what string) error {
	_, err := d.enter(ctx, what)
	return err
}

func (d *Door) enter(ctx context.Context, what string) (*visit, error) {
	d.mu.Lock()
	hung := d.hung
	d.mu.Unlock()
	select {
	case <-hung:
		return nil, d.refusal(what, nil)
	default:
	}
	select {
	case <-hung:
		return nil, d.refusal(what, nil)
	case <-ctx.Done():
		return nil, d.refusal(what, context.Cause(ctx))
	case <-d.token:
	}
	v := &visit{what: what, since: time.Now()}
	d.mu.Lock()
	d.inside = v
	d.moved++
	d.mu.Unlock()
	return v, nil
}

// Through runs f with the lock held and returns its results. If ctx ends first, the error wraps
// gpu.ErrTimeout and the context's cause. If the running call counts as hung, the error wraps
// gpu.ErrTimeout alone.
//
// f may go on after Through has returned, so it must not write to anything that the caller reads.
// If f succeeds after its caller has left, undo gets the value, with the lock still held. Undo
// may be nil.
func Through[T any](ctx context.Context, d *Door, what string, f func() (T, error), undo func(T)) (T, error) {
	var none T
	v, err := d.enter(ctx, what)
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
		if left := d.answer(v); left && err == nil && undo != nil {
			undo(value)
		}
		answers <- answer{value, err}
		d.Leave()
	}()
	select {
	case a := <-answers:
		return a.value, a.err
	case <-ctx.Done():
	}
	if d.abandon(v) {
		return none, d.refusal(what, context.Cause(ctx))
	}
	a := <-answers // the call returned at the same moment
	return a.value, a.err
}

// answer records that the call has returned, and reports whether its caller has left.
func (d *Door) answer(v *visit) (left bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	v.answered = true
	return v.left
}

// abandon records that the caller leaves. It returns false if the call has already returned.
func (d *Door) abandon(v *visit) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if v.answered {
		return false
	}
	v.left = true
	if d.patient {
		return true
	}
	if wait := HungAfter - time.Since(v.since); wait > 0 {
		time.AfterFunc(wait, func() { d.shut(v) })
	} else {
		close(d.hung)
	}
	return true
}

// shut makes d refuse all callers until v ends. It does nothing if v has ended.
func (d *Door) shut(v *visit) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.inside == v {
		close(d.hung)
	}
}

// Leave releases the lock, for the next call.
func (d *Door) Leave() {
	d.mu.Lock()
	d.inside = nil
	d.moved++
	select {
	case <-d.hung:
		d.hung = make(chan struct{})
	default:
	}
	d.mu.Unlock()
	d.token <- struct{}{}
}

// Moves returns how often a call has begun or ended. If two results are equal, no call began or
// ended in between.
func (d *Door) Moves() uint64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.moved
}

// UnderWay describes the running call in words. It is empty if none runs.
func (d *Door) UnderWay() string {
	d.mu.Lock()
	v := d.inside
	d.mu.Unlock()
	if v == nil {
		return ""
	}
	return fmt.Sprintf("the call to %s began %s ago and has not returned",
		v.what, time.Since(v.since).Round(time.Millisecond))
}

// refusal is the error for a caller that did not get the lock, or left. It names the running
// call.
func (d *Door) refusal(what string, cause error) error {
	err := fmt.Errorf("%s: %w", what, gpu.ErrTimeout)
	if call := d.UnderWay(); call != "" {
		err = fmt.Errorf("%w: %s", err, call)
	}
	if cause != nil {
		err = fmt.Errorf("%w: %w", err, cause)
	}
	return err
}
