// SPDX-License-Identifier: Apache-2.0

package mig

import (
	"cmp"
	"fmt"
	"math"
	"math/bits"
	"slices"

	"example.com/gpu-agent/pkg/gpu"
)

// Count is a part of a geometry: N devices of a profile. Of a split the count
// is of compute instances.
type Count struct {
	Profile Name
	N       int
}

// Standing is a device that exists.
type Standing struct {
	Placement
	// Pinned says that nothing may touch it; Holder (a pod, a process) and
	// Reason say why. Either may be empty.
	Pinned         bool
	Holder, Reason string
	// Empty is a GPU instance without a compute instance, a leftover.
	Empty bool
}

// Op is what a step does.
type Op string

// Ops. Enable and Disable are about MIG mode and have a zero Placement.
const (
	Destroy Op = "destroy"
	Create  Op = "create"
	Enable  Op = "enable"
	Disable Op = "disable"
)

// Step is one thing to do on one GPU.
type Step struct {
	Op Op
	Placement
}

// String is "create 3g.40gb@4", or "enable".
func (s Step) String() string {
	if s.Op == Enable || s.Op == Disable {
		return string(s.Op) + " MIG mode"
	}
	return string(s.Op) + " " + s.Placement.String()
}

// Plan is how one GPU becomes what is wanted.
type Plan struct {
	// Steps are to be done in order; empty where nothing is to do, and where
	// something is in the way.
	Steps []Step
	// Result is what exists afterwards; where blocked, what exists now.
	Result []Placement
	// Keep is what exists now and stays in the target; where blocked, in the
	// target that is to come when those in the way are gone.
	Keep []Placement
	// Blocked is the smallest set of holders in the way.
	Blocked []Standing
}

// Target is what a GPU is to become.
type Target struct {
	// MIG is the mode.
	MIG bool
	// OnDemand leaves instances to [Card.Make]; Geometry is ignored then.
	OnDemand bool
	Geometry []Count
}

// Plan finds the steps from what exists to what is wanted: those that destroy
// the fewest instances, then create the fewest, then leave the most room; of
// equals the one whose placements come first, from left to right. Where something
// pinned is in the way there is no step, and Blocked says what. It fails as
// Feasible does, and with gpu.ErrNotSupported where placements are not known.
func (c *Card) Plan(standing []Standing, want []Count) (Plan, error) {
	all, err := c.merge(want)
	if err != nil {
		return Plan{}, err
	}
	for _, w := range all {
		if p := &c.profiles[c.index(w.Profile.GPUInstance())]; len(p.placements) == 0 {
			return Plan{}, fmt.Errorf("plan: the driver does not tell where %s can stand: %w",
				p.name, gpu.ErrNotSupported)
		}
	}
	if len(standing) > maxStanding {
		return Plan{}, errTooLarge
	}
	p := c.planner(standing, all)
	defer c.release(p)
	pinned := 0
	for i := range standing {
		switch o := &standing[i]; {
		case o.Pinned:
			p.value[i] = instanceUnit + destroyUnit + createUnit
			p.fixed[i] = true
			pinned++
		case o.Empty:
			p.value[i] = destroyUnit
		default:
			p.value[i] = destroyUnit + createUnit
		}
	}
	if err := p.list(); err != nil {
		return Plan{}, err
	}
	if _, ok := p.choose(); ok {
		return change(standing, p.devices()), nil
	}
	if pinned > 0 {
		target, err := p.dismiss()
		if err != nil {
			return Plan{}, err
		}
		if target != nil {
			return blocked(standing, target), nil
		}
	}
	if err := c.Feasible(want); err != nil {
		return Plan{}, err
	}
	return Plan{}, noRoom(all, "not with what stands")
}

// maxShared bounds the holders of several instances among whom the smallest
// set is searched for; further ones count once for each of theirs.
const maxShared = 6

// dismiss finds the target for which the fewest holders must end, nil if there is
// none. A holder of one instance is a matter of value: keeping that instance
// saves a holder. Of those that hold several, every set is tried: the others'
// are fixed.
func (p *planner) dismiss() ([]Placement, error) {
	var shared []string
	pinnedFor := func(h string) func(Standing) bool {
		return func(o Standing) bool { return o.Pinned && o.Holder == h }
	}
	for i := range p.standing {
		if o := &p.standing[i]; o.Pinned && o.Holder != "" && !slices.Contains(shared, o.Holder) &&
			slices.ContainsFunc(p.standing[:i], pinnedFor(o.Holder)) {
			shared = append(shared, o.Holder)
		}
	}
	slices.Sort(shared)
	shared = shared[:min(len(shared), maxShared)]
	for i := range p.standing {
		if o := &p.standing[i]; o.Pinned && !slices.Contains(shared, o.Holder) {
			p.value[i] += holderUnit
		}
	}
	var target []Placement
	most := int64(math.MinInt64)
	for set := range 1 << len(shared) {
		for i := range p.standing {
			h := slices.Index(shared, p.standing[i].Holder)
			p.fixed[i] = p.standing[i].Pinned && h >= 0 && set>>h&1 == 0
		}
		if err := p.list(); err != nil {
			return nil, err
		}
		v, ok := p.choose()
		if v -= int64(bits.OnesCount(uint(set))) * holderUnit; ok && v > most {
			most, target = v, p.devices()
		}
	}
	return target, nil
}

// blocked is the plan for a target that pinned instances stand in the way of.
func blocked(standing []Standing, target []Placement) Plan {
	plan := change(standing, target)
	plan.Steps = nil
	plan.Result = placements(standing)
	for _, o := range standing {
		if o.Pinned && (o.Empty || !slices.Contains(target, o.Placement)) {
			plan.Blocked = append(plan.Blocked, o)
		}
	}
	plan.sort()
	return plan
}

// sort puts what is to be destroyed, what stays and what is in the way in order.
func (p *Plan) sort() {
	slices.SortStableFunc(p.Steps, func(a, b Step) int { return ComparePlacements(a.Placement, b.Placement) })
	slices.SortFunc(p.Keep, ComparePlacements)
	slices.SortStableFunc(p.Blocked, compareStanding)
}

func compareStanding(a, b Standing) int { return ComparePlacements(a.Placement, b.Placement) }

// placements are the devices that exist, in order.
func placements(standing []Standing) []Placement {
	out := make([]Placement, 0, len(standing))
	for _, o := range standing {
		if !o.Empty {
			out = append(out, o.Placement)
		}
	}
	slices.SortFunc(out, ComparePlacements)
	return out
}

// change is the way from what exists to a target: first what is destroyed, then what is
// created, each from left to right.
func change(standing []Standing, target []Placement) Plan {
	plan := Plan{Result: target}
	for i, o := range standing {
		switch {
		case !o.Empty && slices.Contains(target, o.Placement):
			if first(standing, i) {
				plan.Keep = append(plan.Keep, o.Placement)
			}
		case o.Empty && slices.ContainsFunc(target, o.sameGI):
		default:
			plan.Steps = append(plan.Steps, Step{Destroy, o.Placement})
		}
	}
	plan.sort()
	for _, s := range target {
		if !slices.Contains(plan.Keep, s) {
			plan.Steps = append(plan.Steps, Step{Create, s})
		}
	}
	return plan
}

// Make finds the steps that create s on a GPU whose instances are created on demand.
// Idle instances stay unless they are in the way. Of those in the way the fewest are
// destroyed, and of equal choices the one that leaves the most room. Blocked is the
// smallest set of holders in the way. If s exists already there is nothing to do. A
// placement that the card does not have is gpu.ErrInvalid.
func (c *Card) Make(standing []Standing, s Placement) (Plan, error) {
	if own, ok := c.Placement(s.Profile, s.Start, s.CI); !ok || own != s {
		return Plan{}, fmt.Errorf("make %s: this GPU has no such placement; %s: %w", s, c.names(), gpu.ErrInvalid)
	}
	if len(standing) > maxStanding {
		return Plan{}, errTooLarge
	}
	now := placements(standing)
	if slices.Contains(now, s) {
		return Plan{Result: now, Keep: now}, nil
	}
	// What clashes must go in any case. What else does is a question only where
	// the card has too few engines, or allows too few of a profile.
	goes := make([]bool, len(standing))
	for i, o := range standing {
		if o.Empty {
			goes[i] = o.mask()&s.mask() != 0 && (o.Pinned || !o.sameGI(s))
		} else {
			goes[i] = s.clash(o.Placement)
		}
	}
	c.yield(standing, s, goes)
	var plan Plan
	for i, o := range standing {
		switch {
		case !goes[i]:
			if !o.Empty {
				plan.Keep = append(plan.Keep, o.Placement)
			}
		case o.Pinned:
			plan.Blocked = append(plan.Blocked, o)
		default:
			plan.Steps = append(plan.Steps, Step{Destroy, o.Placement})
		}
	}
	plan.sort()
	if len(plan.Blocked) > 0 {
		plan.Steps, plan.Result = nil, now
		return plan, nil
	}
	plan.Steps = append(plan.Steps, Step{Create, s})
	plan.Result = append(slices.Clone(plan.Keep), s)
	slices.SortFunc(plan.Result, ComparePlacements)
	return plan, nil
}

// maxYield bounds the GPU instances among which Make searches for those that
// must go though they are not in the way; of more it lets them go one by one.
const maxYield = 14

// yield marks which other GPU instances must be destroyed so that the card allows s
// beside the rest.
func (c *Card) yield(standing []Standing, s Placement, goes []bool) {
	var t tally
	var gis []int // of standing, the first in each GPU instance that stays
	own := false
	for i, o := range standing {
		if goes[i] || o.mask() == 0 {
			continue
		}
		if o.sameGI(s) {
			own = true
		}
		if slices.ContainsFunc(gis, func(k int) bool { return standing[k].sameGI(o.Placement) }) {
			continue
		}
		gis = append(gis, i)
		if k := c.index(o.Profile.GPUInstance()); k >= 0 {
			t.add(c, k, 1)
		}
	}
	kind := c.index(s.Profile.GPUInstance())
	if own || t.allows(c, kind) {
		return
	}
	for len(gis) > maxYield {
		// Never seen on a real card: the last ones go until few enough are left.
		k := gis[len(gis)-1]
		gis = gis[:len(gis)-1]
		mark(standing, k, goes)
		if i := c.index(standing[k].Profile.GPUInstance()); i >= 0 {
			t.add(c, i, -1)
		}
	}
	var best cost
	var chosen []bool
	for set := range 1 << len(gis) {
		rest := t
		out := slices.Clone(goes)
		taken := s.mask()
		for b, k := range gis {
			if set>>b&1 == 0 {
				taken |= standing[k].mask()
				continue
			}
			mark(standing, k, out)
			if i := c.index(standing[k].Profile.GPUInstance()); i >= 0 {
				rest.add(c, i, -1)
			}
		}
		if !rest.allows(c, kind) {
			continue
		}
		if now := costOf(standing, out, -c.worth(taken)); chosen == nil || now.compare(best) < 0 {
			best, chosen = now, out
		}
	}
	if chosen != nil {
		copy(goes, chosen)
	}
}

// cost is what it costs to destroy some instances: first the holders that must end, then
// pinned instances, then others, then what could still be created on the GPU (negative).
type cost struct {
	holders, instances, destroys int
	room                         int64
}

func (a cost) compare(b cost) int {
	return cmp.Or(cmp.Compare(a.holders, b.holders), cmp.Compare(a.instances, b.instances),
		cmp.Compare(a.destroys, b.destroys), cmp.Compare(a.room, b.room))
}

// costOf is the cost of destroying the marked instances.
func costOf(standing []Standing, goes []bool, room int64) cost {
	sum := cost{room: room}
	for i, o := range standing {
		switch {
		case !goes[i]:
		case !o.Pinned:
			sum.destroys++
		default:
			sum.instances++
			before := func(e Standing) bool { return e.Holder == o.Holder && e.Pinned }
			if o.Holder == "" || !slices.ContainsFunc(standing[:i], before) {
				sum.holders++
			}
		}
	}
	return sum
}

// mark marks everything in the GPU instance of standing[k].
func mark(standing []Standing, k int, goes []bool) {
	for i := range standing {
		if standing[i].sameGI(standing[k].Placement) {
			goes[i] = true
		}
	}
}

// Change finds the steps that make a GPU what is wanted, MIG mode included.
// The mode comes first where it goes on and last where it goes off. A mode that
// is pending and not the wanted one is set once more, so that a step that was
// cut short is made whole: setting a mode twice does no harm.
//
// Where MIG must go on and placements are not known before, turning it on is
// the only step; a later plan sees them. A change of mode waits for all that is
// pinned, also for a Standing with a zero Placement: a holder of the whole GPU.
func Change(m *gpu.MIG, c *Card, standing []Standing, to Target) (Plan, error) {
	pending := m.Enabled
	if m.Pending != nil {
		pending = *m.Pending
	}
	switch {
	case to.MIG:
	case m.Enabled:
		return off(standing), nil
	case pending:
		return Plan{Steps: []Step{{Op: Disable}}}, nil
	default:
		return Plan{}, nil
	}
	if !m.Capable && !m.Enabled && len(m.Profiles) == 0 {
		return Plan{}, fmt.Errorf("turn MIG mode on: this GPU has none: %w", gpu.ErrNotSupported)
	}
	if m.Enabled {
		plan := Plan{Result: placements(standing), Keep: placements(standing)}
		if !to.OnDemand {
			var err error
			if plan, err = c.Plan(standing, to.Geometry); err != nil {
				return Plan{}, err
			}
		}
		if !pending && len(plan.Blocked) == 0 {
			plan.Steps = slices.Insert(plan.Steps, 0, Step{Op: Enable})
		}
		return plan, nil
	}
	// Mode off: nothing stands but holders of the whole GPU.
	if plan := off(standing); len(plan.Blocked) > 0 {
		return plan, nil
	}
	plan := Plan{}
	if !to.OnDemand && c.Known() {
		var err error
		if plan, err = c.Plan(nil, to.Geometry); err != nil {
			return Plan{}, err
		}
	} else if !to.OnDemand {
		if err := c.Feasible(to.Geometry); err != nil {
			return Plan{}, err
		}
	}
	plan.Steps = slices.Insert(plan.Steps, 0, Step{Op: Enable})
	return plan, nil
}

// off destroys all instances and turns MIG mode off.
func off(standing []Standing) Plan {
	var plan Plan
	for _, o := range standing {
		plan.Steps = append(plan.Steps, Step{Destroy, o.Placement})
		if o.Pinned {
			plan.Blocked = append(plan.Blocked, o)
		}
	}
	plan.sort()
	if len(plan.Blocked) > 0 {
		return Plan{Blocked: plan.Blocked, Result: placements(standing)}
	}
	plan.Steps = append(plan.Steps, Step{Op: Disable})
	return plan
}

// Stand lists what exists on a GPU according to an inventory, in order. Busy instances
// are pinned. So are those whose profile's name cannot be read, because this package
// could not say what to create in their place.
//
// An inventory written by hand may leave things out. A missing size is looked up in the
// profiles, and compute instances of one GPU instance that all name the same compute
// slices are placed side by side.
func Stand(m *gpu.MIG) []Standing {
	out := make([]Standing, 0, len(m.Instances))
	for i := range m.Instances {
		in := &m.Instances[i]
		o := Standing{Placement: Placement{Start: in.Start, Size: in.Size}, Holder: in.Holder, Empty: in.CI < 0}
		if in.Busy {
			o.Pinned, o.Reason = true, "busy"
		}
		name, reason := parse(Canonical(in.Profile))
		if reason != "" {
			o.Pinned = true
			o.Reason = fmt.Sprintf("its profile %s has a name that cannot be read: %s", quote(in.Profile), reason)
			out = append(out, o)
			continue
		}
		o.Profile = name
		if o.Empty {
			o.Profile = name.GPUInstance()
		}
		var p gpu.Profile
		whole := name.GPUInstance().String()
		if k := slices.IndexFunc(m.Profiles, func(p gpu.Profile) bool { return p.Name == whole }); k >= 0 {
			p = m.Profiles[k]
		}
		for _, at := range p.Placements {
			if o.Size == 0 && at.Start == o.Start {
				o.Size = at.Size
			}
		}
		if o.Profile.Compute != 0 {
			o.CI = in.CIStart
			o.CI = beside(out, o.Placement, cmp.Or(p.Slices, name.Slices))
		}
		out = append(out, o)
	}
	slices.SortStableFunc(out, compareStanding)
	return out
}

// beside is the compute slice at which a split begins, of a GPU instance with that many:
// the one that it names, or the first free one if others have that.
func beside(out []Standing, s Placement, of int) int {
	free := func(ci int) bool {
		at := s
		at.CI = ci
		return !slices.ContainsFunc(out, func(o Standing) bool {
			return !o.Empty && at.sameGI(o.Placement) && at.compute()&o.compute() != 0
		})
	}
	if free(s.CI) {
		return s.CI
	}
	p := profile{slices: of}
	for ci := range min(of, maxSlices) {
		if p.holds(s.Profile.Compute, ci) && free(ci) {
			return ci
		}
	}
	return s.CI
}
