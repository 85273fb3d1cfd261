// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"example.com/gpu-agent/internal/piece"
	"example.com/gpu-agent/internal/plan"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
	"example.com/gpu-agent/tests/room"

	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"
)

// several is an inventory of n GPUs of a model.
func several(t testing.TB, file string, n int) *gpu.Inventory {
	of := model(t, file)
	out := *of
	out.GPUs = nil
	for i := range n {
		d := of.GPUs[0]
		d.Index, d.UUID, d.PCI = i, gpu.UUID(fmt.Sprintf("GPU-%08x-0000-4000-8000-000000000000", i)), fmt.Sprintf("00000000:%02x:00.0", 2*i)
		out.GPUs = append(out.GPUs, d)
	}
	return &out
}

// input offers every GPU in one way.
func input(t testing.TB, inv *gpu.Inventory, layout func(*gpu.Device, *mig.Card) plan.Layout) Input {
	in := Input{Node: "node-1", Driver: driver, Inventory: inv, Guarantee: "api", Layouts: map[gpu.UUID]plan.Layout{}, Cards: map[gpu.UUID]*mig.Card{}}
	for i := range inv.GPUs {
		d := &inv.GPUs[i]
		card, err := mig.NewCard(&d.MIG)
		if err != nil {
			t.Fatal(err)
		}
		in.Cards[d.UUID], in.Layouts[d.UUID] = card, layout(d, card)
	}
	return in
}

func onDemand(_ *gpu.Device, c *mig.Card) plan.Layout {
	return plan.Layout{Known: true, Offers: true, Division: piece.Division{Kind: piece.KindPlacement, N: len(c.Placements()), Placements: c.Placements()}}
}

func dynamic(d *gpu.Device, c *mig.Card) plan.Layout {
	l := onDemand(d, c)
	l.Dynamic, l.N, l.Unit = true, 79, 1024
	return l
}

func shared(*gpu.Device, *mig.Card) plan.Layout {
	return plan.Layout{Known: true, Offers: true, Division: piece.Division{Kind: piece.KindUnits, N: 79, Unit: 1024}}
}

func replicas(*gpu.Device, *mig.Card) plan.Layout {
	return plan.Layout{Known: true, Offers: true, Division: piece.Division{Kind: piece.KindReplica, N: 4}}
}

func whole(*gpu.Device, *mig.Card) plan.Layout {
	return plan.Layout{Known: true, Offers: true, Division: piece.Division{Kind: piece.KindWhole, N: 1}}
}

// Whatever the card, slices keep to the API's limits, and names are DNS labels that tell
// devices apart.
func TestSlicesKeepToTheLimits(t *testing.T) {
	label := regexp.MustCompile(`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`)
	object := regexp.MustCompile(`^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$`)
	for file := range models(t) {
		inv := several(t, file, 17)
		in := input(t, inv, dynamic)
		in.Fixed = map[gpu.UUID]bool{}
		for i := range inv.GPUs {
			// All that can be said of a device is said of each.
			d, numa := &inv.GPUs[i], 1
			d.NUMA, d.Path, d.Fabric, in.Fixed[d.UUID] = &numa, []string{"pci0000:16"}, &gpu.Fabric{Cluster: strings.Repeat("c", 36), Clique: 1}, true
			d.MIG.Profiles = slices.Clone(d.MIG.Profiles)
			for j := range d.MIG.Profiles {
				p := &d.MIG.Profiles[j]
				p.Memory, p.SMs, p.Engines = 1024, 14, &gpu.Engines{Copy: 1}
			}
			for _, at := range in.Cards[d.UUID].Placements() {
				d.MIG.Instances = append(d.MIG.Instances, gpu.Instance{Profile: at.Profile.String(), Placement: gpu.Placement{Start: at.Start, Size: at.Size}, UUID: "MIG-x"})
			}
			in.Departing = append(in.Departing, Device{GPU: inv.GPUs[i].UUID, Kind: piece.KindReplica})
		}
		p := Build(in)
		devices, sets := 0, map[string]bool{}
		for i := range p.Slices {
			s := &p.Slices[i]
			of := &s.Spec
			if len(of.Devices) > 64 || len(of.SharedCounters) > 8 || (len(of.Devices) > 0) == (len(of.SharedCounters) > 0) ||
				of.Pool.ResourceSliceCount != int64(len(p.Slices)) || !object.MatchString(s.Name) {
				t.Errorf("%s: slice %s: %d devices, %d counter sets, %+v", file, s.Name, len(of.Devices), len(of.SharedCounters), of.Pool)
			}
			for _, c := range of.SharedCounters {
				if sets[c.Name] = true; len(c.Counters) > 32 || !label.MatchString(c.Name) {
					t.Errorf("%s: %d counters in %s", file, len(c.Counters), c.Name)
				}
			}
			for _, d := range of.Devices {
				if devices++; len(d.Attributes)+len(d.Capacity) > 32 || !label.MatchString(d.Name) || len(d.Name) > 63 ||
					!sets[d.ConsumesCounters[0].CounterSet] {
					t.Errorf("%s: device %+v", file, d)
				}
			}
		}
		if devices != len(p.Devices) || devices < 17*8 {
			t.Errorf("%s: %d devices have %d names", file, devices, len(p.Devices))
		}
		names := make([]string, len(p.Slices))
		for i := range p.Slices {
			names[i] = p.Slices[i].Name
		}
		if !slices.IsSorted(names) {
			t.Errorf("%s: %v", file, names)
		}
		if again := Build(in); !reflect.DeepEqual(again, p) {
			t.Errorf("%s: built twice, the slices differ", file)
		}
	}
}

// A device is described as NVIDIA's driver describes it: a selector and a request for capacity
// that were written for that one find the same here.
func TestDevicesAreDescribedAsNVIDIAsAre(t *testing.T) {
	const u = "GPU-00000000-0000-4000-8000-000000000000"
	engines := map[resourcev1.QualifiedName]int64{"copyEngines": 7, "decoders": 5, "encoders": 0, "jpegEngines": 1, "ofaEngines": 1}
	of := func(memory int64, more map[resourcev1.QualifiedName]int64) map[resourcev1.QualifiedName]int64 {
		out := map[resourcev1.QualifiedName]int64{"memory": memory}
		maps.Copy(out, more)
		return out
	}
	whole98 := of(80<<30, engines)
	whole98["multiprocessors"] = 98
	for name, c := range map[string]struct {
		layout     func(*gpu.Device, *mig.Card) plan.Layout
		fixed      bool
		device     string
		attributes map[string]string // of these; empty for none
		capacity   map[resourcev1.QualifiedName]int64
	}{
		"whole":    {whole, false, "gpu-00000000", map[string]string{"type": "gpu", "uuid": u, "parentUUID": "", "profile": "", "sharing": ""}, whole98},
		"memory":   {shared, false, "-shared", map[string]string{"type": "gpu", "uuid": u, "parentUUID": "", "sharing": "memory"}, of(79<<30, nil)},
		"replicas": {replicas, false, "-replicas", map[string]string{"type": "gpu", "uuid": u, "parentUUID": "", "sharing": "replicas"}, map[resourcev1.QualifiedName]int64{"replicas": 4}},
		"on demand": {onDemand, false, "-mig-3g40gb-4", map[string]string{"type": "mig", "uuid": "", "parentUUID": u, "profile": "3g.40gb", "sharing": ""},
			of(39.25*(1<<30), map[resourcev1.QualifiedName]int64{"multiprocessors": 42, "copyEngines": 3, "decoders": 2, "encoders": 0, "jpegEngines": 0, "ofaEngines": 0, "memorySlice4": 1, "memorySlice5": 1, "memorySlice6": 1, "memorySlice7": 1})},
		"a geometry": {onDemand, true, "-mig-1g10gb-2", map[string]string{"type": "mig", "uuid": "MIG-a", "parentUUID": u, "profile": "1g.10gb"},
			of(9.5*(1<<30), map[resourcev1.QualifiedName]int64{"multiprocessors": 14, "copyEngines": 1, "decoders": 0, "encoders": 0, "jpegEngines": 0, "ofaEngines": 0, "memorySlice2": 1})},
		"of a geometry, and does not stand": {onDemand, true, "-mig-1g10gb-3", map[string]string{"uuid": ""}, nil},
	} {
		inv := several(t, "a100-80gb.json", 1)
		inv.GPUs[0].Memory = 80 << 10
		for i := range inv.GPUs[0].MIG.Profiles { // as an A100's driver says
			switch p := &inv.GPUs[0].MIG.Profiles[i]; p.Name {
			case "1g.10gb":
				p.SMs, p.Engines = 14, &gpu.Engines{Copy: 1}
			case "3g.40gb":
				p.SMs, p.Engines = 42, &gpu.Engines{Copy: 3, Decode: 2}
			case "7g.80gb":
				p.SMs, p.Engines = 98, &gpu.Engines{Copy: 7, Decode: 5, JPEG: 1, OFA: 1}
			}
		}
		inv.GPUs[0].MIG.Instances = []gpu.Instance{{Profile: "1g.10gb", Placement: gpu.Placement{Start: 2, Size: 1}, UUID: "MIG-a"}, {Profile: "3g.40gb", Placement: gpu.Placement{Start: 4, Size: 4}, UUID: "MIG-b"}}
		in := input(t, inv, c.layout)
		in.Fixed = map[gpu.UUID]bool{u: c.fixed}
		found := false
		for _, s := range Build(in).Slices {
			for _, d := range s.Spec.Devices {
				if !strings.HasSuffix(d.Name, c.device) {
					continue
				}
				found = true
				for k, want := range c.attributes {
					got := ""
					if a := d.Attributes[resourcev1.QualifiedName(k)]; a.StringValue != nil {
						got = *a.StringValue
					}
					if got != want {
						t.Errorf("%s: %s is %q, want %q", name, k, got, want)
					}
				}
				got := map[resourcev1.QualifiedName]int64{}
				for k, q := range d.Capacity {
					got[k] = q.Value.Value()
				}
				if c.capacity != nil && !maps.Equal(got, c.capacity) {
					t.Errorf("%s has\n%v, want\n%v", name, got, c.capacity)
				}
			}
		}
		if !found {
			t.Errorf("%s: no device %s", name, c.device)
		}
	}
}

// A device's name tells which GPU it is of, also where UUIDs begin alike.
func TestShortNames(t *testing.T) {
	got := shorts([]gpu.UUID{"GPU-5a2f0000-1111-0000", "GPU-5A2F0000-1112-0000", "GPU-6", "GPU-5a2f0001-0000"})
	for u, want := range map[gpu.UUID]string{"GPU-5a2f0000-1111-0000": "5a2f00001111", "GPU-5A2F0000-1112-0000": "5a2f00001112", "GPU-6": "6", "GPU-5a2f0001-0000": "5a2f0001"} {
		if got[u] != want {
			t.Errorf("%s is %s, want %s", u, got[u], want)
		}
	}
}

func TestPoolsAreByModel(t *testing.T) {
	inv := several(t, "a100-80gb.json", 2)
	inv.GPUs[1].Model = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
	p := Build(input(t, inv, whole))
	var pools []string
	for _, s := range p.Slices {
		pools = append(pools, s.Spec.Pool.Name)
	}
	slices.Sort(pools)
	if want := []string{"node-1/a100-sxm4-80gb", "node-1/rtx-pro-6000-blackwell-server-edition"}; !slices.Equal(slices.Compact(pools), want) {
		t.Errorf("%v, want %v", pools, want)
	}
	if long := sliceName(3, driver, strings.Repeat("n", 250)+"/m"); len(long) > 253 || !strings.HasPrefix(long, "00003-") {
		t.Errorf("%s of %d characters", long, len(long))
	}
}

// The example of one GPU, as the documents show it.
func TestPublishedShare(t *testing.T) {
	p := Build(input(t, several(t, "a100-80gb.json", 1), shared))
	data, err := json.Marshal(p.Slices[1].Spec.Devices[0].Capacity)
	if err != nil {
		t.Fatal(err)
	}
	if want := `{"memory":{"value":"79Gi","requestPolicy":{"default":"79Gi","validRange":{"min":"1Gi","max":"79Gi","step":"1Gi"}}}}`; string(data) != want {
		t.Errorf("%s, want %s", data, want)
	}
	var back capacities
	if err := json.Unmarshal(data, &back); err != nil || !equality.Semantic.DeepEqual(back, p.Slices[1].Spec.Devices[0].Capacity) {
		t.Errorf("%+v, %v", back, err)
	}
}

// A GPU without memory of its own has no figure of any: neither a capacity nor a counter, which
// selectors and quotas would take for 0 bytes. One with MIG has its memory slices all the same.
func TestGPUWithoutMemory(t *testing.T) {
	inv := several(t, "a100-80gb.json", 2)
	inv.GPUs[0].Memory, inv.GPUs[0].Reserved, inv.GPUs[0].MIG = 0, 0, gpu.MIG{}
	inv.GPUs[1].Memory, inv.GPUs[1].Reserved = 0, 0
	p := Build(input(t, inv, whole))
	devices, counters := 0, 0
	for _, s := range p.Slices {
		if len(s.Spec.Devices)+len(s.Spec.SharedCounters) == 0 {
			t.Errorf("slice %s is empty", s.Name)
		}
		for _, c := range s.Spec.SharedCounters {
			counters++
			if _, ok := c.Counters[memory]; ok || len(c.Counters) == 0 {
				t.Errorf("counters %+v", c)
			}
		}
		for _, d := range s.Spec.Devices {
			devices++
			if _, ok := d.Capacity[memory]; ok {
				t.Errorf("%s has the capacity %+v", d.Name, d.Capacity)
			}
			for _, c := range d.ConsumesCounters {
				if _, ok := c.Counters[memory]; ok || len(c.Counters) == 0 {
					t.Errorf("%s takes %+v", d.Name, c)
				}
			}
		}
	}
	if devices != 2 || counters != 1 {
		t.Errorf("%d devices and %d sets of counters, want 2 and 1", devices, counters)
	}
	inv.GPUs = inv.GPUs[:1]
	if p := Build(input(t, inv, whole)); len(p.Slices) != 1 || len(p.Slices[0].Spec.Devices[0].ConsumesCounters) != 0 {
		t.Errorf("a GPU alone has the slices %+v", p.Slices)
	}
}

// kubernetes#140802: what is held and leaves its slice gives its counters back, and the
// scheduler puts somebody else there. So it stays, and keeps off what follows it.
func TestHeldDeviceThatNoLayoutHas(t *testing.T) {
	inv := several(t, "a100-80gb.json", 1)
	in := input(t, inv, onDemand)
	u := inv.GPUs[0].UUID
	held := Device{GPU: u, Kind: piece.KindPlacement, Placement: in.Layouts[u].Placements[2]}
	in.Layouts[u] = whole(nil, nil)
	ask := func() string {
		p := Build(in)
		taken := given{of: held, id: structured.MakeDeviceID(driver, p.Slices[0].Spec.Pool.Name, held.name(shorts([]gpu.UUID{u})[u]))}
		a := &allocator{t: t, slices: listed(p), cache: cel.NewCache(10, cel.Features{}),
			classes: room.Classes{"gpu": class("gpu", `device.attributes["gpus.example.com"].type == "gpu"`)}}
		device, _ := a.ask("gpu", 0, []given{taken})
		return device.Device
	}
	if got := ask(); got == "" {
		t.Error("the scheduler keeps the counters of a device that has left: then this test shows nothing")
	}
	in.Departing = []Device{held}
	if got := ask(); got != "" {
		t.Errorf("beside an instance that is held the scheduler gives %s", got)
	}
}

// Of a GPU whose card is not known any more, what somebody holds stays listed.
func TestHeldDeviceOfAnUnknownCard(t *testing.T) {
	inv := several(t, "a100-80gb.json", 1)
	in := input(t, inv, onDemand)
	u := inv.GPUs[0].UUID
	in.Departing = []Device{{GPU: u, Kind: piece.KindPlacement, Placement: in.Layouts[u].Placements[2]}}
	in.Cards, in.Layouts = nil, nil
	if p := Build(in); len(p.Devices) != 1 || len(p.Slices) != 2 {
		t.Errorf("%+v", p)
	}
}

// What is tainted is not given out.
func TestTaints(t *testing.T) {
	inv := several(t, "a100-80gb.json", 2)
	in := input(t, inv, whole)
	in.Taints = func(d Device) []resourcev1.DeviceTaint {
		if d.GPU == inv.GPUs[0].UUID {
			return []resourcev1.DeviceTaint{{Key: "example.com/unhealthy", Value: "XidFatal", Effect: resourcev1.DeviceTaintEffectNoSchedule}}
		}
		return nil
	}
	a := &allocator{t: t, slices: listed(Build(in)), cache: cel.NewCache(10, cel.Features{}),
		classes: room.Classes{"gpu": class("gpu", `device.attributes["gpus.example.com"].type == "gpu"`)}}
	if got, _ := a.ask("gpu", 0, nil); got.Device != "gpu-00000001" {
		t.Errorf("the scheduler gives %q", got.Device)
	}
}

// A round that changes nothing does not build the slices anew: those of eight A100 are
// megabytes.
func TestRoundsThatChangeNothingBuildNoSlices(t *testing.T) {
	w := newWorld(t, 2, onDemand)
	w.lay(onDemand)
	built := func() uintptr { return reflect.ValueOf(w.shelf().devices).Pointer() }
	before := built()
	for range 3 {
		if w.lay(onDemand); built() != before {
			t.Fatal("built anew, and nothing has changed")
		}
	}
	w.SetFaults(map[gpu.UUID]string{w.in.Inventory.GPUs[1].UUID: "Xid 79"}, nil)
	if built() == before {
		t.Error("a fault, and the slices are as before")
	}
}
