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

// taintTries is how often a request is repeated because somebody else has changed the
// taints meanwhile.
const taintTries = 5

// TaintEffect is what a taint does, for those who do not know the API's types.
type TaintEffect = resourcev1.DeviceTaintEffect

// Effects of taints. NoExecute also ends the pods that have the device.
const (
	NoSchedule = resourcev1.DeviceTaintEffectNoSchedule
	NoExecute  = resourcev1.DeviceTaintEffectNoExecute
)

// starting reports whether a taint of a Node is one that RemoveStartupTaint takes away.
func starting(t corev1.Taint, key string) bool {
	return key != "" && t.Key == key &&
		(t.Effect == corev1.TaintEffectNoSchedule || t.Effect == corev1.TaintEffectNoExecute)
}

// tainted reports whether a Node has the taint that it was registered with.
func (n *ourNode) tainted(node *Node) bool {
	return slices.ContainsFunc(node.taints, func(t corev1.Taint) bool { return starting(t, n.options.StartupTaint) })
}

// RemoveStartupTaint takes the taint Options.StartupTaint off the agent's Node, with the
// effects NoSchedule and NoExecute, if the scheduler may give out something of each of these
// resources by then. All other taints stay, also those that come meanwhile: the request
// names what it removes at which place, and how much there is of each resource, and where
// one of these has changed the server refuses it, and the Node is read anew. Where the Node,
// as it was last seen, has no such taint or nothing of a resource, no request is made. After
// 50 requests in a row it waits 3 s before each, together with Mark.
//
// It returns an error where the server refuses or does not answer, and where there is no
// Node; the caller tries again when it next has reason to.
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

// untaint is the JSON patch that takes the taints with a key away, while there is as much of
// these resources as now: a kubelet that has lost the agent says that there is nothing.
func untaint(node *Node, key string, resources []string) ([]byte, error) {
	var steps []step
	for _, name := range resources {
		amount := node.amounts[name]
		steps = append(steps, step{"test", allocatablePath(name), amount.String()})
	}
	for i, t := range slices.Backward(node.taints) { // what comes before keeps its place
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
