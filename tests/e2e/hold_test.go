// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"example.com/gpu-agent/pkg/memcap"
	"example.com/gpu-agent/pkg/memcap/lib"
	"example.com/gpu-agent/tests/lab"
)

// limitingDriver is a driver that can limit cgroups.
var limitingDriver = lab.DriverOptions{Model: model, Count: gpus, World: "driver: 615.11.02\n"}

// heldPartitions have shares on GPU 0, and others for those who keep the node busy.
const heldPartitions = `version: v1
partitions:
  default:
    - {devices: [0], mode: shared}
    - {devices: [1], mode: shared, replicas: 4}
    - {devices: [2, 3], mode: whole}
    - {devices: [4, 5, 6, 7], mode: off}
`

// greedy is a program that takes all it can get at its start, past the cap's library, and ends.
var greedy = fmt.Sprintf("printf 'take cuMemAlloc_v2 %d 100000\\n' | LIBCUDA=%s %s -door path\n", chunk, lib.RealCUDA, lab.ProbeProgram)

// onLimits puts a test upon a driver that limits cgroups, and containers into cgroups that it can
// limit.
func onLimits(t *testing.T) *bench {
	t.Helper()
	b := prepare(t)
	b.swap(limitingDriver)
	says, restore, err := node.MakeLeaves(b.ctx)
	b.must(err)
	b.Log(says)
	b.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := restore(ctx); err != nil {
			b.Error(err)
		}
	})
	b.must(agent.Reset(b.ctx, heldPartitions))
	b.offersAll(map[string]int{lab.Memory: units, lab.Replicas: 4, lab.GPU: 2})
	b.state("applied")
	return b
}

// beyond returns the containers with more than so much of a GPU by the driver's books, at any time, and
// how many have had most of it.
func (b *bench) beyond(index int, limit uint64) (most int, over []lab.Book) {
	b.Helper()
	books, err := driver.Books(b.ctx)
	b.must(err)
	for _, c := range books {
		if c.GPU == index && c.Peak > limit {
			over = append(over, c)
		}
		if c.GPU == index && c.Peak > limit-2*chunk {
			most++
		}
	}
	return most, over
}

// A program that takes memory with its first instruction, past the library, never has more than its
// cap: not by a byte, on a busy node, while the agent is killed at random, after restarts, and in
// programs that are executed later. Where the driver does not confirm the limit, no such container
// starts, and its pod says why.
func TestLimitBeforeTheFirstInstruction(t *testing.T) {
	b := onLimits(t)
	const limit = 2 * giB
	starts, atOnce, mostKills, mostExecs := 6, 6, 1, 1000
	between := 5 * time.Second // kills, at most
	switch {
	case *long:
		// The kubelet's back-off must leave the agent up for most of the time, or containers wait for it alone.
		starts, atOnce, mostKills, mostExecs, between = 1000, 16, 1000, 100_000, 30*time.Second
	case testing.Short():
		starts, atOnce, mostKills, mostExecs = 2, 2, 0, 2
	}

	// Neighbours keep the node busy, by programs that are executed in them.
	busy, stop := context.WithCancel(b.ctx)
	var beside sync.WaitGroup
	defer beside.Wait()
	defer stop()
	replica := b.create(lab.Pod{Name: "busy", Containers: []lab.Container{b.container("main", map[string]int{lab.Replicas: 1})}})
	tenant := b.create(lab.Pod{Name: "tenant", Containers: []lab.Container{b.container("main", map[string]int{lab.Memory: limit / giB})}})
	b.must(replica.Running(b.ctx))
	b.must(tenant.Running(b.ctx))
	b.guarantee(tenant, 0, memcap.Driver) // it has not used the GPU yet
	execs := 0
	beside.Go(func() {
		for busy.Err() == nil && execs < mostExecs {
			for _, pod := range []*lab.RunningPod{replica, tenant} {
				if _, err := pod.Exec(busy, "main", "sh", "-c", greedy); err == nil {
					execs++
				}
			}
		}
	})
	kills := 0
	beside.Go(func() {
		for kills < mostKills {
			select {
			case <-busy.Done():
				return
			case <-time.After(time.Second + rand.N(between-time.Second)):
			}
			if err := agent.Crash(busy); err == nil {
				kills++
			}
		}
	})

	began := time.Now()
	c := b.container("main", map[string]int{lab.Memory: limit / giB})
	c.Then = greedy
	b.must(node.RunJob(b.ctx, lab.Pod{Name: "greedy", Containers: []lab.Container{c}}, starts, atOnce, starts))
	if !*long {
		b.Cleanup(func() {
			if err := node.DeleteJob(context.Background(), "greedy"); err != nil {
				b.Error(err)
			}
		})
	}
	b.must(node.AwaitJob(b.ctx, "greedy", 2*time.Minute+time.Duration(starts)*4*time.Second))
	stop()
	beside.Wait()
	b.must(agent.Ready(b.ctx))
	took := time.Since(began)

	// Restarts: a new container, in a new leaf.
	for range 2 {
		b.must(tenant.RestartContainer(b.ctx, ""))
		if _, err := tenant.Exec(b.ctx, "main", "sh", "-c", greedy); err != nil {
			b.Error(err)
		}
	}
	b.guarantee(tenant, 0, memcap.Driver)

	most, over := b.beyond(0, limit)
	if len(over) > 0 {
		b.Errorf("%d containers have had more than %d bytes, such as %+v", len(over), uint64(limit), over[0])
	}
	// Those of the job, and the three containers of tenant.
	if most < starts+3 {
		b.Errorf("%d containers have taken all they could, want %d: the others show nothing", most, starts+3)
	}
	b.Logf("%d starts and %d exec's in %v beside %d kills of the agent: %d containers took up to %d bytes, and none took more",
		starts, execs, took.Round(time.Second), kills, most, uint64(limit))
	if *long {
		// What ends next would wait for the end of a thousand pods.
		b.must(node.DeleteJob(b.ctx, "greedy"))
		b.must(lab.Await(b.ctx, time.Duration(starts)*time.Second, "the job's pods to be gone", func(ctx context.Context) error {
			left, err := node.Pods(ctx, "job-name=greedy")
			if err == nil && len(left) > 0 {
				err = fmt.Errorf("there are %d", len(left))
			}
			return err
		}))
		b.cost(50)
	}

	b.sub("without the hook's success", func(b *bench) {
		const call = "nvmlDeviceSetMemoryLimits_v1"
		b.must(driver.Fail(b.ctx, call, 999))
		pod := b.create(lab.Pod{Name: "refused", Containers: []lab.Container{b.container("main", map[string]int{lab.Memory: 1})}})
		b.must(node.AwaitEvent(b.ctx, "Pod", lab.PodNamespace, "refused", "the reason", func(e lab.Event) bool {
			return strings.Contains(e.Message, "limit GPU memory in the driver") && strings.Contains(e.Message, "NVML error 999")
		}))
		b.must(lab.Holds(b.ctx, 3*time.Second, "no container of it to start", func(ctx context.Context) error {
			all, err := node.Started(ctx)
			if slices.ContainsFunc(all, func(s lab.Started) bool { return s.Pod == pod.Name }) {
				err = fmt.Errorf("the runtime has started %v", all)
			}
			return err
		}))
		b.must(driver.ClearFaults(b.ctx))
		b.must(pod.Running(b.ctx))
		b.guarantee(pod, 0, memcap.Driver)
	})
}

// guarantee waits until the agent says how strongly a pod's cap is held.
func (b *bench) guarantee(pod *lab.RunningPod, index int, want memcap.Level) {
	b.Helper()
	b.memory(pod, "main", index, fmt.Sprintf("the guarantee %s", want), func(c lab.ContainerStatus) error {
		if c.Guarantee != string(want) {
			return fmt.Errorf("it is %s", c.Guarantee)
		}
		return nil
	})
}

// cost logs how long starts take, with the hook and without it, in turn.
func (b *bench) cost(starts int) {
	b.Helper()
	took := map[string][]time.Duration{}
	for i := range starts {
		for _, resource := range []string{lab.Memory, lab.GPU} {
			pod := b.create(lab.Pod{Name: fmt.Sprintf("start-%d-%s", i, strings.TrimPrefix(resource, lab.Domain+"/")),
				Containers: []lab.Container{b.container("main", map[string]int{resource: 1})}})
			b.must(pod.Running(b.ctx))
			all, err := node.Started(b.ctx)
			b.must(err)
			for _, s := range all {
				if s.Pod == pod.Name {
					took[resource] = append(took[resource], s.Took)
				}
			}
			b.must(pod.Delete(b.ctx))
			b.must(pod.Gone(b.ctx))
		}
	}
	for resource, all := range took {
		slices.Sort(all)
		b.Logf("starts with %s: p50 %v, longest %v, of %d", resource, all[len(all)/2], all[len(all)-1], len(all))
	}
}
