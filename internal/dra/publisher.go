// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"sync"
	"time"

	"example.com/gpu-agent/internal/brief"
	"example.com/gpu-agent/internal/kube/agentkube"
	"example.com/gpu-agent/internal/status"

	"golang.org/x/time/rate"
	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/wait"
)

// Slices writes and watches the node's slices at the API server; *agentkube.Client implements it.
type Slices interface {
	PublishSlices(ctx context.Context, driver string, want []resourcev1.ResourceSlice) (meddled []string, err error)
	WatchSlices(ctx context.Context, driver string, changed func()) error
}

// Publisher keeps the node's slices at the API server as Set says, while the kubelet has the driver
// registered. Without the driver they would only send pods here that wait for a minute, and the
// kubelet deletes them when it starts.
type Publisher struct {
	driver string
	api    Slices
	log    *slog.Logger
	ration *brief.Ration // limits log lines that another client can cause
	// bound limits the writes if another client changes slices again and again.
	bound *rate.Limiter
	wake  token

	mu sync.Mutex
	// The fields below are guarded by mu. want makes the slices. registered is true if the kubelet
	// has the driver. err is the error of the last write, nil if it succeeded.
	want       func() []resourcev1.ResourceSlice
	registered bool
	err        error
	// failing is the time since when err is not nil. kubelets counts the registrations, and seen is
	// their number at the last write that succeeded.
	failing        time.Time
	kubelets, seen uint64
	// meddled names the slices that another client changed last, and meddledAt is the time.
	meddled   []string
	meddledAt time.Time
	// asked counts the calls of Set. wrote is the number of the last call whose slices the server
	// has. news is closed when wrote changes.
	asked, wrote uint64
	news         chan struct{}
	// written is called when wrote has grown. changed is called when Conditions may have changed.
	written, changed func()
}

// Pauses after a failure.
const (
	firstPause = 100 * time.Millisecond
	lastPause  = 30 * time.Second
	// unfitPause is the pause if the API server does not support the slices.
	unfitPause = time.Minute
)

const (
	// failsFor is how long writes must fail before Conditions reports it: an API server that starts
	// refuses what it permits a moment later.
	failsFor = 30 * time.Second
	// meddledFor is how long Conditions reports that another client has changed slices.
	meddledFor = time.Minute
)

// NewPublisher returns a publisher, which does nothing before Run.
func NewPublisher(driver string, api Slices, log *slog.Logger) *Publisher {
	return &Publisher{driver: driver, api: api, log: log, ration: brief.NewRation(log, time.Now, time.AfterFunc),
		bound: rate.NewLimiter(5, 20), wake: make(token, 1), news: make(chan struct{}),
		written: func() {}, changed: func() {}}
}

// Set sets what the slices shall be, and returns the number of this call. want must return the same
// slices at each call, from any goroutine.
func (p *Publisher) Set(want func() []resourcev1.ResourceSlice) uint64 {
	p.mu.Lock()
	p.want = want
	p.asked++
	n := p.asked
	p.mu.Unlock()
	p.wake.poke()
	return n
}

// state returns the number of calls of Set, the number of the last call whose slices the server
// has, and whether the kubelet has the driver. Without the driver nothing is written.
func (p *Publisher) state() (asked, wrote uint64, registered bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.asked, p.wrote, p.registered
}

// settled waits until the server has what was set last. The error has the reason of the last
// failure.
func (p *Publisher) settled(ctx context.Context) error {
	for {
		p.mu.Lock()
		done, err, news := p.wrote == p.asked, p.err, p.news
		p.mu.Unlock()
		if done {
			return nil
		}
		select {
		case <-news:
		case <-ctx.Done():
			return fmt.Errorf("the API server does not have the node's current ResourceSlices: %w",
				cmp.Or(err, ctx.Err()))
		}
	}
}

// Registered sets whether the kubelet has the driver. Call it again for each kubelet that starts.
func (p *Publisher) Registered(yes bool) {
	p.mu.Lock()
	if p.registered = yes; yes {
		p.kubelets++
	}
	p.mu.Unlock()
	p.wake.poke()
}

// Err returns the error of the last write, or nil if the server has all slices or no write was
// tried.
func (p *Publisher) Err() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.err
}

// Conditions returns what there is to report: why the server does not have the slices, and that
// another client has changed some.
func (p *Publisher) Conditions(now time.Time) (out []status.Condition) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case errors.Is(p.err, agentkube.ErrUnfit):
		out = append(out, status.Why(status.APIServerUnfit,
			"nothing is offered through DRA: %v", p.err).Condition(status.Failed, p.driver))
	case p.err != nil && now.Sub(p.failing) >= failsFor:
		out = append(out, status.Why(status.SlicesFailed,
			"the API server does not have the node's current ResourceSlices: %v", p.err).
			Condition(status.Failed, p.driver))
	}
	if len(p.meddled) > 0 && now.Sub(p.meddledAt) < meddledFor {
		out = append(out, status.Why(status.SlicesChanged,
			"another client has changed or deleted ResourceSlices of this node (%s); the agent writes them again",
			brief.List(p.meddled, 3)).Condition(status.Noted, p.driver))
	}
	return out
}

// Run writes and watches the slices until ctx ends, and returns its error.
func (p *Publisher) Run(ctx context.Context) error {
	var watching sync.WaitGroup
	defer watching.Wait()
	watching.Go(func() { _ = p.api.WatchSlices(ctx, p.driver, p.wake.poke) })
	pause := newPause()
	for {
		if err := p.bound.Wait(ctx); err != nil {
			return ctx.Err()
		}
		var again <-chan time.Time
		switch err := p.publish(ctx); {
		case err == nil: // until something changes
			pause = newPause()
		case errors.Is(err, agentkube.ErrUnfit):
			pause = newPause()
			again = time.After(unfitPause)
		default:
			again = time.After(pause.Step())
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-p.wake:
		case <-again:
		}
	}
}

func newPause() wait.Backoff {
	return wait.Backoff{Duration: firstPause, Factor: 2, Jitter: 0.5, Cap: lastPause, Steps: math.MaxInt}
}

// publish writes the slices that differ from the server's, if the driver is registered and Set was
// called.
func (p *Publisher) publish(ctx context.Context) error {
	p.mu.Lock()
	want, before, n, kubelets := p.want, p.err, p.asked, p.kubelets
	due := p.registered && n > 0
	p.mu.Unlock()
	if !due {
		return nil
	}
	meddled, err := p.api.PublishSlices(ctx, p.driver, want())
	if ctx.Err() != nil {
		return ctx.Err()
	}
	now := time.Now()
	p.mu.Lock()
	if p.err = err; err != nil && before == nil {
		p.failing = now
	}
	fresh := err == nil && n > p.wrote
	if fresh {
		p.wrote = n
		close(p.news)
		p.news = make(chan struct{})
	}
	if kubelets != p.seen {
		meddled = nil // it was a new kubelet, which deletes them when it starts
	}
	if len(meddled) > 0 {
		p.meddled, p.meddledAt = meddled, now
	}
	if err == nil {
		p.seen = kubelets
	}
	p.mu.Unlock()
	if fresh {
		p.written()
	}
	if err != nil || before != nil {
		p.changed()
	}
	if len(meddled) > 0 {
		p.changed()
		time.AfterFunc(meddledFor, p.changed)
		p.ration.Log(slog.LevelWarn, "another client has changed or deleted ResourceSlices of this node; "+
			"writing them again", nil, "driver", p.driver, "slices", brief.List(meddled, 3))
	}
	switch {
	case err != nil && before == nil:
		p.log.Warn("the API server does not have the node's current ResourceSlices; trying again",
			"driver", p.driver, "err", err)
	case err == nil && before != nil:
		p.log.Info("the API server has the node's current ResourceSlices again", "driver", p.driver)
	}
	return err
}
