// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"slices"
	"testing"

	"example.com/gpu-agent/tests/lab"
)

// TestDynamic has two GPUs in mode dynamic on the real scheduler and kubelet: taken whole,
// cut and shared, by whoever comes first, each as soon as the holders before it have ended.
func TestDynamic(t *testing.T) {
	if testing.Short() {
		t.Skip("make test-all runs it")
	}
	b := prepareDRA(t)
	b.must(agent.Reset(b.ctx, `version: v1
partitions:
  default:
    - {devices: [0, 1], mode: dynamic, api: dra}
    - {devices: [2, 3, 4, 5, 6, 7], mode: off}
`))
	b.state("applied")

	const whole, share, three = "gpu.example.com", "gpu-memory.example.com", "mig-3g.40gb.example.com"
	big := b.claimPod("big", whole, 0)
	b.comes(big)
	left, right := b.claimPod("left", three, 0), b.claimPod("right", three, 0)
	b.comes(left)
	b.comes(right)
	taken := b.one(b.inside(big, "")).Index
	if l, r := b.insideMIG(left, "")[0], b.insideMIG(right, "")[0]; l.gpu.Index == taken || r.gpu.Index == taken || l.in.Start == r.in.Start {
		t.Errorf("%+v and %+v beside a whole GPU %d", l, r, taken)
	}
	before := b.life(left, right)

	// One GPU is whole and the other is cut: memory has to wait for one of them.
	shares := []*lab.RunningPod{b.claimPod("share-1", share, 30), b.claimPod("share-2", share, 30), b.claimPod("share-3", share, 30)}
	_, err := shares[0].Unschedulable(b.ctx)
	b.must(err)
	b.must(big.Delete(b.ctx))
	b.comes(shares[0])
	b.comes(shares[1])
	_, err = shares[2].Unschedulable(b.ctx)
	b.must(err)
	b.lives(before, left, right)
	for _, pod := range shares[:2] {
		if got := indexes(b.inside(pod, "")); !slices.Equal(got, []int{taken}) {
			t.Errorf("a share is of %v, want GPU %d", got, taken)
		}
	}
	// The instances end: their GPU leaves MIG mode for the third share.
	b.must(left.Delete(b.ctx))
	b.must(right.Delete(b.ctx))
	b.comes(shares[2])
	if got := indexes(b.inside(shares[2], "")); !slices.Equal(got, []int{1 - taken}) {
		t.Errorf("the third share is of %v, want GPU %d", got, 1-taken)
	}
	// And the other way about.
	b.must(shares[0].Delete(b.ctx))
	b.must(shares[1].Delete(b.ctx))
	again := b.claimPod("again", "mig-1g.10gb.example.com", 0)
	b.comes(again)
	if got := b.insideMIG(again, "")[0].gpu.Index; got != taken {
		t.Errorf("an instance is on GPU %d, want %d", got, taken)
	}
}
