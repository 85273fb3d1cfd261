// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"sync"
	"time"

	"example.com/gpu-agent/internal/brief"
	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/gpu"
)

const (
	// endsAtOnce is how many containers are ended at the same time.
	endsAtOnce = 16
	// endForgotten is how long after its last try an end is forgotten: the container has gone, or it goes on.
	endForgotten = time.Minute
)

// ender ends containers of the spot tier beside the goroutine that asks for it. A process with much memory takes
// seconds to end, so a container may have to be ended several times.
type ender struct {
	kill    func(context.Context, *node.Container) (how string, err error) // nil if the agent ends no containers
	account *Account
	log     *slog.Logger
	ration  *brief.Ration

	mu sync.Mutex
	// Guarded by mu: the tries to end containers, by ID, and how many are under way.
	tries map[string]*try
	going int
}

// try is how far the end of a container is.
type try struct {
	// began is when it was last begun, and going is true while that is under way.
	began time.Time
	going bool
	// told is true once the log and the usage journal have it. The goroutine that ends the container uses it.
	told bool
}

// endCause is why a container is ended.
type endCause struct {
	// allocation is the container's, and since is when there was a reason to end it.
	allocation string
	since      time.Time
	// why follows "a container" in the log, and account is for the usage journal.
	why, account string
	// stands reports whether the reason still stands. It is asked just before the end.
	stands func() bool
}

func newEnder(w *Worlds, log *slog.Logger, ration *brief.Ration) *ender {
	return &ender{kill: w.End, account: w.Account, log: log, ration: ration, tries: map[string]*try{}}
}

// begin begins to end a container. It reports false, and does nothing, if that is under way, was tried a moment ago,
// or if too many others are being ended. done is called afterwards, with whether the container was ended.
func (e *ender) begin(ctx context.Context, c *node.Container, why *endCause, now time.Time, done func(ended bool)) (begun bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	t := e.tries[c.ID]
	if e.kill == nil || e.going >= endsAtOnce || t != nil && (t.going || now.Sub(t.began) < yieldEvery) {
		return false
	}
	if t == nil {
		maps.DeleteFunc(e.tries, func(_ string, t *try) bool { return !t.going && now.Sub(t.began) >= endForgotten })
		t = &try{}
		e.tries[c.ID] = t
	}
	t.began, t.going = now, true
	e.going++
	go func() {
		ended := e.endOne(ctx, c, why, t)
		e.mu.Lock()
		t.going = false
		e.going--
		e.mu.Unlock()
		done(ended)
	}()
	return true
}

// endOne ends a container, if the reason for it still stands.
func (e *ender) endOne(ctx context.Context, c *node.Container, why *endCause, t *try) (ended bool) {
	if !why.stands() {
		return false
	}
	how, err := e.kill(ctx, c)
	switch pod := c.InPod().String(); {
	case errors.Is(err, gpu.ErrNotFound): // it has ended by itself
		return false
	case err != nil:
		e.ration.Log(slog.LevelError, "cannot end a container "+why.why, []any{"container", c.ID, "pod", pod}, "err", err)
		return false
	case !t.told:
		t.told = true
		e.log.Warn("ended a container of the spot tier "+why.why, "container", c.ID, "pod", pod, "name", c.Name,
			"allocation", why.allocation, "how", how, "after", time.Since(why.since).Round(time.Millisecond).String())
		e.account.killed(c, status.Yielded, why.account)
	}
	return true
}
