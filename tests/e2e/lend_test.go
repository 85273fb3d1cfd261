// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"maps"
	"testing"
	"time"

	"example.com/gpu-agent/tests/lab"
)

const someLend = `version: v1
partitions:
  default:
    - {devices: [0], mode: shared, spot: true, lend: {after: 1m}}
    - {devices: [1], mode: whole, spot: true, lend: {after: 1m}}
    - {devices: [2], mode: mig, geometry: {3g.40gb: 1}, spot: true, lend: {after: 1m}}
    - {devices: [3, 4, 5, 6, 7], mode: off}
`

// What notebooks have, a share, a GPU or a MIG instance, is lent to spot pods a minute after its last process, and the
// next one gets it back: it waits for the spot pod's grace, and meets no error. A pod that says so lends nothing.
func TestLend(t *testing.T) {
	if testing.Short() {
		t.Skip("-short: room is lent after a minute at the least")
	}
	const grace, refusesHas = 2 * time.Second, 10
	notebooks := []*struct {
		resource string
		has      int // of the resource
		takes    int // GiB
		free     int // of the resource, for spot pods, while it lends nothing
		pod      *lab.RunningPod
	}{
		{resource: lab.Memory, has: 40, takes: 38, free: units - 40 - refusesHas},
		{resource: lab.GPU, has: 1, takes: 70},
		{resource: lab.MIG("3g.40gb"), has: 1, takes: 36},
	}
	all := map[string]int{lab.Memory: units, lab.GPU: 1, lab.MIG("3g.40gb"): 1}
	spot := func(resource string) string { return resource + ".spot" }
	offered := maps.Clone(all)
	for resource, n := range all {
		offered[spot(resource)] = n
	}
	prepare(t).swap(lab.DriverOptions{Model: model, Count: gpus}) // its end takes the instance away
	b := begin(t, someLend, offered)
	b.redeploy(lab.DeployOptions{Partitions: someLend, Env: map[string]string{"GPU_AGENT_YIELD_GRACE": grace.String()}})
	refuses := b.create(lab.Pod{Name: "refuses", Annotations: map[string]string{"example.com/gpu.lend": "never"},
		Containers: []lab.Container{{Name: "main", Resources: map[string]int{lab.Memory: refusesHas}}}})
	b.must(refuses.Running(b.ctx))
	wants := map[string]string{"refuses": `it lends nothing: its pod says example.com/gpu.lend: "never"`}
	var kernels []*lab.Probe
	for i, n := range notebooks {
		n.pod = b.create(lab.Pod{Name: fmt.Sprintf("notebook-%d", i),
			Containers: []lab.Container{b.container("main", map[string]int{n.resource: n.has})}})
		b.must(n.pod.Running(b.ctx))
		wants[n.pod.Name] = "its idle room is lent"
		kernels = append(kernels, b.probe(n.pod, "main", nil))
		b.take(kernels[i], giB, n.takes)
		offered[spot(n.resource)] = n.free
	}
	b.offers(offered)
	for _, k := range kernels {
		b.must(k.Close())
	}

	began := time.Now()
	for _, n := range notebooks {
		b.must(lab.Await(b.ctx, 3*time.Minute, "the idle room to be offered", func(ctx context.Context) error {
			s, err := node.State(ctx)
			if got := s.Allocatable[spot(n.resource)]; err == nil && got != n.free+n.has {
				err = fmt.Errorf("the node offers %d of %s", got, spot(n.resource))
			}
			return err
		}))
		b.Logf("%s is lent %v after the last process", n.resource, time.Since(began).Round(time.Second))
	}
	b.must(agent.AwaitStatus(b.ctx, waitLong, "what is told of lending", func(s lab.Status) error {
		words := map[string]string{}
		for _, g := range s.GPUs {
			for _, h := range g.Holders {
				words[h.Pod] = h.Lending
			}
		}
		if !maps.Equal(words, wants) {
			return fmt.Errorf("%q", words)
		}
		return nil
	}))
	for i, n := range notebooks {
		batch := b.create(lab.Pod{Name: fmt.Sprintf("batch-%d", i),
			Containers: []lab.Container{b.container("main", map[string]int{spot(n.resource): n.free + n.has})}})
		b.must(batch.Running(b.ctx))
		b.take(b.probe(batch, "main", nil), giB, n.takes)
	}

	for _, n := range notebooks {
		came := time.Now()
		kernel := b.probe(n.pod, "main", nil)
		b.take(kernel, giB, n.takes)
		took := time.Since(came)
		b.Logf("with %s the kernel has its memory after %v, with a grace of %v", n.resource, took.Round(10*time.Millisecond), grace)
		if took < grace || took > grace+2*time.Second+patienceOfExec {
			b.Errorf("with %s the kernel has its memory after %v, with a grace of %v", n.resource, took, grace)
		}
		b.must(kernel.Close())
	}
}

// patienceOfExec is what the way of the probe into its container may take.
const patienceOfExec = 2 * time.Second
