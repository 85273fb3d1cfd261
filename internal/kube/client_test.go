// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/internal/workload"
)

func TestNewRefuses(t *testing.T) {
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	log := slog.New(slog.NewTextHandler(io.Discard, nil))
	broken := filepath.Join(t.TempDir(), "kubeconfig")
	if err := os.WriteFile(broken, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		name, want string
		options    Options
	}{
		{"no node", "--node-name", Options{Domain: "example.com", Logger: log}},
		{"no domain", "--domain", Options{NodeName: "n", Logger: log}},
		{"no logger", "logger", Options{NodeName: "n", Domain: "example.com"}},
		{"outside a cluster", "--kubeconfig", Options{NodeName: "n", Domain: "example.com", Logger: log}},
		{"no such file", "nowhere", Options{NodeName: "n", Domain: "example.com", Logger: log, Kubeconfig: "/nowhere"}},
		{"broken file", broken, Options{NodeName: "n", Domain: "example.com", Logger: log, Kubeconfig: broken}},
	} {
		if _, err := New(test.options); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: %v, want an error that names %q", test.name, err, test.want)
		}
	}
}

// The server refuses what is not in Rules; this is the other half: what is in
// Rules is used.
func TestRulesAreUsed(t *testing.T) {
	s := newServer(t)
	s.node("node-1", nil, nil)
	s.config("gpu", "p", "one")
	c, _ := connect(t, s)
	c.timing.quiet = 0
	told := partitions(t, c)
	want(t, told, "one")
	background(t, func(ctx context.Context) error { return c.WatchNode(ctx, func(Node) {}) })
	background(t, c.Run)
	c.Event(workload.Pod{}, Normal, "Applied", "m")
	c.Event(workload.Pod{}, Normal, "Applied", "m")
	if err := c.Mark(t.Context(), Marks{Labels: map[string]string{"example.com/a": "b"}}); err != nil {
		t.Fatal(err)
	}
	if err := c.SetCondition(t.Context(), Condition{Type: "example.com/A", Status: True, Reason: "Well"}); err != nil {
		t.Fatal(err)
	}
	s.pod("train", "job-1", "u-1")
	if err := c.Evict(t.Context(), workload.Pod{Namespace: "train", Name: "job-1", UID: "u-1"}); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Devices(t.Context()); err != nil {
		t.Fatal(err)
	}
	background(t, func(ctx context.Context) error { return c.WatchSlices(ctx, "d", func() {}) })
	slice := ResourceSlice{Name: "a", Pool: Pool{Name: "p", Slices: 1}}
	for _, publish := range [][]ResourceSlice{{slice}, {{Name: "a", Pool: slice.Pool, Devices: []PoolDevice{{Name: "gpu"}}}}, nil} {
		if _, err := c.PublishSlices(t.Context(), "d", publish); err != nil {
			t.Fatal(err)
		}
	}
	s.claim("train", "c", "u-1", claimStatus)
	if _, err := c.Claims(t.Context(), "gpus.example.com"); err != nil {
		t.Fatal(err)
	}
	claim, err := c.Claim(t.Context(), "gpus.example.com", "train", "c")
	if err != nil {
		t.Fatal(err)
	}
	if err := c.SetClaimDevices(t.Context(), "gpus.example.com", claim, nil); err != nil {
		t.Fatal(err)
	}
	background(t, func(ctx context.Context) error { return c.WatchGPUNode(ctx, func(*gpunode.Status, error) {}) })
	if _, err := c.WriteGPUNode(t.Context(), &gpunode.Status{}); err != nil {
		t.Fatal(err)
	}
	if err := c.RemoveGPUNode(t.Context()); err != nil {
		t.Fatal(err)
	}
	cluster, _ := connectCluster(t, s)
	background(t, func(ctx context.Context) error { return cluster.Watch(ctx, newRegister()) })
	if err := cluster.Wake(t.Context(), "node-1"); err != nil {
		t.Fatal(err)
	}
	lease := cluster.NewLease("gpu", "placer", "me", func(time.Time, bool) {})
	for range 2 {
		if err := lease.try(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	for _, of := range []schema.GroupVersionResource{liqoSlices, {Group: liqoSlices.Group, Version: "v1beta1", Resource: "tenants"},
		kueueObject("workloads"), kueueObject("resourceflavors"), kueueObject("admissionchecks")} {
		background(t, func(ctx context.Context) error { return cluster.Follow(ctx, of, &shelf{}) })
	}
	for _, of := range []schema.GroupVersionResource{liqoSlices, kueueObject("workloads"), kueueObject("admissionchecks")} {
		s.put(of.Resource+"."+of.Group, "a", "one", map[string]any{})
		if err := cluster.Read(t.Context(), of, func(o *unstructured.Unstructured) {
			if _, changed, err := cluster.WriteStatus(t.Context(), of, o); changed || err != nil {
				t.Errorf("%s: changed %t, %v", of.Resource, changed, err)
			}
		}); err != nil {
			t.Fatal(err)
		}
	}
	if err := cluster.Read(t.Context(), kueueObject("workloads"), func(o *unstructured.Unstructured) {
		if _, changed, err := cluster.Annotate(t.Context(), kueueObject("workloads"), o, map[string]*string{"a": nil}); changed || err != nil {
			t.Errorf("changed %t, %v", changed, err)
		}
	}); err != nil {
		t.Fatal(err)
	}
	all := map[string]bool{}
	for _, rule := range slices.Concat(Rules, PlacerRules, LiqoRules, KueueRules) {
		if !slices.IsSorted(rule.Verbs) || rule.Why == "" {
			t.Errorf("rule for %s: verbs unsorted or no reason", rule.Resource)
		}
		for _, verb := range rule.Verbs {
			all[verb+" "+rule.stored()] = true
		}
	}
	await(t, "all rules are used", func() (same bool) {
		s.set(func() { same = maps.Equal(s.used, all) })
		return same
	})
}

func TestStopsWhileServerHangs(t *testing.T) {
	s := newServer(t)
	asked := make(chan struct{}, 10)
	release := make(chan struct{})
	s.set(func() {
		s.fault = func(string, string, http.ResponseWriter) bool {
			asked <- struct{}{}
			<-release
			return true
		}
	})
	t.Cleanup(func() { close(release) })
	c, j := connect(t, s)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- c.WatchNode(ctx, func(Node) { t.Error("told of a node that no one sent") }) }()
	receive(t, asked)
	cancel()
	if err := receive(t, done); err != context.Canceled {
		t.Errorf("ended with %v", err)
	}
	if n := j.count("level=WARN"); n != 0 {
		t.Errorf("%d warnings about our own end", n)
	}
}
