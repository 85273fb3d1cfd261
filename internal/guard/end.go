// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"context"
	"log/slog"
	"maps"
	"slices"
	"sync/atomic"

	"example.com/gpu-agent/internal/node"
)

// reaper ends containers. Any goroutine may use it.
type reaper struct {
	proc    Proc
	runtime Runtime
	shares  Shares // nil if no GPU is under MPS
	log     *guardLog
	// detached counts the clients of MPS that were detached before their end, and undetached those whose
	// daemon has not answered in time.
	detached, undetached atomic.Uint64
}

// end ends a container within endTimeout, after its clients of MPS have been detached. Its results are those of
// Runtime.End. what names the container in the log.
func (r *reaper) end(ctx context.Context, o node.Owner, what string) (how string, err error) {
	ctx, cancel := context.WithTimeout(ctx, endTimeout)
	defer cancel()
	r.detach(ctx, what, r.inContainer(o.ID))
	return r.runtime.End(ctx, o)
}

// End ends a container as the watchdog does, after its clients of MPS have been detached. It returns what it used,
// and an error that wraps gpu.ErrNotFound if the container has ended already. It works also while the watchdog
// does not run, and takes at most ten seconds. Any goroutine may call it.
func (g *Guard) End(ctx context.Context, c *node.Container) (how string, err error) {
	return g.reaper.end(ctx, node.Owner{ID: c.ID, PodUID: c.PodUID}, who(c))
}

// Detach has a container's clients of MPS detached before its grace ends: the end of a client that computes would
// end the work of its neighbours. It takes at most five seconds. Any goroutine may call it.
func (g *Guard) Detach(ctx context.Context, c *node.Container) {
	g.reaper.detach(ctx, who(c), g.reaper.inContainer(c.ID))
}

// detach detaches all clients of a container from the servers of MPS before the container is ended: the
// end of a client that computes ends the work of its neighbours. A daemon that does not answer in time
// is counted, and keeps the container no longer. It returns how many were detached, and those that no daemon was
// asked for, because the supervisor of the daemons did not answer.
func (r *reaper) detach(ctx context.Context, what string, in func(pid int) bool) (detached int, unasked []int) {
	if r.shares == nil {
		return 0, nil
	}
	ctx, cancel := context.WithTimeout(ctx, detachTimeout)
	defer cancel()
	daemons := r.shares.Daemons()
	for _, u := range slices.Sorted(maps.Keys(daemons)) {
		var clients []int
		for _, pid := range slices.Sorted(maps.Keys(daemons[u].Clients)) {
			if in(pid) {
				clients = append(clients, pid)
			}
		}
		if len(clients) == 0 {
			continue
		}
		done, timedOut, err := r.shares.Detach(ctx, u, clients)
		if err != nil {
			done, timedOut, unasked = 0, len(clients), append(unasked, clients...)
		}
		detached += done
		r.detached.Add(uint64(done))
		r.undetached.Add(uint64(timedOut))
		if err != nil || timedOut > 0 {
			r.log.ration.Log(slog.LevelWarn, "clients of MPS were not detached before their end; it may end the work of others",
				[]any{"what", what, "gpu", u}, "clients", timedOut, "err", err)
		}
	}
	return detached, unasked
}

func (r *reaper) detaches() (done, not uint64) { return r.detached.Load(), r.undetached.Load() }

// inContainer reports whether a process is in a container, and inPod whether it is in a pod.
func (r *reaper) inContainer(id string) func(pid int) bool {
	return func(pid int) bool {
		o, err := r.proc.Container(pid)
		return err == nil && o.ID == id
	}
}

func (r *reaper) inPod(uid string) func(pid int) bool {
	return func(pid int) bool {
		o, _ := r.proc.Container(pid) // what is in no container has the pod alone
		return uid != "" && o.PodUID == uid
	}
}
