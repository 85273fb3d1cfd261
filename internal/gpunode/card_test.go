// SPDX-License-Identifier: Apache-2.0

package gpunode

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
)

// TestCardsSayWhatTheAgentsCardsSay sends each recorded GPU's table through the object, and
// asks both cards what they would add to each set of instances that a walk comes by.
func TestCardsSayWhatTheAgentsCardsSay(t *testing.T) {
	for name, inv := range recorded(t) {
		for i := range inv.GPUs {
			d := &inv.GPUs[i]
			own, err := mig.NewCard(&d.MIG)
			if err != nil {
				t.Fatal(err)
			}
			told := CardOf(d)
			if told == nil {
				if len(own.Placements()) > 0 {
					t.Errorf("%s: GPU %d has placements and no table", name, d.Index)
				}
				continue
			}
			text, err := json.Marshal(told)
			if err != nil {
				t.Fatal(err)
			}
			var back Card
			if err := json.Unmarshal(text, &back); err != nil {
				t.Fatal(err)
			}
			read, err := back.Read()
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			if !slices.Equal(own.Placements(), read.Placements()) {
				t.Fatalf("%s: GPU %d has %v, told are %v", name, d.Index, own.Placements(), read.Placements())
			}
			compare(t, own, read, nil, 0)
		}
	}
}

// compare tries each placement beside what stands, and beside what stands then.
func compare(t *testing.T, own, read *mig.Card, standing []mig.Placement, from int) {
	t.Helper()
	for i, p := range own.Placements() {
		fits := own.Fits(standing, p)
		if fits != read.Fits(standing, p) {
			t.Fatalf("%s beside %v: %v by the driver's table", p, standing, fits)
		}
		if fits && i >= from && len(standing) < 4 {
			compare(t, own, read, append(slices.Clone(standing), p), i+1)
		}
	}
}

// recorded are the inventories of nodes of every kind, by file.
func recorded(t *testing.T) map[string]*gpu.Inventory {
	t.Helper()
	files, err := filepath.Glob("../../tests/testdata/*.json")
	if err != nil || len(files) < 10 {
		t.Fatalf("%d recorded inventories: %v", len(files), err)
	}
	out := map[string]*gpu.Inventory{}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		inv := new(gpu.Inventory)
		if err := json.Unmarshal(text, inv); err != nil {
			t.Fatal(err)
		}
		out[filepath.Base(file)] = inv
	}
	return out
}

func TestPlacementsAreReadAsTheyAreWritten(t *testing.T) {
	d := recorded(t)["h100-80.json"].GPUs[0]
	card, err := CardOf(&d).Read()
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range card.Placements() {
		if got, err := Placement(card, p.String()); err != nil || got != p {
			t.Errorf("%s was read as %v: %v", p, got, err)
		}
	}
	if got, err := Placement(card, "1c.3g.40gb@4.1"); err != nil || got.String() != "1c.3g.40gb@4.1" || got.Size != 4 {
		t.Errorf("a split was read as %v of %d memory slices: %v", got, got.Size, err)
	}
	for _, bad := range []string{"", "3g.40gb", "3g.40gb@1", "3g.41gb@0", "3g.40gb@4.1", "3g.40gb@04", "@0"} {
		if got, err := Placement(card, bad); err == nil {
			t.Errorf("%q was read as %s", bad, got)
		}
	}
}
