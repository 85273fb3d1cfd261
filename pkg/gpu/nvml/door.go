// SPDX-License-Identifier: Apache-2.0

package nvml

import (
	"context"
	"fmt"
	"sync"
	"time"

	"example.com/gpu-agent/pkg/gpu"
)

// door lets one call to the driver in at a time, and lets a caller leave
// before its call has an answer.
type door struct {
	token chan struct{} // holds one token while nobody is inside

	mu sync.Mutex
	// Guarded by mu:
	inside    *visit        // nil while nobody is
	abandoned chan struct{} // closed while the caller of the call inside has left
}

// visit is one call inside the door.
type visit struct {
	what  string
	since time.Time
	left  bool // the caller has left
}

func newDoor() *door {
	d := &door{token: make(chan struct{}, 1), abandoned: make(chan struct{})}
	d.token <- struct{}{}
	return d
}

// through runs f inside the door and returns what it returns. Where ctx ends
// first, or the call inside has been left by its own caller, the error wraps
// gpu.ErrTimeout (and the context's, where that is why). f may then run still,
// so it writes to nothing that its caller reads.
func through[T any](ctx context.Context, d *door, what string, f func() (T, error)) (T, error) {
	var none T
	d.mu.Lock()
	abandoned := d.abandoned
	d.mu.Unlock()
	select {
	case <-abandoned:
		return none, d.refusal(what, nil)
	default:
	}
	select {
	case <-abandoned:
		return none, d.refusal(what, nil)
	case <-ctx.Done():
		return none, d.refusal(what, context.Cause(ctx))
	case <-d.token:
	}
	v := &visit{what: what, since: time.Now()}
	d.mu.Lock()
	d.inside = v
	d.mu.Unlock()

	type answer struct {
		value T
		err   error
	}
	answers := make(chan answer, 1) // one may come when nobody waits any more
	go func() {
		defer d.leave()
		value, err := f()
		answers <- answer{value, err}
	}()
	select {
	case a := <-answers:
		return a.value, a.err
	case <-ctx.Done():
	}
	if d.abandon(v) {
		return none, d.refusal(what, context.Cause(ctx))
	}
	a := <-answers // it came in the same moment
	return a.value, a.err
}

// abandon marks that the caller of v leaves; false says that v has ended.
func (d *door) abandon(v *visit) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.inside != v {
		return false
	}
	v.left = true
	close(d.abandoned)
	return true
}

// leave ends the visit and lets the next one in.
func (d *door) leave() {
	d.mu.Lock()
	if d.inside.left {
		d.abandoned = make(chan struct{})
	}
	d.inside = nil
	d.mu.Unlock()
	d.token <- struct{}{}
}

// refusal names the call that stands in the way.
func (d *door) refusal(what string, cause error) error {
	d.mu.Lock()
	v := d.inside
	d.mu.Unlock()
	err := fmt.Errorf("%s: %w", what, gpu.ErrTimeout)
	if v != nil {
		err = fmt.Errorf("%w: the call to %s began %s ago and has not returned", err, v.what, time.Since(v.since).Round(time.Millisecond))
	}
	if cause != nil {
		err = fmt.Errorf("%w: %w", err, cause)
	}
	return err
}
