// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"encoding/json"
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"
)

// PatchNode sets labels and annotations of the agent's Node; a nil value
// deletes the key. Keys that already are as wanted, by what the server said
// last, are left out, and where none remains no request is made: calling it
// again with the same maps is free. Keys not named stay as they are.
//
// The server's refusal or absence is returned; the caller tries again when it
// next has reason to.
func (c *Client) PatchNode(ctx context.Context, labels, annotations map[string]*string) error {
	c.mu.Lock()
	node := c.node
	c.mu.Unlock()
	if node != nil {
		labels, annotations = differing(labels, node.Labels), differing(annotations, node.Annotations)
	}
	if len(labels) == 0 && len(annotations) == 0 {
		return nil
	}
	metadata := map[string]any{}
	if len(labels) > 0 {
		metadata["labels"] = labels
	}
	if len(annotations) > 0 {
		metadata["annotations"] = annotations
	}
	body, err := json.Marshal(map[string]any{"metadata": metadata})
	if err != nil {
		return fmt.Errorf("encode the patch of node %s: %w", c.options.NodeName, err)
	}
	bounded, cancel := context.WithTimeout(ctx, c.timing.request)
	defer cancel()
	object, err := c.api.Resource(nodes).Patch(bounded, c.options.NodeName, types.MergePatchType, body,
		metav1.PatchOptions{FieldManager: "gpu-agent"})
	c.note(ctx, "patch", nodes.Resource, c.options.NodeName, err)
	if err != nil {
		return fmt.Errorf("patch node %s: %w", c.options.NodeName, err)
	}
	c.remember(object)
	return nil
}

// remember takes the answer to a patch for what the server said last, but only
// where a watch will correct it, and only if the watch was not faster: a wrong
// memory would suppress a write.
func (c *Client) remember(object *unstructured.Unstructured) {
	patched := readNode(object)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.node == nil {
		return
	}
	if order, err := resourceversion.CompareResourceVersion(patched.version, c.node.version); err == nil && order > 0 {
		c.node = &patched
	}
}

func differing(want map[string]*string, have map[string]string) map[string]*string {
	out := map[string]*string{}
	for key, value := range want {
		now, ok := have[key]
		if value == nil && !ok || value != nil && ok && now == *value {
			continue
		}
		out[key] = value
	}
	return out
}
