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

// Lowerer lowers the node's allocatable amounts, from which the scheduler gives out resources. It
// never raises them. internal/kube/agentkube implements it.
type Lowerer interface {
	// LowerAllocatable returns the names of the resources that it lowered.
	LowerAllocatable(ctx context.Context, want map[string]int64) (lowered []string, err error)
}

// Reasons why a Node's allocatable was lowered.
const (
	// ByList: the kubelet was sent a list with fewer devices.
	ByList = "list"
	// ByKubelet: the kubelet wrote more than the list has, in a status that it had begun before the
	// list came.
	ByKubelet = "kubelet"
	// ByEnd: the agent ends, and there are no devices until the next agent has registered.
	ByEnd = "end"
)

const (
	// lowerGather is how long changed lists are gathered for one write. The allocations of a node's
	// pods, and the resources of one MIG GPU, change together.
	lowerGather = 20 * time.Millisecond
	// Writes of a Node are limited to lowerBurst in a row, and one per lowerEvery on average.
	lowerBurst, lowerEvery = 30, time.Second
	// A resource is lowered at most againMost times in againIn because the kubelet raised it. A
	// kubelet that raises it more often is believed.
	againMost, againIn = 3, time.Minute
	// leaveLast bounds everything that Leave does. leaveLinger is the time for pods to get their
	// devices: those that were bound before the scheduler heard of the end, or while the kubelet
	// still reported devices. leaveSettle is the time for a late report of the kubelet, begun
	// before it counted none. If the API server is slow, so is the kubelet. So both are prolonged
	// to leaveTimes the duration of the agent's own write of the Node, up to leaveSlow.
	leaveLast, leaveLinger, leaveSettle = 5 * time.Second, 500 * time.Millisecond, 250 * time.Millisecond
	leaveTimes, leaveSlow               = 10, 2 * time.Second
)

// Lowering tells the scheduler at once that devices are gone. The kubelet does so, too, but up to
// ten seconds later. Until then the scheduler sends pods that the kubelet refuses for good.
//
// The amounts that it writes are those of the lists that the kubelet was sent, so the kubelet's
// next status has the same. If the kubelet had begun a status before the list came, that status
// brings the old count back for one period of the kubelet, and Lowering lowers it again. It leaves
// it to the kubelet to raise a count. It runs beside the loop and does not depend on it.
type Lowering struct {
	node Lowerer
	// wrote is called for each resource that was lowered, with the reason.
	wrote func(cause string)
	log   *slog.Logger
	// news wakes Run; it holds at most one token.
	news           chan struct{}
	gather, period time.Duration
	writes         *rate.Limiter

	mu sync.Mutex // guards what follows
	// of has every resource with a list that was sent.
	of map[string]*offered
	// ended is true once the agent ends. From then on all amounts are 0, and lists are ignored.
	ended bool
	// raised tells Leave that the Node has more again; it holds at most one token.
	raised chan struct{}
}

// offered is the state of one resource.
type offered struct {
	// devices is the number of healthy devices in the newest list. has is the number that the Node
	// has, -1 before it is known.
	devices, has int64
	// pending is true if this list has not been compared with the Node yet.
	pending bool
	// again has the times within againIn at which the kubelet was contradicted.
	again []time.Time
}

// NewLowering returns a Lowering of a Node. It calls wrote with the reason for each resource that
// was lowered: ByList, ByKubelet or ByEnd. wrote must not block.
func NewLowering(node Lowerer, wrote func(cause string), log *slog.Logger) *Lowering {
	return &Lowering{node: node, wrote: wrote, log: log, news: make(chan struct{}, 1), raised: make(chan struct{}, 1),
		gather: lowerGather, period: againIn,
		writes: rate.NewLimiter(rate.Every(lowerEvery), lowerBurst), of: map[string]*offered{}}
}

// Sent takes in that the kubelet was sent a list of a resource's devices, with this number of
// healthy ones. It returns at once.
func (l *Lowering) Sent(resource string, healthy int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ended {
		return
	}
	r := l.of[resource]
	if r == nil {
		r = &offered{has: -1}
		l.of[resource] = r
	}
	if r.devices = int64(healthy); r.has < 0 || r.has > r.devices {
		r.pending = true
		poke(l.news)
	}
}

// See takes in the Node's amount of each resource. It returns at once.
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

// Run lowers amounts until ctx ends, and returns its error.
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
			// The kubelet mostly reports before the next try, but it may be away, too.
			l.log.Debug("cannot lower allocatable; the scheduler learns of the devices from the kubelet's next report",
				"err", err)
			l.retry(want)
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

// Leave sets all amounts to 0 because the agent ends, and waits for pods that were bound before.
// Until the next agent has registered, the kubelet refuses for good each pod that the scheduler
// sends. Call Leave while the kubelet is still served and Run runs. withhold makes the kubelet
// count all devices as unhealthy, or reverts that; it must not block.
//
// A kubelet that knows devices writes their counts back with each report, and a waiting pod is then
// bound within milliseconds. So Leave keeps serving until that has not happened for leaveLinger,
// which is halved each time for a kubelet that reports often. Then Leave withholds the devices, and
// the kubelet reports none. A report that was begun before may still come. It brings the devices
// back, so Leave serves again and repeats all that. It also withholds devices that pods have: when
// such a pod ends, the scheduler would take them for free.
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

// leave sets all amounts to 0 from now on, and returns what to lower.
func (l *Lowering) leave() map[string]int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ended = true
	want := map[string]int64{}
	for name, r := range l.of {
		want[name], *r = 0, offered{}
	}
	return want
}

// raisedIn reports whether the kubelet raises an amount within d.
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

// due reports whether take would return something.
func (l *Lowering) due(now time.Time) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, r := range l.of {
		if r.pending || r.has > r.devices && l.mayAgain(r, now) {
			return true
		}
	}
	return false
}

// take returns the amounts to write, and the reason for each.
func (l *Lowering) take(now time.Time) (want map[string]int64, cause map[string]string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	want, cause = map[string]int64{}, map[string]string{}
	for name, r := range l.of {
		switch {
		case r.pending:
			cause[name] = ByList
		case r.has > r.devices && l.mayAgain(r, now):
			cause[name] = ByKubelet
		default:
			continue
		}
		// From now on, a higher amount on the Node is the kubelet's contradiction.
		want[name], r.pending, r.has = r.devices, false, min(r.has, r.devices)
	}
	return want, cause
}

// retry marks what could not be written, so that it is tried again.
func (l *Lowering) retry(want map[string]int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for name := range want {
		l.of[name].pending = true
	}
}

// contradicted counts a write that the kubelet made necessary against againMost. A write that
// lowered nothing does not count: the watch may show a Node as it was before the last write.
func (l *Lowering) contradicted(name string, now time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.of[name].again = append(l.of[name].again, now)
}

// mayAgain reports whether the kubelet may be contradicted once more. At the end it always may;
// leaveLast bounds that.
func (l *Lowering) mayAgain(r *offered, now time.Time) bool {
	r.again = slices.DeleteFunc(r.again, func(at time.Time) bool { return now.Sub(at) >= l.period })
	return l.ended || len(r.again) < againMost
}

// elapse waits for d. It returns false if ctx ended first.
func elapse(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}
