// SPDX-License-Identifier: Apache-2.0

package kueue

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"example.com/gpu-agent/internal/placer"
)

// far is a site with one node on-prem, which a job fills, and a job of n pods that was admitted to a cloud.
func far(t *testing.T, n int, nodes ...string) (s *site, fills, w *Workload) {
	t.Helper()
	s = newSite(t, append(nodes, "a")...)
	fills, w = s.job("fills", 1), s.job("far", n)
	w.Sets[0].Flavors, w.Checks[0].Name = []string{"there"}, "full"
	s.decide(0)
	s.want(fills, Ready, "a × 1")
	s.want(w, Ready, "on-prem, none of 1 nodes has room")
	w.Turned = s.now
	return s, fills, w
}

// pending makes a pod of a workload as its controller does, with what the check told it, and no node yet.
func (s *site) pending(w *Workload, change func(*corev1.Pod)) *corev1.Pod {
	s.t.Helper()
	s.seq++
	yes := true
	p := &corev1.Pod{Spec: *w.Sets[0].Pod.DeepCopy()}
	p.Name, p.Namespace = fmt.Sprint(w.Name, "-", s.seq), w.Namespace
	p.UID, p.OwnerReferences = types.UID(p.Name), []metav1.OwnerReference{{Kind: "Job", Name: w.Name, Controller: &yes}}
	p.Annotations = map[string]string{}
	for _, u := range w.Checks[0].PodSetUpdates {
		for key, value := range u.Annotations {
			p.Annotations[key] = value
		}
	}
	if change != nil {
		change(p)
	}
	s.fleet.SetPod(p)
	return p
}

// bind binds a pod to a node without a question.
func (s *site) bind(p *corev1.Pod, node string) {
	p = p.DeepCopy()
	p.Spec.NodeName = node
	s.fleet.SetPod(p)
}

// TestNothingToLoseInACloud: a workload that was admitted to a cloud, and none of whose pods has a node there, comes
// back when there is room on-prem. Otherwise it would wait for the cloud for as long as that takes.
func TestNothingToLoseInACloud(t *testing.T) {
	const hold = "example.com/gpu.hold"
	for name, is := range map[string]struct {
		pods  func(*site, *Workload)
		comes bool
	}{
		"its pods have no node": {func(s *site, w *Workload) { s.pending(w, nil); s.pending(w, nil) }, true},
		"one has a node": {func(s *site, w *Workload) {
			s.pending(w, nil)
			s.bind(s.pending(w, nil), "cloud-9")
		}, false},
		"one is to have a node": {func(s *site, w *Workload) {
			s.pending(w, func(p *corev1.Pod) { p.Status.NominatedNodeName = "cloud-9" })
		}, false},
		"a pod of it that asks for no GPU has a node": {func(s *site, w *Workload) {
			s.pending(w, nil)
			plain := func(p *corev1.Pod) { p.Spec.Containers[0].Resources = corev1.ResourceRequirements{} }
			s.bind(s.pending(w, plain), "cpu-1")
		}, false},
		"one that had a node is ending": {func(s *site, w *Workload) {
			s.bind(s.pending(w, func(p *corev1.Pod) { p.DeletionTimestamp = &metav1.Time{Time: start} }), "cloud-9")
			s.pending(w, nil)
		}, true},
		"one that had a node has succeeded": {func(s *site, w *Workload) {
			s.bind(s.pending(w, func(p *corev1.Pod) { p.Status.Phase = corev1.PodSucceeded }), "cloud-9")
			s.pending(w, nil)
		}, true},
		"it has no pods that are known": {func(*site, *Workload) {}, false},
		"its pods say nothing of it": {func(s *site, w *Workload) {
			s.pending(w, func(p *corev1.Pod) { p.Annotations = nil })
		}, false},
		// Whoever lies about pods of a namespace has the namespace pay for it, and no other one.
		"a pod with a node says that it is one of its pods": {func(s *site, w *Workload) {
			s.pending(w, nil)
			s.bind(s.pending(w, func(p *corev1.Pod) { p.OwnerReferences = nil }), "cloud-9")
		}, false},
		"a pod of another namespace says so": {func(s *site, w *Workload) {
			s.pending(w, nil)
			s.bind(s.pending(w, func(p *corev1.Pod) { p.Namespace = "web" }), "cloud-9")
		}, true},
		"a pod has a key without end": {func(s *site, w *Workload) {
			s.pending(w, func(p *corev1.Pod) { p.Annotations[hold] = strings.Repeat("x", 1000) })
		}, false},
		"Kueue deletes its pods, which their controller makes again": {func(s *site, w *Workload) {
			w.OfPods = true
			s.pending(w, nil)
		}, true},
		"Kueue deletes its pods for good": {func(s *site, w *Workload) {
			w.OfPods = true
			s.pending(w, nil)
			s.pending(w, func(p *corev1.Pod) { p.OwnerReferences = nil })
		}, false},
		"it has no job that Kueue could end": {func(s *site, w *Workload) {
			w.Bare = true
			s.pending(w, nil)
		}, false},
		"another check keeps it back": {func(_ *site, w *Workload) { w.Admitted = false }, true},
		"another check keeps an elastic job from growing": {func(s *site, w *Workload) {
			s.bind(s.pending(w, nil), "cloud-9")
			w.Admitted = false
		}, false},
	} {
		t.Run(name, func(t *testing.T) {
			s, fills, w := far(t, 1)
			is.pods(s, w)
			if told := s.decide(time.Hour); told != nil {
				t.Fatalf("on-prem is full, and told: %q", told)
			}
			fills.Over = true
			told := s.decide(time.Second)
			if is.comes != slices.Equal(told, []string{"far Retry"}) || !is.comes && told != nil {
				t.Fatalf("there is room, and told: %q", told)
			}
			if is.comes {
				s.want(w, Retry, "there is room on-prem, and none of its pods has a node in the cloud: it comes back")
			}
		})
	}
}

// TestItsNodeHasJustCome: a workload is left in a cloud for the moment in which its pods get their nodes.
func TestItsNodeHasJustCome(t *testing.T) {
	s, fills, w := far(t, 1)
	p := s.pending(w, nil)
	fills.Over = true
	if told := s.decide(stay - time.Second); told != nil {
		t.Fatalf("it has just been admitted, and told: %q", told)
	}
	cloud := s.nodes["a"].DeepCopy()
	cloud.Name, cloud.Labels = "cloud-1", map[string]string{"site": "cloud", corev1.LabelHostname: "cloud-1"}
	s.rise("cloud-1", cloud)
	if told := s.decide(time.Second); told != nil {
		t.Fatalf("its node is there, and told: %q", told)
	}
	// Its room on-prem is not kept meanwhile.
	other := s.job("other", 1)
	s.decide(time.Second)
	s.want(other, Ready, "a × 1")
	other.Over = true
	if told := s.decide(time.Second); told != nil {
		t.Fatalf("its node is there, and told: %q", told)
	}
	at, _, err := s.fleet.Place(t.Context(), string(p.UID), []string{"cloud-1"})
	if at != "cloud-1" || err != nil {
		t.Fatalf("its pod is placed on %q: %v", at, err)
	}
	if told := s.decide(time.Hour); told != nil {
		t.Fatalf("its pod has room on a node, and told: %q", told)
	}

	// If something keeps its pods from that node, it is not left there for ever.
	s.fleet.DeletePod(string(p.UID))
	s.pending(w, nil)
	for _, step := range []struct {
		after time.Duration
		want  []string
	}{{time.Second, nil}, {arrive - time.Second, nil}, {time.Second, []string{"far Retry"}}} {
		if told := s.decide(step.after); !slices.Equal(told, step.want) {
			t.Fatalf("its node takes no pod, and told: %q, want %q", told, step.want)
		}
	}
}

// TestSetsOnBothSites: Kueue gives a workload quota on-prem for one set of pods, and in a cloud for another. Each check
// judges its own: the cloud has no node yet, and the room on-prem is never given up.
func TestSetsOnBothSites(t *testing.T) {
	c := newCluster(t, map[string][]int{"a": {79, 79}})
	c.view.Flavors["there"].Cloud = true
	books := &dropping{cluster: c}
	c.Checks = NewChecks("example.com", books)
	w := c.job("both", "here", "room", [2]int{1, 50}, [2]int{1, 50})
	w.Sets[1].Flavors = []string{"there"}
	w.Checks = append(w.Checks, CheckState{Name: "full", State: Pending, LastTransitionTime: metav1.NewTime(start)})
	for range 2 {
		c.decide(time.Second)
		c.want(w, Ready, "there is room: a × 1")
		const says = "on-prem has no quota for all of its pods"
		if s := w.Checks[2]; s.State != Ready || !strings.HasPrefix(s.Message, says) {
			t.Fatalf("the cloud's check is %+v", s)
		}
	}
	// Its pods get the same word twice, but for where those on-prem go.
	here, there := w.Checks[0].PodSetUpdates, w.Checks[2].PodSetUpdates
	const key = "example.com/gpu.hold"
	if len(here) != 1 || here[0].Name != "set-0" || len(there) != 2 ||
		here[0].Annotations[key] != there[0].Annotations[key] {
		t.Errorf("pods are told %+v and %+v", here, there)
	}
	w.Admitted = true
	if told := c.decide(time.Hour); told != nil || books.n > 0 {
		t.Errorf("told: %q, and its room was given up %d times", told, books.n)
	}
}

// TestSetsComeTogether: a workload on both sites that checkpoints begins again on-prem once all of it has room there.
// That room is its own until it does. If it was quota that was missing, it is tried once in ten minutes.
func TestSetsComeTogether(t *testing.T) {
	for name, is := range map[string]struct {
		refused string
		stays   time.Duration
		runs    bool // its pod on-prem
	}{
		"there was no quota":       {"", quotaAgain, true},
		"there was no room":        {"another", stay, true},
		"its pod is still to come": {"another", stay, false},
	} {
		t.Run(name, func(t *testing.T) {
			c := newCluster(t, map[string][]int{"a": {79, 79}})
			c.view.Flavors["there"].Cloud = true
			other := c.job("other", "here", "room", [2]int{1, 50})
			w := c.job("both", "here", "room", [2]int{1, 50}, [2]int{1, 50})
			w.Sets[1].Flavors, w.Turned = []string{"there"}, start
			w.Annotations = map[string]string{"example.com/gpu.refused-flavors": is.refused}
			for i := range w.Sets {
				w.Sets[i].Labels = map[string]string{"example.com/gpu.checkpoints": "true"}
			}
			w.Checks = append(w.Checks, CheckState{Name: "full", State: Pending, LastTransitionTime: metav1.NewTime(start)})
			c.decide(0)
			if is.runs {
				c.pod(w, "a", 0, 50)
			}
			w.Admitted, other.Admitted = true, true
			stays := func(at time.Duration) {
				t.Helper()
				if told := c.decide(at); told != nil {
					t.Fatalf("told: %q", told)
				}
			}
			stays(2 * quotaAgain) // there is no room
			other.Over, other.Reserved = true, false
			stays(is.stays - time.Second)
			if told := c.decide(is.stays); !slices.Equal(told, []string{"both Retry"}) || w.Checks[2].State != Retry {
				t.Fatalf("told: %q", told)
			}
			stays(is.stays + time.Second) // Kueue has not acted on it yet
			if at, err := c.place("stranger", metav1.ObjectMeta{}, 50); err == nil {
				t.Fatalf("a stranger has its room, on %s", at)
			}
			c.DeletePod("stranger")
			c.quota(w, "", "")
			c.decide(is.stays + 2*time.Second)
			c.quota(w, "here", "room")
			c.decide(is.stays + 3*time.Second)
			c.want(w, Ready, "there is room: a × 2")
		})
	}
}

// TestWhoRunsNowhereGoesByAge: room on-prem is for the oldest workload that does not run, whether it waits without
// quota or in a cloud that has no node for it.
func TestWhoRunsNowhereGoesByAge(t *testing.T) {
	for name, older := range map[string]string{"in the cloud": "far", "without quota": "waits"} {
		t.Run(name, func(t *testing.T) {
			s, fills, w := far(t, 1)
			s.pending(w, nil)
			waits := s.job("waits", 1)
			waits.Reserved, waits.Checks = false, nil
			waits.Annotations = map[string]string{"example.com/gpu.refused-flavors": "here,there"}
			if older == "waits" {
				waits.Created = w.Created.Add(-time.Second)
			}
			fills.Over = true
			s.now = s.now.Add(time.Hour)
			told := s.Decide(&s.view, s.now)
			if len(told) != 1 || told[0].Workload.Name != older {
				t.Errorf("told: %+v", told)
			}
		})
	}
}

// TestRoomWithoutQuota: a workload goes to a cloud since it has no quota for the room that there is on-prem. It is not
// ended again and again for that room, whether the placer goes on or another process does, and however long Kueue
// takes.
func TestRoomWithoutQuota(t *testing.T) {
	for name, is := range map[string]struct {
		restarts, checkpoints bool
		// takes is how many seconds Kueue takes to give a workload quota again.
		takes int
	}{
		"it checkpoints":                {checkpoints: true, takes: 1},
		"it has no node":                {takes: 1},
		"it checkpoints, Kueue is slow": {checkpoints: true, takes: 40},
		"it has no node, Kueue is slow": {takes: 40},
		"other processes":               {checkpoints: true, restarts: true, takes: 1},
	} {
		t.Run(name, func(t *testing.T) {
			c := newCluster(t, map[string][]int{"a": {79}, "cloud-1": {79}})
			w := c.job("poor", "there", "full", [2]int{1, 50})
			if is.checkpoints {
				w.Sets[0].Labels = map[string]string{"example.com/gpu.checkpoints": "true"}
			}
			const last = 3600
			ended, ran, again := 0, 0, 0
			for second := range last {
				if is.restarts && second%60 == 0 {
					c.restart()
				}
				told := c.decide(time.Duration(second) * time.Second)
				switch {
				case !w.Reserved && second == again:
					c.quota(w, "there", "full")
					w.Checks[0].LastTransitionTime = metav1.NewTime(start.Add(time.Duration(second) * time.Second))
				case !w.Reserved:
				case w.Checks[0].State == Retry && told != nil:
					if w.Admitted {
						ended++
					}
				case w.Checks[0].State == Retry: // Kueue has seen it a second later
					delete(c.pods, "pod")
					c.DeletePod("pod")
					c.quota(w, "", "")
					again = second + is.takes
				case w.Checks[0].State == Ready && !w.Admitted:
					w.Admitted = true
					p := placer.Pod{UID: "pod", Name: "pod", Namespace: w.Namespace, Hold: c.id(w),
						Containers: []placer.Container{{Requests: map[string]int{memory: 50}}}}
					if is.checkpoints {
						p.Node = "cloud-1"
					}
					c.pods["pod"] = p
					c.SetPod(p)
				case w.Admitted:
					ran++
				}
			}
			if most := int(time.Hour / quotaAgain); ended == 0 || ended > most || ran < last*4/5 {
				const says = "in an hour it was ended %d times, %d are too many, and was in the cloud for %d s"
				t.Errorf(says, ended, most+1, ran)
			}
		})
	}
}
