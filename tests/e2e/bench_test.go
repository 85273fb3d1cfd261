// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"example.com/gpu-agent/tests/lab"
)

const allShared = `version: v1
partitions:
  default:
    - devices: all
      mode: shared
`

// bench is one test's place on the node.
type bench struct {
	*testing.T
	ctx context.Context
}

// begin gives a test the node, with its partitions in force and these
// resources on offer; what is not named is not offered.
func begin(t *testing.T, partitions string, offers map[string]int) *bench {
	t.Helper()
	b := prepare(t)
	b.must(agent.Reset(b.ctx, partitions))
	b.offers(offers)
	if _, err := agent.AwaitState(b.ctx, "applied"); err != nil {
		t.Fatal(err)
	}
	// The kubelet may still name pods of an earlier test, and an agent without records goes by
	// that: their room would be missing.
	b.must(agent.AwaitStatus(b.ctx, waitLong, "nobody to hold anything", func(s lab.Status) error {
		if s.Allocations > 0 {
			return fmt.Errorf("there are %d allocations", s.Allocations)
		}
		return nil
	}))
	return b
}

// prepare starts the node if nobody has yet, or skips the test.
func prepare(t *testing.T) *bench {
	t.Helper()
	if testing.Short() && !*built {
		t.Skip("building a node takes minutes: -short is set, and -built is not")
	}
	if missing := lab.Missing(); missing != "" {
		t.Skip("a node needs " + missing)
	}
	if err := start(); err != nil {
		t.Fatalf("start the node of all tests: %v", err)
	}
	b := &bench{T: t, ctx: t.Context()}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if t.Failed() {
			b.tell(ctx)
		}
		if err := node.DeletePods(ctx); err != nil {
			t.Errorf("clean up: %v", err)
		}
	})
	return b
}

// tell logs what helps to understand a failure.
func (b *bench) tell(ctx context.Context) {
	if s, err := agent.Status(ctx); err == nil {
		b.Logf("the agent says: %s", s)
	}
	if log, err := agent.Log(ctx); err == nil {
		b.Logf("the agent's log ends:\n%s", log)
	}
	if out, err := node.Kubectl(ctx, nil, "get", "pods", "-A", "-o", "wide"); err == nil {
		b.Logf("pods:\n%s", out)
	}
	if out, err := node.Processes(ctx); err == nil {
		b.Logf("the node's processes:\n%s", out)
	}
	if s, err := node.State(ctx); err != nil || !s.Ready {
		b.Logf("the node is not ready: %s, %v", s.Conditions["Ready"], err)
		if log, err := node.LogEnd(ctx, lab.Kubelet); err == nil {
			b.Logf("the kubelet's log ends:\n%s", log)
		}
	}
}

func (b *bench) must(err error) {
	b.Helper()
	if err != nil {
		b.Fatal(err)
	}
}

// sub runs a subtest on the same place.
func (b *bench) sub(name string, f func(*bench)) {
	b.Helper()
	b.Run(name, func(t *testing.T) { f(&bench{T: t, ctx: t.Context()}) })
}

// rest is a subtest that the short form leaves out.
func (b *bench) rest(name string, f func(*bench)) {
	b.Helper()
	b.sub(name, func(b *bench) {
		if testing.Short() {
			b.Skip("make test-all runs it")
		}
		f(b)
	})
}

// offers waits until the node offers exactly these resources of ours.
func (b *bench) offers(want map[string]int) {
	b.Helper()
	all := map[string]int{lab.GPU: 0, lab.Memory: 0, lab.Replicas: 0}
	for name, count := range want {
		all[name] = count
	}
	b.must(node.AwaitAllocatable(b.ctx, all))
}

// partitions edits the ConfigMap.
func (b *bench) partitions(file string) {
	b.Helper()
	b.must(agent.SetPartitions(b.ctx, file))
}

// state waits for the partition's state and returns the message beside it.
func (b *bench) state(want string) string {
	b.Helper()
	message, err := agent.AwaitState(b.ctx, want)
	b.must(err)
	return message
}

// pod makes a pod of one container that asks for one resource.
func (b *bench) pod(name, resource string, count int) *lab.RunningPod {
	b.Helper()
	return b.create(lab.Pod{Name: name, Containers: []lab.Container{{Resources: map[string]int{resource: count}}}})
}

func (b *bench) create(p lab.Pod) *lab.RunningPod {
	b.Helper()
	pod, err := node.CreatePod(b.ctx, p)
	b.must(err)
	return pod
}

// running makes a pod of one container, waits until it runs, and returns the
// GPUs that it sees.
func (b *bench) running(name, resource string, count int) (*lab.RunningPod, []lab.GPUInfo) {
	b.Helper()
	pod := b.pod(name, resource, count)
	b.must(pod.Running(b.ctx))
	return pod, b.inside(pod, "")
}

// inside looks from inside a container, which must see the driver, whole and
// in place, and nothing of GPUs but those it returns, in index order.
func (b *bench) inside(pod *lab.RunningPod, container string) []lab.GPUInfo {
	b.Helper()
	return b.insideOf(driver, pod, container)
}

func (b *bench) insideOf(d *lab.Driver, pod *lab.RunningPod, container string) []lab.GPUInfo {
	b.Helper()
	seen, err := pod.Inside(b.ctx, container)
	b.must(err)
	want := slices.Clone(lab.ControlDevices)
	var out []lab.GPUInfo
	for _, minor := range seen.GPUMinors() {
		g, err := d.ByMinor(minor)
		b.must(err)
		out = append(out, g)
		want = append(want, g.Device())
	}
	slices.Sort(want)
	if !slices.Equal(seen.Devices, want) {
		b.Fatalf("%s %s sees the nodes %v, want %v", pod, container, seen.Devices, want)
	}
	library := "libcuda.so." + d.Version
	if filepath.Base(seen.CUDA) != library {
		b.Fatalf("%s %s finds %q for libcuda.so.1 (%s), want %s", pod, container, seen.CUDA, seen.CUDAError, library)
	}
	if seen.Visible != "void" {
		b.Errorf("%s %s has NVIDIA_VISIBLE_DEVICES=%s, want void", pod, container, seen.Visible)
	}
	slices.SortFunc(out, func(a, b lab.GPUInfo) int { return a.Index - b.Index })
	return out
}

// one is the only GPU of several that should be one.
func (b *bench) one(gpus []lab.GPUInfo) lab.GPUInfo {
	b.Helper()
	if len(gpus) != 1 {
		b.Fatalf("the container sees %d GPUs, want 1: %v", len(gpus), gpus)
	}
	return gpus[0]
}

func indexes(gpus []lab.GPUInfo) []int {
	var out []int
	for _, g := range gpus {
		out = append(out, g.Index)
	}
	return out
}

// each calls f for every element at once and waits for all.
func each[T any](list []T, f func(T) error) error {
	errs := make([]error, len(list))
	var all sync.WaitGroup
	for i, v := range list {
		all.Go(func() { errs[i] = f(v) })
	}
	all.Wait()
	return errors.Join(errs...)
}

// life is by what a container is known again: one that was restarted, or made
// anew, has another.
func (b *bench) life(pods ...*lab.RunningPod) map[string]string {
	b.Helper()
	out := map[string]string{}
	for _, p := range pods {
		s, err := p.State(b.ctx)
		b.must(err)
		if s.Phase != "Running" {
			b.Fatalf("%s: %s, want it to run", p, s)
		}
		for name, c := range s.Containers {
			out[p.Name+"/"+name] = fmt.Sprintf("pod %s, container %s, %d restarts", s.UID, c.ID, c.Restarts)
		}
	}
	return out
}

// lives checks that the containers are those that life saw.
func (b *bench) lives(before map[string]string, pods ...*lab.RunningPod) {
	b.Helper()
	now := b.life(pods...)
	for name, was := range before {
		if now[name] != was {
			b.Errorf("container %s was %s and is %s: it did not live on", name, was, now[name])
		}
	}
}
