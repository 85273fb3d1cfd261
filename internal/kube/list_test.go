// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"fmt"
	"slices"
	"testing"
)

// TestListNodes has more nodes than a page, of which two have a GPUNode.
func TestListNodes(t *testing.T) {
	s := newServer(t)
	for i := range page + 1 {
		s.node(fmt.Sprintf("node-%03d", i), map[string]any{"a": fmt.Sprint(i)}, nil)
	}
	for _, name := range []string{"node-000", fmt.Sprintf("node-%03d", page), "gone"} {
		s.put("gpunodes", "", name, map[string]any{"metadata": map[string]any{"name": name}, "status": map[string]any{"memoryUnitMiB": 7}})
	}
	c, _ := connectCluster(t, s)
	found, err := c.List(t.Context(), "")
	var names []string
	for _, n := range found {
		names = append(names, n.Name+" "+n.Labels["a"])
		if n.Status.MemoryUnitMiB != 7 {
			t.Errorf("%s says %+v", n.Name, n.Status)
		}
	}
	slices.Sort(names)
	if want := []string{"node-000 0", fmt.Sprintf("node-%d %[1]d", page)}; err != nil || !slices.Equal(names, want) {
		t.Errorf("%v, %q, want %q", err, names, want)
	}
	// Two that make no sense keep nobody's from being read.
	s.put("gpunodes", "", "node-001", map[string]any{"metadata": map[string]any{"name": "node-001"}, "status": "odd"})
	s.put("gpunodes", "", "node-002", map[string]any{"metadata": map[string]any{"name": "node-002"}, "status": map[string]any{"memoryUnitMiB": -1}})
	if found, err := c.List(t.Context(), ""); err != nil || len(found) != 2 {
		t.Errorf("with GPUNodes that make no sense: %v, %d nodes", err, len(found))
	}
}
