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

// Page is how many objects of a cluster are asked for at a time.
const Page = 500

// Census is told of all objects of a resource. Its calls do not overlap.
type Census struct {
	// Chosen is a field selector, empty for all objects, and ID what tells one from others.
	Chosen string
	ID     func(*unstructured.Unstructured) string
	// Set is told of each object that is there, Gone of the ID of one that is not any more,
	// and Listed is called each time that all of them have been told.
	Set    func(*unstructured.Unstructured)
	Gone   func(id string)
	Listed func()
	// known are the objects that were told of and are not gone.
	known map[string]bool
}

// saw tells of one event.
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

// listAll reads all objects, page by page, and returns the version to watch from.
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

// listPage reads one page and notes in o where the next one begins.
func (s *Server) listPage(ctx context.Context, t Target, o *metav1.ListOptions, there map[string]bool) (string, error) {
	bounded, cancel := context.WithTimeout(ctx, s.Timing.Request)
	defer cancel()
	list, err := t.in(s.API).List(bounded, *o)
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

// Pages calls see with each object of a resource as they are now, a page at a time. labels is a
// selector in kubectl's words, empty for all. The first error of see ends it.
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
