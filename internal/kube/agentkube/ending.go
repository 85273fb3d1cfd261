// SPDX-License-Identifier: Apache-2.0

package agentkube

import (
	"context"
	"math"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/fields"

	"example.com/gpu-agent/internal/kube"
	"example.com/gpu-agent/internal/workload"
)

// Endings receives the ends of pods from WatchEndings. Calls never overlap, and must not block.
type Endings interface {
	// PodEnds is called with the time at which the kubelet kills what is left of a pod, and again if
	// the pod is to end earlier than that.
	PodEnds(ctx context.Context, p workload.Pod, by time.Time)
	// PodGone is called with the UID of each pod that the API server does not have any longer, or
	// whose containers have all ended. After a forced deletion the containers may still run.
	PodGone(ctx context.Context, uid string)
}

// WatchEndings reports the pods of the node that are about to end, until ctx ends. It returns the
// error of ctx, and no other. It reads the metadata of pods alone. It needs a right that the base of
// the manifests does not have. While that is refused it reports nothing, and tries again every half
// minute.
//
// The time is on this machine's clock. The API server's deletionTimestamp is on the server's clock,
// and the kubelet counts the grace period from when it hears of the deletion, as this does. So the
// time is the earlier one of the two. If this machine's clock is ahead, the time is too early by so
// much. If it is behind, the time is right for each deletion that is seen when it happens, and too
// late for those that an earlier process has seen.
func (c *Client) WatchEndings(ctx context.Context, into Endings) error {
	of := fields.AndSelectors(
		fields.OneTermEqualSelector("spec.nodeName", c.options.NodeName),
		fields.OneTermNotEqualSelector("status.phase", "Succeeded"),
		fields.OneTermNotEqualSelector("status.phase", "Failed"))
	told := map[string]time.Time{} // by the UID of each pod that ends
	return c.server.Follow(ctx, kube.Target{
		Resource: kube.Pods, Metadata: true, Grant: "the manifests' component mps-detach",
		All: &kube.Census{
			Chosen: of.String(), Of: "of node " + c.options.NodeName,
			ID: func(o *unstructured.Unstructured) string { return string(o.GetUID()) },
			Set: func(o *unstructured.Unstructured) {
				at := o.GetDeletionTimestamp()
				if at == nil {
					return
				}
				by := at.Time
				if grace := o.GetDeletionGracePeriodSeconds(); grace != nil && *grace < math.MaxInt32 {
					if counted := c.server.Now().Add(time.Duration(*grace) * time.Second); counted.Before(by) {
						by = counted
					}
				}
				uid := string(o.GetUID())
				if before, known := told[uid]; known && !by.Before(before) {
					return
				}
				told[uid] = by
				into.PodEnds(ctx, workload.Pod{Namespace: o.GetNamespace(), Name: o.GetName(), UID: uid}, by)
			},
			Gone: func(uid string) {
				delete(told, uid)
				into.PodGone(ctx, uid)
			},
			Listed: func() {},
		},
	}, nil)
}
