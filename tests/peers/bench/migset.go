// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"slices"
	"strings"

	"example.com/gpu-agent/tests/emulator"
)

// What can stand on a card, by enumeration from the table that was recorded from
// its driver. Nothing of the agent's planner is asked: it is what is judged.

// migPlace is a GPU instance at a memory slice.
type migPlace struct {
	profile     *emulator.MIGProfile
	start, size uint32
}

func (p migPlace) String() string { return fmt.Sprintf("%s@%d", p.profile.Name, p.start) }

func (p migPlace) overlaps(o migPlace) bool {
	return p.start < o.start+o.size && o.start < p.start+p.size
}

// migSet is places that can stand together, in the order of the table's.
type migSet []migPlace

func (s migSet) String() string {
	words := make([]string, len(s))
	for i, p := range s {
		words[i] = p.String()
	}
	return strings.Join(words, " ")
}

// counts is the geometry of a set, as text that is equal for equal ones: the flow
// form of YAML.
func (s migSet) counts() string {
	n := map[string]int{}
	for _, p := range s {
		n[p.profile.Name]++
	}
	return countsText(n)
}

func countsText(n map[string]int) string {
	words := make([]string, 0, len(n))
	for name, count := range n {
		if count > 0 {
			words = append(words, fmt.Sprintf("%s: %d", name, count))
		}
	}
	slices.Sort(words)
	return "{" + strings.Join(words, ", ") + "}"
}

// migCard is all sets of a card.
type migCard struct {
	places  []migPlace
	engines [4]uint32 // that the card has, of each kind
	sets    []migSet
	maximal []migSet // to which nothing can be added
}

func newMIGCard(model string) (*migCard, error) {
	m, err := emulator.LoadModel(model)
	if err != nil {
		return nil, err
	}
	c := &migCard{}
	for i := range m.MIG.Profiles {
		p := &m.MIG.Profiles[i]
		for _, start := range p.Starts {
			c.places = append(c.places, migPlace{p, start, p.Size})
		}
		for k, n := range media(p) {
			c.engines[k] = max(c.engines[k], n) // an instance of all of the card has them all
		}
	}
	c.enumerate(0, nil)
	return c, nil
}

func media(p *emulator.MIGProfile) [4]uint32 { return [4]uint32{p.Decode, p.Encode, p.JPEG, p.OFA} }

func (c *migCard) enumerate(from int, have migSet) {
	set := slices.Clone(have)
	c.sets = append(c.sets, set)
	full := true
	for i, p := range c.places {
		if !c.fits(have, p) {
			continue
		}
		full = false
		if i >= from {
			c.enumerate(i+1, append(have, p))
		}
	}
	if full {
		c.maximal = append(c.maximal, set)
	}
}

// fits says whether a place can be added to a set.
func (c *migCard) fits(have migSet, p migPlace) bool {
	same := uint32(1)
	used := media(p.profile)
	for _, o := range have {
		if o.overlaps(p) {
			return false
		}
		if o.profile == p.profile {
			same++
		}
		for k, n := range media(o.profile) {
			used[k] += n
		}
	}
	for k := range used {
		if used[k] > c.engines[k] {
			return false
		}
	}
	return same <= p.profile.Max
}

// possible says whether a geometry can be had with certain places kept.
func (c *migCard) possible(kept migSet, counts string) bool {
	return slices.ContainsFunc(c.sets, func(s migSet) bool {
		return s.counts() == counts && !slices.ContainsFunc(kept, func(p migPlace) bool { return !slices.Contains(s, p) })
	})
}
