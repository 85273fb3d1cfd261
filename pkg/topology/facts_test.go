// SPDX-License-Identifier: Apache-2.0

package topology

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"example.com/gpu-agent/pkg/gpu"
)

func TestJoined(t *testing.T) {
	faulty := switched(twoSockets(8), 18)
	faulty.GPUs[2].Fault = "no answer"
	faulty.GPUs[5].Fault, faulty.GPUs[5].Gone = "gone", true
	chain := node(make([][]gpu.Link, 7)...) // 5-1-6 and 0-3
	join(chain, 5, 1, 2)
	join(chain, 1, 6, 2)
	join(chain, 0, 3, 2)
	bridge := node(make([][]gpu.Link, 3)...) // 0 and 2 are joined over 1 only
	join(bridge, 0, 1, 2)
	join(bridge, 1, 2, 2)
	bridge.GPUs[1].Fault = "no answer"
	for _, tc := range []struct {
		name string
		inv  *gpu.Inventory
		want string
	}{
		{"none", nil, "[]"},
		{"PCIe only", twoSockets(4), "[]"},
		{"a switch", switched(twoSockets(4), 18), "[[0 1 2 3]]"},
		{"a switch, lanes not counted", switched(twoSockets(2), 0), "[[0 1]]"},
		{"pairs", bridged(twoSockets(5), 4), "[[0 1] [2 3]]"},
		{"a mesh", cubeMesh(), "[[0 1 2 3 4 5 6 7]]"},
		{"with faults", faulty, "[[0 1 3 4 6 7]]"},
		{"over each other, the largest first", chain, "[[1 5 6] [0 3]]"},
		{"over a broken one", bridge, "[]"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if got := fmt.Sprint(joinedBy(New(tc.inv))); got != tc.want {
				t.Errorf("%s, want %s", got, tc.want)
			}
		})
	}
}

// unlink takes lanes off a link, at both of its ends.
func unlink(inv *gpu.Inventory, a, b, lanes int) *gpu.Inventory {
	for _, end := range [][2]int{{a, b}, {b, a}} {
		d := &inv.GPUs[end[0]]
		for i := range d.Links {
			if d.Links[i].To == end[1] && !d.Links[i].Switch {
				d.Links[i].NVLink -= lanes
			}
		}
	}
	return inv
}

func TestWeak(t *testing.T) {
	change := func(inv *gpu.Inventory, i int, f func(*gpu.Device)) *gpu.Inventory {
		f(&inv.GPUs[i])
		return inv
	}
	line := node(make([][]gpu.Link, 4)...)
	for i := range 3 {
		join(line, i, i+1, 2)
	}
	twoKinds := switched(twoSockets(4), 18)
	twoKinds.GPUs[3].Model = "A100"
	twoKinds.GPUs[3].Links[0].NVLink = 12
	twoWays := bridged(switched(twoSockets(8), 18), 12)
	for i := range 4 {
		twoWays.GPUs[i].Links = twoWays.GPUs[i].Links[1:] // direct ones only
	}
	for i := 4; i < 8; i++ {
		twoWays.GPUs[i].Links = twoWays.GPUs[i].Links[:1]
	}
	for _, tc := range []struct {
		name string
		inv  *gpu.Inventory
		want []string
	}{
		{"some with a switch, some with direct links", twoWays, nil},
		{"nothing", nil, nil},
		{"PCIe only", twoSockets(4), nil},
		{"all is well at the switch", switched(twoSockets(8), 18), nil},
		{"all is well in pairs", bridged(twoSockets(8), 12), nil},
		{"all is well in the mesh", cubeMesh(), nil},
		{"one is without a bridge", bridged(twoSockets(5), 12), nil},
		{"two are without a bridge", unlink(bridged(twoSockets(4), 12), 2, 3, 12), nil},
		{"a line has uneven ends", line, nil},
		{"models differ", twoKinds, nil},
		{
			"a lane to the switch", change(switched(twoSockets(8), 18), 3, func(d *gpu.Device) { d.Links[0].NVLink = 17 }),
			[]string{"GPU 3 has 17 of 18 NVLink lanes to the NVSwitch"},
		},
		{
			"all lanes to the switch", change(switched(twoSockets(8), 18), 3, func(d *gpu.Device) { d.Links = nil }),
			[]string{"GPU 3 has 0 of 18 NVLink lanes to the NVSwitch"},
		},
		{"a GPU with a fault", change(switched(twoSockets(8), 18), 3, func(d *gpu.Device) { d.Links, d.Fault = nil, "lost" }), nil},
		{"a GPU in MIG mode", change(switched(twoSockets(8), 18), 3, func(d *gpu.Device) { d.Links, d.MIG.Enabled = nil, true }), nil},
		{"a lane of a pair", unlink(bridged(twoSockets(4), 12), 2, 3, 4), []string{"GPU 2 has 8 of 12 NVLink lanes to GPU 3"}},
		{
			"one end of the only pair", change(bridged(twoSockets(2), 12), 1, func(d *gpu.Device) { d.Links[0].NVLink = 11 }),
			[]string{"GPU 0 has 11 of 12 NVLink lanes to GPU 1"},
		},
		{"a lane of the mesh", unlink(cubeMesh(), 1, 2, 1), []string{"GPU 1 has 1 of 2 NVLink lanes to GPU 2"}},
		{"the last lane of two in the mesh", unlink(cubeMesh(), 4, 5, 1), []string{"GPU 4 has 0 of 1 NVLink lanes to GPU 5"}},
		{
			"two links of one GPU", unlink(unlink(cubeMesh(), 0, 4, 1), 0, 3, 1),
			[]string{"GPU 0 has 4 of 6 NVLink lanes", "GPU 3 has 5 of 6 NVLink lanes", "GPU 4 has 5 of 6 NVLink lanes"},
		},
		{
			"one end in the mesh", change(cubeMesh(), 7, func(d *gpu.Device) { d.Links[1].NVLink-- }),
			[]string{"GPU 4 has 1 of 2 NVLink lanes to GPU 7"},
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var got []string
			for _, w := range New(tc.inv).Weak() {
				got = append(got, w.String())
			}
			if !slices.Equal(got, tc.want) {
				t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(tc.want, "\n"))
			}
		})
	}
}

// joinedBy is the sets that NVLink connects, by UUID.
func joinedBy(g *Graph) [][]gpu.UUID {
	var sets [][]gpu.UUID
	for _, members := range g.joined() {
		var set []gpu.UUID
		for _, at := range members {
			set = append(set, g.inv.GPUs[at].UUID)
		}
		sets = append(sets, set)
	}
	return sets
}
