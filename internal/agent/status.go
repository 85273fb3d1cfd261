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
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
)

// Status is what people and metrics are shown: the last round's inventory and
// outcome, and the desk's view and claims as they are now.
func (a *Agent) Status() status.Status {
	snap, view, claims := a.snapshot.Load(), a.desk.View(), a.desk.Claims()
	s := status.Status{
		Driver:  snap.Inventory.Driver,
		CUDA:    snap.Inventory.CUDA,
		Machine: snap.Inventory.Machine,
		Partition: status.Partition{
			Name: snap.Outcome.Partition, State: string(snap.Outcome.State), Message: snap.Outcome.Message,
			Source: snap.Source, Generation: snap.Generation,
		},
		Claims:   len(claims),
		Hardware: snap.Hangs,
		Topology: snap.Matrix,
	}
	s.Resources = a.resources(snap.Unknown)
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
		cut := snap.Layouts[d.UUID]
		g := status.GPU{
			Index: d.Index, UUID: string(d.UUID), Model: d.Model, MemoryMiB: uint64(d.Memory),
			PCI: d.PCI, NUMA: d.NUMA, Health: status.Healthy,
		}
		if cut.Known {
			g.Mode = cut.Mode()
		}
		if cut.Offers && cut.Kind != ledger.Placement {
			g.Resource = a.names.Of(cut.Kind, mig.Name{})
			if cut.Kind == ledger.Units {
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
		g.MIG = a.migStatus(d, snap, view, claims)
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
		for _, u := range c.GPUs() {
			if at, ok := index[u]; ok {
				n := 0
				for j := range c.Grants {
					if g := &c.Grants[j]; g.GPU == u {
						n += max(1, g.Units.Len())
					}
				}
				s.GPUs[at].Holders = append(s.GPUs[at].Holders, status.Holder{
					Namespace: c.Holder.Namespace, Pod: c.Holder.Pod, Container: c.Holder.Container,
					Resource: c.Resource, Units: n, Since: &since, Waits: c.Waits,
				})
			}
		}
	}
	for i := range s.GPUs {
		slices.SortFunc(s.GPUs[i].Holders, func(a, b status.Holder) int {
			return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Pod, b.Pod),
				cmp.Compare(a.Container, b.Container), cmp.Compare(a.Resource, b.Resource), a.Since.Compare(*b.Since))
		})
	}
	for _, r := range view.Resources {
		for j := range r.Devices {
			dev := &r.Devices[j]
			at, ok := index[dev.GPU]
			if !ok || s.GPUs[at].Resource != r.Name && r.Kind != ledger.Placement {
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

// migStatus shows a GPU's MIG devices: those that stand and those on offer. It is
// nil where there are none.
func (a *Agent) migStatus(d *gpu.Device, snap *Snapshot, view *desk.View, claims []desk.Claim) *status.MIG {
	cut := snap.Layouts[d.UUID]
	offers := cut.Offers && cut.Kind == ledger.Placement
	if !d.MIG.Enabled && d.MIG.Pending == nil && !offers && snap.Work[d.UUID] == "" {
		return nil
	}
	out := &status.MIG{Enabled: d.MIG.Enabled, Pending: d.MIG.Pending, Work: snap.Work[d.UUID]}
	for _, w := range snap.Wanted {
		if w.GPU == d.UUID {
			out.OnDemand = w.OnDemand
		}
	}
	for _, p := range d.MIG.Profiles {
		for _, at := range p.Placements {
			out.Size = max(out.Size, at.Start+at.Size)
		}
	}
	holders := map[string]*desk.Claim{}
	for i := range claims {
		for _, id := range claims[i].IDs {
			holders[id] = &claims[i]
		}
	}
	slots := map[string]*status.Slot{}
	get := func(id string, s mig.Slot) *status.Slot {
		if slots[id] == nil {
			slots[id] = &status.Slot{Device: id, Profile: s.Profile.String(), Start: s.Start, Size: s.Size, CI: s.CI}
		}
		return slots[id]
	}
	for i := range d.MIG.Instances {
		in := &d.MIG.Instances[i]
		slot, err := mig.SlotOf(in)
		if err != nil {
			continue
		}
		id := mig.ID(d.UUID, slot)
		s := get(id, slot)
		s.UUID, s.GI, s.CIID, s.State = string(in.UUID), in.GI, in.CI, status.SlotWarm
		if !snap.Made[d.UUID][slot] {
			s.State = status.SlotForeign
		}
	}
	for i := range view.Resources {
		r := &view.Resources[i]
		if r.Kind != ledger.Placement {
			continue
		}
		for j := range r.Devices {
			dev := &r.Devices[j]
			if dev.GPU != d.UUID || dev.Slot.Size == 0 {
				continue
			}
			s := get(dev.ID, dev.Slot)
			s.Resource, s.Reason = r.Name, dev.Reason
			c, held := holders[dev.ID]
			stands := s.UUID != ""
			switch {
			case held:
				s.State = status.SlotHeld
				if !stands {
					s.State = status.SlotMaking
				}
				s.Namespace, s.Pod, s.Container = c.Holder.Namespace, c.Holder.Pod, c.Holder.Container
				if s.Reason == "" {
					s.Reason = c.Trouble
				}
			case snap.Failing[d.UUID][dev.Slot] != "":
				s.State = status.SlotFailed
			case dev.Healthy && s.State == "":
				s.State = status.SlotFree
			case dev.Healthy:
				s.State = status.SlotWarm
			case snap.Leaving[d.UUID][dev.Slot] != "" || !offers:
				s.State = status.SlotLeaving
			case stands && s.State == status.SlotForeign:
			case stands: // its room is promised to somebody
				s.State = status.SlotCovered
			case slices.Contains(cut.Slots, dev.Slot):
				s.State = status.SlotCovered
			default: // lingers in the list
				delete(slots, dev.ID)
			}
		}
	}
	for _, s := range slots {
		out.Slots = append(out.Slots, *s)
	}
	slices.SortFunc(out.Slots, func(a, b status.Slot) int {
		return cmp.Or(cmp.Compare(a.Start, b.Start), cmp.Compare(a.Size, b.Size), cmp.Compare(a.Profile, b.Profile), cmp.Compare(a.CI, b.CI))
	})
	return out
}

// Ready returns nil once this process has read the driver, with the files of it
// that containers need, and has heard of the partitions; else it says what is
// missing. What a predecessor knew does not count, or a rolling update would walk
// past nodes on which the new version does not work. A first partition that is
// invalid is not enough where nothing is on offer.
//
// Once ready, the agent stays so: a driver that is lost later, and a bad edit, are
// in the outcome and in the health of the GPUs, and no reason to hold up or to take
// back the update of an agent that works.
func (a *Agent) Ready() error {
	snap := a.snapshot.Load()
	if snap.At.IsZero() {
		return errors.New("the first round has not ended")
	}
	if snap.Missing != "" {
		return errors.New(snap.Missing)
	}
	return nil
}

// stuckAfter is longer than the loop sleeps, by more than any round can take: each
// thing that a round waits for has a deadline.
const stuckAfter = inventoryEvery + 5*time.Minute

// Healthy returns nil while rounds come to an end.
func (a *Agent) Healthy() error {
	if at := a.snapshot.Load().At; !at.IsZero() && time.Since(at) > stuckAfter {
		return fmt.Errorf("the loop has not finished a round since %s", at.Format(time.RFC3339))
	}
	return nil
}
