// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"maps"
	"sync"
	"time"

	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/internal/workload"
)

// endings has the clients of MPS of pods that are about to end detached, shortly before the kubelet kills what
// is left of them: the end of a client that computes ends the work of its neighbours. The pods are those that the
// watchdog evicts, and those that the API server names ([Guard.PodEnds]). Any goroutine may use it.
type endings struct {
	*reaper

	mu sync.Mutex
	of map[string]*ending // by the pod's UID; guarded by mu
}

// ending is a pod that is about to end.
type ending struct {
	pod workload.Pod
	// by is when the kubelet kills what is left of it. until is when to give up; zero before the first try.
	by, until time.Time
	// timer calls try.
	timer *time.Timer
	// named is true if the API server has named the pod, and so tells when it is gone.
	named bool
}

// note takes in when a pod ends. The earliest time counts: a grace period can only become shorter.
func (e *endings) note(ctx context.Context, pod workload.Pod, by time.Time, named bool) {
	if e.shares == nil {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	wait := time.Until(by) - detachBefore
	p := e.of[pod.UID]
	if p == nil {
		p = &ending{pod: pod, by: by, named: named}
		p.timer = time.AfterFunc(wait, func() { e.try(ctx, p) })
		e.of[pod.UID] = p
		return
	}
	if p.named = p.named || named; by.Before(p.by) {
		p.by = by
		p.timer.Reset(wait)
	}
}

// try has the clients of a pod detached, and again soon as long as the pod is there: a program may begin anew, and
// an agent that has just started does not know all clients yet.
func (e *endings) try(ctx context.Context, p *ending) {
	if ctx.Err() == nil {
		e.detachPod(ctx, p.pod.String(), p.pod.UID)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	now := time.Now()
	if p.until.IsZero() {
		p.until = now.Add(max(0, p.by.Sub(now)) + detachAfter)
	}
	switch {
	case e.of[p.pod.UID] != p: // it is gone
	case ctx.Err() != nil || !now.Before(p.until):
		delete(e.of, p.pod.UID)
	default:
		p.timer.Reset(detachEvery)
	}
}

// gone forgets a pod that the API server does not have any longer. Clients that it still has are detached at once:
// after a forced deletion the kubelet gives containers two seconds to end.
func (e *endings) gone(ctx context.Context, uid string) {
	if e.shares == nil {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	what := "the pod with UID " + uid
	if p := e.of[uid]; p != nil {
		what = p.pod.String()
		e.dropLocked(uid)
	}
	go e.detachPod(ctx, what, uid)
}

// detachPod detaches the clients of a pod.
func (e *endings) detachPod(ctx context.Context, what, uid string) {
	if detached := e.detach(ctx, what, e.inPod(uid)); detached > 0 {
		e.log.Info("detached the clients of MPS of a pod that ends", "pod", what, "clients", detached)
	}
}

func (e *endings) dropLocked(uid string) {
	e.of[uid].timer.Stop()
	delete(e.of, uid)
}

// forget drops the evicted pods of which no container is listed any longer. Others are dropped when the API server
// has ceased to name them: a new pod may not be listed yet.
func (e *endings) forget(listed map[string]*node.Container) {
	e.mu.Lock()
	defer e.mu.Unlock()
	pods := map[string]bool{}
	for _, c := range listed {
		pods[c.PodUID] = true
	}
	for uid := range maps.Clone(e.of) {
		if !pods[uid] && !e.of[uid].named {
			e.dropLocked(uid)
		}
	}
}

// PodEnds has the clients of MPS of a pod detached two seconds before a time, at which the kubelet kills what is
// left of the pod; at once if that time is nearer. A second call can make that time earlier, and not later. It works
// also while the watchdog does not run, until ctx ends. Any goroutine may call it, and it does not wait.
func (g *Guard) PodEnds(ctx context.Context, p workload.Pod, by time.Time) {
	g.endings.note(ctx, p, by, true)
}

// PodGone has the clients of MPS that a pod still has detached at once, since the API server does not have the
// pod any longer. Any goroutine may call it, and it does not wait.
func (g *Guard) PodGone(ctx context.Context, uid string) { g.endings.gone(ctx, uid) }
