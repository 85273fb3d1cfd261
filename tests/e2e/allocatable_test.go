// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"example.com/gpu-agent/tests/lab"
)

// beginWindow has a node with three GPUs on demand, whose kubelet is as users have it.
func beginWindow(t *testing.T) *bench {
	t.Helper()
	world := migWorld
	world.World += "gpus:\n"
	for index := range demandGPUs {
		world.World += fmt.Sprintf("  - {index: %d, mig: true}\n", index)
	}
	b := beginMIG(t, world, demandPartitions, placements(demandGPUs))
	b.usersStatus()
	b.offersAll(placements(demandGPUs))
	return b
}

// TestAllocatableAtOnce: an allocation of one placement withdraws those of other profiles
// that overlap it, and the scheduler hears of that long before the kubelet tells it. In
// the end the node offers what the lists say, also where agent or kubelet have started
// anew in between.
func TestAllocatableAtOnce(t *testing.T) {
	if testing.Short() {
		t.Skip("make test-all runs it")
	}
	b := beginWindow(t)
	w := b.watchWindow()
	draw := rand.New(rand.NewPCG(17, 3))
	profiles := []string{"1g.10gb", "2g.20gb", "3g.40gb", "7g.80gb"}
	for round := range count(3, 30) {
		version, kubelet := len(w.node.Words())-1, false
		pod := b.pod(fmt.Sprintf("at-once-%d", round), lab.MIG(profiles[draw.IntN(len(profiles))]), 1)
		b.must(pod.Running(b.ctx))
		if *long {
			switch draw.IntN(4) {
			case 0:
				b.must(agent.Crash(b.ctx))
				b.must(agent.Ready(b.ctx)) // until then the kubelet refuses pods, and there is nobody to say so
			case 1:
				b.must(node.CrashKubelet(b.ctx))
				kubelet = true
			}
		}
		w.equal("while " + pod.Name + " runs")
		b.must(pod.Delete(b.ctx))
		w.equal("after " + pod.Name)
		// A kubelet that starts writes its status more than once in a second, which is what
		// its heartbeat is told in.
		if !kubelet {
			w.onlyLowered(version)
		}
	}
	m, err := agent.Metrics(b.ctx)
	b.must(err)
	_, falls := w.falls()
	b.Logf("%s; lowered %v times after a list, %v times after the kubelet's word", tell(falls),
		m[`gpu_agent_allocatable_writes_total{cause="list"}`], m[`gpu_agent_allocatable_writes_total{cause="kubelet"}`])
}
