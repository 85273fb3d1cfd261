// SPDX-License-Identifier: Apache-2.0

package emulator

import (
	"fmt"
	"strconv"
	"strings"
)

// levelWords are what nvidia-smi topo calls the levels.
var levelWords = map[Level]string{
	LevelSwitch: "PIX", LevelSwitches: "PXB", LevelHost: "PHB", LevelNode: "NODE", LevelSystem: "SYS",
}

const matrixLegend = `
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NODE = Connection traversing PCIe as well as the interconnect between PCIe Host Bridges within a NUMA node
  PHB  = Connection traversing PCIe as well as a PCIe Host Bridge (typically the CPU)
  PXB  = Connection traversing multiple PCIe bridges (without traversing the PCIe Host Bridge)
  PIX  = Connection traversing at most a single PCIe bridge
  NV#  = Connection traversing a bonded set of # NVLinks
`

// Matrix is what nvidia-smi topo -m prints.
func (s *Session) Matrix() (string, Return) {
	return node(s, "gpuEmulatorGetMatrix", func(w *World) (string, Return) {
		for _, g := range s.p.gpus {
			if s.p.dead[g] {
				return "", GPUIsLost
			}
		}
		return w.matrixLocked(s.p.gpus), Success
	})
}

func (w *World) matrixLocked(gpus []*gpu) string {
	type end struct {
		name string
		g    *gpu
		path []string // up to the device
		at   string   // the device
		numa int
	}
	var ends []end
	for i, g := range gpus {
		ends = append(ends, end{fmt.Sprintf("GPU%d", i), g, g.path, g.pci.Sysfs(), g.numa})
	}
	for i, n := range w.board.nics {
		bridges, at, _ := splitPath(n.Path) // newBoard has read it
		ends = append(ends, end{fmt.Sprintf("NIC%d", i), nil, bridges, at, n.NUMA})
	}
	var b strings.Builder
	for _, e := range ends {
		b.WriteString("\t" + e.name)
	}
	b.WriteString("\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n")
	for _, row := range ends {
		b.WriteString(row.name)
		for _, col := range ends {
			word := " X "
			if row.at != col.at {
				word = levelWords[distance(row.path, col.path, row.numa, col.numa)]
				if row.g != nil && col.g != nil {
					if lanes := w.lanesLocked(row.g, col.g); lanes > 0 {
						word = fmt.Sprintf("NV%d", lanes)
					}
				}
			}
			b.WriteString("\t" + word)
		}
		if row.g != nil {
			cpus, node := "N/A", "N/A"
			if row.numa >= 0 {
				cpus, node = w.board.numa[row.numa].CPUs, strconv.Itoa(row.numa)
			}
			fmt.Fprintf(&b, "\t%s\t%s\t\tN/A", cpus, node)
		}
		b.WriteByte('\n')
	}
	b.WriteString(matrixLegend)
	if len(w.board.nics) > 0 {
		b.WriteString("\nNIC Legend:\n\n")
		for i, n := range w.board.nics {
			fmt.Fprintf(&b, "  NIC%d: %s\n", i, n.Name)
		}
	}
	return b.String()
}

// lanesLocked is the NVLinks that a GPU has to another one, or both at least have to
// NVSwitches.
func (w *World) lanesLocked(a, b *gpu) int {
	count := func(g, other *gpu) (direct, sw int) {
		for _, l := range g.wires {
			switch {
			case l.kind == wireNone || !w.trainedLocked(g, l):
			case l.kind == wireSwitch:
				sw++
			case l.to == other.slot:
				direct++
			}
		}
		return direct, sw
	}
	direct, sw := count(a, b)
	_, sw2 := count(b, a)
	if direct > 0 {
		return direct
	}
	return min(sw, sw2)
}
