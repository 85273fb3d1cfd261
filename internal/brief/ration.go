// SPDX-License-Identifier: Apache-2.0

package brief

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"
)

// A kind of line is logged Lines times in a Window. Further lines are counted.
const (
	Lines  = 10
	Window = time.Minute
)

// Ration logs lines that others can cause as often as they like, such as a tenant's program or an
// unreachable server. Use [NewRation]. Several goroutines may call its methods.
type Ration struct {
	log   *slog.Logger
	now   func() time.Time
	after func(time.Duration, func()) *time.Timer

	mu     sync.Mutex
	quotas map[string]*quota // guarded by mu; by kind of line
}

// quota counts the lines of one kind in a window: those logged and those left out.
type quota struct {
	since      time.Time
	said, left int
}

// NewRation returns a Ration that writes to log. now is the clock. after calls a function after a
// time, and does not wait for it: time.AfterFunc, or a test's own.
func NewRation(log *slog.Logger, now func() time.Time, after func(time.Duration, func()) *time.Timer) *Ration {
	return &Ration{log: log, now: now, after: after, quotas: map[string]*quota{}}
}

// Log logs a line, or counts it if its kind has been logged often enough. The kind is level,
// message, and the keys and values in kind, which are part of the line. The values in kind must not
// be unlimited in number. Lines below the log's level do not count.
func (r *Ration) Log(level slog.Level, message string, kind []any, args ...any) {
	ctx := context.Background()
	if !r.log.Enabled(ctx, level) {
		return
	}
	key := fmt.Sprintln(append([]any{level, message}, kind...)...)
	tell := func(left int) {
		if left > 0 {
			r.log.Log(ctx, level, message+": more of these were left out",
				append(append([]any{}, kind...), "lines", left, "within", Window.String())...)
		}
	}
	now := r.now()
	r.mu.Lock()
	q, late := r.quotas[key], 0
	if q == nil || now.Sub(q.since) >= Window {
		if q != nil {
			late, q.left = q.left, 0
		}
		r.dropLocked(now)
		q = &quota{since: now}
		r.quotas[key] = q
	}
	say := q.said < Lines
	if say {
		q.said++
	} else {
		q.left++
	}
	first := q.left == 1
	r.mu.Unlock()

	tell(late)
	if say {
		r.log.Log(ctx, level, message, append(append([]any{}, kind...), args...)...)
		return
	}
	if first {
		r.after(Window-now.Sub(q.since), func() {
			r.mu.Lock()
			left := q.left
			q.left = 0
			if r.quotas[key] == q {
				delete(r.quotas, key)
			}
			r.mu.Unlock()
			tell(left)
		})
	}
}

// dropLocked forgets the kinds without lines to report.
func (r *Ration) dropLocked(now time.Time) {
	for key, q := range r.quotas {
		if q.left == 0 && now.Sub(q.since) >= Window {
			delete(r.quotas, key)
		}
	}
}
