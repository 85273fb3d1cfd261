// SPDX-License-Identifier: Apache-2.0

package agentkube

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// taintTries is the number of attempts if others change the taints at the same time.
const taintTries = 5

// TaintEffect is the effect of a device taint, for packages that do not import the API's types.
type TaintEffect = resourcev1.DeviceTaintEffect

// The effects of taints. NoExecute also ends the pods that have the device.
const (
	NoSchedule = resourcev1.DeviceTaintEffectNoSchedule
	NoExecute  = resourcev1.DeviceTaintEffectNoExecute
)

// starting reports whether t is a taint that RemoveStartupTaint removes.
func starting(t corev1.Taint, key string) bool {
	return key != "" && t.Key == key &&
		(t.Effect == corev1.TaintEffectNoSchedule || t.Effect == corev1.TaintEffectNoExecute)
}

// tainted reports whether a Node still has its startup taint.
func (n *ourNode) tainted(node *Node) bool {
	return slices.ContainsFunc(node.taints, func(t corev1.Taint) bool { return starting(t, n.options.StartupTaint) })
}

// RemoveStartupTaint removes the taint Options.StartupTaint, with the effects NoSchedule and
// NoExecute, from the agent's Node. It does so only if the Node's allocatable amount of each of
// these resources is above zero. If the Node, as last seen, lacks the taint or one of the
// resources, no request is made.
//
// All other taints stay, also new ones. The request names the place of each taint that it removes,
// and the amount of each resource. If one of these has changed, the server refuses the request, and
// RemoveStartupTaint reads the Node again. After 50 requests in a row, those of Mark and
// SetCondition included, it waits 3 s before each.
//
// It returns an error if the server refuses or does not answer, and if there is no Node. It does
// not retry after such an error.
func (n *ourNode) RemoveStartupTaint(ctx context.Context, resources []string) error {
	if n.options.StartupTaint == "" {
		return nil
	}
	if err := n.removeTaint(ctx, resources); err != nil {
		return fmt.Errorf("remove taint %s of node %s: %w", n.options.StartupTaint, n.options.NodeName, err)
	}
	return nil
}

func (n *ourNode) removeTaint(ctx context.Context, resources []string) error {
	node, err := n.lastNode(ctx)
	for try := 1; ; try++ {
		if err == nil && node == nil {
			err = errors.New("the API server has no Node of this name")
		}
		lacks := func(name string) bool { return !slices.Contains(node.Allocatable, name) }
		if err != nil || !n.tainted(node) || slices.ContainsFunc(resources, lacks) {
			return err
		}
		body, err := untaint(node, n.options.StartupTaint, resources)
		if err == nil {
			err = n.mayRequest(ctx)
		}
		if err != nil {
			return err
		}
		_, err = n.patchNode(ctx, types.JSONPatchType, body, metav1.PatchOptions{FieldManager: manager})
		switch {
		case err == nil:
			return nil
		case byPolicy(err, ""):
			return fmt.Errorf("%w; the component startup-taint of the manifests permits it", err)
		case !apierrors.IsInvalid(err) && !apierrors.IsConflict(err) || try == taintTries:
			return err
		}
		if node, err = n.listNode(ctx); err != nil {
			return err
		}
	}
}

// untaint returns the JSON patch that removes the taints with a key. The patch fails if an amount
// of these resources has changed: a kubelet that has lost the agent reports zero.
func untaint(node *Node, key string, resources []string) ([]byte, error) {
	var steps []step
	for _, name := range resources {
		amount := node.amounts[name]
		steps = append(steps, step{"test", allocatablePath(name), amount.String()})
	}
	for i, t := range slices.Backward(node.taints) { // from the last to the first, so that the other indexes stay valid
		if starting(t, key) {
			path := fmt.Sprintf("/spec/taints/%d", i)
			steps = append(steps, step{"test", path + "/key", t.Key},
				step{"test", path + "/effect", string(t.Effect)}, step{Op: "remove", Path: path})
		}
	}
	body, err := json.Marshal(steps)
	if err != nil {
		return nil, fmt.Errorf("encode the patch: %w", err)
	}
	return body, nil
}
