// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/time/rate"

	"example.com/gpu-agent/internal/brief"
	"example.com/gpu-agent/internal/deviceplugin"
	"example.com/gpu-agent/internal/kube/agentkube"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/internal/workload"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/memcap/lib"
)

// DefaultYieldGrace is the default of Options.YieldGrace.
const DefaultYieldGrace = 20 * time.Second

const (
	// yieldEvery is how often the yielder looks while an allocation is to give its room back, and how
	// often it tries again to end a container. yieldLeast is the shortest time between two looks: the loop can
	// make many rounds in a second.
	yieldEvery = time.Second
	yieldLeast = 50 * time.Millisecond
	// evictAgain is the time between two tries to evict a pod. evictRate and evictBurst bound the requests, a
	// second and at once: a node may have hundreds of spot pods. evictPatience bounds one of them.
	evictAgain    = 5 * time.Second
	evictRate     = 10
	evictBurst    = 10
	evictPatience = 10 * time.Second
	// detachBefore is how long before the end of the grace a container's clients of MPS are detached: the daemon
	// may take a while to answer.
	detachBefore = 2 * time.Second
	// nameWait is how long the Event waits for the kubelet to name the pod that was given the room.
	nameWait = 3 * time.Second
)

// Ways in which a spot allocation has given its room back. They are a label of a metric.
const (
	yieldedEvicted = "evicted" // the API server has evicted its pod, and the container ended within the grace
	yieldedEnded   = "ended"   // the yielder has ended the container at the end of the grace
	yieldedLeft    = "left"    // the container has ended by itself
	yieldedParked  = "parked"  // its memory is on the host, and the container runs
)

// yielder has spot allocations give their room back: it tells their programs, evicts their pods if the agent may,
// and ends the containers that are left at the end of the grace. The ledger says who yields, and to whom; the
// loop finds out when the room is free. Use newYielder.
//
// What it acts on is what the ledger says of the allocation, and what the runtime says of the container: which
// allocation it has, by names that no tenant can write. It ends a container only if that is so just before.
type yielder struct {
	grace      time.Duration
	ledger     *ledger.Ledger
	containers *spotContainers
	cluster    Cluster // nil if there is no API server
	ends       *ender
	detach     func(context.Context, *node.Container)
	evict      func(context.Context, workload.Pod, time.Duration) error // nil if the agent evicts no pods
	limit      *rate.Limiter                                            // of evictions
	parker     *parker                                                  // nil if no container is parked
	notices    Caps
	account    *Account
	seen       YieldObserver // nil if nothing is counted
	log        *slog.Logger
	ration     *brief.Ration
	// news has a token after each round, evictable one if there may be another pod to evict.
	news, evictable chan struct{}

	// askNames has the kubelet asked for the names of pods. askedNames is when that was last done; only the
	// goroutine of run uses it.
	askNames   func()
	askedNames time.Time

	mu sync.Mutex
	of map[string]*spotState // guarded by mu: the spot allocations, by ID
}

// spotState is what the yielder knows of a spot allocation.
type spotState struct {
	// swept is true once the notice was looked at that an earlier process may have left.
	swept bool
	// yield is nil unless it is to give its room back and has a container.
	yield *yield
}

// YieldObserver counts the spot allocations that have given their room back; it must not block.
type YieldObserver interface {
	// Yielded is called when the room is free. way is "evicted", "ended" or "left", and took the time since the
	// room was wanted.
	Yielded(way string, took time.Duration)
}

// yield is an allocation that is to give its room back.
type yield struct {
	id, resource string
	epoch        uint64
	since, by    time.Time
	holder       ledger.Holder
	// notices are the allocations whose notice tells it: this one, and what else its containers have in the
	// spot tier. event is the text of the Event for its pod, and told is true if the pod has it.
	notices map[string]bool
	saidAt  time.Time // when it was last written into them
	event   string
	told    bool
	// whole is true if its pod can be evicted: it has nothing that is guaranteed.
	whole bool
	// evicted is true if the API server has accepted the eviction of its pod, and asking while it is asked for that;
	// again is when to ask next.
	evicted, asking bool
	again           time.Time
	// detached has the containers whose clients of MPS were detached.
	detached map[string]bool
	// ended counts the tries to end one of its containers that have done so, or are under way.
	ended int
}

func newYielder(o *Options, w *Worlds, l *ledger.Ledger, front *deviceplugin.FrontEnd, witnesses *deviceplugin.Witnesses,
	ration *brief.Ration) *yielder {
	return &yielder{grace: o.YieldGrace, ledger: l,
		containers: &spotContainers{runtime: w.Runtime, uses: witnesses, belongs: front.Belongs},
		cluster:    w.Cluster, ends: newEnder(w, o.Log, ration), detach: w.Detach, evict: w.Evict,
		limit: rate.NewLimiter(evictRate, evictBurst), notices: w.Caps, account: w.Account, seen: w.Yields, log: o.Log,
		ration: ration, news: make(chan struct{}, 1), evictable: make(chan struct{}, 1), askNames: witnesses.Ask,
		of: map[string]*spotState{}}
}

// turn is called at the end of each round.
func (y *yielder) turn(bool) { poke(y.news) }

// run looks after each round, and by itself while an allocation is to give its room back, until ctx ends.
func (y *yielder) run(ctx context.Context) error {
	for {
		wait := y.look(ctx, time.Now())
		timer := time.NewTimer(max(wait, yieldLeast))
		if wait == 0 {
			timer.Stop() // nothing to do before the next round
		}
		select {
		case <-ctx.Done():
			timer.Stop()
			return ctx.Err()
		case <-timer.C:
		case <-y.news:
			timer.Stop()
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-time.After(yieldLeast):
			}
		}
	}
}

// look looks at the allocations once, and returns when to look again at the latest; 0 if nothing yields.
func (y *yielder) look(ctx context.Context, now time.Time) (wait time.Duration) {
	if y.ledger.Spots() == 0 && len(y.of) == 0 {
		return 0
	}
	all := y.ledger.Allocations()
	byID := make(map[string]*ledger.Allocation, len(all))
	var yielding []*ledger.Allocation
	for i := range all {
		a := &all[i]
		byID[a.ID] = a
		if a.Tier == ledger.Spot && a.Yielding() {
			yielding = append(yielding, a)
		}
	}
	y.settle(byID, now)
	broken := y.parker.ends()
	if len(yielding) == 0 && len(broken) == 0 {
		return 0
	}
	wait = yieldEvery
	due := len(broken) > 0 || slices.ContainsFunc(yielding, func(a *ledger.Allocation) bool { return now.Sub(a.Yield.Since) >= y.grace })
	containers, err := y.containers.ask(ctx, due, now)
	if err != nil {
		y.ration.Log(slog.LevelWarn, "cannot ask which containers have room that is to be given back; it is tried again", nil,
			"err", err)
		return wait
	}
	using, guaranteed := y.containers.sort(containers, byID)
	named := true
	for id := range broken {
		y.endBroken(ctx, id, using[id], now)
	}
	for _, a := range yielding {
		if of := using[a.ID]; len(of) > 0 {
			v := y.note(a, now)
			if y.parker.takes(ctx, a, of, v.by, now) {
				wait = min(wait, max(yieldLeast, v.by.Sub(now)))
				continue
			}
			named = y.tell(v, a, of, byID, now) && named
			y.choose(v, guaranteed, now)
			switch left := v.by.Sub(now); {
			case left <= 0:
				y.endAll(ctx, v, of, now)
			case !throughMPS(a):
				wait = min(wait, left)
			case left <= detachBefore:
				y.detachAll(ctx, v, of)
				wait = min(wait, left)
			default:
				wait = min(wait, left-detachBefore)
			}
		}
	}
	poke(y.evictable)
	if !named && now.Sub(y.askedNames) >= yieldEvery {
		y.askedNames = now
		y.askNames()
	}
	return wait
}

// note returns the entry of an allocation that is to give its room back.
func (y *yielder) note(a *ledger.Allocation, now time.Time) *yield {
	y.mu.Lock()
	defer y.mu.Unlock()
	s := y.of[a.ID]
	v := s.yield
	if v == nil {
		v = &yield{id: a.ID, resource: a.Resource, epoch: a.Epoch, since: a.Yield.Since, by: a.Yield.Since.Add(y.grace),
			notices: map[string]bool{}, detached: map[string]bool{}}
		s.yield = v
		y.log.Info("an allocation of the spot tier is to give its room back", "allocation", a.ID, "resource", a.Resource,
			"pod", a.Holder.String(), "to", a.After, "within", max(0, v.by.Sub(now)).Round(time.Millisecond).String())
	}
	v.holder = a.Holder
	return v
}

// stands reports whether an allocation is as it was when an entry was made.
func (v *yield) stands(a *ledger.Allocation) bool {
	return a != nil && a.Tier == ledger.Spot && a.Epoch == v.epoch && a.Yield.Since.Equal(v.since) && a.Yield.Asked()
}

// tell tells the programs of an allocation's containers by when they end, and its pod to whom the room goes. It
// returns false if the pod is not told yet, because the kubelet has not named who was given the room.
func (y *yielder) tell(v *yield, a *ledger.Allocation, of []using, byID map[string]*ledger.Allocation, now time.Time) bool {
	for _, c := range of {
		for _, key := range c.has {
			if other := byID[key]; other != nil && other.Tier == ledger.Spot {
				v.notices[key] = true
			}
		}
	}
	// A page that is made anew has lost it, so it is told again now and then.
	if now.Sub(v.saidAt) >= yieldEvery {
		v.saidAt = now
		for _, key := range slices.Sorted(maps.Keys(v.notices)) {
			y.notice(key, v.by)
		}
	}
	v.event = fmt.Sprintf("the room that container %s has in the spot tier is taken back: %s; it ends by %s at the latest",
		a.Holder.Container, told(a), v.by.UTC().Format(time.RFC3339))
	if a.Yield.Named || now.Sub(v.since) >= min(nameWait, y.grace/2) {
		y.sendEvent(v)
	}
	return a.Yield.Named || v.told
}

// sendEvent tells the pod of an allocation, once, if the kubelet has named the pod.
func (y *yielder) sendEvent(v *yield) {
	if !v.told && y.cluster != nil && v.holder.Name != "" {
		v.told = true
		y.cluster.Event(v.holder.Pod, agentkube.Normal, string(status.Yielded), v.event)
	}
}

// told says to an allocation's pod where its room goes.
func told(a *ledger.Allocation) string {
	if len(a.Yield.To) == 0 {
		return a.Yield.Told
	}
	return "it was given to " + a.Yield.Told
}

// notice tells the programs of an allocation by when they end, by its notice and its limit pages; if by is zero,
// that they may go on. An allocation may lack both: no container has started with it yet, or one did with an
// earlier version.
func (y *yielder) notice(key string, by time.Time) {
	asks := uint64(0)
	if !by.IsZero() {
		asks = lib.ControlYield
	}
	for _, err := range []error{y.notices.SetNotice(key, by), y.notices.SetControl(key, asks, lib.ControlYield)} {
		if err == nil || errors.Is(err, gpu.ErrNotFound) {
			continue
		}
		y.ration.Log(slog.LevelWarn, "cannot tell a container's programs that they give their room back", []any{"allocation", key},
			"err", err)
	}
}

// settle takes in which spot allocations there are, which have given their room back, and which need not any longer.
// It clears what an earlier process has written for those that do not yield any longer.
func (y *yielder) settle(byID map[string]*ledger.Allocation, now time.Time) {
	y.mu.Lock()
	var over []*yield
	ways := map[*yield]string{}
	wanted, stale := map[string]bool{}, map[string]bool{} // notices that others still need, and those of an earlier process
	for id, a := range byID {
		if a.Tier == ledger.Spot && y.of[id] == nil {
			y.of[id] = &spotState{}
		}
	}
	for id, s := range y.of {
		a := byID[id]
		if !s.swept {
			s.swept, stale[id] = true, !a.Yield.Asked()
		}
		if v := s.yield; v != nil && v.stands(a) && !a.Out() {
			for key := range v.notices {
				wanted[key] = true
			}
		} else if v != nil {
			over, s.yield = append(over, v), nil
			ways[v] = v.way(a)
		}
		if a == nil || a.Tier != ledger.Spot {
			delete(y.of, id)
		}
	}
	y.mu.Unlock()
	slices.SortFunc(over, func(a, b *yield) int { return strings.Compare(a.id, b.id) })
	for id, is := range stale {
		if is {
			y.notice(id, time.Time{})
		}
	}
	for _, v := range over {
		for key := range v.notices {
			if !wanted[key] {
				y.notice(key, time.Time{})
			}
		}
		a := byID[v.id]
		if a != nil && !v.stands(a) && a.Epoch == v.epoch {
			y.log.Info("an allocation of the spot tier keeps its room: it is not wanted any longer", "allocation", v.id,
				"pod", v.holder.String(), "after", now.Sub(v.since).Round(time.Millisecond).String())
			continue
		}
		y.sendEvent(v)
		way, took := ways[v], now.Sub(v.since)
		y.log.Info("an allocation of the spot tier has given its room back", "allocation", v.id, "pod", v.holder.String(),
			"way", way, "after", took.Round(time.Millisecond).String())
		if y.seen != nil {
			y.seen.Yielded(way, took)
		}
	}
}

// way returns how an allocation has given its room back. a is nil if it has ended.
func (v *yield) way(a *ledger.Allocation) string {
	switch {
	case a != nil && a.Phase == ledger.Parked:
		v.event = fmt.Sprintf("the room that container %s has in the spot tier was wanted, so it is parked: its GPU memory is "+
			"on the host until the room is free again", v.holder.Container)
		return yieldedParked
	case v.ended > 0:
		return yieldedEnded
	case v.evicted:
		return yieldedEvicted
	}
	return yieldedLeft
}

// choose decides whether the pod of an allocation is to be evicted.
func (y *yielder) choose(v *yield, guaranteed map[workload.Pod]bool, now time.Time) {
	y.mu.Lock()
	defer y.mu.Unlock()
	p := v.holder.Pod
	v.whole = p.Name != "" && p.UID != "" && !guaranteed[workload.Pod{Namespace: p.Namespace, Name: p.Name}]
}

// evictAll evicts the pods that are to be evicted, until ctx ends. An API server that takes long for each keeps none of
// the others waiting.
func (y *yielder) evictAll(ctx context.Context) error {
	var asking errgroup.Group
	asking.SetLimit(evictBurst)
	defer func() { _ = asking.Wait() }()
	for {
		v, wait := y.nextEviction(time.Now())
		if v == nil {
			timer := time.NewTimer(wait)
			select {
			case <-ctx.Done():
			case <-timer.C:
			case <-y.evictable:
			}
			timer.Stop()
		} else if y.limit.Wait(ctx) == nil {
			pod := y.ask(v)
			asking.Go(func() error {
				y.answered(pod, y.evictOne(ctx, v, pod))
				return nil
			})
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
	}
}

// ask notes that the API server is asked to evict the pod of an allocation, for all of the pod's containers.
func (y *yielder) ask(v *yield) workload.Pod {
	y.mu.Lock()
	defer y.mu.Unlock()
	pod, again := v.holder.Pod, time.Now().Add(evictAgain)
	for o := range y.yieldsLocked() {
		if o.holder.UID == pod.UID {
			o.asking, o.again = true, again
		}
	}
	return pod
}

// answered notes whether the API server has accepted the eviction of a pod.
func (y *yielder) answered(pod workload.Pod, accepted bool) {
	y.mu.Lock()
	for o := range y.yieldsLocked() {
		if o.holder.UID == pod.UID {
			o.asking, o.evicted = false, o.evicted || accepted
		}
	}
	y.mu.Unlock()
	poke(y.evictable)
}

// yieldsLocked yields the allocations that are to give their room back.
func (y *yielder) yieldsLocked() iter.Seq[*yield] {
	return func(yield func(*yield) bool) {
		for _, s := range y.of {
			if s.yield != nil && !yield(s.yield) {
				return
			}
		}
	}
}

// nextEviction returns the allocation whose pod is to be evicted next, the one with the least time left first. If
// there is none now, it returns how long to wait at most.
func (y *yielder) nextEviction(now time.Time) (next *yield, wait time.Duration) {
	y.mu.Lock()
	defer y.mu.Unlock()
	wait = time.Minute
	for v := range y.yieldsLocked() {
		switch {
		case !v.whole || v.evicted || v.asking || !now.Before(v.by):
		case now.Before(v.again):
			wait = min(wait, v.again.Sub(now))
		case next == nil || cmp.Or(v.by.Compare(next.by), cmp.Compare(v.id, next.id)) < 0:
			next = v
		}
	}
	return next, wait
}

// evictOne evicts the pod of an allocation, if it still is to give its room back. It reports whether the API server
// has accepted that.
func (y *yielder) evictOne(ctx context.Context, v *yield, pod workload.Pod) (accepted bool) {
	now := time.Now()
	left := v.by.Sub(now)
	if a, _ := y.ledger.Get(v.id); left <= 0 || !v.stands(&a) || !a.Yielding() || a.Holder.Pod != pod {
		return false
	}
	bounded, cancel := context.WithTimeout(ctx, min(left, evictPatience))
	defer cancel()
	err := y.evict(bounded, pod, left)
	switch {
	case errors.Is(err, agentkube.ErrBudget):
		y.ration.Log(slog.LevelInfo, "a disruption budget keeps a pod of the spot tier until the end of its grace",
			[]any{"pod", pod.String()}, "err", err)
		return false
	case err != nil:
		if ctx.Err() == nil {
			y.ration.Log(slog.LevelWarn, "cannot evict a pod of the spot tier; its container is ended after the grace",
				[]any{"pod", pod.String()}, "err", err)
		}
		return false
	}
	y.log.Info("evicted a pod of the spot tier", "pod", pod.String(), "within", left.Round(time.Millisecond).String(),
		"took", time.Since(now).Round(time.Millisecond).String())
	y.account.evicted(pod, status.Yielded, "its room in the spot tier was wanted")
	return true
}

// throughMPS reports whether an allocation has a share of a GPU's multiprocessors through MPS.
func throughMPS(a *ledger.Allocation) bool {
	return slices.ContainsFunc(a.Grants, func(g ledger.Grant) bool { return g.Compute.Ceiling > 0 })
}

// detachAll has the clients of MPS of an allocation's containers detached, beside this goroutine.
func (y *yielder) detachAll(ctx context.Context, v *yield, of []using) {
	for _, c := range of {
		if y.detach != nil && !v.detached[c.ID] && y.wants(v) {
			v.detached[c.ID] = true
			go y.detach(ctx, c.Container)
		}
	}
}

// endAll ends the containers of an allocation whose grace is over, beside this goroutine.
func (y *yielder) endAll(ctx context.Context, v *yield, of []using, now time.Time) {
	why := &endCause{allocation: v.id, since: v.since, why: "whose room is wanted", account: "its room in the spot tier was wanted",
		stands: func() bool { return y.wants(v) }}
	y.mu.Lock()
	defer y.mu.Unlock()
	for _, c := range of {
		begun := y.ends.begin(ctx, c.Container, why, now, func(ended bool) {
			y.mu.Lock()
			defer y.mu.Unlock()
			if !ended {
				v.ended--
			}
		})
		if begun {
			v.ended++
		}
	}
}

// wants reports whether an allocation still is to give its room back, for the same reason.
func (y *yielder) wants(v *yield) bool {
	a, _ := y.ledger.Get(v.id)
	return v.stands(&a) && a.Yielding()
}

// endBroken ends the containers of an allocation whose processes may be broken, beside this goroutine.
func (y *yielder) endBroken(ctx context.Context, id string, of []using, now time.Time) {
	why := &endCause{allocation: id, since: now, why: "whose processes may be broken by their checkpoint",
		account: "its processes may be broken by their checkpoint", stands: func() bool { return true }}
	for _, c := range of {
		y.ends.begin(ctx, c.Container, why, now, func(bool) {})
	}
}
