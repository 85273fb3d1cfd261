// SPDX-License-Identifier: Apache-2.0

package placerkube

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/internal/kube"
	"example.com/gpu-agent/internal/kube/kubetest"
)

// register has what a Fleet was told.
type register struct {
	mu                    sync.Mutex
	nodes, pods, gpuNodes map[string]string
	lists                 map[string]int
}

func newRegister() *register {
	return &register{nodes: map[string]string{}, pods: map[string]string{}, gpuNodes: map[string]string{}, lists: map[string]int{}}
}

func (r *register) note(in map[string]string, key, value string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if in[key] = value; value == "" {
		delete(in, key)
	}
}

func (r *register) SetNode(n *corev1.Node) { r.note(r.nodes, n.Name, "at "+n.ResourceVersion) }
func (r *register) DeleteNode(name string) { r.note(r.nodes, name, "") }
func (r *register) DeletePod(uid string)   { r.note(r.pods, uid, "") }
func (r *register) SetPod(p *corev1.Pod) {
	r.note(r.pods, string(p.UID), p.Namespace+"/"+p.Name+" on "+p.Spec.NodeName)
}
func (r *register) SetGPUNode(name string, says *gpunode.Status) error {
	if says == nil {
		r.note(r.gpuNodes, name, "")
	} else {
		r.note(r.gpuNodes, name, fmt.Sprint(says.MemoryUnitMiB))
	}
	return nil
}

func (r *register) Listed(kind string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.lists[kind]++
}

// is compares what is known, as sorted names with values.
func (r *register) is(kind map[string]string, want ...string) func() bool {
	return func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		var have []string
		for name, value := range kind {
			have = append(have, name+" "+value)
		}
		slices.Sort(have)
		return slices.Equal(have, want)
	}
}

func (r *register) listed(kind string, times int) func() bool {
	return func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		return r.lists[kind] >= times
	}
}

func podOn(uid, node, phase string) map[string]any {
	return map[string]any{"metadata": map[string]any{"uid": uid}, "spec": map[string]any{"nodeName": node}, "status": map[string]any{"phase": phase}}
}

func units(n int) map[string]any {
	return map[string]any{"status": map[string]any{"memoryUnitMiB": n}}
}

// What is there, comes, changes and goes is told of all three kinds. Pods that have succeeded are
// as good as gone, and those that have failed are not: a kubelet may have refused one.
func TestWatchCluster(t *testing.T) {
	s := newServer(t)
	s.Put("pods", "a", "one", podOn("u-1", "node-1", "Running"))
	s.Put("pods", "a", "old", podOn("u-0", "node-1", "Succeeded"))
	s.Put("pods", "a", "refused", podOn("u-3", "node-1", "Failed"))
	s.Put("gpunodes", "", "node-1", units(1024))
	s.Put("gpunodes", "", "broken", map[string]any{"status": "?"})
	s.Node("node-1", nil, nil)
	c, j := connect(t, s)
	r := newRegister()
	kubetest.Background(t, func(ctx context.Context) error { return c.Watch(ctx, r) })
	kubetest.Await(t, "pods are listed", r.is(r.pods, "u-1 a/one on node-1", "u-3 a/refused on node-1"))
	kubetest.Await(t, "GPUNodes are listed", r.is(r.gpuNodes, "node-1 1024"))
	kubetest.Await(t, "all is listed", func() bool { return r.listed("nodes", 1)() && r.listed("pods", 1)() && r.listed("gpunodes", 1)() })
	if j.Count("malformed GPUNode") != 1 {
		t.Error("nothing in the log about a GPUNode that makes no sense")
	}
	s.Put("pods", "b", "two", podOn("u-2", "", "Pending"))
	s.Put("gpunodes", "", "node-1", units(512))
	s.Put("gpunodes", "", "broken", units(256))
	kubetest.Await(t, "another pod", r.is(r.pods, "u-1 a/one on node-1", "u-2 b/two on ", "u-3 a/refused on node-1"))
	kubetest.Await(t, "the GPUNodes anew", r.is(r.gpuNodes, "broken 256", "node-1 512"))
	s.Put("pods", "b", "two", podOn("u-2", "node-2", "Pending"))
	s.Put("pods", "a", "one", podOn("u-1", "node-1", "Succeeded"))
	s.Put("pods", "a", "refused", nil)
	s.Put("gpunodes", "", "broken", map[string]any{"status": "?"})
	kubetest.Await(t, "one bound, one ended", r.is(r.pods, "u-2 b/two on node-2"))
	kubetest.Await(t, "a GPUNode that cannot be read is none", r.is(r.gpuNodes, "node-1 512"))
	s.Put("nodes", "", "node-1", nil)
	s.Put("gpunodes", "", "node-1", nil)
	s.Put("pods", "b", "two", nil)
	kubetest.Await(t, "no pod", r.is(r.pods))
	kubetest.Await(t, "no GPUNode", r.is(r.gpuNodes))
	kubetest.Await(t, "no Node", r.is(r.nodes))
}

// A cluster is listed in pages, and what has gone while nobody watched is told after the next
// list: also a pod in whose place another of the same name is.
func TestWatchClusterListsInPages(t *testing.T) {
	s := newServer(t)
	for i := range 2*kube.Page + 1 {
		s.Put("pods", "a", fmt.Sprintf("p-%d", i), podOn(fmt.Sprintf("u-%d", i), "", "Pending"))
	}
	c, _ := connect(t, s)
	r := newRegister()
	kubetest.Background(t, func(ctx context.Context) error { return c.Watch(ctx, r) })
	kubetest.Await(t, "pods are listed", r.listed("pods", 1))
	if n := len(s.Asked("list pods")); n != 3 || len(r.pods) != 2*kube.Page+1 {
		t.Fatalf("%d requests told of %d pods, want 3 and %d", n, len(r.pods), 2*kube.Page+1)
	}
	s.Stop()
	for i := range 2*kube.Page + 1 {
		s.Put("pods", "a", fmt.Sprintf("p-%d", i), nil)
	}
	s.Put("pods", "a", "p-0", podOn("u-new", "node-1", "Running"))
	s.Set(func() { s.Oldest = s.Version })
	s.Back()
	kubetest.Await(t, "only the new pod is left", r.is(r.pods, "u-new a/p-0 on node-1"))
}

// A list that breaks off tells of pods; those that are gone by the next one are told too, and
// until it has come nobody is told that all was listed.
func TestWatchClusterListBreaksOff(t *testing.T) {
	s := newServer(t)
	for i := range kube.Page + 1 {
		s.Put("pods", "a", fmt.Sprintf("p-%d", i), podOn(fmt.Sprintf("u-%d", i), "", "Pending"))
	}
	asked, fail := 0, true
	s.Set(func() {
		s.Fault = func(verb, resource string, w http.ResponseWriter) bool {
			if verb != "list" || resource != "pods" {
				return false
			}
			s.Mu.Lock()
			defer s.Mu.Unlock()
			if asked++; asked%2 == 1 || !fail {
				return false
			}
			kubetest.Refuse(w, 410, "Expired")
			return true
		}
	})
	c, j := connect(t, s)
	r := newRegister()
	kubetest.Background(t, func(ctx context.Context) error { return c.Watch(ctx, r) })
	kubetest.Await(t, "two lists break off", func() (yes bool) { s.Set(func() { yes = asked >= 4 }); return yes })
	if r.listed("pods", 1)() {
		t.Error("half a list counts as one")
	}
	for i := range kube.Page {
		s.Put("pods", "a", fmt.Sprintf("p-%d", i+1), nil)
	}
	s.Set(func() { fail = false })
	kubetest.Await(t, "what is gone is told", r.is(r.pods, "u-0 a/p-0 on "))
	if j.Count("request fails") != 1 {
		t.Error("an outage is not one line in the log")
	}
}

// A cluster without GPUNodes is asked again, and the log has it once.
func TestWatchClusterWithoutGPUNodes(t *testing.T) {
	s := newServer(t)
	lacks := true
	s.Set(func() {
		s.Fault = func(_, resource string, w http.ResponseWriter) bool {
			s.Mu.Lock()
			defer s.Mu.Unlock()
			if resource != "gpunodes" || !lacks {
				return false
			}
			kubetest.Refuse(w, 404, "NotFound")
			return true
		}
	})
	s.Put("gpunodes", "", "node-1", units(1024))
	c, j := connect(t, s)
	r := newRegister()
	kubetest.Background(t, func(ctx context.Context) error { return c.Watch(ctx, r) })
	kubetest.Await(t, "they are asked for again", func() bool { return len(s.Asked("list gpunodes")) > 3 && r.listed("pods", 1)() })
	if r.listed("gpunodes", 1)() || j.Count("level=WARN") != 1 {
		t.Errorf("told of a list that there is not, or %d warnings", j.Count("level=WARN"))
	}
	s.Set(func() { lacks = false })
	kubetest.Await(t, "they are there", r.is(r.gpuNodes, "node-1 1024"))
}

func TestWake(t *testing.T) {
	s := newServer(t)
	s.Node("node-1", map[string]any{"a": "b"}, map[string]any{"c": "d"})
	c, _ := connect(t, s)
	c.server.Now = func() time.Time { return time.Date(2026, 1, 2, 3, 4, 5, 6_700_000, time.FixedZone("x", 3600)) }
	if err := c.Wake(t.Context(), "node-1"); err != nil {
		t.Fatal(err)
	}
	metadata := s.All("nodes")[0]["metadata"].(map[string]any)
	if got := fmt.Sprint(metadata["labels"], metadata["annotations"]); got != "map[a:b] map[c:d example.com/gpu.room:2026-01-02T02:04:05.006Z]" {
		t.Error(got)
	}
	if err := c.Wake(t.Context(), "gone"); err != nil {
		t.Errorf("a Node that was deleted: %v", err)
	}
	s.Set(func() {
		s.Fault = func(_, _ string, w http.ResponseWriter) bool { kubetest.Refuse(w, 403, "Forbidden"); return true }
	})
	if err := c.Wake(t.Context(), "node-1"); err == nil || !strings.Contains(err.Error(), "node-1") {
		t.Errorf("refused: %v", err)
	}
}
