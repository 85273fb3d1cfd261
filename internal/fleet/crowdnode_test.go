// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"example.com/gpu-agent/tests/fakes/agents"
)

// host is a node with its agent and its kubelet.
type host struct {
	*agents.Node
	// alloc and requested are how many devices of each resource the scheduler thinks that there are, and are taken.
	alloc, requested map[string]int
	// shown is what was held when the GPUNode was last written.
	shown *agents.Node
	// starting is how many pods are on their way to the node, and have not reported their devices.
	starting int
}

// newHost is a node with so many GPUs of each kind, those with MIG as a recorded H100. The placer does not know the
// agent's own order of GPUs.
func newHost(t *testing.T, name string, has gpus, r *rand.Rand) *host {
	t.Helper()
	made := agents.New(t, name, "../../tests/testdata/h100-80.json", "example.com")
	h := &host{Node: made, requested: map[string]int{}}
	for i := range has.units + has.mig {
		g := agents.NewGPU(fmt.Sprintf("GPU-%s-%d", name, i), i >= has.units)
		g.Rank = r.IntN(3)
		h.GPUs = append(h.GPUs, g)
	}
	return h
}

// fits reports whether a node, as the API shows it while no pod is on its way there, has room for all of some
// requests, in one order or another.
func (h *host) fits(all []ask) bool {
	if len(all) == 0 {
		return true
	}
	for i, a := range all {
		c := *h
		c.Node = h.Clone()
		for j := range c.GPUs {
			maps.Copy(c.GPUs[j].Held, h.shown.GPUs[j].Held) // what has ended since is not known to be free
		}
		rest := slices.Concat(all[:i], all[i+1:])
		if _, err := c.Admit("a pod to come", a.of, a.n); err == nil && slices.Index(all, a) == i && c.fits(rest) {
			return true
		}
	}
	return false
}
