// SPDX-License-Identifier: Apache-2.0

package mig

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"example.com/gpu-agent/pkg/gpu"
)

// dice reads small numbers off a fuzzer's bytes.
type dice []byte

func (d *dice) roll(n int) int {
	if len(*d) == 0 {
		return 0
	}
	b := (*d)[0]
	*d = (*d)[1:]
	return int(b) % n
}

// table makes a MIG side of anything, most of it possible.
func (d *dice) table() *gpu.MIG {
	m := &gpu.MIG{Capable: true, Enabled: d.roll(4) > 0}
	if d.roll(4) == 0 {
		pending := d.roll(2) == 0
		m.Pending = &pending
	}
	engines := d.roll(3) == 0
	memory := []int{4, 8, 12, 16, 64, 70}[d.roll(6)]
	for range d.roll(9) {
		g := 1 + d.roll(8)
		p := gpu.Profile{
			Name:   fmt.Sprintf("%dg.%dgb%s", g, 1+d.roll(9), []string{"", "", "+me", "+me.all", "-me", "+gfx"}[d.roll(6)]),
			Slices: []int{0, g, g, 1 + d.roll(8)}[d.roll(4)],
			Max:    d.roll(9),
		}
		if engines || d.roll(9) == 0 {
			p.Engines = &gpu.Engines{Decode: d.roll(5), Encode: d.roll(3), JPEG: d.roll(2), OFA: d.roll(2)}
		}
		size := 1 + d.roll(8)
		for start := d.roll(3) - d.roll(2); start+size <= memory && len(p.Placements) < 20; start += 1 + d.roll(size+1) {
			p.Placements = append(p.Placements, gpu.Placement{Start: start, Size: size + d.roll(9)/8})
		}
		m.Profiles = append(m.Profiles, p)
	}
	return m
}

// name is a profile of the table, maybe split, or another.
func (d *dice) name(m *gpu.MIG) string {
	if len(m.Profiles) == 0 || d.roll(12) == 0 {
		return []string{"9g.9gb", "1c.9g.9gb", "", "none"}[d.roll(4)]
	}
	s := m.Profiles[d.roll(len(m.Profiles))].Name
	if d.roll(3) == 0 {
		return Canonical(fmt.Sprintf("%dc.%s", 1+d.roll(4), s))
	}
	return s
}

// FuzzPlan holds, for tables and instances however strange: no panic, no step
// that touches what is pinned or overlaps what stands, and nothing left to do
// afterwards.
func FuzzPlan(f *testing.F) {
	for i := range 200 {
		b := make([]byte, 160)
		x := uint32(i)*2654435761 + 1
		for k := range b {
			x = x*1664525 + 1013904223
			b[k] = byte(x >> 24)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		d := dice(b)
		m := d.table()
		c, err := NewCard(m)
		if c == nil || err != nil && !errors.Is(err, gpu.ErrInvalid) {
			t.Fatalf("NewCard(%+v) = %v, %v", m, c, err)
		}
		for range d.roll(9) {
			in := gpu.Instance{
				Profile: d.name(m), CI: d.roll(8) - 1, CIStart: d.roll(4),
				Busy: d.roll(3) == 0, Holder: []string{"", "a", "b"}[d.roll(3)],
			}
			in.Start, in.Size = d.roll(16)-d.roll(2), d.roll(9)
			if n, err := Parse(in.Profile); err == nil {
				if i := c.index(n.GPUInstance()); i >= 0 && len(c.profiles[i].placements) > 0 {
					s := c.profiles[i].placements[d.roll(len(c.profiles[i].placements))]
					in.Start, in.Size = s.Start, s.Size
				}
			}
			m.Instances = append(m.Instances, in)
		}
		standing := Stand(m)
		if len(standing) != len(m.Instances) {
			t.Fatalf("Stand(%+v) = %v", m.Instances, standing)
		}
		// One place is told of once; anything else may be.
		standing = slices.CompactFunc(standing, func(a, b Standing) bool { return a.Placement == b.Placement })
		var want []Count
		for range d.roll(5) {
			if n, err := Parse(d.name(m)); err == nil {
				want = append(want, Count{n, d.roll(5) - d.roll(2)})
			}
		}
		check := func(what string, p Plan, err error) {
			t.Helper()
			if err != nil {
				if len(p.Steps)+len(p.Result)+len(p.Keep)+len(p.Blocked) > 0 ||
					!errors.Is(err, gpu.ErrNoRoom) && !errors.Is(err, gpu.ErrInvalid) && !errors.Is(err, gpu.ErrNotSupported) {
					t.Fatalf("%s: %+v, %v", what, p, err)
				}
				return
			}
			walk(t, c, standing, p, func(format string, args ...any) {
				t.Helper()
				t.Fatalf("%s\nof %+v\nbeside %+v: %s\n%s", what, m.Profiles, standing, p.text(), fmt.Sprintf(format, args...))
			})
		}
		p, err := c.Plan(standing, want)
		check(fmt.Sprintf("plan %v", want), p, err)
		if err == nil && len(p.Blocked) == 0 {
			if DescribeCounts(sorted(want)) != Describe(p.Result) {
				t.Fatalf("%v: %s", want, p.text())
			}
			again := make([]Standing, 0, len(p.Result))
			for _, s := range p.Result {
				again = append(again, Standing{Placement: s})
			}
			if p, err := c.Plan(again, want); err != nil || len(p.Steps)+len(p.Blocked) > 0 {
				t.Fatalf("%v once more, of %v: %s %v", want, again, p.text(), err)
			}
		}
		p, err = Change(m, c, standing, Target{MIG: d.roll(3) > 0, OnDemand: d.roll(3) == 0, Geometry: want})
		if err == nil && len(p.Steps) > 0 && len(p.Blocked) > 0 {
			t.Fatalf("steps and blocked: %s", p.text())
		}
		if len(c.Placements()) == 0 {
			return
		}
		s := c.Placements()[d.roll(len(c.Placements()))]
		if n := d.roll(5); n > 0 {
			split := s.Profile
			split.Compute = n
			if o, ok := c.Placement(split, s.Start, 0); ok {
				s = o
			}
		}
		p, err = c.Make(standing, s)
		check(fmt.Sprintf("make %s", s), p, err)

		// A node of two such GPUs.
		var offers []Offer
		var available []Place
		for _, u := range []gpu.UUID{"GPU-0", "GPU-1"} {
			o := Offer{GPU: u, Card: c, Rank: d.roll(2)}
			for _, s := range c.Placements() {
				if d.roll(4) == 0 && c.Fits(o.Pinned, s) {
					o.Pinned = append(o.Pinned, s)
				} else if d.roll(4) == 0 {
					o.Warm = append(o.Warm, s)
				}
			}
			offers = append(offers, o)
			for _, place := range c.Placements() {
				if o, ok := c.Placement(s.Profile, place.Start, 0); ok && place.Profile == s.Profile.GPUInstance() {
					available = append(available, Place{u, o})
				}
			}
		}
		n := d.roll(6)
		got, err := Prefer(offers, available, nil, n)
		if err != nil {
			return
		}
		for _, o := range offers {
			standing := slices.Clone(o.Pinned)
			for _, p := range got {
				if p.GPU == o.GPU && !slices.Contains(o.Pinned, p.Placement) {
					if !c.Fits(standing, p.Placement) {
						t.Fatalf("Prefer(%+v, …, %d) = %v: %s does not fit beside %v", offers, n, got, p.Placement, standing)
					}
					standing = append(standing, p.Placement)
				}
			}
		}
		if len(got) != n || len(slices.Compact(slices.Clone(got))) != n {
			t.Fatalf("Prefer(%+v, …, %d) = %v", offers, n, got)
		}
	})
}

func sorted(counts []Count) []Count {
	var all []Placement
	for _, c := range counts {
		for range c.N {
			all = append(all, Placement{Profile: c.Profile})
		}
	}
	var out []Count
	slices.SortFunc(all, func(a, b Placement) int { return Compare(a.Profile, b.Profile) })
	for _, s := range all {
		if len(out) > 0 && out[len(out)-1].Profile == s.Profile {
			out[len(out)-1].N++
		} else {
			out = append(out, Count{s.Profile, 1})
		}
	}
	return out
}

// walk does a plan's steps on paper. Instances that stand may overlap here, as
// an inventory can say anything; what is made may not.
func walk(t *testing.T, c *Card, standing []Standing, p Plan, fail func(string, ...any)) {
	t.Helper()
	now := slices.Clone(standing)
	if len(p.Blocked) > 0 {
		for _, b := range p.Blocked {
			if !b.Pinned || !slices.Contains(standing, b) {
				fail("%v does not block", b)
			}
		}
		if len(p.Steps) > 0 {
			fail("blocked, and has steps")
		}
		return
	}
	for _, step := range p.Steps {
		switch step.Op {
		case Destroy:
			i := slices.IndexFunc(now, func(o Standing) bool { return o.Placement == step.Placement && !o.Pinned })
			if i < 0 {
				fail("%s: it is pinned or not there", step)
			}
			now = slices.Delete(now, i, i+1)
		case Create:
			if own, ok := c.Placement(step.Profile, step.Start, step.CI); !ok || own != step.Placement {
				fail("%s: there is no such placement", step)
			}
			for i := 0; i < len(now); i++ {
				o := now[i]
				if o.Empty && !o.Pinned && o.GPUInstance() == step.Placement.GPUInstance() {
					now = slices.Delete(now, i, i+1)
					i--
					continue
				}
				if o.Start >= step.Start+step.Size || step.Start >= o.Start+o.Size || o.Size <= 0 || o.Start < 0 || o.Start > 63 {
					continue
				}
				beside := o.GPUInstance() == step.Placement.GPUInstance() && o.Profile.Compute > 0 && step.Profile.Compute > 0 && !o.Empty &&
					(o.CI >= step.CI+step.Profile.Compute || step.CI >= o.CI+o.Profile.Compute)
				if !beside {
					fail("%s: in the room of %s", step, o.Placement)
				}
			}
			now = append(now, Standing{Placement: step.Placement})
		default:
			fail("%s", step)
		}
	}
	after := placements(now)
	for _, s := range p.Keep {
		if !slices.Contains(after, s) {
			fail("%s is not kept", s)
		}
	}
	for _, s := range p.Result {
		if !slices.Contains(after, s) {
			fail("%s is not there", s)
		}
	}
}
