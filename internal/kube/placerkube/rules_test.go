// SPDX-License-Identifier: Apache-2.0

package placerkube

import (
	"context"
	"slices"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"example.com/gpu-agent/internal/kube/kubetest"
)

// The server refuses what is not in the rules; this is the other half: what is in the rules is
// used.
func TestRulesAreUsed(t *testing.T) {
	s := newServer(t)
	s.Node("node-1", nil, nil)
	cluster, _ := connect(t, s)
	kubetest.Background(t, func(ctx context.Context) error { return cluster.Watch(ctx, newRegister()) })
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
		kubetest.Background(t, func(ctx context.Context) error { return cluster.Follow(ctx, of, &shelf{}) })
	}
	for _, of := range []schema.GroupVersionResource{liqoSlices, kueueObject("workloads"), kueueObject("admissionchecks")} {
		s.Put(of.Resource+"."+of.Group, "a", "one", map[string]any{})
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
	for _, rule := range slices.Concat(Rules, LiqoRules, KueueRules) {
		if !slices.IsSorted(rule.Verbs) || rule.Why == "" {
			t.Errorf("rule for %s: verbs unsorted or no reason", rule.Resource)
		}
	}
	s.WantAllUsed()
}
