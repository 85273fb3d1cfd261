// SPDX-License-Identifier: Apache-2.0

package placerkube

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/flowcontrol"

	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/internal/kube"
)

// lasting chooses pods that have not succeeded. The server says of one that succeeds that it
// is deleted. Those that have failed are few, and a pod that a kubelet has refused is one of
// them: who begins to look then is to know of it, too.
const lasting = "status.phase!=Succeeded"

// RoomAnnotation is the annotation of a Node that Wake writes, without the domain.
const RoomAnnotation = "gpu.room"

// Cluster speaks to one API server for a process that is about all nodes. Its methods may be
// called from several goroutines.
type Cluster struct {
	server *kube.Server
	wakes  flowcontrol.RateLimiter
}

// New prepares a client. It reads the credentials but makes no request, so it succeeds while
// the API server is unreachable.
func New(o kube.Options) (*Cluster, error) {
	server, err := kube.Connect(o, 100)
	if err != nil {
		return nil, err
	}
	// Half of what the client may send, so that a lease is renewed in time.
	return &Cluster{server: server, wakes: flowcontrol.NewTokenBucketRateLimiter(50, 50)}, nil
}

// Fleet is told what there is in a cluster. Its methods are called from several goroutines;
// calls for one kind of object do not overlap.
type Fleet interface {
	SetNode(*corev1.Node)
	DeleteNode(name string)
	// SetPod is called for pods that have not succeeded, DeletePod for those that have, too.
	SetPod(*corev1.Pod)
	DeletePod(uid string)
	// SetGPUNode is called with nil where there is no such object, or none that can be read. Its
	// error says why an object is not used, which is logged.
	SetGPUNode(name string, says *gpunode.Status) error
	// Listed is called with "nodes", "pods" or "gpunodes" each time that all of them have
	// been told.
	Listed(kind string)
}

// Watch tells of a cluster's nodes, of the pods that have not succeeded, and of GPUNodes, until
// ctx ends, which is the only error that it returns. Each kind is listed in pages and watched
// from there, and listed again every Options.Relist; what is gone by then is told. A cluster
// without the definition of GPUNodes is asked again like a server that does not answer.
func (c *Cluster) Watch(ctx context.Context, into Fleet) error {
	g, ctx := errgroup.WithContext(ctx)
	for resource, all := range map[schema.GroupVersionResource]*kube.Census{
		kube.Nodes: {
			ID: (*unstructured.Unstructured).GetName, Gone: into.DeleteNode,
			Set: func(object *unstructured.Unstructured) {
				node := new(corev1.Node)
				if c.convert(object, node) {
					into.SetNode(node)
				}
			},
		},
		kube.Pods: {
			Chosen: lasting, ID: uid, Gone: into.DeletePod,
			Set: func(object *unstructured.Unstructured) {
				pod := new(corev1.Pod)
				if c.convert(object, pod) {
					into.SetPod(pod)
				}
			},
		},
		kube.GPUNodes(c.server.Options.Domain): {
			ID: (*unstructured.Unstructured).GetName, Gone: func(name string) { _ = into.SetGPUNode(name, nil) },
			Set: func(object *unstructured.Unstructured) {
				name := object.GetName()
				status, err := kube.ReadGPUNode(object)
				if err != nil {
					c.server.Ration.Log(slog.LevelError, "taking a malformed GPUNode for none", nil,
						"node", name, "err", err)
				}
				if err := into.SetGPUNode(name, status); err != nil {
					c.server.Ration.Log(slog.LevelError, "passing over a node whose GPUNode is not valid", nil,
						"node", name, "err", err)
				}
			},
		},
	} {
		all.Listed = func() { into.Listed(resource.Resource) }
		g.Go(func() error { return c.server.Follow(ctx, kube.Target{Resource: resource, All: all}, nil) })
	}
	return g.Wait()
}

// uid tells an object from one that had its name before.
func uid(o *unstructured.Unstructured) string { return string(o.GetUID()) }

// convert makes a typed object; false where that makes no sense, which a proxy in between
// may bring about.
func (c *Cluster) convert(from *unstructured.Unstructured, into any) bool {
	err := runtime.DefaultUnstructuredConverter.FromUnstructured(from.Object, into)
	if err != nil {
		c.server.Ration.Log(slog.LevelError, "ignoring a malformed object", []any{"kind", from.GetKind()},
			"namespace", from.GetNamespace(), "name", from.GetName(), "err", err)
	}
	return err == nil
}

// Wake makes the scheduler look at a Node again, by an annotation with the time: to it a
// Node that is written is news, and a GPUNode is not. Fifty of these a second are sent; the
// others wait.
func (c *Cluster) Wake(ctx context.Context, node string) error {
	if err := c.wakes.Wait(ctx); err != nil {
		return err
	}
	body, err := json.Marshal(map[string]any{"metadata": map[string]any{"annotations": map[string]string{
		c.server.Options.Domain + "/" + RoomAnnotation: c.server.Now().UTC().Format("2006-01-02T15:04:05.000Z07:00"),
	}}})
	if err != nil {
		return fmt.Errorf("encode the request: %w", err)
	}
	bounded, cancel := context.WithTimeout(ctx, c.server.Timing.Request)
	defer cancel()
	_, err = c.server.API.Resource(kube.Nodes).
		Patch(bounded, node, types.MergePatchType, body, metav1.PatchOptions{FieldManager: placerManager})
	trouble := err
	if apierrors.IsNotFound(err) {
		trouble = nil // it was deleted, which the watch tells too
	}
	// One name for all: what fails, a missing right, fails for all alike.
	c.server.Note(ctx, "patch", kube.Nodes.Resource, "", trouble)
	if trouble != nil {
		return fmt.Errorf("wake the scheduler for node %s: %w", node, err)
	}
	return nil
}

// placerManager is the placer's name among the managers of an object's fields.
const placerManager = "gpu-placer"
