// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"encoding/json"
	"errors"
	"net/http"
	"strings"
	"testing"
)

// writeSlice creates, updates and deletes as the real server does, but for validation.
func (s *server) writeSlice(w http.ResponseWriter, verb, name string, body []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if verb == "delete" {
		s.putLocked("resourceslices", "", name, nil)
		answer(w, map[string]any{"apiVersion": "v1", "kind": "Status", "status": "Success"})
		return
	}
	var object map[string]any
	if err := json.Unmarshal(body, &object); err != nil {
		refuse(w, 400, "BadRequest")
		return
	}
	spec := object["spec"].(map[string]any)
	devices, _ := spec["devices"].([]any)
	for _, d := range devices {
		delete(d.(map[string]any), s.gated)
	}
	name = object["metadata"].(map[string]any)["name"].(string)
	object = s.putLocked("resourceslices", "", name, object)
	object["kind"] = "ResourceSlice"
	answer(w, object)
}

// A server that drops what it does not know is told of, each time, and not written to
// again and again.
func TestServerThatDropsFields(t *testing.T) {
	s := newServer(t)
	s.node("node-1", nil, nil)
	c, _ := connect(t, s)
	want := []ResourceSlice{{Name: "00000", Pool: Pool{Name: "node-1/a100", Slices: 1}, Devices: []PoolDevice{
		{Name: "gpu-0", Consumes: []Consumption{{Set: "gpu-0", Counters: map[string]Amount{"memory": {Value: 80 << 30}}}}}}}}
	writes := func() int { return len(s.asked("create resourceslices")) + len(s.asked("update resourceslices")) }
	s.set(func() { s.gated = "consumesCounters" })
	for range 3 {
		if err := c.PublishSlices(t.Context(), "gpus.example.com", want); !errors.Is(err, ErrDropped) || !strings.Contains(err.Error(), "(consumesCounters)") {
			t.Fatalf("%v", err)
		}
	}
	if n := writes(); n != 1 {
		t.Errorf("%d writes of a slice of which the server drops a part", n)
	}
	// After the gate is on, the next change has all of it.
	s.set(func() { s.gated = "" })
	want[0].Devices[0].Taints = []Taint{{Key: "example.com/unhealthy", Effect: NoSchedule}}
	for range 2 {
		if err := c.PublishSlices(t.Context(), "gpus.example.com", want); err != nil {
			t.Fatal(err)
		}
	}
	if n := writes(); n != 2 {
		t.Errorf("%d writes, want one more", n)
	}
}

// One slice that cannot be written does not keep back the others.
func TestSliceThatIsRefused(t *testing.T) {
	s := newServer(t)
	s.node("node-1", nil, nil)
	c, _ := connect(t, s)
	refused := false
	s.set(func() {
		s.fault = func(verb, resource string, w http.ResponseWriter) bool {
			if verb != "create" || resource != "resourceslices" || refused {
				return false
			}
			refused = true
			refuse(w, 422, "Invalid")
			return true
		}
	})
	want := []ResourceSlice{{Name: "00000", Pool: Pool{Name: "p", Slices: 2}}, {Name: "00001", Pool: Pool{Name: "p", Slices: 2}}}
	if err := c.PublishSlices(t.Context(), "gpus.example.com", want); err == nil || !strings.Contains(err.Error(), "00000") {
		t.Errorf("%v", err)
	}
	if have := s.all("resourceslices"); len(have) != 1 {
		t.Errorf("%d slices, want the other one", len(have))
	}
}
