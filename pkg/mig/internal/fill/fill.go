// SPDX-License-Identifier: Apache-2.0

package fill

// Bounds of a search, so that a table that no driver would report costs a tenth
// of a second at most and not a day. The largest search on a card of 2026 has
// under 2,000 states and 300 parts.
const (
	MaxStates = 1 << 20
	MaxParts  = 1 << 12
	MaxWork   = 1 << 17 // ways to fill a GPU instance that are looked at
	maxEffort = 1 << 24 // states times parts

	// Most is how many memory slices there are at most: a set of them is a word.
	Most = 64
)

// None is the value where there is no target.
const None = -2

// Dim is one thing that a target must have an exact number of: devices of a
// profile, or GPU instances that are split.
type Dim struct {
	N      int // the most that can be asked for
	Left   int // how many are asked for
	stride int
}

// Use is how many of a Dim a part has.
type Use struct{ Dim, N int }

// Part is a GPU instance that a target can have.
type Part struct {
	Start, End int
	Uses       []Use // at least one
	Value      int64
	delta      int // what it takes off the key
	next       int16
}

// Search finds the best set of parts that lie side by side and have, together,
// exactly what the dims say. It goes over the card's memory from left to right:
// what is best from a memory slice on depends only on that slice and on what is
// still to be placed, so each such state is solved once. All that a target is
// judged by is a sum over its parts and over the free runs between them.
type Search struct {
	End   int // memory slices
	Dims  []Dim
	Parts []Part
	Uses  []Use  // where the parts' Uses lie
	Must  uint64 // memory that has to be in a part
	Work  int    // how many ways to fill a GPU instance were looked at
	// head and tail are the first and the last part at each start, next the one
	// after a part at the same start; 0 is none, as parts count from 1 there.
	head, tail [Most]int16
	// gaps[a*(width)+b] is what the free run of memory slices a…b-1 is worth;
	// what lies behind its last slice is worth nothing.
	gaps  []int64
	width int
	memo  []int64 // value+1 by key and position; 0 is not yet known
	pick  []int16
}

// Reset empties a search, to be used again.
func (s *Search) Reset(end int, gaps []int64, width int) {
	clear(s.Parts) // let go of what they use
	*s = Search{
		End: end, gaps: gaps, width: width, memo: s.memo, pick: s.pick,
		Dims: s.Dims[:0], Parts: s.Parts[:0], Uses: s.Uses[:0],
	}
}

// Use keeps what a part uses.
func (s *Search) Use(u ...Use) []Use {
	n := len(s.Uses)
	s.Uses = append(s.Uses, u...)
	return s.Uses[n:len(s.Uses):len(s.Uses)]
}

// Prepare is called when Dims and Parts are complete. It is false where they are more than
// can be searched.
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

// Effort is what solving takes at most: states times parts.
func (s *Search) Effort() int { return len(s.memo) * max(len(s.Parts), 1) }

// Gap is what the free run of memory slices a…b-1 is worth.
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

// Target walks the solution that Solve found, from left to right, by indices of Parts.
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
