// SPDX-License-Identifier: Apache-2.0

package mig

import (
	"fmt"

	"example.com/gpu-agent/pkg/gpu"
)

// Bounds of a search, so that a table that no driver would report costs a tenth
// of a second at most and not a day. The largest search on a card of 2026 has
// under 2,000 states and 300 parts.
const (
	maxStates = 1 << 20
	maxParts  = 1 << 12
	maxWork   = 1 << 17 // ways to fill a GPU instance that are looked at
	maxEffort = 1 << 24 // states times parts
)

// Weights of what a target saves and spares, each greater than all that is
// below it can sum up to. A sum stays below 2^62.
const (
	roomUnit     = 1
	createUnit   = 1 << 32
	destroyUnit  = 1 << 40
	instanceUnit = 1 << 48
	holderUnit   = 1 << 55

	none = -2 // no target
)

// dim is one thing that a target must have an exact number of: devices of a
// profile, or GPU instances that are split.
type dim struct {
	n      int
	stride int
	left   int
}

// use is how many of a dim a part has.
type use struct{ dim, n int }

// part is a GPU instance that a target can have.
type part struct {
	start, end int
	delta      int   // what it takes off the key
	uses       []use // at least one
	value      int64
	devices    []Placement
	next       int16
}

// search finds the best set of parts that lie side by side and have, together,
// exactly what the dims say. It goes over the card's memory from left to right:
// what is best from a memory slice on depends only on that slice and on what is
// still to be placed, so each such state is solved once. All that a target is
// judged by is a sum over its parts and over the free runs between them.
type search struct {
	end   int // memory slices
	dims  []dim
	parts []part
	// head and tail are the first and the last part at each start, next the one
	// after a part at the same start; 0 is none, as parts count from 1 there.
	head, tail [maxMemory]int16
	must       uint64 // memory that has to be in a part
	// gaps[a*(width)+b] is what the free run of memory slices a…b-1 is worth;
	// what lies behind its last slice is worth nothing.
	gaps  []int64
	width int
	memo  []int64 // value+1 by key and position; 0 is not yet known
	pick  []int16
	work  int
}

// reset empties a search, to be used again.
func (s *search) reset(end int, gaps []int64, width int) {
	clear(s.parts) // let go of their placements
	*s = search{end: end, gaps: gaps, width: width, dims: s.dims[:0], parts: s.parts[:0], memo: s.memo, pick: s.pick}
}

// prepare is called when dims and parts are complete.
func (s *search) prepare() error {
	states := s.end + 1
	for i := range s.dims {
		s.dims[i].stride = states
		if s.dims[i].n >= maxStates/states {
			return errTooLarge
		}
		states *= s.dims[i].n + 1
	}
	if len(s.parts) > maxParts || s.work > maxWork || states*max(len(s.parts), 1) > maxEffort {
		return errTooLarge
	}
	for i := range s.parts {
		p, at := &s.parts[i], int16(i+1)
		if last := s.tail[p.start]; last == 0 {
			s.head[p.start] = at
		} else {
			s.parts[last-1].next = at
		}
		s.tail[p.start] = at
		for _, u := range p.uses {
			p.delta += u.n * s.dims[u.dim].stride
		}
	}
	if states > cap(s.memo) {
		s.memo, s.pick = make([]int64, states), make([]int16, states)
	} else {
		s.memo, s.pick = s.memo[:states], s.pick[:states]
		clear(s.memo)
	}
	return nil
}

// effort is what solving takes at most: states times parts.
func (s *search) effort() int { return len(s.memo) * max(len(s.parts), 1) }

func (s *search) gap(a, b int) int64 {
	return s.gaps[min(a, s.width-1)*s.width+min(b, s.width-1)]
}

var errTooLarge = fmt.Errorf("plan: the GPU's table is larger than this planner can search: %w", gpu.ErrNotSupported)

// solve returns the value of the best target that has left of each dim.
func (s *search) solve() int64 {
	key := 0
	for i := range s.dims {
		key += s.dims[i].left * s.dims[i].stride
	}
	return s.from(0, key)
}

func (s *search) from(e, key int) int64 {
	at := key + e
	if v := s.memo[at]; v != 0 {
		return v - 1
	}
	best, pick := int64(none), int16(0)
	if key == 0 {
		if s.must>>e == 0 {
			best = s.gap(e, s.end)
		}
		s.memo[at] = best + 1
		return best
	}
	for start := e; start < s.end && s.must>>e&ones(start-e) == 0; start++ {
	parts:
		for i := s.head[start]; i != 0; i = s.parts[i-1].next {
			p := &s.parts[i-1]
			for _, u := range p.uses {
				if s.dims[u.dim].left < u.n {
					continue parts
				}
			}
			for _, u := range p.uses {
				s.dims[u.dim].left -= u.n
			}
			v := s.from(p.end, key-p.delta)
			for _, u := range p.uses {
				s.dims[u.dim].left += u.n
			}
			if v == none {
				continue
			}
			if v += s.gap(e, start) + p.value; v > best {
				best, pick = v, i
			}
		}
	}
	s.memo[at], s.pick[at] = best+1, pick
	return best
}

// target walks the solution that solve found, from left to right.
func (s *search) target(visit func(*part)) {
	e, key := 0, 0
	for i := range s.dims {
		key += s.dims[i].left * s.dims[i].stride
	}
	for key != 0 {
		p := &s.parts[s.pick[key+e]-1]
		visit(p)
		e, key = p.end, key-p.delta
	}
}
