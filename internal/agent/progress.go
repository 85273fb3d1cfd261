// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"errors"
	"maps"
	"slices"
	"strings"

	"example.com/gpu-agent/internal/plan"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
)

// workText describes the work for the partition in words. GPUs with the same work share a sentence,
// so that there are few Events.
func workText(inv *gpu.Inventory, work []plan.Work) string {
	gpus := map[string][]gpu.UUID{}
	var texts []string
	for _, w := range work {
		if w.Allocation != "" {
			continue
		}
		text := w.String()
		if gpus[text] == nil {
			texts = append(texts, text)
		}
		gpus[text] = append(gpus[text], w.GPU)
	}
	for i, text := range texts {
		texts[i] = numbers(inv, gpus[text]) + ": " + text
	}
	return strings.Join(texts, "; ")
}

// conditions returns the work for the partition as conditions: what failed and will be tried again,
// which GPUs wait for a reset or a reboot, what is being done, and what is planned but has not
// begun.
func (e *executor) conditions(inv *gpu.Inventory, planned []plan.Work, gen uint64) (out []status.Condition) {
	for i := range inv.GPUs {
		d := &inv.GPUs[i]
		next := slices.IndexFunc(planned, func(w plan.Work) bool { return w.GPU == d.UUID && w.Allocation == "" })
		switch r := e.rests[plan.Want{GPU: d.UUID}]; {
		case (r == nil || r.gen != gen) && next >= 0 && e.jobs[d.UUID] == nil:
			out = append(out, status.Why(status.GPUChange, "%s: %s, which has not begun", d.Name(), &planned[next]).
				Condition(status.Pending, string(d.UUID)))
		case r == nil || r.gen != gen:
		case errors.Is(r.err, errResetDue):
			out = append(out, status.CauseOf(r.err, status.ResetDue).Condition(status.Pending, string(d.UUID)))
		default:
			out = append(out, status.CauseOf(r.err, status.GPUChangeFailed).Condition(status.Failed, string(d.UUID)))
		}
		if j := e.jobs[d.UUID]; j != nil && j.Allocation == "" {
			out = append(out, status.Why(status.GPUChange, "%s: %s", d.Name(), j).
				Condition(status.Pending, string(d.UUID)))
		}
	}
	return out
}

// now returns the work that runs on each GPU, in words.
func (e *executor) now() map[gpu.UUID]string {
	out := map[gpu.UUID]string{}
	for u, j := range e.jobs {
		out[u] = j.String() // until its first step begins
		if text := j.now.Load(); text != nil {
			out[u] = *text
		}
	}
	return out
}

// made returns the agent's own instances.
func (e *executor) made() map[gpu.UUID]map[mig.Placement]bool {
	out := map[gpu.UUID]map[mig.Placement]bool{}
	for u, placements := range e.mine {
		out[u] = maps.Clone(placements)
	}
	return out
}
