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

// Objects receives the objects of a resource from Follow. Calls do not overlap.
type Objects interface {
	Set(*unstructured.Unstructured)
	Delete(uid string)
	// Listed is called after each complete list.
	Listed()
}

// Follow reports all objects of a resource until ctx ends, in the same way as Watch. It returns
// the error of ctx, and no other. If the server does not know the resource, Follow retries.
func (c *Cluster) Follow(ctx context.Context, of schema.GroupVersionResource, into Objects) error {
	all := &kube.Census{ID: uid, Set: into.Set, Gone: into.Delete, Listed: into.Listed}
	return c.server.Follow(ctx, kube.Target{Resource: of, All: all}, nil)
}

// Read lists a resource from the server and calls see with each object. So see gets the present
// state, and not what a watch reported earlier.
func (c *Cluster) Read(
	ctx context.Context, of schema.GroupVersionResource, see func(*unstructured.Unstructured),
) error {
	return c.server.Pages(ctx, of, "", func(o *unstructured.Unstructured) error { see(o); return nil })
}

// WriteStatus writes the status of o, and returns the object as the server then has it. Changed
// is true if nothing was written, since the object is gone or has a newer version than o.
func (c *Cluster) WriteStatus(
	ctx context.Context, of schema.GroupVersionResource, o *unstructured.Unstructured,
) (now *unstructured.Unstructured, changed bool, err error) {
	bounded, cancel := context.WithTimeout(ctx, c.server.Timing.Request)
	defer cancel()
	now, err = c.server.API.Resource(of).Namespace(o.GetNamespace()).UpdateStatus(bounded, o,
		metav1.UpdateOptions{FieldManager: placerManager})
	return c.wrote(ctx, "update", "write the status of", of, o, now, err)
}

// Annotate sets annotations of o, and removes those whose value is nil. The rest of the object
// stays as it is. Its results are those of WriteStatus.
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

// wrote turns the outcome of a write into the results of WriteStatus.
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
