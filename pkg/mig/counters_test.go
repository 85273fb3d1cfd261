// SPDX-License-Identifier: Apache-2.0

package mig

import (
	"encoding/json"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"testing"

	"example.com/gpu-agent/pkg/gpu"
)

// What counters admit is what the driver's tables admit: no set that they forbid, and
// every set that they allow, whichever way it comes about.
func TestCountersAreTheCardsRules(t *testing.T) {
	cards := map[string]*Card{}
	for _, f := range families {
		cards[f.name] = card(t, f.rows)
	}
	files, err := filepath.Glob("../../tests/testdata/inventories/*.json")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		var inv gpu.Inventory
		if err := json.Unmarshal(data, &inv); err != nil {
			t.Fatal(file, err)
		}
		for i := range inv.GPUs {
			if m := &inv.GPUs[i].MIG; len(m.Profiles) > 0 {
				c, err := NewCard(m)
				if err != nil {
					t.Fatal(file, err)
				}
				cards[filepath.Base(file)] = c
			}
		}
	}
	if len(cards) < 10 {
		t.Fatalf("%d cards only", len(cards))
	}
	label := regexp.MustCompile(`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`)
	for name, c := range cards {
		t.Run(name, func(t *testing.T) {
			has := map[string]int{}
			for _, n := range c.Counters() {
				if _, twice := has[n.Name]; twice || n.Value < 1 || len(n.Name) > 63 || !label.MatchString(n.Name) {
					t.Errorf("counter %+v", n)
				}
				has[n.Name] = n.Value
			}
			if len(has) > 31 { // a set may have 32, and the memory is one
				t.Errorf("%d counters: %v", len(has), has)
			}
			rng := rand.New(rand.NewPCG(1, 2))
			admitted, refused := 0, 0
			for range tell(500, 5000) {
				var standing []Placement
				left := map[string]int{}
				for n, v := range has {
					left[n] = v
				}
				for range 30 {
					s := c.placements[rng.IntN(len(c.placements))]
					fits := true
					for _, n := range c.Takes(s) {
						fits = fits && left[n.Name] >= n.Value
					}
					if want := c.Fits(standing, s); fits != want {
						t.Fatalf("beside %v, %v fits: %v by the counters %v, %v by the card", standing, s, fits, left, want)
					}
					if !fits {
						refused++
						continue
					}
					admitted++
					standing = append(standing, s)
					for _, n := range c.Takes(s) {
						left[n.Name] -= n.Value
					}
				}
			}
			if admitted == 0 || refused == 0 {
				t.Errorf("%d admitted, %d refused", admitted, refused)
			}
		})
	}
}
