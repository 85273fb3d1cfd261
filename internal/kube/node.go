// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"fmt"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"
)

// manager is the agent's name among the managers of its Node's fields.
const manager = "gpu-agent"

// lastNode is what the server said last of the Node; where no watch has spoken
// yet, what it says now. It is nil while there is none.
func (c *Client) lastNode(ctx context.Context) (*Node, error) {
	c.mu.Lock()
	node := c.node
	c.mu.Unlock()
	if node != nil {
		return node, nil
	}
	return c.listNode(ctx)
}

// listNode is what the server says of the Node now.
func (c *Client) listNode(ctx context.Context) (node *Node, err error) {
	t := target{nodes, "", c.options.NodeName}
	_, err = c.list(ctx, t, func(object *unstructured.Unstructured) {
		if object != nil {
			now := readNode(object)
			node = &now
		}
	})
	c.note(ctx, "list", t.resource.Resource, t.String(), err)
	return node, err
}

// patchNode makes one request and remembers the answer.
func (c *Client) patchNode(ctx context.Context, kind types.PatchType, body []byte, o metav1.PatchOptions, subresources ...string) (*Node, error) {
	bounded, cancel := context.WithTimeout(ctx, c.timing.request)
	defer cancel()
	object, err := c.api.Resource(nodes).Patch(bounded, c.options.NodeName, kind, body, o, subresources...)
	resource := strings.Join(append([]string{nodes.Resource}, subresources...), "/")
	trouble := err
	if apierrors.IsConflict(err) {
		trouble = nil // an answer, and in the nature of the request
	}
	c.note(ctx, "patch", resource, c.options.NodeName, trouble)
	if err != nil {
		return nil, err
	}
	node := readNode(object)
	c.remember(&node)
	return &node, nil
}

// remember takes the answer to a patch for what the server said last, but only
// where a watch will correct it, and only if the watch was not faster: a wrong
// memory would suppress a write.
func (c *Client) remember(patched *Node) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.node == nil {
		return
	}
	if order, err := resourceversion.CompareResourceVersion(patched.version, c.node.version); err == nil && order > 0 {
		c.node = patched
	}
}

// mayWrite refuses what the admission policy would.
func (c *Client) mayWrite(name string) error {
	if rest, ok := strings.CutPrefix(name, c.options.Domain+"/"); !ok || rest == "" {
		return fmt.Errorf("%q is not below %s/, and not the agent's to write", name, c.options.Domain)
	}
	return nil
}
