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

// manager is the agent's name among the managers of its Node's fields.
const manager = "gpu-agent"

// ourNode is the Node that the agent runs on: what the server said of it last, and
// what the agent writes there.
type ourNode struct {
	*apiServer
	// writes bounds the requests for marks, conditions and taints: somebody may take away
	// what the agent writes, again and again.
	writes flowcontrol.RateLimiter

	mu sync.Mutex
	// last is what the server said last of the Node; nil before the first answer and
	// while there is none. Guarded by mu.
	last *Node
}

// lastNode is what the server said last of the Node; where no watch has spoken
// yet, what it says now. It is nil while there is none.
func (n *ourNode) lastNode(ctx context.Context) (*Node, error) {
	n.mu.Lock()
	node := n.last
	n.mu.Unlock()
	if node != nil {
		return node, nil
	}
	return n.listNode(ctx)
}

// see takes what a watch says of the Node.
func (n *ourNode) see(node *Node) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.last = node
}

// mayRequest waits until the Node may be written. After 50 requests in a row that is once in
// 3 s.
func (n *ourNode) mayRequest(ctx context.Context) error {
	if err := n.writes.Wait(ctx); err != nil {
		return fmt.Errorf("wait, since somebody keeps changing what is written: %w", err)
	}
	return nil
}

// listNode is what the server says of the Node now.
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

// patchNode makes one request and remembers the answer.
func (n *ourNode) patchNode(
	ctx context.Context, kind types.PatchType, body []byte, o metav1.PatchOptions, subresources ...string,
) (*Node, error) {
	bounded, cancel := context.WithTimeout(ctx, n.server.Timing.Request)
	defer cancel()
	object, err := n.server.API.Resource(kube.Nodes).Patch(bounded, n.options.NodeName, kind, body, o, subresources...)
	resource := strings.Join(append([]string{kube.Nodes.Resource}, subresources...), "/")
	trouble := err
	if apierrors.IsConflict(err) || kind == types.JSONPatchType && apierrors.IsInvalid(err) {
		trouble = nil // an answer, and in the nature of the request
	}
	n.server.Note(ctx, "patch", resource, n.options.NodeName, trouble)
	if err != nil {
		return nil, err
	}
	node := readNode(object)
	n.remember(&node)
	return &node, nil
}

// remember takes the answer to a patch for what the server said last, but only
// where a watch will correct it, and only if the watch was not faster: a wrong
// memory would suppress a write.
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

// mayWrite refuses what the admission policy would.
func (n *ourNode) mayWrite(name string) error {
	if rest, ok := strings.CutPrefix(name, n.options.Domain+"/"); !ok || rest == "" {
		return fmt.Errorf("%q is not below %s/, and not the agent's to write", name, n.options.Domain)
	}
	return nil
}
