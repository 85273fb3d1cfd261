// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"slices"
	"time"
)

// queue is kube-scheduler's: one pod at a time, each with a back-off from 1 s to 10 s. A pod that has found no
// room waits for an event that may help it: any where the placer has refused it, otherwise more room.
type queue struct {
	// queued are sorted by the times from which they may be looked at; waits wait for an event.
	queued, waits []*crowdPod
	// busy says that a pod is being looked at, and seen is the best event since then.
	busy bool
	seen event
	// pops is SchedulerPopFromBackoffQ: where nobody else may be, a pod is looked at before its time.
	pops bool
	// cycle is how long a pod takes.
	cycle time.Duration
}

// event is something after which pods are looked at again.
type event int

const (
	nothing event = iota
	news
	moreRoom // a pod has gone, or a node has more devices
)

// enqueue has a pod looked at when its back-off is over, and that is looked at once a second.
func (w *world) enqueue(p *crowdPod) {
	now := time.Now()
	if p.due = now; p.attempts > 0 {
		if over := p.failed.Add(min(10*time.Second, time.Second<<min(p.attempts-1, 4))); over.After(now) {
			p.due = w.begun.Add(over.Sub(w.begun).Truncate(time.Second) + time.Second)
		}
	}
	i := len(w.queued)
	for i > 0 && w.queued[i-1].due.After(p.due) {
		i--
	}
	w.queued = slices.Insert(w.queued, i, p)
	w.after(p.due.Sub(now), w.next)
}

// next looks for a place for the next pod.
func (w *world) next() {
	if w.busy || len(w.queued) == 0 || w.queued[0].due.After(time.Now()) && !w.pops {
		return
	}
	p := w.queued[0]
	w.queued = w.queued[1:]
	w.busy, w.seen = true, nothing
	var among []string
	for _, name := range w.names {
		if h := w.hosts[name]; h.alloc[p.of]-h.requested[p.of] >= p.n {
			among = append(among, name)
		}
	}
	at := ""
	p.attempts++
	if p.asked = len(among) > 0; p.asked {
		var err error
		if at, _, err = w.f.Place(w.t.Context(), p.Name, among); err != nil {
			w.t.Error(err)
		}
		if w.n[asked]++; at == "" {
			w.n[refused]++
		} else {
			w.hosts[at].starting++
			p.seat = at
		}
	}
	w.after(w.cycle, func() { w.decided(p, at) })
}

// decided binds a pod, or puts it among those that wait.
func (w *world) decided(p *crowdPod, at string) {
	w.busy = false
	defer w.next()
	switch p.failed = time.Now(); {
	case at != "":
		h := w.hosts[at]
		h.requested[p.of] += p.n
		w.after(10*time.Millisecond, func() { w.bind(p, h) })
	case w.seen.helps(p):
		w.enqueue(p)
	default:
		w.waits = append(w.waits, p)
	}
}

func (e event) helps(p *crowdPod) bool { return e == moreRoom || e == news && p.asked }

// happens has the scheduler look again at pods that an event may help.
func (w *world) happens(e event) {
	w.seen = max(w.seen, e)
	for _, p := range w.waits {
		if e.helps(p) {
			w.enqueue(p)
		}
	}
	w.waits = slices.DeleteFunc(w.waits, e.helps)
	w.next()
}
