// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"

	"github.com/google/go-cmp/cmp"
)

// node is an inventory of GPUs of these models, GPU-0, GPU-1 and so on.
func node(models ...string) *gpu.Inventory {
	inv := new(gpu.Inventory)
	for i, m := range models {
		inv.GPUs = append(inv.GPUs, gpu.Device{Index: i, UUID: gpu.UUID(fmt.Sprintf("GPU-%d", i)), Model: m, Memory: 1024})
	}
	return inv
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
			{GPU: "GPU-0", Mode: Shared, TimeSlice: gpu.TimeSliceDefault, Compute: ComputeTimeSlice, Line: 4},
			{GPU: "GPU-1", Mode: Shared, TimeSlice: gpu.TimeSliceDefault, Compute: ComputeTimeSlice, Line: 4}}},
		{"replicas", head + "    - {devices: [0], mode: shared, replicas: 4, timeSlice: long}\n", node(h100), []Want{
			{GPU: "GPU-0", Mode: Shared, Replicas: 4, TimeSlice: gpu.TimeSliceLong, Compute: ComputeTimeSlice, Line: 4}}},
		{"each GPU its own", head + "    - {devices: [1], mode: off}\n    - {devices: [GPU-0], mode: whole}\n", node(h100, a30), []Want{
			{GPU: "GPU-0", Mode: Whole, Line: 5}, {GPU: "GPU-1", Mode: Off, Line: 4}}},
		{"models, some of which are elsewhere in the fleet",
			head + "    - {devices: {model: 'NVIDIA H[12]00*'}, mode: whole}\n    - {devices: {model: NVIDIA A30}, mode: off}\n    - {devices: {model: NVIDIA B200}, mode: shared}\n",
			node(a30, h100), []Want{{GPU: "GPU-0", Mode: Off, Line: 5}, {GPU: "GPU-1", Mode: Whole, Line: 4}}},
		{"no GPU", head + "    - {devices: all, mode: whole}\n", node(), []Want{}},
		{"a mode that is not built, for cards that are elsewhere",
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
			[]Want{{GPU: "GPU-0", Mode: Shared, Replicas: 8, TimeSlice: gpu.TimeSliceDefault, Compute: ComputeTimeSlice, Line: 6}}},
		{"an alias", "version: v1\npartitions:\n  other: &all\n  - {devices: all, mode: off}\n  default: *all\n", node(h100),
			[]Want{{GPU: "GPU-0", Mode: Off, Line: 4}}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			d, err := mustParse(t, tc.in).Desire("default", tc.inv)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(Desired{Partition: "default", GPUs: tc.want}, d); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

func TestDesireRefuses(t *testing.T) {
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
			"f:3: partition \"default\" has no entry for GPU 0 of this node: exactly one must match each GPU"}},
		{"MIG", "default", head + "    - devices: all\n      mode: mig\n", node("x", "x"), []string{
			"f:5: mode mig is not built yet in this version; whole, shared and off work (asked for on GPUs 0 and 1)"}},
		{"MPS", "default", head + "    - devices: all\n      mode: shared\n      compute: mps\n", node("x"), []string{
			"f:6: compute mps is not built yet in this version; timeslice works (asked for on GPU 0)"}},
		{"several", "default", head + "    - {devices: [0, 7], mode: mig}\n    - {devices: [0], mode: whole}\n", node("x", "x"), []string{
			"f:3: partition \"default\" has no entry for GPU 1 of this node: exactly one must match each GPU",
			"f:4: this node has no GPU with index 7: it has GPUs 0 and 1",
			"f:4: mode mig is not built yet in this version; whole, shared and off work (asked for on GPU 0)",
			"f:5: GPU 0: the entry on line 4 matches too, and exactly one must match each GPU"}},
		{"an index of the MIG manager", "custom", migHead + "  - {devices: [0, 9], mig-enabled: false}\n", node("x"), []string{
			"f:4: this node has no GPU with index 9: it has GPU 0"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			d, err := mustParse(t, tc.in).Desire(tc.partition, tc.inv)
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

// TestUnbuiltPartitionLeavesTheOthers holds that a partition that this version
// cannot deliver is refused alone, and with its line.
func TestUnbuiltPartitionLeavesTheOthers(t *testing.T) {
	f := mustParse(t, readFile(t, "testdata/partitions.yaml"))
	inv := node("NVIDIA H100 80GB HBM3", "NVIDIA A30", "NVIDIA A30", "NVIDIA A30")
	inv.GPUs[0].UUID = "GPU-00000000-0000-0000-0000-000000000000"
	inv.GPUs[1].UUID = "GPU-00000000-0000-0000-0000-000000000001"
	refused := map[string]string{
		"research": "f:21: mode mig is not built yet in this version; whole, shared and off work (asked for on GPU 2)\n" +
			"f:24: mode mig is not built yet in this version; whole, shared and off work (asked for on GPU 3)",
		"served-by-mps": "f:34: compute mps is not built yet in this version; timeslice works (asked for on GPUs 0-3)",
	}
	for _, name := range f.Names() {
		_, err := f.Desire(name, inv)
		got := ""
		if err != nil {
			got = err.Error()
		}
		if got != refused[name] {
			t.Errorf("%s: %q, want %q", name, got, refused[name])
		}
	}
}

// TestMIGIsReadInFull looks at what parsing keeps of a mode that Desire refuses
// for now: the syntax is complete from the start.
func TestMIGIsReadInFull(t *testing.T) {
	f := mustParse(t, readFile(t, "testdata/partitions.yaml")+
		"  empty:\n    - {devices: all, mode: mig, geometry: {}}\n  demand:\n    - {devices: all, mode: mig}\n")
	profile := func(s string) mig.Name {
		n, err := mig.Parse(s)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	entries := f.find("research").entries
	for _, tc := range []struct {
		name      string
		got, want Want
	}{
		{"fixed", entries[1].want, Want{Mode: MIG, Line: 20, Geometry: []Count{{profile("1g.10gb"), 4}, {profile("3g.40gb"), 1}}}},
		{"limited", entries[2].want, Want{Mode: MIG, Line: 23, OnDemand: true, Profiles: []mig.Name{profile("1g.10gb"), profile("2g.20gb")}}},
		{"present and empty", f.find("empty").entries[0].want, Want{Mode: MIG, Line: 36}},
		{"absent", f.find("demand").entries[0].want, Want{Mode: MIG, Line: 38, OnDemand: true}},
	} {
		if !tc.got.Equal(tc.want) || tc.got.Line != tc.want.Line {
			t.Errorf("%s: %+v, want %+v", tc.name, tc.got, tc.want)
		}
	}
}

func TestMIGManagersFile(t *testing.T) {
	f := mustParse(t, readFile(t, "testdata/nvidia-mig-manager.yaml"))
	wantNames := []string{"all-disabled", "all-enabled", "all-1g.5gb", "all-1g.10gb", "all-1g.10gb.me", "all-1g.24gb-me", "all-2g.48gb.me.all", "all-balanced", "custom"}
	if diff := cmp.Diff(wantNames, f.Names()); diff != "" {
		t.Fatalf("names, -want +got:\n%s", diff)
	}
	const why = "mig-enabled: true asks for MIG, which is not built yet in this version; items with mig-enabled: false work"
	a100, err := ReadInventory([]byte(readFile(t, "../../tests/testdata/inventories/a100-80gb.json")))
	if err != nil {
		t.Fatal(err)
	}

	d, err := f.Desire("all-disabled", a100)
	if err != nil {
		t.Fatal(err)
	}
	if len(d.GPUs) != 8 {
		t.Fatalf("all-disabled wants something of %d GPUs, not 8", len(d.GPUs))
	}
	for i, w := range d.GPUs {
		if !w.Equal(Want{GPU: a100.GPUs[i].UUID, Mode: Whole}) {
			t.Errorf("all-disabled wants %+v of GPU %d", w, i)
		}
	}

	for name, want := range map[string]string{
		"all-enabled":  "f:10: " + why + " (asked for on GPUs 0-7)",
		"all-1g.10gb":  "f:24: " + why + " (asked for on GPUs 0-7)",
		"all-balanced": "f:56: " + why + " (asked for on GPUs 0-7)",
		"custom":       "f:80: " + why + " (asked for on GPUs 0 and 1)",
	} {
		if _, err := f.Desire(name, a100); err == nil || err.Error() != want {
			t.Errorf("%s: %v, want %s", name, err, want)
		}
	}
}

// TestMIGManagersItemsApplyInOrder: the last match wins, what none matches is
// left alone, and a filter decides whether an item is meant for this node.
func TestMIGManagersItemsApplyInOrder(t *testing.T) {
	f := mustParse(t, migHead+
		"  - {devices: [0, 1], mig-enabled: true, mig-devices: {}}\n"+
		"  - {devices: [0, 1], mig-enabled: false}\n"+
		"  - {device-filter: '0x20b210de', devices: [2, 9], mig-enabled: true, mig-devices: {}}\n"+
		"  - {device-filter: ['0x20B710DE', '0x20B010DE'], devices: all, mig-enabled: false}\n")
	inv := node("a", "b", "c", "d")
	inv.GPUs[3].PCIDevice = "0x20B710DE"
	d, err := f.Desire("custom", inv)
	if err != nil {
		t.Fatal(err)
	}
	want := []Want{{GPU: "GPU-0", Mode: Whole, Line: 5}, {GPU: "GPU-1", Mode: Whole, Line: 5}, {GPU: "GPU-2"}, {GPU: "GPU-3", Mode: Whole, Line: 7}}
	if diff := cmp.Diff(want, d.GPUs); diff != "" {
		t.Errorf("-want +got:\n%s", diff)
	}

	// The same items on a node that the third one is meant for.
	inv.GPUs[2].PCIDevice = "0x20B210DE"
	_, err = f.Desire("custom", inv)
	wantErr := "f:6: this node has no GPU with index 9: it has GPUs 0-3\n" +
		"f:6: mig-enabled: true asks for MIG, which is not built yet in this version; items with mig-enabled: false work (asked for on GPU 2)"
	if err == nil || err.Error() != wantErr {
		t.Errorf("%v, want %s", err, wantErr)
	}
}

func TestWantEqual(t *testing.T) {
	n1, n2 := mig.Name{Slices: 1, GB: 10}, mig.Name{Slices: 2, GB: 20}
	base := Want{GPU: "GPU-0", Mode: MIG, Geometry: []Count{{n1, 1}}}
	moved := base
	moved.Line = 9
	if !base.Equal(moved) {
		t.Error("an entry on another line is another want")
	}
	for name, other := range map[string]Want{
		"GPU":       {GPU: "GPU-1", Mode: MIG, Geometry: []Count{{n1, 1}}},
		"mode":      {GPU: "GPU-0", Mode: Off, Geometry: []Count{{n1, 1}}},
		"replicas":  {GPU: "GPU-0", Mode: MIG, Replicas: 1, Geometry: []Count{{n1, 1}}},
		"timeSlice": {GPU: "GPU-0", Mode: MIG, TimeSlice: gpu.TimeSliceLong, Geometry: []Count{{n1, 1}}},
		"compute":   {GPU: "GPU-0", Mode: MIG, Compute: ComputeMPS, Geometry: []Count{{n1, 1}}},
		"on demand": {GPU: "GPU-0", Mode: MIG, OnDemand: true, Geometry: []Count{{n1, 1}}},
		"count":     {GPU: "GPU-0", Mode: MIG, Geometry: []Count{{n1, 2}}},
		"profile":   {GPU: "GPU-0", Mode: MIG, Geometry: []Count{{n2, 1}}},
		"profiles":  {GPU: "GPU-0", Mode: MIG, Geometry: []Count{{n1, 1}}, Profiles: []mig.Name{n1}},
	} {
		if base.Equal(other) {
			t.Errorf("wants that differ in %s are equal", name)
		}
		d, o := Desired{"a", []Want{base}}, Desired{"a", []Want{other}}
		if d.Equal(o) || !d.Equal(Desired{"a", []Want{moved}}) || d.Equal(Desired{"b", []Want{base}}) || d.Equal(Desired{"a", nil}) {
			t.Errorf("Desired.Equal does not see a difference in %s, the name or the length", name)
		}
	}
}

// TestDesireSharesNothing: what a caller does to an answer is not in the next.
func TestDesireSharesNothing(t *testing.T) {
	f := mustParse(t, head+"    - {devices: all, mode: mig, geometry: {1g.10gb: 1}}\n")
	f.partitions[0].entries[0].unbuilt = ""
	first, err := f.Desire("default", node("x", "x"))
	if err != nil {
		t.Fatal(err)
	}
	first.GPUs[0].Geometry[0].N = 7
	again, err := f.Desire("default", node("x", "x"))
	if err != nil {
		t.Fatal(err)
	}
	if again.GPUs[0].Geometry[0].N != 1 || first.GPUs[1].Geometry[0].N != 1 {
		t.Errorf("two answers share memory: %+v, %+v", first, again)
	}
}

func readFile(t testing.TB, path string) string {
	t.Helper()
	data, err := os.ReadFile(filepath.FromSlash(path))
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}
