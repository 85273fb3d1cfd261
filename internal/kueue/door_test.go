// SPDX-License-Identifier: Apache-2.0

package kueue

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"sync"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// server has objects in versions.
type server struct {
	mu      sync.Mutex
	version int
	objects map[string]*unstructured.Unstructured // by resource and UID
	reads   int
	writes  []string
}

func (s *server) Read(_ context.Context, of schema.GroupVersionResource, see func(*unstructured.Unstructured)) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.reads++
	for key, o := range s.objects {
		if key == of.Resource+"/"+string(o.GetUID()) {
			see(o.DeepCopy())
		}
	}
	return nil
}

func (s *server) WriteStatus(_ context.Context, of schema.GroupVersionResource, o *unstructured.Unstructured) (*unstructured.Unstructured, bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.objects[of.Resource+"/"+string(o.GetUID())]
	if now == nil || now.GetResourceVersion() != o.GetResourceVersion() {
		return nil, true, nil
	}
	s.writes = append(s.writes, of.Resource+"/"+o.GetName())
	return s.put(of, o), false, nil
}

func (s *server) Annotate(_ context.Context, of schema.GroupVersionResource, o *unstructured.Unstructured, annotations map[string]*string) (*unstructured.Unstructured, bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.objects[of.Resource+"/"+string(o.GetUID())]
	if now == nil || now.GetResourceVersion() != o.GetResourceVersion() {
		return nil, true, nil
	}
	now = now.DeepCopy()
	is := now.GetAnnotations()
	if is == nil {
		is = map[string]string{}
	}
	for key, value := range annotations {
		if delete(is, key); value != nil {
			is[key] = *value
		}
	}
	now.SetAnnotations(is)
	s.writes = append(s.writes, of.Resource+"/"+o.GetName()+" "+is["example.com/gpu.refused-flavors"])
	return s.put(of, now), false, nil
}

func (s *server) put(of schema.GroupVersionResource, o *unstructured.Unstructured) *unstructured.Unstructured {
	s.version++
	o = o.DeepCopy()
	o.SetResourceVersion(strconv.Itoa(s.version))
	s.objects[of.Resource+"/"+string(o.GetUID())] = o
	return o.DeepCopy()
}

func (s *server) add(of schema.GroupVersionResource, o *unstructured.Unstructured) *unstructured.Unstructured {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.put(of, o)
}

// state is that of a workload's check, at the server.
func (s *server) state(uid string) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	w, err := ReadWorkload(s.objects["workloads/"+uid])
	if err != nil {
		return err.Error()
	}
	return w.Checks[0].State
}

func queued(name string, units int) *unstructured.Unstructured {
	owner := map[string]any{"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": "job-" + name}
	return &unstructured.Unstructured{Object: map[string]any{"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "Workload",
		"metadata": map[string]any{"namespace": "train", "name": name, "uid": name,
			"creationTimestamp": "2026-01-02T03:04:05Z", "ownerReferences": []any{owner}},
		"spec": map[string]any{"podSets": []any{map[string]any{"name": "main", "count": int64(1), "template": map[string]any{"spec": map[string]any{
			"containers": []any{map[string]any{"name": "main", "resources": map[string]any{"requests": map[string]any{memory: fmt.Sprint(units)}}}}}}}}},
		"status": map[string]any{
			"conditions":      []any{map[string]any{"type": "QuotaReserved", "status": "True", "reason": "R", "message": "", "lastTransitionTime": "2026-01-02T03:04:05Z"}},
			"admission":       map[string]any{"clusterQueue": "q", "podSetAssignments": []any{map[string]any{"name": "main", "flavors": map[string]any{memory: "here"}}}},
			"admissionChecks": []any{map[string]any{"name": "room", "state": "Pending", "message": "", "lastTransitionTime": "2026-01-02T03:04:05Z"}}}}}
}

// TestDoor has a process that follows, leads, is told late of what it has written, and loses the
// lead. It decides only while it leads, and once it has read anew what was decided before.
func TestDoor(t *testing.T) {
	c := newCluster(t, map[string][]int{"a": {79}})
	s := &server{objects: map[string]*unstructured.Unstructured{}}
	var mu sync.Mutex
	leads, listed := false, 0
	d := New(c, Options{API: s, Domain: "example.com", Logger: slog.New(slog.NewTextHandler(t.Output(), nil)), Now: func() time.Time { return start },
		Listed: func() { mu.Lock(); defer mu.Unlock(); listed++ },
		Leads: func() error {
			mu.Lock()
			defer mu.Unlock()
			if !leads {
				return errors.New("another one does")
			}
			return nil
		}})
	lead := func(yes bool) { mu.Lock(); defer mu.Unlock(); leads = yes }
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- d.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
	await := func(what string, is func() bool) {
		t.Helper()
		for deadline := time.Now().Add(time.Minute); !is(); time.Sleep(5 * time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("never: %s", what)
			}
		}
	}
	written := func() int { s.mu.Lock(); defer s.mu.Unlock(); return len(s.writes) }

	d.Set(AdmissionChecks, s.add(AdmissionChecks, &unstructured.Unstructured{Object: map[string]any{"kind": "AdmissionCheck", "metadata": map[string]any{"name": "room", "uid": "check"},
		"spec": map[string]any{"controllerName": "example.com/gpu-placer"}}}))
	d.Set(ResourceFlavors, s.add(ResourceFlavors, &unstructured.Unstructured{Object: map[string]any{"kind": "ResourceFlavor", "metadata": map[string]any{"name": "here", "uid": "flavor"},
		"spec": map[string]any{"nodeLabels": map[string]any{"site": "on-prem"}}}}))
	old := s.add(Workloads, queued("one", 50))
	d.Set(Workloads, old)
	for _, of := range []schema.GroupVersionResource{ResourceFlavors, AdmissionChecks, Workloads} {
		mu.Lock()
		if listed != 0 {
			t.Error("all is held before all was told")
		}
		mu.Unlock()
		d.Listed(of)
	}
	await("it says that all is held that was before", func() bool { mu.Lock(); defer mu.Unlock(); return listed == 1 })
	if written() != 0 {
		t.Errorf("it wrote %v while another one leads", s.writes)
	}
	// One that no watch has told of yet.
	s.add(Workloads, queued("zero", 50))
	lead(true)
	await("checks are active and both workloads answered", func() bool {
		return s.state("one") == Ready && s.state("zero") == Retry || s.state("one") == Retry && s.state("zero") == Ready
	})
	d.Set(Workloads, old) // late news
	d.Listed(Workloads)
	before := written()
	time.Sleep(50 * time.Millisecond)
	if n := written(); n != before || n != 4 || s.reads != 1 {
		t.Errorf("%d writes and %d reads: %v", n, s.reads, s.writes)
	}
	lead(false)
	d.Set(Workloads, s.add(Workloads, queued("two", 10)))
	time.Sleep(50 * time.Millisecond)
	if s.state("two") != Pending {
		t.Error("a workload was answered while another one leads")
	}
	lead(true)
	d.Listed(Workloads)
	await("the next one is answered", func() bool { return s.state("two") == Ready })
	if n := d.State(); n[Ready]+n[Retry] < 2 {
		t.Errorf("it counts %v", n)
	}
	d.Delete("two")
}

// TestAnswerAfterTheEnd has the answer to a write come after the object is gone: it is not taken for
// one that is there, and holds no room.
func TestAnswerAfterTheEnd(t *testing.T) {
	d := New(newCluster(t, map[string][]int{"a": {79}}), Options{Domain: "example.com", Logger: slog.New(slog.DiscardHandler)})
	w := queued("one", 50)
	d.Set(Workloads, w)
	d.Delete("one")
	d.Set(Workloads, w)
	if v, _ := d.view(); len(v.Workloads) != 0 {
		t.Errorf("there is %s again", v.Workloads[0].Name)
	}
}
