// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"
	"fmt"
	"strings"
	"time"

	"example.com/gpu-agent/pkg/gpu"
)

// migManagerLabel chooses what NVIDIA's MIG manager makes of a node's GPUs;
// migManagerIdle is what its operator sets where nobody has chosen.
const (
	migManagerLabel = "nvidia.com/mig.config"
	migManagerIdle  = "all-disabled"
)

// lookAround finds the GPUs that somebody else gives out or cuts: two agents on one
// GPU would each promise all of it. It also finds out whether the kubelet knows
// what we offer.
func (a *Agent) lookAround(ctx context.Context, in *input) {
	now := time.Now()
	if age := now.Sub(a.othersAt); a.others != nil && in.migManager == a.migManager &&
		age < a.othersPause() && !(a.askOthers.Load() && age >= othersSoon-time.Second) {
		return
	}
	a.askOthers.Store(false)
	a.migManager = in.migManager
	cctx, cancel := context.WithTimeout(ctx, kubeletPatience)
	defer cancel()
	allocatable, err := a.kubelet.Allocatable(cctx)
	if err != nil {
		// A kubelet that is away gives nothing out; what it said last stands.
		a.log.Debug("cannot ask the kubelet what other device plugins offer", "err", err)
		if a.others == nil {
			a.others = map[gpu.UUID]string{}
		}
		a.othersAt = now.Add(holdersEvery - a.othersPause())
		return
	}
	a.othersAt = now
	others := map[gpu.UUID]string{}
	held := func(resource, pod string, ids []string) {
		if _, ours := a.kind(resource); ours {
			return
		}
		for _, id := range ids {
			if u := a.gpuOf(id); u != "" && others[u] == "" {
				others[u] = fmt.Sprintf("%s has it as %s of another device plugin; end that pod and plugin, or give the GPU mode off", pod, resource)
			}
		}
	}
	// Allocatable is short of devices that their plugin calls unhealthy, or whose
	// plugin is starting again; who has one is in the list, and after a restart of
	// the kubelet in its checkpoint alone.
	if l, err := a.kubelet.List(cctx); err == nil {
		for _, h := range l.Holdings {
			held(h.Resource, h.Namespace+"/"+h.Pod, h.IDs)
		}
	}
	if cp, _, err := a.checkpoint(); err == nil {
		for _, e := range cp.Entries {
			held(e.Resource, "pod "+e.PodUID, e.IDs)
		}
	}
	for _, resource := range sortedKeys(allocatable) {
		if _, ours := a.kind(resource); ours {
			continue
		}
		for _, id := range allocatable[resource] {
			if u := a.gpuOf(id); u != "" && others[u] == "" {
				others[u] = fmt.Sprintf("the kubelet lists it as %s of another device plugin; end that one, or give the GPU mode off", resource)
			}
		}
	}
	if in.migManager != "" && in.migManager != migManagerIdle {
		for i := range a.inv.GPUs {
			if d := &a.inv.GPUs[i]; d.MIG.Capable && others[d.UUID] == "" {
				others[d.UUID] = fmt.Sprintf("NVIDIA's MIG manager cuts it (the node's label %s is %s); remove that label, or give the GPU mode off",
					migManagerLabel, in.migManager)
			}
		}
	}
	// A plugin that starts again lists nothing for a moment, and so does a kubelet.
	for u, why := range a.others {
		if others[u] == "" && now.Sub(a.othersSeen[u]) < othersLinger {
			others[u] = why
		} else if others[u] != "" {
			a.othersSeen[u] = now
		}
	}
	for u := range others {
		if a.others[u] == "" {
			a.othersSeen[u] = now
		}
	}
	a.others = others
	a.suspect(allocatable)
}

// othersPause is how long an answer about other owners is believed.
func (a *Agent) othersPause() time.Duration {
	if len(a.others) > 0 {
		return othersPresent
	}
	return othersEvery
}

// gpuOf returns the GPU that a device ID of any plugin speaks of: GPU-…, GPU-…::n
// and the like, or the UUID of one of its MIG instances; "" for none of ours.
func (a *Agent) gpuOf(id string) gpu.UUID {
	id, _, _ = strings.Cut(id, "::")
	for i := range a.inv.GPUs {
		d := &a.inv.GPUs[i]
		if id == string(d.UUID) {
			return d.UUID
		}
		for j := range d.MIG.Instances {
			if id == string(d.MIG.Instances[j].UUID) {
				return d.UUID
			}
		}
	}
	return ""
}

// suspect looks whether the kubelet gives out what we offer it.
func (a *Agent) suspect(allocatable map[string][]string) {
	for _, r := range a.desk.View().Resources {
		healthy := 0
		for i := range r.Devices {
			if r.Devices[i].Healthy {
				healthy++
			}
		}
		if healthy > 0 && len(allocatable[r.Name]) == 0 && a.serving[r.Name] != nil {
			a.plugins.Suspect(r.Name)
		}
	}
}
