// SPDX-License-Identifier: Apache-2.0

package hardware

import (
	"fmt"
	"path"
	"reflect"
	"slices"
	"strings"
	"testing"

	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/tests/emulator"
)

// lanes are the generation and speed of NVLinks by a part of the model's name, as
// nvidia-smi nvlink -s shows them on such machines.
func lanes(model string) (version, mbps int) {
	switch {
	case strings.Contains(model, "V100"):
		return 2, 25781
	case strings.Contains(model, "A100"), strings.Contains(model, "A30"):
		return 3, 25000
	case strings.Contains(model, "H100"), strings.Contains(model, "H200"):
		return 4, 26562
	case strings.Contains(model, "B200"):
		return 5, 53125
	}
	return 0, 0
}

// linksOf is what an inventory should say of the links that a world has.
func linksOf(model string, states []emulator.LinkState) []gpu.Link {
	version, mbps := lanes(model)
	var links []gpu.Link
	for _, s := range states {
		if !s.Up {
			continue
		}
		l := gpu.Link{To: s.To, Switch: s.Switch, Version: version, LaneMBps: mbps}
		if s.Switch {
			l.To = 0
		}
		at := slices.IndexFunc(links, func(o gpu.Link) bool { return o.To == l.To && o.Switch == l.Switch })
		if at < 0 {
			at = len(links)
			links = append(links, l)
		}
		links[at].NVLink++
	}
	slices.SortFunc(links, func(a, b gpu.Link) int { return a.To - b.To })
	return links
}

// pathOf is what lies above the device at the end of a path.
func pathOf(s string) []string { return strings.Split(path.Dir(s), "/") }

func TestTopologiesOfTheWorld(t *testing.T) {
	for _, name := range emulator.Topologies() {
		t.Run(name, func(t *testing.T) {
			n := emulate(t, emulator.Spec{Topology: name})
			t.Run("Places", func(t *testing.T) { places(t, n.opts) })
			t.Run("Matrix", func(t *testing.T) {
				if name == "asymmetric" {
					t.Skip("skipped: its GPUs disagree about their links; nvidia-smi says what each says, the matrix what is sure of a pair")
				}
				topo(t, n.opts)
			})
			inv := n.inventory(t, Open(t, n.opts))
			state := n.State()
			board := state.Board
			if inv.Machine != board.Machine {
				t.Errorf("the machine is %q, want %q", inv.Machine, board.Machine)
			}
			var nodes []gpu.NUMANode
			for i, node := range board.NUMA {
				nodes = append(nodes, gpu.NUMANode{ID: i, CPUs: node.CPUs})
			}
			if !slices.EqualFunc(inv.NUMA, nodes, func(got, want gpu.NUMANode) bool {
				return got.ID == want.ID && got.CPUs == want.CPUs && len(got.Distances) == len(nodes) && got.Distances[got.ID] == 10
			}) {
				t.Errorf("NUMA nodes %+v, want %+v with their distances", inv.NUMA, nodes)
			}
			if len(inv.NICs) != len(board.NICs) {
				t.Fatalf("network cards %+v, want %+v", inv.NICs, board.NICs)
			}
			for _, want := range board.NICs {
				at := slices.IndexFunc(inv.NICs, func(n gpu.NIC) bool { return n.Name == want.Name })
				if at < 0 {
					t.Errorf("there is no network card %s", want.Name)
					continue
				}
				got := inv.NICs[at]
				if string(got.Kind) != want.Kind || got.Active != want.Active || got.NUMA == nil || *got.NUMA != want.NUMA ||
					!slices.Equal(got.Path, pathOf(want.Path)) || !strings.HasSuffix(got.PCI, path.Base(want.Path)) {
					t.Errorf("network card %+v, want %+v", got, want)
				}
			}
			var fabric *gpu.Fabric
			if f := board.Fabric; f != nil && f.Cluster != "" && (f.State == "" || f.State == "completed") {
				fabric = &gpu.Fabric{Cluster: f.Cluster, Clique: f.Clique}
			}
			for i, dev := range inv.GPUs {
				want := state.GPUs[i]
				if dev.NUMA == nil || *dev.NUMA != want.NUMA || dev.CPUs != board.NUMA[want.NUMA].CPUs || !slices.Equal(dev.Path, pathOf(board.Paths[i])) {
					t.Errorf("GPU %d: NUMA node %v, processors %q, path %q; want %d, %q, %q", i, dev.NUMA, dev.CPUs, dev.Path, want.NUMA, board.NUMA[want.NUMA].CPUs, pathOf(board.Paths[i]))
				}
				if links := linksOf(want.Model, board.Links[i]); !slices.Equal(dev.Links, links) {
					t.Errorf("GPU %d: links %+v, want %+v", i, dev.Links, links)
				}
				if dev.Lanes != len(board.Links[i]) {
					t.Errorf("GPU %d: %d lanes, want %d", i, dev.Lanes, len(board.Links[i]))
				}
				if !reflect.DeepEqual(dev.Fabric, fabric) {
					t.Errorf("GPU %d: fabric %+v, want %+v", i, dev.Fabric, fabric)
				}
				if dev.PCIClass != "0x030200" && dev.PCIClass != "0x030000" {
					t.Errorf("GPU %d: PCI class %q", i, dev.PCIClass)
				}
			}
		})
	}
}

// What nvidia-smi prints, in its newer and its older form.
func TestParseMatrix(t *testing.T) {
	const newer = "\t\x1b[4mGPU0\tGPU1\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n" +
		"GPU0\t X \tNV18\tPXB\tSYS\t0-55,112-167\t0\t\tN/A\n" +
		"GPU1\tNV18\t X \tSYS\tPXB\t56-111,168-223\t1\t\tN/A\n" +
		"NIC0\tPXB\tSYS\t X \tSYS\t\t\t\t\n" +
		"NIC1\tSYS\tPXB\tSYS\t X \t\t\t\t\n" +
		"\nLegend:\n\n  X    = Self\n  NV#  = Connection traversing a bonded set of # NVLinks\n" +
		"\nNIC Legend:\n\n  NIC0: mlx5_0\n  NIC1: mlx5_4\n\n"
	const older = "\tGPU0\tGPU1\tmlx5_0\tmlx5_4\tCPU Affinity\n" +
		"GPU0\t X \tNV18\tPXB\tSYS\t0-55,112-167\n" +
		"GPU1\tNV18\t X \tSYS\tPXB\t56-111,168-223\n" +
		"mlx5_0\tPXB\tSYS\t X \tSYS\t\n"
	for _, c := range []struct{ name, text, numa string }{{"newer", newer, "1"}, {"older", older, ""}} {
		rows, err := parseMatrix(c.text)
		if err != nil {
			t.Fatal(err)
		}
		got := rows["GPU1"]
		want := smiRow{cells: map[string]string{"GPU0": "NV18", "GPU1": "X", "mlx5_0": "SYS", "mlx5_4": "PXB"}, cpus: "56-111,168-223", numa: c.numa}
		if len(rows) != 2 || !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %d rows, GPU1 %+v, want %+v", c.name, len(rows), got, want)
		}
	}
	if rows, err := parseMatrix("Failed to initialize NVML: Driver/library version mismatch\n"); err == nil {
		t.Errorf("no matrix is read as %v", fmt.Sprint(rows))
	}
}
