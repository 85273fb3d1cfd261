// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
)

// Page is the number of objects in one page of a list.
const Page = 500

// Census receives all objects of a resource. Its functions are never called at the same time.
type Census struct {
	// Chosen is a field selector; empty selects all objects. Of says whose these are, for logs; empty
	// means "of the cluster". ID returns what identifies an object.
	Chosen, Of string
	ID         func(*unstructured.Unstructured) string
	// Set is called with each object that exists, and Gone with the ID of each that does not exist
	// any longer. Listed is called after each complete list.
	Set    func(*unstructured.Unstructured)
	Gone   func(id string)
	Listed func()
	// known is true for the ID of each object that was reported and is not gone.
	known map[string]bool
}

// saw reports one event of a watch.
func (a *Census) saw(kind watch.EventType, object *unstructured.Unstructured) {
	switch id := a.ID(object); kind {
	case watch.Added, watch.Modified:
		a.known[id] = true
		a.Set(object)
	case watch.Deleted:
		delete(a.known, id)
		a.Gone(id)
	}
}

// listAll reads all objects in pages, and returns the version from which to watch.
func (s *Server) listAll(ctx context.Context, t Target) (string, error) {
	there := map[string]bool{}
	if t.All.known == nil {
		t.All.known = map[string]bool{}
	}
	for o := (metav1.ListOptions{FieldSelector: t.Selector(), Limit: Page}); ; {
		version, err := s.listPage(ctx, t, &o, there)
		if err != nil {
			return "", err
		}
		if o.Continue != "" {
			continue
		}
		for id := range t.All.known {
			if !there[id] {
				t.All.Gone(id)
			}
		}
		t.All.known = there
		t.All.Listed()
		return version, nil
	}
}

// listPage reads one page, and records in o where the next one begins.
func (s *Server) listPage(ctx context.Context, t Target, o *metav1.ListOptions, there map[string]bool) (string, error) {
	bounded, cancel := context.WithTimeout(ctx, s.Timing.Request)
	defer cancel()
	list, err := s.in(t).List(bounded, *o)
	s.allowed("list", t, err)
	if err != nil {
		return "", err
	}
	for i := range list.Items {
		id := t.All.ID(&list.Items[i])
		there[id], t.All.known[id] = true, true
		t.All.Set(&list.Items[i])
	}
	o.Continue = list.GetContinue()
	return list.GetResourceVersion(), nil
}

// Pages calls see with each object of a resource, as a list returns them in pages. labels is a
// label selector in kubectl's syntax; empty selects all. It stops at the first error of see, and
// returns it.
func (s *Server) Pages(
	ctx context.Context, of schema.GroupVersionResource, labels string, see func(*unstructured.Unstructured) error,
) error {
	for o := (metav1.ListOptions{LabelSelector: labels, Limit: Page}); ; {
		bounded, cancel := context.WithTimeout(ctx, s.Timing.Request)
		list, err := s.API.Resource(of).List(bounded, o)
		cancel()
		if err != nil {
			return fmt.Errorf("list %s: %w", of.Resource, err)
		}
		for i := range list.Items {
			if err := see(&list.Items[i]); err != nil {
				return fmt.Errorf("read %s %s: %w", of.Resource, list.Items[i].GetName(), err)
			}
		}
		if o.Continue = list.GetContinue(); o.Continue == "" {
			return nil
		}
	}
}
