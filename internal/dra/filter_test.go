// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/internal/plan"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
	"example.com/gpu-agent/tests/room"

	"go.yaml.in/yaml/v4"
	core "k8s.io/api/core/v1"
	resource "k8s.io/api/resource/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"
)

// BenchmarkFilter is the stock scheduler's question for one pod on a cluster of 100 nodes
// with eight H100 each, filled more and more: can each node have it? It has the scheduler's
// own allocator, as many goroutines as the scheduler and the manifests' DeviceClasses. An
// operation is all nodes.
func BenchmarkFilter(b *testing.B) {
	inv := models(b)["h100-80gb.json"]
	card, err := mig.NewCard(&inv.GPUs[0].MIG)
	if err != nil {
		b.Fatal(err)
	}
	some := slices.DeleteFunc(slices.Clone(card.Placements()), func(p mig.Placement) bool {
		return !slices.Contains([]string{"1g.10gb", "3g.40gb"}, p.Profile.String())
	})
	for name, layout := range map[string]plan.Layout{
		"dynamic":      {Known: true, Offers: true, Dynamic: true, Division: piece.Division{Kind: piece.KindPlacement, N: 79, Unit: 1024, Placements: card.Placements()}},
		"two-profiles": {Known: true, Offers: true, Dynamic: true, Division: piece.Division{Kind: piece.KindPlacement, N: 79, Unit: 1024, Placements: some}},
		"shared":       {Known: true, Offers: true, Division: piece.Division{Kind: piece.KindUnits, N: 79, Unit: 1024}},
	} {
		b.Run(name, func(b *testing.B) { filter(b, inv, card, layout) })
	}
}

func filter(b *testing.B, inv *gpu.Inventory, card *mig.Card, layout plan.Layout) {
	const nodes, perNode, parallel = 100, 8, 16
	a := &allocator{t: b, classes: manifestClasses(b), cache: cel.NewCache(100, cel.Features{})}
	for n := range nodes {
		name := fmt.Sprintf("node-%d", n)
		in := Input{Node: name, Driver: driver, Cards: map[gpu.UUID]*mig.Card{}, Guarantee: "api", Layouts: map[gpu.UUID]plan.Layout{}}
		of := *inv
		of.GPUs = nil
		for i := range perNode {
			d := inv.GPUs[0]
			d.Index, d.UUID = i, gpu.UUID(fmt.Sprintf("GPU-%08x-0000-4000-8000-%012x", i, n))
			of.GPUs = append(of.GPUs, d)
			in.Cards[d.UUID] = card
			in.Layouts[d.UUID] = layout
		}
		in.Inventory = &of
		a.slices = append(a.slices, listed(Build(in))...)
	}
	rng := rand.New(rand.NewPCG(11, 13))
	names := []string{"gpu-memory.example.com"}
	if layout.Dynamic {
		names = append(names, "gpu.example.com", "mig-1g.10gb.example.com", "mig-3g.40gb.example.com")
	}
	var held []given
	var took []time.Duration
	b.ResetTimer()
	for b.Loop() {
		name, n := names[rng.IntN(len(names))], 0
		if strings.HasPrefix(name, "gpu-memory.") {
			n = 4 + rng.IntN(28)
		}
		claims := []*resource.ResourceClaim{claimOf(name, n)}
		began := time.Now()
		ask := a.allocator(held)
		var fits [nodes]*resource.AllocationResult
		var all sync.WaitGroup
		for first := range parallel {
			all.Go(func() {
				for i := first; i < nodes; i += parallel {
					got, err := ask.Allocate(context.Background(), &core.Node{ObjectMeta: meta.ObjectMeta{Name: fmt.Sprintf("node-%d", i)}}, claims)
					if err != nil {
						b.Error(err)
					} else if len(got) > 0 {
						fits[i] = &got[0]
					}
				}
			})
		}
		all.Wait()
		took = append(took, time.Since(began))
		can := slices.DeleteFunc(fits[:], func(r *resource.AllocationResult) bool { return r == nil })
		if len(can) == 0 { // full
			rng.Shuffle(len(held), func(i, j int) { held[i], held[j] = held[j], held[i] })
			held = held[:len(held)/2]
			continue
		}
		r := can[rng.IntN(len(can))].Devices.Results[0]
		held = append(held, given{units: n, id: structured.MakeDeviceID(r.Driver, r.Pool, r.Device), share: r.ShareID})
	}
	slices.Sort(took)
	for _, q := range []int{50, 99} {
		b.ReportMetric(float64(took[(len(took)-1)*q/100])/1e6, fmt.Sprintf("p%d-ms", q))
	}
	b.ReportMetric(float64(len(held)), "held")
}

// manifestClasses are the DeviceClasses of the manifests.
func manifestClasses(t testing.TB) room.Classes {
	text, err := os.ReadFile("../../deployments/components/dra/classes.yaml")
	if err != nil {
		t.Fatal(err)
	}
	out := room.Classes{}
	for part := range strings.SplitSeq(string(text), "\n---\n") {
		var object map[string]any
		of := &resource.DeviceClass{}
		err := yaml.Unmarshal([]byte(part), &object)
		if err == nil {
			text, err = json.Marshal(object)
		}
		if err == nil {
			err = json.Unmarshal(text, of)
		}
		if err != nil {
			t.Fatal(err)
		}
		out[of.Name] = of
	}
	return out
}
