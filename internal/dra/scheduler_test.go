// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"example.com/gpu-agent/internal/config"
	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/internal/plan"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"

	core "k8s.io/api/core/v1"
	resource "k8s.io/api/resource/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
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
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		inv, err := config.ReadInventory(data)
		if err != nil {
			t.Fatal(file, err)
		}
		inv.GPUs = inv.GPUs[:1]
		out[filepath.Base(file)] = inv
	}
	return out
}

// class is the class of devices of a type, and of a profile.
func class(name, selector string) *resource.DeviceClass {
	return &resource.DeviceClass{ObjectMeta: meta.ObjectMeta{Name: name}, Spec: resource.DeviceClassSpec{Selectors: []resource.DeviceSelector{{CEL: &resource.CELDeviceSelector{Expression: selector}}}}}
}

type classes map[string]*resource.DeviceClass

func (c classes) List() (out []*resource.DeviceClass, err error) {
	for _, of := range c {
		out = append(out, of)
	}
	return out, nil
}

func (c classes) Get(name string) (*resource.DeviceClass, error) {
	if of := c[name]; of != nil {
		return of, nil
	}
	return nil, fmt.Errorf("no class %q", name)
}

// typed are the slices as the scheduler has them.
func typed(t testing.TB, p *Published) (out []*resource.ResourceSlice) {
	node := "node-1"
	for i := range p.Slices {
		data, err := json.Marshal(&p.Slices[i])
		if err != nil {
			t.Fatal(err)
		}
		s := &resource.ResourceSlice{ObjectMeta: meta.ObjectMeta{Name: p.Slices[i].Name}}
		if err := json.Unmarshal(data, &s.Spec); err != nil {
			t.Fatal(err)
		}
		s.Spec.Driver, s.Spec.NodeName = driver, &node
		out = append(out, s)
	}
	return out
}

// The scheduler's own allocator, given our slices, never puts together what the driver's
// tables forbid, and refuses nothing that they allow.
func TestSchedulerPlacesWhatTheCardAllows(t *testing.T) {
	for file, inv := range models(t) {
		t.Run(file, func(t *testing.T) {
			d := &inv.GPUs[0]
			card, err := mig.NewCard(&d.MIG)
			if err != nil {
				t.Fatal(err)
			}
			whole := Device{GPU: d.UUID, Kind: ledger.Whole}
			published := Build(Input{Node: "node-1", Driver: driver, Inventory: inv, Cards: map[gpu.UUID]*mig.Card{d.UUID: card}, Guarantee: "api", Departing: []Device{whole},
				Layouts: map[gpu.UUID]plan.Layout{d.UUID: {Known: true, Offers: true, Kind: ledger.Placement, N: len(card.Placements()), Placements: card.Placements()}}})
			known := classes{"whole": class("whole", `device.driver == "gpus.example.com" && device.attributes["gpus.example.com"].type == "gpu"`)}
			names := []string{"whole"}
			profiles := map[string]mig.Name{}
			for _, p := range card.Placements() {
				name := p.Profile.Resource()
				if known[name] == nil {
					names = append(names, name)
					profiles[name] = p.Profile
					known[name] = class(name, fmt.Sprintf(`device.attributes["gpus.example.com"].type == "mig" && device.attributes["gpus.example.com"].profile == %q`, p.Profile))
				}
			}
			a := &allocator{t: t, slices: typed(t, published), classes: known, cache: cel.NewCache(100, cel.Features{})}
			rng := rand.New(rand.NewPCG(7, 9))
			held := map[Device]string{}
			granted, refused := 0, 0
			for range *steps {
				if len(held) > 0 && rng.IntN(3) == 0 {
					for of := range held { // any
						delete(held, of)
						break
					}
					continue
				}
				name := names[rng.IntN(len(names))]
				var standing []mig.Placement
				wholly := false
				taken := sets.New[structured.DeviceID]()
				for of, device := range held {
					if of.Kind == ledger.Whole {
						wholly = true
					} else {
						standing = append(standing, of.Placement)
					}
					taken.Insert(structured.MakeDeviceID(driver, published.Slices[0].Pool.Name, device))
				}
				device := a.ask(name, taken)
				want := !wholly && len(held) == 0 // the whole GPU
				if p, ok := profiles[name]; ok {
					want = !wholly && slices.ContainsFunc(card.Placements(), func(s mig.Placement) bool { return s.Profile == p && card.Fits(standing, s) })
				}
				if (device != "") != want {
					t.Fatalf("%s beside %v: the scheduler gives %q, and there is room for one: %v", name, held, device, want)
				}
				if device == "" {
					refused++
					continue
				}
				granted++
				of := published.Devices[DeviceName{published.Slices[0].Pool.Name, device}]
				if of.Kind == ledger.Placement && !card.Fits(standing, of.Placement) {
					t.Fatalf("%s beside %v: the scheduler gives %v", name, held, of)
				}
				held[of] = device
			}
			if granted < *steps/10 || refused < *steps/20 {
				t.Errorf("%d granted, %d refused: this test shows little", granted, refused)
			}
		})
	}
}

// allocator is the scheduler's.
type allocator struct {
	t       testing.TB
	slices  []*resource.ResourceSlice
	classes classes
	cache   *cel.Cache
}

// ask asks for one device of a class, and returns its name, or "" where there is none.
func (a *allocator) ask(class string, taken sets.Set[structured.DeviceID]) string {
	a.t.Helper()
	features := structured.Features{ConsumableCapacity: true, DeviceTaints: true, PartitionableDevices: true, PrioritizedList: true}
	of, err := structured.NewAllocator(context.Background(), features, structured.AllocatedState{AllocatedDevices: taken,
		AllocatedSharedDeviceIDs: sets.New[structured.SharedDeviceID](), AggregatedCapacity: structured.NewConsumedCapacityCollection()}, a.classes, a.slices, a.cache)
	if err != nil {
		a.t.Fatal(err)
	}
	claim := &resource.ResourceClaim{ObjectMeta: meta.ObjectMeta{Name: "c", Namespace: "ns", UID: "uid"}, Spec: resource.ResourceClaimSpec{Devices: resource.DeviceClaim{
		Requests: []resource.DeviceRequest{{Name: "r", Exactly: &resource.ExactDeviceRequest{DeviceClassName: class, AllocationMode: resource.DeviceAllocationModeExactCount, Count: 1}}}}}}
	got, err := of.Allocate(context.Background(), &core.Node{ObjectMeta: meta.ObjectMeta{Name: "node-1"}}, []*resource.ResourceClaim{claim})
	if err != nil {
		a.t.Fatal(err)
	}
	if len(got) == 0 {
		return ""
	}
	return got[0].Devices.Results[0].Device
}
