// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"fmt"
	"maps"
	"time"

	corev1 "k8s.io/api/core/v1"

	"example.com/gpu-agent/internal/placer"
)

// leading is what a process knows that places pods, or takes over from one that did. A Fleet's lock guards it.
type leading struct {
	// led is true once this process has led.
	led bool
	// before is when the former leader was last heard of, zero if there was none.
	before time.Time
	// answers are the pods that this process has placed and that are not bound yet, by UID.
	answers map[string]answer
	// bound are the pods that have a node, by UID.
	bound map[string]*boundPod
	// doubtful are the pods without a node that the former leader may have placed, by UID. The time is when they
	// no longer count as placed.
	doubtful map[string]time.Time
	// unguarded is called with each unguarded pod. It may be nil.
	unguarded func(Unguarded)
}

// Unguarded is a pod that is bound to a node where the placer has not placed it.
type Unguarded struct {
	Namespace, Name, Node string
}

// answer is where and when a pod was placed.
type answer struct {
	node string
	at   time.Time
	// refusals is what waiting.refusals was at that time.
	refusals int
}

// boundPod is a pod that has a node.
type boundPod struct {
	Unguarded
	// scheduled is when the pod was bound, by the API server's clock in seconds; zero if its status has no time.
	scheduled time.Time
	// judged is true if nothing is left to report: the pod is guarded, or it has been reported, or it was bound
	// under a former leader.
	judged bool
}

func newLeading() leading {
	return leading{answers: map[string]answer{}, bound: map[string]*boundPod{}}
}

// LeadBy has questions answered only while leads returns nil. The Fleet calls leads under its lock, so leads
// must return at once. Without LeadBy, this process leads as soon as all is listed.
func (f *Fleet) LeadBy(leads func() error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.leads = leads
}

// TellUnguarded has tell called once for each unguarded pod. The Fleet calls tell under its lock, so tell must
// return at once.
func (f *Fleet) TellUnguarded(tell func(Unguarded)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.unguarded = tell
}

// Lead notes that this process leads from now on. All kinds must have been listed. before is when the former leader
// was last heard of. Lead reports the pods that were bound after that as unguarded.
//
// The report is an estimate: before is of another clock than the time when a pod was bound, which is in whole
// seconds. So Lead may also report a pod that the former leader placed in its last moments.
//
// own is true if the former leader was this process itself, for example before it hung. Then no other process has
// placed pods meanwhile.
func (f *Fleet) Lead(before time.Time, own bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.lead(before, own && f.led)
}

func (f *Fleet) lead(before time.Time, still bool) {
	if !still {
		f.led, f.before, f.doubtful = true, before, map[string]time.Time{}
		for uid, a := range f.asks {
			if !a.gated {
				f.doubtful[uid] = f.now().Add(placer.ReservedFor)
			}
			if a.said != 0 {
				f.doubt(uid)
			}
		}
	}
	for _, b := range f.bound {
		if !b.judged && (still || !before.IsZero() && b.scheduled.After(before)) {
			f.tell(b)
		}
		b.judged = true
	}
	// The former leader has refused the pods that wait, and only it knew by which nodes. So ask about all nodes.
	var all []string
	for name := range f.says {
		all = append(all, name)
	}
	for uid, a := range f.asks {
		if a.stuck && f.refusedPods[uid] == nil {
			f.refused(a.Pod, all, f.now())
		}
	}
	for _, name := range all {
		f.touch(name)
	}
	f.books.Refresh(len(all))
}

// doubt notes that the scheduler may have given a pod up: the pod keeps its reservation for 30 s more at most.
func (f *Fleet) doubt(uid string) {
	f.books.Doubt(uid, f.now())
	if soon := f.now().Add(placer.DoubtedFor); soon.Before(f.doubtful[uid]) {
		f.doubtful[uid] = soon
	}
}

// settled returns nil if questions are answered and no pod is doubtful. Otherwise it returns the reason.
//
// The former leader may have placed pods in its last moments, and this process does not know where. Such a pod is
// doubtful until it is bound, deleted or asked for again, or its reservation would have ended. That is ten minutes,
// or 30 s if the scheduler has written why the pod is not bound: most of these are not being bound, and
// some wait for days.
//
// Schedulers need not wait for that. A scheduler places its pods one after the other, and knows itself where it has
// placed them. Lender and Holder give room to others, so they wait.
func settled(f *Fleet) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.listed(context.Background()); err != nil {
		return err
	}
	maps.DeleteFunc(f.doubtful, func(_ string, until time.Time) bool { return !f.now().Before(until) })
	if n := len(f.doubtful); n > 0 {
		return fmt.Errorf("%d pods may still be bound to nodes that were chosen before this process began to answer", n)
	}
	return nil
}

// tell reports an unguarded pod.
func (l *leading) tell(b *boundPod) {
	if b.judged = true; l.unguarded != nil {
		l.unguarded(b.Unguarded)
	}
}

// bind notes whether and where a pod is bound, and reports the pod if it is unguarded.
func (f *Fleet) bind(p *placer.Pod, from *corev1.Pod) {
	was, is := f.asks[p.UID], askingOf(p, from)
	if p.Node == "" && !p.Done {
		if f.asks[p.UID] = is; was != nil && was.said != is.said && is.said != 0 {
			f.doubt(p.UID)
		}
		return
	}
	delete(f.asks, p.UID)
	delete(f.doubtful, p.UID)
	if p.Node == "" {
		return
	}
	f.satisfied(p.UID)
	if f.bound[p.UID] != nil {
		return
	}
	delete(f.gangs, is.group) // the scheduler is binding the group
	b := &boundPod{Unguarded: Unguarded{p.Namespace, p.Name, p.Node}, scheduled: scheduledAt(from)}
	f.bound[p.UID] = b
	rest, _ := f.withoutDRA(*p, p.Node)
	b.judged = f.answers[p.UID].node == p.Node || len(rest.Containers) == 0
	delete(f.answers, p.UID)
	if !f.led || f.leads != nil && f.leads() != nil || b.judged {
		return // if it is not judged, the next leader looks at it
	}
	if b.judged = true; f.before.IsZero() || b.scheduled.IsZero() || b.scheduled.After(f.before) {
		f.tell(b)
	}
}

// forget notes that a pod is gone.
func (f *Fleet) forget(uid string) {
	delete(f.answers, uid)
	delete(f.bound, uid)
	delete(f.asks, uid)
	delete(f.doubtful, uid)
	f.satisfied(uid)
}
