// SPDX-License-Identifier: Apache-2.0

package agentkube

import (
	"context"
	"slices"
	"testing"

	"example.com/gpu-agent/internal/kube/kubetest"
)

// partitions follows the ConfigMap gpu/p; "-" stands for none.
func partitions(t *testing.T, c *Client) <-chan string {
	t.Helper()
	told := make(chan string, 100)
	kubetest.Background(t, func(ctx context.Context) error {
		return c.WatchKey(ctx, "gpu", "p", "config.yaml", func(data []byte, err error) {
			if err != nil {
				data = []byte("-")
			}
			told <- string(data)
		})
	})
	return told
}

func want(t *testing.T, told <-chan string, content string) {
	t.Helper()
	if got := kubetest.Receive(t, told); got != content {
		t.Fatalf("told %q, want %q", got, content)
	}
}

func TestConfigMapLife(t *testing.T) {
	s := newServer(t)
	c, j := connect(t, s)
	told := partitions(t, c)
	want(t, told, "-")
	s.Config("gpu", "p", "one")
	want(t, told, "one")
	// A new version of the same data, and another object, are no news: what is
	// told next is the next real change.
	s.Config("gpu", "p", "one")
	s.Config("gpu", "q", "other")
	s.Config("gpu", "p", "two")
	want(t, told, "two")
	s.Put("configmaps", "gpu", "p", nil)
	want(t, told, "-")
	s.Config("gpu", "p", "three")
	want(t, told, "three")
	if n := j.Count("level=WARN"); n != 0 {
		t.Errorf("%d warnings in a quiet life", n)
	}
}

func TestWatchNode(t *testing.T) {
	s := newServer(t)
	c, _ := connect(t, s)
	told := make(chan Node, 100)
	kubetest.Background(t, func(ctx context.Context) error {
		return c.WatchNode(ctx, func(n Node) { told <- n })
	})
	// No Node is no news; one that comes is.
	kubetest.Await(t, "a watch", func() bool { return len(s.Asked("watch")) > 0 })
	s.Node("node-1", map[string]any{"zone": "a"}, map[string]any{"example.com/gpu.blocked": "x", "heart.io/beat": "1"})
	n := kubetest.Receive(t, told)
	if n.Labels["zone"] != "a" || len(n.Annotations) != 1 || n.Annotations["example.com/gpu.blocked"] != "x" || n.Unschedulable {
		t.Fatalf("told %+v", n)
	}
	// Another program's heartbeat is no news, nor is another node.
	s.Node("node-1", map[string]any{"zone": "a"}, map[string]any{"example.com/gpu.blocked": "x", "heart.io/beat": "2"})
	s.Node("node-2", map[string]any{"zone": "b"}, nil)
	s.Node("node-1", map[string]any{"zone": "a"}, nil)
	if n = kubetest.Receive(t, told); len(n.Annotations) != 0 {
		t.Fatalf("told %+v, want no annotation", n)
	}
	s.Put("nodes", "", "node-1", map[string]any{"metadata": map[string]any{"labels": map[string]any{"zone": "a"}},
		"spec": map[string]any{"unschedulable": true}})
	if n = kubetest.Receive(t, told); !n.Unschedulable {
		t.Fatalf("told %+v, want unschedulable", n)
	}
	// What pods may ask for by name; amounts are no news.
	status := func(amounts map[string]any) {
		s.Put("nodes", "", "node-1", map[string]any{"metadata": map[string]any{"labels": map[string]any{"zone": "a"}},
			"spec": map[string]any{"unschedulable": true}, "status": map[string]any{"allocatable": amounts}})
	}
	status(map[string]any{"cpu": "4", "example.com/gpu": "2", "example.com/gpu-mem": "80", "example.com/gpu.shared": "0"})
	if n = kubetest.Receive(t, told); !slices.Equal(n.Allocatable, []string{"example.com/gpu", "example.com/gpu-mem"}) {
		t.Fatalf("told %+v, want what there is of extended resources", n)
	}
	status(map[string]any{"cpu": "3", "example.com/gpu": "0", "example.com/gpu-mem": "40"})
	if n = kubetest.Receive(t, told); !slices.Equal(n.Allocatable, []string{"example.com/gpu-mem"}) {
		t.Fatalf("told %+v, want gpu-mem alone", n)
	}
	status(nil)
	if n = kubetest.Receive(t, told); len(n.Allocatable) > 0 {
		t.Fatalf("told %+v, want nothing allocatable", n)
	}
	// Gone and come again the same: nothing to tell.
	s.Put("nodes", "", "node-1", nil)
	s.Put("nodes", "", "node-1", map[string]any{"metadata": map[string]any{"labels": map[string]any{"zone": "a"}},
		"spec": map[string]any{"unschedulable": true}})
	s.Node("node-1", map[string]any{"zone": "c"}, nil)
	if n = kubetest.Receive(t, told); n.Labels["zone"] != "c" {
		t.Fatalf("told %+v, want zone c", n)
	}
}

func TestWatchWantsNames(t *testing.T) {
	c, _ := connect(t, newServer(t))
	if err := c.WatchKey(t.Context(), "", "p", "config.yaml", func([]byte, error) {}); err == nil {
		t.Error("no namespace is accepted")
	}
}
