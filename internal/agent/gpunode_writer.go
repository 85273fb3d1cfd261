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

// Limits on writes of the GPUNode.
const (
	// gather is how long news waits for more news. occupancyWithin is how long a change of
	// occupancy waits: pods can get neither more nor less because of it.
	gather          = time.Second
	occupancyWithin = time.Minute
	// writesInARow may follow each other at once. After these, there is one write every
	// writesEvery. Pods that come and go at a usual rate need at most one write per start and per
	// end. The limit is for what changes without end, such as a fault that comes and goes.
	writesInARow = 60
	writesEvery  = 5 * time.Second
	// startsWithin is how long a new process leaves the object of the last one as it is while it is
	// not ready. An update of the agent is no news.
	startsWithin = time.Minute
	// lastWrite bounds the write that reports the end of the agent.
	lastWrite = 2 * time.Second
)

// GPUNodes reads and writes the node's GPUNode. internal/kube/agentkube implements it.
type GPUNodes interface {
	// WatchGPUNode calls fn with the object that the server has, nil if it has none, or with an
	// error if it cannot have one.
	WatchGPUNode(ctx context.Context, fn func(*gpunode.Status, error)) error
	// WriteGPUNode writes the object, and returns what the server has then.
	WriteGPUNode(context.Context, *gpunode.Status) (*gpunode.Status, error)
}

// gpuNodeWriter keeps the GPUNode object equal to the node's state. It writes news within a second,
// and other changes within a minute. It compares with what the server has, so it restores the
// object when another client has changed or deleted it, and never writes the same twice. If the
// object has the holders (gpunode.InObject), every change is news.
type gpuNodeWriter struct {
	api GPUNodes // nil if the agent writes no GPUNode
	// say returns the desired object. ready returns nil if this process is ready.
	say   func() *gpunode.Status
	ready func() error
	log   *slog.Logger
	// news wakes run; it holds at most one token.
	news   chan struct{}
	ration *rate.Limiter

	// writing is held during a write. left, which it guards, is true after the last write of the
	// agent.
	writing sync.Mutex
	left    bool

	mu sync.Mutex
	// Guarded by mu. has is what the server has, valid if known. absent is why the server cannot
	// have the object; nil if it can.
	has    *gpunode.Status
	known  bool
	absent error
	// sent is the last object that was written, and kept what the server made of it.
	sent, kept *gpunode.Status
	// failed is why the last write failed; nil if it did not.
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

// see takes in what the server has, or why it cannot have the object.
func (w *gpuNodeWriter) see(has *gpunode.Status, absent error) {
	w.mu.Lock()
	if absent != nil && w.absent == nil {
		w.log.Warn("this node has no GPUNode, so schedulers learn nothing from it", "err", absent)
	} else if absent == nil && w.absent != nil {
		w.log.Info("GPUNodes can be written now")
	}
	w.has, w.absent, w.known = has, absent, absent == nil
	w.mu.Unlock()
	poke(w.news)
}

// turn is called after each round. It makes write compare the object again.
func (w *gpuNodeWriter) turn(bool) { poke(w.news) }

// conditions returns a condition if the object cannot be written.
func (w *gpuNodeWriter) conditions() []status.Condition {
	w.mu.Lock()
	defer w.mu.Unlock()
	if err := cmp.Or(w.absent, w.failed); err != nil {
		return []status.Condition{status.Why(status.GPUNodeFailed, "the node's GPUNode cannot be written: %v", err).
			Condition(status.Noted, "")}
	}
	return nil
}

// write writes the object when that is due, until ctx ends.
func (w *gpuNodeWriter) write(ctx context.Context) error {
	began := time.Now()
	pause := backOff(backOffMax)
	var calm time.Time // since when only the occupancy has differed; zero if it does not
	var again <-chan time.Time
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-w.news:
			if !elapse(ctx, gather) { // more changes may come with it
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
			again = time.After(r.Delay()) // and then write what is true by then
			r.Cancel()
			continue
		}
		if err := w.put(ctx, want, false); err != nil {
			again = time.After(pause.Step())
			continue
		}
		calm, pause = time.Time{}, backOff(backOffMax)
	}
}

// due returns the desired object, and how much the server's differs from it.
func (w *gpuNodeWriter) due() (*gpunode.Status, gpunode.Change) {
	want := w.say()
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.known || want == nil {
		return nil, gpunode.Same
	}
	if err := want.Check(); err != nil {
		want = gpunode.OutOfBounds(err) // no reader would use the invalid object
	}
	base := w.has
	if base != nil && reflect.DeepEqual(base, w.kept) {
		base = w.sent // an older definition may have kept less than was sent
	}
	change := want.Since(base, time.Now())
	if w.has == nil {
		change = gpunode.News
	}
	return want, change
}

// put writes the object, unless the agent's last write is done. last is true for that write.
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

// leave reports in the object that the agent ends, so that no scheduler places a pod here before
// the next agent has started.
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
		return // it is not ready there anyway
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
		w.log.Warn("cannot write the end of the agent into the node's GPUNode", "err", err)
	}
}
