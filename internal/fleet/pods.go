// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"cmp"
	"hash/maphash"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/internal/placer"
)

// reader makes entries of the books from pods. It does not change after the last HoldFor and Lend.
type reader struct {
	// prefix is what the names of the agent's resources begin with, for example "example.com/".
	prefix string
	// holdOf has a function of each Holder and Lender: it returns a pod's hold, empty for none.
	holdOf []func(*corev1.Pod) string
}

// read makes an entry of the books from a pod.
func (r *reader) read(p *corev1.Pod) placer.Pod {
	out := placer.Pod{
		UID: string(p.UID), Namespace: p.Namespace, Name: p.Name,
		Node: p.Spec.NodeName, Nominated: p.Status.NominatedNodeName,
		Done:   p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed,
		Ending: p.DeletionTimestamp != nil,
		Plain:  plainOf(p, r.prefix),
	}
	for _, of := range r.holdOf {
		out.Hold = cmp.Or(out.Hold, of(p))
	}
	for i := range p.Spec.InitContainers {
		c := &p.Spec.InitContainers[i]
		sidecar := c.RestartPolicy != nil && *c.RestartPolicy == corev1.ContainerRestartPolicyAlways
		r.container(&out, c, placer.Container{Init: !sidecar, Sidecar: sidecar})
	}
	for i := range p.Spec.Containers {
		r.container(&out, &p.Spec.Containers[i], placer.Container{})
	}
	for _, statuses := range [][]corev1.ContainerStatus{p.Status.InitContainerStatuses, p.Status.ContainerStatuses} {
		for i := range statuses {
			for _, of := range statuses[i].AllocatedResourcesStatus {
				if !strings.HasPrefix(string(of.Name), r.prefix) {
					continue // a name "claim:…" is of a device that DRA gave
				}
				_, spot := piece.OfSpot(string(of.Name))
				for _, device := range of.Resources {
					id := string(device.ResourceID)
					if spot {
						id = placer.SpotDevice(id)
					}
					out.Devices = append(out.Devices, id)
				}
			}
		}
	}
	slices.Sort(out.Devices)
	out.Devices = slices.Compact(out.Devices) // the kubelet gives an init container's devices to another one
	return out
}

// container adds a container to an entry, if it asks for any of the agent's resources.
func (r *reader) container(to *placer.Pod, from *corev1.Container, c placer.Container) {
	requests := corev1.ResourceList{}
	maps.Copy(requests, from.Resources.Limits) // a pod template may have limits alone
	maps.Copy(requests, from.Resources.Requests)
	for name, amount := range requests {
		if n := amount.Value(); strings.HasPrefix(string(name), r.prefix) && n > 0 {
			if c.Requests == nil {
				c.Requests = map[string]int{}
			}
			c.Requests[string(name)] = int(min(n, math.MaxInt32)) // so that sums do not overflow
		}
	}
	if c.Requests != nil {
		to.Containers = append(to.Containers, c)
	}
}

// asking is a pod that has no node. Its Containers have all that it asks for. The entry in the books of a pod that
// has a reservation has only what goes through the device plugin.
type asking struct {
	placer.Pod
	// group names the pods that the scheduler binds together with this one or not at all; empty for none.
	group string
	// host is the hostname in the pod's node selector, empty for none.
	host string
	// gated is true while scheduling gates keep the scheduler from the pod.
	gated bool
	// stuck is true if the scheduler has found no node for the pod.
	stuck bool
	// said is a digest of the scheduler's last reason and message why the pod is not bound, 0 if it gave none.
	said uint64
}

// askingOf reads the parts of a pod that matter while it has no node.
func askingOf(p *placer.Pod, from *corev1.Pod) *asking {
	a := &asking{Pod: *p, host: from.Spec.NodeSelector[corev1.LabelHostname], gated: len(from.Spec.SchedulingGates) > 0}
	if g := from.Spec.SchedulingGroup; g != nil && g.PodGroupName != nil {
		a.group = p.Namespace + "/" + *g.PodGroupName
	}
	c := scheduledOf(from)
	if c != nil && c.Status == corev1.ConditionFalse && c.Reason != corev1.PodReasonSchedulingGated {
		a.stuck = c.Reason == corev1.PodReasonUnschedulable
		a.said = maphash.Comparable(seed, [2]string{c.Reason, c.Message})
	}
	return a
}

// seed is the seed of all digests in asking.said.
var seed = maphash.MakeSeed()

// scheduledAt returns when a pod was bound, by the API server's clock in seconds; zero if its status has no time.
func scheduledAt(p *corev1.Pod) time.Time {
	if c := scheduledOf(p); c != nil && c.Status == corev1.ConditionTrue {
		return c.LastTransitionTime.Time
	}
	return time.Time{}
}

// scheduledOf returns a pod's condition PodScheduled, nil if it has none.
func scheduledOf(p *corev1.Pod) *corev1.PodCondition {
	scheduled := func(c corev1.PodCondition) bool { return c.Type == corev1.PodScheduled }
	i := slices.IndexFunc(p.Status.Conditions, scheduled)
	if i < 0 {
		return nil
	}
	return &p.Status.Conditions[i]
}
