// SPDX-License-Identifier: Apache-2.0

package kueue

import (
	"cmp"
	"maps"
	"slices"
	"strings"
)

// names reads what objects say in the words of a domain: which check asks what, and what was written into a workload.
// Its methods know neither books nor holds.
type names struct {
	// domain is that of controllers, labels and annotations.
	domain string
}

// key is that of a workload's hold. Once a check has told the pods a key, it is that one, also after the workload
// got an owner, as prebuilt ones do. Checks that an earlier build wrote may have an owner's UID there. Until then
// it is what no other object gets and no edit changes: the workload's UID. The workloads of an elastic job replace
// each other while its pods run on, so their key is the name that they share.
func (n names) key(w *Workload) string {
	for _, s := range w.Checks {
		for _, u := range s.PodSetUpdates {
			if key := u.Annotations[n.domain+"/"+holdName]; key != "" {
				return key
			}
		}
	}
	return cmp.Or(w.Annotations[sliceName], w.UID)
}

// id is that of a workload's hold.
func (n names) id(w *Workload) string { return id(w.Namespace, n.key(w)) }

// is reports whether a check asks a question.
func (n names) is(v *View, check, question string) bool {
	k := v.Checks[check]
	return k != nil && k.Controller == n.domain+"/"+question
}

// room reports whether a check asks for room on-prem.
func (n names) room(v *View, check string) bool {
	return n.is(v, check, onPremName) || n.is(v, check, urgentName)
}

// Inactive are the placer's checks whose condition Active is not set yet.
func (n names) Inactive(v *View) (out []*Check) {
	for _, name := range slices.Sorted(maps.Keys(v.Checks)) {
		if k := v.Checks[name]; !k.Active && (n.room(v, name) || n.is(v, name, cloudName)) {
			out = append(out, k)
		}
	}
	return out
}

// returns reports whether a workload was told to come back from a cloud, and has quota there yet.
func (n names) returns(w *Workload, v *View) bool {
	told := func(s CheckState) bool { return s.State == Retry && n.is(v, s.Name, cloudName) }
	return w.Reserved && (w.Evicted || slices.ContainsFunc(w.Checks, told))
}

// refused are the flavors that a workload was kept from. Told is true if there were some once, and
// mine if the annotation with its flavors is the placer's or missing.
func (n names) refused(w *Workload) (flavors []string, told, mine bool) {
	text, told := w.Annotations[n.domain+"/"+refusedName]
	for name := range strings.SplitSeq(text, ",") {
		if name != "" {
			flavors = append(flavors, name)
		}
	}
	_, limited := w.Annotations[allowedFlavors]
	return flavors, told, told || !limited
}

// count counts the checks that are answered here.
func (n names) count(v *View) map[string]int {
	out := map[string]int{}
	for _, w := range v.Workloads {
		for _, s := range w.Checks {
			if w.Reserved && !w.Over && (n.room(v, s.Name) || n.is(v, s.Name, cloudName)) {
				out[s.State]++
			}
		}
	}
	return out
}

// annotations keep a workload from some flavors. Kueue does not try a workload again that looks like
// one that it had no quota for, until quota is freed; workloads look alike if they have the same text
// about flavors. So a workload that may have them all is told so in two ways
// by turns: by their names, and by nothing.
func (n names) annotations(v *View, w *Workload, refused []string) map[string]*string {
	text := strings.Join(refused, ",")
	out := map[string]*string{n.domain + "/" + refusedName: &text, allowedFlavors: nil}
	if _, limited := w.Annotations[allowedFlavors]; len(refused) > 0 || !limited {
		kept := func(name string) bool { return slices.Contains(refused, name) }
		others := slices.DeleteFunc(slices.Sorted(maps.Keys(v.Flavors)), kept)
		allowed := strings.Join(others, ",")
		out[allowedFlavors] = &allowed
	}
	return out
}

// split reports whether a workload has sets on-prem and others in a cloud: it has the checks of both.
func (n names) split(w *Workload, v *View) bool {
	var here, there bool
	for i := range w.Checks {
		here = here || n.room(v, w.Checks[i].Name)
		there = there || n.is(v, w.Checks[i].Name, cloudName)
	}
	return here && there
}

// written are the nodes of each set's pods, by what updates has written.
func (n names) written(w *Workload, updates []Update) (at [][]string) {
	for i := range w.Sets {
		var of []string
		for _, u := range updates {
			if u.Name == w.Sets[i].Name {
				of = uncount(u.Annotations[n.domain+"/"+nodesName])
			}
		}
		at = append(at, of)
	}
	return at
}
