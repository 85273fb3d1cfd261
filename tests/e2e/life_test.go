// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"example.com/gpu-agent/tests/lab"
)

// mixed has GPUs of every mode, two of each.
const mixed = `version: v1
partitions:
  default:
    - devices: [0, 1]
      mode: shared
    - devices: [2, 3]
      mode: shared
      replicas: 2
    - devices: [4, 5]
      mode: whole
    - devices: [6, 7]
      mode: off
`

var mixedOffers = map[string]int{lab.Memory: 2 * units, lab.Replicas: 4, lab.GPU: 2}

// tenants starts a pod on a GPU of every mode.
func (b *bench) tenants() []*lab.RunningPod {
	b.Helper()
	pods := []*lab.RunningPod{
		b.pod("memory", lab.Memory, 24),
		b.pod("replica", lab.Replicas, 1),
		b.pod("whole", lab.GPU, 1),
	}
	b.must(each(pods, func(p *lab.RunningPod) error { return p.Running(b.ctx) }))
	for i, want := range []int{0, 2, 4} {
		if g := b.one(b.inside(pods[i], "")); g.Index != want {
			b.Fatalf("%s is on GPU %d, want %d", pods[i], g.Index, want)
		}
	}
	return pods
}

// newTenants starts a further pod on each, and looks whether each is placed as
// the first ones' presence has it.
func (b *bench) newTenants() {
	b.Helper()
	pods := []*lab.RunningPod{
		b.pod("memory-2", lab.Memory, 40),
		b.pod("replicas-2", lab.Replicas, 2),
		b.pod("whole-2", lab.GPU, 1),
	}
	b.must(each(pods, func(p *lab.RunningPod) error { return p.Running(b.ctx) }))
	for i, want := range [][]int{{0}, {2, 3}, {5}} {
		if got := indexes(b.inside(pods[i], "")); !slices.Equal(got, want) {
			b.Errorf("%s is on GPUs %v, want %v", pods[i], got, want)
		}
	}
	message, err := b.pod("whole-3", lab.GPU, 1).Unschedulable(b.ctx)
	b.must(err)
	b.Logf("a third pod for a whole GPU: %s", message)
}

// restarts ends the first tenants' containers, which must find their GPUs
// again: a container that starts anew asks for nothing anew.
func (b *bench) restarts(pods []*lab.RunningPod) {
	b.Helper()
	pods = pods[:3]
	b.must(each(pods, func(p *lab.RunningPod) error { return p.RestartContainer(b.ctx, "") }))
	for i, want := range []int{0, 2, 4} {
		if g := b.one(b.inside(pods[i], "")); g.Index != want {
			b.Errorf("after the restart of its container %s is on GPU %d, want %d", pods[i], g.Index, want)
		}
	}
}

// When the agent is killed, pods go on, and the next one knows what they hold
// from the CDI files, an init container's share too, of which the kubelet does
// not tell. It still does when the kubelet has started anew as well.
func TestAgentRestart(t *testing.T) {
	b := begin(t, mixed, mixedOffers)
	pods := b.tenants()
	both := b.create(lab.Pod{
		Name:       "both",
		Init:       []lab.Container{{Name: "init", Resources: map[string]int{lab.Memory: 4}}},
		Containers: []lab.Container{{Resources: map[string]int{lab.Memory: 8}}},
	})
	b.must(both.Running(b.ctx))
	pods = append(pods, both)
	before := b.life(pods...)
	files, err := agent.CDIFiles(b.ctx)
	b.must(err)
	if len(files) != 5 {
		b.Fatalf("there are the CDI files %v, want 5", files)
	}

	b.must(agent.Kill(b.ctx))
	b.must(agent.AwaitStatus(b.ctx, waitLong, "the new agent to know all allocations and their holders", func(s lab.Status) error {
		if s.Allocations != len(files) {
			return fmt.Errorf("there are %d allocations, want %d", s.Allocations, len(files))
		}
		held := map[string]bool{}
		for _, g := range s.GPUs {
			for _, h := range g.Holders {
				held[fmt.Sprintf("%s/%s/%s on GPU %d", h.Namespace, h.Pod, h.Container, g.Index)] = true
			}
		}
		for _, want := range []string{"work/memory/main on GPU 0", "work/replica/main on GPU 2", "work/whole/main on GPU 4", "work/both/main on GPU 0"} {
			if !held[want] {
				return fmt.Errorf("the holders are %v, want %s", held, want)
			}
		}
		return nil
	}))
	after, err := agent.CDIFiles(b.ctx)
	b.must(err)
	if !slices.Equal(after, files) {
		b.Errorf("the CDI files are %v, want those from before, %v", after, files)
	}
	b.must(node.RestartKubelet(b.ctx))
	b.offers(mixedOffers)
	b.newTenants()
	// The kubelet judges this one anew, since a container of it has ended, and fails it where it
	// asks before it has the agent's list: TestTwentyKubeletRestarts counts such pods.
	s, err := both.State(b.ctx)
	b.must(err)
	if s.Phase == "Failed" && s.Reason == "UnexpectedAdmissionError" && strings.Contains(s.Message, "cannot allocate unhealthy devices") {
		b.Logf("the kubelet that has started anew has failed %s: %s", both, s)
		pods = pods[:len(pods)-1]
		maps.DeleteFunc(before, func(name, _ string) bool { return strings.HasPrefix(name, both.Name+"/") })
	}
	b.lives(before, pods...)
	b.restarts(pods)
}

// The kubelet gives an init container's devices again to its pod's app
// containers: both see the same GPU, and each has an allocation.
func TestInitAndAppContainers(t *testing.T) {
	b := begin(t, allShared, map[string]int{lab.Memory: gpus * units})
	// On GPU 0, so that the fullest GPU is not also the first.
	_, has := b.running("first", lab.Memory, 70)
	if g := b.one(has); g.Index != 0 {
		b.Fatalf("the first pod is on GPU %d, want 0", g.Index)
	}
	allocations := 1
	cases := []struct {
		name        string
		init, app   int
		allocations int
	}{
		{"more-for-the-app", 12, 24, 2},
		{"more-for-the-init", 16, 12, 2},
		{"alike", 10, 10, 1}, // the same devices are the same allocation
	}
	if testing.Short() {
		cases = cases[:1]
	}
	for _, c := range cases {
		allocations += c.allocations
		b.sub(c.name, func(b *bench) {
			pod := b.create(lab.Pod{
				Name:       c.name,
				Init:       []lab.Container{{Name: "init", Resources: map[string]int{lab.Memory: c.init}}},
				Containers: []lab.Container{{Name: "app", Resources: map[string]int{lab.Memory: c.app}}},
			})
			b.must(pod.Running(b.ctx))
			init, app := b.one(b.inside(pod, "init")), b.one(b.inside(pod, "app"))
			if init.UUID != app.UUID {
				b.Errorf("the init container saw GPU %d and the app container sees GPU %d, want the same", init.Index, app.Index)
			}
			if app.Index != 1 {
				b.Errorf("the pod is on GPU %d, want 1", app.Index)
			}
			b.must(agent.AwaitStatus(b.ctx, waitLong, "the allocations of both containers", func(s lab.Status) error {
				if s.Allocations != allocations {
					return fmt.Errorf("there are %d allocations, want %d", s.Allocations, allocations)
				}
				for _, h := range s.GPUs[1].Holders {
					if h.Pod == c.name && h.Container == "app" && h.Units == c.app {
						return nil
					}
				}
				return fmt.Errorf("the holders on GPU 1 are %v, want the app container of %s with %d", s.GPUs[1].Holders, c.name, c.app)
			}))
		})
	}
	b.sub("two-apps", func(b *bench) {
		pod := b.create(lab.Pod{
			Name: "two-apps",
			Init: []lab.Container{{Name: "init", Resources: map[string]int{lab.Memory: 60}}},
			Containers: []lab.Container{
				{Name: "app", Resources: map[string]int{lab.Memory: 30}},
				{Name: "side", Resources: map[string]int{lab.Memory: 20}},
			},
		})
		b.must(pod.Running(b.ctx))
		init := b.one(b.inside(pod, "init"))
		for _, name := range []string{"app", "side"} {
			if g := b.one(b.inside(pod, name)); g.UUID != init.UUID {
				b.Errorf("container %s sees GPU %d, and the init container saw GPU %d", name, g.Index, init.Index)
			}
		}
	})
}
