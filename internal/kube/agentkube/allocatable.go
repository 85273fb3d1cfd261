// SPDX-License-Identifier: Apache-2.0

package agentkube

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"

	"example.com/gpu-agent/internal/amount"
)

// lowerTries is the number of attempts if the kubelet writes other amounts at the same time.
const lowerTries = 5

// LowerAllocatable lowers the allocatable amounts of resources on the agent's Node to want, and
// returns the names of those that it lowered, sorted. It lowers a resource only if the Node, as
// last seen, has more of it than that. If there is no such resource, no request is made.
//
// It cannot raise an amount. The request names the amounts that it replaces. If one has changed,
// the server refuses the request, and LowerAllocatable reads the Node again. It fails if a name is
// not below Options.ResourceDomain, if the server refuses or does not answer, and if there is no
// Node.
func (n *ourNode) LowerAllocatable(ctx context.Context, want map[string]int64) (lowered []string, err error) {
	for name := range want {
		if rest, ok := strings.CutPrefix(name, n.options.ResourceDomain+"/"); !ok || rest == "" {
			return nil, fmt.Errorf("lower the allocatable %s of node %s: it is not below %s/, "+
				"so the agent may not write it", name, n.options.NodeName, n.options.ResourceDomain)
		}
	}
	if lowered, err = n.lower(ctx, want); err != nil {
		return nil, fmt.Errorf("lower the allocatable %s of node %s: %w",
			strings.Join(slices.Sorted(maps.Keys(want)), ", "), n.options.NodeName, err)
	}
	return lowered, nil
}

func (n *ourNode) lower(ctx context.Context, want map[string]int64) ([]string, error) {
	node, err := n.lastNode(ctx)
	for try := 1; ; try++ {
		if err == nil && node == nil {
			err = errors.New("the API server has no Node of this name")
		}
		if err != nil {
			return nil, err
		}
		names, body, err := lowering(node.amounts, want)
		if err != nil || len(names) == 0 {
			return nil, err
		}
		_, err = n.patchNode(ctx, types.JSONPatchType, body, metav1.PatchOptions{FieldManager: manager}, "status")
		if err == nil {
			return names, nil
		}
		// The server's answers to a failed test and to a missing path.
		if !apierrors.IsInvalid(err) && !apierrors.IsConflict(err) || try == lowerTries {
			return nil, err
		}
		if node, err = n.listNode(ctx); err != nil {
			return nil, err
		}
	}
}

// step is one operation of a JSON patch.
type step struct {
	Op    string `json:"op"`
	Path  string `json:"path"`
	Value string `json:"value,omitempty"`
}

// lowering returns the JSON patch that lowers amounts to want, and the names of the resources that
// it lowers. Both are nil if there are none.
func lowering(have map[string]resource.Quantity, want map[string]int64) (names []string, patch []byte, err error) {
	var steps []step
	for _, name := range slices.Sorted(maps.Keys(want)) {
		now, there := have[name]
		if !there || now.Value() <= want[name] {
			continue
		}
		names = append(names, name)
		path := allocatablePath(name)
		// In the kubelet's format, so that the kubelet finds nothing to change.
		steps = append(steps, step{"test", path, now.String()},
			step{"replace", path, resource.NewQuantity(want[name], resource.DecimalSI).String()})
	}
	if len(steps) == 0 {
		return nil, nil, nil
	}
	if patch, err = json.Marshal(steps); err != nil {
		return nil, nil, fmt.Errorf("encode the patch: %w", err)
	}
	return names, patch, nil
}

// allocatablePath returns the path of a resource in a JSON patch of a Node.
func allocatablePath(name string) string {
	return "/status/allocatable/" + strings.NewReplacer("~", "~0", "/", "~1").Replace(name)
}

// readAmounts returns the allocatable amount of each extended resource. A slash in the name
// distinguishes these from cpu, memory and the like. It leaves out malformed amounts.
func readAmounts(object *unstructured.Unstructured) map[string]resource.Quantity {
	amounts, _, _ := unstructured.NestedStringMap(object.Object, "status", "allocatable")
	out := map[string]resource.Quantity{}
	for name, value := range amounts {
		if amount.Check(value) != nil || !strings.Contains(name, "/") {
			continue
		}
		if q, err := resource.ParseQuantity(value); err == nil {
			out[name] = q
		}
	}
	return out
}

// allocatable calls Options.Allocatable with the amounts of a Node.
func (n *ourNode) allocatable(node *Node) {
	if n.options.Allocatable == nil {
		return
	}
	amounts := map[string]int64{}
	for name, q := range node.amounts {
		amounts[name] = q.Value()
	}
	n.options.Allocatable(amounts)
}
