// SPDX-License-Identifier: Apache-2.0

package gpunode

import (
	"reflect"
	"slices"
	"time"
)

// Change says how much two objects differ, and so how soon the newer one is worth a write.
type Change int

// Changes, the smallest first.
const (
	// Same: they say the same.
	Same Change = iota
	// Occupancy: more devices are held. What is asked for can still be had where it could before. A
	// pod's status names its devices, so that nobody waits for the object to say so.
	Occupancy
	// News: what a node offers, its health, a condition, devices that are free again, or the largest
	// request that fits; of MIG devices, whether one does. Where holders are told in the object,
	// every change is.
	News
)

// Since compares an object with the one before it, which may be nil, and gives its
// conditions the times at which they last changed; now is that of those that have changed
// since.
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

// frees reports whether a device that was held before is free. Only the object says so: of a pod that has gone, no status
// is left.
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
		}
	}
	return false
}

// keep takes over when conditions have changed.
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

// lasting is the object without what comes and goes with every pod, but for the largest
// requests.
func (s *Status) lasting() Status {
	out := *s
	out.Summary = Summary{Modes: s.Summary.Modes}
	out.Conditions = lasting(s.Conditions)
	out.Resources = slices.Clone(s.Resources)
	for i := range out.Resources {
		r := &out.Resources[i]
		if r.Free = 0; s.ofMIG(r.Name) {
			r.Largest = min(1, r.Largest) // containers ask for one
		}
	}
	out.GPUs = slices.Clone(s.GPUs)
	for i := range out.GPUs {
		g := &out.GPUs[i]
		g.Used, g.Free, g.Largest, g.Conditions = nil, 0, 0, lasting(g.Conditions)
		if g.MIG == nil {
			continue
		}
		m := *g.MIG
		m.Used, m.Warm, m.Largest = nil, nil, ""
		m.Offers = slices.Clone(m.Offers)
		for j := range m.Offers {
			m.Offers[j].Free, m.Offers[j].Largest = nil, 0
		}
		g.MIG = &m
	}
	return out
}

// ofMIG reports whether a resource is of MIG devices.
func (s *Status) ofMIG(resource string) bool {
	return slices.ContainsFunc(s.GPUs, func(g GPU) bool {
		return g.MIG != nil && slices.ContainsFunc(g.MIG.Offers, func(o Offer) bool { return o.Resource == resource })
	})
}

// lasting are conditions without their messages, which may name pods.
func lasting(of []Condition) []Condition {
	out := slices.Clone(of)
	for i := range out {
		out[i].Message = ""
	}
	return out
}
