// SPDX-License-Identifier: Apache-2.0

package agentkube

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"

	"example.com/gpu-agent/internal/kube/kubetest"
)

// holds puts the Node as a kubelet reports it.
func (s *server) holds(amounts map[string]any) {
	s.Put("nodes", "", "node-1", map[string]any{"status": map[string]any{"allocatable": amounts}})
}

func (s *server) allocatable() map[string]any {
	return s.All("nodes")[0]["status"].(map[string]any)["allocatable"].(map[string]any)
}

func TestLowerAllocatable(t *testing.T) {
	s := newServer(t)
	s.holds(map[string]any{"cpu": "2", "example.com/gpu-mem": "2k", "example.com/gpu": "2", "example.com/gpu.shared": "0", "nvidia.com/gpu": "4"})
	c, _ := connect(t, s)
	for _, test := range []struct {
		name    string
		want    map[string]int64
		lowered []string
		is      string
	}{
		{"nothing falls", map[string]int64{"example.com/gpu-mem": 2000, "example.com/gpu": 3, "example.com/gpu.shared": 0}, nil, "2k 2"},
		{"one falls", map[string]int64{"example.com/gpu-mem": 1999, "example.com/gpu": 2}, []string{"example.com/gpu-mem"}, "1999 2"},
		{"two fall", map[string]int64{"example.com/gpu-mem": 1000, "example.com/gpu": 0}, []string{"example.com/gpu", "example.com/gpu-mem"}, "1k 0"},
		{"the Node has none", map[string]int64{"example.com/mig-3g.40gb": 0}, nil, "1k 0"},
	} {
		before := len(s.Asked("patch"))
		lowered, err := c.LowerAllocatable(t.Context(), test.want)
		if err != nil || !slices.Equal(lowered, test.lowered) {
			t.Errorf("%s: lowered %q (%v), want %q", test.name, lowered, err, test.lowered)
		}
		now := s.allocatable()
		if is := fmt.Sprint(now["example.com/gpu-mem"], " ", now["example.com/gpu"]); is != test.is || now["cpu"] != "2" || now["nvidia.com/gpu"] != "4" {
			t.Errorf("%s: the Node has %v, want %s and the rest as it was", test.name, now, test.is)
		}
		if writes := len(s.Asked("patch")) - before; (writes > 0) != (test.lowered != nil) || writes > 1 {
			t.Errorf("%s: %d requests", test.name, writes)
		}
	}
	for _, name := range []string{"nvidia.com/gpu", "cpu", "example.com/", "example.com.evil/gpu"} {
		if _, err := c.LowerAllocatable(t.Context(), map[string]int64{name: 0}); err == nil || !strings.Contains(err.Error(), "the agent may not write it") {
			t.Errorf("%s: %v, want that the agent may not write it", name, err)
		}
	}
}

// What the Node was when it was last seen may be old. A kubelet that has written less in
// the meantime is not contradicted.
func TestLoweringNeverRaises(t *testing.T) {
	s := newServer(t)
	s.holds(map[string]any{"example.com/gpu-mem": "79"})
	c, _ := connect(t, s)
	seen := make(chan map[string]int64, 16)
	c.ourNode.options.Allocatable = func(now map[string]int64) { seen <- now }
	s.Set(func() { s.Mute = true })
	kubetest.Background(t, func(ctx context.Context) error { return c.WatchNode(ctx, func(Node) {}) })
	if now := <-seen; now["example.com/gpu-mem"] != 79 {
		t.Fatalf("the watch says %v", now)
	}
	s.holds(map[string]any{"example.com/gpu-mem": "30"}) // the mute watch does not say so
	lowered, err := c.LowerAllocatable(t.Context(), map[string]int64{"example.com/gpu-mem": 40})
	if err != nil || lowered != nil {
		t.Errorf("lowered %q (%v), want nothing", lowered, err)
	}
	if now := s.allocatable(); now["example.com/gpu-mem"] != "30" {
		t.Errorf("the Node has %v, want what the kubelet wrote", now)
	}
	// Where it has more than is to be, that is lowered although it is not what was seen.
	s.holds(map[string]any{"example.com/gpu-mem": "60"})
	if lowered, err := c.LowerAllocatable(t.Context(), map[string]int64{"example.com/gpu-mem": 40}); err != nil || len(lowered) != 1 {
		t.Errorf("lowered %q (%v), want it", lowered, err)
	}
	if now := s.allocatable(); now["example.com/gpu-mem"] != "40" {
		t.Errorf("the Node has %v, want 40", now)
	}
}

// A server that refuses is an error, and so is a kubelet that writes faster than anybody.
func TestLoweringEnds(t *testing.T) {
	s := newServer(t)
	s.holds(map[string]any{"example.com/gpu-mem": "79"})
	c, _ := connect(t, s)
	for _, code := range []int{403, 409, 422} {
		s.Set(func() {
			s.Fault = func(verb, _ string, w http.ResponseWriter) bool {
				if verb == "patch" {
					kubetest.Refuse(w, code, map[int]string{403: "Forbidden", 409: "Conflict", 422: "Invalid"}[code])
				}
				return verb == "patch"
			}
		})
		before := len(s.Asked("patch"))
		_, err := c.LowerAllocatable(t.Context(), map[string]int64{"example.com/gpu-mem": 40})
		want := lowerTries
		if code == 403 {
			want = 1
		}
		if tries := len(s.Asked("patch")) - before; err == nil || errors.Is(err, context.Canceled) || tries != want {
			t.Errorf("%d: %v after %d requests, want an error after %d", code, err, tries, want)
		}
	}
}
