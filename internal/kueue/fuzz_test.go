// SPDX-License-Identifier: Apache-2.0

package kueue

import (
	"encoding/json"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"example.com/gpu-agent/tests/cost"
)

// FuzzDecide reads a workload, a flavor and a check as somebody else has written them, and decides. A
// workload of ours beside it gets its room, and all of it costs little.
func FuzzDecide(f *testing.F) {
	for _, text := range []string{
		`{}`,
		`{"workload":{"metadata":{"uid":"u","namespace":"x","name":"w"},"spec":{"podSets":[{"name":"main","count":2000000000,"template":{"spec":{"containers":[{"resources":{"requests":{"example.com/gpu-mem":"1"}}}]}}}]},
		  "status":{"conditions":[{"type":"QuotaReserved","status":"True"}],"admission":{"podSetAssignments":[{"name":"main","flavors":{"example.com/gpu-mem":"here"},"count":9000000000000000000}]},"admissionChecks":[{"name":"room","state":"Pending"}]}}}`,
		`{"workload":{"metadata":{"uid":"u"},"spec":{"priority":-5,"podSets":[{"name":"a","count":-1},{"name":"a","count":3}]},"status":{"conditions":[{"type":"QuotaReserved","status":"True"}],"reclaimablePods":[{"name":"a","count":-9000000000000000000}],"admissionChecks":[{"name":"room","state":"Retry","retryCount":2147483647,"requeueAfterSeconds":-1}]}},
		  "flavor":{"metadata":{"uid":"f","name":"here"},"spec":{"nodeLabels":{"site":"on-prem"}}},"check":{"metadata":{"uid":"c","name":"room"},"spec":{"controllerName":"example.com/gpu-placer"}}}`,
		`{"workload":{"metadata":{"uid":"u"},"spec":{"podSets":[{"name":"a","count":1,"template":{"spec":{"containers":[{"resources":{"requests":{"cpu":"1e-999999999"}}}]}}}]}}}`,
	} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		var in struct{ Workload, Flavor, Check map[string]any }
		if json.Unmarshal(text, &in) != nil {
			return
		}
		took := cost.Allocated(func() {
			c := newCluster(t, map[string][]int{"a": {79}, "b": {79, 79}})
			ours := c.job("ours", "here", "room", [2]int{1, 40})
			if w, err := ReadWorkload(&unstructured.Unstructured{Object: in.Workload}); err == nil && in.Workload != nil {
				if w.UID = "theirs"; w.Created.Before(ours.Created) {
					w.Created = ours.Created.Add(time.Second) // who came first has his room first
				}
				w.Priority = min(w.Priority, ours.Priority)
				c.view.Workloads = append(c.view.Workloads, w)
			}
			if x, err := ReadFlavor(&unstructured.Unstructured{Object: in.Flavor}, "example.com"); err == nil && in.Flavor != nil && c.view.Flavors[x.Name] == nil {
				c.view.Flavors[x.Name] = x
			}
			if x, err := ReadCheck(&unstructured.Unstructured{Object: in.Check}); err == nil && in.Check != nil && c.view.Checks[x.Name] == nil {
				c.view.Checks[x.Name] = x
			}
			for i := range 3 {
				c.Decide(&c.view, start.Add(time.Duration(i)*time.Minute))
			}
			if at, no := c.Hold("another", "x/another", nil); at == nil && no != nil {
				t.Errorf("the books hold nothing any more: %v", no)
			}
			if parts := c.Books.Holds(); len(parts) == 0 {
				t.Error("our workload has no room")
			}
		})
		if took > 64<<20+uint64(1000*len(text)) {
			t.Errorf("%d bytes cost %d MiB", len(text), took>>20)
		}
	})
}
