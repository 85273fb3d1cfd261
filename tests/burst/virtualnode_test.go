// SPDX-License-Identifier: Apache-2.0

package burst

import (
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/pkg/mig"
	"example.com/gpu-agent/tests/fakes/agents"
	"example.com/gpu-agent/tests/lab"
)

// host is a site's node with its agent.
type host struct {
	*agents.Node
	site string
}

// newHosts has the GPUs of both sites, half of each kind.
func newHosts(t *testing.T) (hosts [2]*host) {
	t.Helper()
	for site, n := range gpus {
		h := &host{agents.New(t, Sites[site]+"-1", "../testdata/a100-80.json", lab.Domain), Sites[site]}
		for i := range n {
			h.GPUs = append(h.GPUs, agents.NewGPU(fmt.Sprintf("GPU-%s-%d", Sites[site], i), 2*i/n == 1))
		}
		hosts[site] = h
	}
	return hosts
}

func (h *host) node() *corev1.Node {
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: h.Name, Labels: map[string]string{
		corev1.LabelHostname: h.Name, lab.Domain + "/gpu.site": h.site}}}
	n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
	return n
}

// used is how many GPUs Jobs have a part of.
func (h *host) used() (n int) {
	for _, g := range h.GPUs {
		if len(g.Held) > 0 {
			n++
		}
	}
	return n
}

// holders are the Jobs with a piece, and where it begins, as of an agent's status.
func (h *host) holders() map[string]int {
	has := map[string]int{}
	for i := range h.GPUs {
		for id, job := range h.GPUs[i].Held {
			has[job] = -1
			for _, p := range h.Card.Placements() {
				if mig.ID(h.GPUs[i].UUID, p) == id {
					has[job] = p.Start
				}
			}
		}
	}
	return has
}

// changed has the agent write its GPUNode, as soon as the change is worth it.
func (w *world) changed(h *host) {
	soon := func() time.Duration { return 1500 * time.Millisecond }
	h.Changed(soon, w.exactly, func(now *gpunode.Status) { w.publish(h, now) })
}

// publish tells of the GPUNode.
func (w *world) publish(h *host, now *gpunode.Status) {
	if err := w.fleet.SetGPUNode(h.Name, now); err != nil {
		w.t.Error(err)
	}
}
