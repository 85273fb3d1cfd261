// SPDX-License-Identifier: Apache-2.0

package fill

import (
	"math/rand/v2"
	"slices"
	"testing"
)

// best tries every set of parts that lie side by side: what it is worth, None if there is none.
func best(s *Search, from int, left []int, must uint64) int64 {
	value := int64(None)
	if !slices.ContainsFunc(left, func(n int) bool { return n > 0 }) && must>>from == 0 {
		value = s.Gap(from, s.End)
	}
	for i := range s.Parts {
		p := &s.Parts[i]
		if p.Start < from || must>>from&ones(p.Start-from) != 0 {
			continue
		}
		rest := slices.Clone(left)
		for _, u := range p.Uses {
			rest[u.Dim] -= u.N
		}
		if slices.Min(rest) < 0 {
			continue
		}
		if v := best(s, p.End, rest, must); v != None {
			value = max(value, s.Gap(from, p.Start)+p.Value+v)
		}
	}
	return value
}

// A search that is used again and again finds what trying all finds, and its target is worth that.
func TestSearchFindsTheBest(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	var s Search
	for range 500 {
		end := 2 + r.IntN(7)
		gaps := make([]int64, (end+1)*(end+1))
		for i := range gaps {
			gaps[i] = int64(r.IntN(50))
		}
		s.Reset(end, gaps, end+1)
		left := []int{r.IntN(3), r.IntN(3)}
		for _, n := range left {
			s.Dims = append(s.Dims, Dim{N: n + r.IntN(2), Left: n})
		}
		for range r.IntN(9) {
			start := r.IntN(end)
			s.Parts = append(s.Parts, Part{
				Start: start, End: start + 1 + r.IntN(end-start), Value: int64(r.IntN(100)),
				Uses: s.Use(Use{r.IntN(2), 1}),
			})
		}
		if r.IntN(3) == 0 {
			s.Must = 1 << r.IntN(end)
		}
		if !s.Prepare() {
			t.Fatal("a small row is too large")
		}
		want := best(&s, 0, left, s.Must)
		got := s.Solve()
		if got != want {
			t.Fatalf("%+v: found %d, the best is %d", s, got, want)
		}
		if got == None {
			continue
		}
		worth, at := int64(0), 0
		s.Target(func(part int) {
			p := &s.Parts[part]
			worth, at = worth+s.Gap(at, p.Start)+p.Value, p.End
		})
		if worth += s.Gap(at, end); worth != got {
			t.Fatalf("%+v: the target is worth %d, not %d", s, worth, got)
		}
	}
}

func TestTooLarge(t *testing.T) {
	var s Search
	s.Reset(8, make([]int64, 81), 9)
	s.Dims = append(s.Dims, Dim{N: MaxStates})
	if s.Prepare() {
		t.Error("a million of one thing were prepared")
	}
}
