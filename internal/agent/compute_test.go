// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"testing"
	"time"

	"example.com/gpu-agent/internal/deviceplugin"
	"example.com/gpu-agent/internal/gpunode"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/internal/plan"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/internal/workload"
	"example.com/gpu-agent/pkg/compute"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/memcap"
	"example.com/gpu-agent/pkg/memcap/lib"
)

// The GPUNode and the status say how a GPU's compute is shared, and the GPUNode how strongly all containers on
// the GPU are held: as strongly as the weakest of them, and what nobody has seen is not held. What one container
// can get of replicas is one.
func TestComputeOfAGPU(t *testing.T) {
	units := func(n, percent int) ledger.Allocation {
		a := ledger.Allocation{ID: string(rune('a' + n)), Owner: ledger.DevicePlugin, Resource: memResource, Holder: ledger.Holder{Pod: workload.Pod{Namespace: "ns", Name: "p"}, Container: "c"},
			Grants: []ledger.Grant{{GPU: uuid(0), Piece: piece.Units{Set: piece.SetOf([]int{n}), Unit: 1024}, Compute: compute.Share{Ceiling: percent}}}}
		return a
	}
	held := compute.Held{Guarantee: compute.Ceiling, Ceiling: 25}
	mps := compute.Sharing{MPS: true, Factor: 2}
	for name, c := range map[string]struct {
		compute compute.Sharing
		kind    piece.Kind
		held    []ledger.Allocation
		seen    map[string]compute.Held
		want    compute.Guarantee
		words   string
		largest int
	}{
		"turns":            {compute.Sharing{}, piece.KindUnits, []ledger.Allocation{units(0, 0)}, nil, "", "", 4},
		"nobody":           {mps, piece.KindUnits, nil, nil, "", "mps, factor 2", 4},
		"held":             {mps, piece.KindUnits, []ledger.Allocation{units(0, 25), units(1, 25)}, map[string]compute.Held{"a": held, "b": held}, compute.Ceiling, "mps, factor 2", 4},
		"one is not":       {mps, piece.KindUnits, []ledger.Allocation{units(0, 25), units(1, 25)}, map[string]compute.Held{"a": held, "b": compute.NoneFor("no process yet")}, compute.None, "mps, factor 2", 4},
		"one was not seen": {mps, piece.KindUnits, []ledger.Allocation{units(0, 25), units(1, 25)}, map[string]compute.Held{"b": held}, compute.None, "mps, factor 2", 4},
		"replicas":         {mps, piece.KindReplica, nil, nil, "", "mps, factor 2", 1},
		"replicas in turn": {compute.Sharing{}, piece.KindReplica, nil, nil, "", "", 2},
	} {
		inv := machine(2)
		layout := plan.Layout{Known: true, Offers: true, Division: piece.Division{Kind: c.kind, N: 4}, Compute: c.compute}
		snap := &Snapshot{At: time.Now(), hardware: readout{Inventory: inv}, shape: shape{Layouts: map[gpu.UUID]plan.Layout{uuid(0): layout, uuid(1): layout}}}
		offer := deviceplugin.Build(deviceplugin.Input{Inventory: inv, Changes: &plan.Changes{Layouts: snap.shape.Layouts}, Held: c.held, Names: deviceplugin.ResourceNames("example.com")})
		at := newScene(snap, deviceplugin.ResourceNames("example.com"), "example.com", 1024, offer, c.held)
		at.computed = func(id string, _ gpu.UUID) compute.Held {
			if h, ok := c.seen[id]; ok {
				return h
			}
			return unseen
		}
		s := status.Status{GPUs: at.gpus()}
		n := at.gpuNode(gpunode.InObject, memcap.API)
		g := n.GPUs[0]
		if g.ComputeGuarantee != string(c.want) || (g.Compute == gpunode.Through) != c.compute.MPS || s.GPUs[0].Compute != c.words {
			t.Errorf("%s: %+v; the status says %q", name, g, s.GPUs[0].Compute)
		}
		if n.Resources[0].Largest != c.largest {
			t.Errorf("%s: one container can get %d, want %d", name, n.Resources[0].Largest, c.largest)
		}
		for i, h := range g.Holders {
			if h.ComputePercent != c.held[i].Grants[0].Compute.Ceiling {
				t.Errorf("%s: holder %+v", name, h)
			}
		}
		if err := n.Check(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// The GPUNode says how many namespaces have shares of a GPU. It counts neither containers without a share, nor spot
// pods that have given their room back, nor holders that the kubelet has not named.
func TestNamespacesOfAGPU(t *testing.T) {
	holder := func(id, namespace string, u gpu.UUID, percent int) ledger.Allocation {
		return ledger.Allocation{ID: id, Owner: ledger.DevicePlugin, Resource: memResource,
			Holder: ledger.Holder{Pod: workload.Pod{Namespace: namespace, Name: "p"}, Container: "c"},
			Grants: []ledger.Grant{{GPU: u, Piece: piece.Units{Set: piece.SetOf([]int{0}), Unit: 1024}, Compute: compute.Share{Ceiling: percent}}}}
	}
	out := holder("c", "third", uuid(0), 25)
	out.Tier, out.Yield = ledger.Spot, ledger.Yield{To: []string{"a"}, Out: true}
	yields := out
	yields.Yield.Out = false
	for name, c := range map[string]struct {
		held []ledger.Allocation
		want int
	}{
		"nobody":               {nil, 0},
		"two pods of one":      {[]ledger.Allocation{holder("a", "one", uuid(0), 25), holder("b", "one", uuid(0), 25)}, 1},
		"two":                  {[]ledger.Allocation{holder("a", "one", uuid(0), 25), holder("b", "two", uuid(0), 25)}, 2},
		"on another GPU":       {[]ledger.Allocation{holder("a", "one", uuid(0), 25), holder("b", "two", uuid(1), 25)}, 1},
		"in turns":             {[]ledger.Allocation{holder("a", "one", uuid(0), 0), holder("b", "two", uuid(0), 0)}, 0},
		"not named yet":        {[]ledger.Allocation{holder("a", "one", uuid(0), 25), holder("b", "", uuid(0), 25)}, 1},
		"a spot pod's is back": {[]ledger.Allocation{holder("a", "one", uuid(0), 25), out}, 1},
		"a spot pod yields":    {[]ledger.Allocation{holder("a", "one", uuid(0), 25), yields}, 2},
	} {
		inv := machine(2)
		layout := plan.Layout{Known: true, Offers: true, Division: piece.Division{Kind: piece.KindUnits, N: 4}, Compute: compute.Sharing{MPS: true, Factor: 1}}
		snap := &Snapshot{At: time.Now(), hardware: readout{Inventory: inv}, shape: shape{Layouts: map[gpu.UUID]plan.Layout{uuid(0): layout, uuid(1): layout}}}
		names := deviceplugin.ResourceNames("example.com")
		offer := deviceplugin.Build(deviceplugin.Input{Inventory: inv, Changes: &plan.Changes{Layouts: snap.shape.Layouts}, Held: c.held, Names: names})
		at := newScene(snap, names, "example.com", 1024, offer, c.held)
		at.computed = func(string, gpu.UUID) compute.Held { return unseen }
		n := at.gpuNode(gpunode.InPods, memcap.API)
		if got := n.GPUs[0].Namespaces; got != c.want {
			t.Errorf("%s: %d namespaces, want %d", name, got, c.want)
		}
		if err := n.Check(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// What no record has of a share, the limit page has, and for a holder without a page what the layout gives: the
// share outlives lost records like the cap. A container that takes turns has none.
func TestSharesOutliveLostRecords(t *testing.T) {
	mps := plan.Layout{Known: true, Offers: true, Division: piece.Division{Kind: piece.KindUnits, N: 4, Unit: 1024}, Compute: compute.Sharing{MPS: true, Factor: 2}}
	turns := mps
	turns.Compute = compute.Sharing{}
	for name, c := range map[string]struct {
		layout  plan.Layout
		page    bool
		percent int
		want    int
	}{
		"from the page":                      {mps, true, 26, 26},
		"from the page, whatever the layout": {turns, true, 26, 26},
		"of turns":                           {mps, true, 0, 0},
		"from the layout":                    {mps, false, 0, 50},
		"from the layout, of turns":          {turns, false, 0, 0},
	} {
		l := ledger.New(func() {}, time.Now)
		r, err := deviceplugin.RecordOf(memResource, []string{string(uuid(0)) + "::3"})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := l.Found("a", r, time.Time{}); err != nil {
			t.Fatal(err)
		}
		k := &gatekeeper{caps: &pages{}, ledger: l, unit: 1024}
		if c.page {
			if _, err := k.caps.Write("a", []lib.Limit{{GPU: uuid(0), Bytes: 1 << 30, Percent: c.percent}}); err != nil {
				t.Fatal(err)
			}
		}
		inv := machine(1)
		all := k.allocations(inv)
		if err := k.settleCaps(&fileInputs{inv: inv, layouts: map[gpu.UUID]plan.Layout{uuid(0): c.layout}}, &all[0]); err != nil {
			t.Fatal(err)
		}
		known, _ := l.Get("a")
		for _, g := range []ledger.Grant{all[0].Grants[0], known.Grants[0]} {
			if g.Compute.Ceiling != c.want || g.Cap != piece.CapOf(1<<30) {
				t.Errorf("%s: %v, want %d percent", name, g, c.want)
			}
		}
	}
}
