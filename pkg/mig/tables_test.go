// SPDX-License-Identifier: Apache-2.0

package mig

import (
	"testing"

	"example.com/gpu-agent/pkg/gpu"
)

// row is a profile of a table that the tests know: written down here from what
// drivers report, apart from what the package computes.
type row struct {
	name   string
	slices int
	max    int
	size   int
	starts []int
	// engines: decoders, encoders, JPEG units, optical flow; nil where the test
	// leaves them out.
	engines *gpu.Engines
}

// seven is the table of the cards with eight memory slices (A100, H100, H200,
// B200), with an A100-80GB's names.
var seven = []row{
	{"1g.10gb", 1, 7, 1, []int{0, 1, 2, 3, 4, 5, 6}, nil},
	{"1g.10gb+me", 1, 1, 1, []int{0, 1, 2, 3, 4, 5, 6}, nil},
	{"1g.20gb", 1, 4, 2, []int{0, 2, 4, 6}, nil},
	{"2g.20gb", 2, 3, 2, []int{0, 2, 4}, nil},
	{"3g.40gb", 3, 2, 4, []int{0, 4}, nil},
	{"4g.40gb", 4, 1, 4, []int{0}, nil},
	{"7g.80gb", 7, 1, 8, []int{0}, nil},
}

// five leaves out what came with later drivers.
var five = []row{seven[0], seven[3], seven[4], seven[5], seven[6]}

var a30 = []row{
	{"1g.6gb", 1, 4, 1, []int{0, 1, 2, 3}, nil},
	{"1g.6gb+me", 1, 1, 1, []int{0, 1, 2, 3}, nil},
	{"2g.12gb", 2, 2, 2, []int{0, 2}, nil},
	{"2g.12gb+me", 2, 1, 2, []int{0, 2}, nil},
	{"4g.24gb", 4, 1, 4, []int{0}, nil},
}

// pro is RTX PRO 6000 Blackwell, with four decoders, encoders and JPEG units
// and one optical-flow accelerator.
var pro = []row{
	{"1g.24gb", 1, 4, 3, []int{0, 3, 6, 9}, &gpu.Engines{Decode: 1, Encode: 1, JPEG: 1}},
	{"1g.24gb+gfx", 1, 4, 3, []int{0, 3, 6, 9}, &gpu.Engines{Decode: 1, Encode: 1, JPEG: 1}},
	{"1g.24gb+me", 1, 1, 3, []int{0, 3, 6, 9}, &gpu.Engines{Decode: 1, Encode: 1, JPEG: 1, OFA: 1}},
	{"1g.24gb+me.all", 1, 1, 3, []int{0, 3, 6, 9}, &gpu.Engines{Decode: 4, Encode: 4, JPEG: 4, OFA: 1}},
	{"1g.24gb-me", 1, 4, 3, []int{0, 3, 6, 9}, &gpu.Engines{}},
	{"2g.48gb", 2, 2, 6, []int{0, 6}, &gpu.Engines{Decode: 2, Encode: 2, JPEG: 2}},
	{"2g.48gb+gfx", 2, 2, 6, []int{0, 6}, &gpu.Engines{Decode: 2, Encode: 2, JPEG: 2}},
	{"2g.48gb+me.all", 2, 1, 6, []int{0, 6}, &gpu.Engines{Decode: 4, Encode: 4, JPEG: 4, OFA: 1}},
	{"2g.48gb-me", 2, 2, 6, []int{0, 6}, &gpu.Engines{}},
	{"4g.96gb", 4, 1, 12, []int{0}, &gpu.Engines{Decode: 4, Encode: 4, JPEG: 4, OFA: 1}},
	{"4g.96gb+gfx", 4, 1, 12, []int{0}, &gpu.Engines{Decode: 4, Encode: 4, JPEG: 4, OFA: 1}},
}

// thor is a GPU whose memory is the machine's: NVIDIA's MIG user guide has its names and
// engines, a device told the placements of 1g and 2g.
var thor = []row{
	{"1g.0gb", 1, 1, 1, []int{2}, &gpu.Engines{Decode: 1, Encode: 1, JPEG: 1}},
	{"1g.0gb+me", 1, 1, 1, []int{2}, &gpu.Engines{Decode: 1, Encode: 1, JPEG: 1, OFA: 1}},
	{"1g.0gb+gfx", 1, 1, 1, []int{2}, &gpu.Engines{Decode: 1, Encode: 1, JPEG: 1}},
	{"2g.0gb", 2, 1, 2, []int{0}, &gpu.Engines{Decode: 1, Encode: 1, JPEG: 1}},
	{"2g.0gb+gfx", 2, 1, 2, []int{0}, &gpu.Engines{Decode: 1, Encode: 1, JPEG: 1}},
	{"3g.0gb", 3, 1, 3, []int{0}, &gpu.Engines{Decode: 2, Encode: 2, JPEG: 2, OFA: 1}},
	{"3g.0gb+gfx", 3, 1, 3, []int{0}, &gpu.Engines{Decode: 2, Encode: 2, JPEG: 2, OFA: 1}},
}

// silent is an RTX PRO 6000 under a driver that tells no engines.
var silent = func() []row {
	out := append([]row(nil), pro...)
	for i := range out {
		out[i].engines = nil
	}
	return out
}()

// families are the tables by name.
var families = []struct {
	name string
	rows []row
}{
	{"8 memory slices, 5 profiles", five},
	{"8 memory slices, 7 profiles", seven},
	{"A30", a30},
	{"RTX PRO 6000", pro},
	{"RTX PRO 6000, engines unknown", silent},
	{"Thor", thor},
}

// inventory is the table as a driver reports it with MIG on.
func inventory(rows []row) *gpu.MIG {
	m := &gpu.MIG{Capable: true, Enabled: true}
	for i, r := range rows {
		p := gpu.Profile{Name: r.name, ID: i, Slices: r.slices, Max: r.max, Engines: r.engines}
		for _, s := range r.starts {
			p.Placements = append(p.Placements, gpu.Placement{Start: s, Size: r.size})
		}
		m.Profiles = append(m.Profiles, p)
	}
	return m
}

func card(t testing.TB, rows []row) *Card {
	t.Helper()
	c, err := NewCard(inventory(rows))
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func name(t testing.TB, s string) Name {
	t.Helper()
	n, err := Parse(s)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// at reads a device such as "3g.40gb@4" or "1c.3g.40gb@4.1".
func at(t testing.TB, c *Card, s string) Placement {
	t.Helper()
	_, p, start, ci, err := ParseID("GPU-x::" + s)
	if err != nil {
		t.Fatal(err)
	}
	placement, ok := c.Placement(p, start, ci)
	if !ok {
		t.Fatalf("the card has no %s", s)
	}
	return placement
}
