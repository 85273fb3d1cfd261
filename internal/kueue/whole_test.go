// SPDX-License-Identifier: Apache-2.0

package kueue

import (
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
)

// cores has each pod of a workload ask for so many cores.
func (w *Workload) cores(n string) *Workload {
	for i := range w.Sets {
		w.Sets[i].Pod.Containers[0].Resources.Requests["cpu"] = resource.MustParse(n)
	}
	return w
}

// TestCPURunsOut: on-prem has GPUs for a job, and no cpu, so the job goes to the cloud.
func TestCPURunsOut(t *testing.T) {
	c := newCluster(t, map[string][]int{"a": {79}, "cloud-1": {79}})
	c.SetPlain("a", map[string]int64{"cpu": 8000})
	c.SetPlain("cloud-1", map[string]int64{"cpu": 8000})
	first := c.job("first", "here", "room", [2]int{1, 10}).cores("6")
	w := c.job("next", "here", "room", [2]int{1, 10}).cores("4")
	c.decide(0)
	c.want(first, Ready, "there is room: a × 1")
	c.want(w, Retry, "1 of them have GPUs for it and too little cpu (it asks for 4, the most is 2, on a)")
	if refused := w.Annotations["example.com/gpu.refused-flavors"]; refused != "here" {
		t.Fatalf("it was kept from %q", refused)
	}
	c.quota(w, "there", "full")
	c.decide(time.Second)
	c.want(w, Ready, "too little cpu")
	// It comes back where there is cpu again, as for any room.
	waits := c.job("waits", "here", "room", [2]int{1, 10}).cores("4")
	c.decide(2 * time.Second)
	c.quota(waits, "", "")
	first.Over, first.Reserved = true, false
	if told := c.decide(3 * time.Second); !slices.Contains(told, "waits woken") {
		t.Fatalf("told were %v", told)
	}
}

// TestASetWithoutAPlace keeps the workload from that set's own flavors.
func TestASetWithoutAPlace(t *testing.T) {
	c := newCluster(t, map[string][]int{"a": {79}, "cloud-1": {79}})
	w := c.job("w", "here", "room", [2]int{1, 10}, [2]int{1, 79}, [2]int{1, 0})
	w.Sets[0].Flavors = []string{"there"}
	c.job("first", "here", "room", [2]int{1, 50})
	w.Created = start.Add(time.Hour)
	c.decide(0)
	c.want(w, Retry, "room for 0 of 2 pods")
	if refused := w.Annotations["example.com/gpu.refused-flavors"]; refused != "here" {
		t.Fatalf("it was kept from %q", refused)
	}
}

// TestNotJudged: the check says what the placer did not look at.
func TestNotJudged(t *testing.T) {
	terms := []corev1.PodAffinityTerm{{TopologyKey: corev1.LabelHostname}}
	for want, pod := range map[string]corev1.PodSpec{
		"a × 1": {Affinity: &corev1.Affinity{PodAffinity: &corev1.PodAffinity{
			PreferredDuringSchedulingIgnoredDuringExecution: []corev1.WeightedPodAffinityTerm{{Weight: 1}}}},
			TopologySpreadConstraints: []corev1.TopologySpreadConstraint{{WhenUnsatisfiable: corev1.ScheduleAnyway}}},
		"a × 1; not judged: its pods' affinity to pods": {
			Affinity: &corev1.Affinity{PodAntiAffinity: &corev1.PodAntiAffinity{RequiredDuringSchedulingIgnoredDuringExecution: terms}}},
		"a × 1; not judged: its pods' topology spread": {
			TopologySpreadConstraints: []corev1.TopologySpreadConstraint{{WhenUnsatisfiable: corev1.DoNotSchedule}}},
		"a × 1; not judged: its pods' affinity to pods, and their topology spread": {
			Affinity:                  &corev1.Affinity{PodAffinity: &corev1.PodAffinity{RequiredDuringSchedulingIgnoredDuringExecution: terms}},
			TopologySpreadConstraints: []corev1.TopologySpreadConstraint{{WhenUnsatisfiable: corev1.DoNotSchedule}}},
	} {
		c := newCluster(t, map[string][]int{"a": {79}})
		w := c.job("w", "here", "room", [2]int{1, 10})
		w.Sets[0].Pod.Affinity, w.Sets[0].Pod.TopologySpreadConstraints = pod.Affinity, pod.TopologySpreadConstraints
		c.decide(0)
		c.want(w, Ready, want)
		if got := strings.TrimPrefix(w.Checks[0].Message, "there is room: "); got != want {
			t.Errorf("it says %q, want %q", got, want)
		}
	}
}

// TestPartialAdmission: Kueue chooses a number of pods by quota. The check judges that number, and says which one would
// fit.
func TestPartialAdmission(t *testing.T) {
	c := newCluster(t, map[string][]int{"a": {79, 79}, "cloud-1": {79}})
	w := c.job("w", "here", "room", [2]int{6, 30}, [2]int{1, 5})
	w.Sets[0].Least = 2
	c.decide(0)
	c.want(w, Retry, "with a parallelism of 4 for \"set-0\" it would fit")
	none := c.job("none", "here", "room", [2]int{6, 30})
	none.Sets[0].Least = 5
	c.decide(0)
	c.want(none, Retry, "4 of \"set-0\" fit, and it needs at least 5")
	fits := c.job("fits", "here", "room", [2]int{4, 30})
	fits.Sets[0].Least = 2
	c.decide(0)
	c.want(fits, Ready, "a × 4")
}

// TestNumberOfPods is the smaller one: what Kueue gave by partial admission, or what an elastic job has shrunk to since.
func TestNumberOfPods(t *testing.T) {
	for _, n := range [][3]int{{5, 4, 4}, {2, 4, 2}, {3, 3, 3}} {
		w, err := ReadWorkload(object("Workload", map[string]any{
			"metadata": map[string]any{"name": "w", "namespace": "x"},
			"spec":     map[string]any{"podSets": []any{map[string]any{"name": "main", "count": int64(n[0])}}},
			"status": map[string]any{"admission": map[string]any{"podSetAssignments": []any{
				map[string]any{"name": "main", "count": int64(n[1])}}}}}))
		if err != nil || w.Sets[0].N != n[2] {
			t.Errorf("of %d pods, %d of them admitted, there are %+v, want %d: %v", n[0], n[1], w.Sets, n[2], err)
		}
	}
}
