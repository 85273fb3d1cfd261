// SPDX-License-Identifier: Apache-2.0

package agentkube

import (
	"context"
	"fmt"
	"strings"
	"sync"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"k8s.io/client-go/util/flowcontrol"

	"example.com/gpu-agent/internal/kube"
)

// manager is the agent's name in the managedFields of its Node.
const manager = "gpu-agent"

// ourNode is the Node that the agent runs on: the server's last answer, and the agent's writes.
type ourNode struct {
	*apiServer
	// writes limits the requests for marks, conditions and taints, since others may undo what the
	// agent writes again and again.
	writes flowcontrol.RateLimiter

	mu sync.Mutex
	// last is the Node as the server returned it last. It is nil before the first answer, and while
	// there is no Node. Guarded by mu.
	last *Node
}

// lastNode returns the Node as last seen. If no watch has seen it yet, it lists the Node. It
// returns nil if there is none.
func (n *ourNode) lastNode(ctx context.Context) (*Node, error) {
	n.mu.Lock()
	node := n.last
	n.mu.Unlock()
	if node != nil {
		return node, nil
	}
	return n.listNode(ctx)
}

// setLast records the Node that a watch reports; nil is none.
func (n *ourNode) setLast(node *Node) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.last = node
}

// mayRequest waits until the Node may be written: after 50 requests in a row, once in 3 s.
func (n *ourNode) mayRequest(ctx context.Context) error {
	if err := n.writes.Wait(ctx); err != nil {
		return fmt.Errorf("wait, since others keep changing what the agent writes: %w", err)
	}
	return nil
}

// listNode returns the Node as the server has it now; nil if there is none.
func (n *ourNode) listNode(ctx context.Context) (node *Node, err error) {
	t := kube.Target{Resource: kube.Nodes, Name: n.options.NodeName}
	_, err = n.server.List(ctx, t, func(object *unstructured.Unstructured) {
		if object != nil {
			now := readNode(object)
			node = &now
		}
	})
	n.server.Note(ctx, "list", t.Resource.Resource, t.String(), err)
	return node, err
}

// patchNode makes one request and records the answer.
func (n *ourNode) patchNode(
	ctx context.Context, kind types.PatchType, body []byte, o metav1.PatchOptions, subresources ...string,
) (*Node, error) {
	bounded, cancel := context.WithTimeout(ctx, n.server.Timing.Request)
	defer cancel()
	object, err := n.server.API.Resource(kube.Nodes).Patch(bounded, n.options.NodeName, kind, body, o, subresources...)
	resource := strings.Join(append([]string{kube.Nodes.Resource}, subresources...), "/")
	trouble := err
	if apierrors.IsConflict(err) || kind == types.JSONPatchType && apierrors.IsInvalid(err) {
		trouble = nil // such a request may get this answer: the server works
	}
	n.server.Note(ctx, "patch", resource, n.options.NodeName, trouble)
	if err != nil {
		return nil, err
	}
	node := readNode(object)
	n.remember(&node)
	return &node, nil
}

// remember records the answer to a patch as the Node as last seen. It does so only if a watch is
// running, which will correct it, and if the answer is newer than what the watch reported. A wrong
// record would suppress a write.
func (n *ourNode) remember(patched *Node) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.last == nil {
		return
	}
	if order, err := resourceversion.CompareResourceVersion(patched.version, n.last.version); err == nil && order > 0 {
		n.last = patched
	}
}

// mayWrite returns an error for a key that the admission policy would refuse.
func (n *ourNode) mayWrite(name string) error {
	if rest, ok := strings.CutPrefix(name, n.options.Domain+"/"); !ok || rest == "" {
		return fmt.Errorf("%q is not below %s/, so the agent may not write it", name, n.options.Domain)
	}
	return nil
}
