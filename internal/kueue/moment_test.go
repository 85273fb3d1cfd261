// SPDX-License-Identifier: Apache-2.0

package kueue

import (
	"testing"
	"time"

	"example.com/gpu-agent/internal/placer"
	"example.com/gpu-agent/pkg/timeslice"
)

// TestCheckOfTheFlavorBefore: a workload that comes back has quota on-prem, and for a moment the check of the cloud. An
// answer to that one would give away the room that is held for it.
func TestCheckOfTheFlavorBefore(t *testing.T) {
	c := newCluster(t, map[string][]int{"a": {79}, "cloud-1": {79}})
	back := c.job("back", "there", "full", [2]int{1, 50})
	back.Sets[0].Labels = map[string]string{"example.com/gpu.checkpoints": "true"}
	back.Checks[0].State, back.Admitted = Ready, true
	other := c.job("other", "there", "full", [2]int{1, 50})
	other.Sets[0].Labels, other.Admitted = back.Sets[0].Labels, true
	other.Checks[0].State = Ready
	c.decide(stay)
	c.want(back, Retry, "it comes back")
	c.quota(back, "here", "full")
	back.QuotaAt, back.Checks[0].Message = start.Add(stay), "Reset to Pending after eviction. Previously: Retry"
	if told := c.decide(stay + time.Second); told != nil {
		t.Errorf("told: %q", told)
	}
	c.quota(back, "here", "room")
	c.decide(stay + 2*time.Second)
	c.want(back, Ready, "there is room: a × 1")
	// One that Kueue leaves is answered.
	again := c.job("again", "there", "full", [2]int{1, 50})
	again.QuotaAt, again.Checks[0].Message = start, "Reset to Pending after eviction. Previously: Retry"
	c.decide(renews)
	c.want(again, Ready, "on-prem, none of 1 nodes has room")
}

// TestStartingPodsAreWaitedFor: nobody goes to the cloud since pods have not reported their devices, unless they take long.
func TestStartingPodsAreWaitedFor(t *testing.T) {
	c := newCluster(t, map[string][]int{"a": {79, 79}, "cloud-1": {79}})
	pod := func(uid string, units int, has ...string) {
		of := []placer.Container{{Requests: map[string]int{memory: units}}}
		c.SetPod(placer.Pod{UID: uid, Node: "a", Containers: of, Devices: has})
	}
	pod("runs", 1, timeslice.ID("GPU-a-0", 0))
	pod("runs too", 1, timeslice.ID("GPU-a-1", 0))
	pod("starts", 20) // on one GPU or the other
	pod("starts too", 20)
	here, there := c.job("one", "here", "room", [2]int{1, 60}), c.job("two", "there", "full", [2]int{1, 60})
	c.decide(0)
	c.want(here, Pending, "no room yet: none of 1 nodes has room")
	c.want(there, Pending, "on-prem, no room yet: none of 1 nodes has room")
	c.decide(settle)
	c.want(here, Retry, "have not reported their devices yet")
	c.want(there, Ready, "have not reported their devices yet")
}
