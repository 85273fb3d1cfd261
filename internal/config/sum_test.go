// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"strings"
	"testing"

	"example.com/gpu-agent/pkg/gpu"
)

// TestTooManyDevices: 10,000 replicas on each of 8 GPUs were called applied, and the
// kubelet was never told of them.
func TestTooManyDevices(t *testing.T) {
	inv := &gpu.Inventory{}
	at := func(size int, starts ...int) (out []gpu.Placement) {
		for _, s := range starts {
			out = append(out, gpu.Placement{Start: s, Size: size})
		}
		return out
	}
	for i := range 8 {
		inv.GPUs = append(inv.GPUs, gpu.Device{Index: i, UUID: gpu.UUID(fmt.Sprintf("GPU-%d", i)), Memory: 81920, MIG: gpu.MIG{Capable: true, Profiles: []gpu.Profile{
			{Name: "1g.10gb", Max: 7, Slices: 1, Placements: at(1, 0, 1, 2, 3, 4, 5, 6)}, {Name: "2g.20gb", Max: 3, Slices: 2, Placements: at(2, 0, 2, 4)}}}})
	}
	for _, c := range []struct {
		name, entries string
		unit          gpu.MiB
		want          string // "" fits
	}{
		{"10,000 replicas on 8 GPUs", "[{devices: all, mode: shared, replicas: 10000}]", 1024,
			`f:3: partition "p" gives this node 80000 devices, 80000 of them by this entry (GPUs 0-7: 10000 replicas each), and a node may have 30000: ask for fewer replicas`},
		{"as many as there may be", "[{devices: all, mode: shared, replicas: 3750}]", 1, ""},
		{"one more each", "[{devices: all, mode: shared, replicas: 3751}]", 1024, "gives this node 30008 devices"},
		{"as many as there may be on one GPU", "[{devices: [0], mode: shared, replicas: 30000}, {devices: [1, 2, 3, 4, 5, 6, 7], mode: off}]", 1024, ""},
		{"and one whole GPU", "[{devices: [0], mode: shared, replicas: 30000}, {devices: [1], mode: whole}, {devices: [2, 3, 4, 5, 6, 7], mode: off}]", 1024, "gives this node 30001 devices"},
		{"units of 16 MiB", "[{devices: all, mode: shared}]", 16,
			"gives this node 40960 devices, 40960 of them by this entry (GPUs 0-7: units of 16 MiB), and a node may have 30000: set --memory-unit to 32 MiB or more"},
		{"units of 32 MiB", "[{devices: all, mode: shared}]", 32, ""},
		{"what the kubelet has no list of", "[{devices: all, mode: shared, replicas: 30000, api: dra}]", 1024, ""},
		{"beside what it has", "[{devices: [0, 1, 2, 3], mode: shared, api: dra}, {devices: [4, 5, 6, 7], mode: shared}]", 10,
			"gives this node 32768 devices, 32768 of them by this entry (GPUs 4-7: units of 10 MiB), and a node may have 30000: set --memory-unit to 16 MiB or more"},
		{"a small unit that nobody uses", "[{devices: all, mode: whole}]", 1, ""},
		{"units beside replicas", "[{devices: [0, 1, 2, 3], mode: shared, replicas: 5000}, {devices: [4, 5, 6, 7], mode: shared}]", 16,
			"f:3: partition \"p\" gives this node 40480 devices, 20480 of them by this entry (GPUs 4-7: units of 16 MiB), and a node may have 30000: set --memory-unit to 64 MiB or more"},
		{"kinds are added up", "[{devices: [0], mode: mig}, {devices: [1], mode: mig, geometry: {1g.10gb: 3, 2g.20gb: 2}}, {devices: [2], mode: mig, profiles: [2g.20gb]}, {devices: [3], mode: shared, replicas: 29983}, {devices: [4, 5, 6, 7], mode: off}]", 1024,
			"gives this node 30001 devices, 29983 of them by this entry (GPU 3: 29983 replicas each)"},
		{"and just fit", "[{devices: [0], mode: mig}, {devices: [1], mode: mig, geometry: {1g.10gb: 3, 2g.20gb: 2}}, {devices: [2], mode: mig, profiles: [2g.20gb]}, {devices: [3], mode: shared, replicas: 29982}, {devices: [4, 5, 6, 7], mode: off}]", 1024, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := mustParse(t, "version: v1\npartitions:\n  p: "+c.entries+"\n").Desire("p", inv, Node{Unit: c.unit})
			switch {
			case c.want == "" && err != nil:
				t.Errorf("refused: %v", err)
			case c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)):
				t.Errorf("got %v, want %q", err, c.want)
			}
		})
	}
}
