// SPDX-License-Identifier: Apache-2.0

package mig

import (
	"cmp"
	"fmt"
	"math/bits"
	"slices"
	"strconv"
	"strings"

	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig/internal/fill"
)

// maxStanding bounds the number of devices on one GPU; 14 exist at most today.
const maxStanding = 100

// Weights in the value of a target. Each is greater than the sum of all lower ones. A sum stays
// below 2^62.
const (
	roomUnit     = 1
	createUnit   = 1 << 32
	destroyUnit  = 1 << 40
	instanceUnit = 1 << 48
	holderUnit   = 1 << 55
)

var errTooLarge = fmt.Errorf("plan: the GPU's table is larger than this planner can search: %w", gpu.ErrNotSupported)

// planner searches for the set of devices that is to exist. It is pooled, because its tables cost
// more than the search in them.
type planner struct {
	fill.Search
	c        *Card
	want     []Count // merged, in order, without zero counts
	standing []Standing
	masks    []uint64      // memory slices of each of standing
	value    []int64       // value of keeping each of standing
	fixed    []bool        // true if the target must have it; by standing
	holds    [][]Placement // the devices of each part
	// splits are the split profiles, each with the dim that counts their GPU instances. base
	// counts all other GPU instances.
	splits []splitDim
	base   tally
}

type splitDim struct{ profile, dim int }

// merge adds up and sorts the wanted counts. It fails for profiles and splits that the card does
// not have, and for negative counts.
func (c *Card) merge(want []Count) ([]Count, error) {
	all := make([]Count, 0, len(want))
	for _, w := range want {
		if w.N == 0 {
			continue
		}
		if w.N < 0 {
			return nil, fmt.Errorf("%d of %s: a count must not be negative: %w", w.N, w.Profile, gpu.ErrInvalid)
		}
		i := c.index(w.Profile.GPUInstance())
		if i < 0 {
			return nil, fmt.Errorf("there is no profile %s on this GPU; %s: %w", w.Profile, c.names(), gpu.ErrInvalid)
		}
		if p := &c.profiles[i]; !p.holds(w.Profile.Compute, 0) {
			return nil, fmt.Errorf("there is no profile %s on this GPU: %s is not split into parts of %d: %w",
				w.Profile, p.name, w.Profile.Compute, gpu.ErrInvalid)
		}
		w.N = min(w.N, fill.MaxStates)
		if k := slices.IndexFunc(all, func(o Count) bool { return o.Profile == w.Profile }); k >= 0 {
			all[k].N = min(all[k].N+w.N, fill.MaxStates)
			continue
		}
		all = append(all, w)
	}
	// Profiles that share GPU instances are next to each other.
	slices.SortFunc(all, func(a, b Count) int {
		return cmp.Or(Compare(a.Profile.GPUInstance(), b.Profile.GPUInstance()),
			cmp.Compare(a.Profile.Compute, b.Profile.Compute))
	})
	return all, nil
}

func (c *Card) names() string {
	var names []string
	for i := range c.profiles {
		names = append(names, c.profiles[i].name.String())
	}
	return "it has " + cmp.Or(strings.Join(names, ", "), "none")
}

// planner returns a planner for what exists and is wanted. The caller sets value and fixed, and
// returns the planner by release.
func (c *Card) planner(standing []Standing, want []Count) *planner {
	p, _ := c.planners.Get().(*planner)
	if p == nil {
		p = &planner{}
	}
	p.c, p.want, p.standing = c, want, standing
	p.value = slices.Grow(p.value[:0], len(standing))[:len(standing)]
	p.fixed = slices.Grow(p.fixed[:0], len(standing))[:len(standing)]
	p.masks = p.masks[:0]
	for i := range standing {
		p.masks = append(p.masks, standing[i].mask())
	}
	clear(p.value)
	clear(p.fixed)
	return p
}

func (c *Card) release(p *planner) {
	p.Reset(0, nil, 1)
	clear(p.holds) // release the placements
	p.holds = p.holds[:0]
	p.c, p.want, p.standing = nil, nil, nil
	c.planners.Put(p)
}

// list adds each GPU instance that the target could have as a part.
func (p *planner) list() error {
	c := p.c
	p.Reset(c.memory, c.room, c.memory+1)
	p.holds = p.holds[:0]
	p.splits, p.base = p.splits[:0], tally{}
	for i, m := range p.masks {
		if p.fixed[i] {
			p.Must |= m
		}
		p.End = max(p.End, bits.Len64(m))
	}
	for d, w := range p.want {
		p.Dims = append(p.Dims, fill.Dim{N: w.N, Left: w.N})
		if w.Profile.Compute != 0 {
			continue
		}
		k := c.index(w.Profile)
		p.base.add(c, k, min(w.N, 255))
		uses := p.Use(fill.Use{Dim: d, N: 1})
		table := c.profiles[k].placements
		for i := range table {
			p.part(table[i], table[i:i+1:i+1], uses)
		}
		for i := range p.standing {
			o := &p.standing[i]
			wanted := o.Profile == w.Profile && !o.Empty && p.masks[i] != 0
			if wanted && !slices.Contains(table, o.Placement) && first(p.standing, i) {
				p.part(o.Placement, []Placement{o.Placement}, uses)
			}
		}
	}
	for d := 0; d < len(p.want); {
		name, e := p.want[d].Profile, d+1
		if name.Compute != 0 {
			for e < len(p.want) && p.want[e].Profile.GPUInstance() == name.GPUInstance() {
				e++
			}
			p.split(d, e)
		}
		d = e
	}
	if !p.Prepare() {
		return errTooLarge
	}
	return nil
}

// first reports whether standing[i] is the first at its placement.
func first(standing []Standing, i int) bool {
	return !slices.ContainsFunc(standing[:i], func(o Standing) bool { return o.Placement == standing[i].Placement })
}

// part adds a GPU instance with its devices, unless it overlaps a fixed device that is not among
// them.
func (p *planner) part(gi Placement, devices []Placement, uses []fill.Use) {
	mask, value := gi.mask(), int64(0)
	for i := range p.standing {
		if p.masks[i]&mask == 0 {
			continue
		}
		o := &p.standing[i]
		switch {
		case o.Empty && o.Placement == gi && !o.Pinned, !o.Empty && slices.Contains(devices, o.Placement):
			value += p.value[i]
		case p.fixed[i]:
			return
		}
	}
	p.Parts = append(p.Parts, fill.Part{
		Start: gi.Start, End: min(gi.Start+gi.Size, maxMemory), Uses: uses, Value: value,
	})
	p.holds = append(p.holds, devices)
}

// choose finds the best target and returns its value. ok is false if there is none.
func (p *planner) choose() (value int64, ok bool) {
	for i, m := range p.masks {
		if p.fixed[i] && m == 0 {
			return 0, false
		}
	}
	if len(p.splits) == 0 {
		if p.base.refuse(p.c) != "" {
			return 0, false
		}
		value = p.Solve()
		return value, value != fill.None
	}
	// The number of GPU instances that the splits of a profile share is not given. Try all
	// numbers, the fewest first. The states that they have in common are solved once.
	value = fill.None
	left, best := make([]int, len(p.splits)), make([]int, len(p.splits))
	for i := range left {
		left[i] = 1
	}
	for {
		t := p.base
		for i, s := range p.splits {
			p.Dims[s.dim].Left = left[i]
			t.add(p.c, s.profile, left[i])
		}
		if t.refuse(p.c) == "" {
			if v := p.Solve(); v > value {
				value = v
				copy(best, left)
			}
		}
		i := 0
		for ; i < len(left); i++ {
			if left[i]++; left[i] <= p.Dims[p.splits[i].dim].N {
				break
			}
			left[i] = 1
		}
		if i == len(left) {
			break
		}
	}
	for i, s := range p.splits {
		p.Dims[s.dim].Left = best[i]
	}
	return value, value != fill.None
}

// devices returns the devices in the target that choose found.
func (p *planner) devices() []Placement {
	out := make([]Placement, 0, 8)
	p.Target(func(part int) { out = append(out, p.holds[part]...) })
	slices.SortFunc(out, ComparePlacements)
	return out
}

// Feasible returns nil if an empty GPU could hold what is wanted, and otherwise the reason. The
// error wraps gpu.ErrInvalid for an unknown profile or a negative count, and gpu.ErrNoRoom if
// they do not all find room. If placements are not known (see [Card.Known]), nil means only that
// no known rule forbids it.
func (c *Card) Feasible(want []Count) error {
	all, err := c.merge(want)
	if err != nil {
		return err
	}
	for _, w := range all {
		if len(c.profiles[c.index(w.Profile.GPUInstance())].placements) == 0 {
			if reason := c.explain(all); reason != "" {
				return noRoom(all, reason)
			}
			return nil
		}
	}
	p := c.planner(nil, all)
	defer c.release(p)
	if err := p.list(); err != nil {
		return err
	}
	if _, ok := p.choose(); ok {
		return nil
	}
	reason := c.explain(all)
	if reason == "" {
		reason = "there is no way to place them all: " + c.places(all)
	}
	return noRoom(all, reason)
}

func noRoom(want []Count, reason string) error {
	return fmt.Errorf("%s: %s: %w", DescribeCounts(want), reason, gpu.ErrNoRoom)
}

// explain returns a rule that the wanted counts break wherever they are placed, or "".
func (c *Card) explain(want []Count) string {
	var t tally
	memory := 0
	slicesOf := map[int]int{}
	for _, w := range want {
		k := c.index(w.Profile.GPUInstance())
		p := &c.profiles[k]
		n := w.N
		if w.Profile.Compute != 0 {
			// The fewest GPU instances that could have so many compute slices.
			before := (slicesOf[k] + p.slices - 1) / p.slices
			slicesOf[k] += w.N * w.Profile.Compute
			n = (slicesOf[k]+p.slices-1)/p.slices - before
		}
		t.add(c, k, n)
		if len(p.placements) > 0 {
			size := maxMemory
			for _, s := range p.placements {
				size = min(size, s.Size)
			}
			memory += n * size
		}
	}
	if reason := t.refuse(c); reason != "" {
		return reason
	}
	if c.known && memory > c.memory {
		return fmt.Sprintf("they need %d memory slices and this GPU has %d", memory, c.memory)
	}
	return ""
}

// places describes where the wanted profiles can begin.
func (c *Card) places(want []Count) string {
	var all []string
	for i, w := range want {
		gi := w.Profile.GPUInstance()
		if i > 0 && gi == want[i-1].Profile.GPUInstance() {
			continue
		}
		var starts []string
		for _, s := range c.profiles[c.index(gi)].placements {
			starts = append(starts, strconv.Itoa(s.Start))
		}
		all = append(all, fmt.Sprintf("%s can begin at %s", gi, strings.Join(starts, ", ")))
	}
	return strings.Join(all, "; ")
}
