// SPDX-License-Identifier: Apache-2.0

package mig

import (
	"cmp"
	"fmt"
	"strconv"
	"strings"

	"example.com/gpu-agent/pkg/gpu"
)

// Placement is a place where a MIG device exists or could exist: its profile, and the memory
// slices of its GPU instance. Placements compare equal with ==, so they can be map keys.
//
// A Placement is of a compute instance, since that is what a container gets. Most compute
// instances have all of their GPU instance, and then both have the same name and memory slices. A
// split such as 1c.3g.40gb shares its GPU instance with others: Start and Size are the GPU
// instance's, and CI is where the split begins in it.
type Placement struct {
	Profile Name `json:"profile"`
	// Start and Size are in memory slices of the GPU, as the driver counts them.
	Start int `json:"start,omitempty"`
	Size  int `json:"size,omitempty"`
	// CI is the first compute slice within the GPU instance; 0 if not split.
	CI int `json:"ci,omitempty"`
}

// PlacementOf returns the placement of an instance. The error wraps gpu.ErrInvalid if its
// profile's name cannot be read.
func PlacementOf(in *gpu.Instance) (Placement, error) {
	name, err := Parse(in.Profile)
	return Placement{Profile: name, Start: in.Start, Size: in.Size, CI: in.CIStart}, err
}

// Find returns the instance at a placement, or nil. It also finds a GPU instance without a
// compute instance, whose CI is negative. It ignores the size, which follows from profile and
// start: a device ID has none.
func Find(at []gpu.Instance, s Placement) *gpu.Instance {
	for i := range at {
		in, err := PlacementOf(&at[i])
		if in.Size = s.Size; err == nil && in == s {
			return &at[i]
		}
	}
	return nil
}

// String returns "3g.40gb@4", or "1c.3g.40gb@4.1" for a split.
func (s Placement) String() string {
	at := s.Profile.String() + "@" + strconv.Itoa(s.Start)
	if s.Profile.Compute != 0 {
		at += "." + strconv.Itoa(s.CI)
	}
	return at
}

// GPUInstance returns the placement of the GPU instance that the device is in: s itself if it is
// not split.
func (s Placement) GPUInstance() Placement {
	return Placement{Profile: s.Profile.GPUInstance(), Start: s.Start, Size: s.Size}
}

// ComparePlacements is a total order by place: start, then compute slice, then profile, then
// size.
func ComparePlacements(a, b Placement) int {
	return cmp.Or(
		cmp.Compare(a.Start, b.Start),
		cmp.Compare(a.CI, b.CI),
		Compare(a.Profile, b.Profile),
		cmp.Compare(a.Size, b.Size),
	)
}

// ID returns the device ID of a placement on a GPU: "GPU-…::3g.40gb@4".
func ID(u gpu.UUID, s Placement) string { return string(u) + "::" + s.String() }

// ParseID splits a device ID into its parts. It accepts only what [ID] returns; for other strings
// the error wraps gpu.ErrInvalid. An ID has no size: [Card.Placement] returns it.
func ParseID(id string) (u gpu.UUID, p Name, start, ci int, err error) {
	fail := func(reason string) (gpu.UUID, Name, int, int, error) {
		return "", Name{}, 0, 0, fmt.Errorf("%s is not the ID of a MIG device: %s: %w",
			quote(id), reason, gpu.ErrInvalid)
	}
	card, rest, ok := strings.Cut(id, "::")
	switch {
	case !ok:
		return fail(`it lacks "::"`)
	case !strings.HasPrefix(card, "GPU-") || len(card) == len("GPU-"):
		return fail("it does not begin with a GPU's UUID")
	}
	name, place, ok := strings.Cut(rest, "@")
	if !ok {
		return fail(`it lacks "@"`)
	}
	p, reason := parse(name)
	if reason != "" {
		return fail(reason)
	}
	if p.Compute != 0 {
		var slice string
		if place, slice, ok = strings.Cut(place, "."); !ok {
			return fail("a split's place is like 4.1")
		}
		if ci, ok = small(slice); !ok {
			return fail("its compute slice is not a number below 100")
		}
	}
	if start, ok = small(place); !ok {
		return fail("its start is not a number below 100")
	}
	return gpu.UUID(card), p, start, ci, nil
}

// small reads a number below 100. It accepts one spelling for each.
func small(s string) (int, bool) {
	n, err := strconv.Atoi(s)
	return n, err == nil && n >= 0 && n < 100 && strconv.Itoa(n) == s
}
