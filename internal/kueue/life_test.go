// SPDX-License-Identifier: Apache-2.0

package kueue

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"example.com/gpu-agent/internal/placer"
)

// TestAnElasticJobGrowsOnceThereIsRoom: until then its pods go on, and what is held for them stays. Kueue has ended the
// slice before when the next one is looked at.
func TestAnElasticJobGrowsOnceThereIsRoom(t *testing.T) {
	for _, restarts := range []bool{false, true} {
		t.Run(fmt.Sprint("restarts ", restarts), func(t *testing.T) {
			c := newCluster(t, map[string][]int{"a": {79}, "b": {79}})
			first := c.job("first", "here", "room", [2]int{1, 50})
			first.Annotations = map[string]string{sliceName: "first"}
			other := c.job("other", "here", "room", [2]int{1, 50})
			c.decide(0)
			first.Admitted, other.Admitted = true, true
			on := first.Checks[0].Message[len("there is room: "):][:1]
			end := c.pod(first, on, 0, 50)
			next := c.job("next", "here", "room", [2]int{2, 50})
			next.Annotations = map[string]string{sliceName: "first", replacesName: "train/first"}
			first.Over, first.Reserved = true, false
			if restarts {
				c.restart()
			}
			if told := c.decide(0); !slices.Equal(told, []string{"next Pending"}) {
				t.Fatalf("told: %q", told)
			}
			c.want(next, Pending, "its present pods keep running, and more follow once there is room: room for 1 of 2 pods")
			if !restarts {
				// A pod that fails is made anew in the room of the one before.
				end()
				stranger := placer.Pod{UID: "s", Containers: []placer.Container{{Requests: map[string]int{memory: 50}}}}
				if _, err := c.Place(t.Context(), stranger, []string{on}, start); err == nil {
					t.Fatal("a stranger has the room of a pod that goes on")
				}
				c.DeletePod("s")
				of := metav1.ObjectMeta{Namespace: "train", Annotations: first.Checks[0].PodSetUpdates[0].Annotations}
				if at, err := c.place("again", of, 50); at != on {
					t.Fatalf("the room of a pod that goes on is lost: it is placed on %q, %v", at, err)
				}
				c.pod(first, on, 0, 50)
				c.DeletePod("again")
			}
			other.Over, other.Reserved = true, false
			c.decide(time.Second)
			c.want(next, Ready, "there is room: a × 1, b × 1")
		})
	}
}

// TestWithoutPodsThereIsNothingToGrow: a slice whose job was evicted begins elsewhere, as any workload.
func TestWithoutPodsThereIsNothingToGrow(t *testing.T) {
	c := newCluster(t, map[string][]int{"a": {79}})
	c.job("other", "here", "room", [2]int{1, 50})
	next := c.job("next", "here", "room", [2]int{2, 50})
	next.Annotations = map[string]string{sliceName: "first", replacesName: "train/first"}
	c.decide(0)
	c.want(next, Retry, "room for 0 of 2 pods")
}

// TestGrowingInTheCloud: a job that runs there grows there, also while on-prem has room.
func TestGrowingInTheCloud(t *testing.T) {
	c := newCluster(t, map[string][]int{"a": {79}, "cloud-1": {79}})
	next := c.job("next", "there", "full", [2]int{2, 10})
	next.Annotations = map[string]string{sliceName: "first", replacesName: "train/first"}
	c.pod(next, "cloud-1", 0, 10)
	c.decide(0)
	c.want(next, Ready, "its pods run in the cloud already")
}

// TestAWorkloadWithoutAJob: MultiKueue sends the workload before the job. Kueue 0.19 takes quota away by way of the
// job, so Retry would leave the workload evicted and with its quota for ever.
func TestAWorkloadWithoutAJob(t *testing.T) {
	c := newCluster(t, map[string][]int{"a": {79}, "cloud-1": {79}})
	other := c.job("other", "here", "room", [2]int{1, 50})
	c.decide(0)
	w := c.job("w", "here", "room", [2]int{1, 40})
	w.Bare = true
	c.decide(time.Second)
	c.want(w, Pending, "none of 1 nodes has room: the largest free block of example.com/gpu-mem is 29, on a; ")
	c.want(w, Pending, "it keeps its quota while it waits, since Kueue cannot take the quota of a workload without a job")
	if len(w.Annotations) > 0 {
		t.Errorf("it may not have all flavors: %v", w.Annotations)
	}
	if told := c.decide(2 * time.Second); told != nil {
		t.Errorf("without news, told: %q", told)
	}
	other.Over, other.Reserved = true, false
	c.decide(3 * time.Second)
	c.want(w, Ready, "there is room: a × 1")

	// In a cloud it goes on as soon as Kueue has had time for quota on-prem.
	far := c.job("far", "there", "full", [2]int{1, 20})
	far.Bare = true
	c.decide(4 * time.Second)
	c.decide(8 * time.Second)
	c.want(far, Pending, "there is room on-prem")
	c.decide(4*time.Second + forQuota)
	c.want(far, Ready, "on-prem, there is room and no quota")

	// One that has a job gives its quota back.
	late := c.job("late", "here", "room", [2]int{1, 60})
	late.Bare = true
	c.decide(time.Minute)
	c.want(late, Pending, "has room")
	late.Bare = false
	c.decide(time.Minute)
	c.want(late, Retry, "has room")
}

// TestRoomThatOthersAreLeaving: Kueue gives the quota of those that it preempts to another workload once their Job is
// suspended, and their pods take half a minute to end.
func TestRoomThatOthersAreLeaving(t *testing.T) {
	c := newCluster(t, map[string][]int{"a": {79}, "cloud-1": {79}})
	low := c.job("low", "here", "room", [2]int{1, 50})
	c.decide(0)
	low.Admitted = true
	end := c.pod(low, "a", 0, 50)
	high := c.job("high", "here", "room", [2]int{1, 60})
	low.Reserved, low.Admitted = false, false
	ending := c.pods["pod-of-"+low.UID]
	ending.Ending = true
	c.SetPod(ending)
	if told := c.decide(time.Second); !slices.Equal(told, []string{"high Pending"}) {
		t.Fatalf("told: %q", told)
	}
	c.want(high, Pending, "it waits for other workloads to end: a × 1")
	stranger := placer.Pod{UID: "s", Containers: []placer.Container{{Requests: map[string]int{memory: 29}}}}
	if _, err := c.Place(t.Context(), stranger, []string{"a"}, start); err == nil {
		t.Error("a stranger was placed in the room that it waits for")
	}
	if told := c.decide(20 * time.Second); told != nil {
		t.Errorf("while it ends, told: %q", told)
	}
	end()
	c.decide(30 * time.Second)
	c.want(high, Ready, "there is room: a × 1")

	// One that does not end is not waited for.
	stays := c.job("stays", "here", "room", [2]int{1, 70})
	high.Over, high.Reserved = true, false
	c.decide(40 * time.Second)
	c.pod(stays, "a", 0, 70)
	ending = c.pods["pod-of-"+stays.UID]
	ending.Ending = true
	c.SetPod(ending)
	stays.Reserved = false
	w := c.job("w", "here", "room", [2]int{1, 60})
	c.decide(50 * time.Second)
	c.want(w, Pending, "it waits for other workloads to end")
	c.decide(50*time.Second + forEnds)
	c.want(w, Retry, "the largest free block of example.com/gpu-mem is 9")
	if w.Annotations[allowedFlavors] != "there" {
		t.Errorf("it may have %v", w.Annotations)
	}
}

// TestPatience: a workload waits for on-prem as long as the cloud's flavor says, from when it was made.
func TestPatience(t *testing.T) {
	c := newCluster(t, map[string][]int{"a": {79}, "cloud-1": {79}})
	c.view.Flavors["there"].Patience = time.Minute
	runs := c.job("runs", "here", "room", [2]int{1, 79})
	c.decide(0)
	runs.Admitted, runs.Turned = true, start
	c.pod(runs, "a", 0, 79)
	w := c.job("w", "there", "full", [2]int{1, 10})
	w.Turned = start
	c.decide(time.Second)
	c.want(w, Pending, "it waits for room on-prem until 2026-01-02T03:05:05Z")
	if told := c.decide(59 * time.Second); told != nil {
		t.Errorf("told: %q", told)
	}
	c.decide(time.Minute)
	c.want(w, Ready, "on-prem, none of 1 nodes has room")

	// Room that comes meanwhile is its own.
	w = c.job("next", "there", "full", [2]int{1, 10})
	w.Turned = start.Add(time.Minute)
	c.decide(61 * time.Second)
	c.want(w, Pending, "it waits")
	c.DeletePod("pod-of-" + runs.UID)
	runs.Over, runs.Reserved = true, false
	c.decide(62 * time.Second)
	c.want(w, Retry, "there is room on-prem")
}

// TestPatienceGoesByWhatJobsSay: nobody waits for those that say that they run longer.
func TestPatienceGoesByWhatJobsSay(t *testing.T) {
	says := func(after time.Duration) func(*Workload) {
		return func(w *Workload) {
			w.Sets[0].Annotations = map[string]string{"example.com/gpu.runs-for": after.String()}
		}
	}
	deadline := func(n int64) func(*Workload) {
		return func(w *Workload) { w.Sets[0].Pod.ActiveDeadlineSeconds = &n }
	}
	const done = time.Hour - 50*time.Second
	resumed := func(w *Workload) { // it ran before, and goes on from there
		says(time.Hour)(w)
		w.Past, w.Sets[0].Labels = done, map[string]string{"example.com/gpu.checkpoints": "true"}
	}
	anew := func(w *Workload) { resumed(w); w.Sets[0].Labels = nil }
	limited := func(w *Workload) { w.Longest, w.Past = time.Hour, done }
	longer := func(w *Workload) { resumed(w); w.Past = 2 * time.Hour }
	for name, is := range map[string]struct {
		holders []func(*Workload)
		pending bool
	}{
		"most of it is done":      {[]func(*Workload){says(time.Hour), resumed}, true},
		"it begins anew":          {[]func(*Workload){says(time.Hour), anew}, false},
		"the limit is near":       {[]func(*Workload){says(time.Hour), limited}, true},
		"longer than it said":     {[]func(*Workload){says(time.Hour), longer}, true},
		"nobody says":             {[]func(*Workload){func(*Workload) {}, func(*Workload) {}}, true},
		"all run longer":          {[]func(*Workload){says(time.Hour), deadline(3600)}, false},
		"by Kueue's own limit":    {[]func(*Workload){func(w *Workload) { w.Longest = time.Hour }, says(time.Hour)}, false},
		"one may end":             {[]func(*Workload){says(time.Hour), func(*Workload) {}}, true},
		"one ends in time":        {[]func(*Workload){says(time.Hour), says(50 * time.Second)}, true},
		"the shorter one counts":  {[]func(*Workload){says(time.Hour), func(w *Workload) { says(time.Hour)(w); deadline(50)(w) }}, true},
		"what is no duration":     {[]func(*Workload){says(time.Hour), func(w *Workload) { w.Sets[0].Annotations = map[string]string{"example.com/gpu.runs-for": "long"} }}, true},
		"a negative deadline":     {[]func(*Workload){says(time.Hour), deadline(-5)}, true},
		"a deadline of centuries": {[]func(*Workload){says(time.Hour), deadline(1 << 62)}, false},
	} {
		t.Run(name, func(t *testing.T) {
			c := newCluster(t, map[string][]int{"a": {79}, "b": {79}, "cloud-1": {79}})
			c.view.Flavors["there"].Patience = time.Minute
			var on []string
			for i, like := range is.holders {
				y := c.job(fmt.Sprint("runs-", i), "here", "room", [2]int{1, 79})
				like(y)
				c.decide(0)
				y.Admitted, y.Turned = true, start
				node := strings.Fields(strings.TrimPrefix(y.Checks[0].Message, "there is room: "))[0]
				c.pod(y, node, 0, 79)
				on = append(on, node)
			}
			w := c.job("w", "there", "full", [2]int{1, 10})
			w.Turned = start
			c.decide(time.Second)
			if state := w.Checks[0].State; (state == Pending) != is.pending {
				t.Errorf("others run on %v; it is %s: %s", on, state, w.Checks[0].Message)
			}
			if n := len(c.Books.Holds()); n != len(is.holders) {
				t.Errorf("%d holds are left", n)
			}
		})
	}
	// A pod without Kueue says nothing, so it may end.
	c := newCluster(t, map[string][]int{"a": {79}, "cloud-1": {79}})
	c.view.Flavors["there"].Patience = time.Minute
	c.SetPod(placer.Pod{UID: "p", Namespace: "x", Name: "p", Node: "a", Containers: []placer.Container{{Requests: map[string]int{memory: 79}}}})
	w := c.job("w", "there", "full", [2]int{1, 10})
	w.Turned = start
	c.decide(time.Second)
	c.want(w, Pending, "it waits")
}

// TestReadPatience: an annotation that makes no sense leaves the flavor as it is without one.
func TestReadPatience(t *testing.T) {
	flavor := func(text string) (*Flavor, error) {
		return ReadFlavor(object("ResourceFlavor", map[string]any{
			"metadata": map[string]any{"name": "cloud", "labels": map[string]any{"example.com/gpu.cloud": "true"},
				"annotations": map[string]any{"example.com/gpu.patience": text}}}), "example.com")
	}
	for text, want := range map[string]time.Duration{"": 0, "2m": 2 * time.Minute, "0s": 0} {
		if f, err := flavor(text); err != nil || f.Patience != want || !f.Cloud {
			t.Errorf("%q is %v of %+v", text, err, f)
		}
	}
	for _, text := range []string{"2", "-2m", "soon"} {
		f, err := flavor(text)
		if err == nil || !strings.Contains(err.Error(), "gpu.patience") || f == nil || f.Patience != 0 || !f.Cloud {
			t.Errorf("%q is %v of %+v", text, err, f)
		}
	}
}

// TestReadTimes: since when a workload waits or runs, and how long at most.
func TestReadTimes(t *testing.T) {
	made, turned := "2026-01-02T03:04:05Z", "2026-01-02T03:10:00Z"
	read := func(conditions []any, limit any) *Workload {
		w, err := ReadWorkload(object("Workload", map[string]any{
			"metadata": map[string]any{"name": "w", "namespace": "x", "uid": "u", "creationTimestamp": made},
			"spec":     map[string]any{"maximumExecutionTimeSeconds": limit}, "status": map[string]any{"conditions": conditions, "accumulatedPastExecutionTimeSeconds": int64(90)}}))
		if err != nil {
			t.Fatal(err)
		}
		return w
	}
	admitted := []any{map[string]any{"type": "Admitted", "status": "False", "lastTransitionTime": turned}}
	if w := read(nil, nil); w.Turned.UTC().Format(time.RFC3339) != made || w.Longest != 0 {
		t.Errorf("%v, %v", w.Turned, w.Longest)
	}
	if w := read(admitted, int64(60)); w.Turned.UTC().Format(time.RFC3339) != turned || w.Longest != time.Minute ||
		w.Past != 90*time.Second {
		t.Errorf("%v, %v, %v", w.Turned, w.Longest, w.Past)
	}
}

// object is an object of a kind with some fields.
func object(kind string, fields map[string]any) *unstructured.Unstructured {
	o := map[string]any{"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": kind}
	maps.Copy(o, fields)
	return &unstructured.Unstructured{Object: o}
}
