// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"example.com/gpu-agent/internal/kube/agentkube"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/plan"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/compute"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
	"example.com/gpu-agent/tests/fakes/claims"
	"example.com/gpu-agent/tests/room"

	core "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"
)

type way func(*gpu.Device, *mig.Card) plan.Layout

// through is a layout whose containers have shares of the SMs.
func through(of way, s compute.Sharing) way {
	return func(d *gpu.Device, c *mig.Card) plan.Layout {
		l := of(d, c)
		l.Compute = s
		return l
	}
}

// shareOf is what a claim has of a shared GPU's memory, in GiB, and of its SMs, in percent. 0 GiB is a replica.
func shareOf(gib, percent int64) map[resourcev1.QualifiedName]resource.Quantity {
	out := map[resourcev1.QualifiedName]resource.Quantity{"replicas": *resource.NewQuantity(1, resource.DecimalSI)}
	if gib > 0 {
		out = memoryOf(gib)
	}
	out[computeShare] = *resource.NewQuantity(percent, resource.DecimalSI)
	return out
}

// The second capacity of a shared GPU, as the documents show it. A GPU whose containers take turns has none, and
// neither has a device that no layout has any longer.
func TestPublishedCompute(t *testing.T) {
	for name, c := range map[string]struct {
		layout way
		most   int
	}{
		"units":     {through(shared, compute.Sharing{MPS: true}), 100},
		"replicas":  {through(replicas, compute.Sharing{MPS: true, Factor: 2, Max: 80}), 80},
		"turns":     {shared, 0},
		"whole":     {whole, 0},
		"of no use": {through(onDemand, compute.Sharing{MPS: true}), 0},
	} {
		in := input(t, several(t, "a100-80gb.json", 1), c.layout)
		in.Departing = []Device{{GPU: in.Inventory.GPUs[0].UUID, Kind: "replica"}, {GPU: in.Inventory.GPUs[0].UUID, Kind: "units"}}
		n := 0
		for _, s := range Build(in).Slices {
			for _, d := range s.Spec.Devices {
				of, ok := d.Capacity[computeShare]
				if !ok {
					continue
				}
				n++
				data, err := json.Marshal(of)
				want := fmt.Sprintf(`{"value":"4800","requestPolicy":{"default":"0","validRange":{"min":"0","max":"%d","step":"1"}}}`, c.most)
				if err != nil || string(data) != want {
					t.Errorf("%s: %s has %s (%v), want %s", name, d.Name, data, err, want)
				}
			}
		}
		if want := min(c.most, 1); n != want {
			t.Errorf("%s: %d devices have it, want %d", name, n, want)
		}
	}
}

// A claim's share of the SMs is the percentage that it names, or follows from its part of the memory.
func TestPrepareThroughMPS(t *testing.T) {
	const replicaDevice = "gpu-00000000-replicas"
	mps := compute.Sharing{MPS: true}
	twice := compute.Sharing{MPS: true, Factor: 2, Max: 80}
	config := func(c *agentkube.Claim) {
		c.Configs = []resourcev1.DeviceAllocationConfiguration{configured(sliced("Long"))}
	}
	one := func(gib, percent int64) []result {
		device := shareDevice
		if gib == 0 {
			device = replicaDevice
		}
		return []result{{Device: device, ShareID: claims.Share("a"), ConsumedCapacity: shareOf(gib, percent)}}
	}
	for name, c := range map[string]struct {
		layout  way
		results []result
		edit    func(*agentkube.Claim)
		want    int // percent
		reason  status.Reason
		text    string
	}{
		"by memory":                  {layout: through(shared, mps), results: one(20, 0), want: 26},
		"by memory, with numbers":    {layout: through(shared, twice), results: one(20, 0), want: 51},
		"the most":                   {layout: through(shared, twice), results: one(79, 0), want: 80},
		"named":                      {layout: through(shared, mps), results: one(20, 70), want: 70},
		"named, as much as there is": {layout: through(shared, twice), results: one(1, 80), want: 80},
		"a replica":                  {layout: through(replicas, mps), results: one(0, 0), want: 25},
		"a replica, named":           {layout: through(replicas, mps), results: one(0, 1), want: 1},
		"turns":                      {layout: shared, results: one(20, 0)},
		"for an administrator":       {layout: through(shared, mps), results: []result{{Device: shareDevice, AdminAccess: new(true), ConsumedCapacity: shareOf(79, 30)}}},
		"more than the layout lets it have": {layout: through(shared, twice), results: one(20, 81), reason: status.ClaimRefused,
			text: "81 percent of the SMs of device gpu-00000000-shared: an amount is 0 to 80: make the claim anew"},
		"less than nothing": {layout: through(shared, mps), results: one(20, -1), reason: status.ClaimRefused, text: "-1 percent of the SMs"},
		"of turns": {layout: shared, results: one(20, 30), reason: status.ClaimOutdated,
			text: "30 percent of the SMs of device gpu-00000000-shared: the containers of its GPU have no shares of the SMs now: make the claim anew"},
		"a time slice": {layout: through(shared, mps), results: one(20, 0), edit: config, reason: status.ClaimUnsupported,
			text: "configuration asks for a time slice in request r0, and the containers of its device's GPU (gpu-00000000-shared) take no turns"},
		"two GPUs": {layout: through(shared, mps), results: append(one(20, 0), result{Device: "gpu-00000001-shared", ShareID: claims.Share("b"), ConsumedCapacity: shareOf(8, 0)}), reason: status.ClaimUnsupported,
			text: "the claim has 2 devices, and device gpu-00000001-shared is a share through MPS: a container with one holds nothing else"},
		"two shares of one GPU": {layout: through(shared, mps), results: append(one(20, 0), result{Device: shareDevice, ShareID: claims.Share("b"), ConsumedCapacity: shareOf(8, 0)}), reason: status.ClaimUnsupported,
			text: "the claim has 2 devices"},
		"one beside a whole GPU": {layout: func(d *gpu.Device, c *mig.Card) plan.Layout {
			if d.Index == 1 {
				return whole(d, c)
			}
			return through(shared, mps)(d, c)
		}, results: append(one(20, 0), result{Device: "gpu-00000001"}), reason: status.ClaimUnsupported, text: "the claim has 2 devices, and device gpu-00000000-shared is a share through MPS"},
		"one beside what an administrator looks at": {layout: through(shared, mps), results: append(one(20, 0), result{Device: "gpu-00000001-shared", AdminAccess: new(true), ConsumedCapacity: shareOf(79, 0)}), want: 26},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, 2, c.layout)
				defer w.run(c.layout)()
				claim := w.claim("a", c.results...)
				if c.edit != nil {
					w.cluster.Edit("ns", "a", c.edit)
				}
				ctx, cancel := context.WithTimeout(t.Context(), time.Second)
				defer cancel()
				_, err := w.Prepare(ctx, claim)
				if c.reason != "" {
					if err == nil || status.CauseOf(err, "").Reason != c.reason || !strings.HasPrefix(err.Error(), c.text) {
						t.Errorf("%v, want %s: %s", err, c.reason, c.text)
					}
					if all := w.ledger.Allocations(); len(all) > 0 || len(w.Refused()) != 1 {
						t.Errorf("it has %+v; refused are %+v", all, w.Refused())
					}
					return
				}
				if err != nil {
					t.Fatal(err)
				}
				a, _ := w.ledger.Get(keyOf(claim, "r0"))
				if g := a.Grants[0]; g.Compute.Ceiling != c.want || w.journal[a.ID].Grants[0].Compute != g.Compute {
					t.Errorf("%v, want %d percent; the record is %+v", g, c.want, w.journal[a.ID])
				}
				time.Sleep(tellAfter)
				synctest.Wait()
				told := w.cluster.Told(claim.UID)
				if percent, has := told[0].Data["computePercent"]; has != (c.want > 0) || has && percent != fmt.Sprint(c.want) {
					t.Errorf("the claim says %+v, want %d percent", told, c.want)
				}
				if _, err := w.Prepare(t.Context(), claim); err != nil {
					t.Errorf("again: %v", err)
				}
			})
		})
	}
}

// A claim that has a share and is prepared again keeps it, whatever the layout has become. While it holds the
// GPU, one of a GPU whose containers take turns has to wait.
func TestShareOutlivesTheLayout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		mps := through(shared, compute.Sharing{MPS: true})
		w := newWorld(t, 1, mps)
		defer w.run(mps)()
		first := w.claim("first", result{Device: shareDevice, ShareID: claims.Share("a"), ConsumedCapacity: shareOf(20, 40)})
		w.prepares(first)
		w.lay(shared) // never without an end of the first; but if it were
		synctest.Wait()
		w.prepares(first)
		if a, _ := w.ledger.Get(keyOf(first, "r0")); a.Grants[0].Compute.Ceiling != 40 {
			t.Errorf("prepared again it has %v", a.Grants[0])
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		second := w.claim("second", result{Device: shareDevice, ShareID: claims.Share("b"), ConsumedCapacity: memoryOf(20)})
		if _, err := w.Prepare(ctx, second); err == nil {
			t.Error("a container that takes turns was prepared beside a client of MPS")
		}
		if err := w.Unprepare(t.Context(), first); err != nil {
			t.Fatal(err)
		}
		w.prepares(second)
	})
}

// What the scheduler's own allocator gives of a GPU's memory and SMs, in random mixes of claims that name a
// percentage or none: as long as there is memory, and 4,800 percent in all; and each result gets the share that
// it was promised.
func TestSchedulerSharesTheSMs(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	met := map[string]int{}
	for range 8 {
		s := compute.Sharing{MPS: true, Factor: []float64{0, 0.5, 3}[rng.IntN(3)], Max: []int{0, 0, 70}[rng.IntN(3)]}
		small := rng.IntN(2) == 0 // claims are so small that SMs run out before the memory
		in := input(t, several(t, "a100-80gb.json", 1), through(shared, s))
		u := in.Inventory.GPUs[0].UUID
		published := Build(in)
		changes := &plan.Changes{Layouts: in.Layouts}
		offer := &Offer{Inventory: in.Inventory, Changes: changes, Cards: in.Cards}
		l := ledger.New(func() {}, time.Now)
		known := room.Classes{"shared": class("shared", `has(device.attributes["gpus.example.com"].sharing)`)}
		cache := cel.NewCache(100, cel.Features{})
		state := structured.AllocatedState{AllocatedDevices: sets.New[structured.DeviceID](), AllocatedSharedDeviceIDs: sets.New[structured.SharedDeviceID](),
			AggregatedCapacity: structured.NewConsumedCapacityCollection()}
		memoryLeft, computeLeft := int64(79), int64(4800)
		for i := range 300 {
			gib, percent := int64(1+rng.IntN(3)), int64(-1) // it names none
			if small {
				gib, percent = 1, int64(70-rng.IntN(5))
			} else if rng.IntN(4) > 0 {
				if percent = int64(rng.IntN(112)); rng.IntN(2) == 0 {
					percent = min(percent, 70)
				}
			}
			requests := map[resourcev1.QualifiedName]resource.Quantity{memory: *resource.NewQuantity(gib<<30, resource.BinarySI)}
			if percent >= 0 {
				requests[computeShare] = *resource.NewQuantity(percent, resource.DecimalSI)
			}
			claim := &resourcev1.ResourceClaim{ObjectMeta: meta.ObjectMeta{Name: "c", Namespace: "ns", UID: "uid"}, Spec: resourcev1.ResourceClaimSpec{Devices: resourcev1.DeviceClaim{
				Requests: []resourcev1.DeviceRequest{{Name: "r", Exactly: &resourcev1.ExactDeviceRequest{DeviceClassName: "shared", AllocationMode: resourcev1.DeviceAllocationModeExactCount, Count: 1,
					Capacity: &resourcev1.CapacityRequirements{Requests: requests}}}}}}}
			features := structured.Features{ConsumableCapacity: true, DeviceTaints: true, PartitionableDevices: true, PrioritizedList: true}
			of, err := structured.NewAllocator(t.Context(), features, state, known, listed(published), cache)
			if err != nil {
				t.Fatal(err)
			}
			got, err := of.Allocate(t.Context(), &core.Node{ObjectMeta: meta.ObjectMeta{Name: "node-1"}}, []*resourcev1.ResourceClaim{claim})
			if err != nil {
				t.Fatal(err)
			}
			fits := gib <= memoryLeft && max(percent, 0) <= computeLeft && percent <= int64(s.Highest())
			if fits != (len(got) == 1) {
				t.Fatalf("%v: %d GiB and %d percent of %d and %d: %v", s, gib, percent, memoryLeft, computeLeft, got)
			}
			if !fits {
				met[fmt.Sprint("refused, SMs short ", gib <= memoryLeft && percent <= int64(s.Highest()))]++
				continue
			}
			r := got[0].Devices.Results[0]
			memoryLeft, computeLeft = memoryLeft-gib, computeLeft-max(percent, 0)
			id := structured.MakeDeviceID(r.Driver, r.Pool, r.Device)
			state.AllocatedSharedDeviceIDs.Insert(structured.MakeSharedDeviceID(id, r.ShareID))
			state.AggregatedCapacity.Insert(structured.NewDeviceConsumedCapacity(id, r.ConsumedCapacity))
			// The node's side of it.
			w := wants(&agentkube.Claim{UID: fmt.Sprint("uid-", i), Results: []result{r}}, driver, "node-1")
			w[0].device = published.Devices[DeviceName{r.Pool, r.Device}]
			g, err := grant(l, offer, &w[0], nil)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := l.TakeAll([]ledger.Request{{ID: w[0].id(), Owner: ledger.DRA, Ref: w[0].ref(), Grants: []ledger.Grant{g}}}); err != nil {
				t.Fatal(err)
			}
			factor := max(s.Factor, 1)
			if s.Factor > 0 {
				factor = s.Factor
			}
			want := min(s.Highest(), int(math.Ceil(factor*100*float64(gib)/79-1e-6)))
			if percent > 0 {
				want = int(percent)
			}
			if g.GPU != u || g.Compute.Ceiling != want {
				t.Fatalf("%v: %d GiB and %d percent is %v, want %d percent", s, gib, percent, g, want)
			}
			met[fmt.Sprint("named ", percent > 0)]++
		}
	}
	for _, what := range []string{"named true", "named false", "refused, SMs short true", "refused, SMs short false"} {
		if met[what] < 20 {
			t.Errorf("%q was met %d times", what, met[what])
		}
	}
}

// The claim says how strongly its share is held: what is known when it is prepared, and within half a minute what
// has changed, also in the next process, and no more often.
func TestClaimSaysWhatIsHeld(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		mps := through(shared, compute.Sharing{MPS: true})
		w := newWorld(t, 1, mps)
		var now compute.Held
		asked := func(string, gpu.UUID) compute.Held {
			w.mu.Lock()
			defer w.mu.Unlock()
			return now
		}
		set := func(h compute.Held) { w.locked(func() { now = h }) }
		w.options().Held = asked
		set(compute.NoneFor("no process yet"))
		stop := w.run(mps)
		claim := w.claim("a", result{Device: shareDevice, ShareID: claims.Share("a"), ConsumedCapacity: shareOf(20, 0)})
		w.prepares(claim)
		says := func(want string) {
			t.Helper()
			synctest.Wait()
			if told := w.cluster.Told(claim.UID); len(told) != 1 || told[0].Data["compute"] != want || told[0].Data["computePercent"] != "26" {
				t.Errorf("the claim says %+v, want %q", told, want)
			}
		}
		time.Sleep(tellAfter)
		says("none: no process yet")
		set(compute.Held{Guarantee: compute.Ceiling, Ceiling: 26})
		time.Sleep(retellEvery)
		says("ceiling 26 %")
		w.cluster.Untell(claim.UID)
		time.Sleep(10 * retellEvery)
		if synctest.Wait(); len(w.cluster.Told(claim.UID)) > 0 {
			t.Errorf("it is told again that nothing has changed: %+v", w.cluster.Told(claim.UID))
		}
		set(compute.NoneFor("its MPS daemon is dead"))
		time.Sleep(retellEvery)
		says("none: its MPS daemon is dead")
		stop()
		set(compute.Held{Guarantee: compute.Ceiling, Ceiling: 26})
		w.restart()
		w.options().Held = asked
		defer w.run(mps)()
		time.Sleep(retellEvery)
		says("ceiling 26 %")
	})
}
