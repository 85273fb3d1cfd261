// SPDX-License-Identifier: Apache-2.0

package kueue

import (
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"example.com/gpu-agent/internal/placer"
)

// asked counts the questions that a cluster's books are asked.
type asked struct {
	*cluster
	holds int
	nodes []*corev1.Node
}

func (a *asked) Hold(id, name string, groups []placer.Group) ([][]string, *placer.Refusal) {
	a.holds++
	return a.cluster.Hold(id, name, groups)
}

func (a *asked) Nodes() []*corev1.Node { return a.nodes }

// TestWaitingWorkloadsAskAtNews has 50 workloads of two shapes that wait for room: each shape is looked for
// once, and again only when there may be new room or other nodes.
func TestWaitingWorkloadsAskAtNews(t *testing.T) {
	a := &asked{cluster: newCluster(t, map[string][]int{"a": {79}})}
	a.nodes = a.cluster.Nodes()
	a.Checks = NewChecks("example.com", a)
	for i := range 50 {
		w := a.job(fmt.Sprint("w", i), "", "room", [2]int{1, 80 + i%2})
		w.Reserved, w.Annotations = false, map[string]string{"example.com/gpu.refused-flavors": "here"}
	}
	decide := func(want int, why string) {
		t.Helper()
		a.holds = 0
		told := a.Decide(&a.view, start)
		if a.holds != want || len(told) > 0 {
			t.Errorf("%s: %d searches, want %d; told %v", why, a.holds, want, told)
		}
	}
	decide(2, "at first")
	decide(0, "without news")
	a.SetPod(placer.Pod{UID: "p", Node: "a", Containers: []placer.Container{{Requests: map[string]int{memory: 1}}}})
	decide(2, "when a pod has come")
	a.nodes = append(a.nodes[:1:1], &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "b", Labels: map[string]string{"site": "on-prem"}}})
	a.Books.SetNode("b", a.cluster.nodes["a"], true)
	decide(2, "with another node")
}

// TestReach asks for the nodes of sets of pods again and again, while nodes and flavors change.
func TestReach(t *testing.T) {
	node := func(name, site string, taints ...corev1.Taint) *corev1.Node {
		return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"site": site}}, Spec: corev1.NodeSpec{Taints: taints}}
	}
	gpu := corev1.Taint{Key: "gpu", Effect: corev1.TaintEffectNoSchedule}
	free, pinned, tolerant := Set{Name: "free"}, Set{Name: "pinned"}, Set{Name: "tolerant"}
	pinned.Pod.NodeSelector = map[string]string{"site": "y"}
	tolerant.Pod.Tolerations = []corev1.Toleration{{Key: "gpu", Operator: corev1.TolerationOpExists}}
	all := []*corev1.Node{node("a", "x"), node("b", "y"), node("c", "y", gpu)}
	v := &View{Flavors: map[string]*Flavor{}}
	var r reaches
	want := func(s *Set, of where, open, closed string) {
		t.Helper()
		for range 2 {
			r.of(all, v.Flavors)
			if got := r.find(s, v, of); fmt.Sprint(got.open) != open || fmt.Sprint(got.closed) != closed {
				t.Errorf("pods of %s may be on %v, and %v take no new ones; want %s and %s", s.Name, got.open, got.closed, open, closed)
			}
		}
	}
	anywhere, inX := labelled(nil), labelled(map[string]string{"site": "x"})
	want(&free, anywhere, "[a b]", "[c]")
	want(&free, inX, "[a]", "[]")
	want(&pinned, anywhere, "[b]", "[c]")
	want(&tolerant, anywhere, "[a b c]", "[]")
	v.Flavors = map[string]*Flavor{"y": {Name: "y", Labels: map[string]string{"site": "y"}, Tolerations: tolerant.Pod.Tolerations}}
	want(&free, anywhere, "[a b c]", "[]")
	all = []*corev1.Node{all[0], node("b", "y", gpu), all[2], node("d", "x")}
	v.Flavors = nil
	want(&free, anywhere, "[a d]", "[b c]")
	for i := range maxReaches + 10 {
		r.find(&free, v, where{key: fmt.Sprint(i, time.Time{}), holds: inX.holds})
	}
	if len(r.known) > maxReaches {
		t.Errorf("%d are remembered", len(r.known))
	}
}
