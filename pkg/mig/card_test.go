// SPDX-License-Identifier: Apache-2.0

package mig

import (
	"errors"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"example.com/gpu-agent/pkg/gpu"
)

func TestCardLeavesOutWhatMakesNoSense(t *testing.T) {
	at := func(start, size int) gpu.Placement { return gpu.Placement{Start: start, Size: size} }
	good := gpu.Profile{Name: "1g.10gb", Slices: 1, Max: 7, Placements: []gpu.Placement{at(0, 1)}}
	for _, tc := range []struct {
		bad    gpu.Profile
		reason string
	}{
		{gpu.Profile{Name: "one"}, "a name is like"},
		{gpu.Profile{Name: "1g.10gb"}, "it is listed twice"},
		{gpu.Profile{Name: "1c.3g.40gb"}, "of a compute instance"},
		{gpu.Profile{Name: "3g.40gb", Placements: []gpu.Placement{at(-1, 4)}}, "4 memory slices from -1 on is no placement"},
		{gpu.Profile{Name: "3g.40gb", Placements: []gpu.Placement{at(0, 0)}}, "0 memory slices from 0 on is no placement"},
		{gpu.Profile{Name: "3g.40gb", Placements: []gpu.Placement{at(61, 4)}}, "4 memory slices from 61 on is no placement"},
		{gpu.Profile{Name: "3g.40gb", Placements: []gpu.Placement{at(1<<62, 1<<62)}}, "is no placement"},
		{gpu.Profile{Name: "3g.40gb", Placements: []gpu.Placement{at(4, 4), at(4, 2)}}, "start 4 is listed twice"},
		{gpu.Profile{Name: "3g.40gb", Slices: -3}, "-3 compute slices"},
		{gpu.Profile{Name: "3g.40gb", Max: -1}, "its maximum is -1"},
		{gpu.Profile{Name: "3g.40gb", Engines: &gpu.Engines{Encode: -1}}, "-1 media engines"},
	} {
		c, err := NewCard(&gpu.MIG{Profiles: []gpu.Profile{good, tc.bad}})
		if !errors.Is(err, gpu.ErrInvalid) || !strings.Contains(err.Error(), tc.reason) {
			t.Errorf("%+v: %v, want a reason with %q", tc.bad, err, tc.reason)
		}
		if len(c.Placements()) != 1 || c.Placements()[0].String() != "1g.10gb@0" {
			t.Errorf("%+v: what is left is %v", tc.bad, c.Placements())
		}
	}
}

func TestCardOfWhatIsNotKnown(t *testing.T) {
	c, err := NewCard(&gpu.MIG{})
	if err != nil || c.Known() || len(c.Placements()) != 0 {
		t.Errorf("of nothing: %v, known %v, %v", err, c.Known(), c.Placements())
	}
	if err := c.Feasible(nil); err != nil {
		t.Errorf("nothing is wanted: %v", err)
	}
	if err := c.Feasible(counts(t, "1x1g.10gb")); !errors.Is(err, gpu.ErrInvalid) || !strings.Contains(err.Error(), "it has none") {
		t.Errorf("of nothing: %v", err)
	}

	// Without placements, slices and most: what can be refused is.
	m := inventory(seven)
	for i := range m.Profiles {
		m.Profiles[i].Placements = nil
	}
	c, err = NewCard(m)
	if err != nil || c.Known() {
		t.Fatalf("%v, known %v", err, c.Known())
	}
	for want, is := range map[string]error{
		"7x1g.10gb":            nil,
		"8x1g.10gb":            gpu.ErrNoRoom,
		"2x1g.10gb+me":         gpu.ErrNoRoom,
		"1x1g.5gb":             gpu.ErrInvalid,
		"6x1c.3g.40gb":         nil,
		"7x1c.3g.40gb":         gpu.ErrNoRoom,
		"1x3c.4g.40gb":         gpu.ErrInvalid,
		"5x2g.20gb 5x2g.20gb":  gpu.ErrNoRoom,
		"-1x2g.20gb":           gpu.ErrInvalid,
		"0x1g.5gb 0x1g.10gb":   nil,
		"2x3g.40gb 1x2g.20gb":  nil,
		"99999999999x1g.10gb":  gpu.ErrNoRoom,
		"9x1g.10gb 1x7g.800gb": gpu.ErrInvalid,
	} {
		if err := c.Feasible(counts(t, want)); !errors.Is(err, is) || err == nil && is != nil {
			t.Errorf("%s: %v, want %v", want, err, is)
		}
	}
	if _, err := c.Plan(nil, counts(t, "1x1g.10gb")); !errors.Is(err, gpu.ErrNotSupported) {
		t.Errorf("a plan without placements: %v", err)
	}

	// Without slices the name tells them, without most only room limits.
	m = inventory(seven)
	for i := range m.Profiles {
		m.Profiles[i].Slices, m.Profiles[i].Max = 0, 0
	}
	if c, err = NewCard(m); err != nil || !c.Known() {
		t.Fatalf("%v, known %v", err, c.Known())
	}
	for want, is := range map[string]error{
		"7x1g.10gb":           nil,
		"8x1g.10gb":           gpu.ErrNoRoom,
		"2x1g.10gb+me":        gpu.ErrNoRoom,
		"6x1c.3g.40gb":        nil,
		"3x2g.20gb 1x1g.20gb": nil,
		"2x3g.40gb 1x2g.20gb": gpu.ErrNoRoom,
	} {
		if err := c.Feasible(counts(t, want)); !errors.Is(err, is) || err == nil && is != nil {
			t.Errorf("%s: %v, want %v", want, err, is)
		}
	}
}

// TestRefusalsSayWhy holds the words that an operator reads.
func TestRefusalsSayWhy(t *testing.T) {
	for _, tc := range []struct {
		rows       []row
		want, says string
	}{
		{seven, "8x1g.10gb", "8x1g.10gb: at most 7 of 1g.10gb can exist on this GPU: insufficient resources"},
		{seven, "1x9g.90gb", "there is no profile 9g.90gb on this GPU; it has 1g.10gb, 1g.10gb+me, 1g.20gb, 2g.20gb, 3g.40gb, 4g.40gb, 7g.80gb: invalid argument"},
		{seven, "1x3c.4g.40gb", "there is no profile 3c.4g.40gb on this GPU: 4g.40gb is not split into parts of 3: invalid argument"},
		{seven, "2x3g.40gb 1x1g.20gb", "1x1g.20gb 2x3g.40gb: they need 10 memory slices and this GPU has 8: insufficient resources"},
		{seven, "2x1g.10gb 3x2g.20gb", "2x1g.10gb 3x2g.20gb: there is no way to place them all: 1g.10gb can begin at 0, 1, 2, 3, 4, 5, 6; 2g.20gb can begin at 0, 2, 4: insufficient resources"},
		{a30, "1x1g.6gb+me 1x2g.12gb+me", "1x1g.6gb+me 1x2g.12gb+me: at most 1 with media extensions (+me) can exist on this GPU: insufficient resources"},
		{a30, "3x1c.2g.12gb+me", "3x1c.2g.12gb+me: at most 1 of 2g.12gb+me can exist on this GPU: insufficient resources"},
		{pro, "1x1g.24gb 1x1g.24gb+me.all", "1x1g.24gb 1x1g.24gb+me.all: they need 5 decoders and this GPU has 4: insufficient resources"},
		{silent, "1x1g.24gb 1x1g.24gb+me.all", "1x1g.24gb 1x1g.24gb+me.all: an instance with all media engines (+me.all) can exist only beside instances without any (-me): insufficient resources"},
	} {
		err := card(t, tc.rows).Feasible(counts(t, tc.want))
		if err == nil || err.Error() != tc.says {
			t.Errorf("%s:\n got %v\nwant %s", tc.want, err, tc.says)
		}
		if _, planErr := card(t, tc.rows).Plan(nil, counts(t, tc.want)); planErr == nil || planErr.Error() != err.Error() {
			t.Errorf("%s: Plan says %v", tc.want, planErr)
		}
	}
}

// TestSplitsThatDriversOffer holds the rule by which compute instances are laid
// out against the list of those that drivers have.
func TestSplitsThatDriversOffer(t *testing.T) {
	c := card(t, seven)
	for _, gi := range c.Placements() {
		for compute := 1; compute < gi.Profile.Slices; compute++ {
			var want, got []int
			for _, s := range splits[gi.Profile.Slices] {
				if s.slices == compute {
					want = s.starts
				}
			}
			p := gi.Profile
			p.Compute = compute
			for ci := -2; ci < 70; ci++ {
				if s, ok := c.Placement(p, gi.Start, ci); ok {
					got = append(got, ci)
					if s.GPUInstance() != gi {
						t.Errorf("%s is in %s, want %s", s, s.GPUInstance(), gi)
					}
				}
			}
			if !slices.Equal(got, want) {
				t.Errorf("%s can begin at %v in %s, want %v", p, got, gi, want)
			}
		}
	}
	for _, s := range []struct {
		p         string
		start, ci int
	}{{"1g.10gb", 7, 0}, {"1g.10gb", -1, 0}, {"1g.10gb", 0, 1}, {"2g.20gb", 1, 0}, {"1g.5gb", 0, 0}, {"1c.3g.40gb", 1, 0}, {"1c.3g.40gb", 0, 3}} {
		if placement, ok := c.Placement(name(t, s.p), s.start, s.ci); ok {
			t.Errorf("there is %s", placement)
		}
	}
}

// TestFitsBesideWhatIsNotLegal: a new placement answers for itself alone.
func TestFitsBesideWhatIsNotLegal(t *testing.T) {
	for _, rows := range [][]row{pro, silent} {
		c := card(t, rows)
		broken := []Placement{at(t, c, "1g.24gb+me.all@0"), at(t, c, "1g.24gb@3")}
		for s, want := range map[string]bool{
			"1g.24gb-me@6": true, "1g.24gb-me@3": false, "1g.24gb@6": false, "1g.24gb+me.all@6": false, "1g.24gb+me@6": false,
		} {
			if got := c.Fits(broken, at(t, c, s)); got != want {
				t.Errorf("Fits(%v, %s) = %v", broken, s, got)
			}
		}
		// What the card does not know takes room all the same.
		strange := []Placement{{Profile: name(t, "9g.99gb"), Start: 2, Size: 5}}
		for s, want := range map[string]bool{"1g.24gb@0": false, "1g.24gb@6": false, "1g.24gb@9": true} {
			if got := c.Fits(strange, at(t, c, s)); got != want {
				t.Errorf("Fits(%v, %s) = %v", strange, s, got)
			}
		}
		if c.Fits(nil, strange[0]) {
			t.Errorf("%s fits, which the card does not have", strange[0])
		}
	}
}

// TestUses has others join what stands, anywhere, until they use up what the card allows of a placement's profile:
// before that it fits wherever there is room.
func TestUses(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 1))
	for _, family := range families {
		c := card(t, family.rows)
		places := c.Placements()
		joined, refused := 0, 0
		for range 3000 {
			var standing []Placement
			for range r.IntN(3) {
				if s := places[r.IntN(len(places))]; c.Fits(standing, s) {
					standing = append(standing, s)
				}
			}
			s := places[r.IntN(len(places))]
			if !c.Fits(standing, s) {
				continue
			}
			used := 0
			with := slices.Clone(standing)
			for {
				other := places[r.IntN(len(places))]
				other.Start = -1 // it takes no room
				used += c.Uses(standing, other.Profile, s.Profile)
				if with = append(with, other); used >= Whole || len(with) > 9 {
					break
				}
				if joined++; !c.Fits(with, s) {
					t.Fatalf("%s: %v use %d of %d, and %v does not fit beside them", family.name, with, used, Whole, s)
				}
			}
			if used >= Whole && !c.Fits(with, s) {
				refused++
			}
		}
		if joined < 300 || refused < 50 {
			t.Errorf("%s: %d joined and %d used all up: the test looks at nothing", family.name, joined, refused)
		}
	}
}
