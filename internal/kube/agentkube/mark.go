// SPDX-License-Identifier: Apache-2.0

package agentkube

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"strings"

	"example.com/gpu-agent/internal/brief"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
)

// markTries is the number of attempts if the Node changes at the same time. A kubelet writes to it
// every few seconds at most.
const markTries = 5

// Marks are all that the agent writes in the metadata of its Node.
type Marks struct {
	// Labels and Annotations are the agent's own, below Options.Domain. The agent overwrites values
	// of others there. Mark cuts an annotation after 4 KiB: if the annotations of a Node are too
	// long, the server refuses them, and the labels with them.
	Labels, Annotations map[string]string
	// Guests are labels below other domains. The agent writes each only while it has no other
	// manager. It leaves the label to others when they take it over.
	Guests map[string]string
	// GuestAnnotations are annotations below other domains, by the same rule.
	GuestAnnotations map[string]string
	// KeepLabels is true if the agent does not know what its labels should be. Then the labels that
	// it wrote before and does not name here stay.
	KeepLabels bool
}

// Mark writes m to the Node's metadata in one request, or in two if it must remove a key that
// others manage, too. It removes what the agent wrote before and m does not name, except for labels
// if m.KeepLabels is true. If the Node, as last seen, already has all of m, no request is made.
// After 50 requests in a row, those for conditions and the startup taint included, it waits 3 s
// before each.
//
// It returns an error if the server refuses or does not answer, and if there is no Node. It does
// not retry after such an error, but up to five times after a conflict.
func (n *ourNode) Mark(ctx context.Context, m Marks) error {
	if err := n.mark(ctx, m); err != nil {
		return fmt.Errorf("mark node %s: %w", n.options.NodeName, err)
	}
	return nil
}

func (n *ourNode) mark(ctx context.Context, m Marks) error {
	for _, own := range []map[string]string{m.Labels, m.Annotations} {
		for key := range own {
			if err := n.mayWrite(key); err != nil {
				return err
			}
		}
	}
	node, err := n.lastNode(ctx)
	for try := 1; ; try++ {
		if err == nil && node == nil {
			err = errors.New("the API server has no Node of this name")
		}
		if err != nil {
			return err
		}
		if err = n.applyMarks(ctx, node, m); err == nil || !apierrors.IsConflict(err) || try == markTries {
			return err
		}
		node, err = n.listNode(ctx)
	}
}

// applyMarks makes the request that a Node needs, if any. It decides by that Node whether a guest
// is free, and the request names the Node's version. The agent's own labels need force. But if the
// Node has changed, the server refuses the request, so force never overwrites a label of others.
func (n *ourNode) applyMarks(ctx context.Context, node *Node, m Marks) error {
	labels, annotations := n.wanted(node, m)
	if node.labels.has(labels, node.Labels) && node.annotations.has(annotations, node.Annotations) {
		return nil
	}
	if err := n.mayRequest(ctx); err != nil {
		return err
	}
	// A key with other managers is not removed when the agent stops applying it.
	gone := map[string]any{}
	n.addRemovals(gone, "labels", node.labels, labels)
	n.addRemovals(gone, "annotations", node.annotations, annotations)
	if len(gone) > 0 {
		body, err := json.Marshal(map[string]any{"metadata": gone})
		if err != nil {
			return fmt.Errorf("encode the request: %w", err)
		}
		node, err = n.patchNode(ctx, types.MergePatchType, body, metav1.PatchOptions{FieldManager: manager})
		if err != nil {
			return err
		}
		labels, annotations = n.wanted(node, m)
	}
	body, err := json.Marshal(map[string]any{"apiVersion": "v1", "kind": "Node", "metadata": map[string]any{
		"name": n.options.NodeName, "resourceVersion": node.version, "labels": labels, "annotations": annotations}})
	if err != nil {
		return fmt.Errorf("encode the request: %w", err)
	}
	_, err = n.patchNode(ctx, types.ApplyPatchType, body, metav1.PatchOptions{FieldManager: manager, Force: new(true)})
	return err
}

// wanted returns the labels and annotations that the agent should have on a Node.
func (n *ourNode) wanted(node *Node, m Marks) (labels, annotations map[string]string) {
	labels, annotations = map[string]string{}, map[string]string{}
	if m.KeepLabels {
		for key, owner := range node.labels {
			if value, there := node.Labels[key]; there && owner.agent() {
				labels[key] = value
			}
		}
	}
	for key, value := range m.Guests {
		if node.labels.free(key, node.Labels) {
			labels[key] = value
		}
	}
	maps.Copy(labels, m.Labels)
	for key, value := range m.GuestAnnotations {
		if node.annotations.free(key, node.Annotations) {
			annotations[key] = value
		}
	}
	for key, value := range m.Annotations {
		annotations[key] = brief.Cut(value, brief.Text)
	}
	return labels, annotations
}

// addRemovals adds to a merge patch the removal of keys below the agent's domain that the agent wrote
// and no longer wants, but that others manage, too. Below its domain the agent decides.
func (n *ourNode) addRemovals(patch map[string]any, field string, have owners, want map[string]string) {
	gone := map[string]any{}
	for key, o := range have {
		if _, wanted := want[key]; o.agent() && (o.others || o.patched) && !wanted && n.mayWrite(key) == nil {
			gone[key] = nil
		}
	}
	if len(gone) > 0 {
		patch[field] = gone
	}
}

// owners maps each key of labels or annotations to its managers. A key without managers is absent.
type owners map[string]owner

// owner is the set of managers of a key. applied is true if the agent applies the key, patched if
// an older agent patched it, and others if other managers have it by any means.
type owner struct{ applied, patched, others bool }

// agent reports whether the agent manages the key, alone or with others.
func (o owner) agent() bool { return o.applied || o.patched }

// free reports whether the agent may write the key: it is absent, or only the agent manages it.
func (o owners) free(key string, have map[string]string) bool {
	_, there := have[key]
	return !there || o[key].applied && !o[key].others
}

// has reports whether the agent applies exactly the keys of want, with these values.
func (o owners) has(want, have map[string]string) bool {
	for key, value := range want {
		if now, there := have[key]; !there || now != value || !o[key].applied {
			return false
		}
	}
	for key, owner := range o {
		if _, wanted := want[key]; owner.agent() && !wanted {
			return false
		}
	}
	return true
}

// readOwners returns the managers of a Node's labels and annotations.
func readOwners(object *unstructured.Unstructured) (labels, annotations owners) {
	labels, annotations = owners{}, owners{}
	for _, entry := range object.GetManagedFields() {
		if entry.FieldsV1 == nil {
			continue
		}
		var fields struct {
			Metadata struct {
				Labels      map[string]json.RawMessage `json:"f:labels"`
				Annotations map[string]json.RawMessage `json:"f:annotations"`
			} `json:"f:metadata"`
		}
		if json.Unmarshal(entry.FieldsV1.GetRawBytes(), &fields) != nil {
			continue
		}
		for _, each := range []struct {
			keys map[string]json.RawMessage
			into owners
		}{{fields.Metadata.Labels, labels}, {fields.Metadata.Annotations, annotations}} {
			for name := range each.keys {
				key, ok := strings.CutPrefix(name, "f:")
				if !ok {
					continue
				}
				o := each.into[key]
				switch {
				case entry.Manager != manager:
					o.others = true
				case entry.Operation == metav1.ManagedFieldsOperationApply:
					o.applied = true
				default:
					o.patched = true
				}
				each.into[key] = o
			}
		}
	}
	return labels, annotations
}
