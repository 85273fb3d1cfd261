// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	witness "example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/tests/lab"
)

// movingClaims has whole GPUs on 0 to 3, and memory on 4 and 5.
const movingClaims = `version: v1
partitions:
  default:
    - {devices: [0, 1, 2, 3], mode: whole, api: dra}
    - {devices: [4, 5], mode: shared, api: dra}
    - {devices: [6, 7], mode: off}
`

// TestClaimsMove has forty claims come at once while the kubelet and the agent are killed and the
// slices deleted, and then a claim with a name get another GPU while the node is away. Every pod is on
// the GPU that the API server says, and no Prepare fails but those that a kill cut off.
func TestClaimsMove(t *testing.T) {
	if testing.Short() {
		t.Skip("make test-all runs it")
	}
	b := prepareDRA(t)
	for range count(1, 3) {
		b.must(agent.Reset(b.ctx, movingClaims))
		b.state("applied")
		b.sub("a crowd", crowdOfClaims)
		b.sub("a claim that moves", claimMoves)
		b.must(node.DeletePods(b.ctx))
		b.must(node.DeleteClaims(b.ctx))
		b.allGivenBack()
	}
}

// allGivenBack waits until the kubelet has no claim. Of a pod that was deleted by force while it was
// away it learns from nobody: it looks for such pods once a minute.
func (b *bench) allGivenBack() {
	b.Helper()
	b.must(lab.Await(b.ctx, 3*time.Minute, "the kubelet to give back all claims", func(context.Context) error {
		s, err := witness.ReadDRAState(node.File("/var/lib/kubelet"))
		if err == nil && len(s.Claims) > 0 {
			err = fmt.Errorf("it has %+v", s.Claims)
		}
		return err
	}))
	b.must(lab.Await(b.ctx, time.Minute, "the agent to hold nothing", func(ctx context.Context) error {
		s, err := agent.Status(ctx)
		if err == nil && s.Allocations > 0 {
			err = fmt.Errorf("it says %s", s)
		}
		return err
	}))
}

// asAllocated checks that a pod is on the GPU of the device that its claim has.
func (b *bench) asAllocated(pod *lab.RunningPod, claim string) lab.GPUInfo {
	b.Helper()
	devices, err := node.Allocated(b.ctx, claim)
	b.must(err)
	var want []int
	for _, s := range b.slices() {
		for _, d := range s.Devices {
			if slices.Contains(devices, d.Name) {
				want = append(want, d.GPU)
			}
		}
	}
	has := b.one(b.inside(pod, ""))
	if len(want) != 1 || want[0] != has.Index {
		b.Errorf("%s is on GPU %d, and claim %s has %v, of GPUs %v", pod, has.Index, claim, devices, want)
	}
	return has
}

func crowdOfClaims(b *bench) {
	const crowd = 40
	var pods []*lab.RunningPod
	for i := range crowd {
		pods = append(pods, b.claimPod(fmt.Sprintf("crowd-%d", i), memoryClass, 3))
	}
	var harm sync.WaitGroup
	var kubelet, killed, wiped error
	harm.Go(func() {
		wiped = node.DeleteSlices(b.ctx, draDriver)
		killed = agent.Crash(b.ctx)
		kubelet = errors.Join(node.Kill(b.ctx, lab.Kubelet), node.StartAgain(b.ctx, lab.Kubelet))
	})
	for i, pod := range pods {
		b.comes(pod)
		b.asAllocated(pod, fmt.Sprintf("crowd-%d", i))
	}
	harm.Wait()
	b.must(errors.Join(kubelet, killed, wiped))
	refused, failed := 0, 0
	for _, pod := range pods {
		events, err := node.Events(b.ctx, "Pod", lab.PodNamespace, pod.Name)
		b.must(err)
		for _, e := range events {
			switch e.Reason {
			case "FailedPrepareDynamicResources":
				if unasked(e.Message) {
					b.Logf("%s: %s", pod, e.Message) // the driver was not asked
					continue
				}
				// The kill ends the connection, or the kubelet has no driver for a moment.
				if !strings.Contains(e.Message, "code = Unavailable") && !strings.Contains(e.Message, "is not registered") {
					b.Errorf("%s: %s", pod, e.Message)
				}
				failed++
			case "ClaimRefused", "ClaimOutdated", "ClaimEnded":
				refused++
				b.Errorf("%s: %s: %s", pod, e.Reason, e.Message)
			}
		}
	}
	b.Logf("%d claims at once, %d Prepares that a kill cut off, %d claims refused", crowd, failed, refused)
}

func claimMoves(b *bench) {
	first := b.claimPod("moves", wholeClass, 0)
	b.comes(first)
	was := b.asAllocated(first, "moves")
	old, err := first.Process(b.ctx, "")
	b.must(err)

	b.must(node.Stop(b.ctx, lab.Kubelet))
	away := time.Now()
	b.must(first.ForceDelete(b.ctx))
	allocated := func(claim string, want bool) {
		b.must(lab.Await(b.ctx, time.Minute, fmt.Sprintf("claim %s to be allocated: %v", claim, want), func(ctx context.Context) error {
			devices, err := node.Allocated(ctx, claim)
			if err == nil && (len(devices) > 0) != want {
				err = fmt.Errorf("it has %v", devices)
			}
			return err
		}))
	}
	allocated("moves", false)
	var others []*lab.RunningPod
	for i := range 4 { // until the GPU that it had is another's
		name := fmt.Sprintf("other-%d", i)
		others = append(others, b.claimPod(name, wholeClass, 0))
		allocated(name, true)
		devices, err := node.Allocated(b.ctx, name)
		b.must(err)
		if slices.ContainsFunc(b.slices(), func(s lab.Slice) bool {
			return slices.ContainsFunc(s.Devices, func(d lab.SliceDevice) bool { return d.GPU == was.Index && slices.Contains(devices, d.Name) })
		}) {
			break
		}
	}
	second := b.create(lab.Pod{Name: "moves-again", Containers: []lab.Container{{Claims: []string{"moves"}}}})
	allocated("moves", true)
	if !node.Lives(old) {
		b.Errorf("the container of the pod that was deleted by force has ended while the kubelet was away")
	}
	b.must(lab.Await(b.ctx, 2*time.Minute, "a minute away", func(context.Context) error {
		if left := time.Minute - time.Since(away); left > 0 {
			return fmt.Errorf("%s are left", left)
		}
		return nil
	}))
	b.must(node.StartAgain(b.ctx, lab.Kubelet))
	b.comes(second)
	now := b.asAllocated(second, "moves")
	b.prepared(second)
	for i, pod := range others {
		b.comes(pod)
		b.asAllocated(pod, fmt.Sprintf("other-%d", i))
		b.prepared(pod)
	}
	b.Logf("the claim had GPU %d, and has GPU %d", was.Index, now.Index)
	if now.Index == was.Index {
		b.Errorf("the claim has not moved")
	}
}
