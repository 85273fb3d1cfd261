// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"fmt"
	"slices"

	"example.com/gpu-agent/internal/kube/agentkube"
	"example.com/gpu-agent/internal/node"
	"example.com/gpu-agent/internal/workload"
	"example.com/gpu-agent/pkg/cdi"
)

// accountOf returns the kubelet's entry for a claim, or nil if it has none.
func accountOf(state *node.DRAState, uid string) *node.PreparedClaim {
	if i := slices.IndexFunc(state.Claims, func(c node.PreparedClaim) bool { return c.UID == uid }); i >= 0 {
		return &state.Claims[i]
	}
	return nil
}

// podsOf returns the UIDs of the pods that the kubelet has a claim for. The kubelet writes them
// down before it calls the driver.
func podsOf(state *node.DRAState, uid string) []string {
	if c := accountOf(state, uid); c != nil {
		return c.PodUIDs
	}
	return nil
}

// answered reports whether the kubelet has been told that a claim is prepared. The kubelet also has
// an entry for a claim whose Prepare is still waiting; that one names no devices.
func answered(state *node.DRAState, driver, uid string) bool {
	c := accountOf(state, uid)
	return c != nil && len(c.Devices[driver]) > 0
}

// inContainers returns the allocations that containers have now, each with the containers' pods.
// sure is false if the runtime does not tell the CDI devices of some container.
func inContainers(ctx context.Context, r Runtime, domain string) (out map[string][]workload.Pod, sure bool, err error) {
	containers, err := r.Containers(ctx)
	if err != nil {
		return nil, false, fmt.Errorf("ask the container runtime which claims containers have: %w", err)
	}
	out, sure = map[string][]workload.Pod{}, true
	for i := range containers {
		sure = sure && !containers[i].CDIUnknown
		for _, key := range cdi.Keys(domain, nil, containers[i].CDI) {
			out[key] = append(out[key], containers[i].InPod())
		}
	}
	return out, sure, nil
}

// givenToPod reports whether a pod has been given exactly what a claim has now: the kubelet has the
// claim prepared with these devices, or a pod that the claim is reserved for has a container with
// one of them.
func givenToPod(
	c *agentkube.Claim, wants []want, driver string, state *node.DRAState, used map[string][]workload.Pod,
) bool {
	for i := range wants {
		w := &wants[i]
		for _, p := range used[w.id()] {
			if len(c.Others) > 0 || slices.ContainsFunc(c.Pods, func(o workload.Pod) bool { return o.UID == p.UID }) {
				return true
			}
		}
	}
	had := accountOf(state, c.UID)
	return had != nil && !slices.ContainsFunc(wants, func(w want) bool {
		return !slices.ContainsFunc(had.Devices[driver], func(d node.PreparedDevice) bool {
			return d.Pool == w.Pool && d.Device == w.Device && d.Share == w.Share
		})
	})
}
