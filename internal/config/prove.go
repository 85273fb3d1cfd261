// SPDX-License-Identifier: Apache-2.0

package config

import (
	"errors"
	"fmt"
	"math/bits"
	"slices"
	"strings"

	"example.com/gpu-agent/pkg/gpu"
	"example.com/gpu-agent/pkg/mig"
	"example.com/gpu-agent/pkg/timeslice"
)

// noShares is why a GPU without memory of its own cannot be shared. The kubelet gives out the
// machine's memory already, so shares of it would be given out twice. And nothing could limit a
// container to its share: the GPU can also use what a program allocates on the host.
const noShares = "the driver reports no memory for it, as for a GPU that uses the machine's, " +
	"so there is nothing to share: %s work"

// prove checks whether a GPU can have the layout of an entry, from its driver's figures. reason
// is why it cannot, as a sentence without the GPU's name; it is empty if the GPU can. unproven
// is Want.Unproven.
func prove(w *Want, d *gpu.Device) (unproven bool, reason string) {
	m := &d.MIG
	switch {
	case d.Memory == 0 && d.Fault == "" && (w.Mode == Shared || w.Mode == Dynamic):
		can := withoutMIG(d)
		if m.Capable {
			can = "whole, mig and off"
		}
		return false, fmt.Sprintf(noShares, can)
	case w.Mode != MIG && w.Mode != Dynamic:
		return false, ""
	case d.Fault != "" && len(m.Profiles) == 0:
		return true, "" // a faulty GPU must not stop the others from being configured
	case !m.Capable:
		return false, "this model has no MIG: " + withoutMIG(d) + " work"
	case len(m.Profiles) == 0:
		return false, "the driver reports no MIG profiles, which drivers do from R510 on: " + withoutMIG(d) + " work"
	}
	var have []mig.Name
	for _, p := range m.Profiles {
		if n, err := mig.Parse(p.Name); err == nil {
			have = append(have, n)
		}
	}
	if len(have) == 0 {
		_, odd := mig.NewCard(m)
		return false, "this version knows none of its MIG profiles, so nothing could be offered: " + withoutMIG(d) +
			" work; " + sentence(odd)
	}
	slices.SortFunc(have, mig.Compare)
	var lacks []string
	for _, n := range slices.Concat(w.Profiles, profilesOf(w.Geometry)) {
		if !slices.Contains(have, n.GPUInstance()) {
			lacks = append(lacks, n.String())
		}
	}
	if len(lacks) > 0 {
		return false, fmt.Sprintf("there is no profile %s: there are %s", list(lacks, "or"), join(have))
	}
	if !w.OnDemand && len(w.Geometry) == 0 {
		return false, ""
	}
	card, odd := mig.NewCard(m)
	if w.OnDemand {
		return false, onDemand(w, m, card, odd)
	}
	if err := card.Feasible(w.Geometry); err != nil {
		return false, sentence(errors.Join(err, odd))
	}
	return !card.Known(), ""
}

// withoutMIG lists the modes of a GPU that need no MIG.
func withoutMIG(d *gpu.Device) string {
	if d.Memory == 0 && d.Fault == "" {
		return "whole and off"
	}
	return "whole, shared and off"
}

// onDemand returns why a GPU would offer no placement on demand. It is empty if it would offer
// some, and if its driver reports placements only while MIG is on. card is the GPU's card, and
// odd is the error of what had to be left out of it.
func onDemand(w *Want, m *gpu.MIG, card *mig.Card, odd error) string {
	wanted := func(n mig.Name) bool { return len(w.Profiles) == 0 || slices.Contains(w.Profiles, n) }
	if slices.ContainsFunc(card.Placements(), func(p mig.Placement) bool { return wanted(p.Profile) }) {
		return ""
	}
	var of []mig.Name // never empty: prove has checked that
	told := m.Enabled
	for i := range m.Profiles {
		if n, err := mig.Parse(m.Profiles[i].Name); err == nil && wanted(n) {
			of, told = append(of, n), told || len(m.Profiles[i].Placements) > 0
		}
	}
	switch {
	case !told:
		return ""
	case odd != nil:
		return "it would offer nothing: " + sentence(odd)
	}
	return fmt.Sprintf("it would offer nothing: the driver reports no placement for %s, although MIG is on", join(of))
}

// memoryUnits returns why a GPU would offer no unit of memory, in the form of prove. It is
// empty if the GPU would offer some, or is not to offer any.
func memoryUnits(w *Want, d *gpu.Device, unit gpu.MiB) string {
	inUnits := w.Mode == Shared && w.Replicas == 0 || w.Mode == Dynamic
	switch {
	case !inUnits || unit == 0 || d.Fault != "" || timeslice.Units(d, unit) > 0:
		return "" // a faulty GPU must not stop the others from being configured
	case d.Usable() == 0:
		return "it would offer no unit of memory: the driver reports no memory for programs; " +
			"give it replicas, or the mode whole"
	}
	return fmt.Sprintf("it would offer no unit of memory: one is %d MiB (--memory-unit), "+
		"and programs can have %d MiB of this GPU; set --memory-unit to %d MiB or less, "+
		"or give the GPU replicas or the mode whole",
		unit, d.Usable(), 1<<(bits.Len64(uint64(d.Usable()))-1))
}

// sentence returns an error's text on one line, without the kinds of error, which are for
// programs.
func sentence(err error) string {
	var parts []string
	for line := range strings.Lines(err.Error()) {
		line = strings.TrimSpace(line)
		for _, kind := range []error{gpu.ErrNoRoom, gpu.ErrInvalid} {
			line = strings.TrimSuffix(line, ": "+kind.Error())
		}
		parts = append(parts, line)
	}
	return strings.Join(parts, "; ")
}

func profilesOf(counts []mig.Count) []mig.Name {
	names := make([]mig.Name, len(counts))
	for i, c := range counts {
		names[i] = c.Profile
	}
	return names
}

func join(names []mig.Name) string {
	words := make([]string, len(names))
	for i, n := range names {
		words[i] = n.String()
	}
	return list(words, "and")
}

// Prove returns an error if it is not known of some GPUs whether they can have the wanted
// layout. The error is an Errors with one mistake for each entry, which names the GPUs. It is
// nil if all are proven.
func (f *File) Prove(d Desired, inv *gpu.Inventory) error {
	m := &mistakes{file: f.name}
	open := byLine{}
	for i, w := range d.GPUs {
		if !w.Unproven {
			continue
		}
		reason := "the driver reports placements only while MIG is on, so it is not known yet whether this fits: " +
			"turn MIG on, or take an inventory of such a GPU in MIG mode"
		if fault := inv.GPUs[i].Fault; fault != "" {
			reason = "the driver cannot describe it, so it is not known whether this fits: " + fault
		}
		open.add(w.Line, reason, inv.GPUs[i].Index)
	}
	open.tell(m)
	return m.err()
}

// byLine has the reasons against a partition on a node, by the line of the file. Each reason
// has the GPUs that it is true for, in the order they were found. A node has up to 16 GPUs, so
// they share one message.
type byLine map[int][]refusal

type refusal struct {
	reason string
	gpus   []int
}

// add adds a reason, unless it is empty.
func (b byLine) add(line int, reason string, index int) {
	if reason == "" {
		return
	}
	at := slices.IndexFunc(b[line], func(r refusal) bool { return r.reason == reason })
	if at < 0 {
		at = len(b[line])
		b[line] = append(b[line], refusal{reason: reason})
	}
	b[line][at].gpus = append(b[line][at].gpus, index)
}

// tell adds one mistake for each line: "GPUs 0-3: …; GPU 4: …".
func (b byLine) tell(m *mistakes) {
	for line, refusals := range b {
		var parts []string
		for _, r := range refusals {
			parts = append(parts, gpus(r.gpus)+": "+r.reason)
		}
		m.add(line, "%s", strings.Join(parts, "; "))
	}
}
