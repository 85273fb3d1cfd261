// SPDX-License-Identifier: Apache-2.0

package agentkube

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"

	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/internal/kube"
)

// ourGPUNode is the GPUNode of the agent's Node.
type ourGPUNode struct {
	*ourNode

	mu sync.Mutex
	// Guarded by mu. version is the resource version of the last answer since the last list; empty if there
	// was none, and while the server has no GPUNode. owned is true if the present Node owns the object.
	// unsupported is true while the server does not know GPUNodes, or does not allow them.
	version     string
	owned       bool
	unsupported bool
}

func (g *ourGPUNode) gpuNodes() schema.GroupVersionResource {
	return kube.GPUNodes(g.options.Domain)
}

// WatchGPUNode follows the GPUNode of the agent's Node until ctx ends. It returns the error of ctx,
// and no other. It calls fn with the first answer of the server, and then with every other state of
// the object, also with one that WriteGPUNode has returned already.
//
// Status is nil while there is no object. The error is set while there can be none: the cluster
// lacks the CustomResourceDefinition, or the agent lacks the permission. WatchGPUNode then tries
// again with growing pauses, up to Options.Relist.
func (g *ourGPUNode) WatchGPUNode(ctx context.Context, fn func(*gpunode.Status, error)) error {
	t := kube.Target{Resource: g.gpuNodes(), Name: g.options.NodeName, Missing: func(err error) {
		if apierrors.IsNotFound(err) {
			err = fmt.Errorf("the cluster has no resource %s.%s: apply deployments/base/crd.yaml (%w)",
				gpunode.Plural, g.options.Domain, err)
		}
		g.mu.Lock()
		g.unsupported = true
		g.mu.Unlock()
		fn(nil, err)
	}, Listed: func() {
		g.mu.Lock()
		g.version = "" // a list is right also if it has an older object than an answer had
		g.mu.Unlock()
	}}
	return g.server.Follow(ctx, t, func(object *unstructured.Unstructured) {
		status, err := kube.ReadGPUNode(object)
		if err != nil {
			g.server.Log.Error("ignoring a malformed GPUNode", "node", g.options.NodeName, "err", err)
			return // the next WriteGPUNode overwrites it
		}
		if g.record(object) {
			fn(status, nil)
		}
	})
}

// record stores the object that the server has; nil is none. It returns false, and stores nothing,
// if a later answer is known already.
func (g *ourGPUNode) record(object *unstructured.Unstructured) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.unsupported = false
	if object == nil {
		g.version, g.owned = "", false
		return true
	}
	order, err := resourceversion.CompareResourceVersion(object.GetResourceVersion(), g.version)
	if g.version != "" && err == nil && order < 0 {
		return false
	}
	g.version = object.GetResourceVersion()
	g.owned = slices.ContainsFunc(object.GetOwnerReferences(), func(o metav1.OwnerReference) bool {
		return o.UID == g.nodeUID()
	})
	return true
}

// lacksGPUNodes reports whether the server is known to lack or forbid GPUNodes.
func (g *ourGPUNode) lacksGPUNodes() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.unsupported
}

// nodeUID returns the UID of the Node as last seen; empty if there is none.
func (g *ourGPUNode) nodeUID() types.UID {
	g.ourNode.mu.Lock()
	defer g.ourNode.mu.Unlock()
	if g.last == nil {
		return ""
	}
	return g.last.uid
}

// WriteGPUNode writes want as the status of the GPUNode. It creates the object with the Node as its
// owner if there is none. It makes one request, or two if the object is missing or belongs to a
// deleted Node. It returns what the server then has. That is less than want if the
// CustomResourceDefinition is older than the agent.
//
// It returns an error if the server refuses or does not answer, and if there is no Node. It does
// not retry by itself.
func (g *ourGPUNode) WriteGPUNode(ctx context.Context, want *gpunode.Status) (*gpunode.Status, error) {
	for try := 0; ; try++ {
		object, err := g.writeGPUNode(ctx, want)
		if apierrors.IsNotFound(err) && try == 0 { // it was deleted, and the watch has not reported that yet
			g.record(nil)
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("write GPUNode %s: %w", g.options.NodeName, err)
		}
		return kube.ReadGPUNode(object)
	}
}

func (g *ourGPUNode) writeGPUNode(ctx context.Context, want *gpunode.Status) (*unstructured.Unstructured, error) {
	node, err := g.lastNode(ctx)
	if err == nil && node == nil {
		err = errors.New("the API server has no Node of this name")
	}
	if err != nil {
		return nil, err
	}
	g.mu.Lock()
	owned := g.owned
	g.mu.Unlock()
	metadata := map[string]any{"name": g.options.NodeName}
	if !owned {
		owner := metav1.OwnerReference{APIVersion: "v1", Kind: "Node", Name: g.options.NodeName, UID: node.uid}
		owned := map[string]any{"name": g.options.NodeName, "ownerReferences": []any{owner}}
		if _, err := g.applyGPUNode(ctx, map[string]any{"metadata": owned}); err != nil {
			return nil, err
		}
	}
	return g.applyGPUNode(ctx, map[string]any{"metadata": metadata, "status": want}, "status")
}

// applyGPUNode makes one request. A server-side apply creates an object that does not exist, but
// without its status. It removes what others have written in the status, since the definition makes
// the status one atomic value.
func (g *ourGPUNode) applyGPUNode(
	ctx context.Context, fields map[string]any, subresources ...string,
) (*unstructured.Unstructured, error) {
	fields["apiVersion"], fields["kind"] = g.options.Domain+"/"+gpunode.Version, gpunode.Kind
	body, err := json.Marshal(fields)
	if err != nil {
		return nil, fmt.Errorf("encode the request: %w", err)
	}
	bounded, cancel := context.WithTimeout(ctx, g.server.Timing.Request)
	defer cancel()
	object, err := g.server.API.Resource(g.gpuNodes()).Patch(bounded, g.options.NodeName, types.ApplyPatchType, body,
		metav1.PatchOptions{FieldManager: manager, Force: new(true)}, subresources...)
	trouble := err
	if apierrors.IsNotFound(err) {
		trouble = nil // it was deleted; the watch reports that, too
	}
	g.server.Note(ctx, "patch", gpunode.Plural, g.options.NodeName, trouble)
	if err != nil {
		return nil, err
	}
	g.record(object)
	return object, nil
}

// RemoveGPUNode deletes the GPUNode of the agent's Node. It is no error if the object does not
// exist, or if the cluster lacks the definition.
func (g *ourGPUNode) RemoveGPUNode(ctx context.Context) error {
	bounded, cancel := context.WithTimeout(ctx, g.server.Timing.Request)
	defer cancel()
	err := g.server.API.Resource(g.gpuNodes()).Delete(bounded, g.options.NodeName, metav1.DeleteOptions{})
	if apierrors.IsNotFound(err) {
		err = nil
	}
	g.server.Note(ctx, "delete", gpunode.Plural, g.options.NodeName, err)
	if err != nil {
		return fmt.Errorf("delete GPUNode %s: %w", g.options.NodeName, err)
	}
	return nil
}
