// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"fmt"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"example.com/gpu-agent/internal/placer"
)

// Nothing is answered until what was held is known; then it is for its own pods alone, until it is
// given up.
func TestHolder(t *testing.T) {
	f := New("example.com", func() time.Time { return start })
	h := HoldFor(f, func(p *corev1.Pod) string { return p.Labels["of"] })
	for i, name := range []string{"a", "b"} {
		n := node(name, corev1.ConditionTrue)
		n.Spec.Unschedulable = name == "b"
		f.SetNode(n)
		s := says([]string{first, second}[i])
		s.Sum()
		f.SetGPUNode(name, s)
	}
	for _, k := range []Kind{Nodes, Pods, GPUNodes} {
		f.Listed(k)
	}
	if _, _, err := place(t.Context(), f, asks("p", "1"), []string{"a"}); err == nil {
		t.Error("a pod was placed before it was known what is held")
	}
	if n := h.Nodes(); len(n) != 2 || n[0].Name != "a" || n[0].Spec.Taints != nil || n[1].Name != "b" ||
		len(n[1].Spec.Taints) != 1 || n[1].Spec.Taints[0].Key != corev1.TaintNodeUnschedulable {
		t.Errorf("nodes are %v, and b is cordoned", n)
	}
	// A template may name limits alone.
	limits := corev1.ResourceList{memory: resource.MustParse("50"), "cpu": resource.MustParse("1500m")}
	template := corev1.PodSpec{Containers: []corev1.Container{{Resources: corev1.ResourceRequirements{Limits: limits}}}}
	containers, plain := h.Asks(&template)
	group := placer.Group{Containers: containers, N: 1, Among: []string{"a"}}
	if len(containers) != 1 || containers[0].Requests[memory] != 50 || fmt.Sprint(plain) != "[{cpu 1500} {pods 1}]" {
		t.Fatalf("it asks for %v and %v", containers, plain)
	}
	h.SetHold("x/1", "a job", []placer.Group{group}, [][]string{{"a"}})
	h.Listed()
	_, no := h.Hold("x/2", "another job", []placer.Group{group})
	if no == nil || !slices.Equal(f.books.Holds(), []string{"x/1"}) || h.Lost("x/1") != nil {
		t.Errorf("held are %v, lost %v", f.books.Holds(), h.Lost("x/1"))
	}
	if at, _, _ := place(t.Context(), f, asks("p", "50"), []string{"a"}); at != "" {
		t.Errorf("another pod was placed on %s", at)
	}
	own := asks("own", "50")
	own.Labels = map[string]string{"of": "x/1"}
	if at, refused, err := place(t.Context(), f, own, []string{"a"}); at != "a" {
		t.Errorf("its own pod was not placed: %v, %v", refused, err)
	}
	f.DeletePod("own")
	h.Drop("x/1")
	if at, no := h.Hold("x/2", "another job", []placer.Group{group}); no != nil || len(at) != 1 ||
		!slices.Equal(at[0], []string{"a"}) {
		t.Errorf("the room is not free: %v, %v", at, no)
	}
}

// TestStuck has pods of which some may go to one host alone, and have no place there.
func TestStuck(t *testing.T) {
	f := known("a")
	h := HoldFor(f, func(p *corev1.Pod) string { return p.Labels["of"] })
	pod := func(name, of, host string) *corev1.Pod {
		p := asks(name, "10")
		p.Labels = map[string]string{"of": of}
		if host != "" {
			p.Spec.NodeSelector = map[string]string{corev1.LabelHostname: host}
		}
		p.Status.Conditions = []corev1.PodCondition{
			{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: corev1.PodReasonUnschedulable}}
		return p
	}
	ending, fresh := pod("ending", "x/1", "e"), pod("fresh", "x/1", "f")
	ending.DeletionTimestamp, fresh.Status.Conditions = &metav1.Time{Time: start}, nil
	all := []*corev1.Pod{
		pod("p-1", "x/1", "b"), pod("p-2", "x/1", "a"), pod("free", "x/1", ""), pod("another", "x/2", "c"),
		pod("nobody", "", "d"), ending, fresh, bound(pod("bound", "x/1", "g"), "g", first, 10),
	}
	for _, p := range all {
		f.SetPod(p)
	}
	if hosts := h.Stuck("x/1"); !slices.Equal(hosts, []string{"a", "b"}) {
		t.Errorf("its pods wait for %v", hosts)
	}
	f.SetPod(bound(all[0], "b", first, 10))
	f.DeletePod("p-2")
	if hosts := h.Stuck("x/1"); hosts != nil {
		t.Errorf("its pods wait for %v", hosts)
	}
}

// TestAPodWaitsForItsHold: Kueue 0.19 lets pods of an elastic job go before their check is Ready. The scheduler is woken
// for them once there is a seat.
func TestAPodWaitsForItsHold(t *testing.T) {
	w := &waker{Fleet: New("example.com", func() time.Time { return start }), clock: &clock{at: start}, t: t, woken: make(chan string, 100)}
	w.Fleet.now = w.clock.now
	h := HoldFor(w.Fleet, func(p *corev1.Pod) string { return p.Labels["of"] })
	if err := w.SetGPUNode("a", says(first)); err != nil {
		t.Fatal(err)
	}
	w.SetNode(node("a", corev1.ConditionTrue))
	for _, k := range []Kind{Nodes, Pods, GPUNodes, Held} {
		w.Listed(k)
	}
	w.run(func(node string) error { w.woken <- node; return nil })
	group := placer.Group{N: 1, Among: []string{"a"}, Containers: []placer.Container{{Requests: map[string]int{memory: 50}}}}
	if _, no := h.Hold("other", "another job", []placer.Group{group}); no != nil {
		t.Fatal(no)
	}
	p := asks("p", "50")
	p.Labels = map[string]string{"of": "mine"}
	if at, _, err := place(t.Context(), w.Fleet, p, []string{"a"}); at != "" || err != nil {
		t.Fatalf("placed on %q: %v", at, err)
	}
	h.Drop("other")
	if _, no := h.Hold("mine", "its job", []placer.Group{group}); no != nil {
		t.Fatal(no)
	}
	w.wants("a")
	if at, refused, err := place(t.Context(), w.Fleet, p, []string{"a"}); at != "a" {
		t.Errorf("not placed: %v, %v", refused, err)
	}
}

// TestMembers counts the pods of a hold, whatever they ask for, as they come, get nodes, and go.
func TestMembers(t *testing.T) {
	f := New("example.com", func() time.Time { return start })
	h := HoldFor(f, func(p *corev1.Pod) string { return p.Labels["of"] })
	if err := f.SetGPUNode("a", says(first)); err != nil {
		t.Fatal(err)
	}
	f.SetNode(node("a", corev1.ConditionTrue))
	for _, k := range []Kind{Nodes, Pods, GPUNodes, Held} {
		f.Listed(k)
	}
	yes := true
	pod := func(name, units string) *corev1.Pod {
		p := asks(name, units)
		p.Labels, p.OwnerReferences = map[string]string{"of": "x/1"}, []metav1.OwnerReference{{Kind: "Job", Controller: &yes}}
		return p
	}
	plain, orphan, other := pod("plain", "0"), pod("orphan", "10"), pod("other", "10")
	orphan.OwnerReferences, other.Labels = nil, map[string]string{"of": "x/2"}
	want := func(pods, placed, owned int) {
		t.Helper()
		if a, b, c := h.Members("x/1"); a != pods || b != placed || c != owned {
			t.Errorf("it has %d pods, %d with a node and %d with a controller; want %d, %d and %d", a, b, c, pods, placed, owned)
		}
	}
	want(0, 0, 0)
	for _, p := range []*corev1.Pod{plain, orphan, other, pod("p", "10")} {
		f.SetPod(p)
	}
	want(3, 0, 2)
	if at, _, err := f.Place(t.Context(), "p", []string{"a"}); at != "a" { // it is reserved there
		t.Fatalf("placed on %q: %v", at, err)
	}
	want(3, 1, 2)
	onCPU := plain.DeepCopy()
	onCPU.Spec.NodeName = "without GPUs"
	f.SetPod(onCPU)
	want(3, 2, 2)
	over, ending := onCPU.DeepCopy(), bound(pod("p", "10"), "a", first, 10)
	over.Status.Phase, ending.DeletionTimestamp = corev1.PodFailed, &metav1.Time{Time: start}
	f.SetPod(over)
	f.SetPod(ending)
	want(1, 0, 0)
	moved := orphan.DeepCopy()
	moved.Labels = other.Labels
	f.SetPod(moved)
	want(0, 0, 0)
	for _, p := range []string{"plain", "orphan", "other", "p"} {
		f.DeletePod(p)
	}
	if len(f.members.of) > 0 || len(f.members.hold) > 0 {
		t.Errorf("it remembers %v", f.members)
	}
}
