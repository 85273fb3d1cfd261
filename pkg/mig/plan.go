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

// Count is a part of a geometry: N devices of a profile. For a split, N counts compute instances.
type Count struct {
	Profile Name
	N       int
}

// Standing is a device that exists.
type Standing struct {
	Placement
	// Pinned is true if no step may destroy it. Holder (a pod, a process) and Reason describe
	// why; both may be empty.
	Pinned         bool
	Holder, Reason string
	// Yields is true if the holder of a pinned instance is asked to end for a plan that needs the room. Where
	// one of several holders must end, it is one that yields.
	Yields bool
	// Empty is true for a GPU instance that was left without a compute instance.
	Empty bool
}

// Op is what a step does.
type Op string

// Ops. Enable and Disable change MIG mode and have a zero Placement.
const (
	Destroy Op = "destroy"
	Create  Op = "create"
	Enable  Op = "enable"
	Disable Op = "disable"
)

// Step is one change of one GPU.
type Step struct {
	Op Op
	Placement
}

// String returns "create 3g.40gb@4", or "enable MIG mode".
func (s Step) String() string {
	if s.Op == Enable || s.Op == Disable {
		return string(s.Op) + " MIG mode"
	}
	return string(s.Op) + " " + s.Placement.String()
}

// Plan is how one GPU changes to what is wanted.
type Plan struct {
	// Steps are to be done in order. It is empty if nothing has to change, and if Blocked is not.
	Steps []Step
	// Result is what exists after the steps; if blocked, what exists now.
	Result []Placement
	// Keep is what exists now and stays in the target; if blocked, in the target for the time
	// when the holders in Blocked have ended.
	Keep []Placement
	// Blocked is the smallest set of holders that must end first.
	Blocked []Standing
}

// Target is the wanted state of a GPU.
type Target struct {
	// MIG is true if MIG mode is wanted.
	MIG bool
	// OnDemand is true if instances are created by [Card.Make]; Geometry is ignored then.
	OnDemand bool
	Geometry []Count
}

// Plan finds the steps from what exists to what is wanted. They destroy the fewest instances,
// then create the fewest, then leave the most room; of equals, Plan takes the one whose
// placements come first from left to right. If pinned instances are in the way, there are no
// steps, and Blocked has the instances. It fails as Feasible does, and with gpu.ErrNotSupported
// if placements are not known.
func (c *Card) Plan(standing []Standing, want []Count) (Plan, error) {
	all, err := c.merge(want)
	if err != nil {
		return Plan{}, err
	}
	for _, w := range all {
		if p := &c.profiles[c.index(w.Profile.GPUInstance())]; len(p.placements) == 0 {
			return Plan{}, fmt.Errorf("plan: the driver does not report where %s can be placed: %w",
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
	return Plan{}, noRoom(all, "not beside the instances that exist")
}

// maxShared bounds the number of holders with several instances whose sets are all tried. A further
// such holder counts once for each of its instances.
const maxShared = 6

// dismiss finds the target that needs the fewest holders to end, or nil if there is none. For a
// holder of one instance, keeping that instance adds to the value. For the holders of several, it
// tries each set that ends: the instances of the others are fixed.
func (p *planner) dismiss() ([]Placement, error) {
	var shared []string
	pinnedFor := func(h string) func(Standing) bool {
		return func(o Standing) bool { return o.Pinned && o.Holder == h }
	}
	for i := range p.standing {
		if o := &p.standing[i]; o.Pinned && !o.Yields && o.Holder != "" && !slices.Contains(shared, o.Holder) &&
			slices.ContainsFunc(p.standing[:i], pinnedFor(o.Holder)) {
			shared = append(shared, o.Holder)
		}
	}
	slices.Sort(shared)
	shared = shared[:min(len(shared), maxShared)]
	for i := range p.standing {
		if o := &p.standing[i]; o.Pinned && !o.Yields && !slices.Contains(shared, o.Holder) {
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

// blocked is the plan for a target that some pinned instances must end for.
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

// sort puts steps, kept and blocked instances in order.
func (p *Plan) sort() {
	slices.SortStableFunc(p.Steps, func(a, b Step) int { return ComparePlacements(a.Placement, b.Placement) })
	slices.SortFunc(p.Keep, ComparePlacements)
	slices.SortStableFunc(p.Blocked, compareStanding)
}

func compareStanding(a, b Standing) int { return ComparePlacements(a.Placement, b.Placement) }

// placements returns the devices that exist, in order.
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

// change returns the plan from what exists to a target: destroys first, then creates, each from
// left to right.
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

// Make finds the steps that create s on a GPU whose instances are created on demand. It destroys
// only idle instances that are in the way: the fewest, and of equal choices those that leave the
// most room. Blocked is the smallest set of holders in the way. If s exists already there are no
// steps. The error wraps gpu.ErrInvalid if the card does not have the placement.
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
	// All that clash must go. Others must go only if the card has too few engines, or allows too
	// few of a profile.
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

// maxYield bounds a search of Make. It tries all sets of the other GPU instances, to find those
// that must go although they do not clash. If there are more than maxYield, the last ones go
// first.
const maxYield = 14

// yield marks in goes the further GPU instances that must be destroyed, so that the card allows s
// beside the rest.
func (c *Card) yield(standing []Standing, s Placement, goes []bool) {
	var t tally
	var gis []int // indices into standing: the first in each GPU instance that stays
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
		// This does not occur on a real card: the last ones go until few enough are left.
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

// cost is the cost of destroying some instances. The fields are compared in order: holders that
// must end, pinned instances, others, and the room that is left on the GPU, as a negative number.
type cost struct {
	holders, instances, yields, destroys int
	room                                 int64
}

func (a cost) compare(b cost) int {
	return cmp.Or(cmp.Compare(a.holders, b.holders), cmp.Compare(a.instances, b.instances),
		cmp.Compare(a.yields, b.yields), cmp.Compare(a.destroys, b.destroys), cmp.Compare(a.room, b.room))
}

// costOf returns the cost of destroying the marked instances.
func costOf(standing []Standing, goes []bool, room int64) cost {
	sum := cost{room: room}
	for i, o := range standing {
		switch {
		case !goes[i]:
		case !o.Pinned:
			sum.destroys++
		case o.Yields:
			sum.yields++
		default:
			sum.instances++
			before := func(e Standing) bool { return e.Holder == o.Holder && e.Pinned && !e.Yields }
			if o.Holder == "" || !slices.ContainsFunc(standing[:i], before) {
				sum.holders++
			}
		}
	}
	return sum
}

// mark marks all devices in the GPU instance of standing[k].
func mark(standing []Standing, k int, goes []bool) {
	for i := range standing {
		if standing[i].sameGI(standing[k].Placement) {
			goes[i] = true
		}
	}
}

// Change finds the steps that change a GPU to what is wanted, including MIG mode. Enabling MIG is
// the first step, disabling it the last. If the pending mode is not the wanted one, the mode is
// set again, which completes a step that was interrupted. Setting a mode twice does no harm.
//
// If MIG must be enabled and placements are not known before, that is the only step; the next
// plan has the rest. A change of mode waits for all that is pinned, also for a Standing with a
// zero Placement: a holder of the whole GPU.
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
	// The mode is off: only holders of the whole GPU exist.
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

// off returns the plan that destroys all instances and disables MIG mode.
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

// Stand lists the instances of a GPU in an inventory, in order. Busy instances are pinned. So are
// those whose profile's name cannot be read, because this package could not create another one in
// their place.
//
// An inventory written by hand may be incomplete. A missing size is looked up in the profiles. If
// compute instances of one GPU instance all have the same compute slices, they are placed side by
// side.
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

// beside returns the compute slice at which a split begins, in a GPU instance with that many: its
// own, or the first free one if another split has that.
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
