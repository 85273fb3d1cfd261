// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/fields"
)

// ErrDropped says that the API server has taken a slice without some of its fields: a
// feature gate is off, or the server is older than Kubernetes 1.36.
var ErrDropped = errors.New("the API server has dropped what it does not know")

// ourSlices are the ResourceSlices that the agent publishes of its node.
type ourSlices struct {
	*ourNode

	mu sync.Mutex
	// unkept are the slices of which the server has not kept all: what was sent, and
	// what it made of that, by name. Without it they would be written again and again.
	// Guarded by mu.
	unkept map[string]exchange
}

// exchange is a slice as it was sent and as the server has it.
type exchange struct{ sent, kept []byte }

// publishedSlice is a slice at the server.
type publishedSlice struct {
	ResourceSlice
	object *unstructured.Unstructured
}

// PublishSlices makes a driver's ResourceSlices of this node what want says. It reads
// what there is, and writes what differs and nothing else: each slice is a change of its
// own, unless a pool's number of slices changes, for which all of it gets a new
// generation. The error of one slice does not keep back the others; ErrDropped is in it
// for as long as the server does not keep what a slice says.
func (s *ourSlices) PublishSlices(ctx context.Context, driver string, want []ResourceSlice) error {
	node, err := s.lastNode(ctx)
	if err == nil && node == nil {
		err = errors.New("the API server has no Node of this name")
	}
	if err != nil {
		return fmt.Errorf("publish the slices of node %s: %w", s.options.NodeName, err)
	}
	have, err := s.listOwn(ctx, driver)
	if err != nil {
		return fmt.Errorf("publish the slices of node %s: %w", s.options.NodeName, err)
	}
	want = slices.Clone(want)
	generations(want, have)
	var errs []error
	for i := range want {
		if err := s.writeSlice(ctx, driver, node, &want[i], have[want[i].Name]); err != nil {
			errs = append(errs, fmt.Errorf("publish ResourceSlice %s: %w", want[i].Name, err))
		}
		delete(have, want[i].Name)
	}
	for _, name := range slices.Sorted(maps.Keys(have)) {
		version := have[name].object.GetResourceVersion()
		err := s.request(ctx, "delete", name, func(ctx context.Context) error {
			return s.api.Resource(resourceSlices).Delete(ctx, name, metav1.DeleteOptions{Preconditions: &metav1.Preconditions{ResourceVersion: &version}})
		})
		if err != nil && !apierrors.IsNotFound(err) {
			errs = append(errs, fmt.Errorf("delete ResourceSlice %s: %w", name, err))
		}
	}
	return errors.Join(errs...)
}

// generations completes pools. A pool whose slices are as many as before keeps its
// generation: the scheduler goes on with it while one of them is written.
func generations(want []ResourceSlice, have map[string]publishedSlice) {
	wanted := map[string]bool{} // names
	for i := range want {
		wanted[want[i].Name] = true
	}
	next := map[string]int64{}
	for i := range want {
		pool := &want[i].Pool
		if next[pool.Name] == 0 {
			newest, same := int64(0), true
			for name, h := range have {
				if h.Pool.Name != pool.Name {
					continue
				}
				same = same && wanted[name] && h.Pool.Slices == pool.Slices && (newest == 0 || newest == h.Pool.Generation)
				newest = max(newest, h.Pool.Generation)
			}
			if !same || newest == 0 {
				newest++
			}
			next[pool.Name] = newest
		}
		pool.Generation = next[pool.Name]
	}
}

// writeSlice writes one slice, if the server has another one.
func (s *ourSlices) writeSlice(ctx context.Context, driver string, node *Node, want *ResourceSlice, have publishedSlice) error {
	sent, err := json.Marshal(want)
	if err != nil {
		return err
	}
	if have.object != nil {
		kept, err := json.Marshal(&have.ResourceSlice)
		if err != nil {
			return err
		}
		s.mu.Lock()
		before := s.unkept[want.Name]
		s.mu.Unlock()
		switch {
		case bytes.Equal(kept, sent):
			return nil
		case bytes.Equal(before.sent, sent) && bytes.Equal(before.kept, kept):
			return lost(sent, kept)
		}
	}
	object, err := want.Object(driver, s.options.NodeName)
	if err != nil {
		return err
	}
	controls := true
	object.SetOwnerReferences([]metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: s.options.NodeName, UID: node.uid, Controller: &controls}})
	verb := "create"
	if have.object != nil {
		verb = "update"
		object.SetResourceVersion(have.object.GetResourceVersion())
	}
	var back *unstructured.Unstructured
	if err := s.request(ctx, verb, want.Name, func(ctx context.Context) (err error) {
		if verb == "create" {
			back, err = s.api.Resource(resourceSlices).Create(ctx, object, metav1.CreateOptions{})
		} else {
			back, err = s.api.Resource(resourceSlices).Update(ctx, object, metav1.UpdateOptions{})
		}
		return err
	}); err != nil {
		return err
	}
	got, err := readSlice(back)
	if err != nil {
		return err
	}
	kept, err := json.Marshal(&got.ResourceSlice)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if bytes.Equal(kept, sent) {
		delete(s.unkept, want.Name)
		return nil
	}
	s.unkept[want.Name] = exchange{sent, kept}
	return lost(sent, kept)
}

// gated are the fields of a slice that a feature gate can take away.
var gated = []string{"sharedCounters", "consumesCounters", "allowMultipleAllocations", "requestPolicy", "taints"}

// lost says what the server did not keep.
func lost(sent, kept []byte) error {
	var names []string
	for _, name := range gated {
		if key := []byte(`"` + name + `"`); bytes.Contains(sent, key) && !bytes.Contains(kept, key) {
			names = append(names, name)
		}
	}
	what := strings.Join(names, ", ")
	if what == "" {
		what = "some of it"
	}
	return fmt.Errorf("%w (%s): it needs Kubernetes 1.36.2 with DRAPartitionableDevices, DRAConsumableCapacity and DRADeviceTaints on, as they are by default", ErrDropped, what)
}

// request makes one request of a ResourceSlice.
func (s *ourSlices) request(ctx context.Context, verb, name string, do func(context.Context) error) error {
	bounded, cancel := context.WithTimeout(ctx, s.timing.request)
	defer cancel()
	err := do(bounded)
	s.note(ctx, verb, resourceSlices.Resource, name, err)
	return err
}

func (s *ourSlices) chosen(driver string) target {
	return target{resource: resourceSlices, chosen: fields.Set{"spec.nodeName": s.options.NodeName, "spec.driver": driver}}
}

// listOwn returns what the server has of a driver of this node, by name.
func (s *ourSlices) listOwn(ctx context.Context, driver string) (map[string]publishedSlice, error) {
	var list *unstructured.UnstructuredList
	if err := s.request(ctx, "list", s.options.NodeName, func(ctx context.Context) (err error) {
		list, err = s.api.Resource(resourceSlices).List(ctx, metav1.ListOptions{FieldSelector: s.chosen(driver).selector()})
		return err
	}); err != nil {
		return nil, err
	}
	out := map[string]publishedSlice{}
	for i := range list.Items {
		slice, err := readSlice(&list.Items[i])
		if err != nil {
			return nil, err
		}
		out[slice.Name] = slice
	}
	return out, nil
}

func readSlice(o *unstructured.Unstructured) (publishedSlice, error) {
	spec, _, err := unstructured.NestedMap(o.Object, "spec")
	if err != nil {
		return publishedSlice{}, fmt.Errorf("read ResourceSlice %s: %w", o.GetName(), err)
	}
	data, err := json.Marshal(spec)
	if err != nil {
		return publishedSlice{}, fmt.Errorf("read ResourceSlice %s: %w", o.GetName(), err)
	}
	out := publishedSlice{object: o}
	if err := json.Unmarshal(data, &out.ResourceSlice); err != nil {
		return publishedSlice{}, fmt.Errorf("read ResourceSlice %s: %w", o.GetName(), err)
	}
	out.Name = o.GetName()
	return out, nil
}

// WatchSlices calls changed whenever a driver's ResourceSlices of this node may differ
// from what was written: somebody else changed or deleted one, as a kubelet does that
// starts. What the agent writes itself is told too. It returns when ctx ends, with its
// error.
func (s *ourSlices) WatchSlices(ctx context.Context, driver string, changed func()) error {
	return s.follow(ctx, s.chosen(driver), func(*unstructured.Unstructured) { changed() })
}
