// SPDX-License-Identifier: Apache-2.0

package agentkube

import (
	"encoding/json"
	"log/slog"
	"math"
	"slices"
	"testing"

	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"example.com/gpu-agent/internal/kube"
	"example.com/gpu-agent/internal/kube/kubetest"
)

func alone() *apiServer {
	return &apiServer{
		server:  &kube.Server{Log: slog.New(slog.DiscardHandler)},
		options: Options{Options: kube.Options{Domain: "example.com"}, NodeName: "node-1", ResourceDomain: "example.com", StartupTaint: "example.com/starting"},
	}
}

// FuzzNode reads the agent's Node as somebody else has written it, and makes of it all that the
// agent would write there.
func FuzzNode(f *testing.F) {
	kubetest.FuzzObjects(f, []string{
		`{}`,
		`{"metadata":{"name":"node-1","labels":{"example.com/gpu.partition":"a"},"annotations":{"example.com/gpu.cordoned":"GPU-1"},
		  "managedFields":[{"manager":"gpu-agent","operation":"Apply","fieldsV1":{"f:metadata":{"f:labels":{"f:example.com/a":{}}}}},{"manager":"x","operation":"Update","fieldsV1":{"f:metadata":{"f:labels":{"f:example.com/a":{},"f:":{}}}}}]},
		  "spec":{"unschedulable":true,"taints":[{"key":"example.com/starting","effect":"NoSchedule"},{"key":"x"},7]},
		  "status":{"allocatable":{"example.com/gpu-mem":"79","example.com/gpu":"9e9","cpu":"1"},"conditions":[{"type":"example.com/GPUsHealthy","status":"True"},null],"nodeInfo":{"kubeletVersion":"v1.36.2-gke.1"}}}`,
		`{"status":{"allocatable":{"example.com/gpu-mem":"1e99","example.com/~/x":"-1","example.com/a":"1e-999999999","example.com/b":"999999999999999999999999999E"}}}`,
	}, func(t *testing.T, object *unstructured.Unstructured) {
		n := &ourNode{apiServer: alone()}
		node := readNode(object)
		n.setLast(&node)
		n.options.Allocatable = func(map[string]int64) {}
		n.allocatable(&node)
		labels, annotations := n.wanted(&node, Marks{Labels: map[string]string{"example.com/a": "b"}, Guests: map[string]string{"other.com/c": "d"}, KeepLabels: true})
		if labels["example.com/a"] != "b" {
			t.Errorf("the agent's own label is %q", labels["example.com/a"])
		}
		gone := map[string]any{}
		n.addRemovals(gone, "labels", node.labels, labels)
		n.addRemovals(gone, "annotations", node.annotations, annotations)
		if _, err := json.Marshal(gone); err != nil {
			t.Error(err)
		}
		want := map[string]int64{"example.com/gpu-mem": 3}
		names, _, err := lowering(node.amounts, want)
		if q := node.amounts["example.com/gpu-mem"]; err != nil || len(names) > 0 && q.Value() <= 3 {
			t.Errorf("%v is lowered to 3: %v, %v", q, names, err)
		}
		if _, err := untaint(&node, n.options.StartupTaint, node.Allocatable); err != nil {
			t.Error(err)
		}
		node.condition("example.com/GPUsHealthy")
	})
}

// FuzzSlices reads what the API server says that the node's slices are, as a stolen token of the
// node can have written them. What the agent would write in their place is newer, and right.
func FuzzSlices(f *testing.F) {
	for _, text := range []string{
		`[{}]`,
		`[{"metadata":{"name":"00000"},"spec":{"driver":"gpus.example.com","pool":{"name":"node-1/a100","generation":7,"resourceSliceCount":2},"devices":[{"name":"gpu-0","attributes":{"uuid":{"string":"GPU-1"},"x":{"version":"1.2.3"}},"capacity":{"memory":{"value":"79Gi"}}}]}},{"metadata":{"name":"00001"},"spec":{"pool":{"name":"node-1/a100","generation":8}}}]`,
		`[{"metadata":{"name":"00000"},"spec":{"pool":{"name":"node-1/a100","generation":9223372036854775807,"resourceSliceCount":2}}},{"metadata":{"name":"x"},"spec":7}]`,
		`[{"metadata":{"name":"00001"},"spec":{"pool":{"name":"node-1/a100","generation":-1},"sharedCounters":[{"name":"a","counters":{"m":{"value":"1e999"}}}]}}]`,
	} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		var objects []map[string]any
		if json.Unmarshal(text, &objects) != nil || len(objects) > 100 {
			return
		}
		kubetest.Little(t, text, func() {
			s := &ourSlices{ourNode: &ourNode{apiServer: alone()}}
			list := &unstructured.UnstructuredList{}
			for _, object := range objects {
				if object != nil {
					list.Items = append(list.Items, unstructured.Unstructured{Object: object})
				}
			}
			have := s.readOwn(list)
			s.compare(have)
			if meddled := s.compare(have); len(meddled) > 0 {
				t.Errorf("nobody has touched %v", meddled)
			}
			newest := int64(0)
			for name, h := range have {
				if hopeless(h) {
					delete(have, name)
				} else if h.Spec.Pool.Name == "node-1/a100" {
					newest = max(newest, h.Spec.Pool.Generation)
				}
			}
			want := slicesOfTwo()
			generations(want, have)
			g, other := want[0].Spec.Pool.Generation, want[1].Spec.Pool.Generation
			if g < max(1, newest) || g == math.MaxInt64 && newest < g-1 || g != other {
				t.Errorf("generations %d and %d follow %d", g, other, newest)
			}
			for i := range list.Items {
				spec, _, _ := unstructured.NestedMap(list.Items[i].Object, "spec")
				if slices.ContainsFunc(readDevices("gpus.example.com", spec), func(d Device) bool { return d.Name == "" }) {
					t.Error("a device without a name")
				}
			}
		})
	})
}

// FuzzClaim reads a ResourceClaim as a tenant has made it.
func FuzzClaim(f *testing.F) {
	kubetest.FuzzObjects(f, []string{
		`{}`,
		`{"metadata":{"namespace":"a","name":"b","uid":"c"},"status":{"allocation":{"devices":{"results":[{"request":"r","driver":"gpus.example.com","pool":"node-1/a100","device":"gpu-0","shareID":"s","consumedCapacity":{"memory":"3Gi"}},{"driver":"x"}],
		  "config":[{"source":"FromClass","requests":["r"],"opaque":{"driver":"gpus.example.com","parameters":{"kind":"x"}}}]}},"reservedFor":[{"resource":"pods","name":"p","uid":"u"},{"apiGroup":"x"}],"devices":[{"driver":"gpus.example.com"}]}}`,
		`{"status":{"allocation":{"devices":{"results":[{"driver":"gpus.example.com","consumedCapacity":{"memory":"1e999999999"}}]}}}}`,
	}, func(t *testing.T, object *unstructured.Unstructured) {
		claim, err := readClaim(object, "gpus.example.com")
		if err == nil && slices.ContainsFunc(claim.Results, func(r resourcev1.DeviceRequestAllocationResult) bool {
			return r.Driver != "gpus.example.com"
		}) {
			t.Errorf("it has what another driver is told: %+v", claim.Results)
		}
	})
}
