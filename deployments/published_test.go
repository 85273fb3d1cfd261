// SPDX-License-Identifier: Apache-2.0

package deployments

import (
	"encoding/json"
	"net/http"
	"os"
	"path/filepath"
	"testing"

	"example.com/gpu-agent/internal/dra"
	"example.com/gpu-agent/internal/kube"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/plan"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

// slicesOf publishes a recorded node, whose GPUs are offered by turns as MIG instances
// on demand, in units of memory, in replicas and whole.
func slicesOf(t *testing.T, file string) []kube.ResourceSlice {
	t.Helper()
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var inv gpu.Inventory
	if err := json.Unmarshal(data, &inv); err != nil {
		t.Fatal(file, err)
	}
	in := dra.Input{Node: "node-1", Driver: "gpus.example.com", Inventory: &inv, Guarantee: "api", Layouts: map[gpu.UUID]plan.Layout{}, Cards: map[gpu.UUID]*mig.Card{},
		Taints: func(d dra.Device) []kube.Taint {
			if d.Kind != ledger.Whole {
				return nil
			}
			return []kube.Taint{{Key: "example.com/unhealthy", Value: "XidFatal", Effect: kube.NoExecute}, {Key: "example.com/withdrawn", Effect: kube.NoSchedule}}
		}}
	for i := range inv.GPUs {
		d := &inv.GPUs[i]
		card, err := mig.NewCard(&d.MIG)
		if err != nil {
			t.Fatal(file, err)
		}
		in.Cards[d.UUID] = card
		in.Layouts[d.UUID] = []plan.Layout{
			{Known: true, Offers: true, Kind: ledger.Placement, N: len(card.Placements()), Placements: card.Placements()},
			{Known: true, Offers: true, Kind: ledger.Units, N: int(d.Usable() / 1024), Unit: 1024},
			{Known: true, Offers: true, Kind: ledger.Replica, N: 4},
			{Known: true, Offers: true, Kind: ledger.Whole, N: 1},
		}[i%4]
	}
	return dra.Build(in).Slices
}

// slicesAtTheAPIServer has the real server take slices of every recorded node, and return
// them as they were sent.
func slicesAtTheAPIServer(t *testing.T, s *apiServer) {
	files, err := filepath.Glob("../tests/testdata/inventories/*.json")
	if err != nil || len(files) < 7 {
		t.Fatal(files, err)
	}
	for _, file := range files {
		for _, slice := range slicesOf(t, file) {
			slice.Pool.Generation = 1
			var spec fields
			data, err := json.Marshal(&slice)
			if err == nil {
				err = json.Unmarshal(data, &spec)
			}
			if err != nil {
				t.Fatal(err)
			}
			spec["driver"], spec["nodeName"] = "gpus.example.com", "node-1"
			var back struct{ Spec kube.ResourceSlice }
			if err := s.do(t, nil, http.MethodPost, "/apis/resource.k8s.io/v1/resourceslices?dryRun=All&fieldValidation=Strict", asJSON,
				fields{"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": fields{"name": slice.Name}, "spec": spec}, &back); err != nil {
				t.Fatalf("%s: %v", filepath.Base(file), err)
			}
			back.Spec.Name = slice.Name
			if diff := cmp.Diff(slice, back.Spec, cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("%s: the server made of %s (- sent, + returned):\n%s", filepath.Base(file), slice.Name, diff)
			}
		}
	}
}
