// SPDX-License-Identifier: Apache-2.0

package status

import (
	"cmp"
	"slices"
	"strconv"

	"example.com/gpu-agent/pkg/topology"
)

// box is a NUMA node with its devices, as the drawing shows it.
type box struct {
	title, cpus string
	switches    []pciSwitch
	apart       []int // network cards that are near no GPU, by index in the matrix
	from, to    int   // from top to bottom
}

// pciSwitch is a set of GPUs and network cards that reach each other without going
// through the processor.
type pciSwitch struct {
	gpus, nics []int // by index in the matrix
	from, to   int   // from top to bottom
}

// shared reports whether there is anything to connect.
func (s pciSwitch) shared() bool { return len(s.gpus)+len(s.nics) > 1 }

// boxes sorts a node's GPUs and network cards by NUMA node.
func boxes(m *topology.Matrix) []box {
	var numa []int // of each GPU and network card; -1 if unknown
	note := func(n *int) {
		if n == nil || *n < 0 {
			n = new(int)
			*n = -1
		}
		numa = append(numa, *n)
	}
	for _, g := range m.GPUs {
		note(g.NUMA)
	}
	for _, n := range m.NICs {
		note(n.NUMA)
	}
	numbers := slices.Clone(numa)
	slices.SortFunc(numbers, func(a, b int) int { return cmp.Compare(uint(a), uint(b)) }) // -1 last
	numbers = slices.Compact(numbers)
	group := groups(m, numa)
	var out []box
	for _, number := range numbers {
		b := box{title: "NUMA node " + strconv.Itoa(number)}
		if number < 0 {
			b.title = "no NUMA node"
			if len(numbers) == 1 {
				b.title = "one processor domain"
			}
		}
		for _, node := range m.NUMA {
			if node.ID == number && node.CPUs != "" {
				b.cpus = "CPUs " + node.CPUs
			}
		}
		at := map[int]int{} // group → index in b.switches
		for i := range numa {
			k, ok := at[group[i]]
			switch {
			case numa[i] != number:
			case i >= len(m.GPUs) && ok:
				b.switches[k].nics = append(b.switches[k].nics, i)
			case i >= len(m.GPUs):
				b.apart = append(b.apart, i)
			case ok:
				b.switches[k].gpus = append(b.switches[k].gpus, i)
			default:
				at[group[i]] = len(b.switches)
				b.switches = append(b.switches, pciSwitch{gpus: []int{i}})
			}
		}
		out = append(out, b)
	}
	return out
}

// groups returns a group number for each device. Devices of a NUMA node that are behind one
// PCIe switch have the same number.
func groups(m *topology.Matrix, numa []int) []int {
	group := make([]int, len(numa))
	for i := range group {
		group[i] = i
		for j := range i {
			if numa[i] != numa[j] || !near(m, i, j) && !onSwitch(m, i, j) {
				continue
			}
			from := group[i]
			for k := range i + 1 {
				if group[k] == from {
					group[k] = group[j]
				}
			}
		}
	}
	return group
}

// near reports whether two devices reach each other without going through the processor.
func near(m *topology.Matrix, i, j int) bool {
	c := cellAt(m, i, j)
	return c == "PIX" || c == "PXB"
}

// onSwitch reports whether two GPUs that NVLink joins are also behind one PCIe switch. Their
// own cell shows NVLink, so onSwitch looks for a network card that is near both.
func onSwitch(m *topology.Matrix, i, j int) bool {
	if i >= len(m.GPUs) || j >= len(m.GPUs) || means(cellAt(m, i, j)) != legend[0] {
		return false
	}
	for k := len(m.GPUs); k < len(m.GPUs)+len(m.NICs); k++ {
		if near(m, i, k) && near(m, j, k) {
			return true
		}
	}
	return false
}
