// SPDX-License-Identifier: Apache-2.0

package mig

import (
	"cmp"
	"errors"
	"fmt"
	"math/bits"
	"slices"
	"strings"
	"sync"

	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig/internal/fill"
)

// Bounds of what a card's table may say. Drivers of 2026 stay within 12 memory
// slices, 18 profiles and 8 compute slices.
const (
	maxMemory   = fill.Most // a set of memory slices is a word
	maxProfiles = 32
	maxSlices   = 64 // a set of compute slices is a word
)

// Card is what one GPU's driver says can exist on it. It is immutable and safe
// for concurrent use; build it once per inventory.
type Card struct {
	profiles   []profile // in the order of Compare
	placements []Placement
	memory     int // memory slices
	known      bool
	odd        error
	// room[a*(memory+1)+b] is what the free run of memory slices a…b-1 is worth:
	// the sum of the sizes of all that could be placed in it.
	room []int64
	// media is how many instances with media extensions may exist.
	media int
	// engines says that all profiles' media engines are known; has is how many
	// of each kind the card has then.
	engines bool
	has     engines

	planners sync.Pool // of *planner
	searches sync.Pool // of *fill.Search, for those who need no planner
}

// profile is what the planner knows of a gpu.Profile.
type profile struct {
	name       Name
	slices     int // compute slices
	max        int // most that can exist; maxMemory where the driver does not say
	placements []Placement
	uses       engines
	// media: with media extensions; all: with all engines; none: without any.
	media, all, none bool
}

// engines counts decoders, encoders, JPEG units and optical-flow accelerators.
type engines [4]int

// NewCard reads a GPU's profiles. The card is never nil: a profile that makes
// no sense is left out, and the error, which wraps gpu.ErrInvalid, says which
// and why. Absent figures are unknown, not zero: without slices the name tells
// them, without a maximum only room limits the number, without placements
// nothing of that profile can be planned and [Card.Known] is false.
func NewCard(m *gpu.MIG) (*Card, error) {
	c := &Card{known: len(m.Profiles) > 0, engines: len(m.Profiles) > 0}
	var errs []error
	for i := range m.Profiles {
		p, reason := newProfile(&m.Profiles[i])
		switch {
		case reason != "":
		case c.index(p.name) >= 0:
			reason = "it is listed twice"
		case len(c.profiles) == maxProfiles:
			reason = fmt.Sprintf("there are more than %d profiles", maxProfiles)
		}
		if reason != "" {
			errs = append(errs, fmt.Errorf("leave out profile %s: %s: %w",
				quote(m.Profiles[i].Name), reason, gpu.ErrInvalid))
			continue
		}
		c.profiles = append(c.profiles, p)
		c.known = c.known && len(p.placements) > 0
		c.engines = c.engines && m.Profiles[i].Engines != nil
	}
	slices.SortFunc(c.profiles, func(a, b profile) int { return Compare(a.name, b.name) })
	for i := range c.profiles {
		p := &c.profiles[i]
		c.placements = append(c.placements, p.placements...)
		for _, s := range p.placements {
			c.memory = max(c.memory, s.Start+s.Size)
		}
		// As many as the driver lets stand have their engines at the same time.
		sure := p.max
		if sure == maxMemory {
			sure = 1
		}
		for k, n := range p.uses {
			c.has[k] = max(c.has[k], n*sure)
		}
		if p.media {
			c.media = max(c.media, sure)
		}
	}
	c.placements = slices.Clip(c.placements)
	c.measure()
	c.odd = errors.Join(errs...)
	return c, c.odd
}

func newProfile(from *gpu.Profile) (p profile, reason string) {
	if p.name, reason = parse(from.Name); reason != "" {
		return p, reason
	}
	p.slices = cmp.Or(from.Slices, p.name.Slices)
	p.max = min(cmp.Or(from.Max, maxMemory), maxMemory)
	if e := from.Engines; e != nil {
		p.uses = engines{e.Decode, e.Encode, e.JPEG, e.OFA}
	}
	switch {
	case p.name.Compute != 0:
		return p, "it is of a compute instance, not of a GPU instance"
	case p.slices < 0 || p.slices > maxSlices:
		return p, fmt.Sprintf("it has %d compute slices", p.slices)
	case p.max < 0:
		return p, fmt.Sprintf("at most %d may stand", p.max)
	}
	for _, n := range p.uses {
		if n < 0 || n > 1<<16 {
			return p, fmt.Sprintf("it has %d media engines of a kind", n)
		}
	}
	attr := p.name.Attr
	p.media = attr == "+me" || strings.HasPrefix(attr, "+me.")
	p.all = attr == "+me.all"
	p.none = attr == "-me"
	for _, at := range from.Placements {
		if at.Start < 0 || at.Size < 1 || at.Start >= maxMemory || at.Size > maxMemory-at.Start {
			return p, fmt.Sprintf("%d memory slices from %d on is no placement", at.Size, at.Start)
		}
		s := Placement{Profile: p.name, Start: at.Start, Size: at.Size}
		if slices.ContainsFunc(p.placements, func(o Placement) bool { return o.Start == s.Start }) {
			return p, fmt.Sprintf("start %d is listed twice", s.Start)
		}
		p.placements = append(p.placements, s)
	}
	slices.SortFunc(p.placements, ComparePlacements)
	return p, ""
}

// measure fills in the worth of free runs. Profiles that differ by their
// attributes alone count once: what matters is which sizes still find room.
func (c *Card) measure() {
	w := c.memory + 1
	c.room = make([]int64, w*w)
	type place struct{ start, size, slices int }
	seen := map[place]bool{}
	for i := range c.profiles {
		for _, s := range c.profiles[i].placements {
			at := place{s.Start, s.Size, c.profiles[i].slices}
			if seen[at] {
				continue
			}
			seen[at] = true
			for a := 0; a <= s.Start; a++ {
				for b := s.Start + s.Size; b <= c.memory; b++ {
					c.room[a*w+b] += int64(s.Size)
				}
			}
		}
	}
}

// worth is the worth of all runs of free memory slices.
func (c *Card) worth(taken uint64) (sum int64) {
	for a := 0; a < c.memory; {
		if n := bits.TrailingZeros64(^(taken >> a)); n > 0 {
			a += n
			continue
		}
		b := min(c.memory, a+bits.TrailingZeros64(taken>>a))
		sum += c.room[a*(c.memory+1)+b]
		a = b
	}
	return sum
}

// index finds a GPU instance's profile, -1 if there is none.
func (c *Card) index(n Name) int {
	return slices.IndexFunc(c.profiles, func(p profile) bool { return p.name == n })
}

// Odd is why profiles were left out, as [NewCard] has said; nil if none was.
func (c *Card) Odd() error { return c.odd }

// Known says whether the placements of all profiles are known. Some drivers
// tell them only with MIG on.
func (c *Card) Known() bool { return c.known }

// Placements are all placements that are not split, in the order of [Compare] of their
// profiles and then by start. The caller may not change them.
func (c *Card) Placements() []Placement { return c.placements }

// Placement is the placement of a profile at a place, with its size; of a split, ci is
// its first compute slice. It is false where the driver has no such profile or
// placement.
func (c *Card) Placement(p Name, start, ci int) (Placement, bool) {
	i := c.index(p.GPUInstance())
	if i < 0 || !c.profiles[i].holds(p.Compute, ci) {
		return Placement{}, false
	}
	for _, s := range c.profiles[i].placements {
		if s.Start == start {
			return Placement{Profile: p, Start: start, Size: s.Size, CI: ci}, true
		}
	}
	return Placement{}, false
}

// holds says whether a compute instance of so many slices may begin at a
// compute slice; 0 slices are all of them. The driver aligns to powers of two
// and has no split that takes an aligned block as large as the GPU instance,
// which leaves 1c and 2c in 3g and 4g, and 1c to 4c in 7g.
func (p *profile) holds(compute, ci int) bool {
	if compute == 0 {
		return ci == 0
	}
	block := align(compute)
	return compute > 0 && block < p.slices && ci >= 0 && ci%block == 0 && ci+compute <= p.slices
}

// align is the least power of two that is not less than n.
func align(n int) int {
	if n < 1 {
		return 1
	}
	return 1 << bits.Len(uint(n-1))
}

// mask is the placement's memory as a set; empty where it makes no sense.
func (s Placement) mask() uint64 {
	if s.Start < 0 || s.Size < 1 || s.Start >= maxMemory {
		return 0
	}
	return ones(s.Size) << s.Start
}

// compute is the placement's compute slices within its GPU instance as a set.
func (s Placement) compute() uint64 {
	if s.Profile.Compute == 0 {
		return ^uint64(0)
	}
	return ones(s.Profile.Compute) << min(max(s.CI, 0), maxSlices-1)
}

func ones(n int) uint64 {
	if n >= 64 {
		return ^uint64(0)
	}
	return 1<<n - 1
}

// sameGI says whether two placements are in one GPU instance.
func (s Placement) sameGI(o Placement) bool {
	return s.Start == o.Start && s.Size == o.Size && s.Profile.GPUInstance() == o.Profile.GPUInstance()
}

// clash reports whether two placements need the same memory slices, or the same compute
// slices of one GPU instance.
func (s Placement) clash(o Placement) bool {
	if s.mask()&o.mask() == 0 {
		return false
	}
	return !s.sameGI(o) || s.compute()&o.compute() != 0
}

// tally counts GPU instances, to see whether they may exist together on one card. It
// does not know their placements.
type tally struct {
	n          [maxProfiles]uint8
	sum        int
	media, all int
	none       int
	uses       engines
}

func (t *tally) add(c *Card, i, n int) {
	p := &c.profiles[i]
	t.n[i] = uint8(min(int(t.n[i])+n, 255))
	t.sum += n
	if p.media {
		t.media += n
	}
	if p.all {
		t.all += n
	}
	if p.none {
		t.none += n
	}
	for k, e := range p.uses {
		t.uses[k] += e * n
	}
}

// refuse says which rule the tally breaks; "" if none. It is the one place
// that knows the rules which are not about room.
func (t *tally) refuse(c *Card) string {
	for i := range c.profiles {
		if p := &c.profiles[i]; int(t.n[i]) > p.max {
			return fmt.Sprintf("at most %d of %s can stand on this GPU", p.max, p.name)
		}
	}
	switch {
	case t.media > c.media:
		return fmt.Sprintf("at most %d with media extensions (+me) can stand on this GPU", c.media)
	case c.engines:
		for k, n := range t.uses {
			if n > c.has[k] {
				kind := [...]string{"decoders", "encoders", "JPEG units", "optical-flow accelerators"}[k]
				return fmt.Sprintf("they need %d %s and this GPU has %d", n, kind, c.has[k])
			}
		}
	case t.all > 0 && t.all+t.none < t.sum || t.all > 1:
		return "an instance with all media engines (+me.all) can stand only beside such without any (-me)"
	}
	return ""
}

// allows says whether one more of a profile may join: whether refuse has nothing
// against what would then be, but for rules that the new one has no part in.
func (t *tally) allows(c *Card, i int) bool {
	p := &c.profiles[i]
	if int(t.n[i]) >= p.max || p.media && t.media >= c.media {
		return false
	}
	if c.engines {
		for k, n := range p.uses {
			if n > 0 && t.uses[k]+n > c.has[k] {
				return false
			}
		}
		return true
	}
	switch {
	case p.all:
		return t.none == t.sum
	case p.none:
		return true
	}
	return t.all == 0
}

// Fits reports whether s may exist beside what exists: whether its memory slices are
// free, or its compute slices in a GPU instance that is split the same way, and whether
// the card allows one more of its kind. A placement does not fit beside itself, and
// one that the driver does not have fits nowhere. What exists need not be legal
// itself.
func (c *Card) Fits(standing []Placement, s Placement) bool {
	if own, ok := c.Placement(s.Profile, s.Start, s.CI); !ok || own != s {
		return false
	}
	mask, inside := s.mask(), false
	for i := range standing {
		o := &standing[i]
		if o.mask()&mask == 0 {
			continue
		}
		if s.clash(*o) {
			return false
		}
		inside = true
	}
	if inside {
		return true
	}
	t := c.tally(standing)
	return t.allows(c, c.index(s.Profile.GPUInstance()))
}

// Whole is all that a card allows, in the measure of [Card.Uses].
const Whole = 64

// Uses is how much of what the card allows of a profile, beside what stands, one GPU instance of another uses
// up: the largest part of what is left by any rule that is not about room, rounded up to a 64th. So where a set
// of others uses less than [Whole], these rules allow one of the profile beside them.
func (c *Card) Uses(standing []Placement, other, of Name) (most int) {
	i, j := c.index(other.GPUInstance()), c.index(of.GPUInstance())
	if i < 0 || j < 0 {
		return 0
	}
	t, o, p := c.tally(standing), &c.profiles[i], &c.profiles[j]
	part := func(n, left int) {
		if n > 0 {
			most = max(most, min(Whole, (Whole*n+max(left, 1)-1)/max(left, 1)))
		}
	}
	if i == j {
		part(1, p.max-int(t.n[j]))
	}
	if o.media && p.media {
		part(1, c.media-t.media)
	}
	for k, n := range p.uses {
		if c.engines && n > 0 {
			part(o.uses[k], c.has[k]-t.uses[k]-n+1)
		}
	}
	if !c.engines && (p.all && !o.none || o.all && !p.all && !p.none) {
		part(1, 1)
	}
	return most
}

// tally counts the GPU instances of what exists.
func (c *Card) tally(standing []Placement) (t tally) {
	for i := range standing {
		o := &standing[i]
		if o.Profile.Compute != 0 && slices.ContainsFunc(standing[:i], o.sameGI) {
			continue
		}
		if k := c.index(o.Profile.GPUInstance()); k >= 0 {
			t.add(c, k, 1)
		}
	}
	return t
}
