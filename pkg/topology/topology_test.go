// SPDX-License-Identifier: Apache-2.0

package topology

import (
	"encoding/json"
	"fmt"
	"math"
	"os"
	"testing"

	"example.com/gpu-agent/pkg/gpu"
)

func numaNode(n int) *int { return &n }

// node is GPUs "0", "1", … with these links, without NUMA nodes.
func node(links ...[]gpu.Link) *gpu.Inventory {
	inv := new(gpu.Inventory)
	for i, l := range links {
		inv.GPUs = append(inv.GPUs, gpu.Device{Index: i, UUID: gpu.UUID(fmt.Sprint(i)), Links: l})
	}
	return inv
}

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
