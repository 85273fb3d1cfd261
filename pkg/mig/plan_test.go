// SPDX-License-Identifier: Apache-2.0

package mig

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"

	"example.com/gpu-agent/pkg/gpu"
)

// stand reads what stands: "1g.10gb@0 3g.40gb@4!pod" (a "!" pins, with a
// holder; "?" is a GPU instance without a compute instance).
func stand(t testing.TB, c *Card, s string) []Standing {
	t.Helper()
	var out []Standing
	for _, f := range strings.Fields(s) {
		var o Standing
		f, o.Holder, o.Pinned = strings.Cut(f, "!")
		f, o.Empty = strings.CutSuffix(f, "?")
		o.Placement = at(t, c, f)
		out = append(out, o)
	}
	return out
}

// counts reads a geometry: "7x1g.10gb 1x3g.40gb".
func counts(t testing.TB, s string) []Count {
	t.Helper()
	var out []Count
	for _, f := range strings.Fields(s) {
		n, p, _ := strings.Cut(f, "x")
		k, err := strconv.Atoi(n)
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, Count{name(t, p), k})
	}
	return out
}

// text prints a plan on one line.
func (p Plan) text() string {
	var b strings.Builder
	for _, s := range p.Steps {
		fmt.Fprintf(&b, "%s; ", s)
	}
	if len(p.Blocked) > 0 {
		b.WriteString("blocked by")
		for _, o := range p.Blocked {
			fmt.Fprintf(&b, " %s!%s", o.Placement, o.Holder)
		}
		b.WriteString("; ")
	}
	fmt.Fprintf(&b, "keep %v; result %v", p.Keep, p.Result)
	return b.String()
}

func TestPlan(t *testing.T) {
	attributes := []row{{"3g.40gb", 3, 2, 4, []int{0, 4}, nil}, {"3g.40gb+gfx", 3, 2, 4, []int{0, 4}, nil}}
	sevenths := "1g.10gb@0 1g.10gb@1 1g.10gb@2 1g.10gb@3 1g.10gb@4 1g.10gb@5 1g.10gb@6"
	for _, tc := range []struct {
		name           string
		rows           []row
		standing, want string
		plan           string
	}{
		{"nothing from nothing", seven, "", "",
			"keep []; result []"},
		{"nothing from something", seven, "1g.10gb@6 3g.40gb@0", "",
			"destroy 3g.40gb@0; destroy 1g.10gb@6; keep []; result []"},
		// The free memory slices stay together: what is left of 3g.40gb's place is the end.
		{"the most room", seven, "", "1x1g.10gb",
			"create 1g.10gb@6; keep []; result [1g.10gb@6]"},
		{"balanced", seven, "", "2x1g.10gb 1x2g.20gb 1x3g.40gb",
			"create 1g.10gb@0; create 1g.10gb@1; create 2g.20gb@2; create 3g.40gb@4; keep []; result [1g.10gb@0 1g.10gb@1 2g.20gb@2 3g.40gb@4]"},
		{"around a pinned one", seven, strings.Replace(sevenths, "@5", "@5!train", 1), "1x3g.40gb 3x1g.10gb",
			"destroy 1g.10gb@0; destroy 1g.10gb@1; destroy 1g.10gb@2; destroy 1g.10gb@3; create 3g.40gb@0; " +
				"keep [1g.10gb@4 1g.10gb@5 1g.10gb@6]; result [3g.40gb@0 1g.10gb@4 1g.10gb@5 1g.10gb@6]"},
		{"blocked by what cannot stand beside", seven, strings.Replace(sevenths, "@5", "@5!train", 1), "2x3g.40gb",
			"blocked by 1g.10gb@5!train; keep []; result [" + sevenths + "]"},
		{"blocked by one too many", seven, "1g.10gb@0!a 1g.10gb@1!b 1g.10gb@2!a", "2x1g.10gb",
			"blocked by 1g.10gb@2!a; keep [1g.10gb@0 1g.10gb@1]; result [1g.10gb@0 1g.10gb@1 1g.10gb@2]"},
		{"one holder of two before two holders", seven, "1g.10gb@0!a 1g.10gb@1!a 1g.10gb@4!b 2g.20gb@2!c", "1x4g.40gb 1x1g.10gb",
			"blocked by 1g.10gb@0!a 1g.10gb@1!a 2g.20gb@2!c; keep [1g.10gb@4]; result [1g.10gb@0 1g.10gb@1 2g.20gb@2 1g.10gb@4]"},
		{"an empty GPU instance is filled", seven, "3g.40gb@0? 1g.10gb@4", "1x3g.40gb 1x1g.10gb",
			"create 3g.40gb@0; keep [1g.10gb@4]; result [3g.40gb@0 1g.10gb@4]"},
		{"an empty GPU instance goes", seven, "3g.40gb@0? 1g.10gb@4", "1x1g.10gb",
			"destroy 3g.40gb@0; keep [1g.10gb@4]; result [1g.10gb@4]"},
		{"an empty GPU instance that is pinned blocks", seven, "3g.40gb@0?!foreign", "1x3g.40gb",
			"blocked by 3g.40gb@0!foreign; keep []; result []"},
		{"splits fill GPU instances in turn", seven, "", "3x1c.3g.40gb 1x2c.3g.40gb",
			"create 2c.3g.40gb@0.0; create 1c.3g.40gb@0.2; create 1c.3g.40gb@4.0; create 1c.3g.40gb@4.1; " +
				"keep []; result [2c.3g.40gb@0.0 1c.3g.40gb@0.2 1c.3g.40gb@4.0 1c.3g.40gb@4.1]"},
		{"splits stay where they are", seven, "1c.3g.40gb@0.1!a 1c.3g.40gb@4.2", "2x1c.3g.40gb 1x2c.3g.40gb",
			"create 2c.3g.40gb@4.0; keep [1c.3g.40gb@0.1 1c.3g.40gb@4.2]; result [1c.3g.40gb@0.1 2c.3g.40gb@4.0 1c.3g.40gb@4.2]"},
		{"a split fills an empty GPU instance", seven, "3g.40gb@4?", "1x1c.3g.40gb",
			"create 1c.3g.40gb@4.0; keep []; result [1c.3g.40gb@4.0]"},
		{"three and two and two of seven", seven, "", "1x3c.7g.80gb 2x2c.7g.80gb",
			"create 2c.7g.80gb@0.0; create 2c.7g.80gb@0.2; create 3c.7g.80gb@0.4; keep []; " +
				"result [2c.7g.80gb@0.0 2c.7g.80gb@0.2 3c.7g.80gb@0.4]"},
		{"media extensions once over all profiles", a30, "1g.6gb+me@0", "1x2g.12gb+me 2x1g.6gb",
			"destroy 1g.6gb+me@0; create 1g.6gb@0; create 1g.6gb@1; create 2g.12gb+me@2; keep []; result [1g.6gb@0 1g.6gb@1 2g.12gb+me@2]"},
		{"all engines beside none", pro, "1g.24gb@0 1g.24gb-me@3", "1x2g.48gb+me.all 2x1g.24gb-me",
			"destroy 1g.24gb@0; create 1g.24gb-me@0; create 2g.48gb+me.all@6; keep [1g.24gb-me@3]; " +
				"result [1g.24gb-me@0 1g.24gb-me@3 2g.48gb+me.all@6]"},
		{"splits of profiles that differ by an attribute", attributes, "", "1x1c.3g.40gb 1x2c.3g.40gb 1x1c.3g.40gb+gfx 1x2c.3g.40gb+gfx",
			"create 2c.3g.40gb@0.0; create 1c.3g.40gb@0.2; create 2c.3g.40gb+gfx@4.0; create 1c.3g.40gb+gfx@4.2; keep []; " +
				"result [2c.3g.40gb@0.0 1c.3g.40gb@0.2 2c.3g.40gb+gfx@4.0 1c.3g.40gb+gfx@4.2]"},
	} {
		c := card(t, tc.rows)
		p, err := c.Plan(stand(t, c, tc.standing), counts(t, tc.want))
		if err != nil {
			t.Errorf("%s: %v", tc.name, err)
		} else if p.text() != tc.plan {
			t.Errorf("%s:\n got %s\nwant %s", tc.name, p.text(), tc.plan)
		}
	}
}

// TestPlanBesideWhatIsNotInTheTable: an instance that stands is true, whatever
// the driver's table says.
func TestPlanBesideWhatIsNotInTheTable(t *testing.T) {
	c := card(t, five)
	me := Placement{Profile: name(t, "1g.10gb+me"), Start: 0, Size: 1}
	odd := Placement{Profile: name(t, "2g.20gb"), Start: 5, Size: 2}
	for _, tc := range []struct {
		standing []Standing
		want     string
		plan     string
	}{
		{[]Standing{{Placement: me}}, "1x3g.40gb", "destroy 1g.10gb+me@0; create 3g.40gb@4; keep []; result [3g.40gb@4]"},
		{[]Standing{{Placement: me, Pinned: true}}, "1x3g.40gb", "blocked by 1g.10gb+me@0!; keep []; result [1g.10gb+me@0]"},
		{[]Standing{{Placement: odd, Pinned: true}}, "1x2g.20gb 1x3g.40gb", "create 3g.40gb@0; keep [2g.20gb@5]; result [3g.40gb@0 2g.20gb@5]"},
		{[]Standing{{Placement: odd}, {Placement: odd}}, "1x2g.20gb", "keep [2g.20gb@5]; result [2g.20gb@5]"},
		{[]Standing{{Pinned: true, Holder: "a"}}, "1x2g.20gb", "blocked by 0g.0gb@0!a; keep []; result [0g.0gb@0]"},
		// Two that cannot both be there: one of them has to go.
		{[]Standing{{Placement: me, Pinned: true, Holder: "a"}, {Placement: at(t, c, "1g.10gb@0"), Pinned: true, Holder: "b"}}, "1x1g.10gb",
			"blocked by 1g.10gb+me@0!a; keep [1g.10gb@0]; result [1g.10gb@0 1g.10gb+me@0]"},
	} {
		p, err := c.Plan(tc.standing, counts(t, tc.want))
		if err != nil || p.text() != tc.plan {
			t.Errorf("%v -> %s:\n got %s %v\nwant %s", tc.standing, tc.want, p.text(), err, tc.plan)
		}
	}
	// What stands is not legal, and what is made has no part in that.
	held := []Standing{
		{Placement: Placement{Profile: name(t, "1g.10gb+me"), Start: 0, Size: 1}, Pinned: true},
		{Placement: Placement{Profile: name(t, "1g.10gb+me"), Start: 1, Size: 1}, Pinned: true},
	}
	full := card(t, seven)
	if p, err := full.Make(held, at(t, full, "1g.10gb@2")); err != nil || len(p.Steps) != 1 {
		t.Errorf("make 1g.10gb@2 beside %v: %s %v", held, p.text(), err)
	}
	if p, err := full.Make(held, at(t, full, "1g.10gb+me@2")); err != nil || len(p.Blocked) != 2 {
		t.Errorf("make 1g.10gb+me@2 beside %v: %s %v", held, p.text(), err)
	}
	if p, err := c.Plan(make([]Standing, 101), nil); !errors.Is(err, gpu.ErrNotSupported) {
		t.Errorf("with 101 instances: %s %v", p.text(), err)
	}
	if p, err := c.Make(nil, me); !errors.Is(err, gpu.ErrInvalid) {
		t.Errorf("make %s: %s %v", me, p.text(), err)
	}
	if p, err := c.Make(nil, odd); !errors.Is(err, gpu.ErrInvalid) {
		t.Errorf("make %s: %s %v", odd, p.text(), err)
	}
}

func TestMake(t *testing.T) {
	// A card that has engines for three, and one profile that needs two.
	engines := []row{
		{"1g.10gb", 1, 3, 1, []int{0, 1, 2, 3, 4}, &gpu.Engines{Decode: 1}},
		{"1g.10gb+big", 1, 1, 1, []int{4}, &gpu.Engines{Decode: 2}},
		{"2g.20gb", 2, 1, 2, []int{0, 2}, &gpu.Engines{}},
	}
	for _, tc := range []struct {
		name                string
		rows                []row
		standing, placement string
		plan                string
	}{
		{"into the free", seven, "1g.10gb@0", "3g.40gb@4",
			"create 3g.40gb@4; keep [1g.10gb@0]; result [1g.10gb@0 3g.40gb@4]"},
		{"warm", seven, "3g.40gb@4!x 1g.10gb@0", "3g.40gb@4",
			"keep [1g.10gb@0 3g.40gb@4]; result [1g.10gb@0 3g.40gb@4]"},
		{"over idle ones", seven, "1g.10gb@4 1g.10gb@0 2g.20gb@2", "3g.40gb@4",
			"destroy 1g.10gb@4; create 3g.40gb@4; keep [1g.10gb@0 2g.20gb@2]; result [1g.10gb@0 2g.20gb@2 3g.40gb@4]"},
		{"blocked", seven, "1g.10gb@4 1g.10gb@5!b 1g.10gb@6!a", "3g.40gb@4",
			"blocked by 1g.10gb@5!b 1g.10gb@6!a; keep []; result [1g.10gb@4 1g.10gb@5 1g.10gb@6]"},
		{"an empty GPU instance", seven, "3g.40gb@4?", "3g.40gb@4",
			"create 3g.40gb@4; keep []; result [3g.40gb@4]"},
		{"an empty GPU instance in the way", seven, "3g.40gb@4?", "1g.10gb@5",
			"destroy 3g.40gb@4; create 1g.10gb@5; keep []; result [1g.10gb@5]"},
		{"a split beside others", seven, "1c.3g.40gb@4.0!a 1c.3g.40gb@4.2", "1c.3g.40gb@4.1",
			"create 1c.3g.40gb@4.1; keep [1c.3g.40gb@4.0 1c.3g.40gb@4.2]; result [1c.3g.40gb@4.0 1c.3g.40gb@4.1 1c.3g.40gb@4.2]"},
		{"a split over others", seven, "1c.3g.40gb@4.0 1c.3g.40gb@4.2!a", "2c.3g.40gb@4.0",
			"destroy 1c.3g.40gb@4.0; create 2c.3g.40gb@4.0; keep [1c.3g.40gb@4.2]; result [2c.3g.40gb@4.0 1c.3g.40gb@4.2]"},
		{"the media extensions from another", seven, "1g.10gb+me@0 1g.10gb@1", "1g.10gb+me@6",
			"destroy 1g.10gb+me@0; create 1g.10gb+me@6; keep [1g.10gb@1]; result [1g.10gb@1 1g.10gb+me@6]"},
		{"the media extensions are held", seven, "1g.10gb+me@0!a 1g.10gb@1", "1g.10gb+me@6",
			"blocked by 1g.10gb+me@0!a; keep [1g.10gb@1]; result [1g.10gb+me@0 1g.10gb@1]"},
		// One of three must go: that which leaves room for 2g.20gb.
		{"one too many of a profile", engines, "1g.10gb@0 1g.10gb@1 1g.10gb@2", "1g.10gb@4",
			"destroy 1g.10gb@2; create 1g.10gb@4; keep [1g.10gb@0 1g.10gb@1]; result [1g.10gb@0 1g.10gb@1 1g.10gb@4]"},
		{"engines from idle ones", engines, "1g.10gb@0!a 1g.10gb@1 1g.10gb@2", "1g.10gb+big@4",
			"destroy 1g.10gb@1; destroy 1g.10gb@2; create 1g.10gb+big@4; keep [1g.10gb@0]; result [1g.10gb@0 1g.10gb+big@4]"},
		{"engines from the fewest holders", engines, "1g.10gb@0!a 1g.10gb@1!b 1g.10gb@3!a", "1g.10gb+big@4",
			"blocked by 1g.10gb@0!a 1g.10gb@3!a; keep [1g.10gb@1]; result [1g.10gb@0 1g.10gb@1 1g.10gb@3]"},
	} {
		c := card(t, tc.rows)
		p, err := c.Make(stand(t, c, tc.standing), at(t, c, tc.placement))
		if err != nil {
			t.Errorf("%s: %v", tc.name, err)
		} else if p.text() != tc.plan {
			t.Errorf("%s:\n got %s\nwant %s", tc.name, p.text(), tc.plan)
		}
	}
}

func TestChange(t *testing.T) {
	on, off := true, false
	fixed := Target{MIG: true, Geometry: counts(t, "2x3g.40gb")}
	demand := Target{MIG: true, OnDemand: true}
	for _, tc := range []struct {
		name     string
		enabled  bool
		pending  *bool
		standing string
		to       Target
		plan     string
	}{
		{"off stays off", false, nil, "", Target{}, "keep []; result []"},
		{"off, and on is pending", false, &on, "", Target{}, "disable MIG mode; keep []; result []"},
		{"on to off", true, nil, "1g.10gb@0 1g.10gb@6", Target{},
			"destroy 1g.10gb@0; destroy 1g.10gb@6; disable MIG mode; keep []; result []"},
		{"on to off, and off is pending", true, &off, "", Target{}, "disable MIG mode; keep []; result []"},
		{"on to off beside a holder", true, nil, "1g.10gb@0 1g.10gb@6!a", Target{},
			"blocked by 1g.10gb@6!a; keep []; result [1g.10gb@0 1g.10gb@6]"},
		{"to a geometry", true, nil, "3g.40gb@4", fixed,
			"create 3g.40gb@0; keep [3g.40gb@4]; result [3g.40gb@0 3g.40gb@4]"},
		{"to a geometry, and off is pending", true, &off, "3g.40gb@4", fixed,
			"enable MIG mode; create 3g.40gb@0; keep [3g.40gb@4]; result [3g.40gb@0 3g.40gb@4]"},
		{"to a geometry beside a holder, and off is pending", true, &off, "1g.10gb@4!a", fixed,
			"blocked by 1g.10gb@4!a; keep []; result [1g.10gb@4]"},
		{"off to a geometry", false, nil, "", fixed,
			"enable MIG mode; create 3g.40gb@0; create 3g.40gb@4; keep []; result [3g.40gb@0 3g.40gb@4]"},
		{"off to a geometry, and on is pending", false, &on, "", fixed,
			"enable MIG mode; create 3g.40gb@0; create 3g.40gb@4; keep []; result [3g.40gb@0 3g.40gb@4]"},
		{"off to on demand", false, nil, "", demand, "enable MIG mode; keep []; result []"},
		{"on demand", true, nil, "1g.10gb@0 1g.10gb@6!a", demand, "keep [1g.10gb@0 1g.10gb@6]; result [1g.10gb@0 1g.10gb@6]"},
		{"on demand, and off is pending", true, &off, "1g.10gb@6!a", demand, "enable MIG mode; keep [1g.10gb@6]; result [1g.10gb@6]"},
		{"to no instance", true, nil, "1g.10gb@0", Target{MIG: true}, "destroy 1g.10gb@0; keep []; result []"},
	} {
		c := card(t, seven)
		m := inventory(seven)
		m.Enabled, m.Pending = tc.enabled, tc.pending
		p, err := Change(m, c, stand(t, c, tc.standing), tc.to)
		if err != nil {
			t.Errorf("%s: %v", tc.name, err)
		} else if p.text() != tc.plan {
			t.Errorf("%s:\n got %s\nwant %s", tc.name, p.text(), tc.plan)
		}
	}

	m, whole := inventory(seven), []Standing{{Pinned: true, Holder: "a"}}
	m.Enabled = false
	c := card(t, seven)
	for _, to := range []Target{fixed, demand} {
		if p, err := Change(m, c, whole, to); err != nil || len(p.Steps) > 0 || len(p.Blocked) != 1 {
			t.Errorf("the mode changes under a holder of the whole GPU: %s %v", p.text(), err)
		}
	}
	if p, err := Change(m, c, whole, Target{}); err != nil || len(p.Steps)+len(p.Blocked) > 0 {
		t.Errorf("a whole GPU stays one, whoever holds it: %s %v", p.text(), err)
	}
	if p, err := Change(m, c, nil, Target{MIG: true, Geometry: counts(t, "3x3g.40gb")}); !errors.Is(err, gpu.ErrNoRoom) || len(p.Steps) > 0 {
		t.Errorf("what is not feasible changes the mode: %s %v", p.text(), err)
	}
	// Placements that are told only with MIG on.
	for i := range m.Profiles {
		m.Profiles[i].Placements = nil
	}
	c, err := NewCard(m)
	if err != nil {
		t.Fatal(err)
	}
	if p, err := Change(m, c, nil, fixed); err != nil || p.text() != "enable MIG mode; keep []; result []" {
		t.Errorf("with placements unknown: %s %v", p.text(), err)
	}
	if p, err := Change(m, c, nil, Target{MIG: true, Geometry: counts(t, "3x3g.40gb")}); !errors.Is(err, gpu.ErrNoRoom) {
		t.Errorf("with placements unknown, three of two: %s %v", p.text(), err)
	}
	none := &gpu.MIG{}
	if c, err = NewCard(none); err != nil {
		t.Fatal(err)
	}
	if p, err := Change(none, c, nil, demand); !errors.Is(err, gpu.ErrNotSupported) {
		t.Errorf("a GPU without MIG: %s %v", p.text(), err)
	}
	if p, err := Change(none, c, whole, Target{}); err != nil || len(p.Steps)+len(p.Blocked) > 0 {
		t.Errorf("a GPU without MIG stays so: %s %v", p.text(), err)
	}
}

func TestStand(t *testing.T) {
	m := inventory(seven)
	at := func(start, size int) gpu.Placement { return gpu.Placement{Start: start, Size: size} }
	m.Instances = []gpu.Instance{
		{Profile: "1c.3g.40gb", Placement: at(4, 4), Busy: true, Holder: "train/a"},
		{Profile: "1c.3g.40gb", Placement: at(4, 4)},
		{Profile: "1c.3g.40gb", Placement: at(4, 4)},
		{Profile: "1g.10gb", Placement: at(3, 1), CI: -1},
		{Profile: "2g.20gb", Placement: at(0, 0), Busy: true},
		{Profile: "1c.1g.10gb", Placement: at(2, 1)},
		{Profile: "strange", Placement: at(7, 1)},
	}
	var got []string
	for _, o := range Stand(m) {
		got = append(got, fmt.Sprintf("%s size %d pinned %v holder %q reason %q empty %v", o.Placement, o.Size, o.Pinned, o.Holder, o.Reason, o.Empty))
	}
	want := []string{
		`2g.20gb@0 size 2 pinned true holder "" reason "busy" empty false`,
		`1g.10gb@2 size 1 pinned false holder "" reason "" empty false`,
		`1g.10gb@3 size 1 pinned false holder "" reason "" empty true`,
		`1c.3g.40gb@4.0 size 4 pinned true holder "train/a" reason "busy" empty false`,
		`1c.3g.40gb@4.1 size 4 pinned false holder "" reason "" empty false`,
		`1c.3g.40gb@4.2 size 4 pinned false holder "" reason "" empty false`,
		`0g.0gb@7 size 1 pinned true holder "" reason "its profile \"strange\" has a name that cannot be read: a name is like 1g.10gb, 1g.10gb+me or 1c.3g.40gb" empty false`,
	}
	if !slices.Equal(got, want) {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	// What a driver tells in full stays as it is.
	m.Instances = []gpu.Instance{
		{Profile: "1c.3g.40gb", Placement: at(0, 4), CI: 1, CIStart: 2},
		{Profile: "2c.3g.40gb", Placement: at(0, 4), CI: 0, CIStart: 0},
	}
	if s := placements(Stand(m)); fmt.Sprint(s) != "[2c.3g.40gb@0.0 1c.3g.40gb@0.2]" {
		t.Errorf("got %v", s)
	}
}
