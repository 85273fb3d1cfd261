// SPDX-License-Identifier: Apache-2.0

package peers_test

import (
	"context"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"example.com/gpu-agent/internal/config"
	"example.com/gpu-agent/internal/label"
	"example.com/gpu-agent/internal/nfd"
	"example.com/gpu-agent/pkg/topology"
	"example.com/gpu-agent/tests/lab"
	"example.com/gpu-agent/tests/peers"
)

var nfdProgram = sync.OnceValues(func() (string, error) {
	kit, err := lab.NewKit(nil)
	if err != nil {
		return "", err
	}
	return kit.Bin(peers.NodeFeatureDiscovery.Name), peers.NodeFeatureDiscovery.Build(context.Background(), kit)
})

// judge is what Node Feature Discovery makes of a directory.
func judge(t *testing.T, dir string) peers.Features {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("a mount over /etc, in a namespace of its own, needs root")
	}
	program, err := nfdProgram()
	if err != nil {
		t.Fatal(err)
	}
	f, err := peers.NFD{Program: program}.Judge(t.Context(), dir)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// TestFeaturesFile holds the agent's features file against Node Feature
// Discovery's own reading of it, for every machine that there is a record of.
func TestFeaturesFile(t *testing.T) {
	files, err := filepath.Glob("../testdata/*.json")
	if err != nil || len(files) < 8 {
		t.Fatalf("%d inventories: %v", len(files), err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".json"), func(t *testing.T) {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			inv, err := config.ReadInventory(text)
			if err != nil {
				t.Fatal(err)
			}
			n := label.Node{Inventory: inv, Graph: topology.New(inv), Partition: "default"}
			own, guests := label.Own("example.com", n), label.NVIDIA(n)
			dir := t.TempDir()
			write := func(f nfd.Features) {
				t.Helper()
				if err := nfd.Write(dir, f); err != nil {
					t.Fatal(err)
				}
			}
			expect := func(what string, want map[string]string) {
				t.Helper()
				got := judge(t, dir)
				for _, line := range compare(want, got.Labels) {
					t.Errorf("%s: %s", what, line)
				}
				if len(got.Refused) > 0 {
					t.Errorf("%s: refused: %v", what, got.Refused)
				}
			}
			write(nfd.Features{Labels: own, Guests: guests})
			all := maps.Clone(own)
			maps.Copy(all, guests)
			expect("alone", all)

			// While a file is written nobody reads it.
			half := filepath.Join(dir, ".gpu-agent.tmp")
			if err := os.WriteFile(half, []byte("example.com/gpu.count=99\nexample.com/gp"), 0o600); err != nil {
				t.Fatal(err)
			}
			expect("beside half a file", all)

			// GPU Feature Discovery comes, and its word counts.
			if err := os.WriteFile(filepath.Join(dir, "gfd"), []byte("nvidia.com/gpu.count=7\nnvidia.com/gpu.product=Other\n"), 0o600); err != nil {
				t.Fatal(err)
			}
			write(nfd.Features{Labels: own, Guests: guests})
			all["nvidia.com/gpu.count"], all["nvidia.com/gpu.product"] = "7", "Other"
			expect("beside GPU Feature Discovery", all)

			if err := nfd.Remove(dir); err != nil {
				t.Fatal(err)
			}
			expect("removed", map[string]string{"nvidia.com/gpu.count": "7", "nvidia.com/gpu.product": "Other"})
		})
	}
}

// What is refused above would be: the judge says no to what cannot be a label.
func TestFeaturesFileRefused(t *testing.T) {
	dir := t.TempDir()
	for key, value := range map[string]string{
		"example.com/long":     strings.Repeat("x", 64),
		"example.com/dot":      "x.",
		"kubernetes.io/gpu":    "x",
		"x.kubernetes.io/gpu":  "x",
		"without-a-namespace":  "x",
		"example.com/two/deep": "x",
	} {
		if err := nfd.Write(dir, nfd.Features{Labels: map[string]string{key: value, "example.com/good": "yes"}}); err != nil {
			t.Fatal(err)
		}
		got := judge(t, dir)
		if got.Refused[key] == "" || len(got.Labels) != 1 || got.Labels["example.com/good"] != "yes" {
			t.Errorf("%s=%s: %+v", key, value, got)
		}
	}
}
