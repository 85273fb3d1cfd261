// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"fmt"
	"slices"
	"strings"
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
	s.put("gpunodes", "", "odd", map[string]any{"metadata": map[string]any{"name": "odd"}, "status": "odd"})
	if _, err := c.List(t.Context(), ""); err == nil || !strings.Contains(err.Error(), "odd") {
		t.Errorf("with a GPUNode that makes no sense: %v", err)
	}
}
