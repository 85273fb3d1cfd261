// SPDX-License-Identifier: Apache-2.0

package config

import (
	"slices"
	"strconv"
	"strings"
	"testing"

	"example.com/gpu-agent/pkg/gpu"
)

// Here is what files of NVIDIA's MIG manager mean in words; tests/peers holds it
// against what mig-parted makes of them, and of every example of its documentation.

// words are a want for each GPU, or nil where the config is refused.
//
//	whole   MIG is off
//	keep    the config says nothing of the GPU
//	{}      MIG is on, without an instance
//	1g.10gb:2 2g.20gb:1   these instances
func words(d Desired, err error) []string {
	if err != nil {
		return nil
	}
	var list []string
	for _, w := range d.GPUs {
		switch {
		case w.Unproven:
			list = append(list, "not proven")
		case w.Mode != MIG:
			list = append(list, map[Mode]string{Keep: "keep", Whole: "whole"}[w.Mode])
		case len(w.Geometry) == 0 && !w.OnDemand:
			list = append(list, "{}")
		default:
			var counts []string
			for _, c := range w.Geometry {
				counts = append(counts, c.Profile.String()+":"+strconv.Itoa(c.N))
			}
			list = append(list, strings.Join(counts, " "))
		}
	}
	return list
}

// dgxStation has four A100s, and at index 3 a card for its display.
func dgxStation(t testing.TB) *gpu.Inventory {
	inv := cards(t, "a100-80")
	inv.GPUs = inv.GPUs[:5]
	d := &inv.GPUs[3]
	d.Model, d.PCIDevice, d.MIG = "NVIDIA DGX Display", "0x1FB010DE", gpu.MIG{}
	return inv
}

// TestMIGManagersFile: a file for a fleet, held against nodes of every kind. A
// node that is not named is refused where the config is for all cards, and left as
// it is where its filters do not admit the node's.
func TestMIGManagersFile(t *testing.T) {
	nodes := map[string]*gpu.Inventory{"dgx-station": dgxStation(t)}
	for _, name := range []string{"a100-40", "a100-80", "a30", "h100-80", "h200", "b200", "rtx-pro-6000"} {
		nodes[name] = cards(t, name)
	}
	const file = "testdata/nvidia-mig-manager.yaml"
	text := readFile(t, file)
	f := mustParse(t, text)
	tests := map[string]struct {
		filtered bool
		every    string            // what every node's GPUs become
		of       map[string]string // what all GPUs of these nodes become
		each     map[string][]string
	}{
		"all-disabled":   {every: "whole"},
		"all-enabled":    {every: "{}"},
		"all-1g.5gb":     {of: map[string]string{"a100-40": "1g.5gb:7"}},
		"all-1g.10gb.me": {of: map[string]string{"a100-80": "1g.10gb+me:1", "dgx-station": "1g.10gb+me:1", "h100-80": "1g.10gb+me:1"}},
		"all-1g.10gb": {filtered: true, of: map[string]string{
			"h100-80": "1g.10gb:7", "a100-80": "1g.10gb:7", "dgx-station": "1g.10gb:7", "a100-40": "1g.10gb:4"}},
		"all-1g.24gb-me":     {of: map[string]string{"rtx-pro-6000": "1g.24gb-me:4"}},
		"all-2g.48gb.me.all": {of: map[string]string{"rtx-pro-6000": "2g.48gb+me.all:1"}},
		"all-balanced": {filtered: true, of: map[string]string{
			"a100-40": "1g.5gb:2 2g.10gb:1 3g.20gb:1", "a30": "1g.6gb:2 2g.12gb:1",
			"a100-80": "1g.10gb:2 2g.20gb:1 3g.40gb:1", "dgx-station": "1g.10gb:2 2g.20gb:1 3g.40gb:1", "h100-80": "1g.10gb:2 2g.20gb:1 3g.40gb:1"}},
		"custom": {each: map[string][]string{ // 1c of 1g is all of it
			"a100-80":     {"1g.10gb:7", "1g.10gb:7", "whole", "whole", "whole", "whole", "whole", "whole"},
			"h100-80":     {"1g.10gb:7", "1g.10gb:7", "whole", "whole", "whole", "whole", "whole", "whole"},
			"dgx-station": {"1g.10gb:7", "1g.10gb:7", "whole", "whole", "whole"}}},
	}
	for _, config := range f.Names() {
		tc, ok := tests[config]
		if !ok {
			t.Errorf("nobody has said what %s means", config)
		}
		for node, inv := range nodes {
			want, word := tc.each[node], tc.every
			if w, ok := tc.of[node]; ok {
				word = w
			} else if tc.filtered {
				word = "keep"
			}
			if word != "" {
				want = slices.Repeat([]string{word}, len(inv.GPUs))
				for i := range want {
					if word != "whole" && !inv.GPUs[i].MIG.Capable {
						want[i] = "keep" // in an item with MIG on, all is all that know MIG
					}
				}
			}
			d, err := f.Desire(config, inv, Node{Unit: 1024})
			if got := words(d, err); !slices.Equal(got, want) {
				t.Errorf("%s on %s: %q, %v, want %q", config, node, got, err, want)
			}
			if err != nil {
				checkErrors(t, []byte(text), err)
			}
		}
	}
}

// TestMIGManagersItems is what items mean that no example shows.
func TestMIGManagersItems(t *testing.T) {
	inv := dgxStation(t)
	inv.GPUs = inv.GPUs[:4]
	const file = "testdata/nvidia-items.yaml"
	tests := map[string]struct {
		want    []string
		refused string
	}{
		"last-wins":             {want: []string{"1g.10gb:7", "2g.20gb:3", "2g.20gb:3", "keep"}},
		"no-device":             {want: []string{"4g.40gb:1", "keep", "keep", "keep"}},
		"filter":                {want: []string{"keep", "1g.20gb:4", "keep", "keep"}},
		"filter-of-none":        {want: []string{"2g.20gb:3", "{}", "keep", "keep"}},
		"parts":                 {want: []string{"1c.3g.40gb:6", "3g.40gb:1 1c.3g.40gb:1 2c.3g.40gb:1", "1g.10gb:1 1c.2g.20gb:6", "keep"}},
		"seven-parts":           {want: []string{"1c.7g.80gb:7", "keep", "keep", "keep"}},
		"whole-parts-and-zeros": {want: []string{"1g.10gb+me:1 3g.40gb:1", "1g.10gb+me:1 3g.40gb:1", "1g.10gb+me:1 3g.40gb:1", "keep"}},
		"all-is-all-with-mig":   {want: []string{"1g.10gb:3 3g.40gb:1", "1g.10gb:3 3g.40gb:1", "1g.10gb:3 3g.40gb:1", "keep"}},
		"none":                  {want: []string{"whole", "whole", "whole", "whole"}},
		"too-many":              {refused: "GPUs 0 and 2: "},
		"too-many-parts":        {refused: "GPU 0: "},
		"no-room":               {refused: "GPU 0: "},
		"no-such-profile":       {refused: "GPU 0: "},
		"no-mig":                {refused: "GPU 3: this model has no MIG: whole, shared and off work"},
	}
	text := readFile(t, file)
	f := mustParse(t, text)
	for _, config := range f.Names() {
		tc, ok := tests[config]
		if !ok {
			t.Errorf("nobody has said what %s means", config)
		}
		d, err := f.Desire(config, inv, Node{Unit: 1024})
		if got := words(d, err); !slices.Equal(got, tc.want) {
			t.Errorf("%s: %q, %v, want %q", config, got, err, tc.want)
		}
		if err == nil {
			continue
		}
		checkErrors(t, []byte(text), err)
		if tc.refused == "" || !strings.Contains(err.Error(), ": "+tc.refused) {
			t.Errorf("%s: refused with %q, want %q", config, err, tc.refused)
		}
	}
}

// TestMIGManagersItemsOursAlone is where mig-parted differs: it makes what a later
// item replaces, too, and fails if it cannot, also where MIG is on in one item and
// off in another; and it tells nobody that an index is not there.
func TestMIGManagersItemsOursAlone(t *testing.T) {
	inv := dgxStation(t)
	inv.GPUs = inv.GPUs[:4]
	for _, tc := range []struct {
		why   string
		items string
		want  []string // of each GPU, or the refusal
	}{
		{"what a later item replaces need not fit", `
			- {devices: all, mig-enabled: true, mig-devices: {9g.999gb: 3}}
			- {devices: all, mig-enabled: true, mig-devices: {3g.40gb: 2}}`,
			[]string{"3g.40gb:2", "3g.40gb:2", "3g.40gb:2", "keep"}},
		{"also where it turns MIG off", `
			- {devices: [0, 1], mig-enabled: true, mig-devices: {1g.10gb: 7}}
			- {devices: [1], mig-enabled: false}`,
			[]string{"1g.10gb:7", "whole", "keep", "keep"}},
		{"and an earlier item holds for those that know no MIG", `
			- {devices: all, mig-enabled: false}
			- {devices: all, mig-enabled: true, mig-devices: {1g.10gb: 7}}`,
			[]string{"1g.10gb:7", "1g.10gb:7", "1g.10gb:7", "whole"}},
		{"a zero of what is not there is none", `
			- {devices: all, mig-enabled: true, mig-devices: {9g.999gb: 0, 7c.7g.80gb: 1}}`,
			[]string{"7g.80gb:1", "7g.80gb:1", "7g.80gb:1", "keep"}},
		{"a filter with the subsystem is for that board alone", `
			- {device-filter: ["0x20B210DE:0x14BE10DE"], devices: all, mig-enabled: true, mig-devices: {}}
			- {device-filter: "0x20B210DE:0x147F10DE", devices: [2], mig-enabled: true, mig-devices: {1g.10gb: 1}}`,
			[]string{"keep", "keep", "1g.10gb:1", "keep"}},
		{"an index that is not there", `
			- {devices: [0, 9], mig-enabled: false}`,
			[]string{"f:4: this node has no GPU with index 9: it has GPUs 0-3"}},
	} {
		t.Run(tc.why, func(t *testing.T) {
			items := strings.ReplaceAll(strings.TrimPrefix(tc.items, "\n"), "\t\t\t", "  ")
			d, err := mustParse(t, migHead+items+"\n").Desire("custom", inv, Node{Unit: 1024})
			got := words(d, err)
			if err != nil {
				got = []string{err.Error()}
			}
			if !slices.Equal(got, tc.want) {
				t.Errorf("%q, want %q", got, tc.want)
			}
		})
	}
}
