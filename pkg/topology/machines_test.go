// SPDX-License-Identifier: Apache-2.0

package topology

import (
	"fmt"

	"example.com/gpu-agent/pkg/gpu"
)

func numaNode(n int) *int { return &n }

// node is GPUs "0", "1", … with these links, without NUMA nodes.
func node(links ...[]gpu.Link) *gpu.Inventory {
	inv := new(gpu.Inventory)
	for i, l := range links {
		inv.GPUs = append(inv.GPUs, gpu.Device{Index: i, UUID: gpu.UUID(fmt.Sprint(i)), Model: "H100", Links: l})
	}
	return inv
}

// twoSockets is n GPUs, half of them on each of two NUMA nodes, each pair of them
// behind one PCIe switch of its own host bridge.
func twoSockets(n int) *gpu.Inventory {
	inv := node(make([][]gpu.Link, n)...)
	inv.NUMA = []gpu.NUMANode{{ID: 0, CPUs: "0-55,112-167"}, {ID: 1, CPUs: "56-111,168-223"}}
	for i := range inv.GPUs {
		d := &inv.GPUs[i]
		d.NUMA = numaNode(2 * i / n)
		d.CPUs = inv.NUMA[*d.NUMA].CPUs
		d.PCI = fmt.Sprintf("00000000:%02x:00.0", 0x10*(i/2)+4+i%2)
		d.Path = []string{
			fmt.Sprintf("pci0000:%02x", 0x10*(i/2)), fmt.Sprintf("0000:%02x:01.0", 0x10*(i/2)),
			fmt.Sprintf("0000:%02x:00.0", 0x10*(i/2)+2), fmt.Sprintf("0000:%02x:%02x.0", 0x10*(i/2)+3, i%2),
		}
	}
	return inv
}

// switched joins all GPUs through an NVSwitch.
func switched(inv *gpu.Inventory, lanes int) *gpu.Inventory {
	for i := range inv.GPUs {
		inv.GPUs[i].Links = []gpu.Link{{NVLink: lanes, Switch: true, Version: 4, LaneMBps: 26562}}
	}
	return inv
}

// join adds a direct link between two GPUs, as both of them report it.
func join(inv *gpu.Inventory, a, b, lanes int) {
	for _, end := range [][2]int{{a, b}, {b, a}} {
		d := &inv.GPUs[end[0]]
		d.Links = append(d.Links, gpu.Link{To: end[1], NVLink: lanes, Version: 3, LaneMBps: 25000})
	}
}

// bridged joins each even GPU with the next one.
func bridged(inv *gpu.Inventory, lanes int) *gpu.Inventory {
	for i := 0; i+1 < len(inv.GPUs); i += 2 {
		join(inv, i, i+1, lanes)
	}
	return inv
}

// cubeMesh is the DGX-1 with V100: six lanes from each GPU, two of them to the
// one across, the rest among the four of its side.
func cubeMesh() *gpu.Inventory {
	inv := twoSockets(8)
	for i := range inv.GPUs {
		inv.GPUs[i].Model = "V100"
	}
	for _, l := range [][3]int{
		{0, 1, 1}, {0, 2, 1}, {0, 3, 2}, {0, 4, 2}, {1, 2, 2}, {1, 3, 1}, {1, 5, 2}, {2, 3, 2}, {2, 6, 1}, {3, 7, 1},
		{4, 5, 1}, {4, 6, 1}, {4, 7, 2}, {5, 6, 2}, {5, 7, 1}, {6, 7, 2},
	} {
		join(inv, l[0], l[1], l[2])
	}
	return inv
}

// names is the GPUs of these places.
func names(places ...int) []gpu.UUID {
	var out []gpu.UUID
	for _, i := range places {
		out = append(out, gpu.UUID(fmt.Sprint(i)))
	}
	return out
}

func all(inv *gpu.Inventory) []gpu.UUID {
	var out []gpu.UUID
	for i := range inv.GPUs {
		out = append(out, inv.GPUs[i].UUID)
	}
	return out
}
