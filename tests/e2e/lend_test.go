// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"testing"
	"time"

	"example.com/gpu-agent/tests/lab"
)

const oneLends = `version: v1
partitions:
  default:
    - devices: [0]
      mode: shared
      spot: true
      lend: {after: 1m}
    - devices: [1, 2, 3, 4, 5, 6, 7]
      mode: off
`

// A notebook's room is lent to a spot pod a minute after its last process, and the next one gets it back: it waits for
// the spot pod's grace, and meets no error. A pod that says so lends nothing.
func TestLend(t *testing.T) {
	if testing.Short() {
		t.Skip("-short: room is lent after a minute at the least")
	}
	const spot, notebookHas, refusesHas = lab.Memory + ".spot", 40, 10
	const grace = 2 * time.Second
	free := units - notebookHas - refusesHas
	b := begin(t, oneLends, map[string]int{lab.Memory: units, spot: units})
	b.redeploy(lab.DeployOptions{Partitions: oneLends, Env: map[string]string{"GPU_AGENT_YIELD_GRACE": grace.String()}})
	notebook := b.tenant("notebook", notebookHas)
	refuses := b.create(lab.Pod{Name: "refuses", Annotations: map[string]string{"example.com/gpu.lend": "never"},
		Containers: []lab.Container{{Name: "main", Resources: map[string]int{lab.Memory: refusesHas}}}})
	b.must(refuses.Running(b.ctx))
	kernel := b.probe(notebook, "main", nil)
	b.take(kernel, giB, 30)
	b.offers(map[string]int{lab.Memory: units, spot: free})
	b.must(kernel.Close())

	began := time.Now()
	b.must(lab.Await(b.ctx, 3*time.Minute, "the idle room to be offered", func(ctx context.Context) error {
		s, err := node.State(ctx)
		if got := s.Allocatable[spot]; err == nil && got != free+notebookHas {
			err = fmt.Errorf("the node offers %d of %s", got, spot)
		}
		return err
	}))
	b.Logf("the room is lent %v after its last process", time.Since(began).Round(time.Second))
	words := map[string]string{}
	b.must(agent.AwaitStatus(b.ctx, waitLong, "what is told of lending", func(s lab.Status) error {
		for _, h := range s.GPUs[0].Holders {
			words[h.Pod] = h.Lending
		}
		if words["notebook"] != "its idle room is lent" || words["refuses"] != `it lends nothing: its pod says example.com/gpu.lend: "never"` {
			return fmt.Errorf("%q", words)
		}
		return nil
	}))
	batch := b.create(lab.Pod{Name: "batch", Containers: []lab.Container{b.container("main", map[string]int{spot: free + notebookHas})}})
	b.must(batch.Running(b.ctx))
	night := b.probe(batch, "main", nil)
	b.take(night, giB, free+notebookHas-2)

	came := time.Now()
	kernel = b.probe(notebook, "main", nil)
	b.take(kernel, giB, 38)
	took := time.Since(came)
	b.Logf("the kernel has its memory after %v, with a grace of %v", took.Round(10*time.Millisecond), grace)
	if took < grace || took > grace+2*time.Second+patienceOfExec {
		b.Errorf("the kernel has its memory after %v, with a grace of %v", took, grace)
	}
	b.must(kernel.Close())
}

// patienceOfExec is what the way of the probe into its container may take.
const patienceOfExec = 2 * time.Second
