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

// ending is a pod that is about to end, or whose object is gone.
type ending struct {
	pod workload.Pod // the UID alone if it was gone at once
	// by is when the kubelet kills what is left of it. until is when to give up; zero before the first try.
	by, until time.Time
	// timer calls try.
	timer *time.Timer
	// named is true if the API server has named the pod, and so tells when it is gone.
	named bool
	// asked are the clients that the daemons were asked to detach; each is asked for once, unless the question was
	// not taken.
	asked map[int]bool
}

func (p *ending) String() string {
	if p.pod.Name == "" {
		return "the pod with UID " + p.pod.UID
	}
	return p.pod.String()
}

// note takes in when a pod ends. The earliest time counts: a grace period can only become shorter.
func (e *endings) note(ctx context.Context, pod workload.Pod, by time.Time, named bool) {
	if e.shares == nil {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.noteLocked(ctx, pod, by, named)
}

func (e *endings) noteLocked(ctx context.Context, pod workload.Pod, by time.Time, named bool) *ending {
	wait := time.Until(by) - detachBefore
	p := e.of[pod.UID]
	if p == nil {
		p = &ending{pod: pod, by: by, named: named, asked: map[int]bool{}}
		p.timer = time.AfterFunc(wait, func() { e.try(ctx, p) })
		e.of[pod.UID] = p
		return p
	}
	if p.named = p.named || named; by.Before(p.by) {
		p.by = by
		p.timer.Reset(wait)
	}
	return p
}

// try has the clients of a pod detached, and again soon as long as the pod is there: a program may begin anew, and
// the agent does not know a client that has just begun.
func (e *endings) try(ctx context.Context, p *ending) {
	if ctx.Err() == nil {
		in := e.inPod(p.pod.UID)
		detached, unasked := e.detach(ctx, p.String(), func(pid int) bool { return in(pid) && e.first(p, pid) })
		e.again(p, unasked)
		if detached > 0 {
			e.log.Info("detached the clients of MPS of a pod that ends", "pod", p.String(), "clients", detached)
		}
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	now := time.Now()
	if p.until.IsZero() {
		p.until = now.Add(max(0, p.by.Sub(now)) + detachAfter)
	}
	switch {
	case e.of[p.pod.UID] != p:
	case ctx.Err() != nil || !now.Before(p.until):
		delete(e.of, p.pod.UID)
	default:
		p.timer.Reset(detachEvery)
	}
}

// first reports whether a client is asked for the first time.
func (e *endings) first(p *ending, pid int) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	first := !p.asked[pid]
	p.asked[pid] = true
	return first
}

// again has clients asked for once more.
func (e *endings) again(p *ending, pids []int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, pid := range pids {
		delete(p.asked, pid)
	}
}

// gone takes in that the API server does not have a pod any longer. Clients that it still has are detached at once:
// after a forced deletion the kubelet gives containers two seconds to end.
func (e *endings) gone(ctx context.Context, uid string) {
	if e.shares == nil {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	now := time.Now()
	e.noteLocked(ctx, workload.Pod{UID: uid}, now, true).until = now.Add(detachGone)
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
	maps.DeleteFunc(e.of, func(uid string, p *ending) bool {
		return !pods[uid] && !p.named && p.timer.Stop()
	})
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
