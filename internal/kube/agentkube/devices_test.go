// SPDX-License-Identifier: Apache-2.0

package agentkube

import (
	"net/http"
	"reflect"
	"strings"
	"testing"

	"example.com/gpu-agent/internal/kube/kubetest"
)

// slice makes a ResourceSlice with one device; where node is "", it is of no node.
func (s *server) slice(name, node, driver string, generation int, device string, attributes map[string]any) {
	spec := map[string]any{"driver": driver, "pool": map[string]any{"name": "pool", "generation": generation, "resourceSliceCount": 1},
		"devices": []any{map[string]any{"name": device, "attributes": attributes}}}
	if node == "" {
		spec["allNodes"] = true
	} else {
		spec["nodeName"] = node
	}
	s.Put("resourceslices", "", name, map[string]any{"spec": spec})
}

func text(value string) map[string]any { return map[string]any{"string": value} }

func TestDevices(t *testing.T) {
	s := newServer(t)
	s.slice("b", "node-1", "gpu.nvidia.com", 2, "gpu-0", map[string]any{"uuid": text("GPU-new"), "resource.kubernetes.io/pciBusID": text("0000:3b:00.0"),
		"driverVersion": map[string]any{"version": "580.1.0"}, "index": map[string]any{"int": 0}})
	s.slice("a", "node-1", "gpu.nvidia.com", 1, "gpu-0", map[string]any{"uuid": text("GPU-old")}) // listed first
	s.slice("c", "node-2", "gpu.nvidia.com", 2, "gpu-9", map[string]any{"uuid": text("GPU-elsewhere")})
	s.slice("d", "node-1", "cpu.example.org", 1, "cpu-0", nil)
	s.slice("e", "", "net.example.org", 1, "port-0", map[string]any{"type": text("nic")})
	s.slice("f", "", "cpu.example.org", 1, "cpu-1", nil)
	s.Put("resourceslices", "", "g", map[string]any{"spec": map[string]any{"driver": "gpu.nvidia.com", "nodeName": "node-1",
		"devices": []any{"no device", map[string]any{"attributes": map[string]any{}}}}})
	c, _ := connect(t, s)
	got, err := c.Devices(t.Context(), "net.example.org", "gpu.nvidia.com")
	want := []Device{
		{Driver: "gpu.nvidia.com", Pool: "pool", Name: "gpu-0", generation: 2, Attributes: map[string]string{"uuid": "GPU-new",
			"resource.kubernetes.io/pciBusID": "0000:3b:00.0", "driverVersion": "580.1.0", "index": ""}},
		{Driver: "net.example.org", Pool: "pool", Name: "port-0", generation: 1, Attributes: map[string]string{"type": "nic"}},
	}
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v, %v\nwant %+v", got, err, want)
	}
}

// A server without the API, as before Kubernetes 1.34, has no slices; one that
// refuses says so.
func TestDevicesOfAServerWithoutSlices(t *testing.T) {
	s := newServer(t)
	code, reason := 404, "NotFound"
	s.Set(func() {
		s.Fault = func(_, _ string, w http.ResponseWriter) bool {
			kubetest.Refuse(w, code, reason)
			return true
		}
	})
	c, j := connect(t, s)
	if got, err := c.Devices(t.Context(), "gpu.nvidia.com"); len(got) != 0 || err != nil || j.Count("level=WARN") != 0 {
		t.Errorf("%+v, %v and %d warnings, want nothing", got, err, j.Count("level=WARN"))
	}
	s.Set(func() { code, reason = 403, "Forbidden" })
	if _, err := c.Devices(t.Context(), "gpu.nvidia.com"); err == nil || !strings.Contains(err.Error(), "Forbidden") || j.Count("level=WARN") != 1 {
		t.Errorf("%v and %d warnings, want the server's refusal", err, j.Count("level=WARN"))
	}
}
