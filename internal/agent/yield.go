// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

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
	// often it tries again to end a container. yieldLeast is the shortest time between two looks, and
	// yieldListed how old the list of containers may be: the loop can make many rounds in a second.
	yieldEvery  = time.Second
	yieldLeast  = 50 * time.Millisecond
	yieldListed = 500 * time.Millisecond
	// evictAgain is how long the yielder waits after a refused eviction. evictRate and evictBurst bound
	// the requests, a second and at once: a node may have hundreds of spot pods. evictPatience bounds
	// one of them.
	evictAgain    = 5 * time.Second
	evictRate     = 10
	evictBurst    = 10
	evictPatience = 10 * time.Second
	// detachBefore is how long before the end of the grace a container's clients of MPS are detached: the daemon
	// may take a while to answer.
	detachBefore = 2 * time.Second
	// nameWait is how long the Event waits for the kubelet to name the pod that was given the room.
	nameWait = 3 * time.Second
	// endsAtOnce is how many containers are ended at the same time.
	endsAtOnce = 16
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
	grace   time.Duration
	ledger  *ledger.Ledger
	runtime deviceplugin.Runtime
	uses    interface {
		Uses([]node.Container) []deviceplugin.Use
		Knows([]node.Container) bool
		Stranger() error
	}
	belongs func(deviceplugin.Use) bool
	cluster Cluster // nil if there is no API server
	end     func(context.Context, *node.Container) (how string, err error)
	detach  func(context.Context, *node.Container)
	evict   func(context.Context, workload.Pod, time.Duration) error // nil if the agent evicts no pods
	parker  *parker                                                  // nil if no container is parked
	notices Caps
	account *Account
	seen    YieldObserver // nil if nothing is counted
	log     *slog.Logger
	ration  *brief.Ration
	limit   *rate.Limiter // of evictions
	// news has a token after each round, evictable one if there may be another pod to evict.
	news, evictable chan struct{}

	// askNames has the kubelet asked for the names of pods.
	askNames func()

	// The goroutine of run alone uses these: the last list of containers, when it was asked for, when names were
	// last asked for, and the spot allocations whose notice was looked at.
	listed            []node.Container
	asked, askedNames time.Time
	noticed           map[string]bool

	mu sync.Mutex
	// Guarded by mu: the allocations that are to give their room back and have a container, by ID, and the
	// containers that are being ended.
	of     map[string]*yield
	ending map[string]bool
	// triedBroken has when it was last tried to end a container whose processes may be broken.
	triedBroken map[string]time.Time
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
	// evicted is true if the API server has accepted the eviction of its pod; again is when to ask next.
	evicted bool
	again   time.Time
	// detached has the containers whose clients of MPS were detached.
	detached map[string]bool
	// tried has when it was last tried to end each of its containers. ended counts the tries that have ended one,
	// or are under way.
	tried map[string]time.Time
	ended int
}

func newYielder(o *Options, w *Worlds, l *ledger.Ledger, front *deviceplugin.FrontEnd, witnesses *deviceplugin.Witnesses,
	ration *brief.Ration) *yielder {
	return &yielder{grace: o.YieldGrace, ledger: l, runtime: w.Runtime, uses: witnesses, belongs: front.Belongs,
		cluster: w.Cluster, end: w.End, detach: w.Detach, evict: w.Evict, notices: w.Caps, account: w.Account, seen: w.Yields, log: o.Log,
		ration: ration, limit: rate.NewLimiter(evictRate, evictBurst),
		news: make(chan struct{}, 1), evictable: make(chan struct{}, 1), askNames: witnesses.Ask,
		noticed: map[string]bool{}, of: map[string]*yield{}, ending: map[string]bool{},
		triedBroken: map[string]time.Time{}}
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
	y.clearNotices(byID)
	broken := y.parker.ends()
	if len(yielding) == 0 && len(broken) == 0 {
		return 0
	}
	wait = yieldEvery
	containers, err := y.list(ctx, yielding, len(broken) > 0, now)
	if err != nil {
		y.ration.Log(slog.LevelWarn, "cannot ask which containers have room that is to be given back; it is tried again", nil,
			"err", err)
		return wait
	}
	using, guaranteed := y.sort(containers, byID)
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

// list returns the containers of the runtime. The answer is new if a container may have to be ended; due is true if
// one has to in any case.
func (y *yielder) list(ctx context.Context, yielding []*ledger.Allocation, due bool, now time.Time) ([]node.Container, error) {
	due = due || slices.ContainsFunc(yielding, func(a *ledger.Allocation) bool { return now.Sub(a.Yield.Since) >= y.grace })
	if !due && !y.asked.IsZero() && now.Sub(y.asked) < yieldListed {
		return y.listed, nil
	}
	ctx, cancel := context.WithTimeout(ctx, deviceplugin.RuntimePatience)
	defer cancel()
	list, err := y.runtime.Containers(ctx)
	if err == nil && !y.uses.Knows(list) {
		err = y.uses.Stranger()
	}
	if err != nil {
		return nil, err
	}
	y.listed, y.asked = list, now
	return list, nil
}

// using is a container that has an allocation, with all allocations that it has.
type using struct {
	*node.Container
	has []string
}

// sort returns the containers of each spot allocation that belong to its holder, and the pods that have something
// that is guaranteed, or that this ledger does not know.
func (y *yielder) sort(list []node.Container, byID map[string]*ledger.Allocation) (of map[string][]using,
	guaranteed map[workload.Pod]bool) {
	of, guaranteed = map[string][]using{}, map[workload.Pod]bool{}
	named := func(p workload.Pod) workload.Pod { return workload.Pod{Namespace: p.Namespace, Name: p.Name} }
	for _, a := range byID {
		if a.Tier != ledger.Spot {
			for _, p := range a.Pods() {
				guaranteed[named(p)] = true
			}
		}
	}
	for i := range list {
		c := &list[i]
		if c.CDIUnknown {
			guaranteed[named(c.InPod())] = true // it may have anything
		}
		found := y.uses.Uses(list[i : i+1])
		var has []string
		for _, u := range found {
			has = append(has, u.Key)
		}
		for _, u := range found {
			switch a := byID[u.Key]; {
			case a == nil || a.Tier != ledger.Spot:
				guaranteed[named(c.InPod())] = true
			case y.belongs(u):
				of[a.ID] = append(of[a.ID], using{c, has})
			}
		}
	}
	return of, guaranteed
}

// note returns the entry of an allocation that is to give its room back.
func (y *yielder) note(a *ledger.Allocation, now time.Time) *yield {
	y.mu.Lock()
	defer y.mu.Unlock()
	v := y.of[a.ID]
	if v == nil {
		v = &yield{id: a.ID, resource: a.Resource, epoch: a.Epoch, since: a.Yield.Since, by: a.Yield.Since.Add(y.grace),
			notices: map[string]bool{}, detached: map[string]bool{}, tried: map[string]time.Time{}}
		y.of[a.ID] = v
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
	to, named := y.told(a, byID)
	v.event = fmt.Sprintf("the room that container %s has in the spot tier is taken back: %s; it ends by %s at the latest",
		a.Holder.Container, to, v.by.UTC().Format(time.RFC3339))
	if named || now.Sub(v.since) >= min(nameWait, y.grace/2) {
		y.sendEvent(v)
	}
	return named || v.told
}

// sendEvent tells the pod of an allocation, once, if the kubelet has named the pod.
func (y *yielder) sendEvent(v *yield) {
	if !v.told && y.cluster != nil && v.holder.Name != "" {
		v.told = true
		y.cluster.Event(v.holder.Pod, agentkube.Normal, string(status.Yielded), v.event)
	}
}

// told says to an allocation's pod where its room goes. named is true if the kubelet has named all pods that
// were given it.
func (y *yielder) told(a *ledger.Allocation, byID map[string]*ledger.Allocation) (to string, named bool) {
	if len(a.Yield.To) == 0 {
		return "the GPU's layout changes", true
	}
	var names []string
	named = true
	for _, id := range a.Yield.To {
		if g := byID[id]; g != nil {
			names = append(names, g.Holder.Told(a.Holder.Namespace, id))
			named = named && g.Holder.Name != ""
		}
	}
	slices.Sort(names)
	return "it was given to " + brief.List(slices.Compact(names), 3), named
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

// clearNotices clears what an earlier process has written for spot allocations that do not yield any longer.
func (y *yielder) clearNotices(byID map[string]*ledger.Allocation) {
	for id, a := range byID {
		if a.Tier != ledger.Spot || y.noticed[id] {
			continue
		}
		if y.noticed[id] = true; !a.Yield.Asked() {
			y.notice(id, time.Time{})
		}
	}
	maps.DeleteFunc(y.noticed, func(id string, _ bool) bool { return byID[id] == nil })
}

// settle takes in which allocations have given their room back, and which need not any longer.
func (y *yielder) settle(byID map[string]*ledger.Allocation, now time.Time) {
	y.mu.Lock()
	var over []*yield
	ways := map[*yield]string{}
	wanted := map[string]bool{} // notices that others still need
	for id, v := range y.of {
		if a := byID[id]; v.stands(a) && !a.Out() {
			for key := range v.notices {
				wanted[key] = true
			}
			continue
		}
		over = append(over, v)
		delete(y.of, id)
		switch ways[v] = yieldedLeft; {
		case byID[id] != nil && byID[id].Phase == ledger.Parked:
			ways[v] = yieldedParked
			v.event = fmt.Sprintf("the room that container %s has in the spot tier was wanted, so it is parked: its GPU memory is "+
				"on the host until the room is free again", v.holder.Container)
		case v.ended > 0:
			ways[v] = yieldedEnded
		case v.evicted:
			ways[v] = yieldedEvicted
		}
	}
	y.mu.Unlock()
	slices.SortFunc(over, func(a, b *yield) int { return strings.Compare(a.id, b.id) })
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

// choose decides whether the pod of an allocation is to be evicted.
func (y *yielder) choose(v *yield, guaranteed map[workload.Pod]bool, now time.Time) {
	y.mu.Lock()
	defer y.mu.Unlock()
	p := v.holder.Pod
	v.whole = p.Name != "" && p.UID != "" && !guaranteed[workload.Pod{Namespace: p.Namespace, Name: p.Name}]
}

// evictAll evicts the pods that are to be evicted, one after the other, until ctx ends.
func (y *yielder) evictAll(ctx context.Context) error {
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
			y.evictOne(ctx, v)
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
	}
}

// nextEviction returns the allocation whose pod is to be evicted next, the one with the least time left first. If
// there is none now, it returns how long to wait at most.
func (y *yielder) nextEviction(now time.Time) (next *yield, wait time.Duration) {
	y.mu.Lock()
	defer y.mu.Unlock()
	wait = time.Minute
	for _, v := range y.of {
		switch {
		case !v.whole || v.evicted || !now.Before(v.by):
		case now.Before(v.again):
			wait = min(wait, v.again.Sub(now))
		case next == nil || cmp.Or(v.by.Compare(next.by), cmp.Compare(v.id, next.id)) < 0:
			next = v
		}
	}
	return next, wait
}

// evictOne evicts the pod of an allocation, if it still is to give its room back.
func (y *yielder) evictOne(ctx context.Context, v *yield) {
	now := time.Now()
	left := v.by.Sub(now)
	a, _ := y.ledger.Get(v.id)
	y.mu.Lock()
	pod := v.holder.Pod
	for _, o := range y.of { // another container of the same pod may be about to be asked for
		if o.holder.UID == pod.UID {
			o.again = now.Add(evictAgain)
		}
	}
	y.mu.Unlock()
	if left <= 0 || !v.stands(&a) || !a.Yielding() || a.Holder.Pod != pod {
		return
	}
	bounded, cancel := context.WithTimeout(ctx, min(left, evictPatience))
	defer cancel()
	err := y.evict(bounded, pod, left)
	switch {
	case errors.Is(err, agentkube.ErrBudget):
		y.ration.Log(slog.LevelInfo, "a disruption budget keeps a pod of the spot tier until the end of its grace",
			[]any{"pod", pod.String()}, "err", err)
		return
	case err != nil:
		if ctx.Err() == nil {
			y.ration.Log(slog.LevelWarn, "cannot evict a pod of the spot tier; its container is ended after the grace",
				[]any{"pod", pod.String()}, "err", err)
		}
		return
	}
	y.mu.Lock()
	for _, o := range y.of {
		o.evicted = o.evicted || o.holder.UID == pod.UID
	}
	y.mu.Unlock()
	y.account.evicted(pod, status.Yielded, "its room in the spot tier was wanted")
}

// throughMPS reports whether an allocation has a share of a GPU's multiprocessors through MPS.
func throughMPS(a *ledger.Allocation) bool {
	return slices.ContainsFunc(a.Grants, func(g ledger.Grant) bool { return g.Compute.Ceiling > 0 })
}

// detachAll has the clients of MPS of an allocation's containers detached, beside this goroutine.
func (y *yielder) detachAll(ctx context.Context, v *yield, of []using) {
	for _, c := range of {
		if a, _ := y.ledger.Get(v.id); y.detach != nil && !v.detached[c.ID] && v.stands(&a) && a.Yielding() {
			v.detached[c.ID] = true
			go y.detach(ctx, c.Container)
		}
	}
}

// endAll ends the containers of an allocation whose grace is over, beside this goroutine.
func (y *yielder) endAll(ctx context.Context, v *yield, of []using, now time.Time) {
	y.mu.Lock()
	defer y.mu.Unlock()
	for _, c := range of {
		if y.ending[c.ID] || len(y.ending) >= endsAtOnce || now.Sub(v.tried[c.ID]) < yieldEvery {
			continue
		}
		first := v.tried[c.ID].IsZero()
		y.ending[c.ID], v.tried[c.ID] = true, now
		v.ended++
		go func() {
			ended := y.endOne(ctx, v, c.Container, first)
			y.mu.Lock()
			defer y.mu.Unlock()
			if delete(y.ending, c.ID); !ended {
				v.ended--
			}
		}()
	}
}

// endBroken ends the containers of an allocation whose processes may be broken, beside this goroutine.
func (y *yielder) endBroken(ctx context.Context, id string, of []using, now time.Time) {
	y.mu.Lock()
	defer y.mu.Unlock()
	for _, c := range of {
		if y.end == nil || y.ending[c.ID] || len(y.ending) >= endsAtOnce || now.Sub(y.triedBroken[c.ID]) < yieldEvery {
			continue
		}
		first := y.triedBroken[c.ID].IsZero()
		y.ending[c.ID], y.triedBroken[c.ID] = true, now
		go func() {
			how, err := y.end(ctx, c.Container)
			pod := c.InPod().String()
			switch {
			case err != nil && !errors.Is(err, gpu.ErrNotFound):
				y.ration.Log(slog.LevelError, "cannot end a container whose processes may be broken", []any{"container", c.ID, "pod", pod},
					"err", err)
			case err == nil && first:
				y.log.Warn("ended a container of the spot tier, whose processes may be broken by their checkpoint", "container", c.ID,
					"pod", pod, "allocation", id, "how", how)
				y.account.killed(c.Container, status.Yielded, "its processes may be broken by their checkpoint")
			}
			y.mu.Lock()
			defer y.mu.Unlock()
			delete(y.ending, c.ID)
			if errors.Is(err, gpu.ErrNotFound) {
				delete(y.triedBroken, c.ID)
			}
		}()
	}
}

// endOne ends a container of an allocation, if that still is to give its room back. first is false if that was
// tried before: a process with much memory takes seconds to end.
func (y *yielder) endOne(ctx context.Context, v *yield, c *node.Container, first bool) (ended bool) {
	if a, _ := y.ledger.Get(v.id); y.end == nil || !v.stands(&a) || !a.Yielding() {
		return false
	}
	how, err := y.end(ctx, c)
	switch pod := c.InPod().String(); {
	case errors.Is(err, gpu.ErrNotFound): // it has ended by itself
		return false
	case err != nil:
		y.ration.Log(slog.LevelError, "cannot end a container whose room is wanted", []any{"container", c.ID, "pod", pod}, "err", err)
		return false
	case first:
		y.log.Warn("ended a container of the spot tier, whose room is wanted", "container", c.ID, "pod", pod, "name", c.Name,
			"how", how, "after", time.Since(v.since).Round(time.Millisecond).String())
		y.account.killed(c, status.Yielded, "its room in the spot tier was wanted")
	}
	return true
}
