// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"example.com/gpu-agent/internal/placer"
)

// TestSettled has a process begin where another one may have placed pods that are not bound yet. It
// gives room to nobody but pods that ask until it is known what has become of each.
func TestSettled(t *testing.T) {
	gated := asks("gated", "79")
	gated.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: "queue"}}
	waits := asks("p", "79")
	waits.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse,
		Reason: corev1.PodReasonUnschedulable}}
	succeeded := asks("p", "79")
	succeeded.Status.Phase = corev1.PodSucceeded
	for name, test := range map[string]struct {
		pod *corev1.Pod
		// then is what happens, and unsettled says that it is waited for before that.
		then      func(f *Fleet, now *time.Time)
		unsettled bool
	}{
		"nothing waits": {},
		"it is bound": {asks("p", "79"),
			func(f *Fleet, _ *time.Time) { f.SetPod(bound(asks("p", "79"), "a", first, 0)) }, true},
		"it has gone":  {asks("p", "79"), func(f *Fleet, _ *time.Time) { f.DeletePod("p") }, true},
		"it has ended": {asks("p", "79"), func(f *Fleet, _ *time.Time) { f.SetPod(succeeded) }, true},
		"it asks again": {asks("p", "79"),
			func(f *Fleet, _ *time.Time) { place(t.Context(), f, asks("p", "79"), []string{"a"}) }, true},
		"nothing comes": {asks("p", "79"),
			func(_ *Fleet, now *time.Time) { *now = now.Add(placer.ReservedFor) }, true},
		"it waits": {waits, func(_ *Fleet, now *time.Time) { *now = now.Add(placer.DoubtedFor) }, true},
		"it is given up": {asks("p", "79"),
			func(f *Fleet, now *time.Time) { f.SetPod(waits); *now = now.Add(placer.DoubtedFor) }, true},
		"it is gated":        {pod: gated},
		"it asks for no GPU": {pod: &corev1.Pod{}},
		"it was bound":       {pod: bound(asks("p", "79"), "a", first, 0)},
	} {
		now := start
		f := New("example.com", func() time.Time { return now })
		f.SetNode(node("a", corev1.ConditionTrue))
		f.SetGPUNode("a", says(first))
		if test.pod != nil {
			f.SetPod(test.pod)
		}
		if settled(f) == nil {
			t.Errorf("%s: it gives room before all is listed", name)
		}
		for _, k := range []Kind{Nodes, Pods, GPUNodes} {
			f.Listed(k)
		}
		if err := settled(f); (err != nil) != test.unsettled {
			t.Errorf("%s: at first it says %v", name, err)
		}
		if test.then != nil {
			test.then(f, &now)
		}
		if err := settled(f); err != nil {
			t.Errorf("%s: in the end it says %v", name, err)
		}
		// What comes later was placed by this process or not at all.
		f.SetPod(asks("later", "1"))
		if err := settled(f); err != nil {
			t.Errorf("%s: after another pod has come it says %v", name, err)
		}
	}
}

// TestSettledAgain has a process lose the lead and get it back.
func TestSettledAgain(t *testing.T) {
	f := known("a")
	f.SetPod(asks("p", "79"))
	if f.Lead(start, true); settled(f) != nil {
		t.Error("it waits though nobody else has led")
	}
	if f.Lead(start, false); settled(f) == nil {
		t.Error("it does not wait for what another one may have placed")
	}
}

// TestSlowBind: a pod that a scheduler binds slowly keeps its room for ten minutes, unless the scheduler says
// that it is not bound, and has not said so before.
func TestSlowBind(t *testing.T) {
	told := func(p *corev1.Pod, what string) *corev1.Pod {
		p = p.DeepCopy()
		p.Status.Conditions = []corev1.PodCondition{{
			Type: corev1.PodScheduled, Status: corev1.ConditionFalse,
			Reason: corev1.PodReasonSchedulerError, Message: what,
		}}
		return p
	}
	p := asks("p", "79")
	for name, c := range map[string]struct {
		before, after *corev1.Pod
		keeps         time.Duration
	}{
		"nothing is heard":                   {p, p, placer.ReservedFor},
		"it could not be bound":              {p, told(p, "a volume"), placer.DoubtedFor},
		"it was refused before":              {told(p, "no room"), told(p, "no room"), placer.ReservedFor},
		"it was refused, and is not bound":   {told(p, "no room"), told(p, "a volume"), placer.DoubtedFor},
		"what was said of it is taken back ": {told(p, "no room"), p, placer.ReservedFor},
	} {
		t.Run(name, func(t *testing.T) {
			f, now := known("a"), start
			f.now = func() time.Time { return now }
			f.SetGPUNode("a", says(first))
			wantPlaced(t, f, c.before, "a", "")
			f.SetPod(c.after)
			now = now.Add(c.keeps - 1)
			wantPlaced(t, f, asks("other", "79"), "", "not known yet")
			now = now.Add(1)
			wantPlaced(t, f, asks("other", "79"), "a", "")
		})
	}
}
