// SPDX-License-Identifier: Apache-2.0

package mig

import (
	"cmp"
	"fmt"
	"strconv"
	"strings"

	"example.com/gpu-agent/pkg/gpu"
)

// Placement is where a MIG device stands or could stand: its profile, and the memory
// slices that its GPU instance takes. Placements compare equal with ==, and can be map
// keys.
//
// A container gets a compute instance, and a Placement is one of a compute instance.
// Most compute instances have all of their GPU instance, and then both have the same
// name and the same memory slices. A split such as 1c.3g.40gb shares its GPU instance
// with others: Start and Size are those of the GPU instance, and CI says where in it
// the split begins.
type Placement struct {
	Profile Name `json:"profile"`
	// Start and Size are memory slices of the GPU, in which the driver counts.
	Start int `json:"start,omitempty"`
	Size  int `json:"size,omitempty"`
	// CI is the first compute slice within the GPU instance; 0 unless split.
	CI int `json:"ci,omitempty"`
}

// PlacementOf is the placement of an instance. The error wraps gpu.ErrInvalid where its
// profile's name cannot be read.
func PlacementOf(in *gpu.Instance) (Placement, error) {
	name, err := Parse(in.Profile)
	return Placement{Profile: name, Start: in.Start, Size: in.Size, CI: in.CIStart}, err
}

// Find returns the instance at a placement, or nil. It also finds a GPU instance without
// a compute instance, whose CI is negative. It ignores the size, which follows from
// profile and start and which a device ID does not have.
func Find(at []gpu.Instance, s Placement) *gpu.Instance {
	for i := range at {
		in, err := PlacementOf(&at[i])
		if in.Size = s.Size; err == nil && in == s {
			return &at[i]
		}
	}
	return nil
}

// String is "3g.40gb@4", of a split "1c.3g.40gb@4.1".
func (s Placement) String() string {
	at := s.Profile.String() + "@" + strconv.Itoa(s.Start)
	if s.Profile.Compute != 0 {
		at += "." + strconv.Itoa(s.CI)
	}
	return at
}

// GPUInstance is the placement of the GPU instance that the device lives in: s
// itself unless it is split.
func (s Placement) GPUInstance() Placement {
	return Placement{Profile: s.Profile.GPUInstance(), Start: s.Start, Size: s.Size}
}

// ComparePlacements is a total order by place: start, then compute slice, then
// profile, then size.
func ComparePlacements(a, b Placement) int {
	return cmp.Or(
		cmp.Compare(a.Start, b.Start),
		cmp.Compare(a.CI, b.CI),
		Compare(a.Profile, b.Profile),
		cmp.Compare(a.Size, b.Size),
	)
}

// ID is the device ID of a placement on a GPU: "GPU-…::3g.40gb@4".
func ID(u gpu.UUID, s Placement) string { return string(u) + "::" + s.String() }

// ParseID takes a device ID apart. It accepts what [ID] prints and nothing
// else; other strings are gpu.ErrInvalid. The size of a placement is not in its ID:
// [Card.Placement] knows it.
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

// small reads a number below 100 in its one spelling.
func small(s string) (int, bool) {
	n, err := strconv.Atoi(s)
	return n, err == nil && n >= 0 && n < 100 && strconv.Itoa(n) == s
}
