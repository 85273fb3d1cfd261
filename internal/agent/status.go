// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"example.com/gpu-agent/internal/desk"
	"example.com/gpu-agent/internal/health"
	"example.com/gpu-agent/internal/obs"
	"example.com/gpu-agent/pkg/gpu"
)

// Status is what people and metrics are shown: the last round's inventory and
// outcome, and the desk's view and claims as they are now.
func (a *Agent) Status() obs.Status {
	snap, view, claims := a.snapshot.Load(), a.desk.View(), a.desk.Claims()
	s := obs.Status{
		Driver: snap.Inventory.Driver,
		CUDA:   snap.Inventory.CUDA,
		Partition: obs.Partition{
			Name: snap.Outcome.Partition, State: string(snap.Outcome.State), Message: snap.Outcome.Message,
			Source: snap.Source, Generation: snap.Generation,
		},
		Claims:   len(claims),
		Hardware: snap.Hangs,
	}
	verdicts := map[gpu.UUID]health.Verdict{}
	reasons := map[gpu.UUID][]string{}
	for _, v := range snap.Verdicts { // the worst first
		if _, ok := verdicts[v.GPU]; !ok {
			verdicts[v.GPU] = v
		}
		reasons[v.GPU] = append(reasons[v.GPU], v.Reason)
	}
	index := map[gpu.UUID]int{}
	for i := range snap.Inventory.GPUs {
		d := &snap.Inventory.GPUs[i]
		index[d.UUID] = i
		cut := snap.Cuts[d.UUID]
		g := obs.GPUStatus{
			Index: d.Index, UUID: string(d.UUID), Model: d.Model, MemoryMiB: uint64(d.Memory),
			Health: obs.Healthy,
		}
		if cut.Known {
			g.Mode = cut.mode()
		}
		if cut.Offers {
			g.Resource = a.names.of(cut.Kind)
			if cut.Kind == desk.Units {
				g.UnitMiB = uint64(a.opts.MemoryUnit)
			}
		}
		if v, sick := verdicts[d.UUID]; sick {
			since := v.Since
			g.Health, g.Reason, g.Class, g.Since, g.Needs = "unhealthy", strings.Join(reasons[d.UUID], "; "), string(v.Class), &since, v.Needs
		}
		for _, b := range snap.Blocked {
			if b.GPU == d.UUID {
				g.Blocked = b.String()
			}
		}
		s.GPUs = append(s.GPUs, g)
	}

	held := map[string]map[string]bool{} // resource → IDs
	for i := range claims {
		c := &claims[i]
		if held[c.Resource] == nil {
			held[c.Resource] = map[string]bool{}
		}
		for _, id := range c.IDs {
			held[c.Resource][id] = true
		}
		since := c.Allocated
		for _, u := range c.GPUs {
			if at, ok := index[u]; ok {
				n := len(c.IDs)
				if kind, _ := kindOf(c.Resource); kind != desk.Units {
					n = 1 // one whole GPU or one replica of each
				}
				s.GPUs[at].Holders = append(s.GPUs[at].Holders, obs.Holder{
					Namespace: c.Holder.Namespace, Pod: c.Holder.Pod, Container: c.Holder.Container,
					Resource: c.Resource, Units: n, Since: &since, Waits: c.Waits,
				})
			}
		}
	}
	for i := range s.GPUs {
		slices.SortFunc(s.GPUs[i].Holders, func(a, b obs.Holder) int {
			return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Pod, b.Pod),
				cmp.Compare(a.Container, b.Container), cmp.Compare(a.Resource, b.Resource), a.Since.Compare(*b.Since))
		})
	}
	for _, r := range view.Resources {
		for j := range r.Devices {
			dev := &r.Devices[j]
			at, ok := index[dev.GPU]
			if !ok || s.GPUs[at].Resource != r.Name {
				continue
			}
			g := &s.GPUs[at]
			g.Total++
			switch {
			case held[r.Name][dev.ID]:
				g.Used++
			case dev.Healthy:
				g.Free++
			default:
				g.Unhealthy++
			}
		}
	}
	return s
}

// Ready returns nil once the GPUs are known and a partition has been settled,
// else what is being waited for.
func (a *Agent) Ready() error {
	snap := a.snapshot.Load()
	if snap.At.IsZero() {
		return errors.New("the first look at the GPUs is not finished")
	}
	if len(snap.Inventory.GPUs) == 0 && snap.Err != nil {
		return fmt.Errorf("no GPU is known: %w", snap.Err)
	}
	return nil
}

// stuckAfter is longer than any round can take: each thing that a round waits
// for has a deadline.
const stuckAfter = 5 * time.Minute

// Healthy returns nil while rounds come to an end.
func (a *Agent) Healthy() error {
	if at := a.snapshot.Load().At; !at.IsZero() && time.Since(at) > stuckAfter {
		return fmt.Errorf("the loop has not finished a round since %s", at.Format(time.RFC3339))
	}
	return nil
}
