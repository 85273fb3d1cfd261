// SPDX-License-Identifier: Apache-2.0

package agentkube

import (
	"fmt"
	"log/slog"
	"slices"
	"testing"

	"example.com/gpu-agent/internal/kube"
	"example.com/gpu-agent/internal/kube/kubetest"
)

// TestListNodes has more nodes than a page, of which two have a GPUNode.
func TestListNodes(t *testing.T) {
	s := newServer(t)
	for i := range kube.Page + 1 {
		s.Node(fmt.Sprintf("node-%03d", i), map[string]any{"a": fmt.Sprint(i)}, nil)
	}
	for _, name := range []string{"node-000", fmt.Sprintf("node-%03d", kube.Page), "gone"} {
		s.Put("gpunodes", "", name, map[string]any{"metadata": map[string]any{"name": name}, "status": map[string]any{"memoryUnitMiB": 7}})
	}
	o := kube.Options{Kubeconfig: kubetest.Kubeconfig(t, "http://"+s.Addr), Domain: "example.com", Logger: slog.New(slog.DiscardHandler)}
	found, err := List(t.Context(), o, "")
	var names []string
	for _, n := range found {
		names = append(names, n.Name+" "+n.Labels["a"])
		if n.Status.MemoryUnitMiB != 7 {
			t.Errorf("%s says %+v", n.Name, n.Status)
		}
	}
	slices.Sort(names)
	if want := []string{"node-000 0", fmt.Sprintf("node-%d %[1]d", kube.Page)}; err != nil || !slices.Equal(names, want) {
		t.Errorf("%v, %q, want %q", err, names, want)
	}
	// Two that make no sense keep nobody's from being read.
	s.Put("gpunodes", "", "node-001", map[string]any{"metadata": map[string]any{"name": "node-001"}, "status": "odd"})
	s.Put("gpunodes", "", "node-002", map[string]any{"metadata": map[string]any{"name": "node-002"}, "status": map[string]any{"memoryUnitMiB": -1}})
	if found, err := List(t.Context(), o, ""); err != nil || len(found) != 2 {
		t.Errorf("with GPUNodes that make no sense: %v, %d nodes", err, len(found))
	}
}
