// SPDX-License-Identifier: Apache-2.0

package topology

import (
	"encoding/json"
	"fmt"
	"math"
	"os"
	"reflect"
	"testing"

	"example.com/gpu-agent/pkg/gpu"
)

func TestBetween(t *testing.T) {
	for _, tc := range []struct {
		name string
		inv  *gpu.Inventory
		want Pair // of GPUs 0 and 1
	}{
		{"nothing", node(nil, nil), Pair{}},
		{"both sides say it", node([]gpu.Link{{To: 1, NVLink: 4}}, []gpu.Link{{To: 0, NVLink: 4}}), Pair{NVLink: 4}},
		{"one side says it", node([]gpu.Link{{To: 1, NVLink: 4}}, nil), Pair{NVLink: 4}},
		{"the other side says it", node(nil, []gpu.Link{{To: 0, NVLink: 4}}), Pair{NVLink: 4}},
		{"one side has lanes down", node([]gpu.Link{{To: 1, NVLink: 4}}, []gpu.Link{{To: 0, NVLink: 3}}), Pair{NVLink: 3}},
		{"lanes one by one", node([]gpu.Link{{To: 1, NVLink: 1}, {To: 1, NVLink: 1}}, nil), Pair{NVLink: 2}},
		{"a link to another one", node([]gpu.Link{{To: 2, NVLink: 4}}, nil, nil), Pair{}},
		{"on one switch", node([]gpu.Link{{NVLink: 18, Switch: true}}, []gpu.Link{{NVLink: 18, Switch: true}}), Pair{NVLink: 18, Switch: true}},
		{"on one switch, lanes down", node([]gpu.Link{{NVLink: 18, Switch: true}}, []gpu.Link{{NVLink: 16, Switch: true}}), Pair{NVLink: 16, Switch: true}},
		{"on one switch, lanes not counted", node([]gpu.Link{{Switch: true}}, []gpu.Link{{Switch: true}}), Pair{Switch: true}},
		{"the switch of one alone", node([]gpu.Link{{NVLink: 18, Switch: true}}, nil), Pair{}},
		{"a peer that is not there", node([]gpu.Link{{To: 9, NVLink: 4}, {To: -1, NVLink: 4}}, nil), Pair{}},
		{"a link to itself", node([]gpu.Link{{To: 0, NVLink: 4}}, nil), Pair{}},
		{"lanes below zero", node([]gpu.Link{{To: 1, NVLink: -4}}, []gpu.Link{{To: 0, NVLink: 2}}), Pair{NVLink: 2}},
		{"more lanes than there are", node([]gpu.Link{{To: 1, NVLink: math.MaxInt}, {To: 1, NVLink: math.MaxInt}}, nil), Pair{NVLink: maxLanes}},
		{"one NUMA node", &gpu.Inventory{GPUs: []gpu.Device{{UUID: "0", NUMA: numaNode(1)}, {Index: 1, UUID: "1", NUMA: numaNode(1)}}}, Pair{NUMA: Same, Level: LevelNode}},
		{"two NUMA nodes", &gpu.Inventory{GPUs: []gpu.Device{{UUID: "0", NUMA: numaNode(0)}, {Index: 1, UUID: "1", NUMA: numaNode(1)}}}, Pair{NUMA: Different, Level: LevelSystem}},
		{"half a NUMA node", &gpu.Inventory{GPUs: []gpu.Device{{UUID: "0", NUMA: numaNode(0)}, {Index: 1, UUID: "1"}}}, Pair{}},
		{"NUMA as the kernel writes none", &gpu.Inventory{GPUs: []gpu.Device{{UUID: "0", NUMA: numaNode(-1)}, {Index: 1, UUID: "1", NUMA: numaNode(-1)}}}, Pair{}},
		{"indices out of order", &gpu.Inventory{GPUs: []gpu.Device{{Index: 7, UUID: "0"}, {Index: 3, UUID: "1", Links: []gpu.Link{{To: 7, NVLink: 2}}}}}, Pair{NVLink: 2}},
		{"one index twice", &gpu.Inventory{GPUs: []gpu.Device{{UUID: "0"}, {UUID: "1", Links: []gpu.Link{{To: 0, NVLink: 2}}}}}, Pair{NVLink: 2}},
		{"speeds", node([]gpu.Link{{To: 1, NVLink: 4, LaneMBps: 25000}}, []gpu.Link{{To: 0, NVLink: 4, LaneMBps: 25000}}), Pair{NVLink: 4, MBps: 100000}},
		{"the speed that one side knows", node([]gpu.Link{{To: 1, NVLink: 4}}, []gpu.Link{{To: 0, NVLink: 4, LaneMBps: 25000}}), Pair{NVLink: 4, MBps: 100000}},
		{"the speed of the lanes that work", node([]gpu.Link{{To: 1, NVLink: 3, LaneMBps: 25000}}, []gpu.Link{{To: 0, NVLink: 4, LaneMBps: 25000}}), Pair{NVLink: 3, MBps: 75000}},
		{"lanes of two speeds", node([]gpu.Link{{To: 1, NVLink: 2, LaneMBps: 25000}, {To: 1, NVLink: 1, LaneMBps: 20000}}, nil), Pair{NVLink: 3, MBps: 70000}},
		{"a lane of unknown speed", node([]gpu.Link{{To: 1, NVLink: 2, LaneMBps: 25000}, {To: 1, NVLink: 1}}, nil), Pair{NVLink: 3}},
		{"more speed than there is", node([]gpu.Link{{To: 1, NVLink: math.MaxInt, LaneMBps: math.MaxInt}}, nil), Pair{NVLink: maxLanes, MBps: maxLanes * maxLaneMBps}},
		{"a speed below zero", node([]gpu.Link{{To: 1, NVLink: 2, LaneMBps: -1}}, nil), Pair{NVLink: 2}},
		{"speeds to a switch", node([]gpu.Link{{NVLink: 18, LaneMBps: 26562, Switch: true}}, []gpu.Link{{NVLink: 17, LaneMBps: 26562, Switch: true}}), Pair{NVLink: 17, MBps: 17 * 26562, Switch: true}},
		{"nil", nil, Pair{}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			g := New(tc.inv)
			if got := g.Between("0", "1"); got != tc.want {
				t.Errorf("%+v, want %+v", got, tc.want)
			}
			if got := g.Between("1", "0"); got != tc.want {
				t.Errorf("from the other side %+v, want %+v", got, tc.want)
			}
			for _, other := range []gpu.UUID{"0", "no such", ""} {
				if got := g.Between("0", other); got != (Pair{}) {
					t.Errorf("between 0 and %q: %+v", other, got)
				}
			}
		})
	}
}

func TestBetweenOnAnHGXBoard(t *testing.T) {
	data, err := os.ReadFile("../../tests/testdata/inventories/h100-80gb.json")
	if err != nil {
		t.Fatal(err)
	}
	var inv gpu.Inventory
	if err := json.Unmarshal(data, &inv); err != nil {
		t.Fatal(err)
	}
	g := New(&inv)
	for i, a := range inv.GPUs {
		for j, b := range inv.GPUs {
			want := Pair{NVLink: 18, Switch: true, NUMA: Same, Level: LevelNode}
			if i/4 != j/4 {
				want.NUMA, want.Level = Different, LevelSystem
			}
			if i == j {
				want = Pair{}
			}
			if got := g.Between(a.UUID, b.UUID); got != want {
				t.Errorf("GPUs %d and %d: %+v, want %+v", i, j, got, want)
			}
		}
	}
}

func TestLevels(t *testing.T) {
	one, two := numaNode(0), numaNode(1)
	for _, tc := range []struct {
		name  string
		a, b  gpu.Device
		nodes int
		want  Level
	}{
		{"nothing is known", gpu.Device{}, gpu.Device{}, 0, LevelUnknown},
		{"the machine has one node", gpu.Device{}, gpu.Device{}, 1, LevelNode},
		{"the machine has two nodes", gpu.Device{}, gpu.Device{}, 2, LevelUnknown},
		{"one node", gpu.Device{NUMA: one}, gpu.Device{NUMA: one}, 2, LevelNode},
		{"two nodes", gpu.Device{NUMA: one}, gpu.Device{NUMA: two}, 2, LevelSystem},
		{"one of the paths", gpu.Device{Path: []string{"pci0000:00"}, NUMA: one}, gpu.Device{NUMA: one}, 2, LevelNode},
		{"both on the host bridge's own bus", gpu.Device{Path: []string{"pci0000:00"}}, gpu.Device{Path: []string{"pci0000:00"}}, 2, LevelHost},
		{"two root ports", gpu.Device{Path: []string{"pci0000:00", "0000:00:01.0"}}, gpu.Device{Path: []string{"pci0000:00", "0000:00:02.0"}}, 2, LevelHost},
		{"a root port and the bus", gpu.Device{Path: []string{"pci0000:00", "0000:00:01.0"}}, gpu.Device{Path: []string{"pci0000:00"}}, 2, LevelHost},
		{"two functions of a card", gpu.Device{Path: []string{"pci0000:00", "0000:00:01.0"}}, gpu.Device{Path: []string{"pci0000:00", "0000:00:01.0"}}, 2, LevelSwitch},
		{
			"two slots of a switch",
			gpu.Device{Path: []string{"pci0000:00", "0000:00:01.0", "0000:01:00.0", "0000:02:00.0"}},
			gpu.Device{Path: []string{"pci0000:00", "0000:00:01.0", "0000:01:00.0", "0000:02:04.0"}}, 2, LevelSwitch,
		},
		{
			"switches of a switch",
			gpu.Device{Path: []string{"pci0000:00", "0000:00:01.0", "0000:01:00.0", "0000:02:00.0", "0000:03:00.0", "0000:04:00.0"}},
			gpu.Device{Path: []string{"pci0000:00", "0000:00:01.0", "0000:01:00.0", "0000:02:04.0"}}, 2, LevelSwitches,
		},
		{
			"a switch behind one side of a switch",
			gpu.Device{Path: []string{"pci0000:00", "0000:00:01.0", "0000:01:00.0", "0000:02:00.0", "0000:03:00.0"}},
			gpu.Device{Path: []string{"pci0000:00", "0000:00:01.0", "0000:01:00.0", "0000:02:04.0"}}, 2, LevelSwitches,
		},
		{"two host bridges of one node", gpu.Device{Path: []string{"pci0000:00"}, NUMA: one}, gpu.Device{Path: []string{"pci0000:40"}, NUMA: one}, 2, LevelNode},
		{"two host bridges of two nodes", gpu.Device{Path: []string{"pci0000:00"}, NUMA: one}, gpu.Device{Path: []string{"pci0000:80"}, NUMA: two}, 2, LevelSystem},
		{"one bus address in two domains", gpu.Device{Path: []string{"pci0000:00", "0000:00:01.0"}, NUMA: one}, gpu.Device{Path: []string{"pci0001:00", "0000:00:01.0"}, NUMA: two}, 2, LevelSystem},
		{"the path knows better than NUMA", gpu.Device{Path: []string{"pci0000:00", "0000:00:01.0"}, NUMA: one}, gpu.Device{Path: []string{"pci0000:00", "0000:00:02.0"}, NUMA: two}, 2, LevelHost},
	} {
		t.Run(tc.name, func(t *testing.T) {
			tc.a.UUID, tc.b.UUID, tc.b.Index = "0", "1", 1
			inv := &gpu.Inventory{GPUs: []gpu.Device{tc.a, tc.b}}
			for i := range tc.nodes {
				inv.NUMA = append(inv.NUMA, gpu.NUMANode{ID: i})
			}
			g := New(inv)
			if got, back := g.Between("0", "1").Level, g.Between("1", "0").Level; got != tc.want || back != tc.want {
				t.Errorf("%v, and back %v, want %v", got, back, tc.want)
			}
		})
	}
}

// A graph is what the inventory was, not what the caller makes of it later.
func TestGraphStays(t *testing.T) {
	inv := switched(twoSockets(4), 18)
	g := New(inv)
	said := func() string { return fmt.Sprintf("%+v", g.Matrix().GPUs[0].CPUs+g.Matrix().NUMA[0].CPUs) }
	before, text := g.Matrix(), said()
	for i := range inv.GPUs {
		inv.GPUs[i] = gpu.Device{Index: i, UUID: "other", Fault: "fault"}
	}
	inv.NUMA[0].CPUs = "none"
	if after := g.Matrix(); !reflect.DeepEqual(before, after) || said() != text || len(g.joined()) != 1 {
		t.Errorf("was\n%+v\nand is\n%+v", before, after)
	}
}

// FuzzNew holds that a graph is symmetric, within bounds and of no surprise,
// whatever is said of links.
func FuzzNew(f *testing.F) {
	f.Add([]byte{2, 1, 4, 0, 0, 4, 1})
	f.Add([]byte{4, 255, 0, 2, 3, 200, 1, 0, 0, 0})
	f.Fuzz(func(t *testing.T, data []byte) {
		next := func() int {
			if len(data) == 0 {
				return 0
			}
			b := data[0]
			data = data[1:]
			return int(int8(b))
		}
		inv := new(gpu.Inventory)
		for range next() & 7 {
			d := gpu.Device{Index: next(), UUID: gpu.UUID(fmt.Sprint(next() & 7)), NUMA: numaNode(next())}
			for range next() & 7 {
				d.Links = append(d.Links, gpu.Link{To: next(), NVLink: next() << 55, Switch: next()&1 == 1})
			}
			inv.GPUs = append(inv.GPUs, d)
		}
		g := New(inv)
		for i := range 8 {
			for j := range 8 {
				a, b := gpu.UUID(fmt.Sprint(i)), gpu.UUID(fmt.Sprint(j))
				p := g.Between(a, b)
				if p != g.Between(b, a) {
					t.Fatalf("%s and %s: %+v, and from the other side %+v", a, b, p, g.Between(b, a))
				}
				if p.NVLink < 0 || p.NVLink > maxLanes || i == j && p != (Pair{}) {
					t.Fatalf("%s and %s: %+v", a, b, p)
				}
			}
		}
	})
}
