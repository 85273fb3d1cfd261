// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"slices"
	"strconv"
	"strings"
	"time"

	"example.com/gpu-agent/internal/brief"
	"example.com/gpu-agent/internal/status"
	"example.com/gpu-agent/pkg/gpu"
)

// WasResetAnnotation is the Node's annotation, below Options.Domain, by which an operator reports
// resets of GPUs, since not every driver shows them. It has indices, UUIDs or "all", each with the
// time of the reset, "3@2026-03-01T12:00:00Z", with commas between. It ends only older faults, so
// it may stay. The agent reads it and never writes it.
const WasResetAnnotation = "gpu.was-reset"

// mostResets is the number of words of the annotation that are read.
const mostResets = 64

// resets are the times at which an operator has reset GPUs.
type resets struct {
	at map[gpu.UUID]time.Time
	// odd are the words of the annotation that are not understood, or have a future time.
	odd []string
	// more is true if some words were not read.
	more bool
}

// resetsOf parses the annotation's value. It ignores empty words.
func resetsOf(said string, inv *gpu.Inventory, now time.Time) resets {
	r := resets{at: map[gpu.UUID]time.Time{}}
	for range mostResets {
		word, rest, more := strings.Cut(said, ",")
		said = rest
		if word = strings.TrimSpace(word); word != "" && !r.add(word, inv, now) {
			r.odd = append(r.odd, word)
		}
		if !more {
			return r
		}
	}
	r.more = said != ""
	return r
}

// add takes in a word, and reports whether it is understood and names a GPU.
func (r *resets) add(word string, inv *gpu.Inventory, now time.Time) (known bool) {
	name, when, _ := strings.Cut(word, "@")
	at, err := time.Parse(time.RFC3339, when)
	if err != nil || at.After(now) {
		return false
	}
	for i := range inv.GPUs {
		if d := &inv.GPUs[i]; name == "all" || name == string(d.UUID) || name == strconv.Itoa(d.Index) {
			if known = true; at.After(r.at[d.UUID]) {
				r.at[d.UUID] = at
			}
		}
	}
	return known
}

// conditions returns a remark on an annotation that is not understood.
func (r *resets) conditions(domain string) []status.Condition {
	if len(r.odd) == 0 && !r.more {
		return nil
	}
	slices.Sort(r.odd)
	said := brief.Cut(strings.Join(r.odd, ", "), brief.Text)
	if r.more {
		said += " and more"
	}
	return []status.Condition{status.Why(status.WasResetUnknown,
		"the node's annotation %s/%s has %s, which is not understood: write an index, a UUID or all, then @ "+
			"and a past time, as in 3@2026-03-01T12:00:00Z, with commas between, at most %d in all",
		domain, WasResetAnnotation, said, mostResets).Condition(status.Noted, "")}
}
