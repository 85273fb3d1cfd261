// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"fmt"
	"hash/maphash"
	"maps"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"

	"example.com/gpu-agent/internal/placer"
)

// leading is what follows from being the one process that answers: pods that get to a node
// without its word are told of. A Fleet's lock guards it.
type leading struct {
	// leads is an error while another process answers; nil where there is none.
	leads func() error
	// led says that this process has led, and before is the last word of who led before
	// it, zero where nobody knows.
	led    bool
	before time.Time
	// answers are pods that were placed and are not bound yet, and bound those that are.
	answers map[string]answer
	bound   map[string]*boundPod
	// doubtful are pods without a node that whoever led before may have placed, until a time.
	doubtful map[string]time.Time
	// unguarded, if set, is told of each pod that got to a node without an answer.
	unguarded func(Unguarded)
}

// Unguarded is a pod that is bound to a node without the placer's word.
type Unguarded struct {
	Namespace, Name, Node string
}

// asking is a pod that has no node. What it asks for is all that it does: the books have of one that was
// placed only what goes through the device plugin.
type asking struct {
	placer.Pod
	// group are the pods that are bound together with it or not at all; empty for none.
	group string
	// host is the one that its node selector names, empty for none.
	host string
	// gated says that no scheduler looks at it yet, and stuck that one has found no node for it. Said is
	// a digest of what the scheduler said last of why it is not bound; 0 where it has said nothing.
	gated, stuck bool
	said         uint64
}

// answer is where a pod was placed, when, and how many refusals there had been.
type answer struct {
	node     string
	at       time.Time
	refusals int
}

// boundPod is a pod on a node.
type boundPod struct {
	Unguarded
	// scheduled is when, by the API server's clock in seconds; zero where nobody says.
	scheduled time.Time
	// judged says that it is guarded, or was told of, or is none of this process's.
	judged bool
}

func newLeading() leading {
	return leading{answers: map[string]answer{}, bound: map[string]*boundPod{}}
}

// LeadBy has questions answered only while leads returns nil. It is called under a lock and
// must return at once. Without it, this process leads as soon as all is listed.
func (f *Fleet) LeadBy(leads func() error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.leads = leads
}

// TellUnguarded has each pod told of, once, that is bound to a node with devices of an
// agent's without an answer of this process. It is called under a lock and must return at
// once.
func (f *Fleet) TellUnguarded(tell func(Unguarded)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.unguarded = tell
}

// Lead notes that this process leads from now on, and when who led before it was last heard
// of. All must have been listed. Pods that were bound later than that are unguarded. The two
// times are of different clocks, and the pods' is in seconds, so that this is an estimate:
// what was answered in the last moments before may be told of, too. Own says that it was this
// process, which has hung, say, and nobody else since: then nobody has answered meanwhile.
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
	// Those who wait were refused by somebody else, who has forgotten it by now.
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

// doubt notes that the scheduler may have given up a pod where it was placed.
func (f *Fleet) doubt(uid string) {
	f.books.Doubt(uid, f.now())
	if soon := f.now().Add(placer.DoubtedFor); soon.Before(f.doubtful[uid]) {
		f.doubtful[uid] = soon
	}
}

// settled is nil while questions are answered and no pod may be bound of which nobody knows where.
// Whoever led before may have placed a pod in its last moments, and its reservations are gone. Such
// a pod is waited for until it is bound, gone or asked for again, and as long as a reservation
// lasts; where the scheduler has said why it is not bound, as long as one that is doubted: nearly all
// of these are not being bound, and some wait for days. A scheduler places its pods one after the other, and knows itself what it has placed; it
// need not wait. Whoever else gives room away must.
func settled(f *Fleet) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.listed(context.Background()); err != nil {
		return err
	}
	maps.DeleteFunc(f.doubtful, func(_ string, until time.Time) bool { return !f.now().Before(until) })
	if n := len(f.doubtful); n > 0 {
		return fmt.Errorf("%d pods may still be bound where they were placed before this process began to answer", n)
	}
	return nil
}

// tell tells of an unguarded pod.
func (f *Fleet) tell(b *boundPod) {
	if b.judged = true; f.unguarded != nil {
		f.unguarded(b.Unguarded)
	}
}

// bind notes where a pod is, or that it is nowhere.
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
	delete(f.gangs, is.group) // it is being bound
	b := &boundPod{Unguarded: Unguarded{p.Namespace, p.Name, p.Node}, scheduled: scheduledAt(from)}
	f.bound[p.UID] = b
	rest, _ := f.withoutDRA(*p, p.Node)
	b.judged = f.answers[p.UID].node == p.Node || len(rest.Containers) == 0
	delete(f.answers, p.UID)
	if !f.led || f.leads != nil && f.leads() != nil || b.judged {
		return // whoever leads next looks at it
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

// askingOf is a pod as one that has no node.
func askingOf(p *placer.Pod, from *corev1.Pod) *asking {
	a := &asking{Pod: *p, host: from.Spec.NodeSelector[corev1.LabelHostname], gated: len(from.Spec.SchedulingGates) > 0}
	if g := from.Spec.SchedulingGroup; g != nil && g.PodGroupName != nil {
		a.group = p.Namespace + "/" + *g.PodGroupName
	}
	if c := scheduledOf(from); c != nil && c.Status == corev1.ConditionFalse && c.Reason != corev1.PodReasonSchedulingGated {
		a.stuck = c.Reason == corev1.PodReasonUnschedulable
		a.said = maphash.Comparable(seed, [2]string{c.Reason, c.Message})
	}
	return a
}

// seed is of digests of what schedulers say.
var seed = maphash.MakeSeed()

// scheduledAt is when a pod was bound, zero where nobody says.
func scheduledAt(p *corev1.Pod) time.Time {
	if c := scheduledOf(p); c != nil && c.Status == corev1.ConditionTrue {
		return c.LastTransitionTime.Time
	}
	return time.Time{}
}

// scheduledOf is what the scheduler says of a pod; nil where it says nothing.
func scheduledOf(p *corev1.Pod) *corev1.PodCondition {
	i := slices.IndexFunc(p.Status.Conditions, func(c corev1.PodCondition) bool { return c.Type == corev1.PodScheduled })
	if i < 0 {
		return nil
	}
	return &p.Status.Conditions[i]
}
