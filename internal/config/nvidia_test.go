// SPDX-License-Identifier: Apache-2.0

package config

import (
	"errors"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"

	"go.yaml.in/yaml/v3"
)

// migParted is the version whose documentation's examples mean here what they
// mean there.
const migParted = "github.com/!n!v!i!d!i!a/mig-parted@v0.13.1"

// fleet is nodes of every kind that the MIG manager's default file knows. Those
// of which there is no recorded inventory are H100s under other names: NVIDIA
// cuts all its large cards alike.
func fleet(t testing.TB) map[string]*gpu.Inventory {
	nodes := map[string]*gpu.Inventory{"dgx-station": dgxStation(t)}
	for _, name := range []string{"a100-40", "a100-80", "a30", "h100-80", "h200", "b200", "rtx-pro-6000"} {
		nodes[name] = cards(t, name)
	}
	for name, other := range map[string]struct{ device, profiles string }{
		"h100-nvl":  {"0x232110DE", "1g.12gb 1g.24gb 2g.24gb 3g.47gb 4g.47gb 7g.94gb"},
		"gh200":     {"0x234210DE", "1g.12gb 1g.24gb 2g.24gb 3g.48gb 4g.48gb 7g.96gb"},
		"pg506":     {"0x20B610DE", "1g.12gb 1g.24gb 2g.24gb 3g.48gb 4g.48gb 7g.96gb"},
		"gh200-144": {"0x234810DE", "1g.18gb 1g.36gb 2g.36gb 3g.72gb 4g.72gb 7g.144gb"},
		"gb200":     {"0x294110DE", "1g.23gb 1g.47gb 2g.47gb 3g.93gb 4g.93gb 7g.186gb"},
		"gb200-189": {"0x294210DE", "1g.24gb 1g.47gb 2g.47gb 3g.95gb 4g.95gb 7g.189gb"},
		"b300":      {"0x318210DE", "1g.34gb 1g.67gb 2g.67gb 3g.135gb 4g.135gb 7g.269gb"},
		"gb300":     {"0x31C210DE", "1g.35gb 1g.70gb 2g.70gb 3g.139gb 4g.139gb 7g.278gb"},
	} {
		names := strings.Fields(other.profiles)
		inv := cards(t, "h100-80")
		for i := range inv.GPUs {
			inv.GPUs[i].PCIDevice = other.device
			for j := range inv.GPUs[i].MIG.Profiles {
				p := &inv.GPUs[i].MIG.Profiles[j]
				k := map[string]int{"1g.10gb": 0, "1g.10gb+me": 0, "1g.20gb": 1, "2g.20gb": 2, "3g.40gb": 3, "4g.40gb": 4, "7g.80gb": 5}[p.Name]
				_, me, _ := strings.Cut(p.Name, "gb")
				p.Name = names[k] + me
			}
		}
		nodes[name] = inv
	}
	return nodes
}

// dgxStation has four A100s, and at index 3 a card for its display.
func dgxStation(t testing.TB) *gpu.Inventory {
	inv := cards(t, "a100-80")
	inv.GPUs = inv.GPUs[:5]
	d := &inv.GPUs[3]
	d.Model, d.PCIDevice, d.MIG = "NVIDIA DGX Display", "0x1FB010DE", gpu.MIG{}
	return inv
}

// most is how many instances of each profile find room on one GPU, from
// NVIDIA's MIG user guide.
func most(inv *gpu.Inventory, profile string) int {
	names := map[int]string{}
	for _, p := range inv.GPUs[0].MIG.Profiles {
		names[len(names)] = p.Name
	}
	if !slices.Contains(slices.Collect(maps.Values(names)), profile) {
		return 0
	}
	memory, attribute := 0, profile[strings.Index(profile, "gb")+2:]
	for _, p := range inv.GPUs[0].MIG.Profiles { // the least of one slice
		if gb := gigabytes(p.Name); p.Name[0] == '1' && (memory == 0 || gb < memory) {
			memory = gb
		}
	}
	switch slices := profile[0]; {
	case strings.HasPrefix(attribute, "+me"):
		return 1
	case len(names) != 7: // A30, RTX PRO 6000
		return map[byte]int{'1': 4, '2': 2, '4': 1}[slices]
	case slices == '1' && gigabytes(profile) > memory:
		return 4
	default:
		return map[byte]int{'1': 7, '2': 3, '3': 2, '4': 1, '7': 1}[slices]
	}
}

func gigabytes(profile string) int {
	_, rest, _ := strings.Cut(profile, "g.")
	digits, _, _ := strings.Cut(rest, "gb")
	n, _ := strconv.Atoi(digits)
	return n
}

// oneProfile is the configs that give all GPUs as many instances of one profile
// as find room, whatever they are: a node whose cards lack the profile, or have
// less room, is refused. all-1g.24gb and others that differ from file to file
// stand in the tables below.
const oneProfile = `
	all-1g.5gb 1g.5gb:7        all-1g.5gb.me 1g.5gb+me:1        all-2g.10gb 2g.10gb:3      all-3g.20gb 3g.20gb:2
	all-4g.20gb 4g.20gb:1      all-7g.40gb 7g.40gb:1            all-1g.10gb.me 1g.10gb+me:1
	all-1g.20gb 1g.20gb:4      all-2g.20gb 2g.20gb:3            all-3g.40gb 3g.40gb:2      all-4g.40gb 4g.40gb:1
	all-7g.80gb 7g.80gb:1
	all-1g.6gb 1g.6gb:4        all-1g.6gb.me 1g.6gb+me:1        all-2g.12gb 2g.12gb:2      all-2g.12gb.me 2g.12gb+me:1
	all-4g.24gb 4g.24gb:1
	all-1g.24gb.gfx 1g.24gb+gfx:4  all-1g.24gb.me.all 1g.24gb+me.all:1  all-1g.24gb-me 1g.24gb-me:4  all-2g.48gb 2g.48gb:2
	all-2g.48gb.gfx 2g.48gb+gfx:2  all-2g.48gb.me.all 2g.48gb+me.all:1  all-2g.48gb-me 2g.48gb-me:2  all-4g.96gb 4g.96gb:1
	all-4g.96gb.gfx 4g.96gb+gfx:1
	all-1g.12gb 1g.12gb:7      all-1g.12gb.me 1g.12gb+me:1      all-1g.24gb.me 1g.24gb+me:1  all-2g.24gb 2g.24gb:3
	all-3g.47gb 3g.47gb:2      all-4g.47gb 4g.47gb:1            all-7g.94gb 7g.94gb:1
	all-3g.48gb 3g.48gb:2      all-4g.48gb 4g.48gb:1            all-7g.96gb 7g.96gb:1
	all-1g.47gb 1g.47gb:4      all-2g.47gb 2g.47gb:3            all-3g.93gb 3g.93gb:2      all-4g.93gb 4g.93gb:1
	all-7g.186gb 7g.186gb:1    all-3g.95gb 3g.95gb:2            all-4g.95gb 4g.95gb:1      all-7g.189gb 7g.189gb:1
	all-1g.18gb 1g.18gb:7      all-1g.18gb.me 1g.18gb+me:1      all-2g.35gb 2g.35gb:3      all-3g.71gb 3g.71gb:2
	all-4g.71gb 4g.71gb:1      all-7g.141gb 7g.141gb:1          all-1g.35gb.me 1g.35gb+me:1
	all-1g.36gb 1g.36gb:4      all-2g.36gb 2g.36gb:3            all-3g.72gb 3g.72gb:2      all-4g.72gb 4g.72gb:1
	all-7g.144gb 7g.144gb:1
	all-1g.23gb 1g.23gb:7      all-1g.23gb.me 1g.23gb+me:1      all-1g.45gb 1g.45gb:4      all-2g.45gb 2g.45gb:3
	all-3g.90gb 3g.90gb:2      all-4g.90gb 4g.90gb:1            all-7g.180gb 7g.180gb:1
	all-1g.34gb 1g.34gb:7      all-1g.34gb.me 1g.34gb+me:1      all-1g.67gb 1g.67gb:4      all-2g.67gb 2g.67gb:3
	all-3g.135gb 3g.135gb:2    all-4g.135gb 4g.135gb:1          all-7g.269gb 7g.269gb:1
	all-1g.70gb 1g.70gb:4      all-2g.70gb 2g.70gb:3            all-3g.139gb 3g.139gb:2    all-4g.139gb 4g.139gb:1
	all-7g.278gb 7g.278gb:1
`

// meaning is what a config makes of the nodes, by name: a word for each GPU, or
// one for all. A node that is not named is refused if the config is for all
// cards, and left as it is where its filters do not admit the node's.
//
//	whole   MIG is off
//	keep    the config says nothing of the GPU
//	{}      MIG is on, without an instance
//	1g.10gb:2 2g.20gb:1   these instances
type meaning struct {
	why      string
	filtered bool
	nodes    map[string][]string
}

func all(words map[string]string) map[string][]string {
	nodes := map[string][]string{}
	for node, w := range words {
		nodes[node] = []string{w}
	}
	return nodes
}

// Files of the documentation, and ours that restates their cases.
const (
	readme    = "README.md"
	example   = "examples/config.yaml"
	station   = "examples/dgx-station-80gb-config.yaml"
	packaged  = "deployments/systemd/config-default.yaml"
	container = "deployments/container/nvidia-mig-manager-example.yaml"
	newer     = "deployments/container/nvidia-mig-manager-example-hopper-blackwell.yaml"
	restated  = "testdata/nvidia-mig-manager.yaml"
)

// meanings is what the configs mean that are more than oneProfile, by file and
// name. Those of one file alone go by that; the others are in "".
var meanings = map[string]map[string]meaning{
	"": {
		"all-disabled": {why: "MIG is off on all GPUs, also on those that know none"},
		"all-enabled":  {why: "{} is MIG on with no instance"},
		"whatever":     {why: "{} is MIG on with no instance"},
		"current": {why: "what export prints can be applied", nodes: all(map[string]string{
			"a100-40": "1g.5gb:2 2g.10gb:1 3g.20gb:1"})},
		"all-1g.35gb": {why: "one name, two cards with different room", filtered: true, nodes: all(map[string]string{
			"h200": "1g.35gb:4", "gb300": "1g.35gb:7"})},
	},
	example: {
		"all-1g.10gb": {why: "no filter: four fit on the 40 GB card, and are what the others get", nodes: all(map[string]string{
			"a100-40": "1g.10gb:4", "a100-80": "1g.10gb:4", "dgx-station": "1g.10gb:4", "h100-80": "1g.10gb:4"})},
		"all-balanced": {why: "for one card", nodes: all(map[string]string{
			"a100-40": "1g.5gb:2 2g.10gb:1 3g.20gb:1"})},
		"custom-config": {why: "each item has its own GPUs", nodes: map[string][]string{
			"a100-40": {"whole", "whole", "whole", "whole", "1g.5gb:7", "2g.10gb:3", "3g.20gb:2", "1g.5gb:2 2g.10gb:1 3g.20gb:1"}}},
	},
	station: {
		"all-disabled-dgx-station-80": {why: "a filter for each of the two kinds of card", filtered: true, nodes: map[string][]string{
			"dgx-station": {"whole"}, "a100-80": {"whole"}}},
		"all-enabled-dgx-station-80": {why: "the display card knows no MIG and has an item of its own", filtered: true, nodes: map[string][]string{
			"dgx-station": {"{}", "{}", "{}", "whole", "{}"}, "a100-80": {"{}"}}},
		"all-1g.10gb-dgx-station-80": {why: "as above", filtered: true, nodes: map[string][]string{
			"dgx-station": {"1g.10gb:7", "1g.10gb:7", "1g.10gb:7", "whole", "1g.10gb:7"}, "a100-80": {"1g.10gb:7"}}},
		"all-2g.20gb-dgx-station-80": {why: "as above", filtered: true, nodes: map[string][]string{
			"dgx-station": {"2g.20gb:3", "2g.20gb:3", "2g.20gb:3", "whole", "2g.20gb:3"}, "a100-80": {"2g.20gb:3"}}},
		"all-3g.40gb-dgx-station-80": {why: "as above", filtered: true, nodes: map[string][]string{
			"dgx-station": {"3g.40gb:2", "3g.40gb:2", "3g.40gb:2", "whole", "3g.40gb:2"}, "a100-80": {"3g.40gb:2"}}},
		"all-4g.40gb-dgx-station-80": {why: "as above", filtered: true, nodes: map[string][]string{
			"dgx-station": {"4g.40gb:1", "4g.40gb:1", "4g.40gb:1", "whole", "4g.40gb:1"}, "a100-80": {"4g.40gb:1"}}},
		"all-7g.80gb-dgx-station-80": {why: "as above", filtered: true, nodes: map[string][]string{
			"dgx-station": {"7g.80gb:1", "7g.80gb:1", "7g.80gb:1", "whole", "7g.80gb:1"}, "a100-80": {"7g.80gb:1"}}},
		"all-balanced-dgx-station-80": {why: "as above", filtered: true, nodes: map[string][]string{
			"dgx-station": {"1g.10gb:2 2g.20gb:1 3g.40gb:1", "1g.10gb:2 2g.20gb:1 3g.40gb:1", "1g.10gb:2 2g.20gb:1 3g.40gb:1", "whole", "1g.10gb:2 2g.20gb:1 3g.40gb:1"},
			"a100-80":     {"1g.10gb:2 2g.20gb:1 3g.40gb:1"}}},
		"balanced-k8s-dgx-station-80": {why: "indices count all GPUs of the node, those that the filter leaves out too; what no item names stays", filtered: true, nodes: map[string][]string{
			"dgx-station": {"whole", "3g.40gb:2", "1g.10gb:1 2g.20gb:3", "whole", "1g.10gb:7"},
			"a100-80":     {"whole", "3g.40gb:2", "1g.10gb:1 2g.20gb:3", "keep", "1g.10gb:7", "keep", "keep", "keep"}}},
	},
	packaged: {
		"all-1g.10gb": {why: "one name, two cards with different room", filtered: true, nodes: all(map[string]string{
			"h100-80": "1g.10gb:7", "a100-80": "1g.10gb:7", "dgx-station": "1g.10gb:7", "a100-40": "1g.10gb:4"})},
		"all-1g.24gb": {why: "no filter: whoever has the profile", nodes: all(map[string]string{
			"h100-nvl": "1g.24gb:4", "gh200": "1g.24gb:4", "pg506": "1g.24gb:4", "rtx-pro-6000": "1g.24gb:4", "gb200-189": "1g.24gb:4"})},
		"all-balanced": {why: "each card its own item, by its PCI id", filtered: true, nodes: all(map[string]string{
			"a100-40": "1g.5gb:2 2g.10gb:1 3g.20gb:1", "a30": "1g.6gb:2 2g.12gb:1",
			"a100-80": "1g.10gb:2 2g.20gb:1 3g.40gb:1", "dgx-station": "1g.10gb:2 2g.20gb:1 3g.40gb:1", "h100-80": "1g.10gb:2 2g.20gb:1 3g.40gb:1",
			"h200": "1g.18gb:2 2g.35gb:1 3g.71gb:1", "b200": "1g.23gb:2 2g.45gb:1 3g.90gb:1", "rtx-pro-6000": "1g.24gb:2 2g.48gb:1",
			"h100-nvl": "1g.12gb:2 2g.24gb:1 3g.47gb:1", "gh200": "1g.12gb:2 2g.24gb:1 3g.48gb:1", "pg506": "1g.12gb:2 2g.24gb:1 3g.48gb:1",
			"gh200-144": "1g.18gb:2 2g.36gb:1 3g.72gb:1", "gb200": "1g.23gb:2 2g.47gb:1 3g.93gb:1",
			"b300": "1g.34gb:2 2g.67gb:1 3g.135gb:1", "gb300": "1g.35gb:2 2g.70gb:1 3g.139gb:1"})},
	},
	container: {
		"all-1g.10gb": {why: "this file knows Ampere only", filtered: true, nodes: all(map[string]string{
			"a100-80": "1g.10gb:7", "dgx-station": "1g.10gb:7", "a100-40": "1g.10gb:4"})},
		"all-balanced": {why: "each card its own item; a filter may be one id without a list", filtered: true, nodes: all(map[string]string{
			"a100-40": "1g.5gb:2 2g.10gb:1 3g.20gb:1", "a100-80": "1g.10gb:2 2g.20gb:1 3g.40gb:1", "dgx-station": "1g.10gb:2 2g.20gb:1 3g.40gb:1",
			"a30": "1g.6gb:2 2g.12gb:1", "pg506": "1g.12gb:2 2g.24gb:1 3g.48gb:1"})},
	},
	newer: {
		"all-1g.10gb": {why: "no filter: seven, whoever has the room", nodes: all(map[string]string{
			"a100-80": "1g.10gb:7", "dgx-station": "1g.10gb:7", "h100-80": "1g.10gb:7"})},
		"all-1g.24gb": {why: "for one card alone", filtered: true, nodes: all(map[string]string{"h100-nvl": "1g.24gb:4"})},
		"all-balanced": {why: "each card its own item", filtered: true, nodes: all(map[string]string{
			"gb200": "1g.23gb:2 2g.47gb:1 3g.93gb:1", "b200": "1g.23gb:2 2g.45gb:1 3g.90gb:1", "h200": "1g.18gb:2 2g.35gb:1 3g.71gb:1",
			"h100-80": "1g.10gb:2 2g.20gb:1 3g.40gb:1", "h100-nvl": "1g.12gb:1 2g.24gb:1 3g.47gb:1",
			"b300": "1g.34gb:2 2g.67gb:1 3g.135gb:1", "gb300": "1g.35gb:2 2g.70gb:1 3g.139gb:1"})},
	},
	restated: {
		"all-1g.10gb": {why: "one name, two cards with different room", filtered: true, nodes: all(map[string]string{
			"h100-80": "1g.10gb:7", "a100-80": "1g.10gb:7", "dgx-station": "1g.10gb:7", "a100-40": "1g.10gb:4"})},
		"all-balanced": {why: "each card its own item, by its PCI id", filtered: true, nodes: all(map[string]string{
			"a100-40": "1g.5gb:2 2g.10gb:1 3g.20gb:1", "a30": "1g.6gb:2 2g.12gb:1",
			"a100-80": "1g.10gb:2 2g.20gb:1 3g.40gb:1", "dgx-station": "1g.10gb:2 2g.20gb:1 3g.40gb:1", "h100-80": "1g.10gb:2 2g.20gb:1 3g.40gb:1"})},
		"custom": {why: "items apply in order; a zero is none, and 1c of 1g is all of it", nodes: map[string][]string{
			"a100-80":     {"1g.10gb:7", "1g.10gb:7", "whole", "whole", "whole", "whole", "whole", "whole"},
			"h100-80":     {"1g.10gb:7", "1g.10gb:7", "whole", "whole", "whole", "whole", "whole", "whole"},
			"dgx-station": {"1g.10gb:7", "1g.10gb:7", "whole", "whole", "whole"}}},
	},
}

func init() {
	meanings[readme] = meanings[example]
}

// expect looks a config's meaning on a node up: a word for each GPU, or refused
// with nil.
func expect(t testing.TB, file, config, node string, inv *gpu.Inventory) []string {
	t.Helper()
	m, ok := meanings[file][config]
	if !ok {
		m, ok = meanings[""][config]
	}
	each := func(word string) []string {
		words := slices.Repeat([]string{word}, len(inv.GPUs))
		for i := range inv.GPUs {
			if !inv.GPUs[i].MIG.Capable && word != "whole" {
				words[i] = "keep" // in an item with MIG on, all is all that know MIG
			}
		}
		return words
	}
	if !ok {
		fields := strings.Fields(oneProfile)
		i := slices.Index(fields, config)
		if i < 0 {
			t.Fatalf("%s: nobody has said what %s means", file, config)
		}
		name, count, _ := strings.Cut(fields[i+1], ":")
		if n, _ := strconv.Atoi(count); n > most(inv, name) {
			return nil
		}
		return each(fields[i+1])
	}
	switch words := m.nodes[node]; {
	case m.nodes == nil && config == "all-disabled":
		return each("whole")
	case m.nodes == nil:
		return each("{}")
	case len(words) == 1:
		return each(words[0])
	case len(words) > 0:
		return words
	case m.filtered:
		return slices.Repeat([]string{"keep"}, len(inv.GPUs))
	}
	return nil
}

// word is a want in the language of the tables.
func word(w Want) string {
	switch {
	case w.Mode != MIG:
		return map[Mode]string{Keep: "keep", Whole: "whole"}[w.Mode]
	case len(w.Geometry) == 0 && !w.OnDemand:
		return "{}"
	}
	words := make([]string, len(w.Geometry))
	for i, c := range w.Geometry {
		words[i] = c.Profile.String() + ":" + strconv.Itoa(c.N)
	}
	return strings.Join(words, " ")
}

// TestMIGManagersDocumentation reads every example in the documentation of
// NVIDIA's mig-parted, unmodified, and holds each of its configs against nodes
// of every kind. It needs the module's files, which the build of the peer has
// left in Go's module cache.
func TestMIGManagersDocumentation(t *testing.T) {
	out, err := exec.CommandContext(t.Context(), "go", "env", "GOMODCACHE").Output()
	if err != nil {
		t.Skipf("skipped: it needs the go tool to find the module cache: %v", err)
	}
	dir := filepath.Join(strings.TrimSpace(string(out)), migParted)
	if _, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) {
		t.Skipf("skipped: the module mig-parted v0.13.1 is not in the module cache: (cd tests/peers/nvidia-mig-parted && go mod download)")
	}
	nodes := fleet(t)
	for _, file := range []string{readme, example, station, packaged, container, newer} {
		t.Run(file, func(t *testing.T) {
			text := readFile(t, filepath.Join(dir, file))
			docs := []string{text}
			switch file {
			case readme:
				docs = regexp.MustCompile(`(?s)version: v1\nmig-configs:.*?(?:`+"```"+`|EOF)`).FindAllString(text, -1)
				for i := range docs {
					docs[i] = strings.TrimSuffix(strings.TrimSuffix(docs[i], "```"), "EOF")
				}
				if len(docs) != 6 {
					t.Fatalf("README has %d examples, not 6: %q", len(docs), docs)
				}
			case container, newer:
				docs = []string{configMap(t, text)}
			}
			for _, doc := range docs {
				checkMeanings(t, nodes, file, doc)
			}
		})
	}
}

// configMap is the MIG manager's configuration in its manifests.
func configMap(t *testing.T, manifests string) string {
	t.Helper()
	for dec := yaml.NewDecoder(strings.NewReader(manifests)); ; {
		var m struct {
			Metadata struct{ Name string }
			Data     map[string]string
		}
		if err := dec.Decode(&m); err != nil {
			t.Fatalf("find the ConfigMap: %v", err)
		}
		if m.Metadata.Name == "mig-parted-config" {
			return m.Data["config.yaml"]
		}
	}
}

// TestMIGManagersConfigs is the same without the module's files: ours that
// restates their cases, and all configs of one profile.
func TestMIGManagersConfigs(t *testing.T) {
	nodes := fleet(t)
	checkMeanings(t, nodes, restated, readFile(t, restated))
	var b strings.Builder
	b.WriteString("version: v1\nmig-configs:\n")
	for fields := strings.Fields(oneProfile); len(fields) > 0; fields = fields[2:] {
		name, n, _ := strings.Cut(fields[1], ":")
		b.WriteString("  " + fields[0] + ":\n  - devices: all\n    mig-enabled: true\n    mig-devices: {\"" + name + "\": " + n + "}\n")
	}
	checkMeanings(t, nodes, "", b.String())
}

func checkMeanings(t *testing.T, nodes map[string]*gpu.Inventory, file, text string) {
	t.Helper()
	f := mustParse(t, text)
	for _, config := range f.Names() {
		if badLabel(config) != "" {
			t.Errorf("%s: %s cannot be a label's value", file, config)
		}
		had := false
		for node, inv := range nodes {
			want := expect(t, file, config, node, inv)
			d, err := f.Desire(config, inv)
			if (err == nil) != (want != nil) {
				t.Errorf("%s: %s on %s: %v, want %q", file, config, node, err, want)
				continue
			}
			if err != nil {
				checkErrors(t, []byte(text), err)
				continue
			}
			had = true
			got := make([]string, len(d.GPUs))
			for i, w := range d.GPUs {
				got[i] = word(w)
				if w.Unproven {
					t.Errorf("%s: %s on %s: GPU %d is not proven", file, config, node, i)
				}
			}
			if !slices.Equal(got, want) {
				t.Errorf("%s: %s on %s: %q, want %q", file, config, node, got, want)
			}
		}
		if !had {
			t.Errorf("%s: %s is refused on every node: %v", file, config, slices.Sorted(maps.Keys(nodes)))
		}
	}
}

// TestMIGManagersItems is what items mean that no example shows.
func TestMIGManagersItems(t *testing.T) {
	a100, station := cards(t, "a100-80"), dgxStation(t)
	a100.GPUs = a100.GPUs[:4]
	for _, tc := range []struct {
		why   string
		inv   *gpu.Inventory
		items string
		want  []string // of each GPU, or the refusal
	}{
		{"the last item that matches wins, also where it turns MIG off", a100, `
			- {devices: [0, 1, 2], mig-enabled: true, mig-devices: {1g.10gb: 7}}
			- {devices: [1], mig-enabled: true, mig-devices: {3g.40gb: 2}}
			- {devices: [2], mig-enabled: false}`,
			[]string{"1g.10gb:7", "3g.40gb:2", "whole", "keep"}},
		{"what a later item replaces need not fit", a100, `
			- {devices: all, mig-enabled: true, mig-devices: {9g.999gb: 3}}
			- {devices: all, mig-enabled: true, mig-devices: {3g.40gb: 2}}`,
			[]string{"3g.40gb:2", "3g.40gb:2", "3g.40gb:2", "3g.40gb:2"}},
		{"a filter that does not admit the card leaves the item out, its missing indices too", a100, `
			- {device-filter: "0x233010DE", devices: [0, 99], mig-enabled: true, mig-devices: {}}
			- {device-filter: ["0x233010DE", "0x20b210de"], devices: [1], mig-enabled: true, mig-devices: {}}`,
			[]string{"keep", "{}", "keep", "keep"}},
		{"a filter with the subsystem is for that board alone", a100, `
			- {device-filter: ["0x20B210DE:0x14BE10DE"], devices: all, mig-enabled: true, mig-devices: {}}
			- {device-filter: "0x20B210DE:0x147F10DE", devices: [3], mig-enabled: true, mig-devices: {1g.10gb: 1}}`,
			[]string{"keep", "keep", "keep", "1g.10gb:1"}},
		{"a filter of none is for all", a100, `
			- {device-filter: "", devices: [0], mig-enabled: true, mig-devices: {}}
			- {device-filter: [], devices: [1], mig-enabled: true, mig-devices: {}}`,
			[]string{"{}", "{}", "keep", "keep"}},
		{"no device at all", a100, `
			- {devices: [], mig-enabled: true, mig-devices: {1g.10gb: 7}}`,
			[]string{"keep", "keep", "keep", "keep"}},
		{"with MIG off mig-devices may be there, and empty", a100, `
			- {devices: all, mig-enabled: false, mig-devices: {}}
			- {devices: [1], mig-enabled: false, mig-devices: null}`,
			[]string{"whole", "whole", "whole", "whole"}},
		{"counts are of compute instances: six parts are two halves", a100, `
			- {devices: [0], mig-enabled: true, mig-devices: {1c.3g.40gb: 6}}
			- {devices: [1], mig-enabled: true, mig-devices: {1c.3g.40gb: 1, 2c.3g.40gb: 1, 3g.40gb: 1}}
			- {devices: [2], mig-enabled: true, mig-devices: {1c.2g.20gb: 6, 1g.10gb: 1}}
			- {devices: [3], mig-enabled: true, mig-devices: {1c.7g.80gb: 7}}`,
			[]string{"1c.3g.40gb:6", "3g.40gb:1 1c.3g.40gb:1 2c.3g.40gb:1", "1g.10gb:1 1c.2g.20gb:6", "1c.7g.80gb:7"}},
		{"seven parts of a 3g want a third one", a100, `
			- {devices: [0], mig-enabled: true, mig-devices: {1c.3g.40gb: 7}}`,
			[]string{"f:4: GPU 0: "}},
		{"a zero is none, and two spellings are one", a100, `
			- {devices: all, mig-enabled: true, mig-devices: {1g.10gb: 0, 7c.7g.80gb: 1, 9g.999gb: 0}}`,
			[]string{"7g.80gb:1", "7g.80gb:1", "7g.80gb:1", "7g.80gb:1"}},
		{"in an item with MIG on, all is all that know MIG", station, `
			- {devices: all, mig-enabled: true, mig-devices: {1g.10gb: 7}}`,
			[]string{"1g.10gb:7", "1g.10gb:7", "1g.10gb:7", "keep", "1g.10gb:7"}},
		{"so an earlier item holds for the others", station, `
			- {devices: all, mig-enabled: false}
			- {devices: all, mig-enabled: true, mig-devices: {1g.10gb: 7}}`,
			[]string{"1g.10gb:7", "1g.10gb:7", "1g.10gb:7", "whole", "1g.10gb:7"}},
		{"MIG by index on a card that knows none", station, `
			- {devices: [2, 3], mig-enabled: true, mig-devices: {}}`,
			[]string{"f:4: GPU 3: this model has no MIG: whole, shared and off work"}},
		{"more than fit, on some of the GPUs", a100, `
			- {devices: [0, 1, 3], mig-enabled: true, mig-devices: {1g.10gb: 8}}`,
			[]string{"f:4: GPUs 0, 1 and 3: "}},
		{"an index that is not there", a100, `
			- {devices: [0, 9], mig-enabled: false}`,
			[]string{"f:4: this node has no GPU with index 9: it has GPUs 0-3"}},
	} {
		t.Run(tc.why, func(t *testing.T) {
			items := strings.ReplaceAll(strings.TrimPrefix(tc.items, "\n"), "\t\t\t", "  ")
			d, err := mustParse(t, migHead+items+"\n").Desire("custom", tc.inv)
			if err != nil {
				if len(tc.want) != 1 || !strings.HasPrefix(err.Error(), tc.want[0]) || len(err.Error()) < len("f:4: GPU 0: ")+20 {
					t.Fatalf("%v, want %q", err, tc.want)
				}
				return
			}
			var got []string
			for _, w := range d.GPUs {
				got = append(got, word(w))
			}
			if !slices.Equal(got, tc.want) {
				t.Errorf("%q, want %q", got, tc.want)
			}
		})
	}
}

// TestProfileNamesOfTheMIGManager: what its files call a part that is all of its
// instance has our name.
func TestProfileNamesOfTheMIGManager(t *testing.T) {
	f := mustParse(t, migHead+"  - {devices: all, mig-enabled: true, mig-devices: {1c.1g.10gb+me: 1}}\n")
	d, err := f.Desire("custom", cards(t, "a100-80"))
	if err != nil {
		t.Fatal(err)
	}
	if want := (mig.Name{Slices: 1, GB: 10, Attr: "+me"}); d.GPUs[0].Geometry[0].Profile != want {
		t.Errorf("%v, want %v", d.GPUs[0].Geometry, want)
	}
}
