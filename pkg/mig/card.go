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

// Bounds of a card's table. Drivers of 2026 stay within 12 memory slices, 18 profiles and 8
// compute slices.
const (
	maxMemory   = fill.Most // a set of memory slices is a word
	maxProfiles = 32
	maxSlices   = 64 // a set of compute slices is a word
)

// Card is what can exist on one GPU, as its driver reports it. It is immutable and safe for
// concurrent use; build it once per inventory.
//
// GPU instances can exist side by side if
//
//   - their memory does not overlap,
//   - no profile has more of them than the driver's maximum,
//   - at most one has the media extensions (+me), or as many as the driver's maximum for a
//     profile with them,
//   - together they need at most as many media engines of each kind as the card has. That number
//     follows from the profiles: the engines of one instance, or of as many instances of a
//     profile as the driver allows at a time.
//
// If the driver does not report engines, an instance with all of them (+me.all) can exist only
// beside instances without any (-me).
type Card struct {
	profiles   []profile // in the order of Compare
	placements []Placement
	memory     int // memory slices
	known      bool
	odd        error
	// room[a*(memory+1)+b] is the worth of the free run of memory slices a…b-1: the sum of the
	// sizes of all GPU instances that could be placed in it.
	room []int64
	// media is how many instances with media extensions can exist.
	media int
	// engines is true if the media engines of all profiles are known. has is how many of each
	// kind the card has in that case.
	engines bool
	has     engines

	planners sync.Pool // of *planner
	searches sync.Pool // of *fill.Search, for Prefer
}

// profile is what the planner knows of a gpu.Profile.
type profile struct {
	name       Name
	slices     int // compute slices
	max        int // most that can exist; maxMemory if not known
	placements []Placement
	uses       engines
	// media: with media extensions; all: with all media engines; none: without any.
	media, all, none bool
}

// engines counts decoders, encoders, JPEG units and optical-flow accelerators.
type engines [4]int

// NewCard reads a GPU's profiles. The card is never nil. A profile that makes no sense is left
// out; the error names each of them with the reason, and wraps gpu.ErrInvalid.
//
// Absent figures are unknown, not zero. Without slices, the name gives them. Without a maximum,
// only room limits the number. Without placements, no instance of that profile can be planned,
// and [Card.Known] is false.
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
		// All instances that the driver allows at a time have their engines, so the card has as
		// many.
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
		return p, fmt.Sprintf("its maximum is %d", p.max)
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

// measure computes the worth of free runs. Profiles that differ only by their attributes count
// once: what matters is which sizes still find room.
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

// worth returns the sum of the worth of all runs of free memory slices. taken is a set of them.
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

// index returns the index of a GPU instance's profile, or -1 if there is none.
func (c *Card) index(n Name) int {
	return slices.IndexFunc(c.profiles, func(p profile) bool { return p.name == n })
}

// Odd returns the error of [NewCard]: why profiles were left out, or nil if none was.
func (c *Card) Odd() error { return c.odd }

// Known reports whether the placements of all profiles are known. Some drivers report them only
// while MIG is on.
func (c *Card) Known() bool { return c.known }

// Placements returns all placements that are not split, by profile ([Compare]), then by start.
// The caller must not change them.
func (c *Card) Placements() []Placement { return c.placements }

// Placement returns the placement of a profile at a start, with its size. For a split, ci is its
// first compute slice. It returns false if the driver has no such profile or placement.
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

// holds reports whether a compute instance of that many slices may begin at compute slice ci; 0
// slices means all of them. The driver aligns to powers of two. It has no split whose aligned
// block is as large as the GPU instance. That leaves 1c and 2c in 3g and 4g, and 1c to 4c in 7g.
func (p *profile) holds(compute, ci int) bool {
	if compute == 0 {
		return ci == 0
	}
	block := align(compute)
	return compute > 0 && block < p.slices && ci >= 0 && ci%block == 0 && ci+compute <= p.slices
}

// align returns the least power of two that is at least n.
func align(n int) int {
	if n < 1 {
		return 1
	}
	return 1 << bits.Len(uint(n-1))
}

// mask returns the placement's memory slices as a set. It is empty if the placement is not
// possible.
func (s Placement) mask() uint64 {
	if s.Start < 0 || s.Size < 1 || s.Start >= maxMemory {
		return 0
	}
	return ones(s.Size) << s.Start
}

// compute returns the placement's compute slices within its GPU instance as a set.
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

// sameGI reports whether two placements are in one GPU instance.
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

// tally counts GPU instances, for the rules that do not depend on their placements.
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

// refuse returns the rule that the tally breaks, or "" if none. It knows all rules except room.
func (t *tally) refuse(c *Card) string {
	for i := range c.profiles {
		if p := &c.profiles[i]; int(t.n[i]) > p.max {
			return fmt.Sprintf("at most %d of %s can exist on this GPU", p.max, p.name)
		}
	}
	switch {
	case t.media > c.media:
		return fmt.Sprintf("at most %d with media extensions (+me) can exist on this GPU", c.media)
	case c.engines:
		for k, n := range t.uses {
			if n > c.has[k] {
				kind := [...]string{"decoders", "encoders", "JPEG units", "optical-flow accelerators"}[k]
				return fmt.Sprintf("they need %d %s and this GPU has %d", n, kind, c.has[k])
			}
		}
	case t.all > 0 && t.all+t.none < t.sum || t.all > 1:
		return "an instance with all media engines (+me.all) can exist only beside instances without any (-me)"
	}
	return ""
}

// allows reports whether one more GPU instance of a profile may be added. It checks the rules of
// refuse, but only those that the new one takes part in.
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

// Fits reports whether s can exist beside what exists: its memory slices must be free, or its
// compute slices in a GPU instance that is split in the same way, and the card must allow one
// more of its kind. A placement does not fit beside itself. One that the driver does not have
// never fits. What exists may itself break the rules.
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

// Whole is all that a card allows, in the unit of [Card.Uses].
const Whole = 64

// Uses returns how much of the card's limits for the profile of one GPU instance of the profile
// other uses up, beside what exists. It looks at each rule except room, takes the largest share
// of what is left, and rounds it up to a 64th. So if a set of others uses less than [Whole] in
// sum, these rules allow one instance of the profile of beside them.
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

// tally counts the GPU instances that exist.
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
