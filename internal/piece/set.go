// SPDX-License-Identifier: Apache-2.0

package piece

import (
	"fmt"
	"iter"
	"strconv"
	"strings"

	"example.com/gpu-agent/pkg/gpu"
)

// Set is a set of numbers, as ascending ranges with gaps between them, none empty. Its text is
// "0-23,40".
type Set []Range

// Range is the numbers from First to Last, both included.
type Range struct{ First, Last int }

// SetOf returns the set of these numbers, which must be ascending, each once.
func SetOf(ascending []int) Set {
	var s Set
	for _, n := range ascending {
		if i := len(s) - 1; i >= 0 && s[i].Last == n-1 {
			s[i].Last = n
		} else {
			s = append(s, Range{n, n})
		}
	}
	return s
}

// Len returns how many numbers the set has.
func (s Set) Len() (n int) {
	for _, r := range s {
		n += r.Last - r.First + 1
	}
	return n
}

// Most returns the largest number of the set, or -1 if the set is empty.
func (s Set) Most() int {
	if len(s) == 0 {
		return -1
	}
	return s[len(s)-1].Last
}

// From returns the numbers of the set that are n or more.
func (s Set) From(n int) Set {
	var out Set
	for _, r := range s {
		if r.Last >= n {
			out = append(out, Range{max(r.First, n), r.Last})
		}
	}
	return out
}

// Meets reports whether two sets have a number in common.
func (s Set) Meets(t Set) bool {
	for i, j := 0, 0; i < len(s) && j < len(t); {
		switch {
		case s[i].Last < t[j].First:
			i++
		case t[j].Last < s[i].First:
			j++
		default:
			return true
		}
	}
	return false
}

// Within reports whether t has each number of the set.
func (s Set) Within(t Set) bool {
	i := 0
	for _, r := range s {
		for i < len(t) && t[i].Last < r.First {
			i++
		}
		if i == len(t) || r.First < t[i].First || t[i].Last < r.Last {
			return false
		}
	}
	return true
}

// All yields the numbers in ascending order.
func (s Set) All() iter.Seq[int] {
	return func(yield func(int) bool) {
		for _, r := range s {
			for n := r.First; n <= r.Last; n++ {
				if !yield(n) {
					return
				}
			}
		}
	}
}

// String returns the set's text.
func (s Set) String() string {
	text, _ := s.MarshalText()
	return string(text)
}

// MarshalText writes the set as "0-23,40".
func (s Set) MarshalText() ([]byte, error) {
	var b []byte
	for i, r := range s {
		if i > 0 {
			b = append(b, ',')
		}
		b = strconv.AppendInt(b, int64(r.First), 10)
		if r.Last > r.First {
			b = append(b, '-')
			b = strconv.AppendInt(b, int64(r.Last), 10)
		}
	}
	return b, nil
}

// mostUnit is the largest number in a text. It is far above any GPU, a tebibyte in units of a
// mebibyte, and small enough for readers that count up to it.
const mostUnit = 1 << 20

// UnmarshalText reads what MarshalText writes. The error wraps gpu.ErrInvalid.
func (s *Set) UnmarshalText(text []byte) error {
	var out Set
	for part := range strings.SplitSeq(string(text), ",") {
		first, last, isRange := strings.Cut(part, "-")
		r := Range{}
		var err error
		if r.First, err = strconv.Atoi(first); err == nil {
			if r.Last = r.First; isRange {
				r.Last, err = strconv.Atoi(last)
			}
		}
		if err != nil || r.First < 0 || r.Last < r.First || r.Last > mostUnit ||
			len(out) > 0 && r.First <= out[len(out)-1].Last {
			return fmt.Errorf("%q is no list of memory units in ascending order: %w", text, gpu.ErrInvalid)
		}
		out = append(out, r)
	}
	*s = out
	return nil
}
