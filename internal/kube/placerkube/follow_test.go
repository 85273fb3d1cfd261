// SPDX-License-Identifier: Apache-2.0

package placerkube

import (
	"context"
	"maps"
	"slices"
	"sync"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"example.com/gpu-agent/internal/kube/kubetest"
)

// Objects of other projects.
var liqoSlices = schema.GroupVersionResource{Group: "authentication.liqo.io", Version: "v1beta1", Resource: "resourceslices"}

func kueueObject(resource string) schema.GroupVersionResource {
	return schema.GroupVersionResource{Group: "kueue.x-k8s.io", Version: "v1beta2", Resource: resource}
}

// shelf keeps what Follow tells.
type shelf struct {
	mu      sync.Mutex
	there   map[string]*unstructured.Unstructured // by UID
	listing int
}

func (o *shelf) Set(of *unstructured.Unstructured) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.there == nil {
		o.there = map[string]*unstructured.Unstructured{}
	}
	o.there[string(of.GetUID())] = of
}

func (o *shelf) Delete(uid string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	delete(o.there, uid)
}

func (o *shelf) Listed() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.listing++
}

// are reports whether these are there, once all have been listed.
func (o *shelf) are(uids ...string) func() bool {
	return func() bool {
		o.mu.Lock()
		defer o.mu.Unlock()
		return o.listing > 0 && slices.Equal(slices.Sorted(maps.Keys(o.there)), uids)
	}
}

// Objects are told of by UID: one that was made anew is another one. A status is written only
// in the version that was read.
func TestFollow(t *testing.T) {
	s := newServer(t)
	slice := func(uid, says string) map[string]any {
		return map[string]any{"metadata": map[string]any{"uid": uid}, "spec": map[string]any{"class": "c"}, "status": map[string]any{"is": says}}
	}
	const of = "resourceslices.authentication.liqo.io"
	s.Put(of, "a", "one", slice("u-1", "new"))
	c, _ := connect(t, s)
	var o shelf
	kubetest.Background(t, func(ctx context.Context) error { return c.Follow(ctx, liqoSlices, &o) })
	kubetest.Await(t, "it is told of", o.are("u-1"))
	s.Put(of, "b", "two", slice("u-2", "new"))
	kubetest.Await(t, "another one", o.are("u-1", "u-2"))
	s.Put(of, "a", "one", nil)
	s.Put(of, "a", "one", slice("u-3", "new"))
	kubetest.Await(t, "one in its place", o.are("u-2", "u-3"))

	read := map[string]*unstructured.Unstructured{}
	if err := c.Read(t.Context(), liqoSlices, func(o *unstructured.Unstructured) { read[string(o.GetUID())] = o }); err != nil {
		t.Fatal(err)
	}
	one := read["u-3"]
	if len(read) != 2 || one == nil {
		t.Fatalf("read %v", read)
	}
	write := func(says string) (is string, changed bool) {
		t.Helper()
		next := one.DeepCopy()
		if err := unstructured.SetNestedField(next.Object, says, "status", "is"); err != nil {
			t.Fatal(err)
		}
		now, changed, err := c.WriteStatus(t.Context(), liqoSlices, next)
		if err != nil {
			t.Fatal(err)
		}
		if changed {
			return "", true
		}
		is, _, _ = unstructured.NestedString(now.Object, "status", "is")
		return is, false
	}
	if is, changed := write("granted"); is != "granted" || changed {
		t.Errorf("it says %q, changed: %t", is, changed)
	}
	if is, changed := write("again"); is != "" || !changed {
		t.Errorf("in an old version it was written %q", is)
	}
	s.Put(of, "a", "one", nil)
	if _, changed := write("again"); !changed {
		t.Error("it is gone, and was written")
	}
}

// Annotations are set and taken away in a version that is there, and the rest stays.
func TestAnnotate(t *testing.T) {
	s := newServer(t)
	of := kueueObject("workloads")
	key := of.Resource + "." + of.Group
	s.Put(key, "a", "one", map[string]any{"metadata": map[string]any{"annotations": map[string]any{"mine": "1"}}, "status": map[string]any{"is": "granted"}})
	c, _ := connect(t, s)
	read := func() (one *unstructured.Unstructured) {
		t.Helper()
		if err := c.Read(t.Context(), of, func(o *unstructured.Unstructured) { one = o }); err != nil || one == nil {
			t.Fatalf("read %v, %v", one, err)
		}
		return one
	}
	old, yes := read(), "yes"
	for _, step := range []struct {
		set     map[string]*string
		in      *unstructured.Unstructured
		want    map[string]string
		changed bool
	}{
		{set: map[string]*string{"a": &yes, "b": nil}, want: map[string]string{"a": "yes", "mine": "1"}},
		{set: map[string]*string{"b": &yes}, in: old, changed: true},
		{set: map[string]*string{"a": nil}, want: map[string]string{"mine": "1"}},
	} {
		in := step.in
		if in == nil {
			in = read()
		}
		now, changed, err := c.Annotate(t.Context(), of, in, step.set)
		if err != nil || changed != step.changed {
			t.Fatalf("changed: %t, want %t; %v", changed, step.changed, err)
		}
		if changed {
			continue
		}
		if status, _, _ := unstructured.NestedString(now.Object, "status", "is"); !maps.Equal(now.GetAnnotations(), step.want) || status != "granted" {
			t.Errorf("it has %v and is %q, want %v", now.GetAnnotations(), status, step.want)
		}
	}
	gone := read()
	s.Put(key, "a", "one", nil)
	if _, changed, err := c.Annotate(t.Context(), of, gone, map[string]*string{"a": &yes}); !changed || err != nil {
		t.Errorf("it is gone; changed: %t, %v", changed, err)
	}
}
