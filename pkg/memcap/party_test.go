// SPDX-License-Identifier: Apache-2.0

package memcap

import (
	"fmt"
	"slices"
	"testing"
)

// TestParties says who has which cap together.
func TestParties(t *testing.T) {
	allowed := func(container, allocation string, bytes uint64) Allowance {
		return Allowance{Container: container, GPU: "GPU-0", Cap: bytes, Allocation: allocation}
	}
	for name, test := range map[string]struct {
		allowances []Allowance
		want       string
	}{
		"nobody":           {nil, "[]"},
		"another GPU's":    {[]Allowance{{Container: "x", GPU: "GPU-1", Cap: 1}}, "[]"},
		"their own":        {[]Allowance{allowed("y", "", 2), allowed("x", "", 1), allowed("y", "", 3)}, "[{[] [x] 1} {[] [y] 5}]"},
		"one for two":      {[]Allowance{allowed("x", "a", 4), allowed("y", "a", 4)}, "[{[a] [x y] 4}]"},
		"two for one":      {[]Allowance{allowed("x", "b", 4), allowed("x", "a", 2)}, "[{[a b] [x] 6}]"},
		"two, and one":     {[]Allowance{allowed("x", "b", 4), allowed("x", "a", 2), allowed("y", "a", 2)}, "[{[a] [y] 2} {[a b] [x y] 6}]"},
		"all of the GPU":   {[]Allowance{allowed("x", "a", None), allowed("x", "b", 2)}, fmt.Sprintf("[{[a b] [x] %d}]", uint64(None))},
		"a chain of pairs": {[]Allowance{allowed("x", "a", 1), allowed("x", "b", 2), allowed("y", "b", 2), allowed("y", "c", 4)}, "[{[a b] [x] 3} {[b c] [y] 6} {[a b c] [x y] 7}]"},
	} {
		t.Run(name, func(t *testing.T) {
			for range 10 {
				if got := fmt.Sprint(Parties("GPU-0", test.allowances)); got != test.want {
					t.Errorf("%s, want %s", got, test.want)
				}
				slices.Reverse(test.allowances)
			}
		})
	}
}

// TestJudgeOfSharesOfOneGPU: x has both shares, and y one of them. Each is judged by what it
// may have, and both by the sum.
func TestJudgeOfSharesOfOneGPU(t *testing.T) {
	const gib = 1024 * mib
	allowances := []Allowance{{Container: "x", GPU: "GPU-0", Cap: 8 * gib, Allocation: "a"}, {Container: "x", GPU: "GPU-0", Cap: 4 * gib, Allocation: "b"},
		{Container: "y", GPU: "GPU-0", Cap: 4 * gib, Allocation: "b"}}
	counts := func(p Process, bytes uint64) Process { p.Counted = bytes; return p }
	for name, test := range map[string]struct {
		x, y Process
		want string // who is ended, and over which cap in GiB
	}{
		"the sum":                     {has(1, "x", 12*gib), has(2, "y", 0), ""},
		"beside another":              {has(1, "x", 9*gib), has(2, "y", 3*gib), ""},
		"one alone beyond its share":  {has(1, "x", 6*gib), has(2, "y", 5*gib), "y 4"},
		"more than the sum":           {has(1, "x", 13*gib), has(2, "y", 0), "x 12"},
		"together more than the sum":  {counts(has(1, "x", 9*gib), 8*gib), counts(has(2, "y", 4*gib), 4*gib), "x 12"},
		"who goes around its count":   {counts(has(1, "x", 10*gib), 10*gib), counts(has(2, "y", 4*gib), 2*gib), "y 12"},
		"one share's, then the sum's": {has(1, "x", 14*gib), has(2, "y", 5*gib), "y 4"},
	} {
		t.Run(name, func(t *testing.T) {
			j := NewJudge(Policy{})
			var got string
			for i := range 3 {
				s := Sample{At: at(200 * i), GPU: "GPU-0", Processes: []Process{test.x, test.y}}
				for _, v := range j.Judge(s, allowances, everyone) {
					got = fmt.Sprintf("%s %d", v.Container, v.Cap/gib)
				}
			}
			if got != test.want {
				t.Errorf("ended %q, want %q", got, test.want)
			}
		})
	}
}
