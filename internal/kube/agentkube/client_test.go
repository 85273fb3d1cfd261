// SPDX-License-Identifier: Apache-2.0

package agentkube

import (
	"context"
	"log/slog"
	"slices"
	"strings"
	"testing"

	resourcev1 "k8s.io/api/resource/v1"

	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/internal/kube"
	"example.com/gpu-agent/internal/kube/kubetest"
	"example.com/gpu-agent/internal/workload"
)

func TestNewRefuses(t *testing.T) {
	for want, o := range map[string]Options{
		"--node-name": {Options: kube.Options{Domain: "example.com"}},
		"--domain":    {NodeName: "n"},
	} {
		o.Logger = slog.New(slog.DiscardHandler)
		if _, err := New(o); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want an error that names %q", err, want)
		}
	}
}

// The server refuses what is not in Rules; this is the other half: what is in
// Rules is used.
func TestRulesAreUsed(t *testing.T) {
	s := newServer(t)
	s.Node("node-1", nil, nil)
	s.Config("gpu", "p", "one")
	c, _ := connect(t, s)
	e := NewEvents(c, nil)
	e.quiet = 0
	told := partitions(t, c)
	want(t, told, "one")
	kubetest.Background(t, func(ctx context.Context) error { return c.WatchNode(ctx, func(Node) {}) })
	kubetest.Background(t, e.Run)
	e.Event(workload.Pod{}, Normal, "Applied", "m")
	e.Event(workload.Pod{}, Normal, "Applied", "m")
	if err := c.Mark(t.Context(), Marks{Labels: map[string]string{"example.com/a": "b"}}); err != nil {
		t.Fatal(err)
	}
	if err := c.SetCondition(t.Context(), Condition{Type: "example.com/A", Status: True, Reason: "Well"}); err != nil {
		t.Fatal(err)
	}
	s.Pod("train", "job-1", "u-1")
	if err := c.Evict(t.Context(), workload.Pod{Namespace: "train", Name: "job-1", UID: "u-1"}); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Devices(t.Context()); err != nil {
		t.Fatal(err)
	}
	kubetest.Background(t, func(ctx context.Context) error { return c.WatchSlices(ctx, "d", func() {}) })
	slice, other := sliceOf("a", "p", 1), sliceOf("a", "p", 1)
	other.Spec.Devices = []resourcev1.Device{{Name: "gpu"}}
	for _, publish := range [][]resourcev1.ResourceSlice{{slice}, {other}, nil} {
		if _, err := c.PublishSlices(t.Context(), "gpus.example.com", publish); err != nil {
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
	kubetest.Background(t, func(ctx context.Context) error { return c.WatchEndings(ctx, ends{told: make(chan string, 10)}) })
	kubetest.Background(t, func(ctx context.Context) error { return c.WatchGPUNode(ctx, func(*gpunode.Status, error) {}) })
	if _, err := c.WriteGPUNode(t.Context(), &gpunode.Status{}); err != nil {
		t.Fatal(err)
	}
	if err := c.RemoveGPUNode(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, rule := range Rules {
		if !slices.IsSorted(rule.Verbs) || rule.Why == "" {
			t.Errorf("rule for %s: verbs unsorted or no reason", rule.Resource)
		}
	}
	s.WantAllUsed()
}
