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

// markTries is how often a request is repeated because the Node has changed
// meanwhile. A kubelet writes to it every few seconds at most.
const markTries = 5

// Marks are all that the agent writes in the metadata of its Node.
type Marks struct {
	// Labels and Annotations are the agent's own, below Options.Domain. The
	// agent overwrites what others write there. An annotation beyond 4 KiB is cut: the server
	// refuses a Node whose annotations are too long, and the labels with them.
	Labels, Annotations map[string]string
	// Guests are labels below other domains. Each is written only while nobody
	// else has it, and left to anyone who takes it over.
	Guests map[string]string
	// GuestAnnotations are annotations below other domains, by the same rule.
	GuestAnnotations map[string]string
	// KeepLabels keeps the labels that the agent wrote before and does not name
	// here: for when it does not know what they should be.
	KeepLabels bool
}

// Mark writes m to the Node's metadata, in one request (two where somebody else manages
// a key that is to be removed); what the agent wrote before and m does not name is
// removed, unless it is to be kept. Where the Node, as it was last seen, has it all
// already, no request is made: calling it again is free. After 50 requests in a row, those for
// conditions and the startup taint among them, it waits 3 s before each.
//
// It returns an error where the server refuses or does not answer, and where there is
// no Node; the caller tries again when it next has reason to.
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

// applyMarks makes the request that a Node needs, if any. Whether a guest is free
// was decided on that Node, so the server refuses the request where it has another
// version by now: the force that the agent's own labels need then never overwrites a
// label of somebody else.
func (n *ourNode) applyMarks(ctx context.Context, node *Node, m Marks) error {
	labels, annotations := n.wanted(node, m)
	if node.labels.has(labels, node.Labels) && node.annotations.has(annotations, node.Annotations) {
		return nil
	}
	if err := n.mayRequest(ctx); err != nil {
		return err
	}
	// A key that others manage too is not removed when the agent stops managing it.
	gone := map[string]any{}
	n.shared(gone, "labels", node.labels, labels)
	n.shared(gone, "annotations", node.annotations, annotations)
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

// wanted is what the agent writes on a Node.
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

// shared adds to a merge patch the keys below the agent's domain that it has written
// and does not want, and that others have written as well: there the agent decides.
func (n *ourNode) shared(patch map[string]any, field string, have owners, want map[string]string) {
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

// owners says for each key of a map in a Node's metadata who manages it; a key
// that nobody manages is not in it.
type owners map[string]owner

// owner says who: the agent by applying, an older agent by patching, or others by
// any means.
type owner struct{ applied, patched, others bool }

// agent reports whether the key is the agent's, alone or with others.
func (o owner) agent() bool { return o.applied || o.patched }

// free reports whether nobody but the agent manages a key.
func (o owners) free(key string, have map[string]string) bool {
	_, there := have[key]
	return !there || o[key].applied && !o[key].others
}

// has reports whether exactly these are the agent's, with these values.
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

// readOwners finds who manages a Node's labels and annotations.
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
