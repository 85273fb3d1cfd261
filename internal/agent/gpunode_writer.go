// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"cmp"
	"context"
	"log/slog"
	"reflect"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/time/rate"

	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/internal/status"
)

// When the GPUNode is written.
const (
	// gather is how long news waits for more, and occupancyWithin how long a change does by
	// which neither more nor less can be had at once than before.
	gather          = time.Second
	occupancyWithin = time.Minute
	// writesInARow may follow each other as they come; after that there is one every
	// writesEvery. Pods that come and go at a usual rate need at most one for each start and
	// each end. The ration is for what changes without rest, as a fault does that comes and
	// goes.
	writesInARow = 60
	writesEvery  = 5 * time.Second
	// startsWithin is how long the object that a predecessor left stays as it is, while this
	// process is not ready: an update is no news.
	startsWithin = time.Minute
	// lastWrite bounds the write that says that the agent ends.
	lastWrite = 2 * time.Second
)

// GPUNodes is where the GPUNode of the node is written. internal/kube/agentkube has it.
type GPUNodes interface {
	// WatchGPUNode calls fn with what the server has, nil for nothing, or with why it can
	// have nothing.
	WatchGPUNode(ctx context.Context, fn func(*gpunode.Status, error)) error
	// WriteGPUNode makes the object say this, and returns what the server has then.
	WriteGPUNode(context.Context, *gpunode.Status) (*gpunode.Status, error)
}

// gpuNodeWriter keeps the GPUNode object equal to what the node has: news within a second,
// other changes within a minute, nothing twice. It writes again where somebody else has
// changed or deleted the object.
type gpuNodeWriter struct {
	api GPUNodes // nil where there is none
	// say is what the object is to say; ready reports whether this process is.
	say   func() *gpunode.Status
	ready func() error
	log   *slog.Logger
	// news wakes run; it holds at most one token.
	news   chan struct{}
	ration *rate.Limiter

	// writing is held during a write; left, which it guards, says that the last one has been.
	writing sync.Mutex
	left    bool

	mu sync.Mutex
	// Guarded by mu. has is what the server has, if known, and absent why it can have
	// nothing.
	has    *gpunode.Status
	known  bool
	absent error
	// sent and kept are the last write, and what the server made of it.
	sent, kept *gpunode.Status
	// failed is why the last write was not taken.
	failed error
}

func newGPUNodeWriter(api GPUNodes, say func() *gpunode.Status, ready func() error, log *slog.Logger) *gpuNodeWriter {
	return &gpuNodeWriter{api: api, say: say, ready: ready, log: log, news: make(chan struct{}, 1),
		ration: rate.NewLimiter(rate.Every(writesEvery), writesInARow)}
}

// run follows and writes the object until ctx ends.
func (w *gpuNodeWriter) run(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return w.api.WatchGPUNode(ctx, w.see) })
	g.Go(func() error { return w.write(ctx) })
	return g.Wait()
}

// see takes in what the server has, or why it can have nothing.
func (w *gpuNodeWriter) see(has *gpunode.Status, absent error) {
	w.mu.Lock()
	if absent != nil && w.absent == nil {
		w.log.Warn("there is no GPUNode of this node; schedulers are told nothing by way of it", "err", absent)
	} else if absent == nil && w.absent != nil {
		w.log.Info("GPUNodes can be written now")
	}
	w.has, w.absent, w.known = has, absent, absent == nil
	w.mu.Unlock()
	poke(w.news)
}

// turn has what the object is to say compared, after a round.
func (w *gpuNodeWriter) turn(bool) { poke(w.news) }

// conditions says why the object is not what it should be.
func (w *gpuNodeWriter) conditions() []status.Condition {
	w.mu.Lock()
	defer w.mu.Unlock()
	if err := cmp.Or(w.absent, w.failed); err != nil {
		return []status.Condition{status.Why(status.GPUNodeFailed, "the node's GPUNode cannot be written: %v", err).
			Condition(status.Noted, "")}
	}
	return nil
}

// write is the writer's goroutine.
func (w *gpuNodeWriter) write(ctx context.Context) error {
	began := time.Now()
	pause := backOff(backOffMax)
	var calm time.Time // since when only the occupancy has differed
	var again <-chan time.Time
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-w.news:
			if !elapse(ctx, gather) { // for what else comes with it
				return ctx.Err()
			}
		case <-again:
		}
		again = nil
		if w.ready() != nil && time.Since(began) < startsWithin {
			again = time.After(startsWithin - time.Since(began))
			continue
		}
		want, change := w.due()
		switch {
		case change == gpunode.Same:
			calm = time.Time{}
			continue
		case change == gpunode.Occupancy && calm.IsZero():
			calm = time.Now()
		}
		if wait := occupancyWithin - time.Since(calm); change == gpunode.Occupancy && wait > 0 {
			again = time.After(wait)
			continue
		}
		if r := w.ration.Reserve(); r.Delay() > 0 {
			again = time.After(r.Delay()) // and then with what is true by then
			r.Cancel()
			continue
		}
		calm = time.Time{}
		if err := w.put(ctx, want, false); err != nil {
			again = time.After(pause.Step())
			continue
		}
		pause = backOff(backOffMax)
	}
}

// due is what the object is to say, and how much of it the server does not have.
func (w *gpuNodeWriter) due() (*gpunode.Status, gpunode.Change) {
	want := w.say()
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.known || want == nil {
		return nil, gpunode.Same
	}
	if err := want.Check(); err != nil {
		want = gpunode.OutOfBounds(err) // no reader would use the other
	}
	base := w.has
	if base != nil && reflect.DeepEqual(base, w.kept) {
		base = w.sent // of which a definition that is older keeps less
	}
	change := want.Since(base, time.Now())
	if w.has == nil {
		change = gpunode.News
	}
	return want, change
}

// put makes one write, unless the last one has been.
func (w *gpuNodeWriter) put(ctx context.Context, want *gpunode.Status, last bool) error {
	w.writing.Lock()
	defer w.writing.Unlock()
	if w.left {
		return nil
	}
	w.left = last
	is, err := w.api.WriteGPUNode(ctx, want)
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.failed = err; err == nil {
		w.has, w.sent, w.kept = is, want, is
	}
	return err
}

// leave says that the agent ends: nobody is to place a pod here before the next one has
// started.
func (w *gpuNodeWriter) leave(ctx context.Context) {
	if w.api == nil {
		return
	}
	want, _ := w.due()
	if want == nil {
		return
	}
	w.mu.Lock()
	has := w.has
	w.mu.Unlock()
	if has == nil || !gpunode.Is(has.Conditions, gpunode.Ready) {
		return // nobody is told otherwise
	}
	for i := range want.Conditions {
		if c := &want.Conditions[i]; c.Type == gpunode.Ready {
			c.Status, c.Reason, c.Message = gpunode.False, status.AgentEnds, "the agent has ended"
		}
	}
	want.Since(has, time.Now())
	ctx, cancel := context.WithTimeout(ctx, lastWrite)
	defer cancel()
	if err := w.put(ctx, want, true); err != nil {
		w.log.Warn("the node's GPUNode does not say that the agent ends", "err", err)
	}
}
