// SPDX-License-Identifier: Apache-2.0

package topology

import (
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strconv"
	"strings"
	"testing"

	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/tests/emulator"
	"example.com/gpu-agent/tests/emulator/install"
)

// world is an emulated machine.
func world(t *testing.T, name string) *emulator.World {
	t.Helper()
	w, err := emulator.New(emulator.Spec{Topology: name})
	if err != nil {
		t.Fatal(err)
	}
	return w
}

// links is what the driver of an emulated machine tells of its GPUs' links.
func links(w *emulator.World) *gpu.Inventory {
	inv := new(gpu.Inventory)
	st := w.State()
	for i, g := range st.GPUs {
		d := gpu.Device{Index: i, UUID: gpu.UUID(g.UUID), Model: "one", PCI: strings.ToLower(g.PCI)}
		for _, l := range st.Board.Links[i] {
			if !l.Up {
				continue
			}
			link := gpu.Link{NVLink: 1, LaneMBps: 25000, Switch: l.Switch}
			if !l.Switch {
				link.To = l.To
			}
			d.Links = append(d.Links, link)
		}
		inv.GPUs = append(inv.GPUs, d)
	}
	return inv
}

// places is links, and what sysfs would say.
func places(w *emulator.World) *gpu.Inventory {
	inv, st := links(w), w.State()
	for id, n := range st.Board.NUMA {
		node := gpu.NUMANode{ID: id, CPUs: n.CPUs}
		for other, o := range st.Board.NUMA {
			far := 21
			switch {
			case other == id:
				far = 10
			case *o.Socket == *n.Socket:
				far = 12
			}
			node.Distances = append(node.Distances, far)
		}
		inv.NUMA = append(inv.NUMA, node)
	}
	for i := range inv.GPUs {
		d := &inv.GPUs[i]
		d.NUMA = numaNode(st.GPUs[i].NUMA)
		d.CPUs = inv.NUMA[st.GPUs[i].NUMA].CPUs
		d.Path, _ = pciWay(st.Board.Paths[i])
	}
	return inv
}

// Read finds on disk what was laid there.
func TestReadEmulatedMachines(t *testing.T) {
	for _, name := range emulator.Topologies() {
		t.Run(name, func(t *testing.T) {
			w := world(t, name)
			dir, err := install.Scratch()
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { os.RemoveAll(dir) })
			if err := install.Kernel(dir, "", w); err != nil {
				t.Fatal(err)
			}
			inv, board := links(w), w.State().Board
			Read(os.DirFS(filepath.Join(dir, "sys")), inv)

			want := places(w)
			want.Machine = board.Machine
			for _, n := range board.NICs {
				way, addr := pciWay(n.Path)
				want.NICs = append(want.NICs, gpu.NIC{
					Name: n.Name, Kind: gpu.RDMA(n.Kind), PCI: deviceAddress(addr), NUMA: numaNode(n.NUMA), Path: way, Active: n.Active,
				})
			}
			if !reflect.DeepEqual(inv, want) {
				t.Errorf("got\n%+v\nwant\n%+v", inv, want)
			}
		})
	}
}

// On the PCI bus all GPUs are as far from each other as the driver says.
func TestLevelsOfEmulatedMachines(t *testing.T) {
	levels := map[emulator.Level]Level{
		emulator.LevelSwitch: LevelSwitch, emulator.LevelSwitches: LevelSwitches, emulator.LevelHost: LevelHost,
		emulator.LevelNode: LevelNode, emulator.LevelSystem: LevelSystem,
	}
	for _, name := range emulator.Topologies() {
		w := world(t, name)
		inv := places(w)
		g := New(inv)
		s := w.Open(emulator.Opening{Initialised: 1})
		defer s.Close()
		for i, d := range inv.GPUs {
			for j := range i {
				want, r := s.CommonAncestor(emulator.Handle(i), emulator.Handle(j))
				if r != emulator.Success {
					t.Fatalf("%s: ancestor of %d and %d: %v", name, i, j, r)
				}
				if got := g.Between(d.UUID, inv.GPUs[j].UUID).Level; got != levels[want] {
					t.Errorf("%s: GPUs %d and %d: %v, the driver says %v", name, i, j, got, levels[want])
				}
			}
		}
	}
}

// TestEmulatedMachines plays a day on each emulated machine: requests come one
// after the other and stay. Then a link of GPU 0 fails, and returns.
func TestEmulatedMachines(t *testing.T) {
	const eight = "0 1 2 3 4 5 6 7"
	days := map[string]struct{ steps, want, joined, weak, down string }{
		"dgx-h100":   {"1 3 2 2", "0 | 1 2 3 | 4 5 | 6 7", eight, "", "GPU 0 has 17 of 18 NVLink lanes to the NVSwitch"},
		"dgx-a100":   {"2 4 2", "0 1 | 4 5 6 7 | 2 3", eight, "", "GPU 0 has 11 of 12 NVLink lanes to the NVSwitch"},
		"p5":         {"1 3 4", "0 | 1 2 3 | 4 5 6 7", eight, "", "GPU 0 has 17 of 18 NVLink lanes to the NVSwitch"},
		"dgx-1":      {"1 3 2 2", "0 | 1 2 3 | 4 7 | 5 6", eight, "", "GPU 0 has 0 of 1 NVLink lanes to GPU 1"},
		"dgx-2":      {"1 3 2 8 2", "0 | 1 2 3 | 4 5 | 8 9 10 11 12 13 14 15 | 6 7", eight + " 8 9 10 11 12 13 14 15", "", "GPU 0 has 5 of 6 NVLink lanes to the NVSwitch"},
		"hgx-h100-4": {"1 1 2", "0 | 1 | 2 3", "0 1 2 3", "", "GPU 0 has 5 of 6 NVLink lanes to GPU 1"},
		"nvl72":      {"1 2 1", "0 | 2 3 | 1", "0 1 2 3", "", "GPU 0 has 17 of 18 NVLink lanes to the NVSwitch"},
		"pcie":       {"1 3 2 2", "0 | 1 2 3 | 4 5 | 6 7", "", "", ""},
		"pairs":      {"1 2 1 3 1", "0 | 2 3 | 1 | 4 5 6 | 7", "0 1 | 2 3 | 4 5 | 6 7", "", "GPU 0 has 3 of 4 NVLink lanes to GPU 1"},
		"one-node":   {"3 1", "0 1 2 | 3", "0 1 2 3", "", "GPU 0 has 3 of 4 NVLink lanes to GPU 1"},
		"asymmetric": {
			"1 1 2", "3 | 2 | 0 1", "0 1 2 3",
			"GPU 1 has 1 of 2 NVLink lanes to GPU 3, GPU 2 has 2 of 4 NVLink lanes to GPU 3",
			"GPU 2 has 2 of 4 NVLink lanes to GPU 3", // there is no like any more
		},
	}
	for _, name := range emulator.Topologies() {
		t.Run(name, func(t *testing.T) {
			day, ok := days[name]
			if !ok {
				t.Fatal("this machine has no day here")
			}
			w := world(t, name)
			inv := places(w)
			g := New(inv)
			number := func(sets [][]gpu.UUID) string {
				var out []string
				for _, set := range sets {
					var at []int
					for _, u := range set {
						at = append(at, g.at[u])
					}
					out = append(out, strings.Trim(fmt.Sprint(at), "[]"))
				}
				return strings.Join(out, " | ")
			}
			check := func(what, got, want string) {
				t.Helper()
				if got != want {
					t.Errorf("%s: %s, want %s", what, got, want)
				}
			}
			weak := func() string { return strings.Join(New(places(w)).Matrix().Weak, ", ") }

			free := all(inv)
			var got [][]gpu.UUID
			for step := range strings.FieldsSeq(day.steps) {
				n, err := strconv.Atoi(step)
				if err != nil {
					t.Fatal(err)
				}
				var set []gpu.UUID
				set, free = take(t, g, free, n)
				got = append(got, set)
			}
			check("requests for "+day.steps, number(got), day.want)
			check("joined", number(joinedBy(g)), day.joined)
			check("weak", weak(), day.weak)
			if day.joined == "" {
				return
			}
			if err := w.SetLink(0, 0, false); err != nil {
				t.Fatal(err)
			}
			check("weak when a link is down", weak(), day.down)
			if err := w.SetLink(0, 0, true); err != nil {
				t.Fatal(err)
			}
			check("weak when it is up again", weak(), day.weak)
		})
	}
}
