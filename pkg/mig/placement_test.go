// SPDX-License-Identifier: Apache-2.0

package mig

import (
	"errors"
	"strings"
	"testing"

	"example.com/gpu-agent/pkg/gpu"
)

func TestIDs(t *testing.T) {
	c := card(t, pro)
	for _, tc := range []struct{ id, placement string }{
		{"GPU-5c::1g.24gb+me.all@9", "1g.24gb+me.all@9"},
		{"GPU-5c::1g.24gb-me@3", "1g.24gb-me@3"},
		{"GPU-5c::4g.96gb+gfx@0", "4g.96gb+gfx@0"},
		{"GPU-5c::1c.2g.48gb@6.1", "1c.2g.48gb@6.1"},
	} {
		u, p, start, ci, err := ParseID(tc.id)
		if err != nil {
			t.Errorf("ParseID(%q): %v", tc.id, err)
			continue
		}
		s, ok := c.Placement(p, start, ci)
		if !ok || u != "GPU-5c" || s.String() != tc.placement || ID(u, s) != tc.id {
			t.Errorf("ParseID(%q) = %s %s, %v", tc.id, u, s, ok)
		}
	}
	for _, tc := range []struct{ id, reason string }{
		{"", `lacks "::"`},
		{"GPU-5c", `lacks "::"`},
		{"GPU-5c::3", `lacks "@"`},
		{"GPU-5c:3g.40gb@4", `lacks "::"`},
		{"MIG-5c::3g.40gb@4", "GPU's UUID"},
		{"GPU-::3g.40gb@4", "GPU's UUID"},
		{"GPU-5c::3g.40gb", `lacks "@"`},
		{"GPU-5c::3g.40gb@", "start is not a number"},
		{"GPU-5c::3g.40gb@04", "start is not a number"},
		{"GPU-5c::3g.40gb@+4", "start is not a number"},
		{"GPU-5c::3g.40gb@100", "start is not a number"},
		{"GPU-5c::3g.40gb@4.0", "start is not a number"},
		{"GPU-5c::3g.40gb@4@4", "start is not a number"},
		{"GPU-5c::1c.3g.40gb@4", "place is like 4.1"},
		{"GPU-5c::1c.3g.40gb@4.", "compute slice is not"},
		{"GPU-5c::1c.3g.40gb@4.01", "compute slice is not"},
		{"GPU-5c::1c.3g.40gb@.1", "start is not a number"},
		{"GPU-5c::3g@4", "a name is like"},
		{"GPU-5c::3c.3g.40gb@4.0", "leave out 3c."},
	} {
		u, p, start, ci, err := ParseID(tc.id)
		if !errors.Is(err, gpu.ErrInvalid) || !strings.Contains(err.Error(), tc.reason) {
			t.Errorf("ParseID(%q): %v, want a reason with %q", tc.id, err, tc.reason)
		}
		if u != "" || p != (Name{}) || start != 0 || ci != 0 {
			t.Errorf("ParseID(%q) fails and returns %s %s %d %d", tc.id, u, p, start, ci)
		}
	}
}

// FuzzParseID holds that one device has one ID.
func FuzzParseID(f *testing.F) {
	for _, s := range []string{"GPU-5c::3g.40gb@4", "GPU-5c::1c.3g.40gb@4.1", "GPU-5c::1g.24gb+me.all@9", "GPU-::@", "GPU-a::::1g.5gb@0", "GPU-5c::3"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		u, p, start, ci, err := ParseID(s)
		if err != nil {
			if !errors.Is(err, gpu.ErrInvalid) || strings.ContainsAny(err.Error(), "\n\r") {
				t.Fatalf("ParseID(%q): %q", s, err)
			}
			return
		}
		if got := ID(u, Placement{Profile: p, Start: start, CI: ci}); got != s {
			t.Fatalf("ParseID(%q) prints as %q", s, got)
		}
	})
}

// An allocation that was taken over from its device ID does not know how large its place is.
func TestFindGoesByProfileAndStart(t *testing.T) {
	at := []gpu.Instance{
		{Profile: "of no known form"},
		{Profile: "3g.40gb", Placement: gpu.Placement{Start: 4, Size: 4}, GI: 1},
		{Profile: "1c.3g.40gb", Placement: gpu.Placement{Start: 0, Size: 4}, CIStart: 1, GI: 2},
	}
	large, split := Name{Slices: 3, GB: 40}, Name{Compute: 1, Slices: 3, GB: 40}
	for _, c := range []struct {
		placement Placement
		gi        int
	}{
		{Placement{Profile: large, Start: 4, Size: 4}, 1},
		{Placement{Profile: large, Start: 4}, 1},
		{Placement{Profile: split, CI: 1}, 2},
		{Placement{Profile: split, Size: 4}, 0},
		{Placement{Profile: large}, 0},
	} {
		got := 0
		if in := Find(at, c.placement); in != nil {
			got = in.GI
		}
		if got != c.gi {
			t.Errorf("%s of size %d: GPU instance %d, want %d", c.placement, c.placement.Size, got, c.gi)
		}
	}
}
