// SPDX-License-Identifier: Apache-2.0

package kube

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
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/util/flowcontrol"

	"example.com/gpu-agent/internal/gpunode"
)

// page is how many objects of a cluster are asked for at a time.
const page = 500

// lasting chooses pods that have not succeeded. The server says of one that succeeds that it
// is deleted. Those that have failed are few, and a pod that a kubelet has refused is one of
// them: who begins to look then is to know of it, too.
const lasting = "status.phase!=Succeeded"

// RoomAnnotation is the annotation of a Node that Wake writes, without the domain.
const RoomAnnotation = "gpu.room"

// Cluster speaks to one API server for a process that is about all nodes. Its methods may be
// called from several goroutines.
type Cluster struct {
	*apiServer
	wakes flowcontrol.RateLimiter
}

// NewCluster prepares a client; Options.NodeName is not used. It reads the credentials but
// makes no request, so it succeeds while the API server is unreachable.
func NewCluster(o Options) (*Cluster, error) {
	up, err := prepare(o, 100)
	if err != nil {
		return nil, err
	}
	// Half of what the client may send, so that a lease is renewed in time.
	return &Cluster{apiServer: up, wakes: flowcontrol.NewTokenBucketRateLimiter(50, 50)}, nil
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
	for resource, all := range map[schema.GroupVersionResource]*census{
		nodes: {id: (*unstructured.Unstructured).GetName, gone: into.DeleteNode, set: func(object *unstructured.Unstructured) {
			node := new(corev1.Node)
			if c.convert(object, node) {
				into.SetNode(node)
			}
		}},
		pods: {chosen: lasting, id: func(object *unstructured.Unstructured) string { return string(object.GetUID()) }, gone: into.DeletePod, set: func(object *unstructured.Unstructured) {
			pod := new(corev1.Pod)
			if c.convert(object, pod) {
				into.SetPod(pod)
			}
		}},
		{Group: c.options.Domain, Version: gpunode.Version, Resource: gpunode.Plural}: {
			id: (*unstructured.Unstructured).GetName, gone: func(name string) { _ = into.SetGPUNode(name, nil) },
			set: func(object *unstructured.Unstructured) {
				status, err := readGPUNode(object)
				if err != nil {
					c.ration.Log(slog.LevelError, "taking a malformed GPUNode for none", nil, "node", object.GetName(), "err", err)
				}
				if err := into.SetGPUNode(object.GetName(), status); err != nil {
					c.ration.Log(slog.LevelError, "passing over a node whose GPUNode says what cannot be", nil, "node", object.GetName(), "err", err)
				}
			},
		},
	} {
		all.listed = func() { into.Listed(resource.Resource) }
		g.Go(func() error { return c.follow(ctx, target{resource: resource, all: all}, nil) })
	}
	return g.Wait()
}

// convert makes a typed object; false where that makes no sense, which a proxy in between
// may bring about.
func (c *Cluster) convert(from *unstructured.Unstructured, into any) bool {
	err := runtime.DefaultUnstructuredConverter.FromUnstructured(from.Object, into)
	if err != nil {
		c.ration.Log(slog.LevelError, "ignoring a malformed object", []any{"kind", from.GetKind()}, "namespace", from.GetNamespace(), "name", from.GetName(), "err", err)
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
		c.options.Domain + "/" + RoomAnnotation: c.now().UTC().Format("2006-01-02T15:04:05.000Z07:00"),
	}}})
	if err != nil {
		return fmt.Errorf("encode the request: %w", err)
	}
	bounded, cancel := context.WithTimeout(ctx, c.timing.request)
	defer cancel()
	_, err = c.api.Resource(nodes).Patch(bounded, node, types.MergePatchType, body, metav1.PatchOptions{FieldManager: placerManager})
	trouble := err
	if apierrors.IsNotFound(err) {
		trouble = nil // it was deleted, which the watch tells too
	}
	c.note(ctx, "patch", nodes.Resource, "", trouble) // one name for all: what fails, a missing right, fails for all alike
	if trouble != nil {
		return fmt.Errorf("wake the scheduler for node %s: %w", node, err)
	}
	return nil
}

// placerManager is the placer's name among the managers of an object's fields.
const placerManager = "gpu-placer"

// census is told of all objects of a resource.
type census struct {
	// chosen is a field selector, empty for all objects, and id what tells one from others.
	chosen string
	id     func(*unstructured.Unstructured) string
	set    func(*unstructured.Unstructured)
	gone   func(id string)
	listed func()
	// known are the objects that were told of and are not gone.
	known map[string]bool
}

// saw tells of one event.
func (a *census) saw(kind watch.EventType, object *unstructured.Unstructured) {
	switch id := a.id(object); kind {
	case watch.Added, watch.Modified:
		a.known[id] = true
		a.set(object)
	case watch.Deleted:
		delete(a.known, id)
		a.gone(id)
	}
}

// listAll reads all objects, page by page, and returns the version to watch from.
func (s *apiServer) listAll(ctx context.Context, t target) (string, error) {
	there := map[string]bool{}
	if t.all.known == nil {
		t.all.known = map[string]bool{}
	}
	for o := (metav1.ListOptions{FieldSelector: t.selector(), Limit: page}); ; {
		version, err := s.listPage(ctx, t, &o, there)
		if err != nil {
			return "", err
		}
		if o.Continue != "" {
			continue
		}
		for id := range t.all.known {
			if !there[id] {
				t.all.gone(id)
			}
		}
		t.all.known = there
		t.all.listed()
		return version, nil
	}
}

// listPage reads one page and notes in o where the next one begins.
func (s *apiServer) listPage(ctx context.Context, t target, o *metav1.ListOptions, there map[string]bool) (string, error) {
	bounded, cancel := context.WithTimeout(ctx, s.timing.request)
	defer cancel()
	list, err := t.in(s.api).List(bounded, *o)
	s.allowed("list", t, err)
	if err != nil {
		return "", err
	}
	for i := range list.Items {
		id := t.all.id(&list.Items[i])
		there[id], t.all.known[id] = true, true
		t.all.set(&list.Items[i])
	}
	o.Continue = list.GetContinue()
	return list.GetResourceVersion(), nil
}
