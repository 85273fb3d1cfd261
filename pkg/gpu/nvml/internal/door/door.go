// SPDX-License-Identifier: Apache-2.0

package door

import (
	"context"
	"fmt"
	"sync"
	"time"

	"example.com/gpu-agent/pkg/gpu"
)

// HungAfter is the age at which a call whose caller has left counts as hung. The caller
// may have left for another reason, and the call may be about to end: so those in line
// wait this long before they are turned away.
const HungAfter = time.Second

// Door lets one call to the driver in at a time, and lets a caller leave
// before its call has an answer.
type Door struct {
	token chan struct{} // holds one token while nobody is inside
	// patient says that no call is taken for hung.
	patient bool

	mu sync.Mutex
	// Guarded by mu:
	inside *visit        // nil while nobody is
	hung   chan struct{} // closed while the call inside is taken for hung
	moved  uint64        // how often a call has gone in or out
}

// visit is one call inside the door.
type visit struct {
	what  string
	since time.Time

	// Guarded by Door.mu:
	left     bool // the caller has left
	answered bool // the call has returned
}

// New returns a door that nobody is inside of.
func New() *Door {
	d := &Door{token: make(chan struct{}, 1), hung: make(chan struct{})}
	d.token <- struct{}{}
	return d
}

// NewPatient returns a door that takes no call for hung: work behind it may take long, and
// those in line wait as long as their contexts allow.
func NewPatient() *Door {
	d := New()
	d.patient = true
	return d
}

// Enter waits for the door and goes in, until leave. Where ctx ends first, or the call
// inside is taken for hung, the error is as Through's.
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

// Through runs f inside the door and returns what it returns. Where ctx ends
// first, or the call inside is taken for hung, the error wraps gpu.ErrTimeout
// (and the context's, where that is why). f may then run still, so it writes to
// nothing that its caller reads; if it succeeds when its caller has left, undo
// gets the value, inside the door. Undo may be nil.
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
	answers := make(chan answer, 1) // one may come after the caller has left
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
	a := <-answers // it came at the same moment
	return a.value, a.err
}

// answer marks that the call has returned, and reports whether its caller has
// left.
func (d *Door) answer(v *visit) (left bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	v.answered = true
	return v.left
}

// abandon marks that the caller leaves; false says that its call has returned.
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

// shut turns everybody away until v ends, if it has not.
func (d *Door) shut(v *visit) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.inside == v {
		close(d.hung)
	}
}

// Leave ends the visit and lets the next one in.
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

// Moves is how often a call has gone in or out: the same at two moments, nothing began or
// ended inside between them.
func (d *Door) Moves() uint64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.moved
}

// UnderWay names the call that is inside, empty if none is.
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

// refusal names the call that stands in the way.
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
