// SPDX-License-Identifier: Apache-2.0

package peers_test

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v4"

	"example.com/gpu-agent/internal/config"
	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/tests/emulator"
)

var long = flag.Bool("long", false, "try what mig-parted's documentation shows on every kind of card that has MIG, not on two")

// TestExamplesMeanTheSame lets mig-parted apply every example of its documentation
// and holds what stands then against what the agent would make of the same file.
// On each kind of card it tries those that mean something else there. What the
// agent refuses, mig-parted cannot make either.
func TestExamplesMeanTheSame(t *testing.T) {
	done := map[string]bool{}
	cards := [][2]string{
		{"a100-40", "A100-SXM4-40GB"}, {"rtx-pro-6000", "RTX-PRO-6000"},
		{"a100-80", "A100-SXM4-80GB"}, {"a30", "A30"}, {"h100-80", "H100-80GB"}, {"h200", "H200-141GB"}, {"b200", "B200"},
	}
	if !*long {
		cards = cards[:2]
	}
	for _, card := range cards {
		recorded, model := card[0], card[1]
		t.Run(model, func(t *testing.T) {
			n := start(t, emulator.Spec{Seed: recorded, Model: model, Count: 1})
			inv := inventory(t, recorded)
			inv.GPUs = inv.GPUs[:1]
			n.compare(inv, n.examples(), func(config string) bool { return !manyGPUs[config] }, done, 1)
		})
		if !strings.HasPrefix(recorded, "a100") {
			continue
		}
		t.Run(model+"x8", func(t *testing.T) {
			n := start(t, emulator.Spec{Seed: recorded, Model: model, Count: 8})
			n.compare(inventory(t, recorded), n.examples(), func(config string) bool { return manyGPUs[config] }, done, 0)
		})
	}
}

// manyGPUs are the examples that name GPUs by index.
var manyGPUs = map[string]bool{"custom-config": true, "balanced-k8s-dgx-station-80": true}

// TestItemsMeanTheSame is what items mean that no example shows.
func TestItemsMeanTheSame(t *testing.T) {
	// The last card knows no MIG.
	n := start(t, emulator.Spec{Seed: "a100-80", Model: "A100-SXM4-80GB", Count: 4, GPUs: []emulator.GPUSpec{{Index: 3, Model: "V100-SXM2-32GB"}}})
	inv := inventory(t, "a100-80")
	inv.GPUs = inv.GPUs[:4]
	inv.GPUs[3].PCIDevice, inv.GPUs[3].MIG = "0x1DB510DE", gpu.MIG{}
	items, err := os.ReadFile("../../internal/config/testdata/nvidia-items.yaml")
	if err != nil {
		t.Fatal(err)
	}
	n.compare(inv, []string{string(items)}, func(string) bool { return true }, map[string]bool{}, 100)
}

// examples are the files of mig-parted's documentation: its examples, what its
// packages install, what its manifests and its README show.
func (n *node) examples() []string {
	n.t.Helper()
	var docs []string
	for _, file := range []string{
		"examples/config.yaml", "examples/dgx-station-80gb-config.yaml", "deployments/systemd/config-default.yaml",
		"deployments/container/nvidia-mig-manager-example.yaml", "deployments/container/nvidia-mig-manager-example-hopper-blackwell.yaml", "README.md",
	} {
		data, err := os.ReadFile(filepath.Join(n.docs, file))
		if err != nil {
			n.t.Fatal(err)
		}
		switch {
		case strings.HasPrefix(file, "deployments/container/"):
			docs = append(docs, configMap(n.t, string(data)))
		case file == "README.md":
			for _, m := range regexp.MustCompile("(?s)(version: v1\nmig-configs:.*?)(?:```|EOF)").FindAllStringSubmatch(string(data), -1) {
				docs = append(docs, m[1])
			}
		default:
			docs = append(docs, string(data))
		}
	}
	return docs
}

// configMap is the MIG manager's configuration among manifests.
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

// compare applies each of these configurations and desires it, but for what is
// done. Of those that are refused, most of which are for other cards, it tries so
// many.
func (n *node) compare(inv *gpu.Inventory, docs []string, these func(config string) bool, done map[string]bool, refusals int) {
	n.t.Helper()
	for _, doc := range docs {
		ours, err := config.Parse("config", []byte(doc))
		if err != nil {
			n.t.Fatal(err)
		}
		items, path := read(n.t, []byte(doc)), n.write(doc)
		for _, name := range ours.Names() {
			what := fmt.Sprintf("%s: %+v", name, items.Configs[name])
			if !these(name) {
				continue
			}
			d, refused := ours.Desire(name, inv, config.Node{Unit: 1024})
			if refused != nil {
				if refusals--; refusals < 0 {
					continue
				}
				_, _ = n.run("apply", path, name)
				if out, err := n.run("assert", path, name); err == nil {
					n.t.Errorf("%s\nis refused: %v\nand stands: %q\n%s", what, refused, n.stands(), out)
				}
				continue
			}
			want, wish := n.stands(), ""
			for i, w := range d.GPUs {
				counts := map[string]int{}
				for _, c := range w.Geometry {
					counts[c.Profile.String()] = c.N
				}
				if w.Mode != config.Keep {
					want[i] = describe(w.Mode == config.MIG, counts)
				}
				wish += fmt.Sprintf(" %q %v", w.Mode, counts)
			}
			if done[what+wish] {
				continue // the same in another file or on another card
			}
			done[what+wish] = true
			if out, err := n.run("apply", path, name); err != nil {
				n.t.Errorf("%s\n%v\n%s", what, err, out)
			}
			if got := n.stands(); !slices.Equal(got, want) {
				n.t.Errorf("%s\nmig-parted makes %q\nand we want    %q", what, got, want)
			}
		}
	}
}

func inventory(t *testing.T, name string) *gpu.Inventory {
	t.Helper()
	data, err := os.ReadFile(filepath.Join("../testdata", name+".json"))
	if err != nil {
		t.Fatal(err)
	}
	inv, err := config.ReadInventory(data)
	if err != nil {
		t.Fatal(err)
	}
	return inv
}
