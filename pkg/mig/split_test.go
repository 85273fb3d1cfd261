// SPDX-License-Identifier: Apache-2.0

package mig

import (
	"math/rand/v2"
	"testing"
)

// TestSplitTransitions holds plans with splits against brute force: the same
// promises as for whole GPU instances, compute instance by compute instance.
func TestSplitTransitions(t *testing.T) {
	for _, family := range families {
		if family.rows[1].name == seven[1].name {
			continue // has the same GPU instances to split as with five
		}
		t.Run(family.name, func(t *testing.T) {
			t.Parallel()
			f, c := newSplitField(t, family.rows), card(t, family.rows)
			r := rand.New(rand.NewPCG(8, uint64(len(f.sets))))
			n := tell(3000, 200_000)
			for range n {
				set := f.sets[r.IntN(len(f.sets))]
				v := f.want[r.IntN(len(f.want))]
				s := f.scene(r, set, []float64{0, 0.3, 0.3, 0.7}[r.IntN(4)], []float64{0, 0.3}[r.IntN(2)])
				f.transition(t, c, r, &s, v)
			}
			t.Logf("%d transitions, of %d sets and %d geometries", n, len(f.sets), len(f.want))
		})
	}
}

// TestSplitFeasible asks for geometries with splits, possible and not.
func TestSplitFeasible(t *testing.T) {
	for _, rows := range [][]row{five, a30, pro, silent} {
		f, c := newSplitField(t, rows), card(t, rows)
		r := rand.New(rand.NewPCG(9, uint64(len(f.sets))))
		yes, no := 0, 0
		for range tell(2000, 200_000) {
			v := f.want[r.IntN(len(f.want))]
			for range r.IntN(3) {
				v[r.IntN(len(f.rows))]++
			}
			err := c.Feasible(f.counts(t, v))
			if want := f.by[v] != nil; (err == nil) != want {
				t.Fatalf("Feasible(%v) = %v", f.counts(t, v), err)
			}
			if err == nil {
				yes++
			} else {
				no++
			}
		}
		t.Logf("%d of %d are feasible", yes, yes+no)
	}
}
