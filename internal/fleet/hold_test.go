// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

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
	if nodes, _ := h.Nodes(); len(nodes) != 1 || nodes["a"] == nil && len(nodes["a"]) > 0 {
		t.Errorf("pods may be on %v, and b is cordoned", nodes)
	}
	// A template may name limits alone.
	template := corev1.PodSpec{Containers: []corev1.Container{{Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{memory: resource.MustParse("50")}}}}}
	group := placer.Group{Containers: h.Asks(&template), N: 1, Among: []string{"a"}}
	if len(group.Containers) != 1 || group.Containers[0].Requests[memory] != 50 {
		t.Fatalf("it asks for %v", group.Containers)
	}
	h.SetHold("x/1", "a job", []placer.Group{group}, [][]string{{"a"}})
	h.Listed()
	if _, no := h.Hold("x/2", "another job", []placer.Group{group}); no == nil || !slices.Equal(h.Holds(), []string{"x/1"}) || h.Lost("x/1") != nil {
		t.Errorf("held are %v, lost %v", h.Holds(), h.Lost("x/1"))
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
	if at, no := h.Hold("x/2", "another job", []placer.Group{group}); no != nil || len(at) != 1 || !slices.Equal(at[0], []string{"a"}) {
		t.Errorf("the room is not free: %v, %v", at, no)
	}
}
