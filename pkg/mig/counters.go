// SPDX-License-Identifier: Apache-2.0

package mig

import (
	"strconv"
	"strings"
)

// Counter is an amount of something that a card has, or that a GPU instance takes of it.
type Counter struct {
	// Name is a DNS label. It is NVIDIA's name in its DRA driver if that has one
	// ("memory-slice-0", "decoders").
	Name  string
	Value int
}

// engineNames are NVIDIA's names for the counters of engines.
var engineNames = [len(engines{})]string{"decoders", "encoders", "jpeg-engines", "ofa-engines"}

const (
	// media counts the instances with media extensions.
	media = "media"
	// allMedia is for drivers that do not report engines: an instance with all of them leaves
	// none to others.
	allMedia = "all-media"
)

// Counters returns the card's rules as sums, for callers that can only add, such as the
// scheduler. GPU instances can exist together exactly if they take at most the value of each
// counter. Splits have no counters, nor has a rule that follows from others.
func (c *Card) Counters() []Counter {
	var out []Counter
	for i := range c.memory {
		out = append(out, Counter{memorySlice(i), 1})
	}
	if c.engines {
		for k, n := range c.has {
			if n > 0 {
				out = append(out, Counter{engineNames[k], n})
			}
		}
	}
	if c.media > 0 {
		out = append(out, Counter{media, c.media})
	}
	if c.sharesMedia() {
		out = append(out, Counter{allMedia, c.memory})
	}
	for i := range c.profiles {
		if p := &c.profiles[i]; p.bounded(c) {
			out = append(out, Counter{p.counter(), p.max})
		}
	}
	return out
}

// Takes returns how much a GPU instance takes of each of Counters.
func (c *Card) Takes(s Placement) []Counter {
	i := c.index(s.Profile)
	if i < 0 {
		return nil
	}
	p := &c.profiles[i]
	var out []Counter
	for n := range s.Size {
		out = append(out, Counter{memorySlice(s.Start + n), 1})
	}
	if c.engines {
		for k, n := range p.uses {
			if n > 0 {
				out = append(out, Counter{engineNames[k], n})
			}
		}
	}
	if p.media {
		out = append(out, Counter{media, 1})
	}
	switch {
	case !c.sharesMedia() || p.none:
	case p.all:
		out = append(out, Counter{allMedia, c.memory})
	default:
		out = append(out, Counter{allMedia, 1})
	}
	if p.bounded(c) {
		out = append(out, Counter{p.counter(), 1})
	}
	return out
}

func memorySlice(n int) string { return "memory-slice-" + strconv.Itoa(n) }

// sharesMedia reports whether a profile has all media engines while the driver does not report
// how many these are.
func (c *Card) sharesMedia() bool {
	for i := range c.profiles {
		if c.profiles[i].all && !c.engines {
			return true
		}
	}
	return false
}

// bounded reports whether the driver's maximum for the profile is lower than what memory slices
// and media extensions allow.
func (p *profile) bounded(c *Card) bool {
	if p.media && c.media <= p.max {
		return false
	}
	disjoint, end := 0, 0
	for _, s := range p.placements { // by start; all of one profile have the same size
		if s.Start >= end {
			disjoint, end = disjoint+1, s.Start+s.Size
		}
	}
	return p.max < disjoint
}

// counter returns the name of the counter for a profile's instances.
func (p *profile) counter() string {
	return "most-" + strings.Map(func(r rune) rune {
		if r == '.' || r == '+' || r == '_' {
			return '-'
		}
		return r
	}, p.name.String())
}
