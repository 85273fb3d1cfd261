// SPDX-License-Identifier: Apache-2.0

package placerkube

import (
	"context"
	"encoding/json"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"example.com/gpu-agent/internal/kube"
)

// Objects is told of the objects of a resource. Calls do not overlap.
type Objects interface {
	Set(*unstructured.Unstructured)
	Delete(uid string)
	// Listed is called each time that all of them have been told.
	Listed()
}

// Follow tells of all objects of a resource until ctx ends, which is the only error that it
// returns, as Watch does of pods. Where the server does not know the resource, it is asked
// again.
func (c *Cluster) Follow(ctx context.Context, of schema.GroupVersionResource, into Objects) error {
	all := &kube.Census{ID: uid, Set: into.Set, Gone: into.Delete, Listed: into.Listed}
	return c.server.Follow(ctx, kube.Target{Resource: of, All: all}, nil)
}

// Read calls see with each object of a resource as they are now, not as they were when a
// watch told of them.
func (c *Cluster) Read(
	ctx context.Context, of schema.GroupVersionResource, see func(*unstructured.Unstructured),
) error {
	return c.server.Pages(ctx, of, "", func(o *unstructured.Unstructured) error { see(o); return nil })
}

// WriteStatus writes an object's status, and returns the object as it is then. Changed says that
// it is gone or not in this version any more, and that nothing was written.
func (c *Cluster) WriteStatus(
	ctx context.Context, of schema.GroupVersionResource, o *unstructured.Unstructured,
) (now *unstructured.Unstructured, changed bool, err error) {
	bounded, cancel := context.WithTimeout(ctx, c.server.Timing.Request)
	defer cancel()
	now, err = c.server.API.Resource(of).Namespace(o.GetNamespace()).UpdateStatus(bounded, o,
		metav1.UpdateOptions{FieldManager: placerManager})
	return c.wrote(ctx, "update", "write the status of", of, o, now, err)
}

// Annotate sets an object's annotations, takes those away that are nil, and leaves the rest of the
// object as it is. What it returns is as WriteStatus has it.
func (c *Cluster) Annotate(
	ctx context.Context, of schema.GroupVersionResource, o *unstructured.Unstructured, annotations map[string]*string,
) (now *unstructured.Unstructured, changed bool, err error) {
	patch, err := json.Marshal(map[string]any{
		"metadata": map[string]any{"resourceVersion": o.GetResourceVersion(), "annotations": annotations}})
	if err != nil {
		return nil, false, fmt.Errorf("annotate %s %s/%s: %w", of.Resource, o.GetNamespace(), o.GetName(), err)
	}
	bounded, cancel := context.WithTimeout(ctx, c.server.Timing.Request)
	defer cancel()
	now, err = c.server.API.Resource(of).Namespace(o.GetNamespace()).Patch(bounded, o.GetName(), types.MergePatchType,
		patch, metav1.PatchOptions{FieldManager: placerManager})
	return c.wrote(ctx, "patch", "annotate", of, o, now, err)
}

// wrote says what came of a write.
func (c *Cluster) wrote(
	ctx context.Context, verb, what string, of schema.GroupVersionResource, o, now *unstructured.Unstructured,
	err error,
) (*unstructured.Unstructured, bool, error) {
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		c.server.Note(ctx, verb, of.Resource, "", nil)
		return nil, true, nil
	}
	if c.server.Note(ctx, verb, of.Resource, "", err); err != nil {
		return nil, false, fmt.Errorf("%s %s %s/%s: %w", what, of.Resource, o.GetNamespace(), o.GetName(), err)
	}
	return now, false, nil
}
