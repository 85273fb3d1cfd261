// SPDX-License-Identifier: Apache-2.0

package mig

import (
	"slices"
	"strings"
	"testing"
)

func TestParse(t *testing.T) {
	for _, tc := range []struct {
		in       string
		want     Name
		resource string
	}{
		{"1g.10gb", Name{Slices: 1, GB: 10}, "mig-1g.10gb"},
		{"7g.141gb", Name{Slices: 7, GB: 141}, "mig-7g.141gb"},
		{"1g.10gb+me", Name{Slices: 1, GB: 10, Attr: "+me"}, "mig-1g.10gb.me"},
		{"4g.96gb+gfx", Name{Slices: 4, GB: 96, Attr: "+gfx"}, "mig-4g.96gb.gfx"},
		{"1g.24gb-me", Name{Slices: 1, GB: 24, Attr: "-me"}, "mig-1g.24gb-me"},
		{"1g.24gb+me.all", Name{Slices: 1, GB: 24, Attr: "+me.all"}, "mig-1g.24gb.me.all"},
		{"1c.3g.40gb", Name{Compute: 1, Slices: 3, GB: 40}, "mig-1c.3g.40gb"},
		{"1g.0gb", Name{Slices: 1}, "mig-1g.0gb"},
		{"2g.0gb+gfx", Name{Slices: 2, Attr: "+gfx"}, "mig-2g.0gb.gfx"},
		{"1c.2g.0gb", Name{Compute: 1, Slices: 2}, "mig-1c.2g.0gb"},
		{"1c.2g.24gb+me", Name{Compute: 1, Slices: 2, GB: 24, Attr: "+me"}, "mig-1c.2g.24gb.me"},
	} {
		got, err := Parse(tc.in)
		if err != nil {
			t.Errorf("Parse(%q): %v", tc.in, err)
			continue
		}
		if got != tc.want {
			t.Errorf("Parse(%q) = %+v, want %+v", tc.in, got, tc.want)
		}
		if got.String() != tc.in {
			t.Errorf("Parse(%q) prints as %q", tc.in, got)
		}
		if got.Resource() != tc.resource {
			t.Errorf("Parse(%q).Resource() = %q, want %q", tc.in, got.Resource(), tc.resource)
		}
	}
}

func TestParseRefuses(t *testing.T) {
	for _, tc := range []struct{ in, reason string }{
		{"", "it is empty"},
		{"1g", "a name is like 1g.10gb"},
		{"10gb", "a name is like 1g.10gb"},
		{"1.10gb", "a name is like 1g.10gb"},
		{"1g.10", "a name is like 1g.10gb"},
		{"1g.10GB", "a name is like 1g.10gb"},
		{"1G.10gb", "a name is like 1g.10gb"},
		{"g.10gb", "a name is like 1g.10gb"},
		{"0g.10gb", "a name is like 1g.10gb"},
		{"01g.10gb", "a name is like 1g.10gb"},
		{"1g.00gb", "a name is like 1g.10gb"},
		{"0c.1g.0gb", "a name is like 1g.10gb"},
		{"1g.gb", "a name is like 1g.10gb"},
		{"1g.010gb", "a name is like 1g.10gb"},
		{"-1g.10gb", "a name is like 1g.10gb"},
		{"１g.10gb", "a name is like 1g.10gb"},
		{"100g.10gb", "a name is like 1g.10gb"},
		{"1g.10000gb", "a name is like 1g.10gb"},
		{" 1g.10gb", "a name is like 1g.10gb"},
		{"1g.10gb ", "a name is like 1g.10gb"},
		{"1g.10gb+", "a name is like 1g.10gb"},
		{"1g.10gb+me.", "a name is like 1g.10gb"},
		{"1g.10gb+me+gfx", "a name is like 1g.10gb"},
		{"1g.10gb+me-gfx", "a name is like 1g.10gb"},
		{"1g.10gb+me,gfx", "a name is like 1g.10gb"},
		{"1g.10gb+ME", "a name is like 1g.10gb"},
		{"1g.10gb+1me", "a name is like 1g.10gb"},
		{"1g.10gb.me", "a name is like 1g.10gb"},
		{"mig-1g.10gb", "a name is like 1g.10gb"},
		{"3c.3g.40gb", "leave out 3c."},
		{"4c.3g.40gb", "3g has no 4 compute slices"},
		{"1c.1c.3g.40gb", "a name is like 1g.10gb"},
		{"c.3g.40gb", "a name is like 1g.10gb"},
		{"1g.10gb+" + strings.Repeat("x", 60), "longer than 59 characters"},
	} {
		got, err := Parse(tc.in)
		if err == nil {
			t.Errorf("Parse(%q) = %+v, want an error", tc.in, got)
			continue
		}
		if got != (Name{}) {
			t.Errorf("Parse(%q) fails and returns %+v", tc.in, got)
		}
		if !strings.Contains(err.Error(), tc.reason) {
			t.Errorf("Parse(%q): %v, want a reason with %q", tc.in, err, tc.reason)
		}
	}
}

func TestCanonical(t *testing.T) {
	for in, want := range map[string]string{
		"1c.1g.5gb+me": "1g.5gb+me",
		"3c.3g.40gb":   "3g.40gb",
		"1c.3g.40gb":   "1c.3g.40gb",
		"1g.10gb":      "1g.10gb",
		"c.g.10gb":     "c.g.10gb",
		"01c.01g.5gb":  "01c.01g.5gb",
		"":             "",
	} {
		if got := Canonical(in); got != want {
			t.Errorf("Canonical(%q) = %q, want %q", in, got, want)
		}
	}
}

func TestCompareOrdersBySize(t *testing.T) {
	want := []string{"1g.10gb", "1g.10gb+me", "1g.20gb", "2g.20gb", "3g.40gb", "1c.3g.40gb", "2c.3g.40gb", "7g.80gb"}
	var names []Name
	for _, s := range []string{"7g.80gb", "2c.3g.40gb", "1g.10gb+me", "3g.40gb", "1g.20gb", "1c.3g.40gb", "1g.10gb", "2g.20gb"} {
		n, err := Parse(s)
		if err != nil {
			t.Fatal(err)
		}
		names = append(names, n)
	}
	slices.SortFunc(names, Compare)
	for i, n := range names {
		if n.String() != want[i] {
			t.Fatalf("order is %v, want %v", names, want)
		}
	}
	if got := names[6].GPUInstance().String(); got != "3g.40gb" {
		t.Errorf("the GPU instance of %v is %s, want 3g.40gb", names[6], got)
	}
}

// FuzzParse holds that one profile has one spelling: what parses prints back
// as it was, what is printed parses back as it was, and a resource name leads
// to one profile only.
func FuzzParse(f *testing.F) {
	for _, s := range []string{
		"1g.10gb", "1g.10gb+me", "1g.24gb-me", "1g.24gb+me.all", "1c.3g.40gb", "4g.96gb+gfx",
		"3c.3g.40gb", "01g.5gb", "1g.5gb+me,gfx", "", "g.gb", "1g.10gb++", "9c.99g.9999gb-a.b.c",
		"1g.10gb-agb.b", // ended in "gb." inside the attribute, and was no resource
	} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		n, err := Parse(s)
		if c := Canonical(s); c != s {
			if err == nil {
				t.Fatalf("Parse(%q) accepts what Canonical rewrites to %q", s, c)
			}
			if _, err := Parse(c); err != nil {
				t.Fatalf("Canonical(%q) = %q, which does not parse: %v", s, c, err)
			}
		}
		if err != nil {
			if strings.ContainsAny(err.Error(), "\n\r") {
				t.Fatalf("Parse(%q): the error is more than one line: %v", s, err)
			}
			return
		}
		if n.String() != s {
			t.Fatalf("Parse(%q) prints as %q", s, n)
		}
		again, err := Parse(n.String())
		if err != nil || again != n {
			t.Fatalf("Parse(%q) = %+v, %v, want %+v", n, again, err, n)
		}
		r := n.Resource()
		if len(r) > 63 || strings.Contains(r, "+") {
			t.Fatalf("%q has the resource name %q", s, r)
		}
		if back, err := ParseResource(r); err != nil || back != n {
			t.Fatalf("the resource %q of %q leads to %v, %v", r, s, back, err)
		}
	})
}
