// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"example.com/gpu-agent/tests/lab"
)

// A guaranteed pod takes the room of a spot pod. One whose cgroup has memory for what it has on the GPU is parked: it
// stays Running, and its program goes on with all its contents when the guaranteed pod has ended. Another has its grace.
func TestPark(t *testing.T) {
	if testing.Short() {
		t.Skip("-short: TestTiers has a spot pod yield")
	}
	const (
		parkedHas, smallHas = 20, 10
		parkedTakes         = 8 // GiB
		smallTakes          = 4
		seed                = 7
		grace               = 6 * time.Second
		// A start may take 2 s above the copy's own time, which the emulated driver has little of. Before that, the pod
		// is scheduled.
		above = 2*time.Second + time.Second
	)
	b := begin(t, oneTwice, oneTwiceOffers)
	b.redeploy(lab.DeployOptions{Partitions: oneTwice, Env: map[string]string{
		"GPU_AGENT_YIELD_GRACE": grace.String(), "GPU_AGENT_PARK_MEMORY": "12GiB"}})
	b.offers(oneTwiceOffers)
	spot := func(name string, resources map[string]int) *lab.RunningPod {
		pod := b.create(lab.Pod{Name: name, Containers: []lab.Container{b.container("main", resources)}})
		b.must(pod.Running(b.ctx))
		return pod
	}
	night := spot("night", map[string]int{spotMemory: parkedHas})
	before := b.life(night)
	program := b.probe(night, "main", nil)
	b.take(program, giB/8, 8*parkedTakes)
	if a := b.ask(program, "mark %d", seed); a.Verb != "marked" || a.Result() != lab.Success || a.Bytes("words") == 0 {
		b.Fatalf("contents for the program's memory: %s", a)
	}

	began := time.Now()
	api := b.create(lab.Pod{Name: "api",
		Containers: []lab.Container{b.container("main", map[string]int{lab.Memory: units})}})
	b.must(api.InState(b.ctx, above, "to start in a parked pod's room", started))
	took, copied := time.Since(began), b.seconds("gpu_agent_spot_park_seconds_sum{outcome=\"parked\"}")
	b.Logf("a guaranteed pod has started in a parked pod's room after %v, %v of that for the park",
		took.Round(10*time.Millisecond), copied)
	service := b.probe(api, "main", nil)
	b.take(service, giB, units-1) // all that the card has
	b.metric("gpu_agent_spot_parked_containers", 1)
	b.metric(`gpu_agent_spot_yield_seconds_count{way="parked"}`, 1)
	b.must(service.Close())
	b.must(api.Delete(b.ctx))

	began = time.Now()
	a := b.ask(program, "check %d", seed)
	if a.Result() != lab.Success || a.Bytes("words") != 16*8*parkedTakes || a.Bytes("wrong") != 0 {
		b.Errorf("the contents of the program's memory after its park: %s", a)
	}
	b.Logf("the parked program goes on %v after the guaranteed pod's end", time.Since(began).Round(10*time.Millisecond))
	b.lives(before, night)
	b.must(program.Close())
	b.must(night.Delete(b.ctx))

	small := spot("small", map[string]int{spotMemory: smallHas, "memory": giB})
	program = b.probe(small, "main", nil)
	b.take(program, giB/8, 8*smallTakes)
	began = time.Now()
	api = b.create(lab.Pod{Name: "api-2",
		Containers: []lab.Container{{Name: "main", Resources: map[string]int{lab.Memory: units}}}})
	b.must(api.InState(b.ctx, grace+above, "to start in the room of a pod that was ended", started))
	took = time.Since(began)
	b.Logf("a guaranteed pod has started in the room of a pod without memory for a park after %v, with a grace of %v",
		took.Round(10*time.Millisecond), grace)
	if took < grace {
		b.Errorf("the guaranteed pod has started after %v, want a grace of %v", took, grace)
	}
	b.metric(`gpu_agent_spot_park_seconds_count{outcome="refused"}`, 1)
	b.metric(`gpu_agent_spot_yield_seconds_count{way="ended"}`, 1)
	b.must(lab.Await(b.ctx, waitLong, "why it is not parked", func(ctx context.Context) error {
		log, err := agent.Log(ctx)
		if err == nil && !strings.Contains(log, "no memory for it") {
			err = fmt.Errorf("the agent's log does not say it")
		}
		return err
	}))
}

// seconds is a metric's value in seconds.
func (b *bench) seconds(name string) time.Duration {
	b.Helper()
	m, err := agent.Metrics(b.ctx)
	b.must(err)
	return time.Duration(m[name] * float64(time.Second)).Round(time.Millisecond)
}

// started says what keeps a pod from running.
func started(s lab.PodState) error {
	if s.Phase != "Running" {
		return fmt.Errorf("%s", s)
	}
	return nil
}
