// SPDX-License-Identifier: Apache-2.0

package config

import (
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"

	"github.com/google/go-cmp/cmp"
)

func TestReadInventoryOfWellKnownCards(t *testing.T) {
	paths, err := filepath.Glob("../../tests/testdata/inventories/*.json")
	if err != nil || len(paths) < 7 {
		t.Fatalf("inventories are missing: %q, %v", paths, err)
	}
	for _, path := range paths {
		inv, err := ReadInventory([]byte(readFile(t, path)))
		if err != nil {
			t.Errorf("%s: %v", path, err)
			continue
		}
		for _, d := range inv.GPUs {
			memory := 0
			for _, p := range d.MIG.Profiles {
				n, err := mig.Parse(p.Name)
				if err != nil {
					t.Errorf("%s: GPU %d: %v", path, d.Index, err)
				}
				if n.Slices != p.Slices {
					t.Errorf("%s: GPU %d: %s has %d slices", path, d.Index, p.Name, p.Slices)
				}
				if p.Max < 1 || p.Max > len(p.Placements) {
					t.Errorf("%s: GPU %d: %d of %s, which has %d placements", path, d.Index, p.Max, p.Name, len(p.Placements))
				}
				for _, pl := range p.Placements {
					memory = max(memory, pl.Start+pl.Size)
				}
			}
			whole := d.MIG.Profiles[len(d.MIG.Profiles)-1]
			if whole.Placements[0].Size != memory {
				t.Errorf("%s: GPU %d: %s does not fill the %d memory slices", path, d.Index, whole.Name, memory)
			}
			if whole.Memory > d.Usable() {
				t.Errorf("%s: GPU %d: %s has %d MiB of the card's %d", path, d.Index, whole.Name, whole.Memory, d.Usable())
			}
		}
	}
}

// TestRecordedInventories: the inventories that come out of the emulated driver
// say of each card's MIG side what the published tables say.
func TestRecordedInventories(t *testing.T) {
	for recorded, published := range map[string]string{
		"a100-40": "a100-40gb", "a100-80": "a100-80gb", "a100-80-mig": "a100-80gb", "a30": "a30-24gb", "h100-80": "h100-80gb", "h200": "h200-141gb",
		"b200": "b200-180gb", "rtx-pro-6000": "rtx-pro-6000-96gb", "rtx-pro-6000-mig": "rtx-pro-6000-96gb",
	} {
		profiles := func(name string) []gpu.Profile {
			inv := cards(t, name)
			for i := range inv.GPUs {
				if !slices.EqualFunc(inv.GPUs[i].MIG.Profiles, inv.GPUs[0].MIG.Profiles, func(a, b gpu.Profile) bool { return cmp.Equal(a, b) }) {
					t.Errorf("%s: GPU %d is another card than GPU 0", name, i)
				}
			}
			out := inv.GPUs[0].MIG.Profiles
			for i := range out {
				out[i].Memory, out[i].SMs, out[i].Engines = 0, 0, nil // some of which nobody has published
			}
			slices.SortFunc(out, func(a, b gpu.Profile) int { return strings.Compare(a.Name, b.Name) })
			return out
		}
		if diff := cmp.Diff(profiles("inventories/"+published), profiles(recorded)); diff != "" {
			t.Errorf("%s, -published +recorded:\n%s", recorded, diff)
		}
	}
}

func TestReadInventoryTakesTheLeast(t *testing.T) {
	inv, err := ReadInventory([]byte(`{"gpus": [
		{"index": 1, "uuid": "GPU-1", "memoryMiB": 24576, "mig": {}},
		{"index": 0, "uuid": "GPU-0", "memoryMiB": 81920, "newer": true, "mig": {"enabled": true, "instances": [{"profile": "1g.10gb", "start": 6, "size": 1, "busy": true}]}}]}`))
	if err != nil {
		t.Fatal(err)
	}
	if len(inv.GPUs) != 2 || inv.GPUs[0].UUID != "GPU-0" || inv.GPUs[1].UUID != "GPU-1" {
		t.Fatalf("the GPUs are not in index order: %+v", inv.GPUs)
	}
	m := inv.GPUs[0].MIG
	if !m.Capable || m.Pending != nil || !m.Enabled || len(m.Instances) != 1 || !m.Instances[0].Busy || m.Instances[0].Start != 6 {
		t.Errorf("MIG is %+v", m)
	}
	if inv, err := ReadInventory([]byte(`{"gpus": []}`)); err != nil || len(inv.GPUs) != 0 {
		t.Errorf("a node without GPUs: %+v, %v", inv, err)
	}
	lost := `{"gpus": [{"index": 0, "uuid": "", "memoryMiB": 0, "fault": "GPU is lost", "mig": {}}]}`
	if _, err := ReadInventory([]byte(lost)); err != nil {
		t.Errorf("a GPU that is lost: %v", err)
	}
}

func TestReadInventoryRefuses(t *testing.T) {
	const gpu0 = `{"index": 0, "uuid": "GPU-0", "memoryMiB": 1, "mig": {}}`
	for _, tc := range []struct {
		name, in string
		want     []string
	}{
		{"nothing", "", []string{"read inventory: it is empty"}},
		{"half of it", "{\"gpus\": [\n", []string{"read inventory: line 1: it ends in the middle"}},
		{"not JSON", "{\n\"gpus\": [\n!]}", []string{"read inventory: line 3: invalid character '!' looking for beginning of value"}},
		{"a list", "[]", []string{"read inventory: line 1: the document cannot be read from a JSON array"}},
		{"a wrong type", "{\"gpus\": [\n{\"index\": \"0\"}]}", []string{"read inventory: line 2: gpus.index cannot be read from a JSON string"}},
		{"a second document", "{\"gpus\": []}\n{}", []string{"read inventory: line 2: something follows the inventory"}},
		{"no gpus", "{}", []string{"read inventory: gpus is missing; without GPUs it is []"}},
		{"null", "null", []string{"read inventory: gpus is missing; without GPUs it is []"}},
		{"a GPU of nothing", `{"gpus": [null]}`, []string{
			"read inventory: gpus[0]: index is missing",
			"read inventory: gpus[0]: uuid is missing",
			"read inventory: gpus[0]: memoryMiB is missing",
			"read inventory: gpus[0]: mig is missing"}},
		{"keys in other letters", `{"gpus": [{"Index": 0, "UUID": "GPU-0", "memoryMib": 1, "mig": null}]}`, []string{
			"read inventory: gpus[0]: index is missing",
			"read inventory: gpus[0]: uuid is missing",
			"read inventory: gpus[0]: memoryMiB is missing",
			"read inventory: gpus[0]: mig is missing"}},
		{"two of one", `{"gpus": [` + gpu0 + `, ` + gpu0 + `]}`, []string{
			"read inventory: gpus[1]: index 0 is that of gpus[0], too",
			"read inventory: gpus[1]: uuid GPU-0 is that of gpus[0], too"}},
		{"impossible figures", `{"gpus": [{"index": -1, "uuid": "", "memoryMiB": 0, "reservedMiB": 4, "mig": {}}]}`, []string{
			"read inventory: gpus[0]: index is negative: -1",
			"read inventory: gpus[0]: uuid is empty",
			"read inventory: gpus[0]: reservedMiB 4 is more than memoryMiB 0"}},
		{"half an instance", `{"gpus": [{"index": 0, "uuid": "GPU-0", "memoryMiB": 1, "mig": {"enabled": true, "instances": [{"start": -1}]}}]}`, []string{
			"read inventory: gpus[0]: mig.instances[0]: profile is missing",
			"read inventory: gpus[0]: mig.instances[0]: size is missing",
			"read inventory: gpus[0]: mig.instances[0]: no run of memory slices starts at -1 and has the size 0"}},
		{"instances with MIG off", `{"gpus": [{"index": 0, "uuid": "GPU-0", "memoryMiB": 1, "mig": {"instances": [{"profile": "1g.10gb", "start": 0, "size": 1}]}}]}`, []string{
			"read inventory: gpus[0]: mig has instances and is not enabled"}},
		{"half a profile", `{"gpus": [{"index": 0, "uuid": "GPU-0", "memoryMiB": 1, "mig": {"profiles": [{"placements": [{"start": 0}]}]}}]}`, []string{
			"read inventory: gpus[0]: mig.profiles[0]: name is missing",
			"read inventory: gpus[0]: mig.profiles[0]: placements[0]: size is missing"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			inv, err := ReadInventory([]byte(tc.in))
			if err == nil {
				t.Fatalf("it is accepted: %+v", inv)
			}
			if diff := cmp.Diff(strings.Join(tc.want, "\n"), err.Error()); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

// FuzzReadInventory holds that a document that is read has GPUs in index order,
// of different names, with memory, unless they have a fault.
func FuzzReadInventory(f *testing.F) {
	paths, _ := filepath.Glob("../../tests/testdata/inventories/*.json")
	for _, path := range paths {
		f.Add([]byte(readFile(f, path)))
	}
	f.Add([]byte(`{"gpus": [{"index": 0, "uuid": "GPU-0", "memoryMiB": 1, "mig": {"profiles": [{"name": "a", "placements": [{"start": 0, "size": 1}]}], "profiles": [{}]}}]}`))
	f.Add([]byte(`{"GPUs": [{}], "gpus": []}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		inv, err := ReadInventory(data)
		if err != nil {
			return
		}
		for i := range inv.GPUs {
			d := &inv.GPUs[i]
			if i > 0 && d.Index <= inv.GPUs[i-1].Index {
				t.Fatalf("GPU %d follows GPU %d", d.Index, inv.GPUs[i-1].Index)
			}
			if d.Fault == "" && (d.Usable() > d.Memory || d.Memory == 0 || inv.ByUUID(d.UUID) != d) {
				t.Fatalf("GPU %d is read as %+v", d.Index, d)
			}
		}
	})
}
