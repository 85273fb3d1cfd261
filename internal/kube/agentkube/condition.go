// SPDX-License-Identifier: Apache-2.0

package agentkube

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"example.com/gpu-agent/internal/brief"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// ConditionStatus is the status of a condition.
type ConditionStatus = corev1.ConditionStatus

// The three statuses that the API knows.
const (
	True    = corev1.ConditionTrue
	False   = corev1.ConditionFalse
	Unknown = corev1.ConditionUnknown
)

// Condition is a condition of the agent in its Node's status.
type Condition struct {
	// Type is the condition's name, below Options.Domain: "example.com/GPUHealthy".
	Type   string
	Status ConditionStatus
	// Reason is one word in UpperCamelCase, for programs.
	Reason string
	// Message is for people. SetCondition cuts it after 1,024 bytes.
	Message string

	// since is lastTransitionTime, as the server has it.
	since metav1.Time
}

// sameAs reports whether c and d are equal except for since.
func (c Condition) sameAs(d Condition) bool {
	c.since, d.since = metav1.Time{}, metav1.Time{}
	return c == d
}

// SetCondition writes a condition of the agent's Node; all other conditions, such as the kubelet's,
// stay as they are. If the Node, as last seen, already has the condition, no request is made. So
// the agent may call it in each round, and writes again after the Node was created anew. After 50
// requests in a row, those of Mark included, it waits 3 s before each. The time of the last
// transition changes only with Status, the heartbeat with every write.
//
// It returns an error if the server refuses or does not answer, and if there is no Node. It does
// not retry by itself.
func (n *ourNode) SetCondition(ctx context.Context, want Condition) error {
	if err := n.mayWrite(want.Type); err != nil {
		return err
	}
	if want.Status != True && want.Status != False && want.Status != Unknown || want.Reason == "" {
		return fmt.Errorf("set condition %s: status %q with reason %q: want True, False or Unknown, and a reason",
			want.Type, want.Status, want.Reason)
	}
	want.Reason, want.Message = brief.Cut(want.Reason, brief.Reason), brief.Cut(want.Message, brief.Message)
	node, err := n.lastNode(ctx)
	if err == nil && node == nil {
		err = errors.New("the API server has no Node of this name")
	}
	if err != nil {
		return fmt.Errorf("set condition %s of node %s: %w", want.Type, n.options.NodeName, err)
	}
	now := metav1.NewTime(n.server.Now())
	want.since = now
	if have, ok := node.condition(want.Type); ok {
		if have.sameAs(want) {
			return nil
		}
		if have.Status == want.Status && !have.since.IsZero() {
			want.since = have.since
		}
	}
	if err = n.mayRequest(ctx); err == nil {
		err = n.patchCondition(ctx, map[string]any{
			"type": want.Type, "status": want.Status, "reason": want.Reason, "message": want.Message,
			"lastTransitionTime": want.since, "lastHeartbeatTime": now,
		})
	}
	if err != nil {
		return fmt.Errorf("set condition %s of node %s: %w", want.Type, n.options.NodeName, err)
	}
	return nil
}

// RemoveCondition removes a condition of the agent from its Node. If the Node, as last seen, lacks
// the condition, no request is made. It is no error if the Node is gone.
func (n *ourNode) RemoveCondition(ctx context.Context, kind string) error {
	if err := n.mayWrite(kind); err != nil {
		return err
	}
	node, err := n.lastNode(ctx)
	if err == nil && node != nil {
		if _, ok := node.condition(kind); ok {
			err = n.patchCondition(ctx, map[string]any{"type": kind, "$patch": "delete"})
		}
	}
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("remove condition %s of node %s: %w", kind, n.options.NodeName, err)
	}
	return nil
}

// patchCondition sends one element of status.conditions as a strategic merge patch, which the API
// merges into the list by type. A merge patch would replace the whole list, and what the kubelet
// wrote since.
func (n *ourNode) patchCondition(ctx context.Context, element map[string]any) error {
	body, err := json.Marshal(map[string]any{"status": map[string]any{"conditions": []any{element}}})
	if err != nil {
		return fmt.Errorf("encode the patch: %w", err)
	}
	_, err = n.patchNode(ctx, types.StrategicMergePatchType, body, metav1.PatchOptions{FieldManager: manager}, "status")
	return err
}

// condition finds a condition by its type among all that the Node has.
func (n *Node) condition(kind string) (Condition, bool) {
	i := slices.IndexFunc(n.Conditions, func(c Condition) bool { return c.Type == kind })
	if i < 0 {
		return Condition{}, false
	}
	return n.Conditions[i], true
}
