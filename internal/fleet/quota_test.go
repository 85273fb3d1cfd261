// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

// lendingFleet is a fleet with two nodes with a GPU each, of which all is listed but what is lent.
func lendingFleet(t *testing.T) (*Fleet, *Lender) {
	t.Helper()
	f := New("example.com", func() time.Time { return start })
	l := Lend(f, func(p *corev1.Pod) string { return p.Labels["of"] })
	for i, name := range []string{"a", "b"} {
		n := node(name, corev1.ConditionTrue)
		n.Labels = map[string]string{"model": "A100", "rack": name}
		n.Status.Allocatable = corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("16"),
			"example.com/other": resource.MustParse("1")}
		f.SetNode(n)
		s := says([]string{first, second}[i])
		s.Sum()
		f.SetGPUNode(name, s)
	}
	for _, k := range []Kind{Nodes, Pods, GPUNodes} {
		f.Listed(k)
	}
	return f, l
}

func (l *Lender) wants(t *testing.T, id, want string) {
	t.Helper()
	parts, short, nodes := l.Kept(id)
	got := fmt.Sprint(short, nodes)
	for _, p := range parts {
		got += fmt.Sprintf(" %s:%d", p.Node, p.N)
	}
	if got != want {
		t.Fatalf("of %s is kept %q, want %q", id, got, want)
	}
}

func TestNothingIsAnsweredUntilWhatIsLentIsKnown(t *testing.T) {
	f, l := lendingFleet(t)
	if _, _, err := place(t.Context(), f, asks("p", "1"), []string{"a"}); err == nil {
		t.Error("a pod was placed")
	}
	l.Keep("q", map[string]int{memory: 79})
	l.Listed()
	if at, _, err := place(t.Context(), f, asks("p", "1"), []string{"a", "b"}); err != nil || at != "b" {
		t.Errorf("a pod was placed on %q: %v", at, err)
	}
}

func TestAMemberIsKnownByItsLabels(t *testing.T) {
	f, l := lendingFleet(t)
	l.Keep("q", map[string]int{memory: 158})
	l.Listed()
	if at, _, err := place(t.Context(), f, asks("p", "1"), []string{"a", "b"}); err != nil || at != "" {
		t.Fatalf("another pod was placed on %q: %v", at, err)
	}
	m := asks("m", "20")
	m.Labels = map[string]string{"of": "q"}
	at, _, err := place(t.Context(), f, m, []string{"b"})
	if err != nil || at != "b" {
		t.Fatalf("a member was placed on %q: %v", at, err)
	}
	l.wants(t, "q", "map[] [a b] a:79 b:59")
	f.SetPod(bound(m, "b", second, 20))
	l.wants(t, "q", "map[] [a b] a:79 b:59")
	// Who waits hears of what is given back.
	f.mu.Lock()
	clear(f.changed)
	f.mu.Unlock()
	l.Keep("q", map[string]int{memory: 99})
	l.wants(t, "q", "map[] [a b] a:79")
	if !f.changed["b"] {
		t.Error("nobody looks at b again")
	}
	l.Drop("q")
	l.wants(t, "q", "map[] []")
	if !f.changed["a"] {
		t.Error("nobody looks at a again")
	}
}

// TestNothingIsLentWhereNoPodMayGo cordons a node, as for a drain, and takes it back.
func TestNothingIsLentWhereNoPodMayGo(t *testing.T) {
	f, l := lendingFleet(t)
	l.Keep("q", map[string]int{memory: 100})
	l.wants(t, "q", "map[] [a b] a:79 b:21")
	n := node("a", corev1.ConditionTrue)
	n.Spec.Unschedulable = true
	f.SetNode(n)
	l.wants(t, "q", "map[example.com/gpu-mem:21] [b] b:79")
	if devices, _ := l.Lendable(); devices[memory] != 158 {
		t.Errorf("a cordoned node's devices are taken for gone: %v", devices)
	}
	n = n.DeepCopy()
	n.Spec.Unschedulable = false
	f.SetNode(n)
	l.wants(t, "q", "map[] [a b] a:21 b:79")
	f.DeleteNode("b")
	f.SetGPUNode("b", nil)
	l.wants(t, "q", "map[example.com/gpu-mem:21] [a] a:79")
}

func TestWhatNodesHaveInCommon(t *testing.T) {
	f, l := lendingFleet(t)
	if got := fmt.Sprint(l.Labels([]string{"a"}), l.Labels([]string{"a", "b"}), l.Labels(nil),
		l.Labels([]string{"a", "c"})); got != "map[model:A100 rack:a] map[model:A100] map[] map[]" {
		t.Error(got)
	}
	devices, plain := l.Lendable()
	if cpu := plain[corev1.ResourceCPU]; devices[memory] != 158 || cpu.Value() != 32 || len(plain) != 1 {
		t.Errorf("%v and %v", devices, plain)
	}
	f.SetNode(node("b", corev1.ConditionFalse))
	devices, plain = l.Lendable()
	if cpu := plain[corev1.ResourceCPU]; devices[memory] != 158 || cpu.Value() != 16 {
		t.Errorf("%v and %v, with b not ready", devices, plain)
	}
}
