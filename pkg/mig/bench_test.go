// SPDX-License-Identifier: Apache-2.0

package mig

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"example.com/gpu-agent/pkg/gpu"
)

// BenchmarkPlan is one GPU of seven sevenths, one of them held, that becomes
// something else.
func BenchmarkPlan(b *testing.B) {
	c := card(b, seven)
	sevenths := stand(b, c, "1g.10gb@0 1g.10gb@1 1g.10gb@2 1g.10gb@3 1g.10gb@4 1g.10gb@5!a 1g.10gb@6")
	for _, tc := range []struct{ name, want string }{
		{"change", "3x1g.10gb 1x3g.40gb"},
		{"blocked", "2x1g.10gb 1x2g.20gb 1x3g.40gb"},
		{"splits", "1x1c.3g.40gb 1x2c.3g.40gb 3x1g.10gb"},
	} {
		want := counts(b, tc.want)
		b.Run(tc.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, err := c.Plan(sevenths, want); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkPlanAny is the mean over transitions between geometries drawn
// uniformly, instances pinned with probability 0.3.
func BenchmarkPlanAny(b *testing.B) {
	for _, family := range families {
		b.Run(family.name, func(b *testing.B) {
			f, c := newField(b, family.rows), card(b, family.rows)
			r := rand.New(rand.NewPCG(1, 1))
			var scenes []scene
			var wants [][]Count
			for range 512 {
				scenes = append(scenes, f.scene(r, f.sets[r.IntN(len(f.sets))], 0.3, 0))
				wants = append(wants, f.counts(b, f.want[r.IntN(len(f.want))]))
			}
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				if _, err := c.Plan(scenes[i%512].standing, wants[i%512]); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkNode is a node of eight GPUs: cards read from the inventory, all
// changed, and sixteen requests of mixed profiles placed on them and made.
func BenchmarkNode(b *testing.B) {
	m := inventory(seven)
	standing := stand(b, card(b, seven), "1g.10gb@0 1g.10gb@1 1g.10gb@2 1g.10gb@3 1g.10gb@4 1g.10gb@5 1g.10gb@6")
	to := Target{MIG: true, Geometry: counts(b, "1x1g.10gb 1x2g.20gb 1x3g.40gb")}
	var ids []gpu.UUID
	for g := range 8 {
		ids = append(ids, gpu.UUID(fmt.Sprintf("GPU-%08d-0000-0000-0000-000000000000", g)))
	}
	b.ReportAllocs()
	for b.Loop() {
		offers := make([]Offer, 8)
		for g := range offers {
			c, err := NewCard(m)
			if err != nil {
				b.Fatal(err)
			}
			plan, err := Change(m, c, standing, to)
			if err != nil {
				b.Fatal(err)
			}
			offers[g] = Offer{GPU: ids[g], Card: c, Warm: plan.Result}
		}
		for n := range 16 {
			row := seven[[]int{0, 3, 4, 0, 2}[n%5]]
			p, _ := Parse(row.name)
			var available []Place
			for _, o := range offers {
				for _, start := range row.starts {
					if s, ok := o.Card.Placement(p, start, 0); ok && o.Card.Fits(o.Pinned, s) {
						available = append(available, Place{o.GPU, s})
					}
				}
			}
			got, err := Prefer(offers, available, nil, 1)
			if err != nil {
				b.Fatal(err)
			}
			for g := range offers {
				if o := &offers[g]; o.GPU == got[0].GPU {
					o.Pinned = append(o.Pinned, got[0].Placement)
					now := make([]Standing, 0, 8)
					for _, s := range o.Warm {
						now = append(now, Standing{Placement: s})
					}
					if _, err := o.Card.Make(now, got[0].Placement); err != nil {
						b.Fatal(err)
					}
				}
			}
		}
	}
}

func BenchmarkFits(b *testing.B) {
	c := card(b, seven)
	standing := []Placement{at(b, c, "1g.10gb@0"), at(b, c, "1g.10gb+me@1"), at(b, c, "2g.20gb@2"), at(b, c, "3g.40gb@4")}
	for b.Loop() {
		for _, s := range c.Placements() {
			c.Fits(standing, s)
		}
	}
}

func BenchmarkNewCard(b *testing.B) {
	m := inventory(seven)
	for b.Loop() {
		if _, err := NewCard(m); err != nil {
			b.Fatal(err)
		}
	}
}
