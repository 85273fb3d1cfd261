// SPDX-License-Identifier: Apache-2.0

package piece_test

import (
	"math/rand/v2"
	"slices"
	"testing"

	"example.com/gpu-agent/internal/piece"
)

// A set is what a map of the same numbers is.
func TestSet(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	draw := func() (piece.Set, []int) {
		var numbers []int
		for n := range 40 {
			if rng.IntN(3) == 0 {
				numbers = append(numbers, n)
			}
		}
		return piece.SetOf(numbers), numbers
	}
	for range 2000 {
		a, in := draw()
		if got := slices.Collect(a.All()); !slices.Equal(got, in) || a.Len() != len(in) {
			t.Fatalf("%v has %v, want %v", a, got, in)
		}
		if want := len(in) > 0 && a.Most() == in[len(in)-1] || len(in) == 0 && a.Most() == -1; !want {
			t.Fatalf("the largest of %v is said to be %d", in, a.Most())
		}
		from := rng.IntN(42)
		if got, want := slices.Collect(a.From(from).All()), slices.DeleteFunc(slices.Clone(in), func(n int) bool { return n < from }); !slices.Equal(got, want) {
			t.Fatalf("%v from %d on is %v", in, from, got)
		}
		some := slices.DeleteFunc(slices.Clone(in), func(int) bool { return rng.IntN(8) == 0 })
		if !piece.SetOf(some).Within(a) || a.Within(piece.SetOf(some)) != (len(some) == len(in)) {
			t.Fatalf("%v is said to be within %v or not", some, in)
		}
		text, err := a.MarshalText()
		var back piece.Set
		if err == nil && len(in) > 0 {
			err = back.UnmarshalText(text)
		}
		if err != nil || !slices.Equal(a, back) {
			t.Fatalf("%q is read as %v, %v; want %v", text, back, err, a)
		}
	}
}
