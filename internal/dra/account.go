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

// accountOf is what the kubelet has of a claim, nil where it does not know it.
func accountOf(state *node.DRAState, uid string) *node.PreparedClaim {
	if i := slices.IndexFunc(state.Claims, func(c node.PreparedClaim) bool { return c.UID == uid }); i >= 0 {
		return &state.Claims[i]
	}
	return nil
}

// podsOf are the pods for which the kubelet has a claim, by UID: it writes them down before it
// asks a driver for it.
func podsOf(state *node.DRAState, uid string) []string {
	if c := accountOf(state, uid); c != nil {
		return c.PodUIDs
	}
	return nil
}

// answered reports whether the kubelet has been told that a claim is prepared. One that it
// is having prepared is in its account, too, and may wait for the room of the one before.
func answered(state *node.DRAState, driver, uid string) bool {
	c := accountOf(state, uid)
	return c != nil && len(c.Devices[driver]) > 0
}

// inContainers are the allocations that containers have now, with the containers' pods; sure says
// that there are no others.
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

// theirs reports whether a container has what a claim has been given: the kubelet's account
// says that it was prepared with these devices, or a pod for which it is reserved has a container
// with it.
func theirs(
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
