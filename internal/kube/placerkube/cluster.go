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

// notSucceeded is the field selector for pods that have not succeeded. When a pod succeeds, the
// server reports it to the watch as deleted. Failed pods are selected: they are few, and a pod
// that a kubelet refused is one of them. A placer that has just started must know of those,
// too.
const notSucceeded = "status.phase!=Succeeded"

// RoomAnnotation is the annotation that Wake writes to a Node, without its domain.
const RoomAnnotation = "gpu.room"

// Cluster is a client of the API server for all nodes. Its methods may be called from several
// goroutines.
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
	// Wake gets half of the client's requests, so that the lease is renewed in time.
	return &Cluster{server: server, wakes: flowcontrol.NewTokenBucketRateLimiter(50, 50)}, nil
}

// Fleet receives the objects of a cluster from Watch. Its methods are called from several
// goroutines; calls for one kind of object do not overlap.
type Fleet interface {
	SetNode(*corev1.Node)
	DeleteNode(name string)
	// SetPod is called for pods that have not succeeded, and DeletePod for pods that have
	// succeeded or were deleted.
	SetPod(*corev1.Pod)
	DeletePod(uid string)
	// SetGPUNode is called with nil if there is no such object, or if it cannot be read. It
	// returns the reason why it does not use the object, which Watch logs.
	SetGPUNode(name string, says *gpunode.Status) error
	// Listed is called with "nodes", "pods" or "gpunodes" after each complete list of these.
	Listed(kind string)
}

// Watch reports the cluster's Nodes, the pods that have not succeeded, and the GPUNodes, until
// ctx ends. It returns the error of ctx, and no other.
//
// Watch lists each kind in pages, watches it from there, and lists it again every
// Options.Relist. A list also reports the objects that are gone since. If the cluster lacks the
// definition of GPUNodes, Watch retries as it does when the server does not answer.
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
			Chosen: notSucceeded, ID: uid, Gone: into.DeletePod,
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
					c.server.Ration.Log(slog.LevelError, "ignoring a malformed GPUNode", nil,
						"node", name, "err", err)
				}
				if err := into.SetGPUNode(name, status); err != nil {
					c.server.Ration.Log(slog.LevelError, "ignoring a node whose GPUNode is not valid", nil,
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

// uid returns the object's UID, which differs from that of an earlier object of the same name.
func uid(o *unstructured.Unstructured) string { return string(o.GetUID()) }

// convert fills into, a typed object. It returns false if the object is malformed, which a
// proxy in between may cause.
func (c *Cluster) convert(from *unstructured.Unstructured, into any) bool {
	err := runtime.DefaultUnstructuredConverter.FromUnstructured(from.Object, into)
	if err != nil {
		c.server.Ration.Log(slog.LevelError, "ignoring a malformed object", []any{"kind", from.GetKind()},
			"namespace", from.GetNamespace(), "name", from.GetName(), "err", err)
	}
	return err == nil
}

// Wake makes the scheduler look at a Node again. The scheduler does not watch GPUNodes, but it
// reacts to a written Node. So Wake writes an annotation with the time. It sends at most fifty
// a second, and the other callers wait.
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
		trouble = nil // it was deleted; the watch reports that, too
	}
	// One name for all Nodes: a missing right fails for all alike.
	c.server.Note(ctx, "patch", kube.Nodes.Resource, "", trouble)
	if trouble != nil {
		return fmt.Errorf("wake the scheduler for node %s: %w", node, err)
	}
	return nil
}

// placerManager is the placer's name in an object's managedFields.
const placerManager = "gpu-placer"
