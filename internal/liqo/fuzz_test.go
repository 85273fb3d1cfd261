// SPDX-License-Identifier: Apache-2.0

package liqo

import (
	"encoding/json"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"example.com/gpu-agent/tests/cost"
)

// FuzzGrants reads a slice and a tenant as another cluster has written them, and decides. One that asks
// beside it is granted its room, and all of it costs little.
func FuzzGrants(f *testing.F) {
	for _, text := range []string{
		`{}`,
		`{"slice":{"metadata":{"uid":"u","name":"gpus","namespace":"liqo-tenant-b","labels":{"liqo.io/replicated":"true","liqo.io/originID":"b"}},
		  "spec":{"consumerClusterID":"b","class":"gpu-agent","resources":{"example.com/gpu-mem":"9223372036854775807","example.com/mig-1g.10gb":"4000000000","cpu":"1E"}},
		  "status":{"conditions":[{"type":"Authentication","status":"Accepted"}],"resources":{"example.com/gpu-mem":"60000"}}},
		  "tenant":{"metadata":{"uid":"t","namespace":"liqo-tenant-b"},"spec":{"clusterID":"b"}}}`,
		`{"slice":{"metadata":{"uid":"u"},"spec":{"resources":{"example.com/gpu-mem":"-1"}},"status":{"nodeLabels":{"a":"b"}}}}`,
		`{"slice":{"metadata":{"uid":"u"},"spec":{"resources":{"cpu":"1e-999999999"}}}}`,
	} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		var in struct{ Slice, Tenant map[string]any }
		if json.Unmarshal(text, &in) != nil {
			return
		}
		took := cost.Allocated(func() {
			p := newPeers(t)
			p.cluster.units("a", 79, 79)
			p.cluster.onDemand("b", "1g.10gb", "3g.40gb")
			p.ask("ours", map[string]any{memory: "40"})
			all := []*Slice{p.read("ours")}
			if theirs, err := ReadSlice(&unstructured.Unstructured{Object: in.Slice}); err == nil && in.Slice != nil {
				if theirs.UID = "theirs"; !theirs.Created.After(all[0].Created) {
					theirs.Created = all[0].Created.Add(time.Second) // who came first has his room first
				}
				theirs.Granted = nil
				all = append(all, theirs)
			}
			tenants := []*Tenant{p.tenants["ours"]}
			if theirs, err := ReadTenant(&unstructured.Unstructured{Object: in.Tenant}); err == nil && in.Tenant != nil && theirs.Cluster != "ours" {
				tenants = append(tenants, theirs)
			}
			granted := false
			for i := range 3 {
				for _, d := range p.grants.Decide(all, tenants, p.now.Add(time.Duration(i)*time.Minute)) {
					granted = granted || d.Slice.UID == "ours" && d.Status != nil
				}
			}
			if !granted {
				t.Error("our slice is told nothing")
			}
		})
		if took > 128<<20+uint64(1000*len(text)) {
			t.Errorf("%d bytes cost %d MiB", len(text), took>>20)
		}
	})
}
