// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"log/slog"
	"slices"
	"sync"
	"time"

	"golang.org/x/time/rate"
)

// Lowerer writes what the scheduler may give out of a node's resources, downwards alone.
// internal/kube/agentkube has it.
type Lowerer interface {
	// LowerAllocatable returns the names of those that it lowered.
	LowerAllocatable(ctx context.Context, want map[string]int64) (lowered []string, err error)
}

// Why a Node's allocatable was lowered.
const (
	// ByList: the kubelet was sent a list with fewer devices.
	ByList = "list"
	// ByKubelet: the kubelet wrote more than the list says, in a status that it had begun
	// before.
	ByKubelet = "kubelet"
	// ByEnd: the agent ends, and nothing can be had until the next one has registered.
	ByEnd = "end"
)

const (
	// lowerGather is how long lists are gathered for one write: the allocations of a
	// node's pods, and the resources of one MIG GPU, come together.
	lowerGather = 20 * time.Millisecond
	// Writes of a Node are bounded: lowerBurst in a row, one in lowerEvery in the mean.
	lowerBurst, lowerEvery = 30, time.Second
	// againMost is how often in againIn a resource is lowered because the kubelet raised
	// it: a kubelet that does it again and again has another opinion, and the last word.
	againMost, againIn = 3, time.Minute
	// leaveLast bounds all that follows an agent's end. Pods that were bound before the
	// scheduler heard of it, or while the kubelet said otherwise, have leaveLinger to get
	// their devices, and a report that the kubelet had begun before it counted none has
	// leaveSettle to arrive. Where the API server is slow, so is the kubelet: then
	// each is leaveTimes what our own write of the Node took, and leaveSlow at most.
	leaveLast, leaveLinger, leaveSettle = 5 * time.Second, 500 * time.Millisecond, 250 * time.Millisecond
	leaveTimes, leaveSlow               = 10, 2 * time.Second
)

// Lowering tells the scheduler at once of devices that cannot be had any more. The
// kubelet does that too, up to ten seconds later, and until then the scheduler sends
// pods that the kubelet refuses for good.
//
// What it writes follows the lists of devices that the kubelet has been sent, so that
// the kubelet's next status says the same. Where that status was begun before the list
// came, the old count returns for one period of the kubelet; it is lowered again then.
// Counts that rise are the kubelet's to write.
type Lowering struct {
	node Lowerer
	// wrote is told of each resource that was lowered, and why.
	wrote func(cause string)
	log   *slog.Logger
	// news wakes Run; it holds at most one token.
	news           chan struct{}
	gather, period time.Duration
	writes         *rate.Limiter

	mu sync.Mutex // guards what follows
	// of has every resource of which a list was sent.
	of map[string]*offered
	// left: the agent ends, and there is nothing to be had, whatever lists say.
	left bool
	// raised tells Leave that the kubelet says otherwise; it holds at most one token.
	raised chan struct{}
}

// offered is what is known of one resource.
type offered struct {
	// devices is how many healthy ones the newest list has, and has how many the Node
	// says there are, -1 before it was heard.
	devices, has int64
	// owed says that this list has not been compared with the Node yet.
	owed bool
	// again has when the kubelet was last contradicted, for againMost times.
	again []time.Time
}

// NewLowering makes a Lowering of a Node. wrote is told, for each resource that is
// lowered, ByList or ByKubelet; it must not block.
func NewLowering(node Lowerer, wrote func(cause string), log *slog.Logger) *Lowering {
	return &Lowering{node: node, wrote: wrote, log: log, news: make(chan struct{}, 1), raised: make(chan struct{}, 1),
		gather: lowerGather, period: againIn,
		writes: rate.NewLimiter(rate.Every(lowerEvery), lowerBurst), of: map[string]*offered{}}
}

// Sent says that the kubelet was sent a list of a resource's devices, so many of them
// healthy. It returns at once.
func (l *Lowering) Sent(resource string, healthy int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.left {
		return
	}
	r := l.of[resource]
	if r == nil {
		r = &offered{has: -1}
		l.of[resource] = r
	}
	if r.devices = int64(healthy); r.has < 0 || r.has > r.devices {
		r.owed = true
		poke(l.news)
	}
}

// See takes in how much the Node says there is of each resource. It returns at once.
func (l *Lowering) See(amounts map[string]int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for name, r := range l.of {
		if r.has = amounts[name]; r.has > r.devices {
			poke(l.news)
			poke(l.raised)
		}
	}
}

// Run lowers what is to be lowered until ctx ends, whose error it returns.
func (l *Lowering) Run(ctx context.Context) error {
	pause := backOff(backOffMax)
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-l.news:
		}
		if !elapse(ctx, l.gather) {
			return ctx.Err()
		}
		if !l.due(time.Now()) {
			continue
		}
		if err := l.writes.Wait(ctx); err != nil {
			return err
		}
		want, cause := l.take(time.Now())
		lowered, err := l.node.LowerAllocatable(ctx, want)
		if err != nil {
			// The kubelet will have said it before this is of use again, but it may be away too.
			l.log.Debug("the scheduler hears of the node's devices when the kubelet next reports", "err", err)
			l.owe(want)
			if !elapse(ctx, pause.Step()) {
				return ctx.Err()
			}
			poke(l.news)
			continue
		}
		pause = backOff(backOffMax)
		for _, name := range lowered {
			l.wrote(cause[name])
			if cause[name] == ByKubelet {
				l.contradicted(name, time.Now())
			}
			l.log.Debug("lowered what the scheduler may give out",
				"resource", name, "to", want[name], "because", cause[name])
		}
	}
}

// Leave says that the agent ends, and waits for the pods that were bound before that:
// until the next one has registered, the kubelet refuses for good what the scheduler sends.
// It is to be called while the kubelet is still served and Run runs. withhold has the
// kubelet count all devices as unhealthy, or takes that back; it must not block.
//
// A kubelet that knows of devices writes their counts back whenever it reports, and a pod
// that waits for room is bound within milliseconds. So it is served until that has not
// happened for a while; then it counts none, and its reports say so. A kubelet that reports
// more often than that is waited for half as long each time. A report that was begun before
// comes late, and then the devices are back once more. Those that pods have are withheld, too:
// when their pod ends the scheduler takes them for room.
func (l *Lowering) Leave(ctx context.Context, withhold func(bool)) {
	ctx, cancel := context.WithTimeout(ctx, leaveLast)
	defer cancel()
	began := time.Now()
	lowered, err := l.node.LowerAllocatable(ctx, l.leave())
	if err != nil {
		l.log.Warn("the kubelet refuses pods that come before the next agent has registered", "err", err)
		return
	}
	for range lowered {
		l.wrote(ByEnd)
	}
	slow := min(leaveTimes*time.Since(began), leaveSlow)
	linger, settle := max(leaveLinger, slow), max(leaveSettle, slow)
	for len(lowered) > 0 && ctx.Err() == nil {
		for l.raisedIn(ctx, linger) {
			linger = max(leaveLinger, linger/2)
		}
		if withhold(true); !l.raisedIn(ctx, settle) {
			return
		}
		withhold(false)
	}
}

// leave makes nothing to be had from here on, and returns what to lower for that.
func (l *Lowering) leave() map[string]int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.left = true
	want := map[string]int64{}
	for name, r := range l.of {
		want[name], *r = 0, offered{}
	}
	return want
}

// raisedIn reports whether the kubelet writes more back within a time.
func (l *Lowering) raisedIn(ctx context.Context, d time.Duration) bool {
	ctx, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	select {
	case <-ctx.Done():
		return false
	case <-l.raised:
		return true
	}
}

// due reports whether take would find something.
func (l *Lowering) due(now time.Time) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, r := range l.of {
		if r.owed || r.has > r.devices && l.mayAgain(r, now) {
			return true
		}
	}
	return false
}

// take returns what is to be lowered to what, and why.
func (l *Lowering) take(now time.Time) (want map[string]int64, cause map[string]string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	want, cause = map[string]int64{}, map[string]string{}
	for name, r := range l.of {
		switch {
		case r.owed:
			cause[name] = ByList
		case r.has > r.devices && l.mayAgain(r, now):
			cause[name] = ByKubelet
		default:
			continue
		}
		// What comes from the Node from here on is the kubelet's contradiction.
		want[name], r.owed, r.has = r.devices, false, min(r.has, r.devices)
	}
	return want, cause
}

// owe has what could not be written tried again.
func (l *Lowering) owe(want map[string]int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for name := range want {
		l.of[name].owed = true
	}
}

// contradicted counts against againMost. Not what was found to be low enough: the watch
// may show a Node as it was before the last write.
func (l *Lowering) contradicted(name string, now time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.of[name].again = append(l.of[name].again, now)
}

// mayAgain reports whether the kubelet may be contradicted once more: always at the end, which
// leaveLast bounds.
func (l *Lowering) mayAgain(r *offered, now time.Time) bool {
	r.again = slices.DeleteFunc(r.again, func(at time.Time) bool { return now.Sub(at) >= l.period })
	return l.left || len(r.again) < againMost
}

// elapse waits. It returns false where ctx ended first.
func elapse(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}
