// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"example.com/gpu-agent/internal/config"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/internal/plan"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/compute"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/timeslice"
)

// offers gives the GPUs of a node the layouts that are wanted, and publishes what they offer.
func offers(t testing.TB, d *desk, inv *gpu.Inventory, unit gpu.MiB, wanted ...config.Want) *plan.Changes {
	t.Helper()
	for i := range wanted {
		wanted[i].GPU, wanted[i].Mode, wanted[i].API = inv.GPUs[i].UUID, config.Shared, ledger.DevicePlugin
	}
	changes := plan.Make(plan.Input{Inventory: inv, Wanted: wanted, Layouts: map[gpu.UUID]plan.Layout{}, Unit: unit})
	d.Publish(func(held []ledger.Allocation) *Offer {
		return Build(Input{Inventory: inv, Changes: &changes, Held: held, Names: names})
	})
	return &changes
}

// Random mixes of pods have the shares that their parts of the GPU's memory promise: each is the part times the
// factor, rounded up, at most the highest; and shares of all parts of a GPU are at most 100 percent times the
// factor, and a percent for the rounding of each. The record has the share, and so has what a container gets
// that takes over from its init container.
func TestSharesFollowTheParts(t *testing.T) {
	rng := rand.New(rand.NewPCG(4, 2))
	met := map[string]int{}
	for range 400 {
		unit := []gpu.MiB{512, 1024, 4096}[rng.IntN(3)]
		inv := machine(1)
		inv.GPUs[0].Memory, inv.GPUs[0].Reserved = gpu.MiB(8192+rng.IntN(150_000)), gpu.MiB(rng.IntN(2000))
		w := config.Want{Compute: compute.Sharing{MPS: rng.IntN(4) > 0}}
		if w.Compute.MPS && rng.IntN(3) > 0 {
			w.Compute.Factor, w.Compute.Max = float64(1+rng.IntN(50))/10, rng.IntN(101)
		}
		resource := memName
		if rng.IntN(3) == 0 {
			resource, w.Replicas = repName, 1+rng.IntN(compute.MostClients)
		}
		d, _ := newDesk()
		all := offers(t, d, inv, unit, w).Layouts[nth(0)].N
		factor, most := 1.0, 100
		if w.Compute.Factor > 0 {
			factor = w.Compute.Factor
		}
		if w.Compute.Max > 0 {
			most = w.Compute.Max
		}
		sum, n := 0, 0
		for first := 0; first < all; {
			count := 1
			if w.Replicas == 0 {
				count = min(1+rng.IntN(all), all-first)
			}
			var ids []string
			for i := range count {
				ids = append(ids, timeslice.ID(nth(0), first+i))
			}
			first += count
			a, err := d.Allocate(resource, ids)
			if err != nil {
				t.Fatal(err)
			}
			again, err := d.Allocate(resource, ids)
			if err != nil || again.Grants[0].Compute != a.Grants[0].Compute || again.Epoch == a.Epoch {
				t.Fatalf("given again: %v, %v; first %v", again.Grants, err, a.Grants)
			}
			got, exact := a.Grants[0].Compute.Ceiling, factor*100*float64(count)/float64(all)
			sum, n = sum+got, n+1
			switch {
			case !w.Compute.MPS && got == 0:
				met["turns"]++
			case got == most && exact > float64(most)-1:
				met["the most"]++
			case w.Compute.MPS && float64(got) >= exact-1e-6 && float64(got) < exact+1 && got <= most:
				met[fmt.Sprint("by memory, replicas ", w.Replicas > 0)]++
			default:
				t.Fatalf("%d of %d devices, %v: %d percent, exactly %v", count, all, w.Compute, got, exact)
			}
			if !w.Compute.MPS {
				continue
			}
			if record := a.Grants[0].String(); !strings.Contains(record, fmt.Sprintf(`"compute":{"ceiling":%d}`, got)) {
				t.Fatalf("the record has no share of %d percent: %s", got, record)
			}
		}
		if w.Compute.MPS && sum > int(math.Ceil(100*factor))+n {
			t.Fatalf("%d containers of %v have %d percent", n, w.Compute, sum)
		}
	}
	for _, what := range []string{"turns", "the most", "by memory, replicas true", "by memory, replicas false"} {
		if met[what] < 100 {
			t.Errorf("%q was met %d times", what, met[what])
		}
	}
}

// A container with a share through MPS holds one GPU: its processes reach one server.
func TestMPSShareIsOfOneGPU(t *testing.T) {
	mps := compute.Sharing{MPS: true}
	const want = " is a share through MPS, and a container with one holds one GPU, since a process reaches one MPS server: " +
		"ask for 1 device, or for another resource"
	refused := func(t *testing.T, err error, device string) {
		t.Helper()
		if err == nil || err.Error() != "device "+device+want || status.CauseOf(withReason(err), "").Reason != status.MPSOneGPU {
			t.Errorf("%v, want that device %s is refused", err, device)
		}
	}
	id := timeslice.ID
	d, _ := newDesk()
	offers(t, d, machine(4), 1024, config.Want{Replicas: 2, Compute: mps}, config.Want{Replicas: 2, Compute: mps},
		config.Want{Replicas: 2}, config.Want{Replicas: 2})
	var all, through []string
	for i := range 4 {
		for n := range 2 {
			if all = append(all, id(nth(i), n)); i < 2 {
				through = append(through, id(nth(i), n))
			}
		}
	}
	_, err := d.Allocate(repName, []string{id(nth(0), 0), id(nth(1), 1)})
	refused(t, err, id(nth(0), 0))
	_, err = d.Allocate(repName, []string{id(nth(2), 0), id(nth(1), 1)})
	refused(t, err, id(nth(1), 1))
	if len(d.Allocations()) > 0 {
		t.Errorf("a refusal took %v", d.Allocations())
	}
	// A choice of two has GPUs without MPS, and there is none of three. Of one there is any.
	got, err := d.Prefer(repName, all, nil, 2)
	if err != nil || slices.Contains(through, got[0]) || slices.Contains(through, got[1]) {
		t.Errorf("two of %v: %v, %v", all, got, err)
	}
	_, err = d.Prefer(repName, all, nil, 3)
	refused(t, err, through[0])
	_, err = d.Prefer(repName, through, nil, 2)
	refused(t, err, through[0])
	_, err = d.Prefer(repName, all, []string{through[3]}, 2)
	refused(t, err, through[3])
	if got, err := d.Prefer(repName, through, nil, 1); err != nil || len(got) != 1 {
		t.Errorf("one of %v: %v, %v", through, got, err)
	}
	for _, ids := range [][]string{{id(nth(0), 0)}, {id(nth(2), 0), id(nth(3), 0)}} {
		if _, err := d.Allocate(repName, ids); err != nil {
			t.Errorf("%v: %v", ids, err)
		}
	}
	// Units are of one GPU anyway.
	d, _ = newDesk()
	offers(t, d, machine(2), 1024, config.Want{Compute: mps}, config.Want{Compute: mps})
	a, err := d.Allocate(memName, []string{id(nth(0), 0), id(nth(0), 2), id(nth(0), 3)})
	if err != nil || a.Grants[0].Compute.Ceiling != 75 {
		t.Errorf("3 of 4 units: %v, %v", a.Grants, err)
	}
	_, err = d.Allocate(memName, []string{id(nth(0), 1), id(nth(1), 0)})
	wantErr(t, err, "GPU")
}

// A share that would not be known is refused: without it the container would have all SMs.
func TestUnknownShareIsRefused(t *testing.T) {
	d, _ := newDesk()
	v := units(nil)
	v.Shares = map[gpu.UUID]piece.Share{gpuA: {Division: piece.Division{Kind: piece.KindReplica, N: 4}}}
	v.Compute = map[gpu.UUID]compute.Sharing{gpuA: {MPS: true}}
	d.set(v)
	_, err := d.Allocate(memName, []string{timeslice.ID(gpuA, 0)})
	wantErr(t, err, "units 0 of "+string(gpuA)+": it is not known which part of the GPU that is")
	if a, err := d.Allocate(memName, []string{timeslice.ID(gpuB, 0)}); err != nil || a.Grants[0].Compute.Ceiling != 0 {
		t.Errorf("beside it: %v, %v", a, err)
	}
}

// BenchmarkAllocateShare is of 20 of a GPU's memory units, whose containers take turns or have shares through
// MPS.
func BenchmarkAllocateShare(b *testing.B) {
	for _, mps := range []bool{false, true} {
		b.Run(fmt.Sprintf("MPS %v", mps), func(b *testing.B) {
			inv := machine(8)
			for i := range inv.GPUs {
				inv.GPUs[i].Memory = 80 * 1024
			}
			d, _ := newDesk()
			offers(b, d, inv, 1024, slices.Repeat([]config.Want{{Compute: compute.Sharing{MPS: mps}}}, 8)...)
			var n []int
			for i := range 20 {
				n = append(n, i)
			}
			take := ids(nth(0), n...)
			b.ReportAllocs()
			for b.Loop() {
				key, err := keyOf(d.Allocate(memName, take))
				if err != nil {
					b.Fatal(err)
				}
				d.mu.Lock()
				d.endLocked(key)
				d.lists.showMoved()
				d.mu.Unlock()
			}
		})
	}
}
