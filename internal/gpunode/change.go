// SPDX-License-Identifier: Apache-2.0

package gpunode

import (
	"reflect"
	"slices"
	"time"

	"example.com/gpu-agent/internal/piece"
)

// Change is how much two objects differ. It decides how soon the newer one is written.
type Change int

// Changes, the smallest first.
const (
	// Same: they are equal.
	Same Change = iota
	// Occupancy: more devices are held, and what is asked for still fits where it did before. A
	// pod's status names its devices, so no reader has to wait for the object.
	Occupancy
	// News: what a node offers, its health, a condition, devices that have become free, or the
	// largest request that fits. Of MIG devices, only whether one fits counts. If the object names
	// the holders, every change is News.
	News
)

// Since compares an object with the last one, which may be nil. It sets the conditions' times of
// the last change: now for those that have changed, the old time for others.
func (s *Status) Since(before *Status, now time.Time) Change {
	now = now.UTC().Truncate(time.Second) // as the API writes it
	if before == nil {
		before = &Status{}
	}
	keep(s.Conditions, before.Conditions, now)
	for i := range s.GPUs {
		var old []Condition
		if j := slices.IndexFunc(before.GPUs, func(g GPU) bool { return g.UUID == s.GPUs[i].UUID }); j >= 0 {
			old = before.GPUs[j].Conditions
		}
		keep(s.GPUs[i].Conditions, old, now)
	}
	switch {
	case reflect.DeepEqual(s, before):
		return Same
	case s.HoldersIn == InObject || s.frees(before) || !reflect.DeepEqual(s.lasting(), before.lasting()):
		return News
	}
	return Occupancy
}

// frees reports whether a device that was held before is free now. Only the object shows that,
// since a pod that has gone has no status.
func (s *Status) frees(before *Status) bool {
	now := map[string]*GPU{}
	for i := range s.GPUs {
		now[s.GPUs[i].UUID] = &s.GPUs[i]
	}
	for i := range before.GPUs {
		was := &before.GPUs[i]
		is := now[was.UUID]
		switch {
		case is == nil:
		case !was.Used.Within(is.Used):
			return true
		case was.MIG != nil && is.MIG != nil &&
			slices.ContainsFunc(was.MIG.Used, func(p string) bool { return !slices.Contains(is.MIG.Used, p) }):
			return true
		case was.Spot != nil && is.Spot != nil && was.Spot.frees(is.Spot):
			return true
		}
	}
	return false
}

// frees reports whether a device that a spot pod had is now free for guaranteed pods, or for others.
func (s *Spot) frees(is *Spot) bool {
	gone := func(was, is []string) bool {
		return slices.ContainsFunc(was, func(p string) bool { return !slices.Contains(is, p) })
	}
	return !s.Used.Within(is.Used) || gone(s.UsedPlacements, is.UsedPlacements) || !s.Yielding.Within(is.had()) ||
		gone(s.YieldingPlacements, slices.Concat(is.UsedPlacements, is.YieldingPlacements))
}

// had returns the numbers of the devices that spot pods have or give back.
func (s *Spot) had() piece.Set {
	numbers := slices.AppendSeq(slices.Collect(s.Used.All()), s.Yielding.All())
	slices.Sort(numbers)
	return piece.SetOf(slices.Compact(numbers))
}

// keep sets the times at which conditions last changed.
func keep(of, before []Condition, now time.Time) {
	for i := range of {
		c := &of[i]
		c.LastTransitionTime = now
		for _, o := range before {
			if o.Type == c.Type && o.Status == c.Status {
				c.LastTransitionTime = o.LastTransitionTime
			}
		}
	}
}

// lasting returns the object without what changes with every pod, except the largest requests.
func (s *Status) lasting() Status {
	out := *s
	out.Summary = Summary{Modes: s.Summary.Modes}
	out.Conditions = lasting(s.Conditions)
	out.Resources = slices.Clone(s.Resources)
	for i := range out.Resources {
		r := &out.Resources[i]
		if r.Free = 0; s.ofMIG(r.Name) {
			r.Largest = min(1, r.Largest) // containers ask for one device
		}
	}
	out.GPUs = slices.Clone(s.GPUs)
	for i := range out.GPUs {
		g := &out.GPUs[i]
		g.Used, g.Free, g.Largest, g.Conditions = nil, 0, 0, lasting(g.Conditions)
		g.ComputeGuarantee = "" // it changes when a container's first process comes
		g.Namespaces = 0
		if g.MIG != nil {
			m := *g.MIG
			m.Used, m.Warm, m.Largest, m.Offers = nil, nil, "", lastingOffers(m.Offers)
			g.MIG = &m
		}
		if g.Spot != nil {
			g.Spot = &Spot{Resource: g.Spot.Resource, Total: g.Spot.Total, Offers: lastingOffers(g.Spot.Offers)}
		}
	}
	return out
}

// lastingOffers returns offers without what changes with every pod.
func lastingOffers(of []Offer) []Offer {
	out := slices.Clone(of)
	for i := range out {
		out[i].Free, out[i].Largest = nil, 0
	}
	return out
}

// ofMIG reports whether a resource is one of MIG devices.
func (s *Status) ofMIG(resource string) bool {
	has := func(o Offer) bool { return o.Resource == resource }
	return slices.ContainsFunc(s.GPUs, func(g GPU) bool {
		return g.MIG != nil && slices.ContainsFunc(g.MIG.Offers, has) ||
			g.Spot != nil && slices.ContainsFunc(g.Spot.Offers, has)
	})
}

// lasting returns conditions without their messages, which may name pods.
func lasting(of []Condition) []Condition {
	out := slices.Clone(of)
	for i := range out {
		out[i].Message = ""
	}
	return out
}
