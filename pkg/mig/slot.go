// SPDX-License-Identifier: Apache-2.0

package mig

import (
	"cmp"
	"fmt"
	"strconv"
	"strings"

	"example.com/gpu-agent/pkg/gpu"
)

// Slot is a MIG device that could exist: a profile at a place. Slots compare
// equal with == and can be map keys.
//
// A container gets a compute instance, so that is what a Slot is. Where it has
// the whole of its GPU instance (most do) the two share a name and a place. A
// split such as 1c.3g.40gb is one of several in a GPU instance: Start and Size
// are then the GPU instance's, and CI tells where in it.
type Slot struct {
	Profile Name
	// Start and Size are memory slices of the GPU, the driver's unit of place.
	Start, Size int
	// CI is the first compute slice within the GPU instance; 0 unless split.
	CI int
}

// SlotOf is the place that an instance has. The error wraps gpu.ErrInvalid where its
// profile's name cannot be read.
func SlotOf(in *gpu.Instance) (Slot, error) {
	name, err := Parse(in.Profile)
	return Slot{Profile: name, Start: in.Start, Size: in.Size, CI: in.CIStart}, err
}

// Find returns the instance at a place, or nil: also a GPU instance without a compute
// instance, whose CI is negative. The size is not compared: it follows from the
// profile and the start, and who has the place from a device ID does not know it.
func Find(at []gpu.Instance, s Slot) *gpu.Instance {
	for i := range at {
		in, err := SlotOf(&at[i])
		if in.Size = s.Size; err == nil && in == s {
			return &at[i]
		}
	}
	return nil
}

// String is "3g.40gb@4", of a split "1c.3g.40gb@4.1".
func (s Slot) String() string {
	var b [64]byte
	return string(s.append(b[:0]))
}

func (s Slot) append(b []byte) []byte {
	b = append(b, s.Profile.String()...)
	b = append(b, '@')
	b = strconv.AppendInt(b, int64(s.Start), 10)
	if s.Profile.Compute != 0 {
		b = append(b, '.')
		b = strconv.AppendInt(b, int64(s.CI), 10)
	}
	return b
}

// GPUInstance is the slot of the GPU instance that the device lives in: s
// itself unless it is split.
func (s Slot) GPUInstance() Slot {
	return Slot{Profile: s.Profile.GPUInstance(), Start: s.Start, Size: s.Size}
}

// CompareSlots is a total order by place: start, then compute slice, then
// profile, then size.
func CompareSlots(a, b Slot) int {
	return cmp.Or(
		cmp.Compare(a.Start, b.Start),
		cmp.Compare(a.CI, b.CI),
		Compare(a.Profile, b.Profile),
		cmp.Compare(a.Size, b.Size),
	)
}

// ID is the device ID of a slot on a GPU: "GPU-…::3g.40gb@4".
func ID(u gpu.UUID, s Slot) string {
	var b [128]byte
	id := append(b[:0], u...)
	id = append(id, "::"...)
	return string(s.append(id))
}

// ParseID takes a device ID apart. It accepts what [ID] prints and nothing
// else; other strings are gpu.ErrInvalid. The size of a slot is not in its ID:
// [Card.Slot] knows it.
func ParseID(id string) (u gpu.UUID, p Name, start, ci int, err error) {
	fail := func(reason string) (gpu.UUID, Name, int, int, error) {
		return "", Name{}, 0, 0, fmt.Errorf("%s is not the ID of a MIG device: %s: %w", quote(id), reason, gpu.ErrInvalid)
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
		if ci, ok = place2(slice); !ok {
			return fail("its compute slice is not a number below 100")
		}
	}
	if start, ok = place2(place); !ok {
		return fail("its start is not a number below 100")
	}
	return gpu.UUID(card), p, start, ci, nil
}

// place2 reads a number of one or two digits that has one spelling.
func place2(s string) (int, bool) {
	if s == "" || len(s) > 2 || len(s) == 2 && s[0] == '0' {
		return 0, false
	}
	n := 0
	for _, c := range []byte(s) {
		if c < '0' || c > '9' {
			return 0, false
		}
		n = n*10 + int(c-'0')
	}
	return n, true
}
