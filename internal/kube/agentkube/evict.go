// SPDX-License-Identifier: Apache-2.0

package agentkube

import (
	"context"
	"errors"
	"fmt"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"

	"example.com/gpu-agent/internal/kube"
	"example.com/gpu-agent/internal/workload"
	"example.com/gpu-agent/pkg/gpu"
)

// budgetCause is the cause of a refusal (429) that comes from a disruption budget. Without this
// cause, 429 means that the server is overloaded.
const budgetCause metav1.CauseType = "DisruptionBudget"

// Texts in the refusals of the admission policy that looks at the pods of the namespace. otherUID:
// the pod of this name has another UID. noPods: the namespace has no pod.
const (
	otherUID = "the one of this name has another UID"
	noPods   = "no params found"
)

// evictionLabels mark the agent's evictions. The admission policy that looks at each pod of the
// namespace, and at its spec.nodeName, applies only to evictions with these labels. Another policy
// requires the labels.
var evictionLabels = map[string]any{"app.kubernetes.io/name": "gpu-agent"}

// ErrBudget is wrapped by Evict's error if a disruption budget forbids the eviction now. The caller
// may try again later.
var ErrBudget = errors.New("a disruption budget forbids it now")

// Evict asks the API server to end this pod, and none that comes after it. As in a drain, the
// server respects disruption budgets and gives the pod its own grace period. Evict returns when the
// server has decided, after at most 30 s, and long before the pod's containers are gone. The pod
// needs a namespace, a name, and the UID that the API server gives it; the kubelet knows a static
// pod by another UID.
//
// A pod that does not exist counts as evicted. This holds also in a namespace without pods, where
// the admission policy refuses. If a pod of that name has another UID, Evict does nothing, and the
// error wraps gpu.ErrNotFound. The UID is no secret: in that case the server's refusal contains the
// right one. If a budget forbids the eviction, the error wraps ErrBudget and has the server's
// message.
func (c *Client) Evict(ctx context.Context, p workload.Pod) error { return c.evict(ctx, p, nil) }

// EvictWithin is Evict with a grace period in place of the pod's own, in whole seconds and at least one:
// zero would delete the pod before its containers have ended. The admission policy permits it only for pods
// that ask for a resource of the spot tier.
func (c *Client) EvictWithin(ctx context.Context, p workload.Pod, grace time.Duration) error {
	seconds := max(1, int64((grace+time.Second-1)/time.Second))
	return c.evict(ctx, p, &seconds)
}

func (c *Client) evict(ctx context.Context, p workload.Pod, grace *int64) error {
	if p.Namespace == "" || p.Name == "" || p.UID == "" {
		return fmt.Errorf("evict pod %q with UID %q: a namespace, a name and a UID are needed, "+
			"so that no other pod is evicted", p, p.UID)
	}
	bounded, cancel := context.WithTimeout(ctx, c.server.Timing.Request)
	defer cancel()
	done, err := c.server.API.Resource(kube.Pods).Namespace(p.Namespace).
		Create(bounded, evictionOf(p, evictionLabels, grace), metav1.CreateOptions{}, "eviction")
	failed := err
	if err == nil {
		err = refused(done)
	}
	budget := apierrors.IsTooManyRequests(err) && apierrors.HasStatusCause(err, budgetCause)
	gone := apierrors.IsNotFound(err) || byPolicy(err, noPods)
	other := apierrors.IsConflict(err) || byPolicy(err, otherUID)
	if gone || other || budget {
		failed = nil // an answer about the pod: the API server works
	}
	// One name for all pods: a missing right fails for all alike.
	c.server.Note(ctx, "create", kube.Pods.Resource+"/eviction", "", failed)
	switch {
	case err == nil, gone:
		return nil
	case other:
		return fmt.Errorf("evict pod %s: %w: a pod with UID %s; the one of that name is newer, or a static one, "+
			"which cannot be evicted (%s)",
			p, gpu.ErrNotFound, p.UID, err)
	case budget:
		return fmt.Errorf("evict pod %s: %w: %s", p, ErrBudget, errorText(err))
	case apierrors.IsForbidden(err) && !byPolicy(err, ""):
		return fmt.Errorf("evict pod %s: %w; the manifests' component evict grants the right", p, err)
	}
	return fmt.Errorf("evict pod %s: %w", p, err)
}

// evictionOf returns the request to evict a pod. If the pod has no UID, the request has no
// precondition. If grace is nil, the pod has its own grace period.
func evictionOf(p workload.Pod, labels map[string]any, grace *int64) *unstructured.Unstructured {
	options := map[string]any{}
	if grace != nil {
		options["gracePeriodSeconds"] = *grace
	}
	if p.UID != "" {
		options["preconditions"] = map[string]any{"uid": p.UID}
	}
	metadata := map[string]any{"namespace": p.Namespace, "name": p.Name}
	if labels != nil {
		metadata["labels"] = labels
	}
	return &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata, "deleteOptions": options,
	}}
}

// refused returns the refusal in an answer whose code is a success, or nil. If a pod has two
// budgets, the server answers 201 with a failure in the body.
func refused(answer *unstructured.Unstructured) error {
	var s metav1.Status
	err := runtime.DefaultUnstructuredConverter.FromUnstructured(answer.Object, &s)
	if err != nil || s.Status != metav1.StatusFailure {
		return nil
	}
	return &apierrors.StatusError{ErrStatus: s}
}

// errorText returns the text of an error. It adds what the server says about the budget: which budget
// it is, and what it needs.
func errorText(err error) string {
	text := err.Error()
	var status apierrors.APIStatus
	if errors.As(err, &status) && status.Status().Details != nil {
		for _, cause := range status.Status().Details.Causes {
			if cause.Type == budgetCause {
				text += " " + cause.Message
			}
		}
	}
	return text
}
