// SPDX-License-Identifier: Apache-2.0

package kueue

import (
	"slices"
	"testing"
	"time"

	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/internal/placer"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/timeslice"
)

// spot offers the room of all GPUs to spot pods, too.
func (c *cluster) spot() {
	for name, s := range c.nodes {
		for i := range s.GPUs {
			s.GPUs[i].Spot = &gpunode.Spot{Resource: spotMemory, Total: s.GPUs[i].Total}
		}
		c.SetNode(name, &gpunode.Status{}, true)
		c.SetNode(name, s, true)
	}
}

// spotJob is job, but its pods ask in the spot tier.
func (c *cluster) spotJob(name, flavor, check string, pods, units int) *Workload {
	w := c.job(name, flavor, check, [2]int{pods, units})
	r := w.Sets[0].Pod.Containers[0].Resources.Requests
	r[spotMemory] = r[memory]
	delete(r, memory)
	return w
}

// spotPod lets a spot workload's pod run on a node, with units from one on.
func (c *cluster) spotPod(w *Workload, node string, from, units int) {
	p := placer.Pod{UID: "pod-of-" + w.UID, Name: w.Name, Namespace: w.Namespace, Hold: c.id(w), Node: node,
		Containers: []placer.Container{{Requests: map[string]int{spotMemory: units}}}}
	for n := range units {
		p.Devices = append(p.Devices, placer.SpotDevice(timeslice.ID(gpu.UUID("GPU-"+node+"-0"), from+n)))
	}
	c.SetPod(p)
	c.pods[p.UID] = p
}

// The cases of TestUrgent, with tiers in the place of priorities. Where the job that is in the way was sent as spot,
// no check has to end it: the other has its room at once, and the node has its pods yield. Jobs of the guaranteed tier
// do not make room for each other, whatever their priorities: for these there is the urgent check.
func TestUrgentByTiers(t *testing.T) {
	c := newCluster(t, map[string][]int{"a": {79}, "b": {79}})
	c.spot()
	big := c.job("big", "here", "room", [2]int{1, 79})
	left := c.spotJob("left", "here", "room", 1, 40)
	right := c.job("right", "here", "room", [2]int{1, 39})
	c.decide(0)
	for _, w := range []*Workload{big, left, right} {
		c.want(w, Ready, "there is room")
		w.Admitted = true
	}
	c.pod(big, "a", 0, 79)
	c.pod(right, "b", 40, 39)
	c.spotPod(left, "b", 0, 40)
	if told := c.decide(time.Second); told != nil {
		t.Fatalf("told: %q", told)
	}

	spot := c.spotJob("spot", "here", "room", 1, 1)
	wants := c.job("wants", "here", "room", [2]int{1, 40})
	wants.Priority = 9
	if told := c.decide(2 * time.Second); !slices.Equal(told, []string{"wants Ready", "spot Retry"}) && !slices.Equal(told, []string{"spot Retry", "wants Ready"}) {
		t.Fatalf("told: %q", told)
	}
	c.want(wants, Ready, "b × 1")
	if left.Checks[0].State != Ready {
		t.Errorf("a spot job whose pods yield keeps its quota, and its check is %s", left.Checks[0].State)
	}
	wants.Admitted, spot.Over = true, true
	c.pod(wants, "b", 0, 40)

	second := c.job("second", "here", "room", [2]int{1, 60})
	second.Priority = 8
	if told := c.decide(3 * time.Second); !slices.Equal(told, []string{"second Retry"}) {
		t.Fatalf("told: %q", told)
	}
	if big.Checks[0].State != Ready || right.Checks[0].State != Ready {
		t.Error("a guaranteed job makes room for another")
	}
}
