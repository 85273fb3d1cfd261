// SPDX-License-Identifier: Apache-2.0

package kueue

import (
	"slices"
	"testing"
	"time"

	"example.com/gpu-agent/internal/placer"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/timeslice"
)

// pod lets a workload's pod run on a node, with units from one on, and returns how it ends.
func (c *cluster) pod(w *Workload, node string, from, units int) (end func()) {
	p := placer.Pod{UID: "pod-of-" + w.UID, Name: w.Name, Namespace: w.Namespace, Hold: c.id(w), Containers: []placer.Container{{Requests: map[string]int{memory: units}}}, Node: node}
	for n := range units {
		p.Devices = append(p.Devices, timeslice.ID(gpu.UUID("GPU-"+node+"-0"), from+n))
	}
	c.SetPod(p)
	c.pods[p.UID] = p
	return func() {
		c.DeletePod(p.UID)
		delete(c.pods, p.UID)
	}
}

// An urgent workload has those of lower priority make room, and no more of them than it needs.
// Nobody else gets what they leave, whether the process that has decided goes on or another.
func TestUrgent(t *testing.T) {
	for name, restart := range map[string]bool{"one process": false, "a new process each time": true} {
		t.Run(name, func(t *testing.T) {
			c := newCluster(t, map[string][]int{"a": {79}, "b": {79}})
			c.view.Checks["now"] = &Check{Name: "now", Controller: "example.com/gpu-placer-urgent"}
			big := c.job("big", "here", "room", [2]int{1, 79})
			left := c.job("left", "here", "room", [2]int{1, 40})
			right := c.job("right", "here", "room", [2]int{1, 39})
			big.Priority, right.Priority = 5, 5
			c.decide(0)
			for _, w := range []*Workload{big, left, right} {
				c.want(w, Ready, "there is room")
				w.Admitted = true
			}
			endBig, endLeft := c.pod(big, "a", 0, 79), c.pod(left, "b", 0, 40)
			c.pod(right, "b", 40, 39)
			after := time.Duration(0)
			next := func() []string {
				if restart {
					c.restart()
				}
				after += lookAgain
				return c.decide(after)
			}

			equal := c.job("equal", "here", "now", [2]int{1, 40})
			if told := next(); !slices.Equal(told, []string{"equal Pending"}) {
				t.Fatalf("no workload has a lower priority, and these were told: %q", told)
			}
			equal.Over = true
			urgent := c.job("urgent", "here", "now", [2]int{1, 40})
			urgent.Priority = 9
			if told := next(); !slices.Equal(told, []string{"left Retry", "urgent Pending"}) {
				t.Fatalf("told: %q", told)
			}
			c.want(left, Retry, "for a workload of a higher priority (UID: u-urgent)")
			c.want(urgent, Pending, "other workloads make room: b × 1")
			if left.Annotations[allowedFlavors] != "there" {
				t.Errorf("who makes room may have %v", left.Annotations)
			}
			// Kueue evicts it. Meanwhile nobody else ends.
			left.Evicted, left.Checks[0].State = true, Pending
			late := c.job("late", "here", "room", [2]int{1, 20})
			if told := next(); !slices.Equal(told, []string{"late Retry"}) {
				t.Fatalf("told: %q", told)
			}
			c.quota(late, "", "")
			c.quota(left, "", "") // its pod ends yet
			if told := next(); told != nil {
				t.Fatalf("told: %q", told)
			}
			endLeft()
			if told := next(); !slices.Equal(told, []string{"urgent Ready"}) {
				t.Fatalf("told: %q", told)
			}
			urgent.Admitted = true
			c.pod(urgent, "b", 0, 40)
			if told := next(); told != nil {
				t.Fatalf("told: %q", told)
			}
			// A second one finds only higher ones to end.
			second := c.job("second", "here", "now", [2]int{1, 60})
			second.Priority = 8
			if told := next(); !slices.Equal(told, []string{"big Retry", "second Pending"}) {
				t.Fatalf("told: %q", told)
			}
			// It is deleted before it has its room: what is free then is anybody's.
			second.Over, big.Evicted = true, true
			endBig()
			if told := next(); !slices.Equal(told, []string{"left woken", "late woken"}) {
				t.Fatalf("told: %q", told)
			}
		})
	}
}
