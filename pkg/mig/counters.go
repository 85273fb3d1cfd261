// SPDX-License-Identifier: Apache-2.0

package mig

import (
	"strconv"
	"strings"
)

// Counter is something that a card has a number of, and GPU instances take some of.
type Counter struct {
	// Name is a DNS label: NVIDIA's name in its DRA driver where that has one
	// ("memory-slice-0", "decoders").
	Name  string
	Value int
}

// engineNames are NVIDIA's names for the counters of engines.
var engineNames = [len(engines{})]string{"decoders", "encoders", "jpeg-engines", "ofa-engines"}

const (
	// media counts the instances with media extensions.
	media = "media"
	// allMedia is for drivers that do not tell engines: an instance with all of them
	// leaves none to others.
	allMedia = "all-media"
)

// Counters are the card's rules as sums, for whoever can only add, as the scheduler
// does: GPU instances may stand together exactly if they take no more of any counter
// than this. Splits are not in them. A rule that others imply has no counter.
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

// Takes is what a GPU instance takes of each of Counters.
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

// sharesMedia says that there is a profile with all media engines, of which the driver
// does not tell how many there are.
func (c *Card) sharesMedia() bool {
	for i := range c.profiles {
		if c.profiles[i].all && !c.engines {
			return true
		}
	}
	return false
}

// bounded says that the driver lets fewer of the profile stand than memory slices and
// media extensions do.
func (p *profile) bounded(c *Card) bool {
	if p.media && c.media <= p.max {
		return false
	}
	disjoint, end := 0, 0
	for _, s := range p.placements { // by start; those of one profile are of one size
		if s.Start >= end {
			disjoint, end = disjoint+1, s.Start+s.Size
		}
	}
	return p.max < disjoint
}

// counter is the name of the counter of a profile's instances.
func (p *profile) counter() string {
	return "most-" + strings.Map(func(r rune) rune {
		if r == '.' || r == '+' || r == '_' {
			return '-'
		}
		return r
	}, p.name.String())
}
