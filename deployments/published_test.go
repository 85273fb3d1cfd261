// SPDX-License-Identifier: Apache-2.0

package deployments

import (
	"context"
	"errors"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"example.com/gpu-agent/internal/config"
	"example.com/gpu-agent/internal/dra"
	"example.com/gpu-agent/internal/kube/agentkube"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/internal/plan"
	"example.com/gpu-agent/pkg/compute"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	resource "k8s.io/api/resource/v1"
)

// publishedOf publishes a recorded node, whose GPUs are offered by turns as MIG instances
// on demand, in units of memory, in replicas and whole; first says how the first one is. From 4
// on there are also units and replicas with shares of the SMs.
func publishedOf(t *testing.T, file string, first int) *dra.Published {
	t.Helper()
	inv, err := config.ReadInventory(read(t, file))
	if err != nil {
		t.Fatal(file, err)
	}
	in := dra.Input{Node: "node-1", Driver: "gpus.example.com", Inventory: inv, Guarantee: "api", Layouts: map[gpu.UUID]plan.Layout{}, Cards: map[gpu.UUID]*mig.Card{},
		Taints: func(d dra.Device) []resource.DeviceTaint {
			if d.Kind != piece.KindWhole {
				return nil
			}
			return []resource.DeviceTaint{{Key: "example.com/unhealthy", Value: "XidFatal", Effect: agentkube.NoExecute}, {Key: "example.com/withdrawn", Effect: agentkube.NoSchedule}}
		}}
	ways := 4
	if first >= ways {
		ways = 6
	}
	for i := range inv.GPUs {
		d := &inv.GPUs[i]
		card, err := mig.NewCard(&d.MIG)
		if err != nil {
			t.Fatal(file, err)
		}
		in.Cards[d.UUID] = card
		in.Layouts[d.UUID] = []plan.Layout{
			{Known: true, Offers: true, Division: piece.Division{Kind: piece.KindPlacement, N: len(card.Placements()), Placements: card.Placements()}},
			{Known: true, Offers: true, Division: piece.Division{Kind: piece.KindUnits, N: int(d.Usable() / 1024), Unit: 1024}},
			{Known: true, Offers: true, Division: piece.Division{Kind: piece.KindReplica, N: 4}},
			{Known: true, Offers: true, Division: piece.Division{Kind: piece.KindWhole, N: 1}},
			{Known: true, Offers: true, Division: piece.Division{Kind: piece.KindUnits, N: int(d.Usable() / 1024), Unit: 1024}, Compute: compute.Sharing{MPS: true}},
			{Known: true, Offers: true, Division: piece.Division{Kind: piece.KindReplica, N: 4}, Compute: compute.Sharing{MPS: true, Factor: 2, Max: 80}},
		}[(first+i)%ways]
	}
	return dra.Build(in)
}

// slicesOf are the slices of a recorded node.
func slicesOf(t *testing.T, file string) []resource.ResourceSlice {
	t.Helper()
	return publishedOf(t, file, 0).Slices
}

// recorded are the files of the recorded nodes.
func recorded(t *testing.T) []string {
	t.Helper()
	files, err := filepath.Glob("../tests/testdata/inventories/*.json")
	if err != nil || len(files) < 7 {
		t.Fatal(files, err)
	}
	return files
}

// slicesAtTheAPIServer has the real server take slices of every recorded node, and return
// them as they were sent.
func slicesAtTheAPIServer(t *testing.T, s *apiServer) {
	for _, file := range recorded(t) {
		for _, slice := range slices.Concat(slicesOf(t, file), publishedOf(t, file, 4).Slices) {
			slice.APIVersion, slice.Kind, slice.Spec.Pool.Generation = "resource.k8s.io/v1", "ResourceSlice", 1
			var back resource.ResourceSlice
			if err := s.do(t, nil, http.MethodPost, "/apis/resource.k8s.io/v1/resourceslices?dryRun=All&fieldValidation=Strict", asJSON,
				&slice, &back); err != nil {
				t.Fatalf("%s: %v", filepath.Base(file), err)
			}
			since := cmpopts.IgnoreFields(resource.DeviceTaint{}, "TimeAdded")
			if diff := cmp.Diff(slice.Spec, back.Spec, cmpopts.EquateEmpty(), since); diff != "" {
				t.Errorf("%s: the server made of %s (- sent, + returned):\n%s", filepath.Base(file), slice.Name, diff)
			}
		}
	}
}

// publishAtTheAPIServer has the agent publish with the rights and under the policy that
// component dra gives it.
func publishAtTheAPIServer(t *testing.T, s *apiServer) {
	const path, driver = "/apis/resource.k8s.io/v1/resourceslices", "gpus.example.com"
	for _, o := range resources(t, "components/dra") {
		s.apply(t, o, false)
	}
	client := s.agentClient(t)
	want := slicesOf(t, "../tests/testdata/inventories/a100-80gb.json")
	s.await(t, "the agent may publish", func() error { _, err := client.PublishSlices(t.Context(), driver, want); return err })
	watched := make(chan struct{}, 100)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go client.WatchSlices(ctx, driver, func() { watched <- struct{}{} })

	type list struct {
		Items []struct {
			Metadata struct {
				Name, ResourceVersion string
				OwnerReferences       []struct{ Kind, Name string }
			}
			Spec resource.ResourceSliceSpec
		}
	}
	have := func() (versions map[string]string, generations map[int64]int) {
		t.Helper()
		var l list
		if err := s.do(t, nil, http.MethodGet, path+"?fieldSelector=spec.driver%3D"+driver, "", nil, &l); err != nil {
			t.Fatal(err)
		}
		versions, generations = map[string]string{}, map[int64]int{}
		for _, i := range l.Items {
			versions[i.Metadata.Name] = i.Metadata.ResourceVersion
			generations[i.Spec.Pool.Generation]++
			if o := i.Metadata.OwnerReferences; len(o) != 1 || o[0].Kind != "Node" || o[0].Name != "node-1" {
				t.Errorf("%s belongs to %+v", i.Metadata.Name, o)
			}
		}
		return versions, generations
	}
	publish := func(want []resource.ResourceSlice) {
		t.Helper()
		if _, err := client.PublishSlices(t.Context(), driver, want); err != nil {
			t.Fatal(err)
		}
	}
	changed := func(before, after map[string]string) (n int) {
		for name, version := range after {
			if before[name] != version {
				n++
			}
		}
		return n
	}
	first, generations := have()
	if len(first) != len(want) || len(generations) != 1 || generations[1] != len(want) {
		t.Fatalf("%d slices of generations %v, want %d of the first", len(first), generations, len(want))
	}
	publish(want)
	if again, _ := have(); changed(first, again) != 0 {
		t.Error("what is right already was written again")
	}

	// A fault is one write, and the pool goes on.
	tainted := slices.Clone(want)
	last := &tainted[len(tainted)-1].Spec
	last.Devices = slices.Clone(last.Devices)
	last.Devices[0].Taints = []resource.DeviceTaint{{Key: "example.com/unhealthy", Effect: agentkube.NoSchedule}}
	publish(tainted)
	second, generations := have()
	if changed(first, second) != 1 || generations[1] != len(want) {
		t.Errorf("a taint wrote %d slices; generations %v", changed(first, second), generations)
	}

	// What somebody deletes is told, and written again as it was.
	for len(watched) > 0 {
		<-watched
	}
	if err := s.do(t, nil, http.MethodDelete, path+"/"+want[1].Name, "", nil, nil); err != nil {
		t.Fatal(err)
	}
	select {
	case <-watched:
	case <-time.After(time.Minute):
		t.Error("nobody tells that a slice was deleted")
	}
	publish(tainted)
	third, generations := have()
	if len(third) != len(want) || changed(second, third) != 1 || generations[1] != len(want) {
		t.Errorf("%d slices, of generations %v", len(third), generations)
	}

	// With fewer slices the pool is another one.
	fewer := slices.Clone(tainted[:len(tainted)-1])
	for i := range fewer {
		fewer[i].Spec.Pool.ResourceSliceCount = int64(len(fewer))
	}
	publish(fewer)
	if left, generations := have(); len(left) != len(fewer) || generations[2] != len(fewer) {
		t.Errorf("%d slices of generations %v, want %d of the second", len(left), generations, len(fewer))
	}

	stolen := fields{"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": fields{"name": "stolen"}, "spec": fields{"driver": driver, "nodeName": "node-1",
		"pool": fields{"name": "node-1/x", "generation": 1, "resourceSliceCount": 1}, "devices": []fields{{"name": "gpu"}}}}
	// The server puts a policy in force a while after it has taken it.
	s.await(t, "the policy is in force", func() error {
		if err := s.do(t, agentOn("node-2"), http.MethodPost, path+"?dryRun=All", asJSON, stolen, nil); err == nil {
			return errors.New("the agent of another node may write slices of this one")
		}
		return nil
	})
	t.Run("not of another node or driver", func(t *testing.T) {
		other := slicesOf(t, "../tests/testdata/inventories/a30-24gb.json")[:1]
		other[0].Spec.Driver = "gpus.example.org"
		if _, err := client.PublishSlices(t.Context(), "gpus.example.org", other); err == nil || !strings.Contains(err.Error(), "of its own driver") {
			t.Errorf("another driver's: %v", err)
		}
		for _, try := range []struct{ method, name string }{{http.MethodPost, "stolen"}, {http.MethodDelete, fewer[0].Name}} {
			body, where := stolen, path
			if try.method == http.MethodDelete {
				body, where = nil, path+"/"+try.name
			}
			if err := s.do(t, agentOn("node-2"), try.method, where, asJSON, body, nil); err == nil || !strings.Contains(err.Error(), "of the node that it runs on") {
				t.Errorf("%s by the agent of another node: %v", try.method, err)
			}
		}
	})
	publish(nil)
	if left, _ := have(); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}
