// SPDX-License-Identifier: Apache-2.0

package topology

import (
	"cmp"
	"fmt"
	"io"
	"strconv"
	"strings"
	"text/tabwriter"

	"example.com/gpu-agent/pkg/gpu"
)

// Matrix is the node as `nvidia-smi topo -m` shows it. /statusz contains it.
type Matrix struct {
	GPUs []MatrixGPU    `json:"gpus"`
	NICs []MatrixNIC    `json:"nics,omitempty"`
	NUMA []gpu.NUMANode `json:"numaNodes,omitempty"`
	// Cells has a row and a column for each of GPUs, then for each of NICs. A cell is "X" for a
	// device itself, "NV18" for 18 NVLink lanes, "NV" for lanes that the driver did not count, or
	// else a Level.
	Cells [][]string `json:"cells"`
	// Joined is the sets of two and more GPUs that NVLink connects, directly, through a switch or
	// by way of other GPUs. The sets have the values of Index, and are sorted by size, largest
	// first, then by the node's order. GPUs with a fault are left out.
	Joined [][]int `json:"joined,omitempty"`
	// Switched is the indices of the GPUs with lanes to an NVSwitch.
	Switched []int `json:"switched,omitempty"`
	// Weak is the result of Graph.Weak as sentences.
	Weak []string `json:"weak,omitempty"`
}

// MatrixGPU is a GPU in the matrix.
type MatrixGPU struct {
	Index int      `json:"index"`
	UUID  gpu.UUID `json:"uuid"`
	PCI   string   `json:"pci,omitempty"`
	// NUMA is the GPU's NUMA node; nil if not known.
	NUMA *int   `json:"numa,omitempty"`
	CPUs string `json:"cpus,omitempty"`
}

// MatrixNIC is an RDMA network card in the matrix.
type MatrixNIC struct {
	Name   string   `json:"name"`
	Kind   gpu.RDMA `json:"kind"`
	PCI    string   `json:"pci,omitempty"`
	NUMA   *int     `json:"numa,omitempty"`
	Active bool     `json:"active"`
}

// Matrix returns the matrix of g. The caller must not change what its pointers and slices refer
// to.
func (g *Graph) Matrix() Matrix {
	m := Matrix{GPUs: []MatrixGPU{}, NUMA: g.inv.NUMA, Cells: [][]string{}}
	var places []place
	for i := range g.inv.GPUs {
		d := &g.inv.GPUs[i]
		m.GPUs = append(m.GPUs, MatrixGPU{Index: d.Index, UUID: d.UUID, PCI: d.PCI, NUMA: d.NUMA, CPUs: d.CPUs})
		places = append(places, placeOf(d))
		if g.ends[i][i].sw && !g.broken(i) {
			m.Switched = append(m.Switched, d.Index)
		}
	}
	for i := range g.inv.NICs {
		n := &g.inv.NICs[i]
		m.NICs = append(m.NICs, MatrixNIC{Name: n.Name, Kind: n.Kind, PCI: n.PCI, NUMA: n.NUMA, Active: n.Active})
		places = append(places, placeOfNIC(n))
	}
	for i, a := range places {
		row := make([]string, len(places))
		for j, b := range places {
			switch {
			case i == j:
				row[j] = LevelSelf.String()
			case i < len(g.pairs) && j < len(g.pairs):
				row[j] = g.pairs[i][j].cell()
			default:
				row[j] = g.level(a, b).String()
			}
		}
		m.Cells = append(m.Cells, row)
	}
	for _, set := range g.joined() {
		indices := make([]int, len(set))
		for i, at := range set {
			indices[i] = g.inv.GPUs[at].Index
		}
		m.Joined = append(m.Joined, indices)
	}
	for _, w := range g.Weak() {
		m.Weak = append(m.Weak, w.String())
	}
	return m
}

// cell returns a pair's cell in the matrix.
func (p Pair) cell() string {
	switch {
	case p.NVLink > 0:
		return "NV" + strconv.Itoa(p.NVLink)
	case p.Switch:
		return "NV"
	}
	return p.Level.String()
}

// legend explains the cells.
const legend = `
Legend:

  X     the device itself
  SYS   over PCIe and from one NUMA node to another
  NODE  over PCIe and from one host bridge to another of the same NUMA node
  PHB   over PCIe and the host bridge above both
  PXB   over several PCIe switches, but no host bridge
  PIX   over one PCIe switch or bridge
  NV#   over # NVLink lanes
`

// WriteText writes the matrix in the form of `nvidia-smi topo -m`: GPUs and network cards in rows
// and columns, CPUs and NUMA node of each GPU, a legend, the network cards' names, the sets that
// NVLink connects, and the links that are down. Columns are aligned by spaces.
func (m Matrix) WriteText(w io.Writer) error {
	if len(m.Cells) == 0 {
		_, err := io.WriteString(w, "No GPU and no RDMA network card.\n")
		return err
	}
	header := []string{""}
	for _, d := range m.GPUs {
		header = append(header, fmt.Sprintf("GPU%d", d.Index))
	}
	for i := range m.NICs {
		header = append(header, fmt.Sprintf("NIC%d", i))
	}
	table := [][]string{append(header, "CPU Affinity", "NUMA Affinity")}
	unknown := false
	for i, cells := range m.Cells {
		row := []string{header[i+1]}
		for j, c := range cells {
			unknown = unknown || c == LevelUnknown.String()
			if i == j {
				c = " " + c
			}
			row = append(row, c)
		}
		if i < len(m.GPUs) {
			row = append(row, cmp.Or(m.GPUs[i].CPUs, "N/A"), numaText(m.GPUs[i].NUMA))
		}
		table = append(table, row)
	}

	var b strings.Builder
	columns := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	for _, row := range table {
		fmt.Fprintln(columns, strings.Join(row, "\t"))
	}
	columns.Flush()
	b.WriteString(legend)
	if unknown {
		b.WriteString("  N/A   not known\n")
	}
	if len(m.NICs) > 0 {
		b.WriteString("\nNIC Legend:\n\n")
		for i, n := range m.NICs {
			state := ""
			if !n.Active {
				state = ", no port is up"
			}
			fmt.Fprintf(&b, "  NIC%d: %s (%s, NUMA node %s%s)\n", i, n.Name, n.Kind, numaText(n.NUMA), state)
		}
	}
	if len(m.Joined) > 0 {
		b.WriteString("\nJoined by NVLink:\n\n")
		for _, set := range m.Joined {
			b.WriteString("  GPUs")
			for _, i := range set {
				fmt.Fprintf(&b, " %d", i)
			}
			b.WriteString("\n")
		}
	}
	if len(m.Weak) > 0 {
		b.WriteString("\nLinks that are down:\n\n")
		for _, s := range m.Weak {
			fmt.Fprintf(&b, "  %s\n", s)
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}

func numaText(n *int) string {
	if n == nil {
		return "N/A"
	}
	return strconv.Itoa(*n)
}
