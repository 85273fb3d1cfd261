// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"example.com/gpu-agent/internal/config"
	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/internal/plan"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
	"example.com/gpu-agent/tests/room"

	core "k8s.io/api/core/v1"
	resource "k8s.io/api/resource/v1"
	apiresource "k8s.io/apimachinery/pkg/api/resource"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	apitypes "k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"
)

var steps = flag.Int("scheduler.steps", 600, "requests to the scheduler's allocator, of each model")

const driver = "gpus.example.com"

// models are the recorded cards, one of each, by file.
func models(t testing.TB) map[string]*gpu.Inventory {
	files, err := filepath.Glob("../../tests/testdata/inventories/*.json")
	if err != nil || len(files) < 7 {
		t.Fatal(files, err)
	}
	out := map[string]*gpu.Inventory{}
	for _, file := range files {
		out[filepath.Base(file)] = model(t, filepath.Base(file))
	}
	return out
}

// model is one of them.
func model(t testing.TB, file string) *gpu.Inventory {
	data, err := os.ReadFile(filepath.Join("../../tests/testdata/inventories", file))
	if err != nil {
		t.Fatal(err)
	}
	inv, err := config.ReadInventory(data)
	if err != nil {
		t.Fatal(file, err)
	}
	inv.GPUs = inv.GPUs[:1]
	return inv
}

// class is the class of devices of a type, and of a profile.
func class(name, selector string) *resource.DeviceClass {
	return &resource.DeviceClass{ObjectMeta: meta.ObjectMeta{Name: name}, Spec: resource.DeviceClassSpec{Selectors: []resource.DeviceSelector{{CEL: &resource.CELDeviceSelector{Expression: selector}}}}}
}

// listed are the slices as the scheduler lists them.
func listed(p *Published) (out []*resource.ResourceSlice) {
	for i := range p.Slices {
		out = append(out, &p.Slices[i])
	}
	return out
}

// The scheduler's own allocator, given our slices of a dynamic GPU, never puts together what
// the driver's tables forbid or what needs another mode, and refuses nothing that they allow.
func TestSchedulerPlacesWhatTheCardAllows(t *testing.T) {
	const units = 8
	for file, inv := range models(t) {
		t.Run(file, func(t *testing.T) {
			d := &inv.GPUs[0]
			card, err := mig.NewCard(&d.MIG)
			if err != nil {
				t.Fatal(err)
			}
			published := Build(Input{Node: "node-1", Driver: driver, Inventory: inv, Cards: map[gpu.UUID]*mig.Card{d.UUID: card}, Guarantee: "api", Layouts: map[gpu.UUID]plan.Layout{
				d.UUID: {Known: true, Offers: true, Dynamic: true, Division: piece.Division{Kind: piece.KindPlacement, N: units, Unit: 1024, Placements: card.Placements()}}}})
			shared := func(is string) string {
				return `device.driver == "gpus.example.com" && device.attributes["gpus.example.com"].type == "gpu" && ` + is + `has(device.attributes["gpus.example.com"].sharing)`
			}
			known := room.Classes{"whole": class("whole", shared("!")), "shared": class("shared", shared(""))}
			names := []string{"whole", "shared"}
			profiles := map[string]mig.Name{}
			for _, p := range card.Placements() {
				name := p.Profile.Resource()
				if known[name] == nil {
					names = append(names, name)
					profiles[name] = p.Profile
					known[name] = class(name, fmt.Sprintf(`device.attributes["gpus.example.com"].type == "mig" && device.attributes["gpus.example.com"].profile == %q`, p.Profile))
				}
			}
			a := &allocator{t: t, slices: listed(published), classes: known, cache: cel.NewCache(100, cel.Features{})}
			rng := rand.New(rand.NewPCG(7, 9))
			var held []given
			granted, refused := 0, 0
			for range *steps {
				if len(held) > 0 && rng.IntN(3) == 0 {
					i := rng.IntN(len(held))
					held = slices.Delete(held, i, i+1)
					continue
				}
				name, n := names[rng.IntN(len(names))], 0
				if name == "shared" {
					n = 1 + rng.IntN(units)
				}
				// What the hardware has room for.
				var standing []mig.Placement
				kinds, free := map[piece.Kind]bool{}, units
				for i := range held {
					kinds[held[i].of.Kind] = true
					free -= held[i].units
					if held[i].of.Kind == piece.KindPlacement {
						standing = append(standing, held[i].of.Placement)
					}
				}
				want := len(held) == 0 // the whole GPU
				if p, ok := profiles[name]; ok {
					want = len(held) == len(standing) && slices.ContainsFunc(card.Placements(), func(s mig.Placement) bool { return s.Profile == p && card.Fits(standing, s) })
				} else if n > 0 {
					want = len(held) == 0 || kinds[piece.KindUnits] && len(kinds) == 1 && n <= free
				}
				device, share := a.ask(name, n, held)
				if (device.Device != "") != want {
					t.Fatalf("%s (%d units) beside %v: the scheduler gives %q, and there is room for one: %v", name, n, held, device.Device, want)
				}
				if device.Device == "" {
					refused++
					continue
				}
				granted++
				of := published.Devices[DeviceName{published.Slices[0].Spec.Pool.Name, device.Device}]
				if of.Kind == piece.KindPlacement && !card.Fits(standing, of.Placement) {
					t.Fatalf("%s beside %v: the scheduler gives %v", name, held, of)
				}
				held = append(held, given{of, n, structured.MakeDeviceID(device.Driver, device.Pool, device.Device), share})
			}
			if granted < *steps/10 || refused < *steps/20 {
				t.Errorf("%d granted, %d refused: this test shows little", granted, refused)
			}
		})
	}
}

// given is a device, or units of it, that a claim has.
type given struct {
	of    Device
	units int
	id    structured.DeviceID
	share *apitypes.UID
}

// allocator is the scheduler's.
type allocator struct {
	t       testing.TB
	slices  []*resource.ResourceSlice
	classes room.Classes
	cache   *cel.Cache
}

// ask asks for one device of a class, or so many units of it, beside what is held. The
// device's name is empty where there is none.
func (a *allocator) ask(class string, units int, held []given) (device resource.DeviceRequestAllocationResult, share *apitypes.UID) {
	a.t.Helper()
	got, err := a.allocator(held).Allocate(context.Background(), &core.Node{ObjectMeta: meta.ObjectMeta{Name: "node-1"}}, []*resource.ResourceClaim{claimOf(class, units)})
	if err != nil {
		a.t.Fatal(err)
	}
	if len(got) == 0 {
		return device, nil
	}
	device = got[0].Devices.Results[0]
	return device, device.ShareID
}

// allocator is the scheduler's for one pod, beside what is held.
func (a *allocator) allocator(held []given) structured.Allocator {
	a.t.Helper()
	state := structured.AllocatedState{AllocatedDevices: sets.New[structured.DeviceID](), AllocatedSharedDeviceIDs: sets.New[structured.SharedDeviceID](), AggregatedCapacity: structured.NewConsumedCapacityCollection()}
	for i := range held {
		if h := &held[i]; h.share == nil {
			state.AllocatedDevices.Insert(h.id)
		} else {
			state.AllocatedSharedDeviceIDs.Insert(structured.MakeSharedDeviceID(h.id, h.share))
			state.AggregatedCapacity.Insert(structured.NewDeviceConsumedCapacity(h.id, map[resource.QualifiedName]apiresource.Quantity{memory: amountOf(h.units)}))
		}
	}
	features := structured.Features{ConsumableCapacity: true, DeviceTaints: true, PartitionableDevices: true, PrioritizedList: true}
	of, err := structured.NewAllocator(context.Background(), features, state, a.classes, a.slices, a.cache)
	if err != nil {
		a.t.Fatal(err)
	}
	return of
}

// claimOf asks for one device of a class, or so many units of it.
func claimOf(class string, units int) *resource.ResourceClaim {
	exactly := &resource.ExactDeviceRequest{DeviceClassName: class, AllocationMode: resource.DeviceAllocationModeExactCount, Count: 1}
	if units > 0 {
		exactly.Capacity = &resource.CapacityRequirements{Requests: map[resource.QualifiedName]apiresource.Quantity{memory: amountOf(units)}}
	}
	return &resource.ResourceClaim{ObjectMeta: meta.ObjectMeta{Name: "c", Namespace: "ns", UID: "uid"}, Spec: resource.ResourceClaimSpec{Devices: resource.DeviceClaim{
		Requests: []resource.DeviceRequest{{Name: "r", Exactly: exactly}}}}}
}

func amountOf(units int) apiresource.Quantity {
	return *apiresource.NewQuantity(int64(units)<<30, apiresource.BinarySI)
}
