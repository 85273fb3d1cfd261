// SPDX-License-Identifier: Apache-2.0

package deployments

import (
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"
)

// tryAllocatable: an agent may lower the allocatable of its own resources, and nothing
// else that is there.
func (s *apiServer) tryAllocatable(t *testing.T, status string) {
	have := fields{"cpu": "1", "example.com/gpu-mem": "2k", "example.com/gpu": "2", "nvidia.com/gpu": "4", "example.com.evil/gpu": "3"}
	before := fields{"status": fields{"capacity": maps.Clone(have), "allocatable": have}}
	if err := s.do(t, nil, http.MethodPatch, status, strategic, before, nil); err != nil {
		t.Fatal(err)
	}
	says := func(of string, amounts fields) fields { return fields{"status": fields{of: amounts}} }
	const lowers, conditions = "only lowers the allocatable of its own resources", "only conditions of the status"
	var tries []try
	for _, y := range []try{
		{name: "lower", body: says("allocatable", fields{"example.com/gpu-mem": "1999"})},
		{name: "lower two, one to 0", body: says("allocatable", fields{"example.com/gpu-mem": "39", "example.com/gpu": "0"})},
		{name: "nothing", body: says("allocatable", fields{"example.com/gpu-mem": "39"})},
		{name: "a raise", body: says("allocatable", fields{"example.com/gpu-mem": "40"}), refused: lowers},
		{name: "a raise from 0", body: says("allocatable", fields{"example.com/gpu": "1"}), refused: lowers},
		{name: "a raise beside a fall", body: says("allocatable", fields{"example.com/gpu-mem": "1", "example.com/gpu": "1"}), refused: lowers},
		{name: "a name that was not there", body: says("allocatable", fields{"example.com/new": "0"}), refused: lowers},
		{name: "a name away", body: says("allocatable", fields{"example.com/gpu-mem": nil}), refused: lowers},
		{name: "another domain's", body: says("allocatable", fields{"nvidia.com/gpu": "3"}), refused: lowers},
		{name: "a domain that begins alike", body: says("allocatable", fields{"example.com.evil/gpu": "1"}), refused: lowers},
		{name: "cpu", body: says("allocatable", fields{"cpu": "0"}), refused: lowers},
		{name: "more cpu", body: says("allocatable", fields{"cpu": "99"}), refused: lowers},
		{name: "capacity", body: says("capacity", fields{"example.com/gpu-mem": "1"}), refused: conditions},
		{name: "more capacity", body: says("capacity", fields{"example.com/gpu-mem": "9k"}), refused: conditions},
		{name: "less than nothing", body: says("allocatable", fields{"example.com/gpu-mem": "-1"}), refused: "must be greater than or equal to 0"},
	} {
		y.method, y.path, y.kind = http.MethodPatch, status, merge
		tries = append(tries, y)
	}
	tries = append(tries, try{"another node's", http.MethodPatch, strings.Replace(status, "node-1", "node-2", 1), merge,
		says("allocatable", fields{"example.com/gpu-mem": "1"}), "the node that it runs on"})
	s.try(t, agentOn("node-1"), tries)

	// internal/kube/agentkube does it by one request, and cannot raise anything.
	client := s.agentClient(t)
	lowered, err := client.LowerAllocatable(t.Context(), map[string]int64{"example.com/gpu-mem": 38, "example.com/gpu": 5, "example.com/none": 0})
	if err != nil || !slices.Equal(lowered, []string{"example.com/gpu-mem"}) {
		t.Errorf("lowered %q (%v), want gpu-mem alone", lowered, err)
	}
	if _, err := client.LowerAllocatable(t.Context(), map[string]int64{"nvidia.com/gpu": 0}); err == nil {
		t.Error("another domain's was not refused")
	}
	is := s.allocatable(t, "node-1")
	want := map[string]string{"cpu": "1", "example.com/gpu-mem": "38", "example.com/gpu": "0", "nvidia.com/gpu": "4", "example.com.evil/gpu": "3"}
	if !maps.Equal(is, want) {
		t.Errorf("allocatable %v, want %v", is, want)
	}
}

// allocatable is what a Node says there is.
func (s *apiServer) allocatable(t *testing.T, name string) map[string]string {
	t.Helper()
	var object struct {
		Status struct{ Allocatable map[string]string }
	}
	if err := s.do(t, nil, http.MethodGet, "/api/v1/nodes/"+name, "", nil, &object); err != nil {
		t.Fatal(err)
	}
	return object.Status.Allocatable
}
