// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"example.com/gpu-agent/internal/ledger"
	"example.com/gpu-agent/pkg/compute"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

// node is an inventory of GPUs of these models, GPU-0, GPU-1 and so on.
func node(models ...string) *gpu.Inventory {
	inv := new(gpu.Inventory)
	for i, m := range models {
		inv.GPUs = append(inv.GPUs, gpu.Device{Index: i, UUID: gpu.UUID(fmt.Sprintf("GPU-%d", i)), Model: m, Memory: 1024})
	}
	return inv
}

// offered are wants with the API that a GPU has where nothing is said.
func offered(wants []Want) []Want {
	for i := range wants {
		if w := &wants[i]; w.Mode != Keep && w.Mode != Off && w.API == "" {
			w.API = ledger.DevicePlugin
		}
	}
	return wants
}

func mustParse(t *testing.T, in string) *File {
	t.Helper()
	f, err := Parse("f", []byte(in))
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func TestDesire(t *testing.T) {
	const h100, a30 = "NVIDIA H100 80GB HBM3", "NVIDIA A30"
	for _, tc := range []struct {
		name string
		in   string
		inv  *gpu.Inventory
		want []Want
	}{
		{"units of memory", head + "    - {devices: all, mode: shared}\n", node(h100, a30), []Want{
			{GPU: "GPU-0", Mode: Shared, TimeSlice: gpu.TimeSliceDefault, Line: 4},
			{GPU: "GPU-1", Mode: Shared, TimeSlice: gpu.TimeSliceDefault, Line: 4}}},
		{"replicas", head + "    - {devices: [0], mode: shared, replicas: 4, timeSlice: long}\n", node(h100), []Want{
			{GPU: "GPU-0", Mode: Shared, Replicas: 4, TimeSlice: gpu.TimeSliceLong, Line: 4}}},
		{"each GPU its own", head + "    - {devices: [1], mode: off}\n    - {devices: [GPU-0], mode: whole}\n", node(h100, a30), []Want{
			{GPU: "GPU-0", Mode: Whole, Line: 5}, {GPU: "GPU-1", Mode: Off, Line: 4}}},
		{"models, some of which are elsewhere in the fleet",
			head + "    - {devices: {model: 'NVIDIA H[12]00*'}, mode: whole}\n    - {devices: {model: NVIDIA A30}, mode: off}\n    - {devices: {model: NVIDIA B200}, mode: shared}\n",
			node(a30, h100), []Want{{GPU: "GPU-0", Mode: Off, Line: 5}, {GPU: "GPU-1", Mode: Whole, Line: 4}}},
		{"no GPU", head + "    - {devices: all, mode: whole}\n", node(), []Want{}},
		{"MIG, for cards that are elsewhere",
			head + "    - {devices: {model: NVIDIA A30}, mode: mig}\n    - {devices: {model: NVIDIA H100*}, mode: whole}\n",
			node(h100), []Want{{GPU: "GPU-0", Mode: Whole, Line: 5}}},
		{"a card that cannot be described",
			head + "    - {devices: {model: NVIDIA H100*}, mode: whole}\n",
			&gpu.Inventory{GPUs: []gpu.Device{{Index: 0, UUID: "GPU-0", Fault: "GPU is lost"}, {Index: 1, UUID: "GPU-1", Model: h100}}},
			[]Want{{GPU: "GPU-0"}, {GPU: "GPU-1", Mode: Whole, Line: 4}}},
		{"a card that cannot be described, by index",
			head + "    - {devices: [0], mode: whole}\n",
			&gpu.Inventory{GPUs: []gpu.Device{{Index: 0, UUID: "GPU-0", Fault: "GPU is lost"}}},
			[]Want{{GPU: "GPU-0", Mode: Whole, Line: 4}}},
		{"a merged entry", "version: v1\npartitions:\n  other:\n  - &all {devices: all, mode: shared, replicas: 2}\n  default:\n  - <<: *all\n    replicas: 8\n", node(h100),
			[]Want{{GPU: "GPU-0", Mode: Shared, Replicas: 8, TimeSlice: gpu.TimeSliceDefault, Line: 6}}},
		{"an alias", "version: v1\npartitions:\n  other: &all\n  - {devices: all, mode: off}\n  default: *all\n", node(h100),
			[]Want{{GPU: "GPU-0", Mode: Off, Line: 4}}},
		{"through MPS, by a word", head + "    - {devices: all, mode: shared, compute: mps}\n", node(h100),
			[]Want{{GPU: "GPU-0", Mode: Shared, TimeSlice: gpu.TimeSliceDefault, Compute: compute.Sharing{MPS: true}, Line: 4}}},
		{"through MPS, with numbers", head + "    - {devices: all, mode: shared, replicas: 2, compute: {mps: {factor: 2.5, max: 80}}}\n", node(h100),
			[]Want{{GPU: "GPU-0", Mode: Shared, Replicas: 2, TimeSlice: gpu.TimeSliceDefault, Compute: compute.Sharing{MPS: true, Factor: 2.5, Max: 80}, Line: 4}}},
		{"offered twice", head + "    - {devices: [0], mode: shared, spot: {most: 40}}\n    - {devices: [1], mode: whole, spot: true}\n    - {devices: [2], mode: shared, replicas: 2, spot: false}\n", node(h100, h100, h100), []Want{
			{GPU: "GPU-0", Mode: Shared, TimeSlice: gpu.TimeSliceDefault, Spot: ledger.Offering{On: true, Most: 40}, Line: 4},
			{GPU: "GPU-1", Mode: Whole, Spot: ledger.Offering{On: true}, Line: 5},
			{GPU: "GPU-2", Mode: Shared, Replicas: 2, TimeSlice: gpu.TimeSliceDefault, Line: 6}}},
		{"through MPS, with the defaults", head + "    - {devices: all, mode: shared, compute: {mps: {factor: 1.0, max: 100}}}\n", node(h100),
			[]Want{{GPU: "GPU-0", Mode: Shared, TimeSlice: gpu.TimeSliceDefault, Compute: compute.Sharing{MPS: true}, Line: 4}}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			d, err := mustParse(t, tc.in).Desire("default", tc.inv, Node{Unit: 1024})
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(Desired{Partition: "default", GPUs: offered(tc.want)}, d); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

func TestDesireRefuses(t *testing.T) {
	const rest, rest2 = "    - {devices: [1, 2, 3, 4, 5, 6, 7], mode: off}\n", "    - {devices: [2, 3, 4, 5, 6, 7], mode: off}\n"
	for _, tc := range []struct {
		name      string
		partition string
		in        string
		inv       *gpu.Inventory
		want      []string
	}{
		{"no such partition", "reserach", head + "    - {devices: all, mode: off}\n  research:\n    - {devices: all, mode: off}\n", node("x"),
			[]string{`f:3: no partition is named "reserach": the file has default and research`}},
		{"no name", "", head + "    - {devices: all, mode: off}\n", node("x"),
			[]string{`f:3: no partition is named "": the file has default`}},
		{"two entries", "default", head + "    - {devices: all, mode: off}\n    - {devices: [1, 2], mode: whole}\n    - {devices: [GPU-1], mode: whole}\n", node("x", "x", "x"), []string{
			"f:5: GPUs 1 and 2: the entry on line 4 matches too, and exactly one must match each GPU",
			"f:6: GPU 1: the entry on line 4 matches too, and exactly one must match each GPU"}},
		{"no entry", "default", head + "    - {devices: [1], mode: whole}\n", node("x", "x", "x", "x", "x"), []string{
			"f:3: partition \"default\" has no entry for GPUs 0 and 2-4 of this node: exactly one must match each GPU"}},
		{"an index that is not there", "default", head + "    - devices: [0]\n      mode: whole\n    - devices:\n      - 1\n      - 8\n      - 99\n      mode: off\n", node("x", "x"), []string{
			"f:8: this node has no GPU with index 8: it has GPUs 0 and 1",
			"f:9: this node has no GPU with index 99: it has GPUs 0 and 1"}},
		{"an index where there is no GPU", "default", head + "    - {devices: [0], mode: whole}\n", node(), []string{
			"f:4: this node has no GPU with index 0: it has none"}},
		{"a UUID that is not there", "default", head + "    - {devices: [GPU-0, GPU-1, GPU-dead], mode: whole}\n", node("x", "x"), []string{
			"f:4: this node has no GPU GPU-dead: it has GPU-0 and GPU-1"}},
		{"a model that is not there alone", "default", head + "    - {devices: {model: NVIDIA B200}, mode: whole}\n", node("NVIDIA A30"), []string{
			`f:3: partition "default" has no entry for GPU 0 of this node: exactly one must match each GPU; ` +
				`the models of this node are "NVIDIA A30", and no GPU matches the model "NVIDIA B200" on line 4`}},
		{"models of which some are there", "default", head + "    - {devices: {model: NVIDIA A30}, mode: whole}\n    - {devices: {model: NVIDIA H1?0}, mode: off}\n    - {devices: {model: A100*}, mode: off}\n",
			node("NVIDIA A30", "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3"), []string{
				`f:3: partition "default" has no entry for GPUs 1-3 of this node: exactly one must match each GPU; ` +
					`the models of this node are "NVIDIA A30", "NVIDIA H100 80GB HBM3" and "NVIDIA A100-SXM4-80GB", and no GPU matches the model "NVIDIA H1?0" on line 5 or "A100*" on line 6`}},
		{"MIG where there is none", "default", head + "    - devices: all\n      mode: mig\n", node("x", "x"), []string{
			"f:4: GPUs 0 and 1: this model has no MIG: whole, shared and off work"}},
		{"spot through DRA", "default", head + "    - devices: all\n      mode: whole\n      api: dra\n      spot: true\n", node("x"), []string{
			"f:7: GPU 0: spot needs api device-plugin, and this entry has api dra: what spot pods may have changes with every claim, and a ResourceSlice is not written for each claim"}},
		{"MPS on a GPU that cannot limit", "default", head + "    - devices: all\n      mode: shared\n      compute: mps\n", &gpu.Inventory{GPUs: []gpu.Device{
			{Index: 0, UUID: "GPU-0", Memory: 1024, ComputeCapability: "6.1"}, {Index: 1, UUID: "GPU-1", Memory: 1024, ComputeCapability: "7.0"}, {Index: 2, UUID: "GPU-2", Memory: 1024, ComputeCapability: "10.0"}}}, []string{
			"f:6: GPU 0: compute mps needs a GPU of compute capability 7.0 or later, and this one has 6.1: before, MPS limits no process to a part of the SMs; timeslice works"}},
		{"several", "default", head + "    - {devices: [0, 7], mode: mig}\n    - {devices: [0], mode: whole}\n", node("x", "x"), []string{
			"f:3: partition \"default\" has no entry for GPU 1 of this node: exactly one must match each GPU",
			"f:4: this node has no GPU with index 7: it has GPUs 0 and 1",
			"f:4: GPU 0: this model has no MIG: whole, shared and off work",
			"f:5: GPU 0: the entry on line 4 matches too, and exactly one must match each GPU"}},
		{"parts of instances through DRA", "default", head + "    - devices: [0]\n      mode: mig\n      api: dra\n      geometry: {1c.3g.40gb: 1, 1g.10gb: 1, 2c.3g.40gb: 1}\n" + rest, cards(t, "a100-80"), []string{
			"f:6: GPU 0: api dra cannot offer parts of a GPU instance (1c.3g.40gb and 2c.3g.40gb), since a ResourceSlice has no counters for them: name GPU instances, or use api device-plugin"}},
		{"dynamic through the device plugin", "default", head + "    - devices: [0]\n      mode: dynamic\n      api: device-plugin\n" + rest, cards(t, "a100-80"), []string{
			"f:6: GPU 0: mode dynamic needs api dra, and this entry has api device-plugin: the scheduler must know which layouts exclude each other, and the device plugin cannot tell it"}},
		{"dynamic, and no api is said", "default", head + "    - {devices: [0], mode: dynamic}\n" + rest, cards(t, "a100-80"), []string{
			"f:4: GPU 0: mode dynamic needs api dra, and this entry has api device-plugin: the scheduler must know which layouts exclude each other, and the device plugin cannot tell it"}},
		{"dynamic without MIG", "default", head + "    - {devices: all, mode: dynamic, api: dra}\n", node("x", "x"), []string{
			"f:4: GPUs 0 and 1: this model has no MIG: whole, shared and off work"}},
		{"dynamic with a profile that is none of this GPU's", "default", head + "    - {devices: [0], mode: dynamic, api: dra, profiles: [1g.10gb, 1g.6gb]}\n" + rest, cards(t, "a100-80"), []string{
			"f:4: GPU 0: there is no profile 1g.6gb: there are 1g.10gb, 1g.10gb+me, 1g.20gb, 2g.20gb, 3g.40gb, 4g.40gb and 7g.80gb"}},
		{"dynamic and whole through both", "default", head + "    - {devices: [0], mode: whole}\n    - {devices: [1], mode: dynamic, api: dra, profiles: [1g.10gb]}\n" + rest2, cards(t, "a100-80"), []string{
			"f:5: gpu would be offered through device-plugin (GPU 0) and through dra (GPU 1), and on one node the scheduler sees a name through one only: give all GPUs that offer gpu the same api"}},
		{"whole GPUs through both", "default", head + "    - {devices: [0, 2], mode: whole}\n    - devices: [1]\n      mode: whole\n      api: dra\n", node("x", "x", "x"), []string{
			"f:7: gpu would be offered through device-plugin (GPUs 0 and 2) and through dra (GPU 1), and on one node the scheduler sees a name through one only: give all GPUs that offer gpu the same api"}},
		{"replicas through both", "default", head + "    - {devices: [0], mode: shared, replicas: 2, api: dra}\n    - {devices: [1], mode: shared, replicas: 8}\n", node("x", "x"), []string{
			"f:4: gpu.shared would be offered through device-plugin (GPU 1) and through dra (GPU 0), and on one node the scheduler sees a name through one only: give all GPUs that offer gpu.shared the same api"}},
		{"a profile on demand through both", "default", head + "    - {devices: [0], mode: mig, geometry: {1g.10gb: 1}}\n    - {devices: [1], mode: mig, profiles: [1g.10gb, 2g.20gb], api: dra}\n" + rest2, cards(t, "a100-80"), []string{
			"f:5: mig-1g.10gb would be offered through device-plugin (GPU 0) and through dra (GPU 1), and on one node the scheduler sees a name through one only: give all GPUs that offer mig-1g.10gb the same api"}},
		{"an index of the MIG manager", "custom", migHead + "  - {devices: [0, 9], mig-enabled: false}\n", node("x"), []string{
			"f:4: this node has no GPU with index 9: it has GPU 0"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			d, err := mustParse(t, tc.in).Desire(tc.partition, tc.inv, Node{Unit: 1024})
			if err == nil {
				t.Fatalf("it is accepted: %+v", d)
			}
			if d.GPUs != nil {
				t.Errorf("there is something desired beside the error: %+v", d)
			}
			if diff := cmp.Diff(strings.Join(tc.want, "\n"), err.Error()); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

// A GPU that would offer nothing, although its entry wants it to offer something, is refused
// with the reason, and not taken for one that fits.
func TestNothingToOfferIsRefused(t *testing.T) {
	memory := func(total, reserved gpu.MiB) *gpu.Inventory {
		inv := node("Tesla T4", "Tesla T4")
		for i := range inv.GPUs {
			inv.GPUs[i].Memory, inv.GPUs[i].Reserved = total, reserved
		}
		return inv
	}
	onlyFirst := cards(t, "a100-80")
	onlyFirst.GPUs = onlyFirst.GPUs[:1]
	odd := func(change func(*gpu.MIG)) *gpu.Inventory {
		inv := &gpu.Inventory{GPUs: slices.Clone(onlyFirst.GPUs)}
		m := &inv.GPUs[0].MIG
		m.Profiles = slices.Clone(m.Profiles)
		change(m)
		return inv
	}
	unread := odd(func(m *gpu.MIG) {
		m.Profiles = []gpu.Profile{{Name: "huge", Placements: []gpu.Placement{{Start: 0, Size: 8}}}}
	})
	untold := func(on bool) *gpu.Inventory {
		return odd(func(m *gpu.MIG) {
			m.Enabled = on
			for i := range m.Profiles {
				m.Profiles[i].Placements = nil
			}
		})
	}
	broken := memory(0, 0)
	for i := range broken.GPUs {
		broken.GPUs[i].Fault = "GPU is lost"
	}
	const gib = 1024
	for _, tc := range []struct {
		name, entry string
		inv         *gpu.Inventory
		unit        gpu.MiB
		want        string // "" where it is accepted
	}{
		{"a unit that is larger than the GPU", "mode: shared", memory(15360, 443), 16 * gib,
			"f:4: GPUs 0 and 1: it would offer no unit of memory: one is 16384 MiB (--memory-unit), and programs can have 14917 MiB of this GPU; set --memory-unit to 8192 MiB or less, or give the GPU replicas or the mode whole"},
		{"the same through DRA", "mode: shared, api: dra", memory(15360, 443), 16 * gib, "it would offer no unit of memory"},
		{"a unit that is larger than any GPU", "mode: shared", cards(t, "h100-80"), 100 * gib, "set --memory-unit to 65536 MiB or less"},
		{"a unit that fits just so", "mode: shared", memory(15360, 443), 14917, ""},
		{"replicas need no unit", "mode: shared, replicas: 4", memory(15360, 443), 16 * gib, ""},
		{"a GPU without a figure", "mode: shared", memory(0, 0), gib, "the driver reports no memory for programs; give it replicas, or the mode whole"},
		{"a GPU that cannot be described", "mode: shared", broken, gib, ""},
		{"dynamic, with a unit that is larger than the GPU", "mode: dynamic, api: dra", onlyFirst, 100 * gib, "it would offer no unit of memory"},
		{"no profile is understood", "mode: mig", unread, gib, `f:4: GPU 0: this version knows none of its MIG profiles, so nothing could be offered: whole, shared and off work; leave out profile "huge": `},
		{"dynamic, and no profile is understood", "mode: dynamic, api: dra", unread, gib, "this version knows none of its MIG profiles"},
		{"no placement is told in MIG mode", "mode: mig, profiles: [1g.10gb, 3g.40gb]", untold(true), gib,
			"f:4: GPU 0: it would offer nothing: the driver reports no placement for 1g.10gb and 3g.40gb, although MIG is on"},
		{"no placement is told before that", "mode: mig", untold(false), gib, ""},
		{"no placement makes sense", "mode: mig, profiles: [1g.10gb]", odd(func(m *gpu.MIG) {
			m.Profiles[0].Placements = []gpu.Placement{{Start: -1, Size: 1}}
		}), gib, `it would offer nothing: leave out profile "1g.10gb": 1 memory slices from -1 on is no placement`},
		{"MIG without an instance is meant so", "mode: mig, geometry: {}", onlyFirst, gib, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			_, err := mustParse(t, head+"    - {devices: all, "+tc.entry+"}\n").Desire("default", tc.inv, Node{Unit: tc.unit})
			if tc.want == "" && err != nil || tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)) {
				t.Errorf("%v, want %q", err, tc.want)
			}
		})
	}
}

// Which front-end a GPU is offered through: what its entry says, else what the node does.
func TestAPI(t *testing.T) {
	f := mustParse(t, head+"    - {devices: [0], mode: whole, api: dra}\n    - {devices: [1], mode: shared}\n    - {devices: [2], mode: shared, api: device-plugin}\n    - {devices: [3], mode: off}\n"+
		"  free:\n    - {devices: all, mode: whole}\n")
	inv := node("x", "x", "x", "x")
	for _, c := range []struct {
		partition string
		on        Node
		want      string
	}{
		{"default", Node{}, "dra device-plugin device-plugin -"},
		{"default", Node{API: ledger.DRA}, "dra dra device-plugin -"},
		{"default", Node{NoDRA: "there is none"}, "f:4: GPU 0: api dra is not available: there is none"},
		{"free", Node{NoDRA: "there is none"}, "device-plugin device-plugin device-plugin device-plugin"},
		{"free", Node{API: ledger.DRA, NoDRA: "there is none"}, "f:9: GPUs 0-3: api dra is not available: there is none"},
	} {
		c.on.Unit = 1024
		d, err := f.Desire(c.partition, inv, c.on)
		var got []string
		for _, w := range d.GPUs {
			got = append(got, strings.Repeat("-", max(0, 1-len(w.API)))+string(w.API))
		}
		if err != nil {
			got = []string{err.Error()}
		}
		if text := strings.Join(got, " "); text != c.want {
			t.Errorf("%s on %+v: %s, want %s", c.partition, c.on, text, c.want)
		}
	}
}

// A dynamic GPU has the instances of its profiles made on demand.
func TestDynamic(t *testing.T) {
	f := mustParse(t, head+"    - {devices: all, mode: dynamic, profiles: [3g.40gb, 1g.10gb]}\n")
	d, err := f.Desire("default", cards(t, "a100-80"), Node{API: ledger.DRA, Unit: 1024})
	if err != nil {
		t.Fatal(err)
	}
	if w := d.GPUs[7]; w.Mode != Dynamic || w.API != ledger.DRA || !w.OnDemand || len(w.Profiles) != 2 || len(w.Geometry) > 0 {
		t.Errorf("%+v", w)
	}
}

// A MIG manager's file knows no API: the node's goes, also where it cannot be had.
func TestAPIOfMIGManagersFile(t *testing.T) {
	f := mustParse(t, migHead+"  - {devices: all, mig-enabled: true, mig-devices: {1c.3g.40gb: 2}}\n  plain:\n  - {devices: all, mig-enabled: false}\n")
	inv := cards(t, "a100-80")
	if d, err := f.Desire("plain", inv, Node{API: ledger.DRA}); err != nil || d.GPUs[7].API != ledger.DRA {
		t.Errorf("%+v, %v", d, err)
	}
	const want = "f:4: GPUs 0-7: api dra cannot offer parts of a GPU instance (1c.3g.40gb)"
	if _, err := f.Desire("custom", inv, Node{API: ledger.DRA}); err == nil || !strings.HasPrefix(err.Error(), want) {
		t.Errorf("%v, want %s", err, want)
	}
}

// A partition that the node cannot have is refused alone, and with its line.
func TestNodeWithoutMPSHasTheOtherPartitions(t *testing.T) {
	f := mustParse(t, readFile(t, "testdata/partitions.yaml"))
	inv := cards(t, "a100-80")
	inv.GPUs = inv.GPUs[:4]
	inv.GPUs[0].Model, inv.GPUs[1].Model, inv.GPUs[2].Model, inv.GPUs[3].Model = "NVIDIA H100 80GB HBM3", "NVIDIA A30", "NVIDIA A30", "NVIDIA A30"
	inv.GPUs[0].UUID = "GPU-00000000-0000-0000-0000-000000000000"
	inv.GPUs[1].UUID = "GPU-00000000-0000-0000-0000-000000000001"
	refused := map[string]string{"served-by-mps": "f:34: GPUs 0-3: compute mps is not available: there is no supervisor"}
	for _, name := range f.Names() {
		_, err := f.Desire(name, inv, Node{Unit: 1024, NoMPS: "there is no supervisor"})
		got := ""
		if err != nil {
			got = err.Error()
		}
		if got != refused[name] {
			t.Errorf("%s: %q, want %q", name, got, refused[name])
		}
	}
}

// TestMIGIsReadInFull: what is absent differs from what is present and empty.
func TestMIGIsReadInFull(t *testing.T) {
	f := mustParse(t, head+
		"    - {devices: [0], mode: mig, geometry: {3g.40gb: 1, 1g.10gb: 4}}\n"+
		"    - {devices: [1], mode: mig, profiles: [2g.20gb, 1g.10gb]}\n"+
		"    - {devices: [2], mode: mig, geometry: {}}\n"+
		"    - {devices: [3, 4, 5, 6, 7], mode: mig}\n")
	inv := cards(t, "a100-80")
	d, err := f.Desire("default", inv, Node{Unit: 1024})
	if err != nil {
		t.Fatal(err)
	}
	want := []Want{
		{Mode: MIG, Line: 4, Geometry: geometry(t, "1g.10gb:4 3g.40gb:1")},
		{Mode: MIG, Line: 5, OnDemand: true, Profiles: []mig.Name{profile(t, "1g.10gb"), profile(t, "2g.20gb")}},
		{Mode: MIG, Line: 6, Geometry: []mig.Count{}},
		{Mode: MIG, Line: 7, OnDemand: true},
	}
	for i := range want {
		want[i].GPU = inv.GPUs[i].UUID
	}
	if diff := cmp.Diff(offered(want), d.GPUs[:4], cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}
}

// TestDesireSharesNothing: what a caller does to an answer is not in the next.
func TestDesireSharesNothing(t *testing.T) {
	f := mustParse(t, head+"    - {devices: all, mode: mig, geometry: {1g.10gb: 1}}\n")
	inv := cards(t, "a100-80")
	first, err := f.Desire("default", inv, Node{Unit: 1024})
	if err != nil {
		t.Fatal(err)
	}
	first.GPUs[0].Geometry[0].N = 7
	again, err := f.Desire("default", inv, Node{Unit: 1024})
	if err != nil {
		t.Fatal(err)
	}
	if again.GPUs[0].Geometry[0].N != 1 || first.GPUs[1].Geometry[0].N != 1 {
		t.Errorf("two answers share memory: %+v, %+v", first, again)
	}
}

// cards is a recorded inventory.
func cards(t testing.TB, name string) *gpu.Inventory {
	t.Helper()
	inv, err := ReadInventory([]byte(readFile(t, "../../tests/testdata/"+name+".json")))
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return inv
}

func profile(t testing.TB, s string) mig.Name {
	t.Helper()
	n, err := mig.Parse(s)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// geometry reads "1g.10gb:4 3g.40gb:1".
func geometry(t testing.TB, s string) []mig.Count {
	t.Helper()
	var counts []mig.Count
	for _, f := range strings.Fields(s) {
		name, n, _ := strings.Cut(f, ":")
		count, err := strconv.Atoi(n)
		if err != nil {
			t.Fatal(err)
		}
		counts = append(counts, mig.Count{Profile: profile(t, name), N: count})
	}
	return counts
}

func readFile(t testing.TB, path string) string {
	t.Helper()
	data, err := os.ReadFile(filepath.FromSlash(path))
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

func TestWantEqual(t *testing.T) {
	n1, n2 := mig.Name{Slices: 1, GB: 10}, mig.Name{Slices: 2, GB: 20}
	base := Want{GPU: "GPU-0", Mode: MIG, Geometry: []mig.Count{{Profile: n1, N: 1}}}
	moved := base
	moved.Line, moved.Unproven = 9, true
	if !base.Equal(moved) {
		t.Error("an entry on another line, or one that is proven by now, is another want")
	}
	for name, other := range map[string]Want{
		"GPU":       {GPU: "GPU-1", Mode: MIG, Geometry: []mig.Count{{Profile: n1, N: 1}}},
		"API":       {GPU: "GPU-0", Mode: MIG, API: ledger.DRA, Geometry: []mig.Count{{Profile: n1, N: 1}}},
		"mode":      {GPU: "GPU-0", Mode: Off, Geometry: []mig.Count{{Profile: n1, N: 1}}},
		"replicas":  {GPU: "GPU-0", Mode: MIG, Replicas: 1, Geometry: []mig.Count{{Profile: n1, N: 1}}},
		"timeSlice": {GPU: "GPU-0", Mode: MIG, TimeSlice: gpu.TimeSliceLong, Geometry: []mig.Count{{Profile: n1, N: 1}}},
		"compute":   {GPU: "GPU-0", Mode: MIG, Compute: compute.Sharing{MPS: true}, Geometry: []mig.Count{{Profile: n1, N: 1}}},
		"lend":      {GPU: "GPU-0", Mode: MIG, Spot: ledger.Offering{Lend: time.Hour}, Geometry: []mig.Count{{Profile: n1, N: 1}}},
		"spot":      {GPU: "GPU-0", Mode: MIG, Spot: ledger.Offering{On: true}, Geometry: []mig.Count{{Profile: n1, N: 1}}},
		"on demand": {GPU: "GPU-0", Mode: MIG, OnDemand: true, Geometry: []mig.Count{{Profile: n1, N: 1}}},
		"count":     {GPU: "GPU-0", Mode: MIG, Geometry: []mig.Count{{Profile: n1, N: 2}}},
		"profile":   {GPU: "GPU-0", Mode: MIG, Geometry: []mig.Count{{Profile: n2, N: 1}}},
		"profiles":  {GPU: "GPU-0", Mode: MIG, Geometry: []mig.Count{{Profile: n1, N: 1}}, Profiles: []mig.Name{n1}},
	} {
		if base.Equal(other) {
			t.Errorf("wants that differ in %s are equal", name)
		}
	}
}

// A text that is written of an Offering is read as the same one.
func TestSpotText(t *testing.T) {
	for text, o := range map[string]ledger.Offering{"true": {On: true}, "{most: 40}": {On: true, Most: 40}} {
		if got := SpotText(o); got != text {
			t.Errorf("%v is written %s, want %s", o, got, text)
		}
		d, err := mustParse(t, head+"    - {devices: all, mode: shared, spot: "+text+"}\n").Desire("default", node("x"), Node{Unit: 1024})
		if err != nil || d.GPUs[0].Spot != o {
			t.Errorf("%s is read as %v (%v), want %v", text, d, err, o)
		}
	}
	if got := SpotText(ledger.Offering{Most: 40}); got != "" {
		t.Errorf("room that is not offered is written %q", got)
	}
}

// A text that is written of when holders lend is read as the same time.
func TestLendText(t *testing.T) {
	for text, after := range map[string]time.Duration{
		"{after: 1m}": time.Minute, "{after: 15m}": 15 * time.Minute, "{after: 2h}": 2 * time.Hour,
		"{after: 1h30m}": 90 * time.Minute, "{after: 1m30s}": 90 * time.Second, "{after: 10h0m20s}": 10*time.Hour + 20*time.Second,
	} {
		o := ledger.Offering{On: true, Most: 40, Lend: after}
		if got := LendText(o); got != text {
			t.Errorf("%v is written %s, want %s", o, got, text)
		}
		d, err := mustParse(t, head+"    - {devices: all, mode: shared, lend: "+text+", spot: {most: 40}}\n").Desire("default", node("x"), Node{Unit: 1024})
		if err != nil || d.GPUs[0].Spot != o {
			t.Errorf("%s is read as %v (%v), want %v", text, d, err, o)
		}
	}
	for _, mode := range []string{"whole", "mig", "mig, profiles: [1g.10gb]", "mig, geometry: {1g.10gb: 7}"} {
		d, err := mustParse(t, head+"    - {devices: all, spot: true, lend: {after: 15m}, mode: "+mode+"}\n").Desire("default", cards(t, "a100-80"), Node{Unit: 1024})
		if want := (ledger.Offering{On: true, Lend: 15 * time.Minute}); err != nil || d.GPUs[0].Spot != want {
			t.Errorf("mode %s: %v (%v), want %v", mode, d, err, want)
		}
	}
	for _, o := range []ledger.Offering{{On: true}, {Lend: time.Hour}} {
		if got := LendText(o); got != "" {
			t.Errorf("%v, which lends nothing, is written %q", o, got)
		}
	}
}

// A text that is written of a Sharing is read as the same one.
func TestComputeText(t *testing.T) {
	for text, s := range map[string]compute.Sharing{
		"timeslice":                      {},
		"mps":                            {MPS: true},
		"{mps: {factor: 0.5}}":           {MPS: true, Factor: 0.5},
		"{mps: {max: 80}}":               {MPS: true, Factor: 1, Max: 80},
		"{mps: {factor: 100, max: 1}}":   {MPS: true, Factor: 100, Max: 1},
		"{mps: {factor: 0.1, max: 99}}":  {MPS: true, Factor: compute.LeastFactor, Max: 99},
		"{mps: {factor: 2.25, max: 50}}": {MPS: true, Factor: 2.25, Max: 50},
	} {
		if got := ComputeText(s); got != text {
			t.Errorf("%v is written %s, want %s", s, got, text)
		}
		d, err := mustParse(t, head+"    - {devices: all, mode: shared, compute: "+text+"}\n").Desire("default", node("x"), Node{Unit: 1024})
		if err != nil || d.GPUs[0].Compute != s.Normal() {
			t.Errorf("%s is read as %v (%v), want %v", text, d, err, s)
		}
	}
}
