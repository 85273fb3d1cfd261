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

// Slices are the node's at the API server: *agentkube.Client.
type Slices interface {
	PublishSlices(ctx context.Context, driver string, want []resourcev1.ResourceSlice) (meddled []string, err error)
	WatchSlices(ctx context.Context, driver string, changed func()) error
}

// Publisher keeps the node's slices at the API server as they shall be, while the kubelet
// has the driver registered. Before that they would only send pods here that wait for a
// minute, and the kubelet deletes them when it starts.
type Publisher struct {
	driver string
	api    Slices
	log    *slog.Logger
	ration *brief.Ration // the log for what somebody else can repeat
	// bound is for somebody who changes slices again and again.
	bound *rate.Limiter
	wake  token

	mu sync.Mutex
	// Guarded by mu: what makes the slices; whether the kubelet has the driver; and what kept
	// the last writing from success.
	want       func() []resourcev1.ResourceSlice
	registered bool
	err        error
	// failing is since when there has been an err. kubelets counts the registrations, and
	// seen is how many there were at the last writing that succeeded.
	failing        time.Time
	kubelets, seen uint64
	// meddled are the slices that somebody else changed last, and when.
	meddled   []string
	meddledAt time.Time
	// asked counts the calls of Set, wrote is which of them the server has, and news is
	// closed when that becomes another one.
	asked, wrote uint64
	news         chan struct{}
	// written, if set, is called when the server has what it did not have, and told when
	// there may be something else to say of the slices.
	written, told func()
}

// Pauses after a failure.
const (
	firstPause = 100 * time.Millisecond
	lastPause  = 30 * time.Second
	// unfitPause is the pause where the server cannot do it.
	unfitPause = time.Minute
)

const (
	// failsFor is how long slices may fail to be written before it is told: an API
	// server that starts refuses what it permits a moment later.
	failsFor = 30 * time.Second
	// meddledFor is how long it is told that somebody has changed slices.
	meddledFor = time.Minute
)

// NewPublisher makes a publisher; nothing happens before Run.
func NewPublisher(driver string, api Slices, log *slog.Logger) *Publisher {
	return &Publisher{driver: driver, api: api, log: log, ration: brief.NewRation(log, time.Now, time.AfterFunc),
		bound: rate.NewLimiter(5, 20), wake: make(token, 1), news: make(chan struct{}),
		written: func() {}, told: func() {}}
}

// Set says what the slices shall be. want makes the same ones each time that it is called,
// from any goroutine. Set returns the number of this call.
func (p *Publisher) Set(want func() []resourcev1.ResourceSlice) uint64 {
	p.mu.Lock()
	p.want = want
	p.asked++
	n := p.asked
	p.mu.Unlock()
	p.wake.poke()
	return n
}

// state is how often Set was called, the number of the last call of which the server has all, and
// whether the kubelet has the driver, without which nothing is written.
func (p *Publisher) state() (asked, wrote uint64, registered bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.asked, p.wrote, p.registered
}

// settled waits until the server has what was set last.
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
			return fmt.Errorf("the API server does not have the node's ResourceSlices as they are: %w",
				cmp.Or(err, ctx.Err()))
		}
	}
}

// Registered says whether the kubelet has the driver. It is said again of each kubelet.
func (p *Publisher) Registered(yes bool) {
	p.mu.Lock()
	if p.registered = yes; yes {
		p.kubelets++
	}
	p.mu.Unlock()
	p.wake.poke()
}

// Err is why the server does not have all of the slices, as far as was tried; nil where
// it does.
func (p *Publisher) Err() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.err
}

// Conditions are what is to be said of the slices at the server: why it does not have
// them, and that somebody else has changed some.
func (p *Publisher) Conditions(now time.Time) (out []status.Condition) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case errors.Is(p.err, agentkube.ErrUnfit):
		out = append(out, status.Why(status.APIServerUnfit,
			"nothing is offered through DRA: %v", p.err).Condition(status.Failed, p.driver))
	case p.err != nil && now.Sub(p.failing) >= failsFor:
		out = append(out, status.Why(status.SlicesFailed,
			"the API server does not have the node's ResourceSlices as they are: %v", p.err).
			Condition(status.Failed, p.driver))
	}
	if len(p.meddled) > 0 && now.Sub(p.meddledAt) < meddledFor {
		out = append(out, status.Why(status.SlicesChanged,
			"somebody else has changed or deleted ResourceSlices of this node (%s); they are written again",
			brief.List(p.meddled, 3)).Condition(status.Noted, p.driver))
	}
	return out
}

// Run writes and watches until ctx ends, whose error it returns.
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

// publish writes what differs, if it is time for that.
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
		meddled = nil // a kubelet deletes them when it starts
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
		p.told()
	}
	if len(meddled) > 0 {
		p.told()
		time.AfterFunc(meddledFor, p.told)
		p.ration.Log(slog.LevelWarn, "somebody else has changed or deleted ResourceSlices of this node; "+
			"they are written again", nil, "driver", p.driver, "slices", brief.List(meddled, 3))
	}
	switch {
	case err != nil && before == nil:
		p.log.Warn("the API server does not have the node's ResourceSlices as they are; trying again",
			"driver", p.driver, "err", err)
	case err == nil && before != nil:
		p.log.Info("the API server has the node's ResourceSlices again", "driver", p.driver)
	}
	return err
}
