// SPDX-License-Identifier: Apache-2.0

package fill

// Bounds of a search: a table that no driver would report then takes a tenth of a second at most,
// and not a day. The largest search on a card of 2026 has under 2,000 states and 300 parts.
const (
	MaxStates = 1 << 20
	MaxParts  = 1 << 12
	MaxWork   = 1 << 17 // tried ways to fill a GPU instance
	maxEffort = 1 << 24 // states times parts

	// Most is the most memory slices, since a set of them is a word.
	Most = 64
)

// None is the value if there is no target.
const None = -2

// Dim is a thing that a target must have an exact number of: devices of a profile, or GPU
// instances that are split.
type Dim struct {
	N      int // the most that can be wanted
	Left   int // how many are wanted
	stride int
}

// Use is the number of a Dim that a part has.
type Use struct{ Dim, N int }

// Part is a GPU instance that a target can have.
type Part struct {
	Start, End int
	Uses       []Use // at least one
	Value      int64
	delta      int // what it subtracts from the key
	next       int16
}

// Search finds the best target: a set of parts side by side that together have exactly what the
// dims ask for. The value of a target is a sum over its parts and over the free runs between
// them. So what is best from a memory slice on depends only on that slice and on what is still to
// be placed:
//
//	best(e, counts) = max over the next part p that counts allow,
//	                  beginning at e or later, without skipping a slice of Must, of
//	                      gap(e … p.start) + value(p) + best(p.end, counts − p)
//
// Search goes from left to right and solves each such state once. For example, eight memory
// slices and seven profiles have 2,319 legal sets; a search looks at a few hundred states and
// takes microseconds.
type Search struct {
	End   int // memory slices
	Dims  []Dim
	Parts []Part
	Uses  []Use  // memory for the parts' Uses
	Must  uint64 // memory slices that must be in a part
	Work  int    // how many ways to fill a GPU instance were tried
	// head and tail are the first and last part at each start, and Part.next is the next part at
	// the same start. Parts count from 1 there; 0 is none.
	head, tail [Most]int16
	// gaps[a*width+b] is the value of the free run of memory slices a…b-1. Slices beyond its last
	// one have no value.
	gaps  []int64
	width int
	memo  []int64 // value+1 by key and position; 0 if not solved yet
	pick  []int16
}

// Reset empties a search so that it can be used again.
func (s *Search) Reset(end int, gaps []int64, width int) {
	clear(s.Parts) // release what they use
	*s = Search{
		End: end, gaps: gaps, width: width, memo: s.memo, pick: s.pick,
		Dims: s.Dims[:0], Parts: s.Parts[:0], Uses: s.Uses[:0],
	}
}

// Use stores the uses of a part in s.Uses.
func (s *Search) Use(u ...Use) []Use {
	n := len(s.Uses)
	s.Uses = append(s.Uses, u...)
	return s.Uses[n:len(s.Uses):len(s.Uses)]
}

// Prepare must be called once Dims and Parts are complete. It returns false if they are too many
// to search.
func (s *Search) Prepare() bool {
	states := s.End + 1
	for i := range s.Dims {
		s.Dims[i].stride = states
		if s.Dims[i].N >= MaxStates/states {
			return false
		}
		states *= s.Dims[i].N + 1
	}
	if len(s.Parts) > MaxParts || s.Work > MaxWork || states*max(len(s.Parts), 1) > maxEffort {
		return false
	}
	for i := range s.Parts {
		p, at := &s.Parts[i], int16(i+1)
		if last := s.tail[p.Start]; last == 0 {
			s.head[p.Start] = at
		} else {
			s.Parts[last-1].next = at
		}
		s.tail[p.Start] = at
		for _, u := range p.Uses {
			p.delta += u.N * s.Dims[u.Dim].stride
		}
	}
	if states > cap(s.memo) {
		s.memo, s.pick = make([]int64, states), make([]int16, states)
	} else {
		s.memo, s.pick = s.memo[:states], s.pick[:states]
		clear(s.memo)
	}
	return true
}

// Effort returns a bound of the steps to solve it: states times parts.
func (s *Search) Effort() int { return len(s.memo) * max(len(s.Parts), 1) }

// Gap returns the value of the free run of memory slices a…b-1.
func (s *Search) Gap(a, b int) int64 {
	return s.gaps[min(a, s.width-1)*s.width+min(b, s.width-1)]
}

// Solve returns the value of the best target that has Left of each Dim, or None.
func (s *Search) Solve() int64 {
	key := 0
	for i := range s.Dims {
		key += s.Dims[i].Left * s.Dims[i].stride
	}
	return s.from(0, key)
}

func (s *Search) from(e, key int) int64 {
	at := key + e
	if v := s.memo[at]; v != 0 {
		return v - 1
	}
	best, pick := int64(None), int16(0)
	if key == 0 {
		if s.Must>>e == 0 {
			best = s.Gap(e, s.End)
		}
		s.memo[at] = best + 1
		return best
	}
	for start := e; start < s.End && s.Must>>e&ones(start-e) == 0; start++ {
	parts:
		for i := s.head[start]; i != 0; i = s.Parts[i-1].next {
			p := &s.Parts[i-1]
			for _, u := range p.Uses {
				if s.Dims[u.Dim].Left < u.N {
					continue parts
				}
			}
			for _, u := range p.Uses {
				s.Dims[u.Dim].Left -= u.N
			}
			v := s.from(p.End, key-p.delta)
			for _, u := range p.Uses {
				s.Dims[u.Dim].Left += u.N
			}
			if v == None {
				continue
			}
			if v += s.Gap(e, start) + p.Value; v > best {
				best, pick = v, i
			}
		}
	}
	s.memo[at], s.pick[at] = best+1, pick
	return best
}

// Target calls visit for each part of the target that Solve found, from left to right, with its
// index in Parts.
func (s *Search) Target(visit func(part int)) {
	e, key := 0, 0
	for i := range s.Dims {
		key += s.Dims[i].Left * s.Dims[i].stride
	}
	for key != 0 {
		i := int(s.pick[key+e]) - 1
		p := &s.Parts[i]
		visit(i)
		e, key = p.End, key-p.delta
	}
}

func ones(n int) uint64 {
	return 1<<min(n, Most) - 1
}
